"""Where training stands, in one safetensors file: written whole or not at all, and never a pickle."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from oodometer.errors import OodometerError, OodometerWarning

RUNNING, FINISHED = "checkpoint.safetensors", "network.safetensors"
SCHEMA = 1


@dataclass(frozen=True)
class Folder:
    """The files of one training: its checkpoint while it runs, its network when it is done.

    `identity` is everything that decides the result; a folder that holds another training is refused.
    """

    path: Path
    identity: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        for partial in self.path.glob(".*.partial"):
            partial.unlink(missing_ok=True)

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], *, finished: bool = False) -> None:
        """Write the checkpoint, or the finished network, after which no checkpoint is needed."""
        write(self.path / (FINISHED if finished else RUNNING), tensors, {**facts, "training": self._digest})
        if finished:
            (self.path / RUNNING).unlink(missing_ok=True)

    def finished(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The trained network and its facts."""
        return self._read(FINISHED)

    def running(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last epoch that was finished."""
        return self._read(RUNNING)

    def _read(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What a file holds; a damaged one is said so and left out, since training gives the same again."""
        path = self.path / name
        try:
            tensors, facts = read(path)
        except FileNotFoundError:
            return None
        except DamagedFileError as error:
            warnings.warn(f"{error}; trained anew", OodometerWarning, stacklevel=3)
            return None
        if facts["training"] != self._digest:
            raise OodometerError(
                f"{path} belongs to another training (other data, recipe, settings or seed): choose another folder, "
                "or delete this one"
            )
        return tensors, facts

    @property
    def _digest(self) -> str:
        return digest(self.identity)


@dataclass(frozen=True)
class Shelf:
    """A folder of trainings, each in a folder named by what decides it."""

    path: Path

    def folder(self, identity: Mapping[str, Any]) -> Folder:
        """The place of this training."""
        return Folder(self.path / digest(identity)[:24], identity)


def digest(identity: Mapping[str, Any]) -> str:
    """What tells two trainings apart."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


class DamagedFileError(OodometerError):
    """A file whose content is not what was written."""


def write(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Tensors and plain JSON facts; the file appears when it is complete."""
    from safetensors.torch import save

    path.parent.mkdir(parents=True, exist_ok=True)
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    told = json.dumps({"schema": SCHEMA, **facts, "crc32": _checksum(host)})
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(save(host, metadata={"facts": told}))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a file that `write` made, verified."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise FileNotFoundError(path)
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("facts", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, ValueError) as error:
        raise DamagedFileError(f"{path} is truncated or damaged ({error})") from None
    if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
        raise DamagedFileError(f"{path} is no checkpoint of this version")
    if facts.pop("crc32") != _checksum(tensors):
        raise DamagedFileError(f"{path} does not match its checksum")
    return tensors, facts


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(name.encode(), found)
        found = zlib.crc32(tensors[name].reshape(-1).numpy().data, found)
    return found


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix.`, without it."""
    return {name.removeprefix(f"{prefix}."): t for name, t in tensors.items() if name.startswith(f"{prefix}.")}


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under `prefix.`."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}

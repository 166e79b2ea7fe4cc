"""A bank written while it is being extracted: columns on disk, rows that are done, and how to go on after a stop."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oodometer.bank import Bank, Head, differences, file_entry
from oodometer.errors import OodometerError

PROGRESS, LOG = "progress.json", "extraction.json"
NAMES = "samples.txt"
SECONDS = 5.0
"""How much work a killed process may lose."""


@dataclass
class Store:
    """Columns of `rows` rows in a folder (or in memory), filled from the first row to the last.

    `key` is everything that determines the content; a folder of another key is never touched.
    """

    folder: Path | None
    key: Mapping[str, Any]
    rows: int
    done: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    """What the first batch found (head, layers, …), kept for going on."""
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    _saved: float = field(default_factory=time.monotonic)

    @classmethod
    def open(cls, folder: Path | None, key: Mapping[str, Any], rows: int, *, overwrite: bool) -> Store:
        """A new store, or the unfinished one of this very extraction."""
        store = cls(folder, key, rows)
        if folder is None:
            return store
        if folder.exists():
            if overwrite:
                _remove(folder)
            else:
                store._resume(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return store

    def write(self, start: int, columns: Mapping[str, NDArray[Any]]) -> None:
        """The next rows; the first call fixes each column's shape and dtype."""
        if not self.columns:
            self.columns = {name: self._new(place, name, x) for place, (name, x) in enumerate(columns.items())}
        if start != self.done or list(columns) != list(self.columns):
            raise AssertionError("rows are written once, in order, with all their columns")
        count = len(next(iter(columns.values())))
        for name, values in columns.items():
            target = self.columns[name]
            if values.shape[1:] != target.shape[1:]:
                raise OodometerError(
                    f"column {name!r}: rows {start} to {start + count - 1} have shape {values.shape[1:]}, earlier ones "
                    f"{target.shape[1:]}: declare a resize or crop, or leave that layer out"
                )
            target[start : start + count] = values
        self.done = start + count
        if time.monotonic() - self._saved > SECONDS:
            self.save()

    def save(self) -> None:
        """Put on disk what is written so far, the count of rows last."""
        if self.folder is None or not self.columns:
            return
        for column in self.columns.values():
            if isinstance(column, np.memmap):
                column.flush()
        facts = {"key": self.key, "rows": self.rows, "done": self.done, "facts": self.facts, "columns": self._files()}
        _write_json(self.folder / PROGRESS, facts)
        self._saved = time.monotonic()

    def finish(
        self, head: Head | None, provenance: Mapping[str, Any], names: list[str] | None, log: Mapping[str, Any]
    ) -> Bank:
        """The bank, complete: `bank.json` comes last and ends the extraction. The log is no part of its identity."""
        self.save()
        if self.folder is None:
            return Bank(self.columns, head=head, provenance=provenance)
        columns = {
            name: np.load(self.folder / file, mmap_mode="r", allow_pickle=False) for name, file in self._files().items()
        }
        bank = Bank(columns, head=head, provenance=provenance)
        _write_json(self.folder / LOG, log)
        if names is not None:
            (self.folder / NAMES).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
        entries = {name: file_entry(self.folder / file, columns[name]) for name, file in self._files().items()}
        bank.write_facts(self.folder, entries)
        (self.folder / PROGRESS).unlink()
        return Bank.open(self.folder, verify=False)

    # ------------------------------------------------------------------------------------------ helpers

    def _new(self, place: int, name: str, sample: NDArray[Any]) -> NDArray[Any]:
        shape = (self.rows, *sample.shape[1:])
        if self.folder is None:
            return np.empty(shape, sample.dtype)
        file = self.folder / f"{place:03d}.{_safe(name)}.npy"
        column = np.lib.format.open_memmap(file, mode="w+", dtype=sample.dtype, shape=shape)
        _reserve(file)
        return column

    def _files(self) -> dict[str, str]:
        return {name: f"{place:03d}.{_safe(name)}.npy" for place, name in enumerate(self.columns)}

    def _resume(self, folder: Path) -> None:
        if not folder.is_dir():
            raise OodometerError(f"{folder} is a file: choose another folder for the bank")
        found = _read_json(folder / PROGRESS)
        if found is None:
            if not any(folder.iterdir()):
                return
            raise OodometerError(
                f"{folder} exists and is no extraction to go on with: choose another folder, or "
                "overwrite=True (--overwrite)"
            )
        different = differences(found["key"], self.key)
        if different:
            raise OodometerError(
                f"{folder} holds {found['done']:,} rows of another extraction ({', '.join(different)} differ): choose "
                "another folder, or overwrite=True (--overwrite)"
            )
        for name, file in found["columns"].items():
            try:
                self.columns[name] = np.lib.format.open_memmap(folder / file, mode="r+")
            except (OSError, ValueError) as error:
                raise OodometerError(
                    f"{folder / file} cannot be continued ({error}): start again with overwrite=True (--overwrite)"
                ) from None
        self.done, self.facts = int(found["done"]), found["facts"]


def finished(folder: Path, key: Mapping[str, Any]) -> Bank | None:
    """The bank of this very extraction if it is complete; an error if the folder holds another bank."""
    if not (folder / "bank.json").exists():
        return None
    bank = Bank.open(folder)
    different = differences({name: bank.provenance.get(name) for name in key}, key)
    if different:
        raise OodometerError(
            f"{folder} holds a bank of another extraction ({', '.join(different)} differ): choose another folder, or "
            "overwrite=True (--overwrite)"
        )
    return bank


def _reserve(file: Path) -> None:
    """Take the space now: a mapped file that outgrows its disk ends the process without a word."""
    if not hasattr(os, "posix_fallocate"):
        return
    size = file.stat().st_size
    try:
        with file.open("r+b") as stream:
            os.posix_fallocate(stream.fileno(), 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return  # a file system that cannot reserve
        free = shutil.disk_usage(file.parent).free
        raise OodometerError(
            f"{file} needs {size / 1e9:.2f} GB, {free / 1e9:.2f} GB are free: make room, choose another folder, fewer "
            "layers or dtype='float16'"
        ) from None


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name)


def _remove(folder: Path) -> None:
    """Only what an extraction or a bank consists of: a mistyped folder loses nothing else."""
    known = [*folder.glob("*.npy"), *(folder / name for name in ("bank.json", PROGRESS, LOG, NAMES))]
    strange = [entry.name for entry in folder.iterdir() if entry not in known]
    if strange:
        raise OodometerError(f"{folder} holds {strange[0]!r}, which is no part of a bank: choose another folder")
    shutil.rmtree(folder)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise OodometerError(f"{path} is damaged ({error}): start again with overwrite=True (--overwrite)") from None


def _write_json(path: Path, facts: Mapping[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)

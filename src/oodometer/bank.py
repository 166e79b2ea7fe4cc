"""A bank: rows × named columns + the classifier's head, read-only; everything downstream is a function of it."""

from __future__ import annotations

import hashlib
import html
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oodometer.arrays import (
    Array,
    Ints,
    block_rows,
    frozen,
    is_array,
    namespace,
    on_cpu,
    real,
    row_bytes,
    slices,
    take_rows,
    to_numpy,
)
from oodometer.errors import OodometerError

SCHEMA_VERSION = 1
CHECKED_ROWS = 4096
"""How many rows (evenly spaced) are compared when a bank has logits, features and a head."""


@dataclass(frozen=True, eq=False)
class Head:
    """The last linear layer: logits = features @ weight.T + bias."""

    weight: Array
    bias: Array

    def __post_init__(self) -> None:
        for name in ("weight", "bias"):
            value = getattr(self, name)
            value = value if is_array(value) else np.asarray(value)
            object.__setattr__(self, name, frozen(value) if isinstance(value, np.ndarray) else value)
        if self.weight.ndim != 2 or self.bias.shape != (self.weight.shape[0],):
            raise OodometerError(
                "Head needs weight (classes, features) and bias (classes,); found weight "
                f"{tuple(self.weight.shape)} and bias {tuple(self.bias.shape)}. "
                "For a layer without bias pass zeros; for a transposed weight pass weight.T."
            )
        for name in ("weight", "bias"):
            if not np.isfinite(to_numpy(getattr(self, name))).all():
                raise OodometerError(f"Head.{name} holds NaN or infinity; export the trained weights again")

    @property
    def classes(self) -> int:
        return int(self.weight.shape[0])

    def __call__(self, features: Array) -> Array:
        """Logits of these features, on the features' device and in their working precision."""
        from oodometer.arrays import like

        features = real(features)
        return features @ like(to_numpy(self.weight), features).T + like(to_numpy(self.bias), features)

    def same_as(self, other: Head) -> bool:
        return self is other or (
            np.array_equal(to_numpy(self.weight), to_numpy(other.weight))
            and np.array_equal(to_numpy(self.bias), to_numpy(other.bias))
        )

    def __repr__(self) -> str:
        return f"Head(classes={self.weight.shape[0]}, features={self.weight.shape[1]})"


class Bank:
    """Rows × named columns, with an optional classifier head. Immutable: `rows`, `concat`, `to` make new banks.

    >>> bank = Bank(features=h, labels=y, head=Head(W, b))
    >>> bank.logits                         # computed from features and head when absent
    >>> bank.rows(index); Bank.concat([a, b]); bank.save("bank"); Bank.open("bank")
    """

    def __init__(
        self,
        columns: Mapping[str, Array] | None = None,
        *,
        head: Head | None = None,
        provenance: Mapping[str, Any] | None = None,
        **columns_by_name: Array,
    ) -> None:
        named = {**(columns or {}), **columns_by_name}
        if not named:
            raise OodometerError("a Bank needs at least one column, e.g. Bank(features=…, labels=…)")
        self._columns = {name: _as_column(name, value) for name, value in named.items()}
        self._length = _common_length(self._columns)
        self._parts: tuple[Bank, ...] = ()
        self._index: slice | Ints | None = None
        self._start(head, provenance)
        self._check_widths()
        self._check_logits()

    def _start(self, head: Head | None, provenance: Mapping[str, Any] | None) -> None:
        self.head = head
        self.provenance: dict[str, Any] = dict(provenance or {})
        self.memory: dict[Any, Any] = {}
        self._fingerprint: str | None = None

    # ------------------------------------------------------------------------------------------ columns

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the stored columns."""
        return tuple(self._parts[0].columns if self._parts else self._columns)

    def __contains__(self, name: str) -> bool:
        """Whether a column can be had, stored or (logits) computed."""
        stored = self.columns
        return name in stored or (name == "logits" and "features" in stored and self.head is not None)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, name: str) -> Array:
        if name == "logits" and name not in self.columns:
            return self._computed_logits()
        if name not in self.columns:
            raise OodometerError(
                f"this bank has no column {name!r}; it has {_listed(self.columns)}"
                + (". Logits can be computed when features and a head are given" if name == "logits" else "")
            )
        if self._parts:
            if len(self._parts) == 1:
                return self._parts[0][name]
            return namespace(self._parts[0][name]).concat([part[name] for part in self._parts], axis=0)
        column = self._columns[name]
        if self._index is None:
            return column
        if isinstance(self._index, slice):
            return column[self._index, ...]
        return take_rows(column, self._index)

    @property
    def features(self) -> Array:
        return self["features"]

    @property
    def logits(self) -> Array:
        return self["logits"]

    @property
    def labels(self) -> Ints:
        """Integer labels, always as NumPy (they are needed to fit, never to score)."""
        labels: Ints = to_numpy(self["labels"])
        return labels

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the intermediate-layer columns, in stored order."""
        return tuple(name for name in self.columns if name.startswith("layers."))

    @property
    def classes(self) -> int:
        """Number of classes: of the head, else of the logits, else of the labels."""
        if self.head is not None:
            return self.head.classes
        if "logits" in self.columns:
            return int(self.row_shape("logits")[0])
        return int(self.labels.max()) + 1

    def row_shape(self, name: str) -> tuple[int, ...]:
        """Shape of one row of a stored column, without reading it."""
        bank = self
        while bank._parts:
            bank = bank._parts[0]
        return tuple(int(size) for size in bank._columns[name].shape[1:])

    @property
    def gathers(self) -> bool:
        """Whether reading a column copies its rows: they were picked one by one."""
        return isinstance(self._index, np.ndarray) or any(part.gathers for part in self._parts)

    @property
    def width(self) -> int:
        """Bytes of one row over the penultimate features and logits: what a block of rows costs."""
        first = self._parts[0] if self._parts else self
        if first._parts:
            return first.width
        names: list[str] = [name for name in ("features", "logits") if name in first._columns]
        names = names or list(first._columns)
        total = sum(row_bytes(first._columns[name]) for name in names)
        if "logits" not in first._columns and self.head is not None and "features" in first._columns:
            total += 4 * self.head.classes
        return total

    @property
    def xp(self) -> Any:
        """The array namespace of the columns."""
        return namespace(self.sample)

    @property
    def on_cpu(self) -> bool:
        """Whether the columns live in the host's memory."""
        return on_cpu(self.sample)

    @property
    def sample(self) -> Array:
        """One of the stored arrays: where the bank lives, and what its namespace is."""
        bank = self
        while bank._parts:
            bank = bank._parts[0]
        for name in ("features", "logits"):
            if name in bank._columns:
                return bank._columns[name]
        return next(iter(bank._columns.values()))

    # ------------------------------------------------------------------------------------------ new banks

    def rows(self, index: slice | npt.ArrayLike) -> Bank:
        """The bank of these rows (slice, integer index or boolean mask); nothing is copied until read."""
        if isinstance(index, slice):
            return self._sliced(*index.indices(len(self)))
        return self._picked(_as_index(index, len(self)))

    def _sliced(self, start: int, stop: int, step: int) -> Bank:
        if step != 1:
            return self._picked(np.arange(start, stop, step))
        stop = max(start, stop)
        if self._parts:
            edges = np.cumsum([0, *map(len, self._parts)])
            inside = [
                part._sliced(max(start - a, 0), min(stop - a, len(part)), 1)
                for part, a in zip(self._parts, edges[:-1].tolist(), strict=True)
                if start < a + len(part) and stop > a
            ]
            return self._joined(inside or [self._parts[0]._sliced(0, 0, 1)])
        if self._index is None:
            return self._child(slice(start, stop), stop - start)
        if isinstance(self._index, slice):
            return self._child(slice(self._index.start + start, self._index.start + stop), stop - start)
        return self._child(self._index[start:stop], stop - start)

    def _picked(self, index: Ints) -> Bank:
        if self._parts:
            # Rows of several parts in any order: gathered now, since no view can express them.
            columns = {name: take_rows(self[name], index) for name in self.columns}
            bank = Bank.__new__(Bank)
            bank._columns, bank._length, bank._parts, bank._index = columns, len(index), (), None
            bank._start(self.head, self.provenance)
            return bank
        if isinstance(self._index, slice):
            index = index + self._index.start
        elif self._index is not None:
            index = self._index[index]
        return self._child(index, len(index))

    def _child(self, index: slice | Ints | None, length: int) -> Bank:
        bank = Bank.__new__(Bank)
        bank._columns, bank._length, bank._parts, bank._index = self._columns, length, (), index
        bank._start(self.head, self.provenance)
        return bank

    def _joined(self, parts: list[Bank]) -> Bank:
        if len(parts) == 1:
            return parts[0]
        bank = Bank.__new__(Bank)
        bank._columns, bank._index = {}, None
        bank._length, bank._parts = sum(map(len, parts)), tuple(parts)
        bank._start(self.head, self.provenance)
        return bank

    @classmethod
    def concat(cls, banks: Iterable[Bank]) -> Bank:
        """One bank after the other. The parts are kept: what is derived from them adds up instead of repeating."""
        parts = [part for bank in banks for part in (bank._parts or (bank,))]
        if not parts:
            raise OodometerError("Bank.concat needs at least one bank")
        first = parts[0]
        for place, part in enumerate(parts[1:], 1):
            if set(part.columns) != set(first.columns):
                raise OodometerError(
                    f"Bank.concat needs equal columns; bank 0 has {_listed(first.columns)}, bank {place} has "
                    f"{_listed(part.columns)}. Drop the extra ones with bank.select([...])."
                )
            for name in first.columns:
                if part.row_shape(name) != first.row_shape(name):
                    raise OodometerError(
                        f"Bank.concat: rows of column {name!r} have shape {first.row_shape(name)} in bank 0 and "
                        f"{part.row_shape(name)} in bank {place}"
                    )
            if (part.head is None) != (first.head is None) or (
                part.head is not None and first.head is not None and not part.head.same_as(first.head)
            ):
                raise OodometerError(f"Bank.concat: banks 0 and {place} have different heads (two networks?)")
            check_same_extraction(f"Bank.concat: bank {place}", part, "bank 0", first)
        return first._joined(parts)

    @property
    def parts(self) -> tuple[Bank, ...]:
        """The banks this one was joined from; itself if it was not."""
        return self._parts or (self,)

    def select(self, names: Iterable[str]) -> Bank:
        """The bank with these columns only; nothing is copied until read."""
        names = list(names)
        if self._parts:
            return self._joined([part.select(names) for part in self._parts])
        if not names or not set(names) <= set(self._columns):
            return self._replaced({name: self[name] for name in names}, self.head)
        bank = self._child(self._index, len(self))
        bank._columns = {name: self._columns[name] for name in names}
        return bank

    def with_columns(self, **columns: Array) -> Bank:
        """The bank with these columns added or replaced."""
        return self._replaced({**{name: self[name] for name in self.columns}, **columns}, self.head)

    def with_head(self, head: Head | None) -> Bank:
        """The bank with another head; nothing else changes."""
        if self._parts:
            bank = self._joined([part.with_head(head) for part in self._parts])
        else:
            bank = Bank.__new__(Bank)
            bank._columns, bank._length, bank._parts, bank._index = self._columns, len(self), (), self._index
            bank._start(head, self.provenance)
        bank.head = head
        return bank

    def _replaced(self, columns: Mapping[str, Array], head: Head | None) -> Bank:
        return Bank(columns, head=head, provenance=self.provenance)

    def to(self, target: Any) -> Bank:
        """The bank on a device ("cuda", "cpu") or in a namespace ("numpy", "torch", or the module)."""
        if self._parts:
            return self._joined([part.to(target) for part in self._parts])
        moved = {name: _moved(self[name], target) for name in self.columns}
        bank = Bank.__new__(Bank)
        bank._columns, bank._length, bank._parts, bank._index = moved, len(self), (), None
        bank._start(self.head, self.provenance)
        return bank

    def blocks(self, rows: int | None = None) -> Iterator[Bank]:
        """Consecutive sub-banks of bounded memory (or of so many rows); none crosses a part."""
        for part in self.parts:
            step = rows or block_rows(part.width, cpu=part.on_cpu)
            for block in slices(len(part), step):
                yield part if len(part) <= step else part.rows(block)

    # ------------------------------------------------------------------------------------------ logits and head

    def _computed_logits(self) -> Array:
        if self.head is None or "features" not in self.columns:
            raise OodometerError(
                f"logits are needed; this bank has {_listed(self.columns)} and "
                f"{'no head' if self.head is None else 'a head'}. Give logits=…, or features=… and head=Head(W, b)."
            )
        return self.head(self.features)

    def _check_widths(self) -> None:
        if self.head is None:
            return
        classes, width = self.head.weight.shape
        if "features" in self._columns and tuple(self._columns["features"].shape[1:]) != (width,):
            raise OodometerError(
                f"the head reads {width} features, the column 'features' has rows of shape "
                f"{tuple(self._columns['features'].shape[1:])}: give the penultimate features of this head"
            )
        if "logits" in self._columns and tuple(self._columns["logits"].shape[1:]) != (classes,):
            raise OodometerError(
                f"the head has {classes} classes, the column 'logits' has rows of shape "
                f"{tuple(self._columns['logits'].shape[1:])}"
            )

    def _check_logits(self) -> None:
        """Refuse a bank whose logits are not what its head says (another layer, another network, a ReLU missed)."""
        if self.head is None or not {"features", "logits"} <= set(self._columns) or not len(self):
            return
        pick = np.unique(np.linspace(0, len(self) - 1, min(len(self), CHECKED_ROWS)).astype(np.int64))
        given = to_numpy(take_rows(self._columns["logits"], pick)).astype(np.float64)
        told = to_numpy(self.head(take_rows(self._columns["features"], pick))).astype(np.float64)
        if not (np.isfinite(given).all() and np.isfinite(told).all()):
            return  # reported with column and row where the values are used
        half = any(str(self._columns[name].dtype).endswith("float16") for name in ("logits", "features"))
        tolerance = (2e-2 if half else 2e-3) * max(1.0, float(np.abs(given).max()))
        gap = np.abs(given - told)
        if gap.max() > tolerance:
            row = int(pick[gap.max(axis=1).argmax()])
            raise OodometerError(
                f"logits and head(features) disagree by up to {gap.max():.3g} (row {row}, tolerance {tolerance:.3g}): "
                "the features are not this head's input, or the head is another network's. "
                "Drop one of the three, or extract them together."
            )

    # ------------------------------------------------------------------------------------------ identity

    @property
    def fingerprint(self) -> str:
        """A hash of the content: columns, head and provenance; equal for equal banks, on any machine."""
        if self._fingerprint is None:
            digest = hashlib.sha256()
            for name in sorted(self.columns):
                digest.update(f"{name}:{_column_digest(self, name)}\n".encode())
            if self.head is not None:
                for array in (self.head.weight, self.head.bias):
                    digest.update(_array_digest(to_numpy(array)).encode())
            digest.update(json.dumps(self.provenance, sort_keys=True, default=str).encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def __getstate__(self) -> dict[str, Any]:
        """Derived quantities stay behind: they can be computed again."""
        return {**vars(self), "memory": {}}

    def __repr__(self) -> str:
        columns = ", ".join(
            f"{name}{list(self.row_shape(name)) or ''} {str(self._dtype(name)).removeprefix('torch.')}"
            for name in self.columns
        )
        head = f", head {self.head.classes}×{self.head.weight.shape[1]}" if self.head else ""
        parts = f", {len(self._parts)} parts" if self._parts else ""
        return f"Bank({len(self):,} rows: {columns}{head}{parts})"

    def _dtype(self, name: str) -> Any:
        bank = self
        while bank._parts:
            bank = bank._parts[0]
        return bank._columns[name].dtype

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(self.row_shape(name)))}</td>"
            f"<td>{html.escape(str(self._dtype(name)))}</td></tr>"
            for name in self.columns
        )
        return (
            f"<b>Bank</b> · {len(self):,} rows · {html.escape(repr(self.head)) if self.head else 'no head'}"
            f"<table><tr><th>column</th><th>row shape</th><th>dtype</th></tr>{rows}</table>"
        )

    # ------------------------------------------------------------------------------------------ disk

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write one `.npy` a column and `bank.json` with checksums; complete or not at all."""
        path = Path(path)
        if path.exists() and not overwrite:
            raise OodometerError(f"{path} exists: choose another folder, or pass overwrite=True")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
        partial.mkdir()
        try:
            self._write(partial)
            if path.exists():
                retired = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old")
                path.rename(retired)
                partial.rename(path)
                shutil.rmtree(retired)
            else:
                partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return path

    def _write(self, folder: Path) -> None:
        self.write_facts(folder, {name: _write_column(folder, name, self) for name in self.columns})

    def write_facts(self, folder: Path, columns: Mapping[str, dict[str, Any]]) -> None:
        """Write the head and, last of all, `bank.json` beside column files that are there (their `file_entry`s)."""
        head = None
        if self.head is not None:
            head = {}
            for name, array in (("weight", self.head.weight), ("bias", self.head.bias)):
                np.save(folder / f"head.{name}.npy", to_numpy(array), allow_pickle=False)
                head[name] = file_entry(folder / f"head.{name}.npy", to_numpy(array))
        facts = {
            "schema": SCHEMA_VERSION,
            "rows": len(self),
            "columns": dict(columns),
            "head": head,
            "provenance": self.provenance,
            "fingerprint": self.fingerprint,
        }
        partial = folder / ".bank.json.partial"
        partial.write_text(json.dumps(facts, indent=2, default=str) + "\n")
        partial.replace(folder / "bank.json")

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: bool = True) -> Bank:
        """Open a saved bank; columns are memory-mapped. `verify=False` skips the checksums of very large banks."""
        path = Path(path)
        facts = _read_facts(path)
        columns = {
            name: _open_column(path, entry, f"column {name!r}", verify, mmap=True)
            for name, entry in facts["columns"].items()
        }
        head = None
        if facts["head"] is not None:
            loaded = {
                name: _open_column(path, entry, f"head {name}", verify, mmap=False)
                for name, entry in facts["head"].items()
            }
            head = Head(**loaded)
        bank = cls(columns, head=head, provenance=facts["provenance"])
        if len(bank) != facts["rows"]:
            raise OodometerError(f"{path}: bank.json says {facts['rows']} rows, the columns have {len(bank)}")
        bank._fingerprint = facts["fingerprint"]
        return bank


# ---------------------------------------------------------------------------------------------- extraction

COMPARED = ("weights", "preprocessing", "dtype", "amp")
"""Of how banks were extracted, what has to be equal for their rows to be comparable."""


def check_same_extraction(what: str, bank: Bank, other: str, reference: Bank | Mapping[str, Any] | None) -> None:
    """Refuse a bank of another network or preprocessing; banks that do not say how they were made pass."""
    known = reference.provenance.get("extraction") if isinstance(reference, Bank) else reference
    found = bank.provenance.get("extraction")
    if not isinstance(known, Mapping) or not isinstance(found, Mapping):
        return
    told = [name for name in COMPARED if name != "preprocessing" or (known.get(name) and found.get(name))]
    different = differences({name: known.get(name) for name in told}, {name: found.get(name) for name in told})
    if different:
        raise OodometerError(
            f"{what} was extracted differently from {other} ({', '.join(different)} differ): extract both with the "
            "same network and preprocessing"
        )


def differences(one: Mapping[str, Any], other: Mapping[str, Any], path: str = "") -> list[str]:
    """Names of the entries in which two nested mappings differ."""
    found = []
    for name in sorted({*one, *other}):
        a, b = one.get(name), other.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{path}{name}.")
        elif a != b:
            found.append(f"{path}{name}")
    return found


# ---------------------------------------------------------------------------------------------- helpers


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"


def _as_column(name: str, value: Any) -> Array:
    if isinstance(value, list | tuple) or not is_array(value):
        value = np.asarray(value)
    if value.ndim == 0:
        raise OodometerError(f"column {name!r} must have one entry a row; found a single number")
    if isinstance(value, np.ndarray) and value.dtype.kind not in "fiub":
        raise OodometerError(
            f"column {name!r} must be numeric; found dtype {value.dtype}. "
            "Encode labels as integers 0 … classes−1, e.g. with np.unique(labels, return_inverse=True)."
        )
    if isinstance(value, np.ndarray) and not isinstance(value, np.memmap) and value.flags.writeable:
        value = value.view()
        value.flags.writeable = False
    if name == "labels":
        _check_labels(value)
    return value


def _check_labels(labels: Array) -> None:
    found = to_numpy(labels)
    if found.ndim != 1 or found.dtype.kind not in "iub":
        raise OodometerError(
            f"labels must be one integer a row; found shape {found.shape}, dtype {found.dtype}. "
            "Use labels.astype(int), or argmax for one-hot rows."
        )


def _common_length(columns: Mapping[str, Array]) -> int:
    lengths = {name: int(column.shape[0]) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
        raise OodometerError(
            "all columns need the same number of rows; found "
            + ", ".join(f"{name}: {length}" for name, length in lengths.items())
        )
    return next(iter(lengths.values()))


def _as_index(index: Any, length: int) -> Ints:
    index = to_numpy(index) if is_array(index) else np.asarray(index)
    if index.dtype == bool:
        if index.shape != (length,):
            raise OodometerError(f"a row mask needs {length} entries, found shape {index.shape}")
        return np.flatnonzero(index)
    if index.size == 0:
        return np.zeros(0, np.int64)
    if index.ndim != 1 or index.dtype.kind not in "iu":
        raise OodometerError(f"a row index must be a list of integers; found {index.dtype} {index.shape}")
    if index.max() >= length or index.min() < -length:
        raise OodometerError(
            f"row index {int(index.max() if index.max() >= length else index.min())} is outside a bank of {length} rows"
        )
    found: Ints = np.where(index < 0, index + length, index).astype(np.int64, copy=False)
    return found


def _moved(column: Array, target: Any) -> Array:
    name = getattr(target, "__name__", target)
    if name in ("numpy", "array_api_compat.numpy"):
        return to_numpy(column)
    if isinstance(target, str):
        try:
            torch = import_module("torch")
        except ImportError:
            raise OodometerError(
                f"to({target!r}) needs PyTorch: pip install 'oodometer[torch]', or use to('numpy')"
            ) from None
        device = "cpu" if target == "torch" else target
        return torch.as_tensor(np.array(column) if isinstance(column, np.ndarray) else column, device=device)
    return target.asarray(to_numpy(column))


def _array_digest(array: npt.NDArray[Any]) -> str:
    digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    for rows in slices(len(array), block_rows(max(1, array[:1].nbytes))):
        digest.update(np.ascontiguousarray(array[rows]).data)
    return digest.hexdigest()


def _column_digest(bank: Bank, name: str) -> str:
    """The same for a joined bank and for its copy: content, not layout."""
    sample = to_numpy(bank.rows(slice(0, 0))[name])
    digest = hashlib.sha256(f"{sample.dtype.str}{(len(bank), *sample.shape[1:])}".encode())
    for block in bank.blocks():
        digest.update(np.ascontiguousarray(to_numpy(block[name])).data)
    return digest.hexdigest()


def _file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def file_entry(path: Path, array: npt.NDArray[Any]) -> dict[str, Any]:
    """What `bank.json` says of one array file."""
    return {
        "file": path.name,
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "bytes": path.stat().st_size,
        "sha256": _file_sha256(path),
    }


def _write_column(folder: Path, name: str, bank: Bank) -> dict[str, Any]:
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
    path = folder / f"{len(list(folder.iterdir())):03d}.{safe}.npy"
    sample = to_numpy(bank.rows(slice(0, 0))[name])
    shape = (len(bank), *sample.shape[1:])
    target = np.lib.format.open_memmap(path, mode="w+", dtype=sample.dtype, shape=shape)
    start = 0
    for block in bank.blocks():
        target[start : start + len(block)] = to_numpy(block[name])
        start += len(block)
    target.flush()
    return file_entry(path, target)


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads((path / "bank.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise OodometerError(f"{path} is not a saved bank: it has no bank.json (write one with bank.save)") from None
    except ValueError as error:
        raise OodometerError(f"{path / 'bank.json'} is damaged ({error}): save the bank again") from None
    if not isinstance(facts, dict) or not {"schema", "rows", "columns", "head"} <= set(facts):
        raise OodometerError(f"{path / 'bank.json'} lacks its entries: save the bank again")
    if facts["schema"] != SCHEMA_VERSION:
        raise OodometerError(
            f"{path} has bank schema {facts['schema']}, this version reads {SCHEMA_VERSION}: "
            "open it with the version that wrote it, or extract again"
        )
    return facts


def _open_column(folder: Path, entry: dict[str, Any], what: str, verify: bool, *, mmap: bool) -> Array:
    path = folder / Path(entry["file"]).name
    if not path.exists():
        raise OodometerError(f"{path} is missing ({what}): restore the file or save the bank again")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise OodometerError(f"{path} has {size} bytes, bank.json says {entry['bytes']} ({what}): truncated copy?")
    if verify and _file_sha256(path) != entry["sha256"]:
        raise OodometerError(f"{path} does not match its checksum ({what}): copy it again or save the bank again")
    try:
        # An empty array cannot be mapped.
        lazy = mmap and 0 not in entry["shape"]
        array = np.load(path, mmap_mode="r" if lazy else None, allow_pickle=False)
    except ValueError as error:
        raise OodometerError(f"{path} is not a readable .npy file ({error})") from None
    if array.dtype.str != entry["dtype"] or list(array.shape) != entry["shape"]:
        raise OodometerError(
            f"{path} holds {array.dtype.str} {array.shape}, bank.json says {entry['dtype']} {tuple(entry['shape'])}"
        )
    return array

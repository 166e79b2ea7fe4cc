"""Fitted state as a tagged tree of plain values and named arrays: what a guard can save, and nothing else."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
import sys
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from oodometer import bank as bank_module
from oodometer import derived, detectors
from oodometer.arrays import is_array, to_numpy
from oodometer.bank import Bank, Head
from oodometer.detectors import Detector
from oodometer.detectors.base import _REGISTRY
from oodometer.errors import OodometerError

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

DTYPES = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BOOL": "|b1"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1"},
}
"""Numbers that safetensors and NumPy share, by their names in a safetensors file."""
LARGEST_INT = 1 << 63


# ---------------------------------------------------------------------------------------------- the tree


class _Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is"):
    """Every node names its kind; what is not one of the kinds below cannot be read."""


class NotFinite(_Node, frozen=True, tag="float"):
    """A float that JSON has no word for."""

    value: Literal["nan", "inf", "-inf"]


class Stored(_Node, frozen=True, tag="array"):
    """An array of the safetensors file; `axes` undo the order its axes are stored in."""

    name: str
    axes: tuple[int, ...]


class Scalar(_Node, frozen=True, tag="scalar"):
    """A NumPy number, which computes in a precision of its own."""

    name: str


class Several(_Node, frozen=True, tag="list"):
    """A list."""

    items: list[Tree]


class Fixed(_Node, frozen=True, tag="tuple"):
    """A tuple."""

    items: list[Tree]


class Named(_Node, frozen=True, tag="dict"):
    """A dictionary, in its order."""

    items: list[tuple[Tree, Tree]]


class Record(_Node, frozen=True, tag="record"):
    """A frozen dataclass of the detectors, such as a whitening or a head."""

    kind: str
    fields: dict[str, Tree]


class Rows(_Node, frozen=True, tag="bank"):
    """A training bank, part by part, since sums over parts depend on where they begin."""

    parts: list[dict[str, Stored]]
    head: Record | None


class Fitted(_Node, frozen=True, tag="detector"):
    """A detector: its name in the registry, its hyperparameters, what it has learned."""

    name: str
    params: dict[str, Tree]
    learned: dict[str, Tree]
    fitted: bool


Tree: TypeAlias = (
    bool | int | float | str | NotFinite | Stored | Scalar | Several | Fixed | Named | Record | Rows | Fitted | None
)


# ---------------------------------------------------------------------------------------------- to the tree


def encode(detector: Detector) -> tuple[Fitted, Arrays]:
    """The tree of a fitted detector, and its arrays by the names of the attributes that hold them."""
    encoder = _Encoder(detector.card.name)
    return encoder.detector(detector, ""), encoder.arrays


class _Encoder:
    """Walks over a detector; an array that is met twice is stored once."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.arrays: Arrays = {}
        self._seen: dict[int, tuple[Any, Stored]] = {}  # holds the array too, so that no other takes its id

    def detector(self, value: Detector, path: str) -> Fitted:
        params = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}  # type: ignore[arg-type]
        learned = {name: inner for name, inner in vars(value).items() if _is_learned(name)}
        return Fitted(
            name=value.card.name,
            params={name: self.any(inner, _join(path, name), value.needs) for name, inner in params.items()},
            learned={name: self.any(inner, _join(path, name), value.needs) for name, inner in learned.items()},
            fitted=value.is_fitted,
        )

    def any(self, value: Any, path: str, needs: frozenset[str]) -> Tree:
        if value is None or type(value) is bool or isinstance(value, str):
            return value
        if type(value) is int and -LARGEST_INT <= value < LARGEST_INT:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else NotFinite(repr(value))  # type: ignore[arg-type]
        if isinstance(value, Detector):
            return self.detector(value, path)
        if isinstance(value, Bank):
            return self.bank(value, path, needs)
        if isinstance(value, np.generic):
            return Scalar(self.array(np.asarray(value), path).name)
        if is_array(value):
            return self.array(value, path)
        return self.compound(value, path, needs)

    def compound(self, value: Any, path: str, needs: frozenset[str]) -> Tree:
        if type(value) in (list, tuple):
            items = [self.any(inner, f"{path}[{place}]", needs) for place, inner in enumerate(value)]
            return Several(items) if type(value) is list else Fixed(items)
        if type(value) is dict:
            return Named([(self.any(k, path, needs), self.any(v, f"{path}[{k}]", needs)) for k, v in value.items()])
        if records().get(_kind(type(value))) is type(value):
            return self.record(value, path, needs)
        raise OodometerError(
            f"{self.owner}: a guard cannot save {path!r}, which is a {type(value).__module__}."
            f"{type(value).__qualname__}. Fitted state is made of numbers, text, arrays, lists, tuples, dictionaries, "
            "banks, heads, detectors, and frozen dataclasses declared beside the detector"
        )

    def record(self, value: Any, path: str, needs: frozenset[str]) -> Record:
        names = [f.name for f in dataclasses.fields(value)]
        fields = {name: self.any(getattr(value, name), f"{path}.{name}", needs) for name in names}
        return Record(_kind(type(value)), fields)

    def bank(self, value: Bank, path: str, needs: frozenset[str]) -> Rows:
        wanted = [name for name in value.columns if _is_needed(name, needs)] or list(value.columns)
        many = len(value.parts) > 1
        parts = [
            {name: self.array(part[name], f"{path}{f'[{place}]' if many else ''}.{name}") for name in wanted}
            for place, part in enumerate(value.parts)
        ]
        return Rows(parts, None if value.head is None else self.record(value.head, f"{path}.head", needs))

    def array(self, value: Any, path: str) -> Stored:
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        found = to_numpy(value)
        if found.dtype.newbyteorder("<").str not in DTYPES.values():
            raise OodometerError(
                f"{self.owner}: a guard cannot save {path!r}, an array of {found.dtype}: give it a type of real "
                "numbers, such as float64 or int64"
            )
        # Products read the array in the order it lies in memory, and so their last digits depend on it.
        order = tuple(np.argsort([-abs(stride) for stride in found.strides], kind="stable").tolist())
        self.arrays[path] = np.asarray(found).transpose(order)
        stored = Stored(path, tuple(np.argsort(order).tolist()))
        self._seen[id(value)] = (value, stored)
        return stored


def _is_learned(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_")


def _is_needed(column: str, needs: frozenset[str]) -> bool:
    return column in needs or f"{column.partition('.')[0]}.*" in needs


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# ---------------------------------------------------------------------------------------------- records


def _kind(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def records() -> dict[str, type]:
    """The dataclasses a file may name: frozen ones, declared in the modules of the detectors or of the bank.

    Discovery imports what is installed, never what a file says.
    """
    detectors.names()
    homes = {cls.__module__ for cls in _REGISTRY.values()}
    homes |= {f"{detectors.__name__}.{module.name}" for module in pkgutil.iter_modules(detectors.__path__)}
    modules = [bank_module, derived, *map(importlib.import_module, sorted(homes & sys.modules.keys()))]
    return {
        _kind(cls): cls
        for module in modules
        for cls in vars(module).values()
        if isinstance(cls, type) and cls.__module__ == module.__name__ and _is_frozen(cls)
    }


def _is_frozen(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) and bool(cls.__dataclass_params__.frozen)  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------- from the tree


def decode(tree: Fitted, arrays: Mapping[str, npt.NDArray[Any]]) -> Detector:
    """The detector that `encode` was given; nothing but registered detectors and known records is ever made."""
    return _Decoder(arrays).detector(tree)


class _Decoder:
    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self.arrays = arrays
        self.known: dict[str, type] | None = None

    def detector(self, tree: Fitted) -> Detector:
        cls = detectors.get(tree.name)
        made = cls(**{name: self.any(inner) for name, inner in tree.params.items()})
        made.check_params()
        for name, inner in tree.learned.items():
            if not _is_learned(name):
                raise OodometerError(f"{tree.name}: {name!r} is no name of fitted state")
            setattr(made, name, self.any(inner))
        if tree.fitted:
            made._fitted = True
        return made

    def any(self, tree: Tree) -> Any:
        match tree:
            case NotFinite():
                return float(tree.value)
            case Stored():
                return np.array(self.column(tree))
            case Scalar():
                return self.named(tree.name)[()]
            case Several():
                return [self.any(inner) for inner in tree.items]
            case Fixed():
                return tuple(self.any(inner) for inner in tree.items)
            case Named():
                return {self.any(key): self.any(inner) for key, inner in tree.items}
            case Record():
                return self.record(tree)
            case Rows():
                return self.bank(tree)
            case Fitted():
                return self.detector(tree)
        return tree

    def column(self, tree: Stored) -> npt.NDArray[Any]:
        """The array where it lies, which may be on the disk; `any` copies it into memory."""
        return self.named(tree.name).transpose(tree.axes)

    def named(self, name: str) -> npt.NDArray[Any]:
        if name not in self.arrays:
            raise OodometerError(f"the array {name!r} is missing")
        return self.arrays[name]

    def record(self, tree: Record) -> Any:
        self.known = self.known or records()
        if tree.kind not in self.known:
            raise OodometerError(f"{tree.kind!r} is no record of the detectors of this version")
        return self.known[tree.kind](**{name: self.any(inner) for name, inner in tree.fields.items()})

    def bank(self, tree: Rows) -> Bank:
        head: Head | None = None if tree.head is None else self.record(tree.head)
        parts = [Bank({name: self.column(inner) for name, inner in part.items()}) for part in tree.parts]
        return Bank.concat(parts).with_head(head)

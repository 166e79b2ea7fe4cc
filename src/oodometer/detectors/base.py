"""What every detector is: a keyword-only dataclass of hyperparameters with `fit` and `score`, and its card."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any, ClassVar, Literal, Self, TypeVar, cast, dataclass_transform, final

import numpy as np
import numpy.typing as npt

from oodometer import derived
from oodometer.arrays import Array, block_rows, frozen, to_numpy
from oodometer.bank import Bank, Head, check_same_extraction
from oodometer.errors import NotFiniteError, NotFittedError, OodometerError, OodometerWarning

Cost = Literal["elementwise", "head", "classes", "subspace", "search"]
"""What scoring a row costs: C or D operations; a product with the head; with class statistics; with a D×D basis;
with the whole training bank."""

CalibrationRows = Literal["auto", "train", "val"]
"""Which rows a threshold-like quantity is fitted on; auto: validation rows when given, else training rows."""


INNER = "Detector"
"""The declared type of a composition's parameter that is a detector itself."""


@dataclass(frozen=True)
class Card:
    """What a reader wants to know of a detector before using it."""

    name: str
    title: str
    needs: frozenset[str]
    grid: Mapping[str, tuple[Any, ...]]
    cite: str
    equation: str
    cost: Cost
    aliases: tuple[str, ...]
    variants: Mapping[str, Mapping[str, Any]]
    description: str
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Parameter:
    """One hyperparameter: default, allowed values, meaning."""

    name: str
    kind: str
    default: Any
    low: float | None
    high: float | None
    choices: tuple[Any, ...]
    open: bool
    doc: str

    def check(self, owner: str, value: Any) -> None:
        if self.choices:
            if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in self.choices):
                listed = ", ".join(map(repr, self.choices))
                raise OodometerError(f"{owner}: {self.name} must be one of {listed}; found {value!r}")
            return
        if self.low is None and self.high is None:
            return
        whole = "float" not in self.kind
        number = isinstance(value, int | np.integer) or (isinstance(value, float | np.floating) and not whole)
        if (value is None and "None" in self.kind) or (number and not isinstance(value, bool) and self._inside(value)):
            return
        raise OodometerError(
            f"{owner}: {self.name} must be {'an integer' if whole else 'a number'} {self.range}; found {value!r}"
        )

    def _inside(self, value: float) -> bool:
        low, high = (-np.inf if self.low is None else self.low), (np.inf if self.high is None else self.high)
        return bool(low < value < high if self.open else low <= value <= high)

    @property
    def range(self) -> str:
        if self.choices:
            return " | ".join(map(repr, self.choices))
        if self.low is None and self.high is None:
            return ""
        less, more = ("<", ">") if self.open else ("≤", "≥")
        bounds = [f"{more} {self.low:g}"] if self.low is not None else []
        return " and ".join([*bounds, *([f"{less} {self.high:g}"] if self.high is not None else [])])


def param(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Iterable[Any] = (),
    open: bool = False,
) -> Any:
    """A hyperparameter with its meaning and its allowed values (`open` bounds are excluded)."""
    facts = {"doc": doc, "low": low, "high": high, "choices": tuple(choices), "open": open}
    return field(default=default, metadata=facts)


SCORED_ROWS = 8192
"""Rows a CPU scores at a time at most."""


def warn(message: str) -> None:
    """Tell the user of a rule applied to an edge case, pointing at the call of `fit` or `score`."""
    warnings.warn(message, OodometerWarning, stacklevel=5)


class Detector:
    """Base of all detectors. Subclasses are declared with `@detector` and write `_fit` (if anything is fitted)
    and `_score`; `fit` and `score` are the same for all.

    `_fit(train, xp)` sees fitting rows only; fitted state ends in an underscore and is NumPy where it is small.
    `_score(bank, xp)` sees a block of rows and returns one float a row, higher = more out of distribution.
    """

    card: ClassVar[Card]
    rowwise: ClassVar[bool] = True
    """False for a detector that searches the training bank: it gets all rows at once and blocks by itself."""
    scored: ClassVar[Mapping[str, str]] = {}
    """Needs that are scored and not fitted on, so that a training bank can do without; and how to extract them."""

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        """Nothing to fit unless a subclass says so."""

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        raise TypeError(f"{type(self).__name__} does not define _score")

    # ------------------------------------------------------------------------------------------ fit and score

    @final
    def fit(self, train: Bank, *, val: Bank | None = None) -> Self:
        """Learn from training rows (and, for detectors that calibrate, from validation rows)."""
        self._forget()
        self.check_params()
        for role, bank in (("train", train), ("val", val)):
            if bank is not None:
                self._check_bank(bank, role, with_labels=role == "train" or self._fits_on_val(val))
        if val is not None:
            check_same_extraction(f"{self.card.name}: the val bank", val, "the training bank", train)
        self._remember(train)
        self._fit_on(train, val)
        self._freeze()
        self._fitted = True
        return self

    def _freeze(self) -> None:
        """What was fitted does not change, and so goes to a device once."""
        for name, value in list(vars(self).items()):
            if name.endswith("_") and isinstance(value, np.ndarray):
                setattr(self, name, frozen(value))

    def _fit_on(self, train: Bank, val: Bank | None) -> None:
        rows = self._fitting_rows(train, val)
        if "logits" in self.needs and self.is_fitted_needed:
            rows = derived.with_logits(rows)
        self._fit(rows, rows.xp)

    @final
    def score(self, bank: Bank) -> npt.NDArray[np.float64]:
        """One finite float64 a row, higher = more out of distribution."""
        self.check_params()
        if self.is_fitted_needed and not self.is_fitted:
            raise NotFittedError(f"{self.card.name} is not fitted: call fit(train_bank) first")
        self._check_bank(bank, "score", with_labels=False)
        known: Mapping[str, Any] | None = getattr(self, "extraction_", None)
        check_same_extraction(f"{self.card.name}: this bank", bank, "the training bank", known)
        bank = self._with_known_head(bank)
        scores = self._score_all(bank)
        if not np.isfinite(scores).all():
            row = int(np.flatnonzero(~np.isfinite(scores))[0])
            raise NotFiniteError(
                f"{self!r}: the score of row {row} is {scores[row]}; {int((~np.isfinite(scores)).sum())} of "
                f"{len(scores)} rows are affected. Look for values near the limits of {bank.xp.__name__} floats."
            )
        return scores

    def _score_all(self, bank: Bank) -> npt.NDArray[np.float64]:
        if not len(bank):
            return np.zeros(0)
        if "logits" in self.needs:
            bank = derived.with_logits(bank)
        # Scores of short rows take several passes, in float64 too: what few rows leave behind stays in cache.
        rows = min(block_rows(bank.width), SCORED_ROWS) if bank.on_cpu else None
        blocks = bank.blocks(rows) if self.rowwise else [bank]
        pieces = []
        for block in blocks:  # `warn` counts frames, and a comprehension is one of its own in Python 3.11
            pieces.append(to_numpy(self._score(block, block.xp)))  # noqa: PERF401
        return np.concatenate(pieces).astype(np.float64) + 0.0

    @property
    def needs(self) -> frozenset[str]:
        """What it reads of a bank; a composition adds what its inner detector reads."""
        return self.card.needs

    @property
    def grid(self) -> Mapping[str, tuple[Any, ...]]:
        """The published search values; a composition searches its inner detector's."""
        return self.card.grid

    @property
    def is_fitted(self) -> bool:
        return getattr(self, "_fitted", False)

    @property
    def is_fitted_needed(self) -> bool:
        """Scores of logits alone need no fit."""
        return type(self)._fit is not Detector._fit or type(self)._fit_on is not Detector._fit_on

    def _forget(self) -> None:
        for name in [name for name in vars(self) if name.endswith("_") or name == "_fitted"]:
            delattr(self, name)

    def _remember(self, train: Bank) -> None:
        self.head_: Head | None = train.head
        extraction: Mapping[str, Any] | None = train.provenance.get("extraction")
        if extraction is not None:
            self.extraction_ = extraction
        names = (name for name in train.columns if name != "labels")
        self.shapes_ = {name: train.row_shape(name) for name in names}

    def _fitting_rows(self, train: Bank, val: Bank | None) -> Bank:
        return cast(Bank, val) if self._fits_on_val(val) else train

    def _fits_on_val(self, val: Bank | None) -> bool:
        wanted: CalibrationRows = getattr(self, "bank", "train")
        if wanted == "val" and val is None:
            raise OodometerError(
                f"{self.card.name}: bank='val' fits on validation rows, and none were given: "
                "call fit(train, val=validation_bank), or choose bank='train'"
            )
        return wanted == "val" or (wanted == "auto" and val is not None)

    def _reads(self, bank: Bank, role: str) -> bool:
        """Whether it looks at the rows at all: looking for NaN costs as much as scoring the fastest methods."""
        if role == "score":
            return True
        overridden = type(self)._fit_on is not Detector._fit_on
        return self.is_fitted_needed and (role == "train" or overridden or self._fits_on_val(bank))

    # ------------------------------------------------------------------------------------------ checks

    def _check_bank(self, bank: Bank, role: str, *, with_labels: bool) -> None:
        name = self.card.name
        if not isinstance(bank, Bank):
            raise OodometerError(
                f"{name}: {role} must be a Bank, found {type(bank).__name__}: "
                "wrap arrays as oodometer.Bank(features=…, logits=…, labels=…, head=Head(W, b))"
            )
        if role != "score" and not len(bank):
            raise OodometerError(f"{name}: the {role} bank has no rows; fitting needs at least one")
        for need in sorted(self.needs):
            self._check_need(bank, need, role, with_labels=with_labels)

    def _check_need(self, bank: Bank, need: str, role: str, *, with_labels: bool) -> None:
        name = self.card.name
        if need == "labels":
            if with_labels and "labels" not in bank:
                raise self._missing(bank, need, role)
            return
        if need == "head":
            if bank.head is None and getattr(self, "head_", None) is None:
                raise self._missing(bank, need, role)
            return
        if need == "logits.mcd" and role != "score" and "logits" in bank:
            return  # dropout passes are scored, never fitted on: a training bank need not carry them
        columns = matching(bank, need)
        if need in self.scored and role != "score" and "logits" in bank and not set(columns) & set(bank.columns):
            return
        if not columns:
            raise self._missing(bank, need, role)
        for column in columns:
            if column not in bank and not self._can_compute(bank, column):
                raise self._missing(bank, need, role)
            if self._reads(bank, role):
                _check_finite(bank, column, name, role)
            known = getattr(self, "shapes_", {}).get(column)
            if role == "score" and known is not None and column in bank.columns and bank.row_shape(column) != known:
                raise OodometerError(
                    f"{name}: rows of {column!r} have shape {bank.row_shape(column)}, "
                    f"the training rows had {known}: extract both with the same network and layer"
                )

    def _can_compute(self, bank: Bank, column: str) -> bool:
        return column == "logits" and "features" in bank.columns and getattr(self, "head_", None) is not None

    def _missing(self, bank: Bank, need: str, role: str) -> OodometerError:
        how = "head=Head(weight, bias)" if need == "head" else f"{need}=…"
        if "." in need:  # no keyword of Python's
            how = f"**{{{need.replace('*', '0')!r}: …}}"
        mend = f"extract it with {self.scored[need]}" if need in self.scored else f"pass Bank(…, {how})"
        found = ", ".join(bank.columns) + (" and a head" if bank.head is not None else "")
        return OodometerError(f"{self.card.name} needs {need!r} in the {role} bank; it has {found}: {mend}")

    def _with_known_head(self, bank: Bank) -> Bank:
        known: Head | None = getattr(self, "head_", None)
        if known is None or bank.head is known:
            return bank
        if bank.head is None:
            usable = "features" in bank.columns and "logits" not in bank.columns
            if usable:
                self._check_width(bank, known)
            return bank.with_head(known) if usable or "head" in self.needs else bank
        if not bank.head.same_as(known):
            raise OodometerError(
                f"{self.card.name}: this bank's head differs from the training bank's: "
                "scores of two networks cannot be compared; extract both with one network"
            )
        return bank

    def _check_width(self, bank: Bank, known: Head) -> None:
        width = (int(known.weight.shape[1]),)
        if bank.row_shape("features") != width:
            raise OodometerError(
                f"{self.card.name}: rows of 'features' have shape {bank.row_shape('features')}, the training bank's "
                f"head reads {width}: extract both with the same network and layer"
            )

    def check_params(self) -> None:
        """Refuse hyperparameters outside their allowed values."""
        for parameter in self.card.parameters:
            parameter.check(self.card.name, getattr(self, parameter.name))

    # ------------------------------------------------------------------------------------------ scikit-learn's habits

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        params = {f.name: getattr(self, f.name) for f in dataclasses.fields(cast(Any, self))}
        if deep:
            for name, value in list(params.items()):
                if isinstance(value, Detector):
                    params |= {f"{name}__{key}": inner for key, inner in value.get_params().items()}
        return params

    def set_params(self, **params: Any) -> Self:
        kinds = {parameter.name: parameter.kind for parameter in self.card.parameters}
        # An inner detector first, then its parameters.
        for name, value in sorted(params.items(), key=lambda item: item[0].count("__")):
            outer, _, inner = name.partition("__")
            if inner and kinds.get(outer) == INNER:
                getattr(self, outer).set_params(**{inner: value})
            else:
                _check_known(self.card.name, name, list(kinds))
                setattr(self, name, _by_name(kinds[name], value))
        return self

    def clone(self) -> Self:
        """An unfitted copy with the same hyperparameters."""
        params = self.get_params(deep=False)
        return type(self)(**{k: v.clone() if isinstance(v, Detector) else v for k, v in params.items()})

    def __repr__(self) -> str:
        shown = [
            f"{p.name}={getattr(self, p.name)!r}" for p in self.card.parameters if getattr(self, p.name) != p.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


def matching(bank: Bank, need: str) -> tuple[str, ...]:
    """The columns that a need stands for: itself, or for `family.*` all of that family."""
    return tuple(name for name in bank.columns if name.startswith(need[:-1])) if need.endswith(".*") else (need,)


def _check_finite(bank: Bank, column: str, name: str, role: str) -> None:
    row = derived.first_bad_row(bank, column)
    if row is not None:
        raise OodometerError(
            f"{name}: column {column!r} of the {role} bank has NaN or infinity in row {row}: "
            "drop such rows, or extract them again in float32"
        )


# ---------------------------------------------------------------------------------------------- registry

D = TypeVar("D", bound=type)
_REGISTRY: dict[str, type[Detector]] = {}
_ALIASES: dict[str, str] = {}


@dataclass_transform(kw_only_default=True, field_specifiers=(param, field))
def detector(
    name: str,
    *,
    needs: Iterable[str] = (),
    grid: Mapping[str, Iterable[Any]] | None = None,
    cite: str = "",
    equation: str = "",
    cost: Cost = "elementwise",
    aliases: Iterable[str] = (),
    variants: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[D], D]:
    """Declare a detector: makes the class a keyword-only dataclass and enters it under its name.

    `grid` holds the published search values, `variants` the parameters that reproduce named peers.
    """

    def declare(cls: D) -> D:
        made: Any = dataclass(kw_only=True, repr=False, eq=False)(cls)
        doc = (made.__doc__ or "").strip()
        made.card = Card(
            name=name,
            title=doc.split("\n", 1)[0],
            needs=frozenset(needs),
            grid={key: tuple(values) for key, values in (grid or {}).items()},
            cite=cite,
            equation=equation,
            cost=cost,
            aliases=tuple(aliases),
            variants=dict(variants or {}),
            description="\n".join(line.strip() for line in doc.split("\n")[1:]).strip(),
            parameters=tuple(_parameter(f) for f in dataclasses.fields(made)),
        )
        _register(made)
        return cast(D, made)

    return declare


def _parameter(f: dataclasses.Field[Any]) -> Parameter:
    facts = f.metadata
    return Parameter(
        name=f.name,
        kind=str(f.type),
        default=f.default if f.default is not dataclasses.MISSING else None,
        low=facts.get("low"),
        high=facts.get("high"),
        choices=facts.get("choices", ()),
        open=facts.get("open", False),
        doc=facts.get("doc", ""),
    )


def _register(cls: type[Detector]) -> None:
    for name in (cls.card.name, *cls.card.aliases):
        known = _REGISTRY.get(_ALIASES.get(name, name))
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise OodometerError(f"a detector named {name!r} exists already ({known.__module__}.{known.__qualname__})")
    _REGISTRY[cls.card.name] = cls
    _ALIASES.update(dict.fromkeys(cls.card.aliases, cls.card.name))


@cache
def _discover() -> None:
    package = importlib.import_module("oodometer.detectors")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"oodometer.detectors.{module.name}")


def names() -> list[str]:
    """Names of all detectors, sorted."""
    _discover()
    return sorted(_REGISTRY)


def get(name: str) -> type[Detector]:
    """The detector class of a name or alias."""
    _discover()
    _check_known("detector", name, [*_REGISTRY, *_ALIASES])
    return _REGISTRY[_ALIASES.get(name, name)]


def create(name: str, *, preset: str | None = None, **params: Any) -> Detector:
    """A detector by name, e.g. `create("knn", k=10)`.

    `preset` names a published implementation to follow (see the card's variants); `params` go on top of it.
    """
    cls = get(name)
    if preset is not None:
        _check_known(f"preset of {name}", preset, list(cls.card.variants))
        params = {**cls.card.variants[preset], **params}
    kinds = {parameter.name: parameter.kind for parameter in cls.card.parameters}
    # A composition takes its inner detector by name too, and that one's parameters as detector__name.
    compositions = tuple(f"{key}__" for key, kind in kinds.items() if kind == INNER)
    inner = {key: value for key, value in params.items() if key.startswith(compositions)}
    outer = {key: value for key, value in params.items() if key not in inner}
    for key in outer:
        _check_known(name, key, list(kinds))
    made = cls(**{key: _by_name(kinds[key], value) for key, value in outer.items()})
    if inner:
        made = made.clone().set_params(**inner)  # the inner detector that was given stays as it is
    made.check_params()
    return made


def _by_name(kind: str, value: Any) -> Any:
    """An inner detector may be given by its name."""
    return create(value) if kind == INNER and isinstance(value, str) else value


def _check_known(owner: str, name: str, known: list[str]) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise OodometerError(f"{owner}: unknown name {name!r}; {hint}known: {', '.join(sorted(known)) or 'none'}")

"""Any detector on projected features ("projection filtering"), as a composition: `projected(detector, kind=…)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from types import ModuleType
from typing import Any

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, block_rows, double, to_numpy
from oodometer.bank import Bank, Head
from oodometer.detectors.base import Detector, create, detector, param
from oodometer.detectors.logits import MSP
from oodometer.detectors.projection_versions import ERRORS, KINDS, OWN, Kind, Version, fit_projection, project
from oodometer.detectors.subspaces import class_subspaces
from oodometer.detectors.tempering import check_inner, innermost
from oodometer.errors import OodometerError

ONE_FEATURE: tuple[Kind, ...] = ("global", "class_pred", "class_avg")
"""The kinds that give a row one projected feature; `class` gives it one a class."""
BY_NAME: Mapping[str, tuple[Kind, ...]] = {
    "ctm": KINDS,
    "pca": KINDS,
    "kpca": KINDS,
    "pca-fused": (),
    "residual": (),
    "vim": (),
    "neco": (),
    "projected": (),
}
"""Detectors whose projected versions do not follow from what they read (methods §8, the paper's table 3)."""
BY_NEEDS: tuple[tuple[frozenset[str], tuple[Kind, ...]], ...] = (
    (frozenset({"logits", "labels"}), KINDS),
    (frozenset({"features", "logits", "head", "labels"}), ONE_FEATURE),
)
"""All others: what reads no more than these has these versions; what reads more (layers, passes, …) has none."""
CLASS_LOGITS = frozenset({"fdbd"})
"""Detectors that under class_pred read the class logits w_c·ĥ_c + b_c, not the logits of ĥ_ŷ."""
BLOCK_BYTES = 64 << 20
"""Rows projected at a time on a CPU: enough that many classes share them."""


def projected(detector: Detector | str, kind: Kind = "global", *, variance: float = 0.9) -> Projected:
    """The detector on projected features.

    >>> projected("gradnorm", "class_pred").fit(train).score(test)
    >>> projected(tempered("msp"), "class", variance=0.95).fit(train, val=val)    # with a temperature of its own
    """
    inner = create(detector) if isinstance(detector, str) else detector
    return Projected(detector=inner, kind=kind, variance=variance)


def kinds(detector: Detector) -> tuple[Kind, ...]:
    """The projections that apply to a detector."""
    name, inner = detector.card.name, getattr(detector, "detector", None)
    if name in BY_NAME:
        return BY_NAME[name]
    found = next((found for most, found in BY_NEEDS if detector.needs <= most), ())
    if isinstance(inner, Detector):
        # A composition wraps the score of one projected bank; versions of the inner detector's own are none.
        own = OWN[inner.card.name][0] if inner.card.name in OWN else ()
        return tuple(kind for kind in kinds(inner) if kind in found and kind not in own)
    return found


@detector(
    "projected",
    needs={"features"},
    grid={"variance": (0.85, 0.9, 0.95, 0.99)},
    cite="claros2025systematic",
    equation="S(ĥ, Wĥ + b), ĥ = μ + UUᵀ(h − μ), U principal directions of all rows or of classes; class: S(z), "
    "z_c = w_c·ĥ_c + b_c",
    cost="subspace",
)
class Projected(Detector):
    """Any detector on features projected onto principal subspaces (Claros Olivares & Brockmeier, 2025).

    `global` projects onto the subspace of all training features, `class_pred` onto that of the predicted class,
    `class_avg` averages the projections onto those of all classes, and `class` takes each class's logit from its own
    projection. The subspace of a class is that of its correctly classified rows. The inner detector is fitted on the
    projected rows; `projected(tempered(…))` fits a temperature on their logits.

    The versions of a reconstruction error (pca, kpca) are the errors of these projections, with the projection's
    variance; `class` is the error of the best class.
    """

    rowwise = False
    detector: Detector = field(default_factory=MSP, metadata={"doc": "the score that reads the projected rows"})
    kind: Kind = param(
        "global", "subspace of all rows, of each class, of the predicted class, or their mean", choices=KINDS
    )
    variance: float = param(0.9, "share of the variance that a subspace keeps", low=0.0, high=1.0, open=True)

    @property
    def needs(self) -> frozenset[str]:
        read = self.detector.needs | {"features"}
        if self.detector.needs & {"logits", "head"} and self.detector.card.name not in ERRORS:
            read |= {"head"}
        return read if self.kind == "global" else read | {"logits", "labels"}

    @property
    def grid(self) -> Mapping[str, tuple[Any, ...]]:
        inner = dict(self.detector.grid)
        if self.detector.card.name in ERRORS:
            inner.pop("variance", None)
        return {**self.card.grid, **{f"detector__{name}": values for name, values in inner.items()}}

    def check_params(self) -> None:
        super().check_params()
        check_inner(self, self.detector)
        _check_kind(self.detector, self.kind)
        if self.detector.card.name in ERRORS:
            _check_variance(self.detector)

    # ------------------------------------------------------------------------------------------ fit and score

    def _fit_on(self, train: Bank, val: Bank | None) -> None:
        if "logits" in self.needs:
            train = derived.with_logits(train)
        self.detector_ = self.detector.clone()
        self.version_: Version | None = None
        of_own, fit_own = OWN.get(self.detector.card.name, ((), None))
        if fit_own is not None and self.kind in of_own:
            self.version_ = fit_own(self.detector_, self.kind, self.variance, train)
            return
        self.exact_ = derived.is_small(train)
        self.projection_ = fit_projection(train, self.kind, self.variance)
        self.logits_head_ = self._logits_head(train)
        if self.detector_.is_fitted_needed:
            self.detector_.fit(self._view(train), val=None if val is None else self._view(val))

    def _logits_head(self, train: Bank) -> Head | None:
        """The head that gives the projected logits, or the class logits, of features that are not projected."""
        if self.detector.needs <= {"logits", "labels"} and self.kind != "class_pred":
            assert train.head is not None, "the door has seen to the head"
            return self.projection_.head(train.head)
        if self.kind == "class_pred" and innermost(self.detector).card.name in CLASS_LOGITS:
            assert train.head is not None, "the door has seen to the head"
            return class_subspaces(train, self.variance).head(train.head)
        return None

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        if self.version_ is not None:
            version = self.version_
            return np.concatenate([to_numpy(version.score(block, xp)) for block in self._blocks(bank)])
        blocks = self._blocks(bank) if innermost(self.detector_).rowwise else [bank]
        return np.concatenate([self.detector_._score_all(self._view(block)) for block in blocks])

    def _blocks(self, bank: Bank) -> Iterator[Bank]:
        return bank.blocks(max(block_rows(bank.width, cpu=bank.on_cpu), BLOCK_BYTES // bank.width, 1))

    # ------------------------------------------------------------------------------------------ what the inner sees

    def _view(self, bank: Bank) -> Bank:
        """The projected rows: logits alone where nothing else is read, else features and what follows from them."""
        return Bank.concat([self._view_of_part(part) for part in bank.parts])

    def _view_of_part(self, bank: Bank) -> Bank:
        h, columns = derived.features(bank), {}
        h = double(h) if self.exact_ else h
        if "labels" in bank:
            columns["labels"] = bank.labels
        if self.logits_head_ is not None:
            columns["logits"] = self.logits_head_(h)
        if not self.detector.needs <= {"logits", "labels"} or self.logits_head_ is None:
            columns["features"] = project(self.projection_, h, bank, bank.xp)
        # Class logits are not what the head says of the projected features: the head comes last, unquestioned.
        return Bank(columns).with_head(bank.head)


# ---------------------------------------------------------------------------------------------- checks


def _check_kind(detector: Detector, kind: Kind) -> None:
    applicable, name = kinds(detector), detector.card.name
    if kind in applicable:
        return
    inner = innermost(detector)
    if inner is not detector and inner.card.name in OWN:
        raise OodometerError(
            f"projected: the {kind!r} version of {inner.card.name} is no score of one projected bank, so {name} cannot "
            f"be inside it: write {name}(projected({inner.card.name}, {kind!r}))"
        )
    if applicable:
        raise OodometerError(
            f"projected: {name} reads features, and {kind!r} gives a row one a class: choose kind= "
            f"{', '.join(map(repr, applicable))}"
        )
    raise OodometerError(
        f"projected: {name} has no projected version (it has a subspace of its own, or reads more than features and "
        "logits): projections apply to scores of the logits (msp, mls, energy, gen, …), to ctm, pca and kpca (all "
        "kinds of projection), and to scores of the features (gradnorm, fdbd, mds, nnguide, pnml, ctmmean, …: "
        f"{', '.join(map(repr, ONE_FEATURE))})"
    )


def _check_variance(detector: Detector) -> None:
    given, default = detector.get_params()["variance"], type(detector)().get_params()["variance"]
    if given != default:
        raise OodometerError(
            f"projected: the error of {detector.card.name} is that of the projection, whose variance counts: write "
            f"projected({detector.card.name}, variance={given!r}), not variance={given!r} of {detector.card.name}"
        )

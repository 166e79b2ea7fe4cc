"""Mahalanobis distances in the intermediate layers: the first, the last, or a weighted sum of many."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from oodometer import derived
from oodometer.arrays import EXACT_ENTRIES, Array, namespace, pooled, real, to_numpy
from oodometer.bank import Bank
from oodometer.derived import F64, Whitening
from oodometer.detectors.base import Detector, detector, param, warn
from oodometer.detectors.mds import nearest_squared
from oodometer.errors import OodometerError

IS_OOD = "is_ood"
"""The column that tells out-of-distribution validation rows (1) from in-distribution ones (0)."""
FOLDS = 5
"""Of the cross-validation that chooses the penalty of the learned weights (methods: scikit-learn's default)."""


def with_ood(val: Bank, ood: Bank) -> Bank:
    """Validation rows of both kinds in one bank, told apart by the column `is_ood` (their labels are left out)."""
    shared = [name for name in val.columns if name in ood.columns and name not in ("labels", IS_OOD)]
    if not shared:
        raise OodometerError(
            f"the ID and OOD validation banks share no column: {', '.join(val.columns)} and {', '.join(ood.columns)}"
        )
    marked = [(val, np.zeros(len(val), np.int8)), (ood, np.ones(len(ood), np.int8))]
    return Bank.concat([bank.select(shared).with_columns(**{IS_OOD: flag}) for bank, flag in marked])


@dataclass(frozen=True)
class Layer:
    """One layer's distance: its column, the whitening of its within-class covariance and its whitened class means."""

    column: str
    whitening: Whitening
    points: F64

    @classmethod
    def of(cls, train: Bank, column: str) -> Layer:
        if not train.row_shape(column):
            raise OodometerError(f"column {column!r} has one number a row: a layer is rows × channels (× positions)")
        total = derived.moments(train, column)
        covariance = total.scatter / total.count
        within = derived.within_scatter(train, column) / total.count
        exact = total.count * len(total.mean) <= EXACT_ENTRIES
        try:
            whitening = Whitening.of(within, total.mean, total=covariance, exact=exact)
        except OodometerError as error:
            raise OodometerError(f"layer {column!r}: {error}. Leave such a layer out: layers=(…)") from None
        counts, means = derived.class_means(train, column)
        return cls(column, whitening, whitening.points(means[counts > 0]))

    def distances(self, bank: Bank) -> F64:
        """Squared Mahalanobis distance of each row to its nearest class mean."""
        return np.concatenate([self._of_block(block) for block in derived.column_blocks(bank, self.column)])

    def _of_block(self, block: Bank) -> F64:
        x = self.whitening(pooled(real(block[self.column])))
        return to_numpy(nearest_squared(x, self.points, namespace(x))).astype(np.float64)


SCALE = "factor on each layer's squared distance (½ in the papers that sum layers)"


@detector(
    "mds_all",
    needs={"layers.*", "labels"},
    cite="guille2024broad",
    equation="Σ_l α_l · ½ min_c (h_l − μ_lc)ᵀ S_l⁺ (h_l − μ_lc)",
    cost="classes",
    aliases=("mds_layers",),
    variants={"broad": {}, "mdsens": {"weights": "learned"}},
)
class MDSLayers(Detector):
    """Mahalanobis distance to the nearest class, summed over layers (Lee et al., NeurIPS 2018).

    Maps are averaged over their positions. The layers count alike (BROAD's MDS_all), by given weights, or by learned
    ones (MDSEns at ε = 0): the coefficients of a logistic regression that tells ID from OOD validation rows. It finds
    both in `val`, told apart by its column `is_ood` (0 or 1): see `with_ood(val, ood)`. Such a `val` is for this
    detector alone; others would calibrate on the OOD rows.
    """

    rowwise = False
    layers: str | tuple[str, ...] = param(
        "all", "'all', 'first', 'last' (of the layers.* columns, in stored order), or names, 'features' among them"
    )
    weights: str | tuple[float, ...] = param(
        "uniform", "of the layers: 'uniform' (1 each), 'learned' from val with its column is_ood, or one number each"
    )
    scale: float = param(0.5, SCALE, low=0.0, open=True)

    @property
    def needs(self) -> frozenset[str]:
        columns = getattr(self, "layers_", None) or (() if isinstance(self.layers, str) else tuple(self.layers))
        return frozenset({*columns, "labels"}) if columns else self.card.needs

    def check_params(self) -> None:
        super().check_params()
        if isinstance(self.layers, str) and self.layers not in ("all", "first", "last"):
            raise OodometerError(
                f"mds_all: layers must be 'all', 'first', 'last' or a tuple of columns; found {self.layers!r}"
            )
        check_weights("mds_all", self.weights)

    def _fit_on(self, train: Bank, val: Bank | None) -> None:
        names = self._chosen(train)
        self.parts_ = tuple(Layer.of(train, name) for name in names)
        # Distances are asked for only where weights are learned from them.
        self.weights_ = layer_weights(
            "mds_all", self.weights, len(names), val, lambda bank: self.scale * self._distances(bank)
        )
        self.layers_ = names

    def _chosen(self, train: Bank) -> tuple[str, ...]:
        if not isinstance(self.layers, str):
            return _distinct(tuple(self.layers))
        every = train.layers
        if self.layers != "all":
            return every[:1] if self.layers == "first" else every[-1:]
        if len(every) == 1:
            warn(f"mds_all: the training bank has one layer, {every[0]!r}: all layers are that one. Extract more")
        return every

    def _distances(self, bank: Bank) -> F64:
        return np.stack([part.distances(bank) for part in self.parts_], axis=1)

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return self.scale * (self._distances(bank) @ self.weights_)


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    wrong = [name for name in names if name != "features" and not str(name).startswith("layers.")]
    if not names or wrong or len(set(names)) < len(names):
        raise OodometerError(f"mds_all: layers must name each column once, 'layers.…' or 'features'; found {names!r}")
    return names


def check_weights(name: str, weights: str | tuple[float, ...]) -> None:
    """Refuse a word that is no rule."""
    if isinstance(weights, str) and weights not in ("uniform", "learned"):
        raise OodometerError(f"{name}: weights must be 'uniform', 'learned' or one number a layer; found {weights!r}")


def layer_weights(
    name: str, weights: str | tuple[float, ...], count: int, val: Bank | None, distances_of: Callable[[Bank], F64]
) -> F64:
    """The weights of the layers: equal, given, or learned from the distances (rows × layers) of validation rows."""
    if weights == "uniform":
        return np.ones(count)
    if not isinstance(weights, str):
        return _given(name, weights, count)
    if val is None or IS_OOD not in val:
        raise OodometerError(
            f"{name}: weights='learned' tells ID from OOD validation rows, and "
            + ("no validation rows were given" if val is None else f"val has no column {IS_OOD!r}")
            + ": call fit(train, val=with_ood(val, ood_val)), or choose weights='uniform'"
        )
    return learned_weights(name, distances_of(val), to_numpy(val[IS_OOD]))


def _given(name: str, weights: tuple[float, ...], count: int) -> F64:
    found = np.asarray(weights, dtype=np.float64)
    if found.shape != (count,) or not np.isfinite(found).all() or not found.any():
        raise OodometerError(
            f"{name}: weights must be {count} finite numbers, one a layer and not all zero; found {weights!r}"
        )
    return found


def learned_weights(name: str, distances: F64, is_ood: F64) -> F64:
    """Coefficients of the logistic regression that tells OOD rows from ID rows by their layers' distances."""
    flags = is_ood.astype(np.int64)
    counts = np.bincount(flags.clip(0, 1), minlength=2)
    if flags.shape != (len(distances),) or not np.isin(is_ood, (0, 1)).all() or counts.min() < FOLDS:
        raise OodometerError(
            f"{name}: learned weights need a column {IS_OOD!r} of 0 (ID) and 1 (OOD), at least {FOLDS} rows of each; "
            f"found the values {np.unique(is_ood)[:5].tolist()} with {counts[0]} ID and {counts[1]} OOD rows"
        )
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegressionCV

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", ConvergenceWarning)
        warnings.simplefilter("ignore", FutureWarning)
        # ID is class 1 and confidences −MD are its inputs, as in the peers; both signs cancel in the coefficients.
        model = LogisticRegressionCV(Cs=10, cv=FOLDS, scoring="accuracy").fit(-distances, 1 - flags)
    if any(issubclass(one.category, ConvergenceWarning) for one in heard):
        warn(f"{name}: the logistic regression of the layer weights did not converge; the weights are where it stopped")
    found: F64 = model.coef_.reshape(-1)
    return found


@detector(
    "mds_first",
    needs={"layers.*", "labels"},
    cite="guille2024broad",
    equation="½ min_c (h_0 − μ_0c)ᵀ S_0⁺ (h_0 − μ_0c), h_0 the first layer",
    cost="classes",
)
class MDSFirst(Detector):
    """Mahalanobis distance to the nearest class in the first layer (BROAD's MDS_f)."""

    rowwise = False
    scale: float = param(0.5, SCALE, low=0.0, open=True)

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        self.layer_ = Layer.of(train, train.layers[0])

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return self.scale * self.layer_.distances(bank)


@detector(
    "mds_last",
    needs={"layers.*", "labels"},
    cite="guille2024broad",
    equation="½ min_c (h_L − μ_Lc)ᵀ S_L⁺ (h_L − μ_Lc), h_L the last layer",
    cost="classes",
)
class MDSLast(Detector):
    """Mahalanobis distance to the nearest class in the last layer (BROAD's MDS_l)."""

    rowwise = False
    scale: float = param(0.5, SCALE, low=0.0, open=True)

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        self.layer_ = Layer.of(train, train.layers[-1])

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return self.scale * self.layer_.distances(bank)

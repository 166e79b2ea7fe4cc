"""Classifiers on a bank's features: the network's own head, or a probe trained on the rows of a fold."""

from __future__ import annotations

import dataclasses
import difflib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from oodometer import derived
from oodometer.arrays import (
    EXACT_ENTRIES,
    Array,
    Ints,
    block_rows,
    double,
    namespace,
    real,
    slices,
    to_numpy,
    working_dtype,
)
from oodometer.bank import Bank, Head
from oodometer.errors import OodometerError, OodometerWarning

F64 = NDArray[np.float64]
Rows = NDArray[Any]
"""Rows of features or logits, in float32 or float64."""

L2_PATH = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""Strengths a linear probe chooses from on validation rows, the strongest first."""
HIDDEN_L2 = 1e-4
OUTLIER_WEIGHT = 0.5
"""λ of Hendrycks et al. (ICLR 2019) for classification; DCV-ROOD (§4.4) does not print its own."""
PATIENCE, EXPOSURE_EPOCHS = 3, 5
"""Epochs without a better validation loss before training ends, and epochs of outlier exposure (DCV-ROOD §4.4)."""
GAIN = 0.01
"""The share by which a validation loss must fall to be better: on easy data it falls for ever, by less and less."""
RATE, BATCH = 1e-3, 128
HELD_BYTES = 512 << 20
"""Standardised rows are kept in memory up to this size; larger banks are read again in every pass."""
ROUND = 50
"""L-BFGS iterations before its coordinates are chosen anew."""
NARROW_GRADIENT = 1e-4
"""The largest gradient entry down to which float32 products are of use."""


# ---------------------------------------------------------------------------------------------- interface


class Classifier(Protocol):
    """A trained classifier; its facts are plain JSON values, equal for equal seeds."""

    @property
    def facts(self) -> dict[str, Any]:
        """How training went."""

    def apply(self, bank: Bank) -> Bank:
        """The same rows and labels with this classifier's features, logits and head."""

    def expose(self, outliers: Bank, train: Bank, val: Bank, *, seed: int) -> Classifier:
        """A new classifier: this one after outlier exposure."""


class Trainer(Protocol):
    """Trains a classifier on the rows of a fold; labels are 0 … classes−1."""

    def fit(self, train: Bank, val: Bank, *, seed: int) -> Classifier:
        """A classifier that has seen the labels of `train`, and of `val` to stop or to choose."""


@runtime_checkable
class Resumable(Protocol):
    """A trainer whose trainings are long enough to be kept while they run."""

    def keeping(self, folder: Path, tell: Callable[[str, float], None]) -> Trainer:
        """This trainer with a folder for checkpoints, and somebody to tell how far it is (0 to 1)."""


def names() -> list[str]:
    """Names of all trainers."""
    return sorted([*_TRAINERS, *_NETWORK_TRAINERS])


def create(name: str, **params: Any) -> Trainer:
    """A trainer by name, e.g. `create("probe", hidden=64)`."""
    _check_known("trainer", name, names())
    made = _TRAINERS[name] if name in _TRAINERS else _network_trainer(name)
    known = [field.name for field in dataclasses.fields(made)]
    for key in params:
        _check_known(f"trainer {name}", key, known)
    trainer: Trainer = made(**params)
    return trainer


def _network_trainer(name: str) -> type[Any]:
    """A trainer that needs PyTorch, imported when it is asked for."""
    module, kind = _NETWORK_TRAINERS[name]
    found: type[Any] = getattr(import_module(module), kind)
    return found


def _check_known(owner: str, name: str, known: list[str]) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise OodometerError(f"{owner}: unknown name {name!r}; {hint}known: {', '.join(known) or 'no parameters'}")


# ---------------------------------------------------------------------------------------------- losses


def cross_entropy(logits: Rows, labels: Ints) -> tuple[F64, F64]:
    """−log softmax(z)_y of every row, and its gradient softmax(z) − onehot(y)."""
    rows = np.arange(len(labels))
    log_p = _log_softmax(logits)
    losses = -log_p[rows, labels]
    gradient = np.exp(log_p, out=log_p)
    gradient[rows, labels] -= 1
    return losses, gradient


def uniform_cross_entropy(logits: Rows) -> tuple[F64, F64]:
    """−(z̄ − lse(z)) of every row (the cross-entropy to the uniform distribution), and its gradient softmax(z) − 1/C.

    The outlier loss of classifiers in Hendrycks et al., ICLR 2019; DCV-ROOD §4.4.
    """
    log_p = _log_softmax(logits)
    losses = -log_p.mean(axis=1)
    gradient = np.exp(log_p, out=log_p)
    gradient -= 1 / logits.shape[1]
    return losses, gradient


def _log_softmax(logits: Rows) -> F64:
    z = logits.astype(np.float64)
    z -= z.max(axis=1, keepdims=True)
    z -= np.log(np.exp(z).sum(axis=1, keepdims=True))
    return z


# ---------------------------------------------------------------------------------------------- frozen


@dataclass(frozen=True)
class Frozen:
    """The network the bank was extracted with: its own logits, the same on every fold."""

    def fit(self, train: Bank, val: Bank, *, seed: int) -> Classifier:
        """Nothing is trained; labels must number the network's own outputs."""
        del seed
        for role, bank in (("train", train), ("val", val)):
            _check_logits(bank, role)
        derived.labels(train)
        return FrozenClassifier({"val_accuracy": float(derived.correct(val).mean()) if len(val) else None})


@dataclass(frozen=True)
class FrozenClassifier:
    """A bank's own logits."""

    facts: dict[str, Any]

    def apply(self, bank: Bank) -> Bank:
        """The bank as it is."""
        _check_logits(bank, "scored")
        return bank

    def expose(self, outliers: Bank, train: Bank, val: Bank, *, seed: int) -> Classifier:
        """Refused: a network that is not trained here cannot be exposed here."""
        raise OodometerError(
            "trainer 'frozen' keeps the extracted network as it is, so outliers cannot be shown to it: "
            "choose trainer 'probe' for outlier exposure, or run without exposure"
        )


def _check_logits(bank: Bank, role: str) -> None:
    if "logits" not in bank:
        raise OodometerError(
            f"trainer 'frozen' needs logits, or features and a head; the {role} bank has {', '.join(bank.columns)}: "
            "add them, or choose trainer 'probe', which trains a head on the features"
        )


# ---------------------------------------------------------------------------------------------- probe


@dataclass(frozen=True)
class Probe:
    """A classifier trained on frozen features: multinomial logistic regression, or one hidden layer of ReLUs.

    The linear probe (`hidden=0`) is the optimum of mean cross-entropy + ½·l2·‖W‖² over standardised features, reached
    by L-BFGS down to a largest gradient entry of `tol`; `l2=None` chooses among `L2_PATH` by validation loss. With a
    hidden layer training is seeded Adam on minibatches that keeps the best epoch on validation rows (patience 3), and
    the hidden activations are the new features. Exposure continues from the trained weights with
    `outlier_weight`·(cross-entropy to uniform, averaged over outliers) added to the loss.
    """

    hidden: int = 0
    l2: float | None = None
    outlier_weight: float = OUTLIER_WEIGHT
    tol: float = 1e-6
    max_iter: int = 1000

    def __post_init__(self) -> None:
        _check_count("hidden", self.hidden, 0)
        _check_count("max_iter", self.max_iter, 1)
        for name in ("l2", "outlier_weight", "tol"):
            value = getattr(self, name)
            if not (value is None and name == "l2") and not _is_positive(value):
                raise OodometerError(f"trainer probe: {name} needs a positive number; found {value!r}")

    def fit(self, train: Bank, val: Bank, *, seed: int) -> ProbeClassifier:
        """A head (and a hidden layer) fitted to the training rows."""
        classes = _check_rows(train, val)
        scaling = Scaling.of(train)
        rows, val_rows = _Rows(train, scaling), _Rows(val, scaling)
        labels, val_labels = train.labels.astype(np.int64), val.labels.astype(np.int64)
        task = _Task(self, rows, labels, val_rows, val_labels, classes)
        weights, facts = _train_network(task, seed) if self.hidden else _fit_linear(task)
        return _classifier(self, scaling, weights, facts, val)


@dataclass(frozen=True)
class ProbeClassifier:
    """A trained probe: a head on the features it was trained on, or on the activations of its hidden layer."""

    trainer: Probe
    scaling: Scaling
    weights: tuple[Rows, ...]
    """(W, b), or (W₁, b₁, W₂, b₂) with a hidden layer, on standardised features; one column an output."""
    layer: Head | None
    head: Head
    facts: dict[str, Any]

    def apply(self, bank: Bank) -> Bank:
        """The same rows with this probe's features and head; logits are head(features), computed when asked for.

        The logits of the extracted network, and what was computed from them (`logits.*`), are left out.
        """
        _check_features(bank, "scored", width=len(self.scaling.mean))
        kept = [name for name in bank.columns if name != "logits" and not name.startswith("logits.")]
        bank = bank.with_head(None)
        if len(kept) < len(bank.columns):
            bank = bank.select(kept)
        if self.layer is not None:
            bank = Bank.concat([_activated(part, self.layer) for part in bank.parts])
        return bank.with_head(self.head)

    def expose(self, outliers: Bank, train: Bank, val: Bank, *, seed: int) -> ProbeClassifier:
        """This probe trained on with outliers, whose labels (if any) are not looked at."""
        classes = _check_rows(train, val)
        if classes != self.head.classes:
            raise OodometerError(
                f"exposure needs the {self.head.classes} classes the probe was trained on; the train bank has {classes}"
            )
        _check_features(outliers, "outlier", width=len(self.scaling.mean))
        if not len(outliers):
            raise OodometerError("exposure needs outliers; the outlier bank has no rows")
        parts = [_Rows(bank, self.scaling) for bank in (train, val, outliers)]
        labels, val_labels = train.labels.astype(np.int64), val.labels.astype(np.int64)
        task = _Task(self.trainer, parts[0], labels, parts[1], val_labels, classes, parts[2])
        if self.layer is not None:
            weights, facts = _expose_network(task, self.weights, seed)
        else:
            weights, facts = _expose_linear(task, self.weights, self.facts["l2"])
        told = {"outliers": len(outliers), "outlier_weight": self.trainer.outlier_weight}
        return _classifier(self.trainer, self.scaling, weights, {**facts, **told}, val)


def _classifier(
    trainer: Probe, scaling: Scaling, weights: tuple[Rows, ...], facts: dict[str, Any], val: Bank
) -> ProbeClassifier:
    *first, weight, bias = weights
    layer = scaling.fold(first[0], first[1]) if first else None
    # Softmax does not see what all classes share; without it energies of two probes have one origin.
    weight, bias = weight - weight.mean(axis=1, keepdims=True), bias - bias.mean()
    head = Head(np.ascontiguousarray(weight.T), bias) if first else scaling.fold(weight, bias)
    made = ProbeClassifier(trainer, scaling, weights, layer, head, {})
    predicted = derived.predictions(made.apply(val))
    made.facts.update({"hidden": trainer.hidden, **facts, "val_accuracy": float((predicted == val.labels).mean())})
    return made


def _activated(bank: Bank, layer: Head) -> Bank:
    """ReLU of a layer, block by block."""
    first = bank.rows(slice(0, 0)).features
    xp = namespace(first)
    pieces = [_relu(layer(real(block.features)), xp) for block in bank.blocks()]
    return bank.with_columns(features=xp.concat(pieces, axis=0) if pieces else layer(real(first)))


def _relu(x: Array, xp: Any) -> Array:
    return xp.where(x > 0, x, xp.zeros_like(x))


# ---------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Scaling:
    """Mean and standard deviation of the training features; a constant feature keeps its scale."""

    mean: F64
    scale: F64
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, bank: Bank) -> Scaling:
        """Two passes: a variance from Σx² loses its digits where the mean is large."""
        mean = _column_means(bank, lambda x: x)
        variance = _column_means(bank, lambda x: (x - mean) ** 2)
        dtype = working_dtype(bank.rows(slice(0, 0)).features)
        spread = np.sqrt(variance)
        # Below this the spread is rounding of the stored features.
        varies = spread > 8 * np.finfo(dtype).eps * np.abs(mean)
        return cls(mean, np.where(varies, spread, 1.0), dtype)

    def standardised(self, features: Array) -> Rows:
        x = to_numpy(double(features)) - self.mean
        x /= self.scale
        return x.astype(self.dtype, copy=False)

    def fold(self, weight: Rows, bias: Rows) -> Head:
        """The layer on the original features: Wᵀ((x − mean)/scale) + b."""
        folded = weight.astype(np.float64).T / self.scale
        return Head(folded.astype(self.dtype), (bias - folded @ self.mean).astype(self.dtype))


def _column_means(bank: Bank, function: Callable[[F64], F64]) -> F64:
    total = np.zeros(bank.row_shape("features"))
    for block in bank.blocks():
        total += function(to_numpy(double(block.features))).sum(axis=0)
    return total / len(bank)


class _Rows:
    """Standardised rows of a bank, by block or by number; kept when small, read again from the bank when not."""

    def __init__(self, bank: Bank, scaling: Scaling) -> None:
        self._bank, self._scaling = bank, scaling
        self.width, self.dtype = len(scaling.mean), scaling.dtype
        row = self.width * scaling.dtype.itemsize
        self._step = block_rows(row)
        self._held = np.concatenate([*self._read()]) if 0 < row * len(bank) <= HELD_BYTES else None

    def __len__(self) -> int:
        return len(self._bank)

    @property
    def many(self) -> bool:
        """Whether passes cost enough for shortcuts to pay."""
        return len(self) * self.width > EXACT_ENTRIES

    def _read(self) -> Iterator[Rows]:
        for block in self._bank.blocks(self._step):
            yield self._scaling.standardised(block.features)

    def blocks(self) -> Iterator[tuple[slice, Rows]]:
        """All rows in order, with their place."""
        if self._held is not None:
            for place in slices(len(self), self._step):
                yield place, self._held[place]
            return
        start = 0
        for x in self._read():
            yield slice(start, start + len(x)), x
            start += len(x)

    def at(self, index: Ints) -> Rows:
        """Rows by number."""
        if self._held is not None:
            return self._held[index]
        out = np.empty((len(index), self.width), self.dtype)
        start = 0
        for part in self._bank.parts:
            inside = np.flatnonzero((index >= start) & (index < start + len(part)))
            if len(inside):
                out[inside] = self._scaling.standardised(part.rows(index[inside] - start).features)
            start += len(part)
        return out


@dataclass(frozen=True)
class _Task:
    """What a probe is trained on."""

    trainer: Probe
    rows: _Rows
    labels: Ints
    val_rows: _Rows
    val_labels: Ints
    classes: int
    outliers: _Rows | None = None


# ---------------------------------------------------------------------------------------------- linear probe


@dataclass(frozen=True)
class _Optimum:
    weight: F64
    bias: F64
    loss: float
    gradient: float
    iterations: int

    @property
    def weights(self) -> tuple[F64, F64]:
        return self.weight, self.bias


def _fit_linear(task: _Task) -> tuple[tuple[F64, ...], dict[str, Any]]:
    trainer = task.trainer
    counts = np.bincount(task.labels)
    prior = np.log(counts / counts.sum())
    start = np.zeros((task.rows.width, task.classes)), prior - prior.mean()
    path: list[list[float]] = []
    iterations, l2 = 0, trainer.l2
    if l2 is None:
        l2, start, iterations, path = _choose_l2(task, start)
    best = _minimise(task, start, l2, trainer.tol)
    iterations += best.iterations
    return best.weights, {"l2": l2, **_told(best, trainer.tol, iterations), "l2_path": path}


def _choose_l2(task: _Task, start: tuple[F64, F64]) -> tuple[float, tuple[F64, F64], int, list[list[float]]]:
    """The strength of the smallest validation loss, with its solution; the search ends where the loss rises."""
    path: list[list[float]] = []
    iterations, best = 0, start
    # Many rows settle the order of the strengths sooner, where it also costs more.
    rough = max(task.trainer.tol, NARROW_GRADIENT) if task.rows.many else 10 * task.trainer.tol
    for l2 in L2_PATH:
        found = _minimise(task, start, l2, rough)
        start = found.weights
        iterations += found.iterations
        path.append([l2, _mean_loss(task.val_rows, task.val_labels, start)])
        if len(path) > 1 and path[-1][1] >= path[-2][1]:
            return path[-2][0], best, iterations, path
        best = start
    return path[-1][0], best, iterations, path


def _expose_linear(task: _Task, weights: tuple[Rows, ...], l2: float) -> tuple[tuple[F64, ...], dict[str, Any]]:
    start = weights[0].astype(np.float64), weights[1].astype(np.float64)
    best = _minimise(task, start, l2, task.trainer.tol)
    return best.weights, {"l2": l2, **_told(best, task.trainer.tol, best.iterations)}


def _told(best: _Optimum, tol: float, iterations: int) -> dict[str, Any]:
    converged = best.gradient <= tol
    if not converged:
        warnings.warn(
            f"the probe stopped with a gradient of {best.gradient:.2g} after {best.iterations} iterations, above "
            f"tol={tol:g}: raise max_iter or l2, or accept a larger tol",
            OodometerWarning,
            stacklevel=4,
        )
    return {
        "iterations": iterations,
        "converged": bool(converged),
        "loss": best.loss,
        "gradient_norm": best.gradient,
        "tol": tol,
    }


def _minimise(task: _Task, start: tuple[F64, F64], l2: float, tol: float) -> _Optimum:
    """L-BFGS from these weights until the largest gradient entry is `tol`.

    Many float32 rows are brought near the optimum with float32 products, at half the cost; float64 does the rest.
    """
    best = _Optimum(*start, math.inf, math.inf, 0)
    if task.rows.dtype == np.float32 and task.rows.many:
        best = _descend(task, best, l2, max(tol, NARROW_GRADIENT), exact=False)
    if best.gradient > tol and best.iterations < task.trainer.max_iter:
        best = _descend(task, dataclasses.replace(best, loss=math.inf), l2, tol, exact=True)
    return best


def _descend(task: _Task, best: _Optimum, l2: float, tol: float, *, exact: bool) -> _Optimum:
    """Rounds of L-BFGS until `tol`, or until they gain nothing: the curvature at a start says little about the end."""
    while best.iterations < task.trainer.max_iter:
        found = _round(task, best, l2, tol, exact=exact)
        if found.gradient <= tol or found.loss >= best.loss:
            return found
        best = found
    return best


def _round(task: _Task, start: _Optimum, l2: float, tol: float, *, exact: bool) -> _Optimum:
    """A number of L-BFGS iterations in coordinates of even curvature."""
    from scipy.linalg import solve_triangular
    from scipy.optimize import minimize

    root = _curvature_root(task, start.weights, l2)
    shape, size = start.weight.shape, start.weight.size
    last = {"gradient": math.inf, "loss": math.inf}

    def plain(theta: F64) -> tuple[F64, F64]:
        return solve_triangular(root, theta[:size].reshape(shape), lower=True, trans="T"), theta[size:]

    def objective(theta: F64) -> tuple[float, F64]:
        loss, by_weight, by_bias = linear_objective(task, *plain(theta), l2, exact=exact)
        last.update(loss=loss, gradient=float(max(np.abs(by_weight).max(), np.abs(by_bias).max())))
        return loss, np.concatenate([solve_triangular(root, by_weight, lower=True).ravel(), by_bias])

    def enough(xk: F64) -> None:
        if last["gradient"] <= tol:
            raise StopIteration

    theta: Any = np.concatenate([(root.T @ start.weight).ravel(), start.bias])
    # ftol and gtol of zero: only the gradient of the plain weights, or exhausted precision, ends a round early.
    count = min(ROUND, task.trainer.max_iter - start.iterations)
    limits: Any = {"maxiter": count, "maxcor": 20, "ftol": 0.0, "gtol": 0.0}
    found: Any = minimize(objective, theta, jac=True, method="L-BFGS-B", callback=enough, options=limits)
    objective(found.x)
    return _Optimum(*plain(found.x), last["loss"], last["gradient"], start.iterations + int(found.nit))


def linear_objective(task: _Task, weight: F64, bias: F64, l2: float, *, exact: bool = True) -> tuple[float, F64, F64]:
    """CE(ID) + λ·CE(uniform, outliers) + ½·l2·‖W‖², each cross-entropy a mean over its rows, and the gradient."""
    labels, dtype = task.labels, np.dtype(np.float64) if exact else task.rows.dtype
    loss, by_weight, by_bias = _pass(task.rows, weight, bias, dtype, lambda z, place: cross_entropy(z, labels[place]))
    if task.outliers is not None:
        factor = task.trainer.outlier_weight
        added = _pass(task.outliers, weight, bias, dtype, lambda z, _: uniform_cross_entropy(z))
        loss += factor * added[0]
        by_weight += factor * added[1]
        by_bias += factor * added[2]
    return loss + 0.5 * l2 * float((weight**2).sum()), by_weight + l2 * weight, by_bias


def _pass(
    rows: _Rows, weight: F64, bias: F64, dtype: np.dtype[Any], losses: Callable[[Rows, slice], tuple[F64, F64]]
) -> tuple[float, F64, F64]:
    """Mean loss over all rows and its gradient; products of a block in this precision, sums of blocks in float64."""
    total, by_weight, by_bias = 0.0, np.zeros_like(weight), np.zeros_like(bias)
    narrow = weight.astype(dtype)
    for place, block in rows.blocks():
        x = block.astype(dtype, copy=False)
        loss, by_logits = losses((x @ narrow) + bias, place)
        total += float(loss.sum())
        by_weight += x.T @ by_logits.astype(dtype, copy=False)
        by_bias += by_logits.sum(axis=0)
    return total / len(rows), by_weight / len(rows), by_bias / len(rows)


def _mean_loss(rows: _Rows, labels: Ints, weights: tuple[Rows, ...]) -> float:
    total = 0.0
    for place, x in rows.blocks():
        total += float(cross_entropy(_forward(x, weights)[-1], labels[place])[0].sum())
    return total / len(rows)


def _curvature_root(task: _Task, start: tuple[F64, F64], l2: float) -> F64:
    """The Cholesky factor of Σ ½(1 − Σp²)·xxᵀ/n + l2·I, the curvature a class sees on average.

    In these coordinates L-BFGS needs a third of the passes (correlated features, 50,000 × 512). It changes the way
    and not the optimum, so that a few thousand rows are enough to estimate it.
    """
    curvature = _curvature(task.rows, start)
    if task.outliers is not None:
        curvature += task.trainer.outlier_weight * _curvature(task.outliers, start)
    curvature[np.diag_indices_from(curvature)] += l2
    return np.linalg.cholesky(curvature).astype(np.float64, copy=False)


def _curvature(rows: _Rows, weights: tuple[F64, F64]) -> F64:
    count = min(len(rows), max(4 * rows.width, 4096))
    x = rows.at(np.linspace(0, len(rows) - 1, count).astype(np.int64)).astype(np.float64)
    p = np.exp(_log_softmax(x @ weights[0] + weights[1]))
    # A floor, so that rows that are certain now still hold their directions.
    bend = np.maximum((1 - (p**2).sum(axis=1)) / 2, 1e-3)
    curvature: F64 = (x * bend[:, None]).T @ x / count
    return curvature


# ---------------------------------------------------------------------------------------------- hidden layer


def network_objective(
    weights: tuple[Rows, ...], x: Rows, labels: Ints, outliers: Rows | None, *, factor: float, l2: float
) -> tuple[float, list[Rows]]:
    """The same loss for one hidden layer of ReLUs, on a minibatch, and its gradient."""
    n_id, n_out = len(x), 0 if outliers is None else len(outliers)
    both = x if outliers is None else np.concatenate([x, outliers])
    h, z = _forward(both, weights)
    losses, by_z = cross_entropy(z[:n_id], labels)
    loss, by_logits = float(losses.mean()), by_z / n_id
    if outliers is not None:
        losses, by_z = uniform_cross_entropy(z[n_id:])
        loss += factor * float(losses.mean())
        by_logits = np.concatenate([by_logits, factor * by_z / n_out])
    loss += 0.5 * l2 * sum(float((w.astype(np.float64) ** 2).sum()) for w in (weights[0], weights[2]))
    by_z = by_logits.astype(x.dtype, copy=False)
    by_h = (by_z @ weights[2].T) * (h > 0)
    gradient = [both.T @ by_h + l2 * weights[0], by_h.sum(axis=0), h.T @ by_z + l2 * weights[2], by_z.sum(axis=0)]
    return loss, gradient


def _forward(x: Rows, weights: tuple[Rows, ...]) -> tuple[Rows, Rows]:
    """(hidden activations, logits); without a hidden layer the activations are the rows themselves."""
    if len(weights) == 2:
        return x, x @ weights[0].astype(x.dtype, copy=False) + weights[1]
    h = np.maximum(x @ weights[0] + weights[1], 0)
    return h, h @ weights[2] + weights[3]


def _train_network(task: _Task, seed: int) -> tuple[tuple[Rows, ...], dict[str, Any]]:
    """Adam until the validation loss has not got better for `PATIENCE` epochs; the best epoch is kept."""
    rng = np.random.default_rng([seed, 0])
    weights = _started(task, rng)
    steps = _Adam(weights, RATE)
    l2 = HIDDEN_L2 if task.trainer.l2 is None else task.trainer.l2
    best, best_epoch, best_loss, epoch, loss = weights, 0, math.inf, 0, math.inf
    while epoch < task.trainer.max_iter and epoch - best_epoch < PATIENCE:
        epoch += 1
        loss = _epoch(task, steps, l2, rng)
        val_loss = _mean_loss(task.val_rows, task.val_labels, steps.weights)
        if val_loss < (1 - GAIN) * best_loss:
            best, best_epoch, best_loss = steps.copy(), epoch, val_loss
    converged = epoch - best_epoch >= PATIENCE
    if not converged:
        warnings.warn(
            f"the probe's validation loss still fell after {epoch} epochs: raise max_iter", OodometerWarning, 3
        )
    told = {"iterations": epoch, "best_epoch": best_epoch, "converged": converged}
    return best, {"l2": l2, **told, "loss": loss, "val_loss": best_loss}


def _expose_network(task: _Task, weights: tuple[Rows, ...], seed: int) -> tuple[tuple[Rows, ...], dict[str, Any]]:
    """A fixed number of further epochs, as published; every minibatch meets as many outliers."""
    rng = np.random.default_rng([seed, 1])
    steps = _Adam(weights, RATE)
    l2 = HIDDEN_L2 if task.trainer.l2 is None else task.trainer.l2
    loss = math.inf
    for _ in range(EXPOSURE_EPOCHS):
        loss = _epoch(task, steps, l2, rng)
    val_loss = _mean_loss(task.val_rows, task.val_labels, steps.weights)
    told = {"iterations": EXPOSURE_EPOCHS, "converged": True, "loss": loss, "val_loss": val_loss}
    return steps.copy(), {"l2": l2, **told}


def _started(task: _Task, rng: np.random.Generator) -> tuple[Rows, ...]:
    """He's initialisation (ICCV 2015) of the hidden layer, a small one of the head."""
    hidden = task.trainer.hidden
    sizes = ((task.rows.width, hidden, 2.0), (hidden, task.classes, 1.0))
    weights = []
    for inputs, outputs, gain in sizes:
        weights += [rng.standard_normal((inputs, outputs)) * math.sqrt(gain / inputs), np.zeros(outputs)]
    return tuple(array.astype(task.rows.dtype) for array in weights)


def _epoch(task: _Task, steps: _Adam, l2: float, rng: np.random.Generator) -> float:
    """One pass over the training rows in random order; the mean loss of its minibatches."""
    order = rng.permutation(len(task.rows))
    shown = _endless(len(task.outliers), rng) if task.outliers is not None else None
    losses = []
    for place in slices(len(order), BATCH):
        index = order[place]
        outliers = None
        if task.outliers is not None and shown is not None:
            outliers = task.outliers.at(np.array([next(shown) for _ in index]))
        loss, gradient = network_objective(
            steps.weights, task.rows.at(index), task.labels[index], outliers, factor=task.trainer.outlier_weight, l2=l2
        )
        losses.append(loss)
        steps.step(gradient)
    return float(np.mean(losses))


def _endless(count: int, rng: np.random.Generator) -> Iterator[int]:
    """Numbers below `count`, one permutation after the other."""
    while True:
        yield from rng.permutation(count)


class _Adam:
    """Adam (Kingma & Ba, ICLR 2015, §2) with its published constants."""

    def __init__(self, weights: tuple[Rows, ...], rate: float) -> None:
        self.weights = tuple(array.copy() for array in weights)
        self._rate, self._count = rate, 0
        self._first = [np.zeros_like(array) for array in weights]
        self._second = [np.zeros_like(array) for array in weights]

    def step(self, gradient: list[Rows]) -> None:
        self._count += 1
        rate = self._rate * math.sqrt(1 - 0.999**self._count) / (1 - 0.9**self._count)
        for w, g, m, v in zip(self.weights, gradient, self._first, self._second, strict=True):
            np.add(m, 0.1 * (g - m), out=m)
            np.add(v, 0.001 * (g * g - v), out=v)
            np.subtract(w, rate * m / (np.sqrt(v) + 1e-8), out=w)

    def copy(self) -> tuple[Rows, ...]:
        return tuple(array.copy() for array in self.weights)


# ---------------------------------------------------------------------------------------------- checks


def _check_rows(train: Bank, val: Bank) -> int:
    """The number of classes; every one has training rows, and validation rows have no other."""
    for role, bank in (("train", train), ("validation", val)):
        _check_features(bank, role)
        if not len(bank):
            raise OodometerError(f"a probe needs {role} rows; the {role} bank has none")
        if "labels" not in bank.columns:
            raise OodometerError(f"a probe needs labels; the {role} bank has {', '.join(bank.columns)}")
    counts = np.bincount(train.labels) if train.labels.min() >= 0 else np.zeros(1)
    if len(counts) < 2 or not counts.all():
        raise OodometerError(
            f"a probe needs at least two classes, numbered 0 … classes−1 without gaps; the training labels are "
            f"{_few(np.unique(train.labels))}: renumber them with np.unique(labels, return_inverse=True)"
        )
    beyond = np.unique(val.labels[(val.labels < 0) | (val.labels >= len(counts))])
    if len(beyond):
        raise OodometerError(f"validation rows have classes that no training row has: {_few(beyond)}")
    if train.row_shape("features") != val.row_shape("features"):
        raise OodometerError(
            f"train features have rows of shape {train.row_shape('features')}, validation features "
            f"{val.row_shape('features')}: extract both with one network"
        )
    return len(counts)


def _check_features(bank: Bank, role: str, *, width: int | None = None) -> None:
    if "features" not in bank.columns:
        raise OodometerError(f"a probe needs features; the {role} bank has {', '.join(bank.columns)}")
    shape = bank.row_shape("features")
    if len(shape) != 1 or shape[0] < 1 or (width is not None and shape != (width,)):
        wanted = "one vector a row" if width is None else f"{width} features a row, as in training"
        raise OodometerError(f"a probe needs {wanted}; the {role} bank has rows of shape {shape}")
    row = derived.first_bad_row(bank, "features")
    if row is not None:
        raise OodometerError(
            f"a probe needs finite features; column 'features' of the {role} bank has NaN or infinity in row {row}: "
            "drop such rows, or extract them again in float32"
        )


def _few(values: Ints) -> str:
    shown = ", ".join(map(str, values[:8].tolist()))
    return f"{shown}, …" if len(values) > 8 else shown


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise OodometerError(f"trainer probe: {name} needs a whole number from {least}; found {value!r}")


def _is_positive(value: Any) -> bool:
    numeric = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return numeric and math.isfinite(value) and value > 0


_TRAINERS: dict[str, type[Any]] = {"frozen": Frozen, "probe": Probe}
_NETWORK_TRAINERS = {"finetune": ("oodometer.models.finetune", "Finetune")}

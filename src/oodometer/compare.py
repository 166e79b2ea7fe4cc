"""Two runs side by side: what changed in their making, their numbers and their conclusion, and whether it matters."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from oodometer import stats
from oodometer.errors import OodometerError
from oodometer.results import Results, folds_file, higher_is_better

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
BLOCK = ("id", "ood", "exposure")
DRAW = ("repeat", "fold")
METHOD = ("detector", "variant")
PASSING = ("command", "timings", "warnings", "failed", "machine")
"""Facts that differ between any two runs, or are told elsewhere."""
_AXES = {"detector": "detectors", "ood": "OOD sets", "id": "ID sets", "exposure": "exposures", "metric": "metrics"}


@dataclass(frozen=True)
class Change:
    """One fact that differs; None where a run does not have it."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Difference:
    """One method in one metric: its means over the blocks and folds both runs have, and whether they differ."""

    method: str
    metric: str
    a: float
    b: float
    pvalue: float
    """Adjusted by Holm over the methods that changed; NaN where nothing did, or where there is one fold."""
    identical: bool
    """Every single value is equal to the last bit."""
    n_values: int

    @property
    def difference(self) -> float:
        """b − a."""
        return self.b - self.a

    def says(self, alpha: float) -> str:
        """What the difference amounts to."""
        if self.identical:
            return "identical"
        if math.isnan(self.pvalue):
            return "one fold: no test"
        if self.pvalue >= alpha:
            return "within chance"
        return "better" if (self.difference > 0) == higher_is_better(self.metric) else "worse"


@dataclass(frozen=True)
class RunComparison:
    """What changed from run A to run B."""

    metric: str
    alpha: float
    facts: tuple[Change, ...]
    only_a: dict[str, tuple[str, ...]]
    """By axis (detectors, OOD sets …): what only run A has."""
    only_b: dict[str, tuple[str, ...]]
    parameters: tuple[Change, ...]
    """Methods whose chosen parameters differ."""
    same_folds: bool
    differences: tuple[Difference, ...]
    top_a: tuple[str, ...] | None
    """The best group among the common methods; None where it takes more OOD sets."""
    top_b: tuple[str, ...] | None

    @property
    def beyond_chance(self) -> tuple[Difference, ...]:
        """Methods that are better or worse in run B."""
        return tuple(one for one in self.differences if one.says(self.alpha) in ("better", "worse"))

    @property
    def headline(self) -> str:
        """Whether it matters, in one sentence."""
        n = len(self.differences)
        if all(one.identical for one in self.differences):
            return f"Nothing changed: every common value of {self.metric} is identical ({_plural(n, 'method')})."
        moved = len(self.beyond_chance)
        if self.top_a is not None and self.top_a != self.top_b:
            tail = "by no more than chance" if not moved else f"and {_plural(moved, 'method')} beyond chance"
            return (
                f"The conclusion changed: the best group was {', '.join(self.top_a)} and is "
                f"{', '.join(self.top_b or ())}; values moved {tail}."
            )
        kept = "" if self.top_a is None else f" The best group is the same: {', '.join(self.top_a)}."
        if not moved:
            return f"Values changed, by no more than chance.{kept}"
        verb = "differs" if moved == 1 else "differ"
        return f"{moved} of {_plural(n, 'method')} {verb} beyond chance.{kept}"

    def to_pandas(self) -> pd.DataFrame:
        """One row a method."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    **{"method": one.method, "metric": one.metric, "a": one.a, "b": one.b},
                    **{"difference": one.difference, "pvalue": one.pvalue, "says": one.says(self.alpha)},
                }
                for one in self.differences
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""

        def changes(found: tuple[Change, ...]) -> list[dict[str, Any]]:
            return [{"name": one.name, "a": one.a, "b": one.b} for one in found]

        return {
            **{"headline": self.headline, "metric": self.metric, "alpha": self.alpha, "same_folds": self.same_folds},
            **{"facts": changes(self.facts), "parameters": changes(self.parameters)},
            **{"only_a": self.only_a, "only_b": self.only_b, "best_a": self.top_a, "best_b": self.top_b},
            "differences": self.to_pandas().to_dict("records"),
        }


def compare(a: Results, b: Results, *, metric: str | None = None, alpha: float = 0.05) -> RunComparison:
    """Compare the methods, OOD sets and folds that both runs have.

    A difference is tested over folds, with the variance s²(1/n + n_test/n_train): pair by pair where both runs have
    the same folds, as two samples otherwise.
    """
    if not 0 < alpha < 1:
        raise OodometerError(f"alpha: a level between 0 and 1 was needed, {alpha} was found.")
    left, right = a.to_pandas(), b.to_pandas()
    metric = _metric(left, right, metric)
    paired = _same_folds(a, b, left, right)
    table = _common(left, right, metric)
    ratio = max(float(a.facts["test_to_train"]), float(b.facts["test_to_train"]))
    return RunComparison(
        metric=metric,
        alpha=alpha,
        facts=tuple(_changed(_flat(a.facts), _flat(b.facts))),
        only_a=_only(left, right),
        only_b=_only(right, left),
        parameters=_other_parameters(_chosen(left), _chosen(right)),
        same_folds=paired,
        differences=_differences(table, metric, ratio, paired),
        top_a=_top(table["a"], metric, alpha),
        top_b=_top(table["b"], metric, alpha),
    )


# ------------------------------------------------------------------------------------------------ making


def _flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested facts by dotted names; what is empty or None is absent."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        if not prefix and name in PASSING:
            continue
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            found |= _flat({_item(place, inner): inner for place, inner in enumerate(value)}, f"{prefix}{name}.")
        elif value is not None:
            found[f"{prefix}{name}"] = value
    return found


def _item(place: int, inner: Any) -> str:
    """A member of a list by its own name where it has one, so that an insertion does not shift the rest."""
    name = inner.get("name") if isinstance(inner, dict) else None
    variant = inner.get("variant") if isinstance(inner, dict) else None
    return " ".join(str(part) for part in (name, variant) if part) or str(place)


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Change]:
    """Facts that differ; a part that one run lacks altogether is one change."""
    told = set()
    for name in dict.fromkeys([*a, *b]):
        if name in a and name in b:
            if a[name] != b[name]:
                yield Change(name, a[name], b[name])
            continue
        lacking, having = (b, a) if name in a else (a, b)
        part = _absent_part(name, lacking)
        if part not in told:
            told.add(part)
            value = having[name] if part == name else "present"
            yield Change(part, value if name in a else None, value if name in b else None)


def _absent_part(name: str, lacking: Mapping[str, Any]) -> str:
    """The shortest beginning of a dotted name that the other side does not have."""
    pieces = name.split(".")
    beginnings = [".".join(pieces[: n + 1]) for n in range(len(pieces))]
    absent = (start for start in beginnings if not any(f"{other}.".startswith(f"{start}.") for other in lacking))
    return next(absent, name)


def _only(mine: pd.DataFrame, other: pd.DataFrame) -> dict[str, tuple[str, ...]]:
    found = {}
    for axis, title in _AXES.items():
        there = set(other[axis])
        if extra := tuple(name for name in mine[axis].unique().tolist() if name not in there):
            found[title] = extra
    return found


def _chosen(frame: pd.DataFrame) -> dict[str, str]:
    """The parameters of each method, with how often each setting was chosen where there are several."""
    at = [*DRAW, *BLOCK]
    cells = frame.assign(method=_names(frame)).drop_duplicates([*at, "method", "params"])
    found = {}
    for name, part in cells.groupby("method", sort=False)["params"]:
        counts = part.value_counts(sort=False).sort_index()
        several = len(counts) > 1
        found[str(name)] = "; ".join(f"{params} ({n}×)" if several else str(params) for params, n in counts.items())
    return found


def _other_parameters(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[Change, ...]:
    return tuple(Change(name, a[name], b[name]) for name in a if name in b and a[name] != b[name])


def _names(frame: pd.DataFrame) -> pd.Series[Any]:
    variant = frame["variant"].astype(str)
    return frame["detector"].where(variant == "", frame["detector"] + ":" + variant)


def _same_folds(a: Results, b: Results, left: pd.DataFrame, right: pd.DataFrame) -> bool:
    """Whether both runs test the same rows in the same folds, as far as both go."""
    at = ["repeat", "ood"]
    common = left[at].drop_duplicates().merge(right[at].drop_duplicates())
    files = [folds_file(int(repeat), str(ood)) for repeat, ood in common.itertuples(index=False)]
    return bool(files) and all(_digest(a, name) == _digest(b, name) for name in files)


def _digest(results: Results, name: str) -> Any:
    path = results.folder / "folds" / name
    try:
        return json.loads(path.read_text(encoding="ascii"))["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        raise OodometerError(f"{path}: the folds of the run were needed and cannot be read; run it again") from None


# ------------------------------------------------------------------------------------------------ numbers


def _metric(left: pd.DataFrame, right: pd.DataFrame, wanted: str | None) -> str:
    there = set(right["metric"])
    both = [str(name) for name in left["metric"].unique().tolist() if name in there]
    if not both or (wanted is not None and wanted not in both):
        raise OodometerError(
            f"metric: {wanted or 'one'} in both runs was needed; both have: {', '.join(both) or 'none'}."
        )
    return wanted or ("auroc" if "auroc" in both else both[0])


def _common(left: pd.DataFrame, right: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The values of both runs, by (repeat, fold, block, method); those of one run only are left out."""
    keys = [*DRAW, *BLOCK, "method"]
    sides = []
    for frame in (left, right):
        side = frame[frame["metric"] == metric].assign(method=_names(frame))
        if side.duplicated(keys).any():
            first = side.loc[side.duplicated(keys), "method"].iloc[0]
            raise OodometerError(f"{first}: one setting of the parameters in a fold was needed, several were found.")
        sides.append(side.set_index(keys)["value"])
    table = sides[0].to_frame("a").join(sides[1].rename("b"), how="inner").dropna()
    if table.empty:
        raise OodometerError(
            f"{metric}: values of the same detector, OOD set and fold in both runs were needed, none was found. "
            "Runs of other data, or of other detectors, have nothing to compare."
        )
    return table


def _differences(table: pd.DataFrame, metric: str, ratio: float, paired: bool) -> tuple[Difference, ...]:
    raw = {str(name): _tested(part, ratio, paired) for name, part in table.groupby(level="method", sort=False)}
    known = [name for name, p in raw.items() if not math.isnan(p)]
    adjusted = dict(zip(known, stats.holm([raw[name] for name in known]).tolist(), strict=True)) if known else {}
    found = []
    for name, part in table.groupby(level="method", sort=False):
        means = part.groupby(level=list(BLOCK), sort=False).mean().mean()
        same = bool((part["a"] == part["b"]).all())
        p = adjusted.get(str(name), math.nan)
        found.append(Difference(str(name), metric, float(means["a"]), float(means["b"]), p, same, len(part)))
    return tuple(found)


def _tested(part: pd.DataFrame, ratio: float, paired: bool) -> float:
    """p of one method's difference over folds, each fold being the mean over the blocks; NaN: nothing to test."""
    folds = part.groupby(level=list(DRAW)).mean()
    a, b = folds["a"].to_numpy(np.float64), folds["b"].to_numpy(np.float64)
    if (part["a"] == part["b"]).all() or len(a) < 2:
        return math.nan
    samples = [b - a] if paired else [a, b]
    return corrected_t(samples, float(b.mean() - a.mean()), ratio)


def corrected_t(samples: Sequence[Floats], difference: float, test_to_train: float) -> float:
    """Two-sided p of a difference of means over folds whose training rows overlap.

    Each sample's mean has the variance s²(1/n + n_test/n_train) (Nadeau and Bengio, Machine Learning 2003,
    equation 9); two samples add up with Welch and Satterthwaite's degrees of freedom.
    """
    from scipy.special import stdtr

    parts = [(float(s.var(ddof=1)) * (1 / len(s) + test_to_train) if np.ptp(s) else 0.0, len(s) - 1) for s in samples]
    variance = math.fsum(part for part, _ in parts)
    if not variance:
        return float(difference == 0)
    df = variance**2 / math.fsum(part**2 / degrees for part, degrees in parts)
    return float(2 * stdtr(df, -abs(difference) / math.sqrt(variance)))


def _top(values: pd.Series[float], metric: str, alpha: float) -> tuple[str, ...] | None:
    """The best group among the methods that have a value in every common block; None without two blocks."""
    import warnings

    blocks = values.groupby(level=[*BLOCK, "method"], sort=False).mean().unstack("method").dropna(axis=1)
    if min(blocks.shape) < 2:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few blocks and ties were told when the runs were made
        found = stats.cliques(stats.conover(blocks, higher_is_better=higher_is_better(metric)), alpha)
    return tuple(sorted(map(str, found.top)))


def _plural(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"

"""The report: one HTML file that opens offline, with its data, style and script inside."""

from __future__ import annotations

import base64
import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oodometer import detectors
from oodometer.errors import OodometerError
from oodometer.report import citations, explorer, verdict
from oodometer.report.layout import Layout, arrow, label_of
from oodometer.report.verdict import Reading
from oodometer.results import higher_is_better, write_atomically

if TYPE_CHECKING:
    import pandas as pd

    from oodometer.results import Results

SMALL_SET = 100
"""Below so many test rows a set's numbers say little, and the report warns."""
MOST_FOLD_VALUES = 60_000
"""Beyond so many values the page shows the folds of the deciding metric only."""
MOST_CLIQUES = 12
MOST_NAMED = 6
_FOLD = ("repeat", "fold", "exposure")
FACTS = {"spec": "the study's settings", "test_to_train": "test rows per training row", "timings": "time"}
TIMINGS = {"cells": "last run", "cpu": "CPU, all runs", "computed": "cells computed", "kept": "cells kept"}
"""What run.json calls otherwise than a reader would."""


def write(
    results: Results, path: str | os.PathLike[str], *, metric: str | None = None, alpha: float = 0.05, title: str = ""
) -> Path:
    """Write the report of a run.

    `metric` decides the verdict (AUROC unless the study has none), `alpha` is the level of its tests.
    """
    target = Path(path)
    if not 0 < alpha < 1:
        raise OodometerError(f"alpha: a level between 0 and 1 was needed, {alpha} was found.")
    write_atomically(target, render(results, metric=metric, alpha=alpha, title=title).encode())
    return target


def render(results: Results, *, metric: str | None = None, alpha: float = 0.05, title: str = "") -> str:
    """The page as text."""
    import jinja2

    layout = Layout.of(results)
    reading = verdict.read(layout, layout.metric(metric), alpha=alpha)
    curves = explorer.data(results, layout)
    # Every name in a study is a stranger's text: autoescape in the template, textContent in the script.
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    searches = _searches(results)
    data = {**_tables(layout, reading), "explorer": curves, "tuning": _tuning(results, layout, searches)}
    return environment.get_template("template.html").render(
        title=title or layout.study,
        layout=layout,
        reading=reading,
        metric=label_of(reading.metric),
        arrow=arrow(reading.metric),
        verdict=_verdict(reading, layout, alpha),
        alpha=alpha,
        ranking=_ranking(reading),
        regimes=_regimes(layout, reading.metric, alpha),
        warnings=_warnings(results, layout, reading, curves),
        failures=_failures(results.failed),
        detectors=[_detector(results, layout, reading, name, searches) for name in _order(layout, reading)],
        provenance=_provenance(results),
        command=_command(results),
        accuracy=_accuracy(results),
        bibtex=citations.bibtex(citations.keys(layout)),
        data=_packed(data),
        css=_asset("report.css"),
        js=_asset("report.js"),
    )


def _asset(name: str) -> str:
    return files("oodometer.report").joinpath(name).read_text(encoding="utf-8")


def _packed(data: Mapping[str, Any]) -> str:
    """JSON, deflated, in base64: small, and no name in it can end the script that holds it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode())).decode("ascii")


# ------------------------------------------------------------------------------------------------ words


def _verdict(reading: Reading, layout: Layout, alpha: float) -> dict[str, Any]:
    return {
        "headline": verdict.headline(reading),
        "rows": {
            "How much" if reading.basis == "alone" else "By how much": verdict.by_how_much(reading),
            "How sure": verdict.how_sure(reading, alpha),
            "On what": verdict.on_what(reading, layout),
        },
    }


def _mark(reading: Reading, name: str) -> str:
    """What tables say beside a method of the best group; nothing where no difference was found."""
    if not reading.drawn or reading.basis in ("none", "alone") or name not in reading.top:
        return ""
    return "best" if name == reading.order[0] else "tied"


def _order(layout: Layout, reading: Reading) -> list[str]:
    """Best first; methods that could not be compared last."""
    return [*reading.order, *(name for name in layout.methods if name not in reading.order)]


def _ranking(reading: Reading) -> dict[str, Any]:
    """One row a method: its rank with an interval, its mean, p against the best, the cliques it is in."""
    every = [clique for clique in reading.cliques or () if len(clique) > 1]
    cliques = every[:MOST_CLIQUES]
    rows = [
        {
            "name": name,
            "mark": _mark(reading, name),
            "mean": verdict.percent(reading.means[name]),
            "p": reading.pvalues.get(name),
            "rank": _rank(reading, name),
            "cliques": [name in clique for clique in cliques],
        }
        for name in reading.order
    ]
    return {
        "rows": rows,
        "cliques": range(len(cliques)),
        "undrawn": len(every) - len(cliques),
        "last": len(reading.order),
    }


def _rank(reading: Reading, name: str) -> dict[str, float] | None:
    """The average rank with its interval, and where they lie on an axis from 0 to 100."""
    if reading.redrawn is None:
        return None
    found = reading.redrawn
    at = found.names.index(name)
    numbers = {"rank": found.average_ranks[at], "low": found.low[at], "high": found.high[at]}
    span = max(len(found.names) - 1, 1)
    places = {f"{key}_at": round(100 * (float(value) - 1) / span, 2) for key, value in numbers.items()}
    return {**{key: float(value) for key, value in numbers.items()}, **places}


def _regimes(layout: Layout, metric: str, alpha: float) -> list[dict[str, Any]]:
    """The best detectors under other metrics, exposures and groups: how far the verdict depends on the question."""
    masks: dict[str, tuple[str, pd.Series[Any] | None]] = {
        f"{label_of(other)} {arrow(other)}": (other, None) for other in layout.metrics if other != metric
    }
    frame = layout.frame
    if len(layout.exposures) > 1:
        masks |= {f"exposure: {name}": (metric, frame["exposure"] == name) for name in layout.exposures}
    groups = layout.by_group()
    if len(groups) > 1:
        masks |= {f"group: {name or '(none)'}": (metric, frame["group"] == name) for name in groups}
    return [row for label, question in masks.items() if (row := _regime(layout, label, *question, alpha=alpha))]


def _regime(
    layout: Layout, label: str, metric: str, where: pd.Series[Any] | None, *, alpha: float
) -> dict[str, Any] | None:
    try:
        found = verdict.read(layout, metric, alpha=alpha, where=where)
    except OodometerError:
        return {"label": label, "top": "no detector has all values", "mean": "", "blocks": 0, "basis": ""}
    basis = {"ranks": "rank tests", "folds": "folds of one set", "none": "one value", "alone": ""}[found.basis]
    more = len(found.top) - MOST_NAMED
    top = f"{', '.join(found.top[:MOST_NAMED])} and {more} more" if more > 0 else verdict.listed(found.top)
    mean = verdict.percent(found.means[found.order[0]])
    return {
        "label": label,
        "top": top if found.drawn else "no difference shown",
        "mean": mean,
        "blocks": found.n_blocks,
        "basis": basis,
    }


def _warnings(results: Results, layout: Layout, reading: Reading, curves: Mapping[str, Any]) -> list[str]:
    """What a reader has to know before believing the verdict."""
    found: list[str] = []
    if results.failed:
        which = verdict.listed(list(dict.fromkeys(map(_failed_name, results.failed))))
        found.append(f"{verdict.plural(len(results.failed), 'cell')} failed ({which}); Provenance has the reasons.")
    if reading.left_out:
        names = verdict.listed(reading.left_out)
        found.append(f"Left out of the verdict, because a value is missing somewhere: {names}.")
    if reading.dropped:
        found.append(f"{verdict.plural(len(reading.dropped), 'block')} without any value left out of the verdict.")
    if len(layout.exposures) > 1 and reading.basis == "ranks":
        found.append(
            "Blocks with and without outlier exposure share their OOD sets and are not independent, so that p-values "
            "are too small; the lines by exposure below the ranking are the stricter reading."
        )
    missing = layout.frame.loc[layout.frame["value"].isna(), "metric"].value_counts()
    found += [f"{label_of(str(name))}: {verdict.plural(count, 'value')} missing." for name, count in missing.items()]
    said = [str(one) for one in results.facts.get("warnings", [])]
    return [*found, *_shared_sources(results), *_small_sets(layout, curves), *reading.notes, *said]


def _failed_name(cell: Mapping[str, Any]) -> str:
    return " ".join(str(cell[key]) for key in ("detector", "variant") if cell.get(key)) or "a cell"


def _failures(failed: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each reason once, with what failed of it and how often."""
    times = Counter((_failed_name(cell), str(cell["error"])) for cell in failed)
    return [{"name": name, "error": error, "times": n} for (name, error), n in times.items()]


def _small_sets(layout: Layout, curves: Mapping[str, Any]) -> list[str]:
    """Sets whose rows are few in a fold."""
    fewest: dict[str, int] = {}
    for key, entry in curves["entries"].items():
        inside, outside = entry["n"]
        for name, n in (("in distribution", inside), (layout.sets[int(key.split(",")[3])], outside)):
            fewest[name] = min(n, fewest.get(name, n))
    small = {name: n for name, n in fewest.items() if n < SMALL_SET}
    if not small:
        return []
    listed = verdict.listed([f"{name} ({n} rows)" for name, n in list(small.items())[:MOST_NAMED]])
    more = f" and {len(small) - MOST_NAMED} more sets" if len(small) > MOST_NAMED else ""
    return [f"Fewer than {SMALL_SET} test rows in a fold: {listed}{more}. Their numbers vary widely by chance alone."]


def _shared_sources(results: Results) -> list[str]:
    """Parameters that were chosen on the source of a test set."""
    tuning = results.tuning
    shared = tuning[tuning["shared"].astype(bool) & (tuning["chosen"] == 1)]
    if shared.empty:
        return []
    names = verdict.listed(sorted(shared["detector"].unique()))
    sources = verdict.listed(sorted(shared["shared"].unique()))
    return [
        f"Parameters of {names} were chosen on rows of a source that is also tested ({sources}): "
        "these results are not comparable with results that were not."
    ]


# ------------------------------------------------------------------------------------------------ numbers


def _tables(layout: Layout, reading: Reading) -> dict[str, Any]:
    """Means, intervals and fold values of every metric, flat in the order (exposure, method, set[, draw])."""
    shape = (len(layout.exposures), len(layout.methods), len(layout.sets))
    many = len(layout.metrics) * int(np.prod(shape)) * len(layout.draws) > MOST_FOLD_VALUES
    shown = [reading.metric] if many else list(layout.metrics)
    return {
        "metrics": [
            {"key": name, "label": label_of(name), "higher": higher_is_better(name)} for name in layout.metrics
        ],
        "primary": reading.metric,
        "methods": [{"name": name, "mark": _mark(reading, name)} for name in layout.methods],
        "order": [layout.methods.index(name) for name in _order(layout, reading)],
        "sets": [{"name": name, "group": layout.groups.get(name, "")} for name in layout.sets],
        "exposures": list(layout.exposures),
        "draws": [f"repeat {repeat}, fold {fold}" for repeat, fold in layout.draws]
        if len({repeat for repeat, _ in layout.draws}) > 1
        else [f"fold {fold}" for _, fold in layout.draws],
        "means": {name: _cells(layout, name, shape) for name in layout.metrics},
        "folds": {name: _fold_values(layout, name, shape) for name in shown},
        "pairs": _pairs(layout, reading),
    }


def _places(layout: Layout, rows: pd.DataFrame) -> tuple[Any, ...]:
    axes = (("exposure", layout.exposures), ("method", layout.methods), ("set", layout.sets))
    return tuple(rows[axis].map({name: i for i, name in enumerate(names)}).to_numpy() for axis, names in axes)


def _cells(layout: Layout, metric: str, shape: tuple[int, ...]) -> dict[str, list[float | None]]:
    """Means over folds and half their 95 % intervals."""
    cells = layout.cells(metric).reset_index()
    mean, half = np.full(shape, np.nan), np.full(shape, np.nan)
    at = _places(layout, cells)
    mean[at], half[at] = cells["mean"], cells["half"]
    return {"mean": _plain(mean), "half": _plain(half)}


def _fold_values(layout: Layout, metric: str, shape: tuple[int, ...]) -> list[float | None]:
    rows = layout.frame[layout.frame["metric"] == metric]
    draws = {draw: i for i, draw in enumerate(layout.draws)}
    draw = np.array([draws[at] for at in zip(rows["repeat"].tolist(), rows["fold"].tolist(), strict=True)])
    values = np.full((*shape, len(draws)), np.nan)
    values[(*_places(layout, rows), draw)] = rows["value"]
    return _plain(values)


def _plain(values: Any) -> list[float | None]:
    """Flat; None where there is no number."""
    return [None if math.isnan(value) else value for value in values.ravel().tolist()]


def _pairs(layout: Layout, reading: Reading) -> dict[str, Any] | None:
    """What the tests say of every two methods, by their places."""
    found = reading.pairwise
    if found is None:
        return None
    return {
        "methods": [layout.methods.index(str(name)) for name in found.names],
        "adjusted": np.round(found.pvalues, 6).tolist(),
        "unadjusted": np.round(found.unadjusted, 6).tolist(),
        "ranks": found.average_ranks.tolist(),
        "means": [reading.means[str(name)] for name in found.names],
    }


def _tuning(
    results: Results, layout: Layout, searches: Mapping[tuple[Any, ...], Any]
) -> dict[str, list[dict[str, Any]]]:
    """For each tuned detector its grid: mean criterion over the searches, its range, how often each was chosen."""
    tuning = results.tuning
    found: dict[str, list[dict[str, Any]]] = {}
    for (detector, variant), rows in tuning.groupby(["detector", "variant"], sort=False):
        name = f"{detector}:{variant}" if variant and detector not in layout.methods else str(detector)
        points = rows.groupby("params", sort=False)
        table = points["value"].agg(["mean", "min", "max"])
        times = _times(rows[rows["chosen"] == 1], searches)
        table["chosen"] = [times[str(params)] for params in table.index]
        table["reason"] = points["reason"].agg(lambda texts: next((t for t in texts if t), ""))
        table["status"] = points["status"].first()
        found[name] = [
            {
                "params": _params(str(params)),
                "values": _plain(np.array([row["mean"], row["min"], row["max"]], np.float64)),
                "chosen": int(row["chosen"]),
                "status": str(row["status"]),
                "reason": str(row["reason"]),
                "criterion": str(rows["criterion"].iloc[0]),
            }
            for params, row in table.iterrows()
        ]
    return found


def _searches(results: Results) -> dict[tuple[Any, ...], Any]:
    """The search behind each choice, by detector, variant, fold and OOD set; sets with equal curves share one."""
    by = ["detector", "variant", *_FOLD, "ood"]
    groups = results.tuning.groupby(by, sort=False)["value"]
    return {tuple(at): (*at[:-1], values.to_numpy(np.float64).tobytes()) for at, values in groups}


def _times(rows: pd.DataFrame, searches: Mapping[tuple[Any, ...], Any]) -> Counter[str]:
    """How often each parameter set was taken: once a search, or once a fold where nothing was searched."""
    uses: dict[Any, None] = {}
    names = ["detector", "variant", *_FOLD, "ood", "params"]
    for *at, ood, params in rows[names].drop_duplicates().itertuples(index=False):
        uses[searches.get((*at, ood), tuple(at)), str(params)] = None
    return Counter(params for _, params in uses)


def _params(text: str) -> str:
    """{"k": 5} as a reader writes it: k=5."""
    values = json.loads(text) if text else {}
    return ", ".join(f"{name}={value}" for name, value in values.items()) or "defaults"


# ------------------------------------------------------------------------------------------------ detectors, facts


def _detector(
    results: Results, layout: Layout, reading: Reading, name: str, searches: Mapping[tuple[Any, ...], Any]
) -> dict[str, Any]:
    rows = layout.frame[layout.frame["method"] == name]
    own = rows[rows["metric"] == reading.metric].groupby("set", sort=False)["value"].mean().dropna()
    ordered = own.sort_values(ascending=not higher_is_better(reading.metric), kind="stable")
    ends = [(str(name), verdict.percent(value)) for name, value in ordered.items()]
    return {
        "name": name,
        "at": layout.methods.index(name),
        "card": _card(layout.origins[name][0]),
        "mark": _mark(reading, name),
        "rank": reading.order.index(name) + 1 if name in reading.order else None,
        "mean": verdict.percent(reading.means[name]) if name in reading.means else "incomplete",
        "params": [(_params(text), times) for text, times in _times(rows, searches).most_common()],
        "ends": ends[:1] + ends[1:][-1:],
        "failures": _failures([cell for cell in results.failed if _origin(cell) == layout.origins[name]]),
    }


def _origin(cell: Mapping[str, Any]) -> tuple[Any, Any]:
    return cell.get("detector"), cell.get("variant", "")


def _card(name: str) -> dict[str, Any] | None:
    try:
        card = detectors.get(name).card
    except OodometerError:
        return None
    return {
        "title": card.title,
        "description": card.description,
        "equation": card.equation,
        "needs": ", ".join(sorted(card.needs)),
        "cost": card.cost,
        "cite": citations.short(card.cite) if card.cite else "",
        "key": card.cite,
        "parameters": card.parameters,
    }


def _accuracy(results: Results) -> list[dict[str, Any]]:
    """The classifiers' test accuracy by exposure; OOD sets that share a classifier count it once."""
    at = ["repeat", "fold", "ood", "exposure"]
    cells = explorer.index_of(results)[[*at, "classifier_cell"]].drop_duplicates(at)
    table = results.classifiers.merge(cells, on=at).drop_duplicates("classifier_cell").dropna(subset=["accuracy"])
    return [
        {"exposure": name, "mean": part.mean(), "min": part.min(), "max": part.max(), "classifiers": len(part)}
        for name, part in table.groupby("exposure", sort=False)["accuracy"]
    ]


def _command(results: Results) -> str:
    """The exact command, as it was typed."""
    command = results.facts.get("command", "")
    return command if isinstance(command, str) else " ".join(map(str, command))


def _provenance(results: Results) -> dict[str, Any]:
    """What run.json tells, without what has a place of its own; deep parts as JSON."""
    own = ("failed", "warnings", "command")
    facts = {key: value for key, value in results.facts.items() if key not in own}
    return {
        FACTS.get(key, key): {"json": json.dumps(value, indent=1, ensure_ascii=False)}
        if _is_deep(value)
        else {"plain": _readable(key, value)}
        for key, value in facts.items()
    }


def _readable(key: str, value: Any) -> Any:
    """A fact with its unit, and no more digits than mean something."""
    if key == "timings" and isinstance(value, dict):
        return {TIMINGS.get(name, name): f"{n:.1f} s" if isinstance(n, float) else n for name, n in value.items()}
    if key == "device" and value is None:
        return "CPU, with NumPy"
    return f"{value:.4g}" if isinstance(value, float) else value


def _is_deep(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values())

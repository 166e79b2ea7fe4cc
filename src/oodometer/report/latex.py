"""Tables for papers, LaTeX and Markdown: best bold, the best group marked, mean ± half-width, group columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from oodometer.errors import OodometerError
from oodometer.report import verdict
from oodometer.report.layout import Layout, arrow, label_of
from oodometer.results import higher_is_better

if TYPE_CHECKING:
    import pandas as pd

    from oodometer.results import Results

Style = Literal["groups", "pairs"]
MARK = "†"
"""Beside methods that cannot be told apart from the best one."""


@dataclass(frozen=True)
class Number:
    """One cell: the mean, the half-width of its interval (NaN: none), and whether it is the best of its line."""

    mean: float
    half: float
    best: bool


@dataclass(frozen=True)
class Line:
    """One row of a table: its labels and its numbers."""

    labels: tuple[str, ...]
    marked: bool
    cells: tuple[Number, ...]


@dataclass(frozen=True)
class Table:
    """A table without a language: headings over spans, column titles, lines in blocks, a note."""

    spans: tuple[tuple[str, int], ...]
    titles: tuple[str, ...]
    blocks: tuple[tuple[str, tuple[Line, ...]], ...]
    marked: tuple[bool, ...]
    """Whether a column's title carries the mark."""
    note: str


def table(results: Results, **options: Any) -> str:
    """A LaTeX table (booktabs) of the study; for the options see `build`."""
    digits, interval = options.pop("digits", 2), options.get("interval", True)
    caption, label = options.pop("caption", ""), options.pop("label", "")
    return latex(build(results, **options), digits=digits, interval=interval, caption=caption, label=label)


def markdown(results: Results, **options: Any) -> str:
    """The same table in Markdown."""
    digits, interval = options.pop("digits", 2), options.get("interval", True)
    return to_markdown(build(results, **options), digits=digits, interval=interval)


def build(
    results: Results,
    *,
    metrics: str | Sequence[str] | None = None,
    style: Style = "groups",
    exposure: str | None = None,
    alpha: float = 0.05,
    interval: bool = True,
) -> Table:
    """The table of a study, in per cent.

    `style="groups"`: detectors × OOD sets with an average of each group, a block of lines for each metric, as in
    OpenMIBOOD. `style="pairs"`: (exposure, ID, OOD) × detectors, one metric, as in DCV-ROOD. `interval` adds the
    half-width of the 95 % interval of each mean over folds.
    """
    layout = Layout.of(results)
    names = [metrics] if isinstance(metrics, str) else list(metrics or [layout.metric(None)])
    chosen = [layout.metric(name) for name in names]
    if exposure is not None and exposure not in layout.exposures:
        raise OodometerError(f"exposure: one of {', '.join(layout.exposures)} was needed, {exposure!r} was found.")
    exposures = [exposure] if exposure is not None else list(layout.exposures)
    if style == "groups":
        return _groups(layout, chosen, exposures, alpha, interval)
    if style == "pairs":
        if len(chosen) != 1:
            raise OodometerError(f'style="pairs" shows one metric, {len(chosen)} were found: make a table for each.')
        return _pairs(layout, chosen[0], exposures, alpha, interval)
    raise OodometerError(f'style: "groups" or "pairs" was needed, {style!r} was found.')


# ------------------------------------------------------------------------------------------------ what is in it


@dataclass(frozen=True)
class _Group:
    """OOD sets that stand together, with their average if there are several groups."""

    name: str
    sets: tuple[str, ...]
    average: bool

    @property
    def titles(self) -> tuple[str, ...]:
        return (*self.sets, *(["Avg"] if self.average else []))


def _groups(layout: Layout, metrics: list[str], exposures: list[str], alpha: float, interval: bool) -> Table:
    found = layout.by_group()
    groups = [_Group(name, tuple(sets), len(found) > 1 and len(sets) > 1) for name, sets in found.items()]
    overall = ["All"] if len(layout.sets) > 1 else []
    titles = ("Detector", *(title for group in groups for title in group.titles), *overall)
    spans = [(group.name, len(group.titles)) for group in groups] if len(groups) > 1 else []
    return Table(
        spans=(*spans, *(("", 1) for _ in overall if spans)),
        titles=titles,
        blocks=tuple(
            (_block_title(metric, exposure, exposures), _metric_lines(layout, metric, exposure, groups, alpha))
            for metric in metrics
            for exposure in exposures
        ),
        marked=(False,) * len(titles),
        note=_note(layout, alpha, interval),
    )


def _block_title(metric: str, exposure: str, exposures: list[str]) -> str:
    return f"{label_of(metric)} {arrow(metric)}" + (f", {exposure} exposure" if len(exposures) > 1 else "")


def _metric_lines(layout: Layout, metric: str, exposure: str, groups: list[_Group], alpha: float) -> tuple[Line, ...]:
    means, halves = _means(layout, metric, exposure)
    columns: list[tuple[pd.Series[Any], pd.Series[Any] | None]] = []
    for group in groups:
        columns += [(means[name], halves[name]) for name in group.sets]
        if group.average:
            columns.append((means[list(group.sets)].mean(axis=1, skipna=False), None))
    if len(layout.sets) > 1:
        columns.append((means.mean(axis=1, skipna=False), None))
    order, top = _order_and_top(layout, metric, exposure, alpha)
    best = [_best(column, metric) for column, _ in columns]
    return tuple(
        Line(
            labels=(name,),
            marked=name in top,
            cells=tuple(_number(c, half, name, value) for (c, half), value in zip(columns, best, strict=True)),
        )
        for name in order
    )


def _pairs(layout: Layout, metric: str, exposures: list[str], alpha: float, interval: bool) -> Table:
    order, top = _order_and_top(layout, metric, None if len(exposures) > 1 else exposures[0], alpha)
    ids = dict(zip(layout.frame["set"], layout.frame["id"], strict=True))
    oods = dict(zip(layout.frame["set"], layout.frame["ood"], strict=True))
    lines = []
    for exposure in exposures:
        means, halves = _means(layout, metric, exposure)
        for name in layout.sets:
            row = means.loc[:, name]
            best = _best(row, metric)
            cells = tuple(_number(row, halves[name], method, best) for method in order)
            lines.append(Line((exposure, ids[name], oods[name]), False, cells))
    return Table(
        spans=(),
        titles=("Exposure", "ID", "OOD", *order),
        blocks=((f"{label_of(metric)} {arrow(metric)}", tuple(lines)),),
        marked=(False, False, False, *(name in top for name in order)),
        note=_note(layout, alpha, interval),
    )


def _means(layout: Layout, metric: str, exposure: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Methods × sets: the means, and the half-widths of their intervals."""
    cells = layout.cells(metric).xs(exposure, level="exposure")
    methods, sets = list(layout.methods), list(layout.sets)
    mean, half = (cells[name].unstack("set").reindex(index=methods, columns=sets) for name in ("mean", "half"))
    return mean, half


def _order_and_top(layout: Layout, metric: str, exposure: str | None, alpha: float) -> tuple[list[str], set[str]]:
    """Methods best first, those that cannot be compared last; the best group, if any difference was found."""
    where = None if exposure is None else layout.frame["exposure"] == exposure
    try:
        reading = verdict.read(layout, metric, alpha=alpha, where=where)
    except OodometerError:
        return list(layout.methods), set()
    order = [*reading.order, *(name for name in layout.methods if name not in reading.order)]
    return order, set(reading.top) if reading.drawn and reading.basis not in ("none", "alone") else set()


def _best(values: pd.Series[Any], metric: str) -> float:
    return float(values.max() if higher_is_better(metric) else values.min())


def _number(values: pd.Series[Any], halves: pd.Series[Any] | None, name: str, best: float) -> Number:
    mean = float(values[name])
    return Number(mean, float("nan") if halves is None else float(halves[name]), mean == best)


def _note(layout: Layout, alpha: float, interval: bool) -> str:
    draws = verdict.plural(len(layout.draws), "fold")
    reach = " ± half the 95 % interval" if interval and len(layout.draws) > 1 else ""
    return (
        f"Means over {draws}{reach}, in per cent. Bold: best. {MARK}: cannot be told apart from the best "
        f"(level {alpha:g}, adjusted by Holm)."
    )


# ------------------------------------------------------------------------------------------------ LaTeX

_TEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "{}$&#_%"},
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",  # \textquotedbl needs another font encoding
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "→": r"$\rightarrow$",
    "±": r"$\pm$",
    MARK: r"$^\dagger$",
}


def tex(text: str) -> str:
    """A name as LaTeX prints it; control characters become blanks."""
    plain = re.sub(r"[\x00-\x1f\x7f]", " ", text)
    return "".join(_TEX.get(sign, sign) for sign in plain)


def latex(found: Table, *, digits: int, interval: bool, caption: str, label: str) -> str:
    """The table in booktabs' style."""
    labels = len(found.titles) - _width(found)
    lines = [
        r"% needs \usepackage{booktabs} and, for names beyond ASCII, XeLaTeX or LuaLaTeX",
        r"\begin{table}",
        r"\centering",
        *([f"\\caption{{{tex(caption)}}}"] if caption else []),
        *([f"\\label{{{label}}}"] if label else []),
        f"\\begin{{tabular}}{{{'l' * labels}{'r' * _width(found)}}}",
        r"\toprule",
        *_tex_spans(found, labels),
        " & ".join(
            tex(title) + (tex(MARK) if mark else "") for title, mark in zip(found.titles, found.marked, strict=True)
        )
        + r" \\",
    ]
    for title, block in found.blocks:
        lines += [r"\midrule", f"\\multicolumn{{{len(found.titles)}}}{{l}}{{\\textbf{{{tex(title)}}}}} \\\\"]
        lines += [_tex_line(line, digits, interval) for line in block]
    lines += [r"\bottomrule", r"\end{tabular}", rf"\par\smallskip{{\footnotesize {tex(found.note)}}}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _tex_spans(found: Table, labels: int) -> Iterable[str]:
    if not found.spans:
        return
    cells = [f"\\multicolumn{{{width}}}{{c}}{{{tex(name)}}}" if name else "" for name, width in found.spans]
    yield " & ".join([*[""] * labels, *cells]) + r" \\"
    start = labels + 1
    for name, width in found.spans:
        if name:
            yield f"\\cmidrule(lr){{{start}-{start + width - 1}}}"
        start += width


def _tex_line(line: Line, digits: int, interval: bool) -> str:
    names = [tex(name) for name in line.labels]
    names[-1] += tex(MARK) if line.marked else ""
    cells = [
        _cell(cell, digits, interval, missing="--", bold=lambda text: f"\\textbf{{{text}}}", plus=r" {\scriptsize$\pm$")
        + ("}" if interval and not np.isnan(cell.half) and not np.isnan(cell.mean) else "")
        for cell in line.cells
    ]
    return " & ".join([*names, *cells]) + r" \\"


# ------------------------------------------------------------------------------------------------ Markdown


def to_markdown(found: Table, *, digits: int, interval: bool) -> str:
    """One pipe table for each block; a group's name stands before the name of its set."""
    titles = _full_titles(found)
    labels = len(found.titles) - _width(found)
    parts = []
    for title, block in found.blocks:
        lines = [f"**{_md(title)}**", "", _row(titles), _row(["---"] * labels + ["---:"] * _width(found))]
        for line in block:
            names = [_md(name) for name in line.labels]
            names[-1] += f" {MARK}" if line.marked else ""
            cells = [
                _cell(c, digits, interval, missing="–", bold=lambda text: f"**{text}**", plus=" ± ") for c in line.cells
            ]
            lines.append(_row([*names, *cells]))
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, found.note]) + "\n"


def _full_titles(found: Table) -> list[str]:
    groups = [name for name, width in found.spans for _ in range(width)] or [""] * _width(found)
    labels = len(found.titles) - _width(found)
    own = [
        f"{_md(group)}: {_md(title)}" if group else _md(title)
        for group, title in zip(groups, found.titles[labels:], strict=True)
    ]
    plain = [*(_md(title) for title in found.titles[:labels]), *own]
    return [f"{title} {MARK}" if mark else title for title, mark in zip(plain, found.marked, strict=True)]


def _md(text: str) -> str:
    """A name as Markdown prints it."""
    plain = re.sub(r"[\x00-\x1f\x7f]", " ", text)
    return re.sub(r"([\\`*_\[\]<>|#~$&])", r"\\\1", plain)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


# ------------------------------------------------------------------------------------------------ shared


def _width(found: Table) -> int:
    """How many columns hold numbers."""
    return len(found.blocks[0][1][0].cells)


def _cell(cell: Number, digits: int, interval: bool, *, missing: str, bold: Callable[[str], str], plus: str) -> str:
    if np.isnan(cell.mean):
        return missing
    mean = f"{100 * cell.mean:.{digits}f}"
    reach = f"{plus}{100 * cell.half:.{digits}f}" if interval and not np.isnan(cell.half) else ""
    return (bold(mean) if cell.best else mean) + reach

"""`oodometer metrics`: every metric of a table of scores, with both polarities, intervals and sample sizes."""

from __future__ import annotations

import io
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.table import Table
from rich.text import Text

from oodometer.cli import OK, _terminal
from oodometer.errors import OodometerError, OodometerWarning
from oodometer.tables import DetectorScores, ScoreTable

if TYPE_CHECKING:
    import pandas as pd

ABOUT = """
AUROC with its interval, FPR@95, AUPR and more of a table of scores, higher
scores being more out of distribution. The table is a CSV with the columns score
and dataset (or is_ood), and if you have them detector, label and prediction;
`oodometer score` writes one. `-` reads standard input.

FPR@95 and AUPR come in both readings: OOD+ takes out-of-distribution as the
positive class (OpenOOD, pytorch-ood), ID+ in-distribution (ODIN, ViM). With
labels and predictions, AUGRC and other failure metrics are added; with
calibration rows, AUTC and the errors at one threshold for all data sets.

example:
  oodometer metrics scores/scores.csv
  oodometer metrics table.csv --id cifar10 --groups near=cifar100,tin far=svhn
  oodometer metrics table.csv --id cifar10 --calibration cifar10-val \\
      --show auroc fnr@95tnr
  oodometer metrics scores/scores.csv --json | jq '.rows[].auroc'
"""

RAW = ("threshold@", "scale_")
"""Columns in the scores' own unit."""
PER_MILLE = ("augrc", "aurc")
"""Columns that the literature prints times 1000."""


@dataclass
class Options:
    """Which rows play which role, and what to print."""

    table: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TABLE")]
    """CSV with the columns score and dataset (or is_ood)."""
    id: Annotated[str | None, tyro.conf.arg(metavar="DATASET")] = None
    """The in-distribution data set (default: the one with is_ood = 0, or the one named id)."""
    calibration: Annotated[str | None, tyro.conf.arg(metavar="DATASET")] = None
    """In-distribution rows that fix scales and thresholds and are not evaluated."""
    validation: Annotated[str | None, tyro.conf.arg(metavar="DATASET")] = None
    """Out-of-distribution rows for the threshold with FPR = FNR, not evaluated either."""
    groups: Annotated[_terminal.Many, tyro.conf.arg(metavar="GROUP=DATASET,… …")] = field(default_factory=list)
    """Groups of data sets whose unweighted means are printed."""
    show: Annotated[_terminal.Many, tyro.conf.arg(metavar="METRIC …")] = field(default_factory=list)
    """These columns instead of the usual ones (--csv has all)."""
    level: float = 0.95
    """Confidence level of the interval of AUROC (DeLong)."""
    json: bool = False
    """Print JSON, all columns, as fractions."""
    csv: bool = False
    """Print CSV, all columns, as fractions."""


def main(arguments: list[str]) -> int:
    """Print the metrics of every detector in the table."""
    options = _terminal.parse(Options, arguments, command="metrics", about=ABOUT)
    if options.json and options.csv:
        raise OodometerError("--json or --csv? Choose one")
    table = _read(options.table)
    id_name = table.id_name(options.id, besides=[name for name in (options.calibration, options.validation) if name])
    _warn_of_shifted(table, {id_name, options.calibration, options.validation})
    found = summaries(table, id_name, options)
    if options.csv:
        found.to_csv(sys.stdout, index=False, lineterminator="\n")
    elif options.json:
        rows = [_known(row) for row in found.to_dict("records")]
        _terminal.write_json({"id": id_name, "level": options.level, "unit": "fraction", "rows": rows})
    else:
        _print(found, id_name, options)
    return OK


def _read(path: str) -> ScoreTable:
    if path == "-":
        return ScoreTable(io.BytesIO(sys.stdin.buffer.read()), "standard input")
    return ScoreTable(path)


def _known(row: dict[Any, Any]) -> dict[str, Any]:
    """A mean has no number of rows."""
    import pandas as pd

    return {str(name): None if pd.isna(value) else value for name, value in row.items()}


def _warn_of_shifted(table: ScoreTable, roles: set[str | None]) -> None:
    shifted = [name for name in table.flagged_id() if name not in roles]
    if shifted:
        warnings.warn(
            f"{', '.join(map(repr, shifted))} with is_ood = 0 evaluated as out of distribution (detection of the "
            "shift); for full-spectrum numbers give these rows the in-distribution set's name",
            OodometerWarning,
            stacklevel=2,
        )


def summaries(table: ScoreTable, id_name: str, options: Options) -> pd.DataFrame:
    """The summary of every detector, one below the other."""
    import pandas as pd

    from oodometer.metrics import summary

    groups = _groups(_terminal.flat(options.groups))
    parts = []
    for one in tuple(table.detectors(id_name)):  # every detector's rows are checked before work starts
        scores, calibration = _without(one, options.calibration, "--calibration", table.name)
        scores, validation = _without(scores, options.validation, "--validation", table.name)
        part = summary(
            scores.id_scores,
            scores.ood_scores,
            id_correct=scores.id_correct,
            groups=groups,
            calibration=calibration,
            ood_validation=validation,
            level=options.level,
        )
        parts.append(part.assign(detector=one.detector)[["detector", *part.columns]])
    return pd.concat(parts, ignore_index=True)


def _without(scores: DetectorScores, name: str | None, option: str, table: str) -> tuple[DetectorScores, Any]:
    """The scores less those of a data set with another role, and these."""
    if name is None:
        return scores, None
    if name not in scores.ood_scores:
        raise OodometerError(
            f"{option} {name!r}: no such data set beside the in-distribution one in {table}; "
            f"it has {', '.join(map(repr, scores.ood_scores))}"
        )
    rest = {other: values for other, values in scores.ood_scores.items() if other != name}
    if not rest:
        raise OodometerError(f"{table}: without {name!r} no out-of-distribution data set is left to evaluate")
    return replace(scores, ood_scores=rest), scores.ood_scores[name]


def _groups(texts: Sequence[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for text in texts:
        name, equals, members = text.partition("=")
        if not (name and equals and members):
            raise OodometerError(f"--groups {text!r}: write GROUP=DATASET,DATASET, e.g. near=cifar100,tin")
        groups.setdefault(name, []).extend(member.strip() for member in members.split(",") if member.strip())
    return groups


# ---------------------------------------------------------------------------------------------- for a reader


def _print(found: pd.DataFrame, id_name: str, options: Options) -> None:
    """One block a data set where detectors compete, one block in all where there is one detector."""
    shown = _columns(found, _terminal.flat(options.show))
    parts: list[Any] = []
    for title, label, rows in _blocks(found, id_name):
        parts += [Text(title, "bold"), _block(label, rows, shown, options.level), Text("")]
    _terminal.show(*parts, Text(_legend(shown, options.level), "dim"))


def _columns(found: pd.DataFrame, wanted: Sequence[str]) -> list[str]:
    """The metrics to show, as many as fit 80 columns unless they were asked for."""
    facts = ("detector", "kind", "dataset", "group", "n_id", "n_ood", "note", "auroc_low", "auroc_high")
    known = [str(name) for name in found.columns if name not in facts]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise OodometerError(f"--show {unknown[0]!r}: no such metric of this table; known: {', '.join(known)}")
    usual = ("auroc", "fpr95_ood", "fpr95_id", "aupr_ood", "aupr_id", "autc", "augrc:discard_id_errors")
    return list(wanted) or [name for name in usual if name in known]


def _blocks(found: pd.DataFrame, id_name: str) -> Iterator[tuple[str, str, pd.DataFrame]]:
    sizes = f"{found['n_id'].iloc[0]:,} rows of {id_name} (in distribution)"
    if found["detector"].nunique() == 1:
        detector = found["detector"].iloc[0]
        yield f"{detector}: {sizes}" if detector else sizes, "dataset", found
        return
    for (kind, dataset), rows in found.groupby(["kind", "dataset"], sort=False):
        count = "mean over data sets" if kind == "mean" else f"{rows['n_ood'].iloc[0]:,} rows"
        yield f"{dataset}: {count} against {sizes}", "detector", rows.sort_values("auroc", ascending=False)


def _block(label: str, rows: pd.DataFrame, shown: Sequence[str], level: float) -> Table:
    table = _terminal.plain_table()
    table.add_column(f"\n{label}", header_style="dim", overflow="fold", min_width=8)
    if label == "dataset":
        table.add_column("\nrows", header_style="dim", justify="right", no_wrap=True)
    for name in shown:
        table.add_column("\n".join(_title(name)), header_style="dim", justify="right", no_wrap=True)
        if name == "auroc":
            table.add_column(f"{100 * level:g} % CI\n%", header_style="dim", justify="right", no_wrap=True)
    for row in rows.to_dict("records"):
        cells = [("mean of " if label == "dataset" and row["kind"] == "mean" else "") + (row[label] or "(scores)")]
        if label == "dataset":
            cells.append("" if row["kind"] == "mean" else f"{row['n_ood']:,}")
        table.add_row(*map(Text, [*cells, *_numbers(row, shown)]))
    return table


def _numbers(row: dict[Any, Any], shown: Sequence[str]) -> Iterator[str]:
    for name in shown:
        yield f"{row[name]:.4g}" if name.startswith(RAW) else f"{_factor(name) * row[name]:.2f}"
        if name == "auroc":
            low, high = 100 * row["auroc_low"], 100 * row["auroc_high"]
            yield "–" if math.isnan(low) else f"{low:.1f}–{high:.1f}"


def _factor(name: str) -> int:
    return 1000 if name.startswith(PER_MILLE) else 100


def _title(name: str) -> tuple[str, str]:
    """Two lines: the metric; its positive class or variant, and its unit."""
    stem, _, variant = name.partition(":")
    unit = "" if name.startswith(RAW) else "×1000" if name.startswith(PER_MILLE) else "%"
    for ending, sign in (("_ood", "OOD+"), ("_id", "ID+")):
        if stem.endswith(ending):
            return stem.removesuffix(ending).upper(), f"{sign} {unit}"
    if variant and variant != "discard_id_errors":
        return stem.upper(), f"{variant} {unit}"
    return stem.upper(), unit


def _legend(shown: Sequence[str], level: float) -> str:
    notes = {
        "fpr95": "FPR95: FPR where the TPR reaches 95 %. OOD+, ID+: the positive class.",
        "aupr": "AUPR: area by trapezoids; it depends on the numbers of rows.",
        "auroc": f"{100 * level:g} % CI: DeLong's interval.",
        "autc": "AUTC: on the scale of the calibration rows; 50: no separation; less is better.",
        "augrc": "AUGRC: OOD rows fail, wrong ID rows are left out; less is better.",
    }
    return "\n".join(note for stem, note in notes.items() if any(name.startswith(stem) for name in shown))

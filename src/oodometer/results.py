"""What a study leaves behind: cells of scores with checksums, tidy tables, and the answers read from them."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from oodometer import metrics
from oodometer.errors import OodometerError
from oodometer.metrics.ranking import RANKING
from oodometer.metrics.risk import augrc, aurc, failures
from oodometer.splits import Folds

if TYPE_CHECKING:
    import pandas as pd

    from oodometer.stats import Cliques, Friedman

SCHEMA = 1
"""Version of the layout and meaning of a cell; part of every cell's key."""
RESULT_COLUMNS = (
    *("study", "repeat", "fold", "id", "ood", "group", "exposure"),
    *("detector", "params", "variant", "metric", "value"),
)
TUNING_COLUMNS = (
    *("study", "repeat", "fold", "exposure", "ood", "detector", "variant", "params"),
    *("criterion", "value", "status", "reason", "chosen", "shared"),
)
CLASSIFIER_COLUMNS = ("study", "repeat", "fold", "id", "ood", "exposure", "accuracy", "val_accuracy", "n_test", "n_val")
INDEX_COLUMNS = (
    *("repeat", "fold", "ood", "exposure", "detector", "variant", "params"),
    *("id_cell", "ood_cell", "classifier_cell"),
)
WHOLE_NUMBERS = ("repeat", "fold", "chosen", "n_test", "n_val")
NUMBERS = ("value", "accuracy", "val_accuracy")


# ---------------------------------------------------------------------------------------------- files


def write_atomically(target: Path, content: bytes, *, durable: bool = False) -> None:
    """The file whole or not at all; `durable` also waits until the disk has it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with partial.open("wb") as stream:
            stream.write(content)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def write_json(target: Path, value: Any, *, durable: bool = False) -> None:
    """Strict, readable JSON."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False, default=str)
    write_atomically(target, (text + "\n").encode(), durable=durable)


def write_table(target: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A CSV file; floats keep every digit, NaN is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell_text(value) for value in row] for row in rows)
    write_atomically(target, text.getvalue().encode(), durable=True)


def read_table(path: Path) -> pd.DataFrame:
    """A table written by `write_table`, every digit kept; words such as NA stay words."""
    import pandas as pd

    with path.open(encoding="utf-8", newline="") as stream:
        header, *rows = csv.reader(stream)
    columns = zip(*rows, strict=True) if rows else [()] * len(header)
    return pd.DataFrame({name: _column(name, texts) for name, texts in zip(header, columns, strict=True)})


def _column(name: str, texts: Sequence[str]) -> Any:
    if name in WHOLE_NUMBERS:
        return np.array([int(text) for text in texts], np.int64)
    if name in NUMBERS:
        return np.array([float(text) if text else np.nan for text in texts], np.float64)
    return list(texts)


def _cell_text(value: Any) -> Any:
    if isinstance(value, float):
        return "" if np.isnan(value) else repr(float(value))
    return value


def params_text(params: Mapping[str, Any]) -> str:
    """Parameters as one line of JSON, sorted: equal parameters give equal text."""
    return json.dumps(dict(params), sort_keys=True, default=str)


# ---------------------------------------------------------------------------------------------- cells


@dataclass(frozen=True)
class Cell:
    """One finished piece of work: its facts, and one number a row (none when it failed or when rows have none)."""

    key: str
    facts: dict[str, Any]
    values: NDArray[Any] | None

    @property
    def error(self) -> str:
        """Why the cell failed; empty when it did not."""
        return str(self.facts["error"])

    def segment(self, name: str) -> NDArray[Any]:
        """The values of one set of rows, such as 'test' or 'val'."""
        assert self.values is not None, "only finished cells are read"
        start = 0
        for segment, length in self.facts["segments"].items():
            if segment == name:
                return self.values[start : start + length]
            start += length
        raise OodometerError(f"cell {self.key} holds {list(self.facts['segments'])}, not {name!r}")


class Store:
    """The cells of one folder: `KEY.npy` and then `KEY.json`, which holds the checksum of both."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def read(self, key: str) -> Cell | None:
        """The cell, verified; None if it was never finished; an error that names a damaged one."""
        path = self.folder / f"{key}.json"
        try:
            facts = json.loads(path.read_text())
            if facts.pop("digest") != _digest(facts):
                raise ValueError("its content does not match its digest")
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCellError(path, str(error)) from None
        if facts["sha256"] is None:
            return Cell(key, facts, None)
        return Cell(key, facts, self._values(key, facts["sha256"]))

    def _values(self, key: str, checksum: str) -> NDArray[Any]:
        path = self.folder / f"{key}.npy"
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise DamagedCellError(path, "the file is missing") from None
        if hashlib.sha256(content).hexdigest() != checksum:
            raise DamagedCellError(path, "its content does not match its checksum")
        values: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
        return values

    def write(
        self,
        key: str,
        facts: Mapping[str, Any],
        segments: Mapping[str, NDArray[Any]] | None = None,
        *,
        error: str = "",
    ) -> Cell:
        """Write a cell; the JSON comes last, so that a cell without it was never finished.

        No fsync: what a power cut takes away fails its checksum and is computed again.
        """
        checksum, values = None, None
        if segments:
            values = np.concatenate(list(segments.values()))
            content = io.BytesIO()
            np.save(content, values, allow_pickle=False)
            checksum = hashlib.sha256(content.getbuffer()).hexdigest()
            write_atomically(self.folder / f"{key}.npy", content.getvalue())
        lengths = {name: len(part) for name, part in (segments or {}).items()}
        full = {"schema": SCHEMA, "key": key, **facts, "segments": lengths, "sha256": checksum, "error": error}
        plain = json.loads(json.dumps(full, default=str))
        write_json(self.folder / f"{key}.json", {**plain, "digest": _digest(plain)})
        return Cell(key, plain, values)

    def discard(self, key: str) -> None:
        """Forget a cell; its JSON goes first, so that half of it is never taken for the whole."""
        for suffix in ("json", "npy"):
            (self.folder / f"{key}.{suffix}").unlink(missing_ok=True)

    def keys(self) -> list[str]:
        """Keys of all cells that were finished."""
        return sorted(path.stem for path in self.folder.glob("*.json"))


class DamagedCellError(OodometerError):
    """A cell whose files do not match their checksum: it is named, and computed again by the next run."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is damaged ({reason}): run the study again, and this cell is computed anew")


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def key_of(facts: Mapping[str, Any]) -> str:
    """The name of a cell: a hash of everything that determines what is in it."""
    text = json.dumps({"schema": SCHEMA, **facts}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# ---------------------------------------------------------------------------------------------- metrics


@dataclass(frozen=True, eq=False)
class Scores:
    """One detector on one fold: test scores of both sides, and ID validation scores to fix scales and thresholds."""

    detector: str
    params: dict[str, Any]
    id: NDArray[np.float64]
    ood: NDArray[np.float64]
    calibration: NDArray[np.float64]
    id_correct: NDArray[np.bool_] | None
    id_names: NDArray[Any]
    ood_names: NDArray[Any]
    calibration_names: NDArray[Any]

    @cached_property
    def ranking(self) -> dict[str, float]:
        """Every ranking metric, from one sort of each side."""
        return metrics.ranking(self.id, self.ood)

    def __repr__(self) -> str:
        counts = f"{len(self.id)} ID, {len(self.ood)} OOD, {len(self.calibration)} calibration rows"
        return f"Scores({self.detector} {params_text(self.params)}: {counts})"


@dataclass(frozen=True)
class Metric:
    """A number of one detector on one fold; what it needs besides test scores, and which way is better."""

    higher_is_better: bool
    value: Callable[[Scores], float]
    calibration: bool = False
    predictions: bool = False


def _at_95_tnr(scores: Scores) -> float:
    return metrics.threshold_at_tnr(scores.calibration)


PROTOCOLS = ("discard_id_errors", "misclassification", "keep_all", "scod")
"""Which rows count as failures in `augrc:PROTOCOL` and `aurc:PROTOCOL` (see `metrics.risk.failures`)."""
_LOWER = ("fpr95_ood", "fpr95_id", "detection_error")


def _ranking(name: str) -> Metric:
    return Metric(name not in _LOWER, lambda scores: scores.ranking[name])


def _risk(area: Callable[..., float], protocol: Any) -> Metric:
    def value(scores: Scores) -> float:
        return area(*failures(scores.id, scores.id_correct, scores.ood, protocol=protocol))

    return Metric(False, value, predictions=protocol != "keep_all")


METRICS: dict[str, Metric] = {
    **{name: _ranking(name) for name in (*RANKING, "aupr_harmonic")},
    "autc": Metric(False, lambda s: metrics.autc(s.id, s.ood, calibration=s.calibration), calibration=True),
    "aufpr": Metric(False, lambda s: metrics.aufpr(s.id, s.ood, calibration=s.calibration), calibration=True),
    "aufnr": Metric(False, lambda s: metrics.aufnr(s.id, s.ood, calibration=s.calibration), calibration=True),
    "fpr@95tnr": Metric(False, lambda s: float((s.id > _at_95_tnr(s)).mean()), calibration=True),
    "fnr@95tnr": Metric(False, lambda s: float((s.ood <= _at_95_tnr(s)).mean()), calibration=True),
    **{f"augrc:{protocol}": _risk(augrc, protocol) for protocol in PROTOCOLS},
    **{f"aurc:{protocol}": _risk(aurc, protocol) for protocol in PROTOCOLS},
}
"""Every number a study can report; scales and thresholds come from ID validation rows, never from test rows."""

DEFAULT_METRICS = (
    *("auroc", "fpr95_ood", "tpr5", "aupr_ood", "aupr_id", "f1_max_id", "f1_max_ood", "acc90"),
    *("autc", "augrc:discard_id_errors"),
)


def evaluate(scores: Scores, names: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """The named metrics; one that these scores do not allow is NaN, and its reason is in the list."""
    values, reasons = {}, []
    for name in names:
        try:
            values[name] = METRICS[name].value(scores)
        except OodometerError as error:
            values[name] = float("nan")
            reasons.append(f"{name} of {scores.detector}: {error}")
    return values, reasons


def higher_is_better(metric: str) -> bool:
    """Which way a metric points."""
    if metric not in METRICS:
        raise OodometerError(f"metric: one of {', '.join(METRICS)} was needed, {metric!r} was found.")
    return METRICS[metric].higher_is_better


# ---------------------------------------------------------------------------------------------- results


class Results:
    """The folder of a study that was run: a tidy table, its search curves, its scores and its facts.

    >>> results = Results.open("runs/digits")
    >>> results.summary()
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(folder / "cells")

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Results:
        """Open the folder of a study; nothing is read before it is asked for."""
        folder = Path(path)
        absent = [name for name in ("run.json", "results.csv") if not (folder / name).exists()]
        if absent:
            raise OodometerError(
                f"{folder}: no results of a study ({', '.join(absent)} absent); "
                "`oodometer run study.toml --out FOLDER` writes them, and finishes what was interrupted"
            )
        return cls(folder)

    # ------------------------------------------------------------------------------------------ tables

    def to_pandas(self) -> pd.DataFrame:
        """One row a study, repeat, fold, data pair, exposure, detector and metric."""
        return self._table("results.csv").copy()

    @property
    def tuning(self) -> pd.DataFrame:
        """The search curve of every tuned detector: each point, its criterion, and which was chosen."""
        return self._table("tuning.csv").copy()

    @property
    def classifiers(self) -> pd.DataFrame:
        """The accuracy of every fold's classifier."""
        return self._table("classifiers.csv").copy()

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What `run.json` says: versions, command, seeds, fingerprints, machine, warnings, timings."""
        found: dict[str, Any] = json.loads((self.folder / "run.json").read_text())
        return found

    @property
    def failed(self) -> list[dict[str, Any]]:
        """The cells that failed, each with its error."""
        return list(self.facts["failed"])

    def _table(self, name: str) -> pd.DataFrame:
        if name not in self._tables:
            self._tables[name] = read_table(self.folder / name)
        return self._tables[name]

    @cached_property
    def _tables(self) -> dict[str, pd.DataFrame]:
        return {}

    # ------------------------------------------------------------------------------------------ answers

    def summary(self) -> pd.DataFrame:
        """Mean and standard deviation over folds and repeats, with a 95 % interval of the mean.

        Training sets of folds overlap, so that s/√n would be far too short: the variance is s²(1/n + n_test/n_train)
        (Nadeau & Bengio, Machine Learning 2003), with Student's t.
        """
        from scipy.special import stdtrit

        keys = ["detector", "variant", "id", "ood", "group", "exposure", "metric"]
        found = self._table("results.csv").groupby(keys, sort=False)["value"].agg(["mean", "std", "count"])
        n = found["count"].to_numpy(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = found["std"] * np.sqrt(1 / n + self.facts["test_to_train"])
            reach = spread * stdtrit(np.maximum(n - 1, 1), 0.975)
        found["low"], found["high"] = found["mean"] - reach, found["mean"] + reach
        return found.rename(columns={"count": "n"}).reset_index()

    def best_params(self) -> pd.DataFrame:
        """How often each parameter setting was chosen, the most frequent first."""
        chosen = self._table("tuning.csv").query("chosen == 1")
        keys = ["detector", "variant", "exposure", "ood", "params"]
        counts = chosen.groupby(keys, sort=False).size().rename("times").reset_index()
        return counts.sort_values(["detector", "exposure", "ood", "times"], ascending=[True, True, True, False])

    def blocks(self, metric: str) -> pd.DataFrame:
        """The mean over folds and repeats, as (id, ood, exposure) × detectors."""
        from oodometer.stats.tidy import block_means, draws

        return block_means(draws(self._table("results.csv"), metric))

    def ranks(self, metric: str = "auroc") -> Friedman:
        """Average ranks of the detectors over the pairs of data sets, with Friedman's test."""
        from oodometer.stats import friedman

        return friedman(self.blocks(metric), higher_is_better=higher_is_better(metric))

    def cliques(self, metric: str = "auroc", *, alpha: float = 0.05) -> Cliques:
        """Groups of detectors that Conover's test (with Holm's adjustment) cannot tell apart."""
        from oodometer.stats import cliques, conover

        return cliques(conover(self.blocks(metric), higher_is_better=higher_is_better(metric)), alpha)

    # ------------------------------------------------------------------------------------------ scores

    def scores(
        self,
        detector: str,
        *,
        ood: str,
        exposure: str = "without",
        repeat: int = 0,
        fold: int = 0,
        variant: str = "",
        params: str | None = None,
    ) -> Scores:
        """The scores behind the numbers of one detector on one fold, with the sample ids of their rows."""
        wanted = {"detector": detector, "variant": variant, "ood": ood, "exposure": exposure}
        rows = self._table("cells/index.csv")
        for column, value in {**wanted, "repeat": repeat, "fold": fold, "params": params}.items():
            if value is None:
                continue
            known = rows[column].unique().tolist()
            rows = rows[rows[column] == value]
            if rows.empty:
                raise OodometerError(f"scores: no {column} {value!r} here; known: {', '.join(map(str, known))}")
        if len(rows) > 1:
            settings = ", ".join(rows["params"])
            raise OodometerError(f"scores: several settings match; pass params= as one of: {settings}")
        return self._scores(dict(zip(rows.columns, rows.iloc[0], strict=True)))

    def _scores(self, entry: Mapping[str, Any]) -> Scores:
        repeat, fold, ood = entry["repeat"], entry["fold"], entry["ood"]
        rows = Folds.load(self.folder / "folds" / folds_file(repeat, ood))[fold]
        held_out = json.loads((self.folder / "folds" / f"{repeat}.validation.json").read_text())["id"][fold]
        cells = (self._cell(entry[name]) for name in ("id_cell", "ood_cell", "classifier_cell"))
        names = (rows.names("id_test"), rows.names("ood_test"), np.asarray(held_out))
        return scores_of(entry["detector"], json.loads(entry["params"]), *cells, names=names)

    def _cell(self, key: str) -> Cell:
        cell = self.store.read(key)
        if cell is None:
            raise OodometerError(f"{self.store.folder / key}.json is missing: run the study again, it will be computed")
        return cell

    # ------------------------------------------------------------------------------------------ elsewhere

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """The tidy table as CSV."""
        target = Path(path)
        write_atomically(target, (self.folder / "results.csv").read_bytes())
        return target

    def to_parquet(self, path: str | os.PathLike[str]) -> Path:
        """The tidy table as Parquet (needs pyarrow)."""
        try:
            import_module("pyarrow")
        except ImportError:
            raise OodometerError("to_parquet needs pyarrow: pip install 'oodometer[parquet]'") from None
        target = Path(path)
        content = io.BytesIO()
        self._table("results.csv").to_parquet(content, index=False)
        write_atomically(target, content.getvalue())
        return target

    def report(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Tables and figures as one HTML page."""
        found: Path = import_module("oodometer.report").write(self, path, **options)
        return found

    def to_latex(self, **options: Any) -> str:
        """The summary as a LaTeX table."""
        text: str = import_module("oodometer.report.latex").table(self, **options)
        return text

    def to_markdown(self, **options: Any) -> str:
        """The summary as a Markdown table."""
        text: str = import_module("oodometer.report.latex").markdown(self, **options)
        return text

    def citations(self) -> str:
        """BibTeX of the detectors, metrics, tests and data of the study."""
        text: str = import_module("oodometer.report.citations").of(self)
        return text

    def __repr__(self) -> str:
        rows = self._table("results.csv")
        counts = f"{rows['detector'].nunique()} detectors, {rows['ood'].nunique()} OOD sets, {len(rows):,} values"
        failed = f", {len(self.failed)} cells failed" if self.failed else ""
        return f"Results({str(self.folder)!r}: {counts}{failed})"


def folds_file(repeat: int, ood: str) -> str:
    """The file, below `folds/`, that holds the folds of one OOD set."""
    safe = "".join(c if c.isalnum() or c in "._=-," else "_" for c in ood)
    return f"{repeat}.{safe}.json"


def scores_of(
    detector: str,
    params: dict[str, Any],
    id_cell: Cell,
    ood_cell: Cell,
    classifier: Cell,
    *,
    names: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
) -> Scores:
    """Scores put together from the cells they are kept in."""
    return Scores(
        detector=detector,
        params=params,
        id=id_cell.segment("test"),
        ood=ood_cell.segment("test"),
        calibration=id_cell.segment("val"),
        id_correct=None if classifier.values is None else classifier.segment("test").astype(np.bool_),
        id_names=names[0],
        ood_names=names[1],
        calibration_names=names[2],
    )

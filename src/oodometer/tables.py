"""Tables of scores from elsewhere: `score,dataset` or `score,is_ood`, with every mistake located by file and line."""

from __future__ import annotations

import csv
import difflib
import io
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from oodometer.errors import OodometerError

if TYPE_CHECKING:
    from pandas import DataFrame, Series

KNOWN = ("detector", "dataset", "row", "score", "is_ood", "label", "prediction")
OOD_WORDS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}
MISSING = ["", "nan", "NaN", "NA", "None", "null"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DetectorScores:
    """The scores of one detector: of the ID rows, of every OOD set, and which ID rows were classified correctly."""

    detector: str
    id_scores: Floats
    ood_scores: dict[str, Floats]
    id_correct: npt.NDArray[np.bool_] | None


class ScoreTable:
    """Checked rows of a table of scores; `detectors(id_name)` hands them out as the metrics want them."""

    def __init__(self, source: str | Path | io.BytesIO, name: str | None = None) -> None:
        self.name = name or str(source)
        self._source = source
        self._rows = self._read()
        self._check_columns()
        self._rows["score"] = self._numbers("score")
        self._name_datasets()

    @property
    def datasets(self) -> list[str]:
        """Names of the data sets in the order of their first row."""
        return [str(name) for name in self._rows["dataset"].unique()]

    def id_name(self, wanted: str | None = None, *, besides: Sequence[str] = ()) -> str:
        """The in-distribution data set: the wanted one, else the only one flagged is_ood = 0, else "id".

        Data sets named in `besides` have another role.
        """
        names = [name for name in self.datasets if name not in besides]
        if wanted is not None:
            return _known(wanted, names, f"{self.name}: no dataset {{!r}}")
        flagged = [name for name in self.flagged_id() if name in names]
        candidates = flagged or [name for name in names if name.lower() == "id"]
        if len(candidates) == 1:
            return candidates[0]
        raise OodometerError(
            f"{self.name}: which dataset is in distribution? Pass --id NAME, one of: {', '.join(map(repr, names))}"
        )

    def detectors(self, id_name: str) -> Iterator[DetectorScores]:
        """One entry a detector (one without a name where the table has no such column)."""
        ood_names = [name for name in self.datasets if name != id_name]
        if not ood_names:
            raise OodometerError(
                f"{self.name}: only the dataset {id_name!r} was found; metrics compare it with at least one OOD set"
            )
        if "detector" not in self._rows:
            yield self._one("", self._rows, id_name, ood_names)
            return
        for detector, rows in self._rows.groupby("detector", sort=False, observed=True):
            yield self._one(str(detector), rows, id_name, ood_names)

    def _one(self, detector: str, rows: DataFrame, id_name: str, ood_names: Sequence[str]) -> DetectorScores:
        of_set = rows.groupby("dataset", sort=False, observed=True).indices
        absent = [name for name in (id_name, *ood_names) if name not in of_set]
        if absent:
            raise OodometerError(
                f"{self.name}: detector {detector!r} has no rows of {', '.join(map(repr, absent))}; "
                "every detector needs scores of the same data sets"
            )
        scores = rows["score"].to_numpy(np.float64)
        return DetectorScores(
            detector,
            scores[of_set[id_name]],
            {name: scores[of_set[name]] for name in ood_names},
            self._correct(rows.iloc[of_set[id_name]]),
        )

    def _correct(self, rows: DataFrame) -> npt.NDArray[np.bool_] | None:
        if not {"label", "prediction"} <= set(rows.columns):
            return None
        label, prediction = rows["label"], rows["prediction"]
        known = (label.notna() & prediction.notna()).to_numpy()
        if not known.any():
            return None
        if not known.all():
            row = int(rows.index[~known][0])
            raise self._at(row, "label, prediction", "every in-distribution row needs both, or none of them does")
        if label.dtype.kind in "ifub" and prediction.dtype.kind in "ifub":
            return np.asarray(label.to_numpy() == prediction.to_numpy())
        return np.asarray(label.astype(str).to_numpy() == prediction.astype(str).to_numpy())

    # ------------------------------------------------------------------------------------------ reading

    def _read(self) -> DataFrame:
        import pandas as pd

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", pd.errors.ParserWarning)
                rows: DataFrame = pd.read_csv(
                    self._source,
                    encoding="utf-8-sig",
                    dtype={"dataset": str, "detector": str, "is_ood": str},
                    keep_default_na=False,
                    na_values={"label": MISSING, "prediction": MISSING},
                    index_col=False,
                    low_memory=False,
                    **_exact_floats(pd.__version__),
                )
        except pd.errors.EmptyDataError:
            raise OodometerError(f"{self.name} is empty; columns needed: score,dataset or score,is_ood") from None
        except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
            reason = " ".join(str(error).split())
            raise OodometerError(f"{self.name} is no table with the same columns in every row ({reason})") from None
        except UnicodeDecodeError:
            raise OodometerError(f"{self.name} is not UTF-8 text: is it a table of scores saved as CSV?") from None
        rows = rows.rename(columns=lambda column: str(column).strip())
        for column in {"dataset", "detector"} & set(rows.columns):
            rows[column] = rows[column].str.strip().astype("category")
        return rows

    def _check_columns(self) -> None:
        found = [str(column) for column in self._rows.columns]
        if "score" in found and ("dataset" in found or "is_ood" in found):
            if not len(self._rows):
                raise OodometerError(f"{self.name} has a header and no rows: at least one score a data set is needed")
            return
        near = {name: difflib.get_close_matches(name.lower(), KNOWN, n=1) for name in found if name not in KNOWN}
        renames = [f"{name} → {match[0]}" for name, match in near.items() if match and match[0] not in found]
        separator = next((mark for mark in (";", "\t") if any(mark in name for name in found)), None)
        hint = f". Rename {', '.join(renames)}" if renames else ""
        if separator:
            hint = f". Its columns are separated by {separator!r}: commas are needed (and points in numbers)"
        raise OodometerError(
            f"{self.name}: columns 'score' and 'dataset' (or 'is_ood') are needed; "
            f"found {', '.join(map(repr, found))}{hint}"
        )

    def _numbers(self, column: str) -> Series[Any]:
        import pandas as pd

        raw = self._rows[column]
        values = pd.to_numeric(raw, errors="coerce").astype(np.float64)
        bad = values.isna().to_numpy()
        if bad.any():
            row = int(bad.argmax())
            text = str(raw.iloc[row]).strip()
            more = f" ({int(bad.sum()):,} such rows)" if bad.sum() > 1 else ""
            raise self._at(row, column, f"a number is needed in every row, found {text!r}{more}")
        return values

    def _name_datasets(self) -> None:
        if "is_ood" in self._rows:
            self._rows["is_ood"] = self._flags()
        if "dataset" not in self._rows:
            self._rows["dataset"] = np.where(self._rows["is_ood"], "ood", "id")
            return
        nameless = (self._rows["dataset"].isna() | (self._rows["dataset"] == "")).to_numpy()
        if nameless.any():
            raise self._at(int(nameless.argmax()), "dataset", "the name is missing")

    def _flags(self) -> npt.NDArray[np.bool_]:
        words = self._rows["is_ood"].astype(str).str.strip().str.lower()
        flags = words.map(OOD_WORDS)
        bad = flags.isna().to_numpy()
        if bad.any():
            row = int(bad.argmax())
            raise self._at(row, "is_ood", f"{self._rows['is_ood'].iloc[row]!r} is none of 0, 1, false, true")
        return flags.to_numpy(bool)

    def flagged_id(self) -> list[str]:
        """Data sets whose rows are all flagged is_ood = 0."""
        if "is_ood" not in self._rows:
            return []
        flags = self._rows.groupby("dataset", sort=False, observed=True)["is_ood"].agg(["min", "max"])
        mixed = flags.index[flags["min"] != flags["max"]]
        if len(mixed):
            raise OodometerError(f"{self.name}: dataset {mixed[0]!r} has rows with is_ood = 0 and with is_ood = 1")
        return [str(name) for name in flags.index[~flags["max"].to_numpy(bool)]]

    # ------------------------------------------------------------------------------------------ mistakes

    def _at(self, row: int, column: str, what: str) -> OodometerError:
        return OodometerError(f"{self.name}, line {self._line(row)}, column {column}: {what}")

    def _line(self, row: int) -> int:
        """The line of the file on which a row ends (blank lines and line breaks in quotes make them differ)."""
        with self._text() as text:
            reader = csv.reader(text)
            records = (reader.line_num for record in reader if record and any(cell.strip() for cell in record))
            return next(line for place, line in enumerate(records, -1) if place == row)

    def _text(self) -> Any:
        if isinstance(self._source, io.BytesIO):
            return io.StringIO(self._source.getvalue().decode("utf-8-sig"), newline="")
        return Path(self._source).open(encoding="utf-8-sig", newline="")


def _exact_floats(version: str) -> dict[str, Any]:
    """The option that makes older versions of pandas read every digit (newer ones do, and deprecate it)."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return {} if (major, minor) >= (3, 1) else {"float_precision": "round_trip"}


def _known(name: str, names: Sequence[str], complaint: str) -> str:
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise OodometerError(f"{complaint.format(name)}; {hint}known: {', '.join(map(repr, names))}")

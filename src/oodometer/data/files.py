"""Image folders and image lists, NIfTI volumes among the files."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from oodometer.arrays import Ints
from oodometer.data.sources import LABELS, Kind, Sample, digest
from oodometer.errors import OodometerError

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm", ".jp2")
VOLUMES = (".nii", ".nii.gz")
_LINE = re.compile(r"(?P<path>.*?)(?P<labels>(?:\s+[-+]?\d+)*)\s*$")


@dataclass(frozen=True, eq=False)
class FileSource:
    """One file a row; paths are kept relative to their root, so that another machine finds the same rows."""

    root: Path
    paths: Sequence[str]
    labels: Mapping[str, Ints]
    kind: Kind
    classes: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, row: int) -> Sample:
        path = self.root / self.paths[row]
        value = read_volume(path) if self.kind == "volume" else read_image(path)
        return Sample(value, {name: int(column[row]) for name, column in self.labels.items()})

    def name(self, row: int) -> str:
        return str(self.root / self.paths[row])

    def identity(self) -> dict[str, Any]:
        facts = {"files": len(self.paths), "sha256": digest(self.paths, self.labels)}
        return facts | ({"classes": list(self.classes)} if self.classes else {})


# ---------------------------------------------------------------------------------------------- decoding


def read_image(path: Path) -> Any:
    """The decoded image (the first frame, as stored: EXIF orientation is not applied)."""
    image_module = import_module("PIL.Image")
    try:
        with image_module.open(path) as image:
            image.load()
            return image
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise OodometerError(f"{path} cannot be read ({error.strerror})") from None
    except Exception as error:  # damaged files make decoders raise anything, from SyntaxError to struct.error
        raise OodometerError(
            f"{path} is damaged or no image ({type(error).__name__}: {error}): replace the file or take it off the list"
        ) from None


def read_volume(path: Path) -> Any:
    """The voxels of a NIfTI file, axes turned to right, anterior, superior."""
    nibabel = _nibabel()
    try:
        return np.asarray(nibabel.as_closest_canonical(nibabel.load(path)).get_fdata(dtype=np.float32))
    except (FileNotFoundError, PermissionError) as error:
        raise OodometerError(f"{path} cannot be read ({error.strerror or error})") from None
    except Exception as error:  # as above
        raise OodometerError(
            f"{path} is damaged or no NIfTI volume ({type(error).__name__}: {error}): replace the file or leave it out"
        ) from None


def _nibabel() -> Any:
    try:
        return import_module("nibabel")
    except ImportError:
        raise OodometerError("NIfTI volumes need nibabel: pip install 'oodometer[medical]'") from None


def is_volume(path: Path) -> bool:
    """Whether a file name is that of a NIfTI volume."""
    return path.name.lower().endswith(VOLUMES)


def single_volume(path: Path) -> FileSource:
    """One volume, one row."""
    return FileSource(path.parent, [path.name], {}, "volume")


# ---------------------------------------------------------------------------------------------- folders


def read_folder(root: Path) -> FileSource:
    """Images of a folder: a subfolder a class, in sorted order (whole numbers are the labels themselves), or none."""
    found = sorted(_files(root))
    if not found:
        raise OodometerError(f"{root}: no image or NIfTI file in this folder or below it")
    tops = [path.split("/", 1)[0] if "/" in path else None for path in found]
    loose = [path for path, top in zip(found, tops, strict=True) if top is None]
    if len(loose) == len(found):
        return FileSource(root, found, {}, _kind(found, root))
    if loose:
        raise OodometerError(
            f"{root}: {loose[0]!r} lies beside class folders, so its class is unknown: move it into one, or pass a "
            "list with one 'path label' a line"
        )
    names = sorted({str(top) for top in tops}, key=_class_order)
    numbers = {name: int(name) if _all_numbers(names) else place for place, name in enumerate(names)}
    order = sorted(range(len(found)), key=lambda row: (numbers[str(tops[row])], found[row]))
    labels = np.array([numbers[str(tops[row])] for row in order], np.int64)
    return FileSource(root, [found[row] for row in order], {LABELS: labels}, _kind(found, root), tuple(names))


def _files(root: Path) -> Iterator[str]:
    for folder, below, names in os.walk(root, followlinks=True):
        below[:] = [name for name in below if not name.startswith(".")]
        for name in names:
            if name.lower().endswith(IMAGES + VOLUMES) and not name.startswith("."):
                yield Path(folder, name).relative_to(root).as_posix()


def _all_numbers(names: Sequence[str]) -> bool:
    return all(name.isascii() and name.isdigit() for name in names)


def _class_order(name: str) -> tuple[int, int, str]:
    """Numbers by value, other names by alphabet."""
    number = name.isascii() and name.isdigit()
    return (0, int(name), name) if number else (1, 0, name)


def _kind(paths: Sequence[str], what: Path) -> Kind:
    volumes = [path for path in paths if path.lower().endswith(VOLUMES)]
    if volumes and len(volumes) < len(paths):
        flat = next(path for path in paths if path not in set(volumes))
        raise OodometerError(f"{what}: {volumes[0]} is a volume and {flat} an image: extract them apart")
    return "volume" if volumes else "image"


# ---------------------------------------------------------------------------------------------- lists


def read_list(path: Path, root: Path | None) -> FileSource:
    """An image list: `path label [level2 …]` a line; a dictionary after the path (OpenOOD) names its labels.

    Lines that start with # are skipped; a first line such as `# path labels species` names the label columns.
    """
    root = root or path.parent
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise OodometerError(
            f"{path} is no text: an image list has one 'path label' a line; arrays are read from .npz, .npy and IDX"
        ) from None
    entries = [
        (number, line.strip()) for number, line in enumerate(lines, 1) if line.strip() and line.strip()[0] != "#"
    ]
    if not entries:
        raise OodometerError(f"{path}: an empty list; write one 'path label' a line")
    names = _column_names(lines[0])
    rows = [_entry(line, names, f"{path}, line {number}") for number, line in entries]
    columns = list(rows[0][1])
    for (number, line), (_, labels) in zip(entries, rows, strict=True):
        if list(labels) != columns:
            raise OodometerError(
                f"{path}, line {number}: labels {_listed(labels)}, but the first line has {_listed(columns)}: {line!r}"
            )
    _check_files(root, [file for file, _ in rows], path)
    found = {name: np.array([labels[name] for _, labels in rows], np.int64) for name in columns}
    paths = [file for file, _ in rows]
    return FileSource(root, paths, found, _kind(paths, path))


def _column_names(first: str) -> list[str]:
    """Names of the label columns from a header `# path name …`; else labels, level2, level3, …"""
    words = first.lstrip("#").split() if first.startswith("#") else []
    if len(words) < 2 or words[0].lower() != "path":
        return []
    return [LABELS if word.lower() in ("label", LABELS) else word for word in words[1:]]


def _entry(line: str, names: Sequence[str], where: str) -> tuple[str, dict[str, int]]:
    brace = line.find(" {")
    if brace > 0:
        return line[:brace].strip(), _dictionary(line[brace:].strip(), where)
    match = _LINE.fullmatch(line)
    assert match is not None, "every line matches"
    numbers = [int(word) for word in match["labels"].split()]
    if names and len(numbers) != len(names):
        raise OodometerError(f"{where}: {len(numbers)} labels, but the header names {_listed(names)}: {line!r}")
    columns = names or [LABELS, *(f"level{place}" for place in range(2, len(numbers) + 1))]
    return match["path"], dict(zip(columns, numbers, strict=False))


def _dictionary(text: str, where: str) -> dict[str, int]:
    """Whole numbers of a literal dictionary, `label` first of all; anything else in it is left out."""
    try:
        facts = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        facts = None
    if not isinstance(facts, dict):
        raise OodometerError(f"{where}: a path and a label, or a dictionary such as {{'label': 3}}; found {text!r}")
    whole = {str(name): value for name, value in facts.items() if isinstance(value, int)}
    return {LABELS if name == "label" else name: int(value) for name, value in whole.items()}


def _check_files(root: Path, paths: Sequence[str], path: Path) -> None:
    absent = [file for file in paths if not (root / file).is_file()]
    if absent:
        raise OodometerError(
            f"{path}: {len(absent):,} of {len(paths):,} files are missing, the first is {root / absent[0]}. "
            "Paths start at the list's own folder unless root=… (--root) says otherwise"
        )


def _listed(names: Any) -> str:
    return ", ".join(names) or "none"

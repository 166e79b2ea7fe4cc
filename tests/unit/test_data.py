"""Readers of folders, lists, arrays, IDX and NIfTI, and preprocessing against its definition and against Pillow."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from oodometer.data.preprocess import (
    PRESETS,
    Preprocessing,
    VolumePreprocessing,
    as_facts,
    read_preprocessing,
)
from oodometer.data.sources import open_source
from oodometer.errors import OodometerError

RNG = np.random.default_rng(0)
PHOTO = RNG.integers(0, 256, (37, 52, 3), dtype=np.uint8)


def save(path: Path, seed: int = 0) -> np.ndarray:
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return pixels


# ---------------------------------------------------------------------------------------------- folders


def test_subfolders_are_classes_in_sorted_order(tmp_path: Path) -> None:
    for name in ("dog/2.png", "cat/1.png", "cat/deep/0.png", ".hidden/3.png", "cat/.DS_Store.png"):
        save(tmp_path / name)
    (tmp_path / "dog" / "notes.txt").write_text("no image")
    source = open_source(tmp_path)
    assert source.paths == ["cat/1.png", "cat/deep/0.png", "dog/2.png"]
    assert source.labels["labels"].tolist() == [0, 0, 1]
    assert source.classes == ("cat", "dog")


def test_numbered_folders_are_the_labels(tmp_path: Path) -> None:
    """Sorted as text, folder 10 would come before folder 2."""
    for name in ("10/a.png", "2/a.png", "0/a.png"):
        save(tmp_path / name)
    source = open_source(tmp_path)
    assert source.paths == ["0/a.png", "2/a.png", "10/a.png"]
    assert source.labels["labels"].tolist() == [0, 2, 10]


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    pixels = save(tmp_path / "b.png", 1)
    save(tmp_path / "a.PNG")
    source = open_source(tmp_path)
    assert source.paths == ["a.PNG", "b.png"]
    assert dict(source.labels) == {}
    np.testing.assert_array_equal(np.asarray(source.read(1).value), pixels)


def test_images_beside_class_folders_are_an_error(tmp_path: Path) -> None:
    save(tmp_path / "cat" / "a.png")
    save(tmp_path / "stray.png")
    with pytest.raises(OodometerError, match=r"'stray\.png' lies beside class folders"):
        open_source(tmp_path)


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OodometerError, match="no image or NIfTI file"):
        open_source(tmp_path)


# ---------------------------------------------------------------------------------------------- lists


def listed(tmp_path: Path, text: str, names: tuple[str, ...] = ("a.png", "b c.png", "d.png")) -> Path:
    for name in names:
        save(tmp_path / name)
    path = tmp_path / "list.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_list_has_paths_labels_and_levels(tmp_path: Path) -> None:
    source = open_source(listed(tmp_path, "# made by hand\na.png 3 1\n\nb c.png -1 0\nd.png 12 1\n"))
    assert source.paths == ["a.png", "b c.png", "d.png"]
    assert {name: column.tolist() for name, column in source.labels.items()} == {
        "labels": [3, -1, 12],
        "level2": [1, 0, 1],
    }
    assert source.read(2).labels == {"labels": 12, "level2": 1}


def test_a_header_names_the_levels(tmp_path: Path) -> None:
    source = open_source(listed(tmp_path, "# path label species\na.png 3 1\nd.png 4 2\n"))
    assert list(source.labels) == ["labels", "species"]


def test_openood_lists_are_read(tmp_path: Path) -> None:
    """OpenOOD's lists: `path label`, or a dictionary after the path; paths start at a data folder."""
    folder = tmp_path / "lists"
    folder.mkdir()
    plain, rich = folder / "plain.txt", folder / "rich.txt"
    save(tmp_path / "data" / "cifar10" / "test" / "0001.png")
    plain.write_text("cifar10/test/0001.png 3\n")
    rich.write_text("cifar10/test/0001.png {'label': 7, 'coarse': 2, 'note': 'x'}\n")
    assert open_source(plain, root=tmp_path / "data").labels["labels"].tolist() == [3]
    found = open_source(rich, root=tmp_path / "data").labels
    assert {name: column.tolist() for name, column in found.items()} == {"labels": [7], "coarse": [2]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.png 1\ngone.png 2\nlost.png 3\n", r"2 of 3 files are missing, the first is .*gone\.png"),
        ("a.png 1\nd.png\n", r"line 2: labels none, but the first line has labels"),
        ("# path label genus\na.png 1\n", r"line 2: 1 labels, but the header names labels, genus"),
        ("a.png {3\n", r"line 1: a path and a label, or a dictionary"),
        ("# nothing\n", "an empty list"),
    ],
)
def test_mistakes_in_a_list_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(OodometerError, match=message):
        open_source(listed(tmp_path, text))


def test_a_list_of_bytes_is_no_list(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(OodometerError, match="is no text"):
        open_source(path)


# ---------------------------------------------------------------------------------------------- arrays


def test_npz_parts_are_chosen_by_name(tmp_path: Path) -> None:
    x, y = RNG.integers(0, 256, (5, 4, 4), dtype=np.uint8), np.arange(5)
    np.savez(tmp_path / "two.npz", x_train=x, y_train=y, x_test=x[::-1], y_test=y[::-1], names=np.array(["a"]))
    source = open_source(tmp_path / "two.npz", part="test")
    np.testing.assert_array_equal(source.read(0).value, x[4])
    assert source.read(0).labels == {"labels": 4}
    with pytest.raises(OodometerError, match="several parts, 'train', 'test'"):
        open_source(tmp_path / "two.npz")
    with pytest.raises(OodometerError, match="no part 'val'"):
        open_source(tmp_path / "two.npz", part="val")


@pytest.mark.parametrize("keys", [("x", "y"), ("images", "labels"), ("test_images", "test_labels"), ("data", "target")])
def test_usual_names_are_known(tmp_path: Path, keys: tuple[str, str]) -> None:
    np.savez(tmp_path / "a.npz", **{keys[0]: np.zeros((3, 4, 4), np.uint8), keys[1]: np.array([2, 0, 1])})
    assert open_source(tmp_path / "a.npz").labels["labels"].tolist() == [2, 0, 1]


@pytest.mark.parametrize("shape", [(2, 5, 6, 3), (2, 3, 5, 6)])
def test_channels_come_last(shape: tuple[int, ...]) -> None:
    x = RNG.integers(0, 256, shape, dtype=np.uint8)
    value = open_source(x).read(1).value
    np.testing.assert_array_equal(value, x[1] if shape[3] == 3 else x[1].transpose(1, 2, 0))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros((2, 5, 6, 7), np.uint8), "1, 3 or 4 channels"),
        (np.zeros((2, 5, 6), np.uint16), "8-bit pixels"),
        (np.zeros(4, np.float32), r"rows × …"),
        ((np.zeros((3, 4), np.float32), np.zeros(2, int)), "labels must be one whole number a row, 3 of them"),
        ((np.zeros((3, 4), np.float32), np.zeros(3)), "dtype float64"),
        (np.zeros((0, 4, 4), np.uint8), "no rows"),
    ],
)
def test_unusable_arrays_are_refused(data: Any, message: str) -> None:
    with pytest.raises(OodometerError, match=message):
        open_source(data)


def idx(values: np.ndarray, code: int) -> bytes:
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, code, values.ndim, *values.shape) + values.tobytes()


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_are_read_with_their_labels(tmp_path: Path, packed: bool) -> None:
    x, y = RNG.integers(0, 256, (4, 3, 5), dtype=np.uint8), np.array([3, 1, 0, 2], np.uint8)
    end = ".gz" if packed else ""
    for name, values in (("t10k-images-idx3-ubyte", x), ("t10k-labels-idx1-ubyte", y)):
        content = idx(values, 0x08)
        (tmp_path / f"{name}{end}").write_bytes(gzip.compress(content) if packed else content)
    source = open_source(tmp_path / f"t10k-images-idx3-ubyte{end}")
    np.testing.assert_array_equal(np.stack([source.read(row).value for row in range(4)]), x)
    assert source.labels["labels"].tolist() == [3, 1, 0, 2]


def test_wide_idx_values_are_big_endian(tmp_path: Path) -> None:
    from oodometer.data.arrays import read_idx

    values = np.array([[1, -2], [300, 4]], ">i4")
    (tmp_path / "a.idx").write_bytes(idx(values, 0x0C))
    np.testing.assert_array_equal(read_idx(tmp_path / "a.idx"), [[1, -2], [300, 4]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(np.zeros((4, 3), np.uint8), 0x08)[:-1], "has 23 bytes; its header asks for 24"),
        (b"\0\0\x07\x01", "is no IDX file"),
        (b"\0\0\x08\x03\0\0", "truncated copy"),
        (b"", "is no IDX file"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.idx").write_bytes(content)
    with pytest.raises(OodometerError, match=message):
        open_source(tmp_path / "a.idx")


# ---------------------------------------------------------------------------------------------- data sets


class Items:
    """A map-style data set of given items."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        return self.items[row]


@pytest.mark.parametrize(
    ("item", "labels"),
    [
        (np.ones(3), {}),
        ((np.ones(3), 2), {"labels": 2}),
        ((np.ones(3), np.int64(2), "path"), {"labels": 2}),
        ({"pixel_values": np.ones(3), "labels": np.array(2)}, {"labels": 2}),
        ({"image": np.ones(3)}, {}),
    ],
)
def test_items_of_every_usual_form_are_read(item: Any, labels: dict[str, int]) -> None:
    sample = open_source(Items(item)).read(0)
    np.testing.assert_array_equal(sample.value, np.ones(3))
    assert dict(sample.labels) == labels


def test_unusable_items_are_named() -> None:
    with pytest.raises(OodometerError, match=r"whole numbers; found 'cat'"):
        open_source(Items((np.ones(3), "cat"))).read(0)
    with pytest.raises(OodometerError, match="no input; keys: y"):
        open_source(Items({"y": 1})).read(0)
    with pytest.raises(OodometerError, match="data must be a folder"):
        open_source(3)


def test_a_limit_keeps_the_first_rows() -> None:
    x, y = RNG.integers(0, 256, (9, 4, 4), dtype=np.uint8), np.arange(9)
    source = open_source((x, y), limit=4)
    assert len(source) == 4
    assert source.labels["labels"].tolist() == [0, 1, 2, 3]
    assert source.identity() != open_source((x, y)).identity()
    with pytest.raises(OodometerError, match="limit"):
        open_source((x, y), limit=0)


def test_identities_tell_contents_apart(tmp_path: Path) -> None:
    x = RNG.integers(0, 256, (3, 4, 4), dtype=np.uint8)
    changed = x.copy()
    changed[2, 3, 3] ^= 1
    assert open_source(x).identity() == open_source(x.copy()).identity()
    assert open_source(x).identity() != open_source(changed).identity()
    one = open_source(listed(tmp_path / "one", "a.png 1\nd.png 2\n"))
    moved = open_source(listed(tmp_path / "elsewhere", "a.png 1\nd.png 2\n"))
    other = open_source(listed(tmp_path / "other", "a.png 1\nd.png 3\n"))
    assert one.identity() == moved.identity() != other.identity()


# ---------------------------------------------------------------------------------------------- preprocessing


def test_normalisation_by_loop() -> None:
    mean, std = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)
    found = Preprocessing(mean=mean, std=std)(PHOTO)
    assert found.shape == (3, 37, 52)
    assert found.dtype == np.float32
    for channel, row, column in ((0, 0, 0), (1, 36, 51), (2, 17, 3)):
        expected = (int(PHOTO[row, column, channel]) / 255 - mean[channel]) / std[channel]
        assert found[channel, row, column] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_resizing_is_pillows(interpolation: str) -> None:
    found = Preprocessing(resize=20, interpolation=interpolation)(PHOTO)
    # The longer side: ⌊20·52/37⌋ = 28.
    wanted = Image.fromarray(PHOTO).resize((28, 20), Image.Resampling[interpolation.upper()])
    np.testing.assert_array_equal(found, np.asarray(wanted).transpose(2, 0, 1).astype(np.float32) / 255)


def test_a_pair_of_sides_is_height_and_width() -> None:
    assert Preprocessing(resize=(11, 17))(PHOTO).shape == (3, 11, 17)


@pytest.mark.parametrize(
    ("size", "rows", "columns"), [(20, slice(8, 28), slice(16, 36)), ((21, 19), slice(8, 29), slice(16, 35))]
)
def test_the_crop_is_the_centre(size: Any, rows: slice, columns: slice) -> None:
    """As torchvision: round((37 − 20)/2) = 8 and round((52 − 19)/2) = 16, halves to even."""
    found = Preprocessing(crop=size)(PHOTO)
    np.testing.assert_array_equal(found, PHOTO[rows, columns].transpose(2, 0, 1).astype(np.float32) / 255)


def test_half_pixels_are_rounded_as_asked() -> None:
    """37 − 22 = 15: round(7.5) = 8 (to even), ⌊7.5⌋ = 7; 52 − 23 = 29: 14 either way."""
    for centre, top in (("round", 8), ("floor", 7)):
        found = Preprocessing(crop=(22, 23), centre=centre)(PHOTO)
        np.testing.assert_array_equal(found[1] * 255, PHOTO[top : top + 22, 14 : 14 + 23, 1])
    assert np.flatnonzero(Preprocessing(crop=6, centre="floor")(np.full((3, 6), 9, np.uint8))[0, :, 0]).tolist() == [
        2,
        3,
        4,
    ]


def test_small_images_are_padded_to_the_crop() -> None:
    found = Preprocessing(crop=8, mode="L")(np.full((5, 6), 255, np.uint8))
    assert found.shape == (1, 8, 8)
    np.testing.assert_array_equal(np.flatnonzero(found[0].any(axis=1)), [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(np.flatnonzero(found[0].any(axis=0)), [1, 2, 3, 4, 5, 6])


def test_grey_and_colour_are_converted() -> None:
    grey = PHOTO[:, :, 0]
    colour = Preprocessing(mode="RGB")(grey)
    assert colour.shape == (3, 37, 52)
    np.testing.assert_array_equal(colour[0], colour[2])
    np.testing.assert_array_equal(
        Preprocessing(mode="L")(PHOTO)[0], np.asarray(Image.fromarray(PHOTO).convert("L"), np.float32) / 255
    )
    palette = Image.fromarray(PHOTO).convert("P")
    assert Preprocessing(mode="RGB")(palette).shape == (3, 37, 52)


@pytest.mark.torch
@pytest.mark.parametrize(("interpolation", "levels"), [("bilinear", 1), ("bicubic", 3)])
def test_the_torch_backend_is_close_to_pillow(interpolation: str, levels: int) -> None:
    """Both antialias; Pillow rounds to whole grey levels after each axis, which shows on noise."""
    pytest.importorskip("torch")
    one, other = (
        Preprocessing(resize=20, interpolation=interpolation, backend=backend)(PHOTO) for backend in ("torch", "pillow")
    )
    assert one.shape == other.shape
    assert 0 < np.abs(one - other).max() * 255 < levels + 0.01


def test_more_than_eight_bits_are_refused() -> None:
    image = Image.fromarray(np.full((4, 4), 40000, np.uint16))
    with pytest.raises(OodometerError, match="8 bits"):
        Preprocessing(mode="L")(image)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"resize": 0}, "positive"),
        ({"resize": "big"}, r"\$\.resize"),
        ({"size": 3}, "unknown field `size`"),
        ({"mean": [0.5], "std": []}, "one number a channel"),
        ({"mean": [0.5], "std": [0.0]}, "std above 0"),
        ({"interpolation": "best"}, "interpolation"),
        ({"backend": "torch", "interpolation": "nearest"}, "torch backend"),
        ({"kind": "volume", "size": [4, 4]}, "Expected `array` of length 3"),
        ({"kind": "volume", "window": [1, 1]}, "low < high"),
    ],
)
def test_mistakes_in_preprocessing_are_named(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(OodometerError, match=message):
        read_preprocessing(facts)


def test_preprocessing_is_data(tmp_path: Path) -> None:
    import json

    one = PRESETS["imagenet"]
    assert read_preprocessing(json.loads(json.dumps(as_facts(one)))) == one
    (tmp_path / "p.toml").write_text("resize = 32\ncrop = [28, 30]\nmean = [0.5]\nstd = [0.25]\n")
    assert read_preprocessing(tmp_path / "p.toml") == Preprocessing(resize=32, crop=(28, 30), mean=(0.5,), std=(0.25,))
    with pytest.raises(OodometerError, match="neither a file nor one of imagenet"):
        read_preprocessing("imagenett")


# ---------------------------------------------------------------------------------------------- volumes


def test_volumes_are_boxed_around_their_foreground_and_standardised() -> None:
    voxels = np.zeros((9, 7, 5))
    voxels[1:4, 2:6, 1:3] = RNG.uniform(1, 2, (3, 4, 2))
    found = VolumePreprocessing(size=(5, 4, 4), standardise=False)(voxels)
    assert found.shape == (1, 5, 4, 4)
    # Centre of the foreground: (2, 4, 2); the box starts 2 before it in every axis.
    np.testing.assert_array_equal(found[0], voxels[0:5, 2:6, 0:4].astype(np.float32))
    standard = VolumePreprocessing(size=(5, 4, 4))(voxels)
    assert standard.mean() == pytest.approx(0, abs=1e-6)
    assert standard.std() == pytest.approx(1, rel=1e-5)


def test_boxes_beyond_the_volume_are_zero() -> None:
    found = VolumePreprocessing(size=(4, 4, 4), standardise=False)(np.ones((2, 2, 2)))
    assert found.sum() == 8
    np.testing.assert_array_equal(found[0, 1:3, 1:3, 1:3], 1)


def test_intensities_are_clipped_to_the_window() -> None:
    voxels = np.array([[[-1000.0, 40.0, 3000.0]]])
    np.testing.assert_array_equal(VolumePreprocessing(window=(0, 80), standardise=False)(voxels)[0, 0, 0], [0, 40, 80])
    with pytest.raises(OodometerError, match="three axes"):
        VolumePreprocessing()(np.zeros((3, 3)))


def test_constant_volumes_stay_finite() -> None:
    np.testing.assert_array_equal(VolumePreprocessing()(np.full((2, 2, 2), 7.0)), 0)


def test_nifti_axes_are_turned_to_canonical(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel", reason="needs nibabel: pip install 'oodometer[medical]'")
    voxels = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    # The first axis points left.
    nibabel.save(nibabel.Nifti1Image(voxels, np.diag([-1.0, 1, 1, 1])), tmp_path / "brain.nii.gz")
    source = open_source(tmp_path)
    assert source.kind == "volume"
    np.testing.assert_array_equal(source.read(0).value, voxels[::-1])
    np.testing.assert_array_equal(open_source(tmp_path / "brain.nii.gz").read(0).value, voxels[::-1])


def test_volumes_and_images_are_not_mixed(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    (tmp_path / "b.nii").write_bytes(b"")
    with pytest.raises(OodometerError, match=r"b\.nii is a volume and a\.png an image"):
        open_source(tmp_path)

"""What goes wrong during extraction: one clear error each that names the place, and every finished row is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

import oodometer  # noqa: E402
from oodometer import Bank  # noqa: E402
from oodometer.cli import main  # noqa: E402
from oodometer.data.preprocess import Preprocessing  # noqa: E402
from oodometer.errors import OodometerError  # noqa: E402
from oodometer.models import load_weights, zoo  # noqa: E402
from oodometer.models.building import build  # noqa: E402

pytestmark = pytest.mark.torch
ROWS, CLASSES, BATCH = 12, 3, 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return zoo.cnn(classes=CLASSES, channels=3, width=4).eval()


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A list of twelve images."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "images"
    folder.mkdir()
    for row in range(ROWS):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{row:02d}.png")
    (folder / "list.txt").write_text("".join(f"{row:02d}.png {row % CLASSES}\n" for row in range(ROWS)))
    return folder / "list.txt"


def extract(model: nn.Module, data: Any, **options: Any) -> Bank:
    usual = {"preprocessing": Preprocessing(mode="RGB"), "batch_size": BATCH}
    return oodometer.extract(model, data, **{**usual, **options})


def done(folder: Path) -> int:
    return int(json.loads((folder / "progress.json").read_text())["done"])


# ---------------------------------------------------------------------------------------------- images


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def text(path: Path) -> None:
    path.write_text("<html>404 Not Found</html>")


def enlarge(path: Path) -> None:
    Image.fromarray(np.zeros((9, 8, 3), np.uint8)).save(path)


def deepen(path: Path) -> None:
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(path)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (truncate, r"06\.png is damaged or no image"),
        (empty, r"06\.png is damaged or no image"),
        (text, r"06\.png is damaged or no image"),
        (Path.unlink, r"06\.png cannot be read"),
        (enlarge, r"06\.png gives an input of shape \(3, 9, 8\), .*04\.png one of \(3, 8, 8\): declare a resize"),
        (deepen, r"06\.png: an image of mode I;16"),
    ],
)
def test_a_bad_file_is_named_and_the_rest_goes_on(
    images: Path, tmp_path: Path, harm: Any, message: str, workers: int
) -> None:
    whole = extract(network(), images, out=tmp_path / "whole")
    from oodometer.data.sources import open_source

    source, bad = open_source(images), images.parent / "06.png"
    good = bad.read_bytes()
    harm(bad)
    with pytest.raises(OodometerError, match=message) as caught:
        extract(network(), source, out=tmp_path / "bank", num_workers=workers)
    assert f"4 of 12 rows are kept in {tmp_path / 'bank'}" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert done(tmp_path / "bank") == 4
    bad.write_bytes(good)
    seen: list[int] = []
    model = network()
    model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    assert extract(model, source, out=tmp_path / "bank").fingerprint == whole.fingerprint
    assert seen == [4, 4]


def test_an_image_without_permission_is_named(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Image.open

    def refuse(path: Any, *rest: Any) -> Any:
        if Path(path).name == "06.png":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *rest)

    monkeypatch.setattr(Image, "open", refuse)
    with pytest.raises(OodometerError, match=r"06\.png cannot be read \(Permission denied\)"):
        extract(network(), images)


class Broken:
    """A data set whose seventh item fails as users' code does."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        if row == 6:
            raise KeyError("patient 17")
        return torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(row)), row % CLASSES


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_users_data_set_names_the_row(tmp_path: Path, workers: int) -> None:
    with pytest.raises(OodometerError, match=r"row 6 of the data set: KeyError: 'patient 17'"):
        oodometer.extract(network(), Broken(), out=tmp_path / "bank", batch_size=BATCH, num_workers=workers)
    assert done(tmp_path / "bank") == 4


def test_images_of_a_data_set_need_preprocessing() -> None:
    class Photos(Broken):
        def __getitem__(self, row: int) -> Any:
            return Image.fromarray(np.zeros((8, 8, 3), np.uint8)), 0

    with pytest.raises(OodometerError, match=r"row 0 of the data set: items are Image, not network input"):
        oodometer.extract(network(), Photos())
    assert len(extract(network(), Photos())) == ROWS


# ---------------------------------------------------------------------------------------------- the network


class Poisoned(nn.Module):
    """Not a number where an input's first pixel is marked."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.fc, self.value = nn.Linear(6, CLASSES), value

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.where(x[:, :1] == 99, self.value, x))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_nan_of_the_network_names_row_and_column(tmp_path: Path, value: float) -> None:
    x = torch.randn(ROWS, 6)
    x[6, 0] = 99
    with pytest.raises(OodometerError, match=r"column 'features' is NaN or infinite in row 6 of the array"):
        oodometer.extract(Poisoned(value), x, out=tmp_path / "bank", batch_size=BATCH)
    assert done(tmp_path / "bank") == 4


@pytest.mark.parametrize("columns", [("features", "logits"), ("features",)])
@pytest.mark.parametrize("rows", [[0], [2], list(range(ROWS))])
def test_a_nan_in_the_first_batch_is_no_missing_head(rows: list[int], columns: tuple[str, ...]) -> None:
    model = nn.Sequential(nn.Linear(6, CLASSES))
    model.register_forward_hook(lambda _, args, output: torch.where(args[0][:, :1] == 99, torch.nan, output))
    x = torch.randn(ROWS, 6)
    x[rows, 0] = 99
    with pytest.raises(OodometerError, match=rf"column 'logits' is NaN or infinite in row {rows[0]} of the array"):
        oodometer.extract(model, x, columns=columns)


def test_an_overflow_of_the_stored_precision_is_told_from_a_nan() -> None:
    x = torch.randn(ROWS, 6)
    x[6, 0] = 99
    with pytest.raises(OodometerError, match=r"'features' is too large for float16 in row 6 .*: store float32"):
        oodometer.extract(Poisoned(1e6), x, batch_size=BATCH, dtype="float16")


class Full(nn.Module):
    """No memory from the second batch on."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.fc, self.error, self.calls = nn.Linear(6, CLASSES), error, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            raise self.error
        return self.fc(x)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_memory_that_never_suffices_is_one_error(tmp_path: Path, error: Exception) -> None:
    x = torch.randn(1500, 6)
    with pytest.raises(OodometerError, match=r"even one row \(row 512 of the array\) does not fit into"):
        oodometer.extract(Full(error), x, out=tmp_path / "bank")
    assert done(tmp_path / "bank") == 512


def test_a_given_batch_size_that_does_not_fit_is_one_error() -> None:
    with pytest.raises(OodometerError, match=r"4 rows at a time \(from row 4\) .* pass a smaller batch_size"):
        oodometer.extract(Full(MemoryError()), torch.randn(ROWS, 6), batch_size=BATCH)


def test_an_error_inside_the_network_names_rows_and_shape(images: Path) -> None:
    with pytest.raises(OodometerError, match=r"failed on rows 0 to 3 .*00\.png\), input of shape \(4, 3, 8, 8\)"):
        extract(nn.Sequential(nn.Flatten(), nn.Linear(7, CLASSES)), images)


def test_labels_beyond_the_classes_name_the_row(images: Path) -> None:
    images.write_text(images.read_text().replace("07.png 1", "07.png 3"))
    with pytest.raises(OodometerError, match=r"row 7 \(.*07\.png\) has label 3, but the network has 3 classes"):
        extract(network(), images)
    assert extract(network(), images, ood=True).labels[7] == 3


def test_weights_of_another_class_count_name_the_layer(tmp_path: Path) -> None:
    state = {name: value.numpy() for name, value in zoo.resnet20(classes=7).state_dict().items()}
    np.savez(tmp_path / "seven.npz", **state)
    with pytest.raises(OodometerError, match=r"linear\.weight has shape \(7, 64\), the model's has \(10, 64\)"):
        load_weights(zoo.resnet20(), tmp_path / "seven.npz")


def test_weights_of_another_architecture_name_the_keys(tmp_path: Path) -> None:
    np.savez(tmp_path / "cnn.npz", **{"0.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(OodometerError, match=r"lacks conv1\.weight.* and has 0\.weight, which the model lacks"):
        load_weights(zoo.resnet20(), tmp_path / "cnn.npz")


def test_weights_that_run_code_are_never_opened(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"fc.weight": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(OodometerError, match="Files that run code are never opened"):
        load_weights(network(), tmp_path / "evil.pt")
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0")
    with pytest.raises(OodometerError, match="truncated"):
        load_weights(network(), tmp_path / "cut.safetensors")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("resnet20", "write package.module:factory"),
        ("no_such_package:resnet20", "there is no module 'no_such_package'"),
        ("oodometer.models.zoo:resnet21", r"no 'resnet21'; did you mean 'resnet\d+'"),
        ("oodometer.models.zoo:resnet20:klasses=3", "TypeError"),
        ("oodometer.models.zoo:IMAGENET_MEAN", "cannot be made"),
        ("json:dumps:obj=3", "a torch.nn.Module is needed"),
    ],
)
def test_models_that_cannot_be_made_are_explained(model: str, message: str) -> None:
    with pytest.raises(OodometerError, match=message):
        build(model)


def test_files_that_are_no_models_are_explained(tmp_path: Path) -> None:
    (tmp_path / "net.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(OodometerError, match="no TorchScript file"):
        build(str(tmp_path / "net.pt"))
    with pytest.raises(OodometerError, match=r"no config\.json"):
        build(str(tmp_path))


# ---------------------------------------------------------------------------------------------- the disk


def test_a_damaged_progress_file_is_named(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "bank"
    out.mkdir()
    (out / "progress.json").write_text("{")
    with pytest.raises(OodometerError, match=r"progress\.json is damaged .*overwrite=True"):
        extract(network(), images, out=out)
    assert len(extract(network(), images, out=out, overwrite=True)) == ROWS


def test_a_file_in_the_place_of_the_folder_is_left_alone(images: Path, tmp_path: Path) -> None:
    (tmp_path / "bank").write_text("mine")
    with pytest.raises(OodometerError, match="is a file"):
        extract(network(), images, out=tmp_path / "bank")
    assert (tmp_path / "bank").read_text() == "mine"


def test_a_full_disk_is_told_before_anything_is_written(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OodometerError, match=r"000\.features\.npy needs 0\.00 GB, .* make room"):
        extract(network(), images, out=tmp_path / "bank")


def test_a_lost_column_is_named(images: Path, tmp_path: Path) -> None:
    (images.parent / "06.png").write_bytes(b"")
    with pytest.raises(OodometerError):
        extract(network(), images, out=tmp_path / "bank")
    (tmp_path / "bank" / "000.features.npy").unlink()
    with pytest.raises(OodometerError, match=r"000\.features\.npy cannot be continued"):
        extract(network(), images, out=tmp_path / "bank")


SLOW = """
    import sys, time, torch
    import oodometer
    from oodometer.models import store, zoo
    store.SECONDS = 0.0
    torch.manual_seed(0)
    model = zoo.cnn(classes=3, channels=3, width=4).eval()
    model.register_forward_hook(lambda *_: time.sleep(0.3))
    oodometer.extract(model, sys.argv[1], out=sys.argv[2], preprocessing={"mode": "RGB"}, batch_size=1)
"""


def test_a_killed_process_loses_at_most_its_last_batch(images: Path, tmp_path: Path) -> None:
    whole = extract(network(), images, out=tmp_path / "whole", batch_size=1)
    out = tmp_path / "bank"
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(SLOW), str(images), str(out)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not ((out / "progress.json").exists() and done(out) >= 3):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = done(out)
    assert 3 <= kept < ROWS
    seen: list[int] = []
    model = network()
    model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    bank = extract(model, images, out=out, batch_size=1)
    assert sum(seen) == ROWS - kept
    assert bank.fingerprint == whole.fingerprint


# ---------------------------------------------------------------------------------------------- the command


def test_the_command_extracts_and_goes_on(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "factory.py").write_text(
        "import torch\nfrom oodometer.models import zoo\n\n\n"
        "def make(classes=3):\n    torch.manual_seed(0)\n    return zoo.cnn(classes=classes, channels=3, width=4)\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["extract", "--model", "factory:make", "--data", str(images), "--out", "bank", "--batch-size", "4"]
    arguments += ["--preprocess", "mode=RGB", "mean=0.5", "std=0.25", "--device", "cpu"]
    good = (images.parent / "06.png").read_bytes()
    (images.parent / "06.png").write_bytes(b"")
    assert main(arguments) == 2
    assert "06.png is damaged or no image" in capsys.readouterr().err
    (images.parent / "06.png").write_bytes(good)
    assert main(arguments) == 0
    assert main([*arguments, "--json"]) == 0
    out = capsys.readouterr().out
    facts = json.loads(out[out.index("{") :])
    assert facts["rows"] == ROWS
    assert facts["head"] == "13"
    assert facts["preprocessing"]["std"] == [0.25]
    bank = Bank.open(tmp_path / "bank")
    torch.manual_seed(0)
    direct = extract(network(), images, preprocessing=Preprocessing(mode="RGB", mean=(0.5,), std=(0.25,)))
    np.testing.assert_array_equal(bank.logits, direct.logits)

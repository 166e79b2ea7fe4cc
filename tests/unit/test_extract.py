"""Extraction: one forward pass a row, an untouched model, and the same bytes however it was stopped or divided."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

import oodometer  # noqa: E402
from oodometer import Bank  # noqa: E402
from oodometer.data.preprocess import Preprocessing  # noqa: E402
from oodometer.data.sources import open_source  # noqa: E402
from oodometer.errors import OodometerError, OodometerWarning  # noqa: E402
from oodometer.models import Pass, load_weights, zoo  # noqa: E402
from oodometer.models.job import Running, chosen_device  # noqa: E402

pytestmark = pytest.mark.torch
ROWS, CLASSES = 23, 4
SHARED = Path(__file__).parents[3] / "shared" / "data"
SCALED = Preprocessing(mode="L")


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return zoo.cnn(classes=CLASSES, width=4).eval()


def digits(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.integers(0, 256, (rows, 8, 8), dtype=np.uint8), rng.integers(0, CLASSES, rows)


class Counter:
    """Rows that go through a model."""

    def __init__(self, model: nn.Module) -> None:
        self.rows, self.batches = 0, []
        model.register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.batches.append(len(args[0]))
        self.rows += len(args[0])


def extract(model: nn.Module, data: Any, **options: Any) -> Bank:
    return oodometer.extract(model, data, **{"preprocessing": SCALED, "batch_size": 5, **options})


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.npy"))}


# ---------------------------------------------------------------------------------------------- one pass


def test_every_row_goes_through_the_network_once(tmp_path: Path) -> None:
    model = network()
    count = Counter(model)
    bank = extract(model, digits(), out=tmp_path / "bank")
    assert count.rows == ROWS == len(bank)
    assert count.batches == [5, 5, 5, 5, 3]


def test_every_image_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    for row, image in enumerate(digits(6)[0]):
        Image.fromarray(image).save(tmp_path / f"{row}.png")
    opened: list[str] = []
    original = Image.open
    monkeypatch.setattr(Image, "open", lambda path, *rest: opened.append(Path(path).name) or original(path, *rest))
    extract(network(), tmp_path)
    assert opened == [f"{row}.png" for row in range(6)]


def test_columns_are_those_of_a_plain_loop() -> None:
    model, (x, y) = network(), digits()
    bank = extract(model, (x, y))
    inputs = torch.from_numpy(x.astype(np.float32)[:, None] / 255)
    with torch.no_grad():
        logits, features = model(inputs), model[:-1](inputs)
        first = model[:3](inputs).mean((2, 3))
    np.testing.assert_allclose(bank.logits, logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bank.features, features, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bank["layers.2"], first, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(bank.labels, y)
    assert bank.columns == ("features", "logits", "layers.2", "layers.6", "layers.10", "labels")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_columns_are_stored_as_asked(dtype: str) -> None:
    bank = extract(network(), digits(), dtype=dtype, columns=("logits",), layers=None)
    assert bank.columns == ("logits",)
    assert bank.logits.dtype == dtype


def test_the_accuracy_of_a_published_network() -> None:
    if not SHARED.is_dir():
        pytest.skip("the shared data folder is absent")
    model = load_weights(zoo.resnet20(), SHARED / "resnet20_cifar10_weights.npz")
    bank = oodometer.extract(model, open_source(SHARED / "cifar10_test.npz", limit=200), layers=None)
    # As counted by a plain loop over the same network; of the first 5000 it is 91.48 %.
    assert int((bank.logits.argmax(1) == bank.labels).sum()) == 182


# ---------------------------------------------------------------------------------------------- layers


def test_pooling_by_hand() -> None:
    model, (x, _) = network(), digits()
    names = ("2", "6:mean+var", "10:none")
    bank = extract(model, x, layers=names)
    with torch.no_grad():
        maps = model[:7](torch.from_numpy(x.astype(np.float32)[:, None] / 255))
        last = model[7:11](maps)
    assert bank.layers == ("layers.2", "layers.6", "layers.10")
    moments = torch.cat([maps.mean((2, 3)), maps.var((2, 3), correction=0)], 1)
    np.testing.assert_allclose(bank["layers.6"], moments, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(bank["layers.10"], last, rtol=1e-5, atol=1e-6)


class Tokens(nn.Module):
    """Two blocks over tokens that end in channels."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, 6))
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def test_blocks_of_a_transformer_give_their_class_token() -> None:
    torch.manual_seed(0)
    model, x = Tokens().eval(), torch.randn(9, 5, 6)
    bank = oodometer.extract(model, x)
    mean = oodometer.extract(model, x, layers=["blocks.0:mean"])
    with torch.no_grad():
        first = model.blocks[0](torch.cat([model.cls_token.expand(9, -1, -1), x], 1))
    assert bank.layers == ("layers.blocks.0", "layers.blocks.1")
    np.testing.assert_allclose(bank["layers.blocks.0"], first[:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(mean["layers.blocks.0"], first.mean(1), rtol=1e-5, atol=1e-6)


def test_stages_of_a_residual_network_are_its_layers() -> None:
    bank = oodometer.extract(zoo.resnet20(), torch.randn(2, 3, 32, 32))
    assert bank.layers == ("layers.layer1", "layers.layer2", "layers.layer3")
    assert [bank.row_shape(name) for name in bank.layers] == [(16,), (32,), (64,)]


def test_hidden_layers_of_a_perceptron_are_its_layers() -> None:
    bank = oodometer.extract(zoo.mlp(hidden=(20, 10)), torch.randn(3, 784))
    assert bank.layers == ("layers.2",)
    assert bank.row_shape("layers.2") == (20,)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["22"], "no layer '22'"),
        (["2", "2:mean"], "'2' is named twice"),
        (["2:median"], "pooling must be one of"),
    ],
)
def test_wrong_layers_are_named(layers: list[str], message: str) -> None:
    with pytest.raises(OodometerError, match=message):
        extract(network(), digits(), layers=layers)


# ---------------------------------------------------------------------------------------------- untouched


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "training": [module.training for module in model.modules()],
        "hooks": [dict(module._forward_hooks) for module in model.modules()],
        "pre": [dict(module._forward_pre_hooks) for module in model.modules()],
        "pointers": [p.data_ptr() for p in [*model.parameters(), *model.buffers()]],
        "requires": [p.requires_grad for p in model.parameters()],
        "gradients": [p.grad for p in model.parameters()],
        "state": copy.deepcopy(model.state_dict()),
    }


def assert_same(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    state, old = after.pop("state"), before.pop("state")
    assert all(torch.equal(value, old[name]) for name, value in state.items())
    assert all(a is b for a, b in zip(after.pop("gradients"), before.pop("gradients"), strict=True))
    assert after == before


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_given_back_as_it_was(fails: bool) -> None:
    model, (x, y) = network().train(), digits()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    model[4].weight.grad = torch.ones_like(model[4].weight)
    seen: list[int] = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    before = snapshot(model)
    random = torch.get_rng_state()
    if fails:
        with pytest.raises(OodometerError, match="label 9"):
            extract(model, (x, np.full(ROWS, 9)))
    else:
        extract(model, (x, y))
    assert_same(model, before)
    assert seen
    assert torch.equal(torch.get_rng_state(), random)


def test_a_moved_model_gets_its_own_tensors_back() -> None:
    """A second device without one: every tensor is put back by reference, not by a second move."""
    from oodometer.models.hooks import untouched

    model = network().train()
    model[4].weight.grad = torch.ones_like(model[4].weight)
    before = snapshot(model)
    pointer = model[4].weight.grad.data_ptr()
    with pytest.raises(RuntimeError), untouched(model, torch.device("meta")) as moved:
        assert next(moved.parameters()).device.type == "meta"
        assert not moved.training
        raise RuntimeError("stop")
    assert_same(model, before)
    assert model[4].weight.grad.data_ptr() == pointer
    assert float(model[4].weight.grad.sum()) == model[4].weight.numel()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_and_gives_the_model_back() -> None:
    model = network().train()
    host = extract(model, digits(), device="cpu")
    before = snapshot(model)
    bank = extract(model, digits(), device="cuda", num_workers=1)
    assert_same(model, before)
    np.testing.assert_allclose(bank.logits, host.logits, rtol=1e-3, atol=1e-4)


def test_thirty_networks_never_share_a_result() -> None:
    """Keys are content: a network's features cannot be another one's (peers keyed by id())."""
    x, _ = digits(4)
    found = [extract(network(seed), x, layers=None) for seed in range(30)]
    again = [extract(network(seed), x, layers=None) for seed in range(30)]
    assert len({bank.fingerprint for bank in found}) == 30
    assert [bank.fingerprint for bank in found] == [bank.fingerprint for bank in again]


# ---------------------------------------------------------------------------------------------- disk


class StopError(Exception):
    pass


def stopping(after: float) -> Any:
    def progress(what: str, share: float) -> None:
        if share >= after:
            raise StopError

    return progress


def test_a_stopped_extraction_goes_on_with_the_same_bytes(tmp_path: Path) -> None:
    whole = extract(network(), digits(), out=tmp_path / "whole")
    model = network()
    count = Counter(model)
    with pytest.raises(StopError):
        extract(model, digits(), out=tmp_path / "stopped", progress=stopping(0.4))
    assert json.loads((tmp_path / "stopped" / "progress.json").read_text())["done"] == 10
    resumed = extract(model, digits(), out=tmp_path / "stopped")
    assert count.rows == ROWS
    assert bytes_of(tmp_path / "stopped") == bytes_of(tmp_path / "whole")
    assert resumed.fingerprint == whole.fingerprint
    assert not (tmp_path / "stopped" / "progress.json").exists()


def test_a_complete_bank_is_opened_not_extracted_again(tmp_path: Path) -> None:
    first = extract(network(), digits(), out=tmp_path / "bank")
    model = network()
    count = Counter(model)
    assert extract(model, digits(), out=tmp_path / "bank").fingerprint == first.fingerprint
    assert count.rows == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"preprocessing": Preprocessing(mode="L", mean=(0.5,), std=(0.5,))}, "extraction.preprocessing.mean"),
        ({"dtype": "float16"}, "extraction.dtype"),
        ({"model": network(1)}, "extraction.weights"),
        ({"data": digits(9)}, "data.arrays"),
        ({"layers": None}, "extraction.layers"),
    ],
)
@pytest.mark.parametrize("complete", [True, False])
def test_another_extraction_is_never_mixed_in(
    tmp_path: Path, change: dict[str, Any], named: str, complete: bool
) -> None:
    out = tmp_path / "bank"
    if complete:
        extract(network(), digits(), out=out)
    else:
        with pytest.raises(StopError):
            extract(network(), digits(), out=out, progress=stopping(0.4))
    before = bytes_of(out)
    options = {"model": network(), "data": digits(), "out": out, **change}
    with pytest.raises(OodometerError, match=named):
        extract(**options)
    assert bytes_of(out) == before
    assert len(extract(**options, overwrite=True)) == len(options["data"][0])


def test_banks_extracted_differently_do_not_join(tmp_path: Path) -> None:
    one = extract(network(), digits(), layers=None)
    other = extract(network(), digits(), layers=None, preprocessing=Preprocessing(mode="L", mean=(0.5,), std=(0.5,)))
    with pytest.raises(OodometerError, match=r"preprocessing\.mean"):
        Bank.concat([one, other])
    assert len(Bank.concat([one, extract(network(), digits(9), layers=None)])) == ROWS + 9
    knn = oodometer.create("knn", k=2).fit(one)
    assert np.isfinite(knn.score(extract(network(), digits(9), layers=None))).all()
    with pytest.raises(OodometerError, match=r"knn: this bank was extracted differently .*preprocessing\.mean"):
        knn.score(other)
    with pytest.raises(OodometerError, match=r"knn: the val bank was extracted differently"):
        oodometer.create("knn").fit(one, val=other)


def test_a_folder_that_is_no_bank_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(OodometerError, match="choose another folder"):
            extract(network(), digits(), out=tmp_path, overwrite=overwrite)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_shards_join_into_the_bank_of_one_run(tmp_path: Path, order: tuple[int, ...]) -> None:
    whole = extract(network(), digits(), out=tmp_path / "whole")
    model = network()
    count = Counter(model)
    for place in order:
        bank = extract(model, digits(), out=tmp_path / "parts", shard=f"{place}/3")
    assert count.rows == ROWS
    assert bank.fingerprint == whole.fingerprint
    assert bytes_of(tmp_path / "parts") == bytes_of(tmp_path / "whole")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["parts", "whole"]


@pytest.mark.parametrize("shard", ["0/2", "3/2", "half", "1/99"])
def test_wrong_shards_are_refused(tmp_path: Path, shard: str) -> None:
    with pytest.raises(OodometerError, match="shard"):
        extract(network(), digits(), out=tmp_path / "bank", shard=shard)


@pytest.mark.parametrize("workers", [0, 2])
def test_worker_processes_change_nothing(tmp_path: Path, workers: int) -> None:
    bank = extract(network(), digits(), num_workers=workers)
    assert bank.fingerprint == extract(network(), digits()).fingerprint


def test_files_are_remembered_by_name(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("b/2.png", "a/1.png", "a/0.png"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits(1)[0][0]).save(path)
    bank = extract(network(), tmp_path / "images", out=tmp_path / "bank")
    assert (tmp_path / "bank" / "samples.txt").read_text().split() == ["a/0.png", "a/1.png", "b/2.png"]
    assert bank.labels.tolist() == [0, 0, 1]
    assert bank.provenance["data"]["classes"] == ["a", "b"]


# ---------------------------------------------------------------------------------------------- memory


class Greedy(nn.Module):
    """Fits so many rows and no more."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.fits = most, []
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.fits.append(len(x))
        return self.fc(x)


def test_batches_shrink_until_they_fit() -> None:
    model, x = Greedy(6), torch.randn(50, 6)
    bank = oodometer.extract(model, x)
    assert sum(model.fits) == 50
    assert max(model.fits) == 6
    with torch.no_grad():
        np.testing.assert_allclose(bank.logits, model.fc(x), rtol=1e-5, atol=1e-6)


def test_automatic_batches_are_bounded() -> None:
    cpu = Running(torch.device("cpu"))
    assert cpu.rows((3, 32, 32)) == 512
    assert cpu.rows((3, 224, 224)) == 32
    assert cpu.rows((1, 512, 512, 512)) == 1


# ---------------------------------------------------------------------------------------------- producers


@dataclass(frozen=True)
class Saliency:
    """The input gradient of the largest logit, summed over the pixels."""

    name: str = "saliency"
    gradients: bool = True

    def __call__(self, run: Pass) -> Tensor:
        (slope,) = torch.autograd.grad(run.logits.max(1).values.sum(), run.inputs, retain_graph=True)
        return slope.flatten(1).sum(1)


def test_a_producer_shares_the_pass_and_leaves_no_gradient() -> None:
    model, (x, _) = network(), digits()
    count = Counter(model)
    bank = extract(model, x, columns=("logits", Saliency()), layers=None)
    assert count.rows == ROWS
    assert all(p.grad is None for p in model.parameters())
    inputs = torch.from_numpy(x.astype(np.float32)[:, None] / 255).requires_grad_()
    model(inputs).max(1).values.sum().backward()
    np.testing.assert_allclose(bank["saliency"], inputs.grad.flatten(1).sum(1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (("feature",), "unknown column 'feature'; did you mean 'features'"),
        (("labels",), "no column that the network computes"),
        (("logits", "logits"), "'logits' is asked for twice"),
        (("layers.2",), "layers=…"),
    ],
)
def test_wrong_columns_are_named(columns: tuple[str, ...], message: str) -> None:
    with pytest.raises(OodometerError, match=message):
        extract(network(), digits(), columns=columns)


# ---------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"amp": "float32"}, "amp must be one of"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"num_workers": -1}, "num_workers must be"),
        ({"device": "cuda:77"}, "device 'cuda:77'"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OodometerError, match=message):
        extract(network(), digits(), **options)


def test_a_model_has_to_be_a_module() -> None:
    with pytest.raises(OodometerError, match=r"torch\.nn\.Module; found function"):
        extract(lambda x: x, digits())


def test_the_device_is_the_models_own_where_it_has_one() -> None:
    assert chosen_device("auto", network().to("meta")).type == "meta"
    assert chosen_device("cpu", network().to("meta")).type == "cpu"


def test_missing_preprocessing_is_said() -> None:
    with pytest.warns(OodometerWarning, match="no preprocessing is declared: pixels are scaled to 0…1"):
        bank = oodometer.extract(network(), digits())
    assert bank.provenance["extraction"]["preprocessing"]["mode"] == "L"


def test_preprocessing_of_finished_input_is_refused() -> None:
    with pytest.raises(OodometerError, match="floating-point network input already"):
        extract(network(), torch.randn(3, 1, 8, 8))


def test_labels_of_outliers_are_kept() -> None:
    x, _ = digits(3)
    assert extract(network(), (x, np.array([40, 2, 41])), ood=True).labels.tolist() == [40, 2, 41]
    assert extract(network(), (x, np.array([-1, -1, -1]))).labels.tolist() == [-1, -1, -1]


# ---------------------------------------------------------------------------------------------- weights and zoo


def test_weights_load_from_every_format(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = network(5)
    state = {name: value for name, value in model.state_dict().items() if "num_batches" not in name}
    save_file(state, tmp_path / "w.safetensors")
    np.savez(tmp_path / "w.npz", **{name: value.numpy() for name, value in state.items()})
    torch.save({"state_dict": {f"module.{name}": value for name, value in state.items()}}, tmp_path / "w.pt")
    for file in ("w.safetensors", "w.npz", "w.pt"):
        loaded = load_weights(network(6), tmp_path / file)
        assert all(torch.equal(loaded.state_dict()[name], value) for name, value in state.items())


def test_zoo_networks_have_their_published_sizes() -> None:
    sizes = {name: sum(p.numel() for p in getattr(zoo, name)().parameters()) for name in ("resnet20", "resnet110")}
    # He et al. (CVPR 2016), table 6: 0.27 and 1.7 million parameters.
    assert sizes == {"resnet20": 269_722, "resnet110": 1_727_962}
    assert zoo.vgg13()(torch.randn(2, 3, 32, 32)).shape == (2, 10)

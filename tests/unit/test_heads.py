"""The head of every kind of classifier is found in one pass; where there is none, the error lists what was tried."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

import oodometer  # noqa: E402
from oodometer.errors import OodometerError  # noqa: E402
from oodometer.models.building import build  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
CLASSES = 5


class ResNetLike(nn.Module):
    """A stem, two stages that halve the resolution, a pooled head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.layer1 = nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.aux = nn.Linear(16, 3)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.pool(self.layer2(self.layer1(self.stem(x)))).flatten(1)
        self.aux(h)
        return self.fc(h)


class ViTLike(nn.Module):
    """Patches, encoder blocks, a class token or the average of the tokens."""

    def __init__(self, token: bool = True) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 12, 4, 4)
        if token:
            self.cls_token = nn.Parameter(torch.randn(1, 1, 12))
        block = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList([block, nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True)])
        self.head = nn.Linear(12, CLASSES)
        self.token = token

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).mT
        if self.token:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0] if self.token else x.mean(1))


class HeadOnTokens(ViTLike):
    """The head runs on every token; its outputs are averaged."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).mT
        return self.head(x).mean(1)


class Wrapped(nn.Module):
    """Another network, its output wrapped by a function."""

    def __init__(self, inner: nn.Module, wrap: Any) -> None:
        super().__init__()
        self.inner, self.wrap = inner, wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.inner(x))


def mlp(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 7), nn.ReLU(), nn.Linear(7, CLASSES, bias=bias))


def volume() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(1, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(6, CLASSES)
    )


def convolutional() -> nn.Sequential:
    """The last layer is a 1×1 convolution; its outputs are averaged over positions."""
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, CLASSES, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def images(rows: int = 7) -> Tensor:
    return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(1))


NETWORKS = {
    "resnet": (ResNetLike, "fc", "rows"),
    "vit token": (ViTLike, "head", "rows"),
    "vit pooled": (lambda: ViTLike(token=False), "head", "rows"),
    "head on tokens": (HeadOnTokens, "head", "mean of tokens"),
    "mlp": (mlp, "3", "rows"),
    "without bias": (lambda: mlp(bias=False), "3", "rows"),
    "fully convolutional": (convolutional, "2", "mean of positions"),
    "mapping": (lambda: Wrapped(mlp(), lambda z: {"loss": z.sum(), "logits": z}), "inner.3", "rows"),
    "object": (lambda: Wrapped(mlp(), lambda z: SimpleNamespace(logits=z)), "inner.3", "rows"),
    "tuple": (lambda: Wrapped(mlp(), lambda z: (z, z.sum(0))), "inner.3", "rows"),
    "other output first": (lambda: Wrapped(mlp(), lambda z: (torch.tanh(z), z)), "inner.3", "rows"),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_head_is_found_and_gives_the_logits(kind: str) -> None:
    make, name, reduction = NETWORKS[kind]
    torch.manual_seed(0)
    model = make().eval()
    bank = oodometer.extract(model, images(), batch_size=3)
    found = bank.provenance["network"]
    assert (found["head"], found["input"]) == (name, reduction)
    with torch.no_grad():
        output = model(images())
    if not isinstance(output, Tensor):
        output = output.logits if hasattr(output, "logits") else output["logits" if "logits" in output else 0]
    if kind != "other output first":
        np.testing.assert_allclose(bank.logits, output.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bank.head(bank.features), bank.logits, rtol=1e-5, atol=1e-6)


def test_the_features_are_what_the_head_was_given() -> None:
    torch.manual_seed(0)
    model = ResNetLike().eval()
    bank = oodometer.extract(model, images())
    with torch.no_grad():
        x = model.layer2(model.layer1(model.stem(images())))
    np.testing.assert_allclose(bank.features, x.mean((2, 3)).numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(bank.head.weight, model.fc.weight.detach().numpy())
    np.testing.assert_array_equal(bank.head.bias, model.fc.bias.detach().numpy())


def test_volumes_have_a_head_too() -> None:
    torch.manual_seed(0)
    model = volume().eval()
    x = torch.randn(3, 1, 5, 6, 7)
    bank = oodometer.extract(model, x)
    with torch.no_grad():
        np.testing.assert_allclose(bank.logits, model(x).numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(bank.features, model[:-1](x).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("last", [nn.Softmax(dim=1), nn.LogSoftmax(dim=1)], ids=["softmax", "log_softmax"])
def test_logits_come_from_before_a_final_softmax(last: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*mlp(), last).eval()
    bank = oodometer.extract(model, images())
    with torch.no_grad():
        np.testing.assert_allclose(bank.logits, model[:-1](images()).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compile_", ["script", "trace"])
def test_torchscript_gives_the_same_bank(compile_: str) -> None:
    torch.manual_seed(0)
    model = ResNetLike().eval()
    scripted = torch.jit.script(model) if compile_ == "script" else torch.jit.trace(model, images(2))
    before = {name: value.clone() for name, value in scripted.state_dict().items()}
    bank = oodometer.extract(scripted, images(), batch_size=4)
    eager = oodometer.extract(model, images(), batch_size=4, layers=None)
    assert not bank.layers
    np.testing.assert_allclose(bank.logits, eager.logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bank.features, eager.features, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(bank.head.weight, eager.head.weight)
    assert all(torch.equal(value, before[name]) for name, value in scripted.state_dict().items())


def test_frozen_torchscript_is_known_by_its_constants(tmp_path: Path) -> None:
    """Its parameters are part of the graph: without them two networks would pass for one."""
    banks = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = ResNetLike().eval()
        torch.jit.freeze(torch.jit.script(model)).save(str(tmp_path / "net.pt"))
        built, _ = build(str(tmp_path / "net.pt"))
        banks.append(oodometer.extract(built, images()))
        with torch.no_grad():
            np.testing.assert_allclose(banks[-1].logits, model(images()), rtol=1e-5, atol=1e-6)
    one, other = (bank.provenance["extraction"]["weights"] for bank in banks)
    assert one != other


def test_compiled_and_parallel_wrappers_are_looked_into() -> None:
    torch.manual_seed(0)
    model = ResNetLike().eval()
    plain = oodometer.extract(model, images())
    for wrapped in (nn.DataParallel(model), torch.compile(model)):
        np.testing.assert_array_equal(oodometer.extract(wrapped, images()).logits, plain.logits)


def test_a_named_head_is_verified() -> None:
    model = ResNetLike()
    assert oodometer.extract(model, images(), head="fc").provenance["network"]["head"] == "fc"
    with pytest.raises(OodometerError, match=r"'aux' does not give the network's 5 outputs"):
        oodometer.extract(model, images(), head="aux")
    with pytest.raises(OodometerError, match=r"no layer 'fcc'; did you mean 'fc'\?"):
        oodometer.extract(model, images(), head="fcc")


def test_a_container_may_be_named() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(192, 6), nn.ReLU(), nn.Linear(6, CLASSES)))
    assert oodometer.extract(model, images(), head="1").provenance["network"]["head"] == "1.2"


def test_an_error_lists_candidates_where_nothing_fits() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.Linear(6, CLASSES), nn.Tanh())
    with pytest.raises(OodometerError) as caught:
        oodometer.extract(model, images())
    text = str(caught.value)
    assert "no linear layer gives the network's 5 outputs" in text
    assert "2 (6 → 5, rows): differs from the outputs by up to" in text
    assert "1 (192 → 6, rows): another number of outputs" in text
    assert "head=False" in text


def test_a_network_without_a_head_gives_logits_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.Linear(6, CLASSES), nn.Tanh()).eval()
    bank = oodometer.extract(model, images(), head=False, layers=None)
    assert bank.head is None
    assert bank.columns == ("logits",)
    with torch.no_grad():
        np.testing.assert_allclose(bank.logits, model(images()).numpy(), rtol=1e-5, atol=1e-6)


def test_an_output_without_classes_is_an_error() -> None:
    with pytest.raises(OodometerError, match=r"rows × classes .* found shape \(7, 4, 8, 8\)"):
        oodometer.extract(nn.Conv2d(3, 4, 3, padding=1), images())


def test_half_precision_networks_have_heads() -> None:
    torch.manual_seed(0)
    model = ResNetLike().eval()
    full = oodometer.extract(model, images())
    half = oodometer.extract(ResNetLike().bfloat16().eval(), images())
    assert half.provenance["network"]["head"] == "fc"
    auto = oodometer.extract(model, images(), amp="bfloat16")
    np.testing.assert_allclose(auto.logits, full.logits, atol=0.02)
    assert auto.logits.dtype == np.float32

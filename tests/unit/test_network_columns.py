"""Columns of network-level scores through a whole extraction: one call, one bank, every score."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.network_fixture import far_images, images, trained  # noqa: E402

import oodometer  # noqa: E402
from oodometer import create, metrics  # noqa: E402
from oodometer.models import extract  # noqa: E402
from oodometer.models.columns.mdsens import MDSEnsemble  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::oodometer.errors.OodometerWarning")]

COLUMNS = (
    "features",
    "logits",
    "labels",
    "logits.odin:temperatures=(1,1000),epsilons=(0.0014,0.01)",
    "logits.iodin:temperatures=1000,epsilons=0.01",
    "logits.rankfeat",
    "logits.rankfeat.power",
    "logits.mcd:passes=10",
    "features.adascale",
    "views.products:scale=(0.3,1.0)",
)
SCORES = {
    "odin": {"temperature": 1000, "epsilon": 0.01},
    "iodin": {"epsilon": 0.01},
    "rankfeat": {},
    "adascale": {},
    "mdsens": {"epsilon": 0.01},
    "dropout": {},
    "gradnorm": {},
}


@pytest.fixture(scope="module")
def banks() -> dict[str, oodometer.Bank]:
    x, y = (part.numpy() for part in images())
    layers = ("first", "second")
    model = trained()
    train = extract(model, (x[:600], y[:600]), layers=layers, device="cpu", progress=False)
    columns = (*COLUMNS, MDSEnsemble(train=train, epsilons=(0, 0.01)))

    def of(data) -> oodometer.Bank:
        return extract(model, data, columns=columns, layers=layers, device="cpu", batch_size=64, progress=False)

    far = far_images().numpy()
    return {"train": train, "test": of((x[1200:1400], y[1200:1400])), "far": of((far, np.zeros(len(far), int)))}


@pytest.mark.parametrize("name", SCORES)
def test_a_bank_of_one_extraction_serves_every_score(name: str, banks: dict[str, oodometer.Bank]) -> None:
    detector = create(name, **SCORES[name])
    if detector.is_fitted_needed:
        detector.fit(banks["train"], val=banks["test"])
    found = detector.score(banks["test"])
    assert metrics.auroc(found, detector.score(banks["far"])) > 0.7
    again = detector.score(banks["test"].rows(slice(17, 18)))
    # A product of one row is summed in another order than a product of many, by some BLAS libraries.
    np.testing.assert_allclose(found[17:18], again, rtol=1e-6)


def test_settings_travel_with_the_saved_bank(banks: dict[str, oodometer.Bank], tmp_path) -> None:
    opened = oodometer.Bank.open(banks["test"].save(tmp_path / "bank"))
    for name in ("odin", "mdsens"):
        detector = create(name, **SCORES[name])
        np.testing.assert_array_equal(detector.score(opened), detector.score(banks["test"]))


def test_smaller_batches_give_the_same_columns(banks: dict[str, oodometer.Bank]) -> None:
    x, y = (part.numpy() for part in images())
    columns = [name for name in COLUMNS if name != "labels"]
    small = extract(
        trained(), (x[1200:1210], y[1200:1210]), columns=columns, layers=("first", "second"), device="cpu",
        batch_size=3, progress=False,
    )  # fmt: skip
    for name in small.columns:
        expected = np.asarray(banks["test"].rows(slice(0, 10))[name])
        # Convolutions round by batch size, and a gradient near zero may change its sign with that.
        np.testing.assert_allclose(np.asarray(small[name]), expected, atol=2e-3 * np.abs(expected).max(), err_msg=name)


def test_gradnorm_is_the_gradient_of_the_network_by_autograd(banks: dict[str, oodometer.Bank]) -> None:
    """−‖∂/∂W Σ_c −log p_c‖₁ of the last layer, one row at a time."""
    model = trained()
    expected = []
    for row in images()[0][1200:1220]:
        losses = -model(row[None]).log_softmax(1).sum()
        (gradient,) = torch.autograd.grad(losses, model.fc.weight)
        expected.append(-float(gradient.abs().double().sum()))
    found = create("gradnorm").score(banks["test"].rows(slice(0, 20)))
    np.testing.assert_allclose(found, expected, rtol=2e-4)


@pytest.mark.parametrize(
    ("column", "passes"),
    [
        (None, 1),
        ("logits.odin:temperatures=(1,10,1000),epsilons=(0,0.0014,0.0028)", 1 + 3 * 2),
        ("logits.rankfeat", 1 + 2),
        ("logits.mcd:passes=50", 1 + 1),  # dropout right before the head
        ("features.adascale", 1 + 1),
        ("views.products:views=5", 1 + 5),
    ],
)
def test_forward_samples_a_row(column: str | None, passes: int) -> None:
    model, seen = copy.deepcopy(trained()), []
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    x = images()[0][:100].numpy()
    columns = ("features", "logits", *([column] if column else []))
    extract(model, x, columns=columns, layers=("first", "second"), device="cpu", batch_size=32, progress=False)
    assert sum(seen) == passes * 100

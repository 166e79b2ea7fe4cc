"""MDSEns against covariances by hand and one gradient a row and layer, on a small real network."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sklearn.linear_model import LogisticRegressionCV  # noqa: E402
from tests.network_fixture import far_images, images, pass_of, trained  # noqa: E402

from oodometer import Bank, create, metrics  # noqa: E402
from oodometer.data.preprocess import Preprocessing  # noqa: E402
from oodometer.detectors.mds_layers import with_ood  # noqa: E402
from oodometer.errors import OodometerError  # noqa: E402
from oodometer.models.columns import describe  # noqa: E402
from oodometer.models.columns.mdsens import MDSEnsemble  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning:sklearn")]
EPSILONS = (0.0, 0.01, 0.2)
NAMES = ("layers.first", "layers.second")


def double_trained() -> torch.nn.Module:
    return copy.deepcopy(trained()).double()


def train_bank(model: torch.nn.Module, rows: int = 600) -> Bank:
    x, y = images()
    dtype = next(model.parameters()).dtype
    run = pass_of(model, x[:rows].to(dtype), gradients=False)
    columns = {name: run.layers[name].numpy() for name in NAMES}
    return Bank(columns, labels=y[:rows].numpy())


def statistics(train: Bank, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    h, y = np.asarray(train[name], np.float64), train.labels
    means = np.stack([h[y == c].mean(0) for c in range(10)])
    centred = h - means[y]
    return torch.as_tensor(means), torch.as_tensor(np.linalg.pinv(centred.T @ centred / len(h)))


def distances(model, x, name: str, means: torch.Tensor, precision: torch.Tensor) -> torch.Tensor:
    """Of one row to every class."""
    first = model.first(x)
    gap = (first if name == "layers.first" else model.second(first)).flatten(2).mean(2) - means
    return torch.einsum("ci,ij,cj->c", gap, precision, gap)


def by_rows(model, train: Bank, x, epsilon: float, std: float) -> np.ndarray:
    """Rows × layers: the class is chosen first, then its distance's gradient taken, as Lee et al. write it."""
    found = np.zeros((len(x), len(NAMES)))
    for layer, name in enumerate(NAMES):
        fitted = statistics(train, name)
        for place, row in enumerate(x):
            leaf = row[None].clone().requires_grad_()
            every = distances(model, leaf, name, *fitted)
            (gradient,) = torch.autograd.grad(0.5 * every[int(every.argmin())], leaf)
            with torch.no_grad():
                moved = leaf - epsilon * gradient.sign() / std
                found[place, layer] = float(distances(model, moved, name, *fitted).min())
    return found


def test_distances_are_those_of_rows_moved_one_by_one() -> None:
    model = double_trained()
    train, x = train_bank(model), images()[0][1200:1208].double()
    column = MDSEnsemble(train=train, epsilons=EPSILONS, std=0.5)
    found = column(pass_of(model, x))
    assert found.shape == (8, 3, 2)
    for place, epsilon in enumerate(EPSILONS):
        np.testing.assert_allclose(found[:, place], by_rows(model, train, x, epsilon, 0.5), rtol=1e-8)
    # A small step goes down.
    small = MDSEnsemble(train=train, epsilons=(0.0, 0.001))(pass_of(model, x))
    assert bool((small[:, 1] < small[:, 0]).all())


def test_sigma_is_what_the_preprocessing_divides_by() -> None:
    model = double_trained()
    train, x = train_bank(model), images()[0][1200:1203].double()
    declared = Preprocessing(mean=(0.5,), std=(0.25,))
    found = MDSEnsemble(train=train, epsilons=0.01)(pass_of(model, x, preprocessing=declared))
    np.testing.assert_allclose(found[:, 0], by_rows(model, train, x, 0.01, 0.25), rtol=1e-8)


def test_a_pass_that_recorded_values_alone_is_run_again() -> None:
    """Layers found automatically carry no gradient in the batch they are found in."""
    train, x = train_bank(trained()), images()[0][1200:1205]
    column, run = MDSEnsemble(train=train, epsilons=EPSILONS), pass_of(trained(), x)
    values = type(run)(
        run.network, run.inputs, run.logits, run.features, {k: v.detach() for k, v in run.layers.items()}, None
    )
    np.testing.assert_array_equal(column(values), column(run))


def bank_of(column: MDSEnsemble, x: torch.Tensor) -> Bank:
    return Bank(
        {"mdsens": column(pass_of(trained(), x)).numpy()}, provenance={"extraction": {"columns": [describe(column)]}}
    )


def test_scores_weigh_the_layers_for_the_step_at_hand() -> None:
    column = MDSEnsemble(train=train_bank(trained()), epsilons=EPSILONS)
    x = images()[0]
    val, test = bank_of(column, x[1200:1300]), bank_of(column, x[1300:1400])
    ood_val, far = bank_of(column, far_images(200)[:100]), bank_of(column, far_images(200)[100:])
    for place, epsilon in enumerate(EPSILONS):
        half = 0.5 * np.asarray(test["mdsens"])[:, place].astype(np.float64)
        equal = create("mdsens", epsilon=epsilon)
        np.testing.assert_allclose(equal.score(test), half.sum(1), rtol=1e-12)
        np.testing.assert_allclose(create("mdsens", epsilon=epsilon, weights=(2, 1)).score(test), half @ [2, 1])
        learned = create("mdsens", epsilon=epsilon, weights="learned").fit(test, val=with_ood(val, ood_val))
        inputs = [-0.5 * np.asarray(bank["mdsens"])[:, place].astype(np.float64) for bank in (val, ood_val)]
        model = LogisticRegressionCV(Cs=10, cv=5).fit(np.concatenate(inputs), [1] * 100 + [0] * 100)
        np.testing.assert_allclose(learned.score(test), half @ model.coef_[0], rtol=1e-6)
        for detector in (equal, learned):
            assert metrics.auroc(detector.score(test), detector.score(far)) > 0.8


def test_without_a_step_it_is_the_sum_over_layers_of_a_bank() -> None:
    train = train_bank(trained())
    run = pass_of(trained(), images()[0][1200:1250], gradients=False)
    layers = Bank({name: run.layers[name].numpy() for name in NAMES})
    found = create("mdsens", epsilon=0).score(bank_of(MDSEnsemble(train=train, epsilons=0.0), images()[0][1200:1250]))
    np.testing.assert_allclose(found, create("mds_all").fit(train).score(layers), rtol=1e-5)


def test_a_bank_by_its_folder_gives_the_same_column_and_describes_itself(tmp_path: Path) -> None:
    train = train_bank(trained(), 300)
    train.save(tmp_path / "train")
    x = images()[0][1200:1204]
    one, two = MDSEnsemble(train=train), MDSEnsemble(train=str(tmp_path / "train"))
    np.testing.assert_array_equal(one(pass_of(trained(), x)), two(pass_of(trained(), x)))
    assert describe(one) == describe(two)
    assert describe(one)["train"] == train.fingerprint
    chosen = MDSEnsemble(train=train, layers=("layers.second",))(pass_of(trained(), x))
    np.testing.assert_array_equal(chosen[:, :, 0], one(pass_of(trained(), x))[:, :, 1])


def test_what_is_missing_is_named() -> None:
    train, x = train_bank(trained(), 300), images()[0][:4]
    with pytest.raises(OodometerError, match="lacks labels"):
        MDSEnsemble(train=train.select(NAMES))
    with pytest.raises(OodometerError, match=r"lacks layers\.third"):
        MDSEnsemble(train=train, layers=("layers.third",))
    with pytest.raises(OodometerError, match=r"does not record layers\.first, layers\.second; it records none"):
        MDSEnsemble(train=train)(pass_of(trained(), x, layers=()))
    bank = bank_of(MDSEnsemble(train=train, epsilons=0.01), x)
    with pytest.raises(OodometerError, match=r"epsilons 0\.0014; it has epsilons 0\.01"):
        create("mdsens").score(bank)
    with pytest.raises(OodometerError, match="no validation rows were given"):
        create("mdsens", epsilon=0.01, weights="learned").fit(bank)
    with pytest.raises(OodometerError, match="2 finite numbers"):
        create("mdsens", epsilon=0.01, weights=(1, 2, 3)).score(bank)
    with pytest.raises(OodometerError, match="'uniform', 'learned'"):
        create("mdsens", weights="equal")

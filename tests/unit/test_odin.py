"""ODIN and iODIN against one-row-at-a-time implementations with the plain cross-entropy, on a small real network."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.network_fixture import Digits, far_images, images, pass_of, trained  # noqa: E402
from torch.nn import functional  # noqa: E402

from oodometer import Bank, create, metrics  # noqa: E402
from oodometer.data.preprocess import Preprocessing  # noqa: E402
from oodometer.errors import OodometerError  # noqa: E402
from oodometer.models.columns import describe  # noqa: E402
from oodometer.models.columns.odin import IODIN, ODIN, loss_direction  # noqa: E402

pytestmark = pytest.mark.torch
TEMPERATURES, EPSILONS = (1.0, 10.0, 1000.0), (0.0, 0.0014, 0.05)


def double_model(channels: int = 1, dims: int = 2) -> torch.nn.Module:
    torch.manual_seed(1)
    return Digits(channels, classes=5, dims=dims).double().eval()


def by_rows(model, x, temperature, epsilon, std, *, single=False):
    """x' = x − ε·sign(∇ CE(z/T, ŷ))/σ, one row and one backward pass at a time."""
    found = []
    for row in x:
        leaf = row[None].clone().requires_grad_()
        z = model(leaf)
        functional.cross_entropy(z / temperature, z.argmax(1)).backward()
        step = leaf.grad.sign() / torch.tensor(std, dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 2))
        if single:
            keep = torch.zeros(step.numel(), dtype=x.dtype)
            keep[int(leaf.grad.abs().argmax())] = 1
            step = step * keep.reshape(step.shape)
        found.append(model(leaf.detach() - epsilon * step).detach()[0])
    model.zero_grad(set_to_none=True)
    return torch.stack(found)


@pytest.mark.parametrize(("producer", "single"), [(ODIN, False), (IODIN, True)])
@pytest.mark.parametrize(
    ("channels", "dims", "std"),
    [(1, 2, (0.3,)), (3, 2, (0.2, 0.5, 0.9)), (4, 2, (1.0,)), (2, 3, (0.5, 2.0)), (5, 1, (1.0,))],
)
def test_logits_are_those_of_rows_moved_one_by_one(producer, single, channels, dims, std) -> None:
    model = double_model(channels, dims)
    x = torch.randn(6, channels, *[8] * dims, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    column = producer(temperatures=TEMPERATURES, epsilons=EPSILONS, std=std)
    found = column(pass_of(model, x))
    assert found.shape == (6, 9, 5)
    for place, (temperature, epsilon) in enumerate((t, e) for t in TEMPERATURES for e in EPSILONS):
        expected = by_rows(model, x, temperature, epsilon, std, single=single)
        np.testing.assert_allclose(found[:, place], expected, rtol=0, atol=1e-11)


def test_the_step_moves_the_predicted_class_up() -> None:
    x = images()[0][1200:1400]
    run = pass_of(trained(), x)
    found = ODIN(temperatures=1.0, epsilons=(0.0, 0.02))(run).log_softmax(-1)
    top = run.logits.detach().argmax(1)
    before, after = (found[torch.arange(200), place, top] for place in (0, 1))
    assert float((after > before).double().mean()) > 0.99


def test_sigma_is_what_the_preprocessing_divides_by_unless_given() -> None:
    x = images()[0][:8].double()
    model, declared = double_model(), Preprocessing(mean=(0.5,), std=(0.25,))
    column = ODIN(temperatures=10.0, epsilons=0.01)
    expected = by_rows(model, x, 10.0, 0.01, (0.25,))
    np.testing.assert_allclose(column(pass_of(model, x, preprocessing=declared))[:, 0], expected, atol=1e-11)
    given = ODIN(temperatures=10.0, epsilons=0.01, std=1.0)
    undeclared = column(pass_of(model, x))
    np.testing.assert_array_equal(given(pass_of(model, x, preprocessing=declared)), undeclared)
    assert float((undeclared[:, 0] - expected).abs().max()) > 1e-4
    with pytest.raises(OodometerError, match="3 channels"):
        ODIN(std=(0.1, 0.2))(pass_of(double_model(3), x.expand(-1, 3, -1, -1)))


def test_certain_rows_keep_the_direction_that_float32_softmax_loses() -> None:
    """With p_ŷ rounded to one the plain gradient p − e_ŷ is zero; its sign in float64 is the truth."""
    x = images()[0][:20]
    sure, exact = double_model().float(), double_model()
    for model in (sure, exact):
        model.fc.weight.data *= 3e3
    run = pass_of(sure, x)
    plain = run.logits.detach().softmax(1) - functional.one_hot(run.logits.argmax(1), 5)
    assert float((plain.abs().sum(1) == 0).double().mean()) > 0.5
    (slope,) = torch.autograd.grad(run.logits, run.inputs, loss_direction(run.logits.detach(), 1.0))
    leaf = x.double().requires_grad_()
    z = exact(leaf)
    top = z.argmax(1, keepdim=True)
    # −log p_ŷ = log1p(Σ exp(z_c − z_ŷ)) keeps all digits.
    rest = (z - z.gather(1, top)).scatter(1, top, -torch.inf).logsumexp(1)
    (truth,) = torch.autograd.grad(rest.sum(), leaf)
    assert float((slope.sign() == truth.sign()).double().mean()) > 0.999


def test_rows_do_not_depend_on_their_batch_and_the_model_stays_as_it_was() -> None:
    model = trained()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, column = images()[0][:32], ODIN(temperatures=(1.0, 1000.0), epsilons=0.01)
    whole = column(pass_of(model, x))
    singles = torch.cat([column(pass_of(model, x[i : i + 1])) for i in range(32)])
    np.testing.assert_allclose(whole, singles, atol=2e-4)
    np.testing.assert_array_equal(whole, column(pass_of(model, x)))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_zero_gradient_moves_nothing_unless_its_sign_is_given() -> None:
    model = double_model()
    model.first[0].weight.data[:] = 0
    x = images()[0][:3].double()
    run = pass_of(model, x)
    still = ODIN(temperatures=1.0, epsilons=0.5)(run)[:, 0]
    np.testing.assert_array_equal(still, run.logits.detach())
    # Of an input that the network masks out the gradient is zero in one place: only sign0=1 moves it.
    mask = torch.ones(8, dtype=torch.float64)
    mask[-1] = 0
    masked, seen = Masked(double_model(), mask), []
    masked.register_forward_pre_hook(lambda module, args: seen.append(args[0] - x))
    run = pass_of(masked, x, layers=())
    for sign0 in (0, 1):
        ODIN(temperatures=1.0, epsilons=0.5, sign0=sign0)(run)
    np.testing.assert_array_equal(seen[-2][..., -1], np.zeros((3, 1, 8)))
    np.testing.assert_allclose(seen[-1][..., -1], np.full((3, 1, 8), -0.5))
    np.testing.assert_array_equal(seen[-2][..., :-1], seen[-1][..., :-1])


class Masked(torch.nn.Module):
    def __init__(self, inner, mask) -> None:
        super().__init__()
        self.inner, self.mask = inner, mask

    def forward(self, x):
        return self.inner(x * self.mask)


def bank_of(column: ODIN, x: torch.Tensor) -> Bank:
    run = pass_of(trained(), x)
    columns = {"logits": run.logits.detach().numpy(), column.name: column(run).numpy()}
    return Bank(columns, provenance={"extraction": {"columns": [describe(column)]}})


@pytest.mark.parametrize("name", ["odin", "iodin"])
def test_scores_by_setting_and_orientation(name: str) -> None:
    column = (ODIN if name == "odin" else IODIN)(temperatures=TEMPERATURES, epsilons=EPSILONS[1:])
    x = images()[0][1200:1400]
    bank, far = bank_of(column, x), bank_of(column, far_images())
    model = trained()
    for temperature in TEMPERATURES:
        expected = by_rows(model, x[:20], temperature, 0.05, (1.0,), single=name == "iodin")
        found = create(name, temperature=temperature, epsilon=0.05).score(bank.rows(slice(0, 20)))
        np.testing.assert_allclose(
            found, -(expected.double() / temperature).softmax(1).max(1).values, atol=1e-4 / temperature
        )
        detector = create(name, temperature=temperature, epsilon=0.0014)
        assert metrics.auroc(detector.score(bank), detector.score(far)) > 0.8


def test_without_a_step_it_is_the_tempered_softmax_of_the_plain_logits() -> None:
    bank = bank_of(ODIN(temperatures=10.0, epsilons=0.0), images()[0][:50])
    np.testing.assert_allclose(bank["logits.odin"][:, 0], bank.logits, rtol=0)
    plain = bank.select(["logits"])
    found = create("odin", temperature=10, epsilon=0).score(plain)
    np.testing.assert_allclose(found, create("msp", temperature=10).score(plain), rtol=1e-6)


def test_a_setting_that_was_not_extracted_is_named_with_those_that_were() -> None:
    bank = bank_of(ODIN(temperatures=(1.0, 10.0), epsilons=0.0014), images()[0][:5])
    with pytest.raises(OodometerError, match=r"temperatures 1000, epsilons 0.0014; it has temperatures 1, .*columns="):
        create("odin").score(bank)
    nameless = Bank({name: bank[name] for name in bank.columns})
    with pytest.raises(OodometerError, match="2 settings and the bank's provenance names none"):
        create("odin").score(nameless)
    one = nameless.with_columns(**{"logits.odin": nameless["logits.odin"][:, :1]})
    expected = create("odin", temperature=1).score(bank)
    np.testing.assert_array_equal(create("odin", temperature=1).score(one), expected)
    with pytest.raises(OodometerError, match=r"odin needs 'logits.odin' in the score bank.*extract it with columns="):
        create("odin").score(bank.select(["logits"]))


def test_parts_with_settings_in_another_order_are_read_each_by_its_own() -> None:
    x = images()[0][:10]
    one = bank_of(ODIN(temperatures=(1.0, 10.0), epsilons=0.0014), x)
    two = bank_of(ODIN(temperatures=(10.0, 1.0), epsilons=0.0014), x)
    detector = create("odin", temperature=10.0)
    np.testing.assert_array_equal(detector.score(Bank.concat([one, two])), np.tile(detector.score(one), 2))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperatures": 0.0}, "temperatures"),
        ({"epsilons": (0.1, 0.1)}, "each once"),
        ({"epsilons": -1.0}, "epsilons"),
        ({"epsilons": ()}, "epsilons"),
        ({"sign0": 2}, "sign0"),
    ],
)
def test_settings_are_checked(params: dict, message: str) -> None:
    with pytest.raises(OodometerError, match=message):
        ODIN(**params)


def test_a_network_without_gradients_and_one_class_are_refused() -> None:
    x = images()[0][:4]
    with pytest.raises(OodometerError, match="differentiably"):
        ODIN()(pass_of(trained(), x, gradients=False))
    with pytest.raises(OodometerError, match="two classes"):
        ODIN()(pass_of(Digits(classes=1).eval(), x))

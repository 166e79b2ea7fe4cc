"""The training loop against a plain loop, its own interruptions, and what each recipe promises to leave alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from oodometer import Bank, create
from oodometer.detectors.mcd import dropout_logits
from oodometer.errors import OodometerError

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402

from oodometer.models import train as training  # noqa: E402
from oodometer.models.train import images, loop, recipes  # noqa: E402
from oodometer.models.train.trained import Trained  # noqa: E402

pytestmark = pytest.mark.torch
SMALL = training.Architecture("cnn", {"width": 4})
QUICK: dict[str, dict[str, Any]] = {
    "crossentropy": {"epochs": 5, "rate": 0.05, "patience": 1},
    "confidnet": {"epochs": 2, "branch_epochs": 2, "tuning_epochs": 2, "branch_rate": 1e-3, "tuning_rate": 1e-3},
    "devries": {"epochs": 3, "rate": 0.05},
    "deepgamblers": {"epochs": 3, "pretraining": 1, "rate": 0.05},
}


def digits(rows: int = 240, val: int = 120) -> tuple[Bank, Bank]:
    """Training and validation rows: 8×8 grey images of ten classes."""
    x, y = load_digits(return_X_y=True)
    bank = Bank(images=(x.reshape(-1, 8, 8) * 15).astype(np.uint8), labels=y)
    return bank.rows(slice(0, rows)), bank.rows(slice(rows, rows + val))


def fitted(name: str, *, seed: int = 0, **more: Any) -> Trained:
    kept = {key: more.pop(key) for key in ("checkpoints", "tell") if key in more}
    recipe = training.create(name, **{"batch": 64, "dropout": 0.25, **QUICK[name], **more})
    return training.fit(recipe, SMALL, *digits(), seed=seed, **kept)


def content(network: torch.nn.Module) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in network.state_dict().items()}


# ---------------------------------------------------------------------------------------------- the loop


def test_an_epoch_is_the_plain_loop() -> None:
    """Orders, losses and steps rebuilt by hand from the same initial weights."""
    train, val = digits()
    recipe = training.create("crossentropy", epochs=2, rate=0.1, batch=100, augment="none", patience=None)
    network = training.fit(recipe, SMALL, train, val, seed=5).network

    mean, std = images.Images(train, torch.device("cpu")).moments()
    body = loop.initialised(lambda: _network(mean, std), seed=5)
    optimiser = torch.optim.SGD(body.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    x, y = torch.from_numpy(np.array(train["images"]))[:, None], torch.tensor(train.labels)
    for epoch in range(2):
        generator = torch.Generator().manual_seed(loop._seed_of(5, "classifier", epoch))
        torch.randint(2**62, (), generator=generator)
        order = torch.randperm(len(x), generator=generator)
        body.train()
        for rows in (order[:100], order[100:200], order[200:]):
            loss = functional.cross_entropy(body(x[rows])[1], y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    assert content(body) == content(network)


def _network(mean: torch.Tensor, std: torch.Tensor) -> Any:
    from oodometer.models.train.network import Network
    from oodometer.models.zoo import cnn

    return Network(cnn(10, 1, width=4), 10, classes=10, outputs=10, moments=(mean, std))


def test_early_stopping_keeps_the_epoch_of_least_validation_loss() -> None:
    train, val = digits(900)
    told: list[str] = []
    recipe = training.create("crossentropy", epochs=40, rate=0.3, batch=32, augment="none", patience=2)
    made = training.fit(recipe, SMALL, train, val, seed=1, tell=lambda what, share: told.append(what))
    (stage,) = made.facts["stages"]
    assert stage["epochs"] == stage["best_epoch"] + 2 < 40, "the case must stop early"
    assert len(told) == stage["epochs"]
    seen = made.apply(val)
    loss = functional.cross_entropy(torch.from_numpy(np.asarray(seen.logits)), torch.tensor(val.labels))
    assert float(loss) == pytest.approx(stage["val_loss"], rel=1e-5)
    assert made.facts["val_accuracy"] == (np.asarray(seen.logits).argmax(1) == val.labels).mean() > 0.8


@pytest.mark.parametrize("name", list(QUICK))
def test_equal_seeds_give_equal_bytes_and_leave_no_trace(name: str) -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    first = fitted(name, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()
    torch.manual_seed(100)
    assert content(fitted(name, seed=3).network) == content(first.network)
    assert content(fitted(name, seed=4).network) != content(first.network)


class StopError(Exception):
    """Ends a training from within."""


@pytest.mark.parametrize("name", list(QUICK))
def test_a_resumed_training_is_the_undisturbed_one(name: str, tmp_path: Path) -> None:
    """Interrupted in every second epoch: an epoch is reported before it is written, and so is trained again."""
    whole, attempts = fitted(name), 0
    while True:
        epochs: list[str] = []

        def interrupt(what: str, share: float, epochs: list[str] = epochs) -> None:
            epochs.append(what)
            if len(epochs) == 2:
                raise StopError

        attempts += 1
        try:
            resumed = fitted(name, checkpoints=tmp_path, tell=interrupt)
            break
        except StopError:
            continue
    assert attempts == sum(stage["epochs"] for stage in whole.facts["stages"])
    assert content(resumed.network) == content(whole.network)
    assert resumed.facts == whole.facts
    assert [path.name for path in tmp_path.iterdir()] == ["network.safetensors"]


def test_a_finished_training_is_opened_not_repeated(tmp_path: Path) -> None:
    first = fitted("confidnet", checkpoints=tmp_path)

    def never(what: str, share: float) -> None:
        pytest.fail("trained again")

    again = fitted("confidnet", checkpoints=tmp_path, tell=never)
    assert content(again.network) == content(first.network)
    assert again.facts == first.facts


def test_images_read_batch_by_batch_train_the_same_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Banks too large for the device: mapped from disk, every batch is read from where it lies."""
    train, val = digits()
    stored = Bank.open(train.with_columns().save(tmp_path / "bank"))
    recipe = training.create("crossentropy", **QUICK["crossentropy"])
    held = training.fit(recipe, SMALL, train, val, seed=0)
    monkeypatch.setattr(images, "HELD_BYTES", 0)
    joined = Bank.concat([stored.rows(slice(0, 70)), stored.rows(np.arange(70, 240))])
    for bank in (stored, joined):
        assert content(training.fit(recipe, SMALL, bank, val, seed=0).network) == content(held.network)


def test_divergence_is_said_so() -> None:
    with pytest.raises(OodometerError, match=r"training diverged: the loss is (nan|inf) in epoch \d+ of classifier"):
        fitted("crossentropy", rate=1e20, dropout=0.0)


# ---------------------------------------------------------------------------------------------- recipes


def parts_after(name: str, stage: int, **more: Any) -> dict[str, bytes]:
    """The network's content when a stage has ended, read from the checkpoint that follows."""
    recipe = training.create(name, **{"batch": 64, "dropout": 0.25, **QUICK[name], **more})
    stages = recipe.stages()[: stage + 1]
    train, val = digits()
    moments = images.Images(train, torch.device("cpu")).moments()
    network = loop.initialised(lambda: _extended(recipe, moments), seed=0)
    data = loop.Data(
        train=images.Images(train, torch.device("cpu")),
        labels=torch.tensor(train.labels),
        val=images.Images(val, torch.device("cpu")),
        val_labels=torch.tensor(val.labels),
        device=torch.device("cpu"),
        batch=64,
        augment=recipe.augment,
    )
    loop.train(network, stages, data, seed=0)
    return content(network)


PLAIN = torch.zeros(1), torch.ones(1)


def _extended(recipe: Any, moments: Any = PLAIN) -> Any:
    from oodometer.models.train.network import Network
    from oodometer.models.zoo import cnn

    body = cnn(10, 1, width=4)
    network = Network(body, 10, classes=10, outputs=recipe.outputs(10), moments=moments, dropout=0.25)
    recipe.extend(network)
    return network


def only(found: dict[str, bytes], *prefixes: str) -> dict[str, bytes]:
    return {name: value for name, value in found.items() if name.startswith(prefixes)}


def test_confidnet_never_touches_the_classifier_again() -> None:
    """Peers trained batch statistics on in the second stage, and the classifier with the branch in the third."""
    first, second, third = (parts_after("confidnet", stage) for stage in range(3))
    classifier = only(first, "encoder", "head")
    assert any("running_mean" in name for name in classifier)
    assert only(second, "encoder", "head") == classifier == only(third, "encoder", "head")
    assert all(first[name] != second[name] for name in only(first, "confidence."))
    copied = only(third, "confidence_encoder")
    statistics = {name for name in copied if "running" in name or "num_batches" in name}
    for name, value in copied.items():
        same = value == third[name.removeprefix("confidence_")]
        assert same == (name in statistics), "the copy learns, its batch statistics do not"


def test_devries_weight_follows_the_budget() -> None:
    """A budget that is never reached lowers λ at every batch, one that always is raises it."""
    for budget, factor in ((1e9, 1 / 1.01), (1e-9, 1 / 0.99)):
        recipe = training.create("devries", epochs=1, budget=budget)
        memory = recipe.stages()[0].memory()
        train, _ = digits()
        network = loop.initialised(lambda recipe=recipe: _extended(recipe), seed=0)
        pixels, labels = (
            images.Images(train, torch.device("cpu")).at(torch.arange(64)),
            torch.tensor(train.labels[:64]),
        )
        for _ in range(10):
            batch = loop.Batch(pixels, labels, None, 0)
            recipe.stages()[0].loss(network, batch, memory)
        assert float(memory["weight"]) == pytest.approx(0.1 * factor**10, rel=1e-5)


def test_deep_gamblers_pretrains_on_the_classes_alone() -> None:
    recipe = training.create("deepgamblers", pretraining=2, epochs=4, reward=3.0)
    network = loop.initialised(lambda: _extended(recipe), seed=0).eval()
    train, _ = digits()
    pixels, labels = images.Images(train, torch.device("cpu")).at(torch.arange(32)), torch.tensor(train.labels[:32])
    with torch.no_grad():
        z = network(pixels)[1].double()
        loss = recipe.stages()[0].loss
        found = [float(loss(network, loop.Batch(pixels, labels, None, epoch), {})) for epoch in (1, 2)]
    rows = torch.arange(32)
    p = z.softmax(1)
    assert found[0] == pytest.approx(float(-z[:, :10].log_softmax(1)[rows, labels].mean()), rel=1e-6)
    assert found[1] == pytest.approx(float(-(p[rows, labels] + p[:, 10] / 3).log().mean()), rel=1e-6)


def test_inverse_class_weights_are_those_of_weighted_cross_entropy() -> None:
    values, labels = torch.rand(6, dtype=torch.float64), torch.tensor([0, 0, 0, 0, 1, 2])
    counts = torch.tensor([4.0, 1.0, 1.0], dtype=torch.float64)
    weights = 6 / (3 * counts)
    batch = loop.Batch(torch.zeros(6), labels, weights[labels], 0)
    by_class = [values[labels == c].mean() for c in range(3)]
    assert float(batch.mean(values)) == pytest.approx(float(sum(by_class) / 3))
    z = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours = batch.mean(functional.cross_entropy(z, labels, reduction="none"))
    assert float(ours) == pytest.approx(float(functional.cross_entropy(z, labels, weight=weights)))


def test_exposure_flattens_held_out_outliers_and_keeps_the_accuracy() -> None:
    train, val = digits(900)
    known, shown, tested = (np.isin(train.labels, one) for one in (range(8), [8], [9]))
    inside, held = train.rows(known), val.rows(np.isin(val.labels, range(8)))
    recipe = training.create("crossentropy", epochs=12, rate=0.05, batch=32, augment="none")
    plain = training.fit(recipe, SMALL, inside, held, seed=0)
    exposed = plain.expose(Bank(images=train["images"][shown]), inside, held, seed=0, rate=0.005)
    before, after = (
        torch.from_numpy(np.asarray(one.apply(train.rows(tested)).logits)).softmax(1).max(1).values.mean()
        for one in (plain, exposed)
    )
    assert float(after) < float(before) - 0.1, "outliers of a class that was never shown"
    assert exposed.facts["val_accuracy"] > plain.facts["val_accuracy"] - 0.05 > 0.85
    assert exposed.facts["stages"][-1]["stage"] == "exposure"
    assert exposed.facts["stages"][-1]["epochs"] == 5
    assert content(plain.network) != content(exposed.network)


def test_exposure_adds_the_uniform_cross_entropy_of_the_class_logits() -> None:
    train, _ = digits()
    for name, quick in QUICK.items():
        recipe = training.create(name, **quick)
        network = loop.initialised(lambda recipe=recipe: _extended(recipe), seed=0).eval()
        rows = images.Images(train, torch.device("cpu"))
        pixels, labels, outliers = (
            rows.at(torch.arange(32)),
            torch.tensor(train.labels[:32]),
            rows.at(torch.arange(32, 80)),
        )
        memory = recipe.stages()[0].memory
        with torch.no_grad():
            stage = recipes.exposure_stage(recipe, epochs=5, weight=0.7, rate=1e-3)
            whole = stage.loss(network, loop.Batch(pixels, labels, None, 0, outliers), memory())
            alone = stage.loss(network, loop.Batch(pixels, labels, None, 0), memory())
            z = network(outliers)[1][:, :10].double()
        told = sum(-row.log_softmax(0).sum() / 10 for row in z) / len(z)
        assert float(whole - alone) == pytest.approx(0.7 * float(told), rel=1e-5)


def test_rows_and_outliers_share_their_batch_statistics() -> None:
    """Apart, running statistics become a mixture that no batch had, and the accuracy of rows at test time falls."""
    train, _ = digits()
    recipe = training.create("crossentropy")
    network = loop.initialised(lambda: _extended(recipe), seed=0).train()
    rows = images.Images(train, torch.device("cpu"))
    pixels, outliers = rows.at(torch.arange(32)), 255 - rows.at(torch.arange(32, 64))
    stage = recipes.exposure_stage(recipe, epochs=5, weight=0.5, rate=1e-3)
    stage.loss(network, loop.Batch(pixels, torch.tensor(train.labels[:32]), None, 0, outliers), {})
    first = network.encoder[1]
    seen = network.encoder[0](network.normalised(torch.cat([pixels, outliers])))
    assert int(first.num_batches_tracked) == 1
    assert torch.allclose(first.running_mean, 0.1 * seen.mean((0, 2, 3)), atol=1e-6)


# ---------------------------------------------------------------------------------------------- banks


@pytest.mark.parametrize("name", list(QUICK))
def test_banks_of_a_trained_network(name: str) -> None:
    made = fitted(name)
    _, val = digits()
    bank = made.apply(val, passes=4)
    with torch.no_grad():
        features, outputs = made.network.eval()(torch.from_numpy(np.array(val["images"]))[:, None])
    assert np.allclose(bank.features, features, atol=1e-6)
    assert bank.head is not None
    assert bank.head.classes == 10
    assert np.allclose(bank.logits, outputs[:, :10], atol=1e-5)
    assert np.array_equal(bank.labels, val.labels)
    assert np.allclose(bank["logits.mcd"], dropout_logits(bank, passes=4, p=0.25), atol=1e-4)
    assert set(bank.columns) == {"features", "labels", "logits.mcd", *confidences(name)}
    if name == "deepgamblers":
        assert np.allclose(bank["logits.deepgamblers"], outputs, atol=1e-6)
    if name != "crossentropy":
        plain, passes = bank[f"logits.{name}"], bank[f"logits.{name}.mcd"]
        assert passes.shape == (len(val), 4, *plain.shape[1:])
        assert np.corrcoef(passes.mean(1).ravel(), plain.ravel())[0, 1] > 0.5
        for variant in ("", "_mcd", "_waic"):
            assert np.isfinite(create(f"{name}{variant}").score(bank)).all()


def confidences(name: str) -> set[str]:
    return set() if name == "crossentropy" else {f"logits.{name}", f"logits.{name}.mcd"}


def test_learned_confidence_tells_errors_from_correct_rows() -> None:
    """Far better than chance on a small task: the branches learn, their sign is right."""
    from oodometer import metrics

    train, val = digits(1000, 700)
    for name, more in (
        ("confidnet", {"epochs": 3, "branch_epochs": 12, "branch_rate": 1e-3, "tuning_epochs": 1}),
        ("devries", {"epochs": 12}),
        ("deepgamblers", {"epochs": 4, "pretraining": 1}),
    ):
        recipe = training.create(name, **{**QUICK[name], **more, "rate": 0.05, "batch": 32, "augment": "none"})
        bank = training.fit(recipe, SMALL, train, val, seed=0).apply(val)
        wrong = np.asarray(bank.logits).argmax(1) != val.labels
        assert 0.02 < wrong.mean() < 0.5
        scores = create(name).score(bank)
        assert metrics.auroc(scores[~wrong], scores[wrong]) > 0.7, name


def test_an_empty_bank_has_every_column() -> None:
    bank = fitted("deepgamblers").apply(digits()[1].rows(slice(0, 0)), passes=2)
    assert len(bank) == 0
    assert bank.row_shape("logits.deepgamblers.mcd") == (2, 11)


def test_passes_of_a_network_without_dropout_are_refused() -> None:
    with pytest.raises(OodometerError, match="set the recipe's dropout"):
        fitted("crossentropy", dropout=0.0).apply(digits()[1], passes=3)


# ---------------------------------------------------------------------------------------------- images


def test_crops_and_mirrors_by_loop() -> None:
    pixels = torch.randint(0, 256, (40, 3, 6, 5), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    padded = functional.pad(pixels, [4] * 4)
    for way in ("crop", "crop-flip"):
        draws = images.drawn_crops(40, way, torch.Generator().manual_seed(1))
        found = images.cropped(pixels, draws)
        mirrored = 0
        for row, image in enumerate(found):
            crops = [padded[row, :, i : i + 6, j : j + 5] for i in range(9) for j in range(9)]
            as_is = any(torch.equal(image, crop) for crop in crops)
            mirrored += not as_is
            assert as_is or any(torch.equal(image, crop.flip(2)) for crop in crops)
        assert mirrored == 0 if way == "crop" else 10 < mirrored < 30


def test_layouts_of_pixels_are_one_image() -> None:
    rng = np.random.default_rng(0)
    last = rng.integers(0, 256, (5, 7, 6, 3), dtype=np.uint8)
    first = np.ascontiguousarray(last.transpose(0, 3, 1, 2))
    cpu = torch.device("cpu")
    one, other = images.Images(Bank(images=last), cpu), images.Images(Bank(images=first), cpu)
    assert one.shape == other.shape == (3, 7, 6)
    assert torch.equal(one.at(torch.tensor([4, 1])), other.at(torch.tensor([4, 1])))
    floats = images.Images(Bank(images=(first / 255).astype(np.float32)), cpu)
    assert torch.allclose(images.scaled(floats.at(torch.arange(5))), images.scaled(one.at(torch.arange(5))))
    mean, std = one.moments()
    assert np.allclose(mean, (last / 255).mean((0, 1, 2)), atol=1e-6)
    assert np.allclose(std, (last / 255).std((0, 1, 2)), atol=1e-6)


def test_grey_images_serve_networks_of_colour_images() -> None:
    train, val = digits(60)
    recipe = training.create("crossentropy", epochs=1, batch=30, augment="none")
    bank = training.fit(recipe, training.Architecture("resnet20"), train, val, seed=0).apply(val)
    assert bank.row_shape("features") == (64,)


# ---------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": np.full(240, 3)}, "at least two classes, numbered 0"),
        ({"labels": np.arange(240) % 10 + 1}, "at least two classes, numbered 0"),
        ({"images": np.full((240, 8, 8), np.nan, np.float32)}, "image 0 of the train bank has NaN"),
        ({"images": np.zeros((240, 8, 8), np.int32)}, "images must be 8-bit pixels"),
        ({"images": np.zeros((240, 64), np.uint8)}, "images must be 8-bit pixels"),
    ],
)
def test_banks_that_cannot_be_trained_on(change: dict[str, Any], message: str) -> None:
    train, val = digits()
    recipe = training.create("crossentropy", epochs=1)
    with pytest.raises(OodometerError, match=message):
        training.fit(recipe, SMALL, train.with_columns(**change), val, seed=0)


def test_missing_columns_and_rows_are_named() -> None:
    train, val = digits()
    recipe = training.create("crossentropy", epochs=1)
    with pytest.raises(OodometerError, match="needs images and labels; the train bank has features"):
        training.fit(recipe, SMALL, Bank(features=np.zeros((3, 2))), val, seed=0)
    with pytest.raises(OodometerError, match="validation bank has none"):
        training.fit(recipe, SMALL, train, val.rows(slice(0, 0)), seed=0)
    with pytest.raises(OodometerError, match="classes that no training row has"):
        training.fit(recipe, SMALL, train.rows(train.labels < 5), val, seed=0)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("confidnet", {"epoch": 3}, "did you mean 'epochs'"),
        ("crossentropy", {"patience": 0}, "patience needs a whole number from 1"),
        ("crossentropy", {"rate": math.nan}, "rate needs a number above 0"),
        ("crossentropy", {"augment": "mixup"}, "augment must be one of none, crop, crop-flip"),
        ("crossentropy", {"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ("devries", {"budget": -1}, "budget needs a number above 0"),
        ("deepgamblers", {"reward": 1.0}, "reward needs a number above 1"),
        ("deepgamblers", {"pretraining": 300}, "pretraining must end before the last epoch"),
        ("deepgambler", {}, "did you mean 'deepgamblers'"),
    ],
)
def test_settings_that_make_no_sense(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OodometerError, match=message):
        training.create(name, **settings)


def test_a_reward_beyond_the_classes_is_refused_before_training() -> None:
    with pytest.raises(OodometerError, match="at most the number of classes, 10; found 11"):
        fitted("deepgamblers", reward=11)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (training.Architecture("resnet21"), "did you mean 'resnet"),
        (training.Architecture("cnn", {"depth": 3}), "no option 'depth'; options: classes, channels, width"),
        (training.Architecture("vgg13"), r"vgg13 cannot read images of shape \(1, 8, 8\)"),
    ],
)
def test_architectures_that_do_not_serve(architecture: training.Architecture, message: str) -> None:
    with pytest.raises(OodometerError, match=message):
        training.fit(training.create("crossentropy"), architecture, *digits(), seed=0)

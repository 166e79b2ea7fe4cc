"""Scores and metrics of peers' own code on features of a real network, with validation rows of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from oodometer import Bank, Head, create, detectors, metrics
from tests.golden.test_synth import split

GOLDEN = np.load(Path(__file__).with_name("cifar_resnet20.npz"))
KEYS = sorted({key.partition(":")[2] for key in GOLDEN.files if ":" in key})

# Relative to the largest absolute value: twice the round-off of the peer's float32 as found, at most 8e-7 but for …
TOLERANCE = 1.6e-6
LARGER = {
    "gen": 3e-6,  # 1 − p to float32's last digit
    "klm": 3e-6,  # the difference of two entropies
    "rmds": 2e-5,  # the difference of two distances
    "openmax": 3e-5,  # libmr's search for the shape of the Weibull stops near 1e-5
    "vim": 2e-5,  # the peer's float32 covariance is summed in the order of this machine's BLAS and its threads
    "residual": 2e-5,  # the same
    "mcm": 5e-5,  # τ = .01 magnifies the round-off of the logits a hundred times
}
UNDERFLOW = 80.0
"""The peer's density is e^−s in float32, which loses digits below e^−87 and is zero below e^−103."""


@pytest.fixture(scope="module", params=["numpy", pytest.param("torch", marks=pytest.mark.torch)])
def banks(request: pytest.FixtureRequest) -> dict[str, Bank]:
    head = Head(GOLDEN["in_W"], GOLDEN["in_b"])
    made = {
        "train": Bank(features=GOLDEN["in_train"], labels=GOLDEN["in_ytrain"], head=head),
        "val": Bank(features=GOLDEN["in_val"], labels=GOLDEN["in_yval"], head=head),
        "id": Bank(features=GOLDEN["in_id"], head=head),
        "ood": Bank(features=GOLDEN["in_ood"], head=head),
    }
    return {name: bank.to(request.param) for name, bank in made.items()}


def scores(banks: dict[str, Bank], key: str) -> tuple[np.ndarray, np.ndarray]:
    name, params = split(key)
    presets = detectors.get(name).card.variants
    preset = next((peer for peer in ("openmibood", "openood") if peer in presets), None)
    detector = create(name, preset=preset, **params).fit(banks["train"], val=banks["val"])
    return detector.score(banks["id"]), detector.score(banks["ood"])


def log_normaliser() -> float:
    """Of the one Gaussian that the peer fits: ½ log det(2πΣ), which it leaves out of the density."""
    covariance = np.cov(GOLDEN["in_train"].astype(np.float64), rowvar=False, bias=True)
    ridge = 1e-6 * np.eye(len(covariance))
    return float(np.linalg.slogdet(2 * np.pi * (covariance + ridge))[1] / 2)


@pytest.mark.parametrize("key", KEYS)
def test_scores_equal_the_peers(banks: dict[str, Bank], key: str) -> None:
    name = key.partition("|")[0]
    ours = np.concatenate(scores(banks, key))
    theirs = np.concatenate([GOLDEN[f"id:{key}"], GOLDEN[f"ood:{key}"]]).astype(np.float64)
    if name == "gmm":
        assert (theirs < UNDERFLOW).mean() > 0.5
        ours, theirs = np.minimum(ours - log_normaliser(), UNDERFLOW), np.minimum(theirs, UNDERFLOW)
    gap = np.abs(ours - theirs).max() / np.abs(theirs).max()
    assert gap < LARGER.get(name, TOLERANCE), f"relative gap {gap:.2e}"


@pytest.mark.parametrize("key", KEYS)
def test_metrics_of_the_scores_equal_the_peers(banks: dict[str, Bank], key: str) -> None:
    id_scores, ood_scores = scores(banks, key)
    ours = [
        metrics.auroc(id_scores, ood_scores),
        metrics.aupr(id_scores, ood_scores, positive="id"),
        metrics.aupr(id_scores, ood_scores, positive="ood"),
        metrics.fpr_at_tpr(id_scores, ood_scores, positive="ood"),
    ]
    np.testing.assert_allclose(ours, GOLDEN[f"metrics:{key}"], rtol=0, atol=5e-4)

"""Scores of a peer's own code on one bank, reproduced setting by setting."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from oodometer import Bank, Head, create
from oodometer.detectors import vim

GOLDEN = np.load(Path(__file__).with_name("synth.npz"))
MOMENTS = np.load(Path(__file__).with_name("synth_float32.npz"))
KEYS = sorted({key.partition(":")[2] for key in GOLDEN.files if ":" in key})

# Where the peer's arithmetic (not its formula) is part of the number: methods say why.
PEER_ARITHMETIC = {
    "vim": {"origin": "float32"},
    "residual": {"origin": "float32"},
    "tempscale": {"solver": "lbfgs50", "init": 1.5},
}
# The largest gap, relative to the largest absolute value, of the formula in float64 against the peer's float32 code,
# as published with one digit: ours must round to no more.
TOLERANCE = {
    "msp": 4.5e-7, "mls": 3.5e-7, "ebo": 3.5e-7, "gen": 2.5e-6, "klm": 1.5e-6, "tempscale": 4.5e-7,
    "mds": 3.5e-7, "rmds": 2.5e-6, "knn": 2.5e-7, "she": 2.5e-7, "relation": 2.5e-6, "nnguide": 3.5e-7,
    "fdbd": 3.5e-7, "nci": 3.5e-7, "gradnorm": 2.5e-7, "react": 4.5e-7, "dice": 1.5e-7, "scale": 5.5e-7,
    "ash": 4.5e-7, "residual": 2.5e-7,
    # α‖Nᵀ(h − u)‖ is up to 1.61 times the score it is part of; the other part is the energy's: 1.61·2.5e-7 + 3.5e-7.
    "vim": 7.5e-7,
}  # fmt: skip


def parse(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"True": True, "False": False}.get(text, text)


def split(key: str) -> tuple[str, dict[str, object]]:
    name, *pairs = key.split("|")
    return name, {k: parse(v) for k, v in (pair.split("=") for pair in pairs)}


@pytest.fixture(scope="module", params=["numpy", pytest.param("torch", marks=pytest.mark.torch)])
def banks(request: pytest.FixtureRequest) -> dict[str, Bank]:
    head = Head(GOLDEN["in_W"], GOLDEN["in_b"])
    made = {
        "train": Bank(features=GOLDEN["in_train"], labels=GOLDEN["in_ytrain"], head=head),
        "id": Bank(features=GOLDEN["in_id"], head=head),
        "ood": Bank(features=GOLDEN["in_ood"], head=head),
    }
    return {name: bank.to(request.param) for name, bank in made.items()}


@pytest.fixture
def peer_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's float32 origin and covariance as recorded: the origin magnifies round-off of the machine's BLAS."""
    monkeypatch.setattr(vim, "float32_moments", lambda train: (MOMENTS["origin"], MOMENTS["covariance"]))


@pytest.mark.usefixtures("peer_moments")
@pytest.mark.parametrize("key", KEYS)
def test_scores_equal_the_peers(banks: dict[str, Bank], key: str) -> None:
    name, params = split(key)
    detector = create(name, **PEER_ARITHMETIC.get(name, {}), **params).fit(banks["train"], val=banks["train"])
    ours = np.concatenate([detector.score(banks["id"]), detector.score(banks["ood"])])
    theirs = np.concatenate([GOLDEN[f"id:{key}"], GOLDEN[f"ood:{key}"]])
    gap = np.abs(ours - theirs).max() / np.abs(theirs).max()
    assert gap < TOLERANCE[name], f"relative gap {gap:.2e}"


def test_float32_moments_are_the_recorded_ones_up_to_this_machines_round_off() -> None:
    head = Head(GOLDEN["in_W"], GOLDEN["in_b"])
    origin, covariance = vim.float32_moments(Bank(features=GOLDEN["in_train"], head=head))
    assert origin.dtype == covariance.dtype == np.float32
    # What BLAS kernels disagree on: a hundredth of the origin's length, along the head's spurious direction.
    assert np.linalg.norm(origin - MOMENTS["origin"]) < 0.05 * np.linalg.norm(MOMENTS["origin"])
    about_recorded = GOLDEN["in_train"].astype(np.float64) - MOMENTS["origin"]
    expected = about_recorded.T @ about_recorded / len(about_recorded)
    np.testing.assert_allclose(MOMENTS["covariance"], expected, atol=1e-5 * np.abs(expected).max())

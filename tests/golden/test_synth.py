"""Scores of a peer's own code on one bank, reproduced setting by setting."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from oodometer import Bank, Head, create

GOLDEN = np.load(Path(__file__).with_name("synth.npz"))
KEYS = sorted({key.partition(":")[2] for key in GOLDEN.files if ":" in key})

# Where the peer's arithmetic (not its formula) is part of the number: methods say why.
PEER_ARITHMETIC = {
    "vim": {"origin": "float32"},
    "residual": {"origin": "float32"},
    "tempscale": {"solver": "lbfgs50", "init": 1.5},
}
TOLERANCE = {"relation": 2e-6, "gen": 2e-6, "rmds": 2e-6, "klm": 1e-6}
DEFAULT_TOLERANCE = 6e-7


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


@pytest.mark.parametrize("key", KEYS)
def test_scores_equal_the_peers(banks: dict[str, Bank], key: str) -> None:
    name, params = split(key)
    detector = create(name, **PEER_ARITHMETIC.get(name, {}), **params).fit(banks["train"], val=banks["train"])
    for side in ("id", "ood"):
        expected = GOLDEN[f"{side}:{key}"]
        gap = np.abs(detector.score(banks[side]) - expected).max() / np.abs(expected).max()
        assert gap < TOLERANCE.get(name, DEFAULT_TOLERANCE), f"{side}: relative gap {gap:.2e}"

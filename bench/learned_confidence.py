"""Learned confidence against softmax and dropout on Fashion-MNIST: misclassification and two foreign alphabets.

    python -m bench.learned_confidence FOLDER_OF_NPZ --out results.json --seeds 0 1 2 --epochs 30 --device cuda

The folder holds fashion.npz (x_train, y_train, x_test, y_test), mnist.npz and kmnist.npz (x_test).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from oodometer import Bank, create, metrics
from oodometer.models import train as training

COMMON = {"rate": 0.05, "batch": 128, "dropout": 0.3, "augment": "crop-flip"}
PASSES = 50
REWARDS = (2.2, 3.0, 6.0, 10.0)
PLAIN = ("msp", "energy", "mcd_pe", "mcd_mi", "mcd_waic")


def recipes(epochs: int) -> dict[str, tuple[training.Recipe, tuple[str, ...]]]:
    """Every training, and the scores that its banks serve."""
    plain = training.create("crossentropy", epochs=epochs, patience=None, cosine=True, **COMMON)
    branch, tuning = 2 * epochs // 3, max(epochs // 6, 1)
    confid = training.create("confidnet", epochs=epochs, branch_epochs=branch, tuning_epochs=tuning, **COMMON)
    devries = training.create("devries", epochs=epochs, **COMMON)
    found = {
        "crossentropy": (plain, PLAIN),
        "confidnet": (confid, (*PLAIN, "confidnet", "confidnet_mcd", "confidnet_waic")),
        "devries": (devries, (*PLAIN, "devries", "devries_mcd", "devries_waic")),
    }
    for reward in REWARDS:
        gambler = training.create("deepgamblers", epochs=epochs, pretraining=epochs // 3, reward=reward, **COMMON)
        scores = (*PLAIN, "deepgamblers", "deepgamblers_mcd", "deepgamblers_waic")
        found[f"deepgamblers:{reward:g}"] = (gambler, scores)
    return found


def measured(detector: str, banks: dict[str, Bank]) -> dict[str, float]:
    """Misclassification on validation and test rows; and each foreign set against the test rows."""
    score = create(detector).score
    found: dict[str, float] = {}
    scores = {name: score(bank) for name, bank in banks.items()}
    for name in ("val", "test"):
        wrong = np.asarray(banks[name].logits).argmax(1) != banks[name].labels
        found[f"{name} augrc"] = metrics.augrc(scores[name], wrong)
        found[f"{name} aurc"] = metrics.aurc(scores[name], wrong)
        found[f"{name} error auroc"] = metrics.auroc(scores[name][~wrong], scores[name][wrong])
    for name in ("mnist", "kmnist"):
        found[f"{name} auroc"] = metrics.auroc(scores["test"], scores[name])
        found[f"{name} fpr95"] = metrics.fpr_at_tpr(scores["test"], scores[name])
    return found


def main() -> None:
    """Train and measure every recipe for every seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--device", default="")
    parser.add_argument("--trainings", nargs="+", default=None, help="only these, e.g. confidnet deepgamblers:3")
    parser.add_argument("--rows", type=int, default=None, help="only the first rows of every set")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    data = {name: training.read_images(f"{options.folder}/{name}.npz:test") for name in ("mnist", "kmnist")}
    data["test"] = training.read_images(f"{options.folder}/fashion.npz:test")
    everything = training.read_images(f"{options.folder}/fashion.npz:train")
    if options.rows:
        data = {name: bank.rows(slice(0, options.rows)) for name, bank in data.items()}
        everything = everything.rows(slice(0, options.rows))
    for seed in options.seeds:
        train, data["val"] = training.held_out(everything, 0.1, seed)
        for name, (recipe, scores) in recipes(options.epochs).items():
            start = time.perf_counter()
            network = training.fit(
                recipe, training.Architecture("cnn"), train, data["val"], seed=seed, device=options.device
            )
            trained = time.perf_counter() - start
            banks = {role: network.apply(bank, passes=PASSES) for role, bank in data.items()}
            accuracy = float((np.asarray(banks["test"].logits).argmax(1) == banks["test"].labels).mean())
            for detector in scores:
                row = {"seed": seed, "training": name, "detector": detector, "accuracy": accuracy, "seconds": trained}
                results.append({**row, **measured(detector, banks)})
            print(f"seed {seed} {name}: {trained:.1f} s, accuracy {accuracy:.4f}", flush=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

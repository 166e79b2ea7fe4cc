"""You have arrays of any model: make banks of them, fit detectors, read metrics.

Here the model is scikit-learn's MLP on the digits 0-5; the digits 6-9 are out of distribution.

    python examples/arrays_only.py
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

from oodometer import Bank, Head, create, metrics

# 1. A model and data, as you have them already.
pixels, labels = load_digits(return_X_y=True)
known = labels < 6
x_train, x_test, y_train, y_test = train_test_split(pixels[known] / 16, labels[known], test_size=0.3, random_state=0)
x_ood, y_ood = pixels[~known] / 16, labels[~known]
model = MLPClassifier(hidden_layer_sizes=(64,), max_iter=500, random_state=0).fit(x_train, y_train)


def penultimate(x: np.ndarray) -> np.ndarray:
    """What enters the last layer, for most networks the output of everything but the last module."""
    return np.maximum(x @ model.coefs_[0] + model.intercepts_[0], 0)


# 2. Banks: named columns, one entry a row. With features and head the logits are computed.
head = Head(weight=model.coefs_[1].T, bias=model.intercepts_[1])
train = Bank(features=penultimate(x_train), labels=y_train, head=head)
test = Bank(features=penultimate(x_test), labels=y_test, head=head)
ood = {f"digit {digit}": Bank(features=penultimate(x_ood[y_ood == digit]), head=head) for digit in range(6, 10)}

# 3. Detectors: fit on training rows, score any rows; a higher score is more out of distribution, always.
print(f"{'detector':<10}{'AUROC':>8}{'FPR@95':>8}   mean over {len(ood)} OOD classes")
for name, params in {"msp": {}, "energy": {}, "gen": {}, "knn": {"k": 10}, "mds": {}, "vim": {"dim": 32}}.items():
    detector = create(name, **params).fit(train)
    table = metrics.summary(detector.score(test), {key: detector.score(bank) for key, bank in ood.items()})
    mean = table[table["kind"] == "mean"].iloc[-1]
    print(f"{name:<10}{mean['auroc']:8.4f}{mean['fpr95_ood']:8.4f}")

# 4. To keep: banks and scores survive the session.
#    train.save("banks/train"); Bank.open("banks/train")

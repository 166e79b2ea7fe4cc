"""Training losses as functions of tensors: each gives one value a row, before any mean."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from oodometer.errors import OodometerError


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """−log softmax(z)_y."""
    return functional.cross_entropy(logits, labels, reduction="none")


def uniform_cross_entropy(logits: Tensor) -> Tensor:
    """−(z̄ − lse(z)): the cross-entropy to the uniform distribution (Hendrycks et al., ICLR 2019, eq. 1 and §4.3)."""
    return logits.logsumexp(dim=1) - logits.mean(dim=1)


def gambler(logits: Tensor, labels: Tensor, reward: float) -> Tensor:
    """−log(p_y + p_{C+1}/o), softmax over the C classes and the reservation (Liu et al., NeurIPS 2019, eq. 7).

    In logarithms, so that neither probability underflows: lse(z) − log(e^{z_y} + e^{z_{C+1}}/o).
    """
    check_reward(reward, logits.shape[1] - 1)
    true = logits.gather(1, labels[:, None])[:, 0]
    return logits.logsumexp(dim=1) - torch.logaddexp(true, logits[:, -1] - math.log(reward))


def check_reward(reward: float, classes: int) -> None:
    """Refuse a reward that makes never betting, or always betting, the best a gambler can do."""
    if not 1 < reward <= classes:
        raise OodometerError(
            f"deepgamblers: reward must be above 1 and at most the number of classes, {classes}; found {reward!r}: "
            "at 1 keeping the stake costs nothing, beyond the number of classes betting always pays"
        )


def hinted(logits: Tensor, confidence: Tensor, labels: Tensor, asked: Tensor) -> Tensor:
    """−log(c'·p_y + 1 − c'), with c' = c where a hint was asked for and 1 elsewhere (DeVries & Taylor, 2018, eq. 2–3).

    `confidence` is the branch's output before its sigmoid. Only the true class of the mixture c'p + (1−c')y matters.
    """
    log_p = -cross_entropy(logits, labels)
    with_hint = torch.logaddexp(functional.logsigmoid(confidence) + log_p, functional.logsigmoid(-confidence))
    return -torch.where(asked, with_hint, log_p)


def asking(confidence: Tensor) -> Tensor:
    """−log c: what asking for hints costs (DeVries & Taylor, 2018, eq. 4)."""
    return -functional.logsigmoid(confidence)


def budgeted(weight: Tensor, price: Tensor, budget: float) -> Tensor:
    """The weight λ of the price for the next batch: raised by 1 % where the price exceeds the budget, else lowered.

    λ ← λ/1.01 if budget > price, else λ/.99 (DeVries & Taylor's code; §2.3 of the paper describes it).
    """
    return torch.where(price < budget, weight / 1.01, weight / 0.99)


def true_class_error(confidence: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """(σ(c) − p_y)²: how far the confidence is off the true-class probability (Corbière et al., NeurIPS 2019, eq. 4).

    The probability is a target: no gradient flows to the classifier.
    """
    target = logits.detach().softmax(dim=1).gather(1, labels[:, None])[:, 0]
    return (confidence.sigmoid() - target) ** 2

"""OpenOOD 1.5 re-stated: its documented formulas, its batches of 200, its loops; what a user of it pays.

OpenOOD itself does not install from PyPI with its dependencies, so these functions spend what its post-processors
spend: the same products of the same shapes in the same batches, fitted and scored the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from scipy.stats import weibull_min
from sklearn.covariance import EmpiricalCovariance
from sklearn.metrics import pairwise_distances_argmin_min

from bench.banks import Arrays, subspace

BATCH = 200
Scores = np.ndarray
PEERS: dict[str, Callable[[Arrays], Scores]] = {}


def peer(name: str) -> Callable[[Callable[[Arrays], Scores]], Callable[[Arrays], Scores]]:
    """Enter a peer's way of a method under our name of it."""

    def enter(function: Callable[[Arrays], Scores]) -> Callable[[Arrays], Scores]:
        PEERS[name] = function
        return function

    return enter


def _batches(*arrays: np.ndarray) -> Iterator[tuple[torch.Tensor, ...]]:
    tensors = [torch.from_numpy(array) for array in arrays]
    for start in range(0, len(arrays[0]), BATCH):
        yield tuple(tensor[start : start + BATCH] for tensor in tensors)


def _joined(pieces: list[torch.Tensor]) -> Scores:
    return torch.cat([piece.cpu() for piece in pieces]).numpy()


def _energy(features: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return -torch.logsumexp(features @ w.T + b, dim=1)


def _head(data: Arrays) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(data.W), torch.from_numpy(data.b)


@peer("msp")
def msp(data: Arrays) -> Scores:
    return _joined([-torch.softmax(z, dim=1).max(dim=1).values for (z,) in _batches(data.test_logits)])


@peer("energy")
def energy(data: Arrays) -> Scores:
    return _joined([-torch.logsumexp(z, dim=1) for (z,) in _batches(data.test_logits)])


@peer("gen")
def gen(data: Arrays) -> Scores:
    def one(z: torch.Tensor) -> torch.Tensor:
        top = torch.sort(torch.softmax(z, dim=1), dim=1).values[:, -100:]
        return (top**0.1 * (1 - top) ** 0.1).sum(dim=1)

    return _joined([one(z) for (z,) in _batches(data.test_logits)])


@peer("klm")
def klm(data: Arrays) -> Scores:
    p_train = _joined([torch.softmax(z, dim=1) for (z,) in _batches(data.train_logits)])
    predicted = p_train.argmax(1)
    means = np.stack([p_train[predicted == c].mean(0) for c in range(data.W.shape[0]) if (predicted == c).any()])

    def kl(p: np.ndarray, q: np.ndarray) -> float:
        return float(np.sum(np.where(p != 0, p * np.log(p / q), 0)))

    with np.errstate(all="ignore"):
        pieces = [
            pairwise_distances_argmin_min(torch.softmax(z, dim=1).numpy(), means, metric=kl)[1]
            for (z,) in _batches(data.test_logits)
        ]
    return np.concatenate(pieces)


def _precision(data: Arrays) -> tuple[list[torch.Tensor], torch.Tensor]:
    h, y = torch.from_numpy(data.train), torch.from_numpy(data.labels)
    means, centred = [], []
    for c in range(data.W.shape[0]):
        rows = h[y == c]
        means.append(rows.mean(0))
        centred.append(rows - means[-1])
    fitted = EmpiricalCovariance(assume_centered=False).fit(torch.cat(centred).numpy().astype(np.float32))
    return means, torch.from_numpy(fitted.precision_).float()


def _class_distances(h: torch.Tensor, means: list[torch.Tensor], precision: torch.Tensor) -> torch.Tensor:
    columns = []
    for mean in means:
        gap = h - mean
        columns.append(torch.mm(torch.mm(gap, precision), gap.t()).diag()[:, None])
    return torch.cat(columns, dim=1)


@peer("mds")
def mds(data: Arrays) -> Scores:
    means, precision = _precision(data)
    return _joined([_class_distances(h, means, precision).min(dim=1).values for (h,) in _batches(data.test)])


@peer("rmds")
def rmds(data: Arrays) -> Scores:
    means, precision = _precision(data)
    whole = EmpiricalCovariance(assume_centered=False).fit(data.train)
    mean, background = torch.from_numpy(data.train).mean(0), torch.from_numpy(whole.precision_).float()

    def one(h: torch.Tensor) -> torch.Tensor:
        return (_class_distances(h, means, precision) - _class_distances(h, [mean], background)).min(dim=1).values

    return _joined([one(h) for (h,) in _batches(data.test)])


def _null_space(data: Arrays, dim: int) -> tuple[np.ndarray, np.ndarray]:
    u = -np.linalg.pinv(data.W) @ data.b
    covariance = EmpiricalCovariance(assume_centered=True).fit(data.train - u).covariance_
    values, vectors = np.linalg.eig(covariance)
    return u, np.ascontiguousarray(vectors.T[np.argsort(values * -1)[dim:]].T)


@peer("vim")
def vim(data: Arrays) -> Scores:
    u, null = _null_space(data, subspace(data.train.shape[1]))
    alpha = (data.train @ data.W.T + data.b).max(1).mean() / np.linalg.norm((data.train - u) @ null, axis=1).mean()

    def one(h: np.ndarray) -> np.ndarray:
        logits = torch.from_numpy(h @ data.W.T + data.b)
        return np.linalg.norm((h - u) @ null, axis=1) * alpha - torch.logsumexp(logits, dim=1).numpy()

    return np.concatenate([one(h.numpy()) for (h,) in _batches(data.test)])


@peer("residual")
def residual(data: Arrays) -> Scores:
    u, null = _null_space(data, subspace(data.train.shape[1]))
    return np.concatenate([np.linalg.norm((h.numpy() - u) @ null, axis=1) for (h,) in _batches(data.test)])


@peer("knn")
def knn(data: Arrays) -> Scores:
    import faiss

    def unit(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x / np.linalg.norm(x, axis=1, keepdims=True))

    index = faiss.IndexFlatL2(data.train.shape[1])
    index.add(unit(data.train))
    return np.concatenate([index.search(unit(h.numpy()), 50)[0][:, -1] for (h,) in _batches(data.test)])


@peer("relation")
def relation(data: Arrays) -> Scores:
    def unit(h: torch.Tensor) -> torch.Tensor:
        return h / (h.pow(2).sum(1, keepdim=True) + 1e-10).sqrt()

    bank = unit(torch.from_numpy(data.train))
    p_bank = torch.softmax(torch.from_numpy(data.train_logits), dim=1)

    def one(h: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        kernel = torch.clamp(unit(h) @ bank.T, min=0) * (torch.softmax(z, dim=1) @ p_bank.T)
        kernel[kernel <= 0.03] = 0
        return -(kernel**1).sum(dim=1)

    return _joined([one(h, z) for h, z in _batches(data.test, data.test_logits)])


@peer("nnguide")
def nnguide(data: Arrays) -> Scores:
    import faiss

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    confidence = torch.logsumexp(torch.from_numpy(data.train_logits), dim=1).numpy()
    index = faiss.IndexFlatIP(data.train.shape[1])
    index.add(np.ascontiguousarray(unit(data.train) * confidence[:, None]))

    def one(h: torch.Tensor, z: torch.Tensor) -> np.ndarray:
        found = index.search(np.ascontiguousarray(unit(h.numpy())), 10)[0].mean(1)
        return -found * torch.logsumexp(z, dim=1).numpy()

    return np.concatenate([one(h, z) for h, z in _batches(data.test, data.test_logits)])


@peer("fdbd")
def fdbd(data: Arrays) -> Scores:
    w, _ = _head(data)
    mean = torch.from_numpy(data.train).mean(0)
    gaps = torch.stack([torch.norm(row - w, dim=1) for row in w])
    gaps[torch.arange(len(w)), torch.arange(len(w))] = 1

    def one(h: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        top, predicted = z.max(dim=1)
        return -((z - top[:, None]).abs() / gaps[predicted]).sum(dim=1) / torch.norm(h - mean, dim=1)

    return _joined([one(h, z) for h, z in _batches(data.test, data.test_logits)])


@peer("she")
def she(data: Arrays) -> Scores:
    h, y = torch.from_numpy(data.train), torch.from_numpy(data.labels)
    predicted = torch.cat([z.argmax(1) for (z,) in _batches(data.train_logits)])
    means = torch.stack([h[(y == c) & (predicted == c)].mean(0) for c in range(data.W.shape[0])])
    return _joined([-(x * means[z.argmax(1)]).sum(dim=1) for x, z in _batches(data.test, data.test_logits)])


@peer("react")
def react(data: Arrays) -> Scores:
    w, b = _head(data)
    threshold = float(np.percentile(data.train.flatten(), 90))
    return _joined([_energy(h.clip(max=threshold), w, b) for (h,) in _batches(data.test)])


@peer("ash")
def ash(data: Arrays) -> Scores:
    w, b = _head(data)

    def shaped(h: torch.Tensor) -> torch.Tensor:
        total = h.sum(dim=1)
        keep = h.shape[1] - int(np.round(h.shape[1] * 0.9))
        value, place = torch.topk(h, keep, dim=1)
        pruned = torch.zeros_like(h).scatter_(dim=1, index=place, src=value)
        return pruned * torch.exp(total / pruned.sum(dim=1))[:, None]

    return _joined([_energy(shaped(h), w, b) for (h,) in _batches(data.test)])


@peer("scale")
def scale(data: Arrays) -> Scores:
    w, b = _head(data)

    def shaped(h: torch.Tensor) -> torch.Tensor:
        total = h.sum(dim=1)
        keep = h.shape[1] - int(np.round(h.shape[1] * 0.85))
        value, place = torch.topk(h, keep, dim=1)
        pruned = torch.zeros_like(h).scatter_(dim=1, index=place, src=value)
        return h * torch.exp(total / pruned.sum(dim=1))[:, None]

    return _joined([_energy(shaped(h), w, b) for (h,) in _batches(data.test)])


@peer("dice")
def dice(data: Arrays) -> Scores:
    w, b = _head(data)
    contribution = data.train.mean(0)[None, :] * data.W
    masked = w * torch.from_numpy((contribution > np.percentile(contribution, 90)).astype(np.float32))

    def one(h: torch.Tensor) -> torch.Tensor:
        return -torch.logsumexp((h[:, None, :] * masked).sum(2) + b, dim=1)

    return _joined([one(h) for (h,) in _batches(data.test)])


@peer("gradnorm")
def gradnorm(data: Arrays) -> Scores:
    w, b = _head(data)
    layer = torch.nn.Linear(w.shape[1], w.shape[0])
    layer.weight.data, layer.bias.data = w.clone(), b.clone()
    targets = torch.ones((1, w.shape[0]))

    def one(h: torch.Tensor) -> float:
        layer.zero_grad()
        loss = torch.mean(torch.sum(-targets * torch.log_softmax(layer(h[None]), dim=-1), dim=-1))
        loss.backward()
        return -float(layer.weight.grad.abs().sum())

    return np.array([one(h) for (batch,) in _batches(data.test) for h in batch])


@peer("openmax")
def openmax(data: Arrays) -> Scores:
    z, y, classes = data.train_logits, data.labels, data.W.shape[0]
    right = z.argmax(1) == y
    means = [z[right & (y == c)].mean(0) for c in range(classes)]
    tails = [np.sort(np.linalg.norm(z[right & (y == c)] - means[c], axis=1))[-20:] for c in range(classes)]
    models = [weibull_min.fit(tail - tail.min() + 1, floc=0) for tail in tails]
    shifts = [tail.min() - 1 for tail in tails]

    def one(row: np.ndarray) -> float:
        alpha = [(3 - place) / 3 for place in range(3)]
        omega = np.zeros(classes)
        omega[row.argsort()[::-1][:3]] = alpha
        new, unknown = [], []
        for c in range(classes):
            distance = np.linalg.norm(row - means[c]) - shifts[c]
            shape, _, width = models[c]
            weight = 1 - np.exp(-((max(distance, 0) / width) ** shape))
            new.append(row[c] * (1 - omega[c] * weight))
            unknown.append(row[c] - new[-1])
        e = np.exp(np.array([*new, sum(unknown)]) - max(*new, sum(unknown)))
        return float(e[-1] / e.sum())

    return np.array([one(row.numpy()) for (batch,) in _batches(data.test_logits) for row in batch])

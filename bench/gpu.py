"""Array-level detectors on one GPU: fit and score times beside the memory or FLOP floor measured in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.banks import SIZES, Size
from bench.table import Table
from oodometer import Bank, Head, create, derived
from oodometer.detectors.base import Detector

GOAL = 2.0
"""A fit or a score may take so many times its floor."""
RUNS, SECONDS = 9, 0.5
"""Each piece of work is repeated so often, or for so long (but three times at least): the median counts."""
FEW = 64
"""A score of so many rows costs what every score costs: launches, Python, uploads of fitted state."""
LOGITS, FEATURES, BOTH = ("logits",), ("features",), ("features", "logits")

ELEMENTWISE = (
    "mls", "msp", "energy", "entropy", "collision", "doctor_alpha", "gen", "renyi", "guessing", "openmax",
)  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """What this device does: bytes copied a second (read + written), float32 products a second, one eigh in seconds."""

    bytes: float
    flops: float
    eigh: float


@dataclass(frozen=True)
class Work:
    """The least a method has to do for one row: columns read once, floating-point operations in products."""

    columns: tuple[str, ...] = ()
    flops: float = 0.0
    eighs: int = 0

    def floor(self, bank: Bank, rates: Rates) -> float:
        """Seconds for all rows of a bank: moving bytes or multiplying, whichever takes longer, and spectra."""
        moved = len(bank) * 4 * sum(bank.row_shape(column)[0] for column in self.columns)
        work = max(moved / rates.bytes, len(bank) * self.flops / rates.flops)
        return float(work + self.eighs * rates.eigh)


def fit_work(size: Size) -> dict[str, Work]:
    """Methods that fit something on the rows of the training bank."""
    d = size.features
    scatter, marks = 2.0 * d * d, size.train // size.classes
    return {
        "klm": Work(LOGITS), "openmax": Work(LOGITS),
        "she": Work(BOTH), "ctmmean": Work(FEATURES),
        "react": Work(FEATURES), "vra": Work(FEATURES), "dice": Work(FEATURES), "fdbd": Work(FEATURES),
        "mds": Work(FEATURES, scatter, 1), "rmds": Work(FEATURES, scatter, 2), "gmm": Work(FEATURES, scatter, 1),
        "pca": Work(FEATURES, scatter, 1), "neco": Work(FEATURES, scatter, 1), "pnml": Work(FEATURES, scatter, 1),
        # The second eigh is of the head's Gram matrix.
        "residual": Work(FEATURES, scatter, 2), "vim": Work(BOTH, scatter + 2.0 * d * _null(d), 2),
        "kpca": Work(BOTH, 2.0 * d * marks + 4.0 * marks * marks),
    }  # fmt: skip


def score_work(size: Size) -> dict[str, Work]:
    """All methods measured."""
    n, d, c = size.train, size.features, size.classes
    head, whiten, search = 2.0 * d * c, 2.0 * d * d, 2.0 * n * d
    return {
        **dict.fromkeys(ELEMENTWISE, Work(LOGITS)),
        **dict.fromkeys(("gradnorm", "fdbd", "nci", "she", "scale"), Work(BOTH)),
        **dict.fromkeys(("react", "vra", "dice", "ash", "ctm", "ctmmean"), Work(FEATURES, head)),
        "klm": Work(LOGITS, 2.0 * c * c),
        "mds": Work(FEATURES, whiten + head), "rmds": Work(FEATURES, 2 * whiten + head),
        "gmm": Work(FEATURES, whiten + head), "pnml": Work(FEATURES, whiten + head),
        "residual": Work(FEATURES, 2.0 * d * _null(d)), "vim": Work(BOTH, 2.0 * d * _null(d)),
        "neco": Work(BOTH, 2.0 * d * 100), "pca": Work(FEATURES, whiten / 2),
        "kpca": Work(FEATURES, 2.0 * d * (n // c)),
        "knn": Work(FEATURES, search), "nnguide": Work(BOTH, search),
        "relation": Work(BOTH, search + 2.0 * n * c),
    }  # fmt: skip


def _null(width: int) -> int:
    """Residual directions of ViM's default ladder."""
    return width - (1000 if width >= 2048 else 512 if width >= 768 else width // 2)


# ---------------------------------------------------------------------------------------------- the device


def draw(size: Size) -> tuple[Bank, Bank]:
    """Banks like those of `bench.banks`, drawn on the device."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, device="cuda")

    centers = normal(size.classes, size.features)
    weight = (centers - centers.mean(0)) / size.features**0.5
    bias = -0.5 * (weight * centers).sum(1)
    head = Head(weight.cpu().numpy(), bias.cpu().numpy())

    def rows(count: int) -> Bank:
        labels = torch.randint(0, size.classes, (count,), generator=generator, device="cuda")
        features = (centers[labels] + 1.5 * normal(count, size.features)).clamp_(min=0)
        return Bank(features=features, logits=features @ weight.T + bias, labels=labels.cpu().numpy(), head=head)

    return rows(size.train), rows(size.test)


def measure_rates(width: int) -> Rates:
    """Copy bandwidth, the rate of float32 products (no reduced precision) and one float64 eigh of this width."""
    import torch

    source = torch.rand(1 << 28, device="cuda")
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, device="cuda")
    s = torch.randn(width, width, dtype=torch.float64, device="cuda")
    s = s @ s.T
    return Rates(
        2 * source.nbytes / median(lambda: target.copy_(source)),
        2 * 8192**3 / median(lambda: a @ a),
        median(lambda: torch.linalg.eigh(s)),
    )


def median(work: Callable[..., object], *prepared: Callable[[], object]) -> float:
    """Seconds of one run, from an idle device to an idle device; the arguments are prepared outside the clock."""
    import torch

    work(*(prepare() for prepare in prepared))
    found: list[float] = []
    while len(found) < 3 or (len(found) < RUNS and sum(found) < SECONDS):
        arguments = [prepare() for prepare in prepared]
        torch.cuda.synchronize()
        start = time.perf_counter()
        work(*arguments)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


# ---------------------------------------------------------------------------------------------- the table


@dataclass
class Timer:
    """Times a method on banks that remember nothing but that their columns are finite."""

    train: Bank
    test: Bank

    def fresh(self, bank: Bank, rows: int | None = None) -> Bank:
        found = bank.rows(slice(0, rows))
        for column in BOTH:
            derived.first_bad_row(found, column)
        return found

    def fit(self, method: str) -> float:
        return median(lambda bank: create(method).fit(bank), lambda: self.fresh(self.train))

    def score(self, detector: Detector, rows: int | None = None) -> float:
        return median(detector.score, lambda: self.fresh(self.test, rows))


def report(size_name: str, wanted: Iterable[str] = ()) -> None:
    """Print the ceilings, the costs that all methods share, and the table row by row."""
    import torch

    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return
    size = SIZES[size_name]
    rates, (train, test) = measure_rates(size.features), draw(size)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}: copy {rates.bytes / 1e12:.2f} TB/s, ", end="")
    print(f"float32 products {rates.flops / 1e12:.0f} TFLOP/s, eigh of {size.features} {1e3 * rates.eigh:.1f} ms")
    report_shared(test, rates)
    table = Table("method", "fit ms", "floor", "ratio", "score ms", "floor", "ratio", f"{FEW} rows ms")
    timer, fits = Timer(train, test), fit_work(size)
    for method, work in score_work(size).items():
        if wanted and method not in wanted:
            continue
        fitted = _cells(timer.fit(method), fits[method].floor(train, rates)) if method in fits else ["–"] * 3
        detector = create(method).fit(timer.fresh(train))
        scored = _cells(timer.score(detector), work.floor(test, rates))
        table.row(method, *fitted, *scored, f"{1e3 * timer.score(detector, FEW):.3f}")


def report_shared(test: Bank, rates: Rates) -> None:
    """What every method pays once a bank, outside the table: the check for NaN and the transfers."""
    import torch

    for column in BOTH:
        spent = median(derived.first_bad_row, lambda: test.rows(slice(None)), partial(str, column))
        once = Work((column,)).floor(test, rates)
        print(f"finite check of the scored {column}: {1e3 * spent:.3f} ms, read once {1e3 * once:.3f} ms")
    scores = torch.rand(len(test), device="cuda")
    print(f"{len(test):,} scores to the host: {1e3 * median(scores.cpu):.3f} ms")
    host = test.features.cpu()
    pinned = host.pin_memory()
    pageable, fast = median(lambda: host.to("cuda")), median(lambda: pinned.to("cuda", non_blocking=True))
    print(
        f"upload of the scored features: {1e3 * pageable:.1f} ms from pageable memory, {1e3 * fast:.1f} ms from pinned"
    )
    print()


def _cells(spent: float, floor: float) -> list[str]:
    mark = "" if spent <= GOAL * floor else " MISSED"
    return [f"{1e3 * spent:.2f}", f"{1e3 * floor:.2f}", f"{spent / floor:.1f}×{mark}"]

"""What published code costs too much, one test a defect; each name begins with the defect's number."""

from __future__ import annotations

import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from oodometer import Bank, Head, create, detectors
from oodometer.errors import OodometerError

pytestmark = pytest.mark.filterwarnings("ignore::oodometer.errors.OodometerWarning")

ROWS, WIDTH, CLASSES = 6_000, 128, 200
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def bank() -> Bank:
    rng = np.random.default_rng(0)
    labels = np.arange(ROWS) % CLASSES
    centers = rng.standard_normal((CLASSES, WIDTH))
    features = np.maximum(centers[labels] + rng.standard_normal((ROWS, WIDTH)), 0).astype(np.float32)
    return Bank(features=features, labels=labels, head=Head(centers.astype(np.float32), np.zeros(CLASSES, np.float32)))


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("name", ["dice", "fdbd", "mds", "rmds", "pnml", "klm", "openmax", "gmm", "react", "vim"])
def test_c04_nothing_grows_with_rows_times_rows_or_rows_times_classes_times_features(name: str, bank: Bank) -> None:
    """Rows × classes × features would take 600 MB here, rows × rows 140 MB."""
    create(name).fit(bank, val=bank).score(bank)
    assert tracemalloc.get_traced_memory()[1] < 90 * MEGABYTE


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("name", ["relation", "knn", "nnguide"])
def test_c05_the_searched_bank_is_never_multiplied_whole(name: str, bank: Bank) -> None:
    query = bank.rows(slice(0, 3000))
    create(name).fit(bank).score(query)
    assert tracemalloc.get_traced_memory()[1] < 250 * MEGABYTE


def test_c05_gram_keeps_bounds_not_rows() -> None:
    """Twice the rows, the same memory: Gram vectors are never held for all rows."""

    def peak(rows: int) -> int:
        rng = np.random.default_rng(0)
        maps = np.abs(rng.standard_normal((rows, 32, 4), dtype=np.float32))
        train = Bank({"layers.0": maps, "logits": maps[:, :3, 0], "labels": np.arange(rows) % 3})
        tracemalloc.start()
        create("gram").fit(train)
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    # Of each row only its class, its place in the draw and its prediction are kept: 40 bytes at the most.
    assert peak(120_000) - peak(60_000) < 40 * 60_000


@pytest.mark.parametrize("name", ["gradnorm", "openmax", "klm", "fdbd", "she", "doctor_alpha"])
def test_c06_no_loop_over_rows(name: str, bank: Bank) -> None:
    """A loop with one small product a row takes seconds; a callback a row and class takes minutes."""
    detector = create(name).fit(bank, val=bank)
    start = time.process_time()
    detector.score(bank)
    assert time.process_time() - start < 2.0


def test_c10_the_library_works_without_any_extra() -> None:
    """A clean install must import and score: no PyTorch, faiss or other optional package."""
    program = """
import sys
for name in ("torch", "faiss", "torchvision", "timm", "transformers", "nibabel", "statsmodels", "foolbox"):
    sys.modules[name] = None
import numpy as np
from oodometer import Bank, create, detectors
bank = Bank(logits=np.random.default_rng(0).standard_normal((20, 3)), labels=np.arange(20) % 3)
for name in detectors.names():
    if detectors.get(name).card.needs <= {"logits", "labels"}:
        create(name).fit(bank, val=bank).score(bank)
print("scored")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "scored\n", done.stderr


def test_c14_a_truncated_or_altered_file_is_named(tmp_path: Path, bank: Bank) -> None:
    path = bank.rows(slice(0, 50)).save(tmp_path / "bank")
    column = next(path.glob("*features*.npy"))
    whole = column.read_bytes()
    for damaged in (b"", whole[:-8], whole[:-8] + b"\x01" * 8):
        column.write_bytes(damaged)
        with pytest.raises(OodometerError, match=column.name):
            Bank.open(path)


def test_the_slow_classes_of_detectors_say_so() -> None:
    """A card's cost is what a reader plans with: only searches may cost a product with all training rows."""
    assert {name for name in detectors.names() if detectors.get(name).card.cost == "search"} == {
        "knn",
        "nnguide",
        "relation",
    }

"""Cells: what identifies them, how failures are kept, and that only sound ones count as finished."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.conformance.conftest import make_bank

from oodometer import create, derived
from oodometer.cells import (
    Setting,
    Test,
    classifier_segments,
    finished,
    fitted,
    id_segments,
    message,
    order_of,
    write_cell,
)
from oodometer.errors import OodometerError
from oodometer.results import Store, key_of
from oodometer.tune import Train, Validation


def test_the_identity_of_a_setting_holds_the_defaults_too() -> None:
    assert Setting("knn", {}).identity == Setting("knn", {"k": create("knn").get_params()["k"]}).identity
    assert Setting("knn", {"k": 3}).identity["params"]["k"] == 3
    assert Setting("knn", {"k": 3}).identity != Setting("knn", {"k": 4}).identity
    assert Setting("knn", {"k": 3}).text == '{"k": 3}'


def test_the_key_depends_on_every_fact_and_not_on_their_order() -> None:
    facts = {"a": 1, "b": {"c": [1, 2]}}
    assert key_of(facts) == key_of(dict(reversed(facts.items())))
    assert len({key_of(facts), key_of({**facts, "a": 2}), key_of({**facts, "b": {"c": [2, 1]}})}) == 3


def test_larger_searches_come_first() -> None:
    settings = [Setting("knn", {"k": k}) for k in (1, 100, 10)]
    assert [one.params["k"] for one in sorted(settings, key=lambda one: one.size)] == [100, 10, 1]


def test_scores_are_sorted_by_row_number_and_equal_a_hand_made_call() -> None:
    train, val, rows = make_bank(1, 200), make_bank(2, 60), make_bank(3, 80)
    numbers = np.random.default_rng(0).permutation(80)
    shuffled = Test(rows.rows(numbers), order_of(numbers))
    detector = fitted(Setting("knn", {"k": 7}), Train(train), Validation(val))
    by_hand = create("knn", k=7).fit(train)
    found = id_segments(detector, shuffled, Validation(val.rows(slice(None, None, -1))), np.arange(60)[::-1])
    assert found["test"] == pytest.approx(by_hand.score(rows), rel=1e-12)
    assert found["val"] == pytest.approx(by_hand.score(val), rel=1e-12)
    correct = classifier_segments(shuffled, Validation(val), np.arange(60))
    assert correct["test"].tolist() == derived.correct(rows).tolist()


def test_a_failure_is_kept_with_its_error_and_is_not_finished(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def refuse() -> tuple[dict[str, int], None]:
        raise OodometerError("k is too large")

    def break_down() -> tuple[dict[str, int], None]:
        raise ZeroDivisionError("oh")

    assert write_cell(store, "a", {"x": 1}, refuse).error == "k is too large"
    assert write_cell(store, "b", {"x": 1}, break_down).error == "unexpected ZeroDivisionError: oh"
    assert json.loads((tmp_path / "a.json").read_text())["error"] == "k is too large"
    assert finished(store, "a") is None
    assert message(KeyError("k")) == "unexpected KeyError: 'k'"
    write_cell(store, "a", {"x": 1}, lambda: ({"y": 2}, {"test": np.arange(3.0)}))
    cell = finished(store, "a")
    assert cell is not None
    assert (cell.facts["x"], cell.facts["y"], cell.segment("test").tolist()) == (1, 2, [0, 1, 2])


def test_a_full_disk_stops_the_run_instead_of_failing_cells(tmp_path: Path) -> None:
    def full() -> tuple[dict[str, int], None]:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_cell(Store(tmp_path), "a", {}, full)
    assert Store(tmp_path).keys() == []


def test_damaged_and_absent_cells_are_not_finished(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert finished(store, "a") is None
    store.write("a", {}, {"test": np.arange(5.0)})
    assert finished(store, "a") is not None
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-1])
    assert finished(store, "a") is None
    store.discard("a")
    assert list(tmp_path.iterdir()) == []
    store.discard("a")  # nothing there is nothing to do

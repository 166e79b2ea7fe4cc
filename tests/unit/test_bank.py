"""The bank: what it accepts, what it refuses, and that nothing is lost between memory, parts and disk."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oodometer import Bank, Head
from oodometer.errors import OodometerError

RNG = np.random.default_rng(0)
N, D, C = 20, 6, 4
FEATURES = RNG.standard_normal((N, D)).astype(np.float32)
LABELS = RNG.integers(0, C, N)
HEAD = Head(RNG.standard_normal((C, D)).astype(np.float32), RNG.standard_normal(C).astype(np.float32))
LOGITS = FEATURES @ HEAD.weight.T + HEAD.bias


def bank(**columns: object) -> Bank:
    return Bank(features=FEATURES, labels=LABELS, head=HEAD, **columns)


# ---------------------------------------------------------------------------------------------- columns and head


def test_logits_are_computed_from_features_and_head() -> None:
    np.testing.assert_allclose(bank().logits, LOGITS, rtol=1e-6)
    assert "logits" in bank()
    assert "logits" not in bank().columns


def test_logits_that_disagree_with_the_head_are_refused_with_the_gap_and_the_row() -> None:
    wrong = LOGITS.copy()
    wrong[13, 2] += 0.5
    with pytest.raises(OodometerError, match=r"disagree by up to 0\.5 \(row 13"):
        bank(logits=wrong)


def test_logits_in_half_precision_are_close_enough() -> None:
    assert len(bank(logits=LOGITS.astype(np.float16))) == N


def test_nothing_else_than_a_head_and_features_can_make_logits() -> None:
    with pytest.raises(OodometerError, match="no head"):
        _ = Bank(features=FEATURES).logits
    with pytest.raises(OodometerError, match="no column 'views'"):
        _ = bank()["views"]


@pytest.mark.parametrize(
    ("weight", "bias", "found"),
    [(np.zeros((D, C)), np.zeros(C), r"\(6, 4\)"), (np.zeros(D), np.zeros(1), r"\(6,\)")],
)
def test_a_head_of_other_shapes_is_refused(weight: np.ndarray, bias: np.ndarray, found: str) -> None:
    with pytest.raises(OodometerError, match=found):
        Head(weight, bias)


def test_a_head_with_nan_is_refused() -> None:
    with pytest.raises(OodometerError, match=r"Head\.weight holds NaN"):
        Head(np.full((C, D), np.nan), np.zeros(C))


def test_a_head_of_another_width_is_refused() -> None:
    with pytest.raises(OodometerError, match="the head reads 6 features"):
        Bank(features=FEATURES[:, :5], head=HEAD)
    with pytest.raises(OodometerError, match="the head has 4 classes"):
        Bank(logits=LOGITS[:, :3], head=HEAD)


def test_columns_need_equal_lengths_numbers_and_integer_labels() -> None:
    with pytest.raises(OodometerError, match="features: 20, labels: 19"):
        Bank(features=FEATURES, labels=LABELS[1:])
    with pytest.raises(OodometerError, match="must be numeric"):
        Bank(features=np.array(["a", "b"]))
    with pytest.raises(OodometerError, match="one integer a row"):
        Bank(features=FEATURES, labels=np.eye(C)[LABELS])
    with pytest.raises(OodometerError, match="at least one column"):
        Bank()
    with pytest.raises(OodometerError, match="one entry a row"):
        Bank(features=np.float32(3))


def test_a_bank_is_read_only() -> None:
    given_array = FEATURES.copy()
    made = Bank(features=given_array)
    with pytest.raises(ValueError, match="read-only"):
        made.features[0, 0] = 1
    given_array[0, 0] = 1  # the caller's own array stays writable


def test_lists_and_mappings_are_columns_too() -> None:
    made = Bank({"layers.3": [[1.0, 2.0], [3.0, 4.0]]}, labels=[0, 1])
    assert made.columns == ("layers.3", "labels")
    assert made.layers == ("layers.3",)
    np.testing.assert_array_equal(made["layers.3"], [[1, 2], [3, 4]])


def test_the_number_of_classes_comes_from_the_head_then_the_logits_then_the_labels() -> None:
    assert bank().classes == C
    assert Bank(logits=LOGITS[:, :3]).classes == 3
    assert Bank(features=FEATURES, labels=np.full(N, 6)).classes == 7


def test_repr_says_what_is_there() -> None:
    assert repr(bank()) == "Bank(20 rows: features[6] float32, labels int64, head 4×6)"
    assert "2 parts" in repr(Bank.concat([bank(), bank()]))
    page = Bank({"<b>": FEATURES})._repr_html_()
    assert "&lt;b&gt;" in page
    assert "<td><b>" not in page


# ---------------------------------------------------------------------------------------------- rows and parts


@given(st.data())
def test_rows_of_rows_of_parts_are_rows_of_the_whole(data: st.DataObject) -> None:
    """Any chain of slices, masks and indices over joined parts reads what NumPy reads."""
    cuts = sorted(data.draw(st.lists(st.integers(0, N), max_size=3)))
    edges = [0, *cuts, N]
    pieces = [bank().rows(slice(a, b)) for a, b in itertools.pairwise(edges)]
    joined, expected = Bank.concat(pieces), FEATURES
    for _ in range(data.draw(st.integers(1, 3))):
        n = len(expected)
        kind = data.draw(st.sampled_from(["slice", "mask", "index"]))
        if kind == "slice":
            step = data.draw(st.sampled_from([1, 2, -1]))
            bounds = st.one_of(st.none(), st.integers(-n - 1, n + 1))
            index: object = slice(data.draw(bounds), data.draw(bounds), step)
        elif kind == "mask":
            index = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=bool)
        else:
            index = np.array(data.draw(st.lists(st.integers(-n, n - 1), max_size=8)) if n else [], dtype=int)
        joined, expected = joined.rows(index), expected[index]
        assert len(joined) == len(expected)
        np.testing.assert_array_equal(joined.features, expected)
    np.testing.assert_array_equal(np.concatenate([b.features for b in joined.blocks(3)] or [expected]), expected)


def test_concat_keeps_its_parts_and_copies_nothing() -> None:
    a, b = bank(), bank()
    joined = Bank.concat([Bank.concat([a]), b])
    assert joined.parts == (a, b)
    assert np.shares_memory(joined.rows(slice(0, 5)).features, FEATURES)


def test_concat_refuses_what_does_not_belong_together() -> None:
    with pytest.raises(OodometerError, match="bank 1 has 'features'"):
        Bank.concat([Bank(features=FEATURES, labels=LABELS), Bank(features=FEATURES)])
    with pytest.raises(OodometerError, match=r"\(6,\) in bank 0 and \(5,\) in bank 1"):
        Bank.concat([Bank(features=FEATURES), Bank(features=FEATURES[:, :5])])
    with pytest.raises(OodometerError, match="different heads"):
        Bank.concat([bank(), Bank(features=FEATURES, labels=LABELS, head=Head(HEAD.weight * 2, HEAD.bias))])
    with pytest.raises(OodometerError, match="at least one bank"):
        Bank.concat([])


def test_a_row_index_out_of_range_is_named() -> None:
    with pytest.raises(OodometerError, match="row index 20 is outside a bank of 20 rows"):
        bank().rows([3, 20])
    with pytest.raises(OodometerError, match="a row mask needs 20 entries"):
        bank().rows(np.ones(3, bool))
    with pytest.raises(OodometerError, match="list of integers"):
        bank().rows([0.5])


def test_select_with_columns_and_with_head() -> None:
    assert bank().select(["labels"]).columns == ("labels",)
    assert bank().with_columns(views=np.zeros((N, 2))).columns == ("features", "labels", "views")
    other = Head(HEAD.weight * 2, HEAD.bias)
    np.testing.assert_allclose(bank().with_head(other).logits, FEATURES @ other.weight.T + other.bias, rtol=1e-6)


# ---------------------------------------------------------------------------------------------- disk


def test_what_is_saved_is_opened_again_memory_mapped(tmp_path: Path) -> None:
    made = Bank({"layers.3": FEATURES.astype(np.float16)}, features=FEATURES, labels=LABELS, head=HEAD,
                provenance={"weights": "abc"})  # fmt: skip
    opened = Bank.open(made.save(tmp_path / "bank"))
    assert opened.columns == made.columns
    for name in made.columns:
        np.testing.assert_array_equal(opened[name], made[name])
        assert opened[name].dtype == made[name].dtype
    assert isinstance(opened._columns["features"], np.memmap)
    assert opened.head is not None
    assert opened.head.same_as(HEAD)
    assert opened.provenance == {"weights": "abc"}
    assert opened.fingerprint == made.fingerprint
    assert sorted(path.suffix for path in (tmp_path / "bank").iterdir()) == [".json", *[".npy"] * 5]


def test_parts_and_views_are_saved_as_one(tmp_path: Path) -> None:
    joined = Bank.concat([bank().rows([3, 1]), bank().rows(slice(5, 9))])
    opened = Bank.open(joined.save(tmp_path / "bank"))
    np.testing.assert_array_equal(opened.features, FEATURES[[3, 1, 5, 6, 7, 8]])


def test_an_empty_bank_can_be_saved(tmp_path: Path) -> None:
    assert len(Bank.open(bank().rows([]).save(tmp_path / "none"))) == 0


def test_saving_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = bank().save(tmp_path / "bank")
    with pytest.raises(OodometerError, match="exists"):
        bank().save(target)
    before = Bank.open(target).fingerprint

    def broken(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("oodometer.bank._write_column", broken)
    with pytest.raises(OSError, match="disk full"):
        Bank(features=FEATURES * 2).save(target, overwrite=True)
    monkeypatch.undo()
    assert Bank.open(target).fingerprint == before
    assert [path.name for path in tmp_path.iterdir()] == ["bank"]
    Bank(features=FEATURES * 2).save(target, overwrite=True)
    np.testing.assert_array_equal(Bank.open(target).features, FEATURES * 2)


def damage_truncate(folder: Path) -> None:
    file = next(folder.glob("*features.npy"))
    file.write_bytes(file.read_bytes()[:-10])


def damage_flip(folder: Path) -> None:
    file = next(folder.glob("*features.npy"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(bytes(content))


def damage_remove(folder: Path) -> None:
    next(folder.glob("*features.npy")).unlink()


def damage_facts(folder: Path) -> None:
    (folder / "bank.json").write_text("{")


def damage_schema(folder: Path) -> None:
    facts = json.loads((folder / "bank.json").read_text())
    (folder / "bank.json").write_text(json.dumps({**facts, "schema": 99}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncate, r"features\.npy has \d+ bytes, bank\.json says \d+"),
        (damage_flip, r"features\.npy does not match its checksum"),
        (damage_remove, r"features\.npy is missing"),
        (damage_facts, r"bank\.json is damaged"),
        (damage_schema, "schema 99"),
    ],
)
def test_a_damaged_bank_is_named(tmp_path: Path, damage: object, message: str) -> None:
    folder = bank().save(tmp_path / "bank")
    damage(folder)  # type: ignore[operator]
    with pytest.raises(OodometerError, match=message):
        Bank.open(folder)


def test_a_folder_that_is_no_bank_is_named(tmp_path: Path) -> None:
    with pytest.raises(OodometerError, match=r"no bank\.json"):
        Bank.open(tmp_path)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    """A column file replaced by a pickled object is refused even when its checksum is made to fit."""
    folder = bank().save(tmp_path / "bank")
    file = next(folder.glob("*features.npy"))
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(OodometerError, match="not a readable"):
        facts = json.loads((folder / "bank.json").read_text())
        facts["columns"]["features"]["bytes"] = file.stat().st_size
        (folder / "bank.json").write_text(json.dumps(facts))
        Bank.open(folder, verify=False)


def test_names_that_are_no_file_names_survive(tmp_path: Path) -> None:
    made = Bank({"layers.a/b": FEATURES, "layers.a_b": FEATURES + 1})
    opened = Bank.open(made.save(tmp_path / "bank"))
    np.testing.assert_array_equal(opened["layers.a/b"], FEATURES)
    np.testing.assert_array_equal(opened["layers.a_b"], FEATURES + 1)


# ---------------------------------------------------------------------------------------------- identity


def test_the_fingerprint_is_of_the_content_not_of_its_layout() -> None:
    whole = bank()
    joined = Bank.concat([whole.rows(slice(0, 7)), whole.rows(slice(7, N))])
    assert joined.fingerprint == whole.fingerprint == bank().fingerprint
    assert len({whole.fingerprint, whole.rows(slice(0, 19)).fingerprint, Bank(features=FEATURES).fingerprint}) == 3
    assert Bank(features=FEATURES.astype(np.float64)).fingerprint != Bank(features=FEATURES).fingerprint
    assert Bank(features=FEATURES, provenance={"a": 1}).fingerprint != Bank(features=FEATURES).fingerprint


def test_n1_thirty_networks_in_one_loop_never_share_what_was_derived() -> None:
    """A peer caches by object id; a new network at a freed address got another one's features."""
    from oodometer import create

    for seed in range(30):
        features = np.random.default_rng(seed).standard_normal((40, D)).astype(np.float32)
        scores = create("knn", k=3).fit(Bank(features=features)).score(Bank(features=FEATURES))
        unit, query = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (features, FEATURES))
        expected = np.sort(((query[:, None] - unit[None]) ** 2).sum(2), axis=1)[:, 2]
        np.testing.assert_allclose(scores, expected, atol=1e-6)


def test_a_bank_pickles_without_what_was_derived() -> None:
    made = bank()
    made.memory["large"] = np.zeros(10)
    copy = pickle.loads(pickle.dumps(made))
    assert copy.memory == {}
    assert copy.fingerprint == made.fingerprint


@pytest.mark.torch
def test_to_torch_and_back() -> None:
    import torch

    moved = Bank.concat([bank(), bank()]).to("torch")
    assert isinstance(moved.features, torch.Tensor)
    assert moved.features.dtype == torch.float32
    np.testing.assert_array_equal(moved.to("numpy").features, np.concatenate([FEATURES, FEATURES]))
    np.testing.assert_allclose(moved.logits.numpy(), np.concatenate([LOGITS, LOGITS]), rtol=1e-5, atol=1e-6)


@pytest.mark.torch
def test_torch_arrays_make_a_bank_that_saves(tmp_path: Path) -> None:
    import torch

    made = Bank(features=torch.from_numpy(FEATURES), labels=torch.from_numpy(LABELS))
    np.testing.assert_array_equal(Bank.open(made.save(tmp_path / "bank")).features, FEATURES)

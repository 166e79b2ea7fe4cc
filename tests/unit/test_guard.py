"""The guard: its state survives without pickle, its decisions follow from calibration rows, bad input never passes."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import betabinom
from tests.conformance.conftest import make_bank
from tests.conformance.test_detectors import made

from oodometer import Bank, Guard, Head, create, detectors, metrics, projected, tempered
from oodometer.detectors import Detector, base
from oodometer.errors import OodometerError, OodometerWarning
from oodometer.guard import calibrate, folder, state

pytestmark = pytest.mark.filterwarnings("ignore::oodometer.errors.OodometerWarning")

TRAIN, VAL, TEST, FAR = make_bank(1, 400), make_bank(2, 150), make_bank(3, 120), make_bank(4, 120, far=True)
CALIBRATION = make_bank(5, 200)
PARTS = Bank.concat([TRAIN.rows(slice(0, 150)), TRAIN.rows(np.arange(150, 400))])

VARIANTS: dict[str, tuple[Callable[[], Detector], Bank]] = {
    "knn of positions": (lambda: create("knn", k=3, normalise=False, squared=False), TRAIN),
    "knn of joined parts": (lambda: create("knn", k=10), PARTS),
    "relation of joined parts": (lambda: create("relation", power=2), PARTS),
    "nnguide of a share": (lambda: create("nnguide", k=5, alpha=0.3, subset="per_class"), PARTS),
    "nnguide without logits": (lambda: create("nnguide", k=5), TRAIN.select(["features", "labels"])),
    "tempered nnguide": (lambda: tempered(create("nnguide", k=5)), TRAIN),
    "tempered openmax": (lambda: tempered("openmax"), TRAIN),
    "kpca corp": (lambda: create("kpca", method="corp", features=64), TRAIN),
    "kpca cop": (lambda: create("kpca", method="cop"), TRAIN),
    "gmm full": (lambda: create("gmm", covariance="full", ridge=0.1), TRAIN),
    "gmm of a number": (lambda: create("gmm", components=3, ridge=0.1), TRAIN),
    "mcd_mean of klm": (lambda: create("mcd_mean", detector="klm"), TRAIN),
    "vim by share": (lambda: create("vim", dim=0.9, origin="mean"), TRAIN),
    "projected vote of classes": (lambda: projected("energy", "class"), TRAIN),
    "projected mds": (lambda: projected("mds", "class_pred"), TRAIN),
    "projected knn": (lambda: projected(create("ctmmean"), "class_avg"), TRAIN),
    "projected pca": (lambda: projected("pca", "class"), TRAIN),
    "projected kpca": (lambda: projected("kpca", "class_pred"), TRAIN),
    "projected ctm": (lambda: projected("ctm", "class"), TRAIN),
    "projected tempered": (lambda: projected(tempered("msp"), "class"), TRAIN),
}

SCORE_ALL = """
import sys, warnings
from pathlib import Path
import numpy as np
from oodometer import Bank, Head, Guard
warnings.simplefilter("ignore")
root = Path(sys.argv[1])
test = Bank.open(root / "test")
for path in sorted((root / "guards").iterdir()):
    np.save(root / "scores" / f"{path.name}.npy", np.stack(Guard.load(path)(test)[1:]))
loaded = {name.partition(".")[0] for name in sys.modules} | {".".join(name.split(".")[:2]) for name in sys.modules}
print(*sorted(loaded & {"torch", "pandas", "oodometer.study", "oodometer.models", "oodometer.results", "pickle5"}))
"""


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray], str]:
    """Every detector fitted, saved, and scored again by a process of its own, and what that process had loaded."""
    root, raw = tmp_path_factory.mktemp("guards"), {}
    every = {name: (lambda name=name: made(name), TRAIN) for name in detectors.names()} | VARIANTS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (make, train) in every.items():
            raw[name] = make().fit(train, val=VAL).score(TEST)
            Guard.fit(make(), train, CALIBRATION, val=VAL).save(root / "guards" / name)
    TEST.save(root / "test")
    (root / "scores").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SCORE_ALL, str(root)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return root, raw, done.stdout.strip()


@pytest.fixture(scope="module")
def guard() -> Guard:
    return Guard.fit(create("knn", k=10), TRAIN, CALIBRATION)


@pytest.fixture
def saved(guard: Guard, tmp_path: Path) -> Path:
    return guard.save(tmp_path / "guard")


# --- state ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*detectors.names(), *VARIANTS])
def test_scores_are_the_same_bytes_in_a_process_that_only_loads(
    name: str, reloaded: tuple[Path, dict[str, np.ndarray], str]
) -> None:
    root, raw, _ = reloaded
    scores, p_values = np.load(root / "scores" / f"{name}.npy")
    assert scores.tobytes() == raw[name].tobytes()
    calibration = Guard.load(root / "guards" / name).calibration.scores
    assert np.array_equal(p_values, [(1 + (calibration >= s).sum()) / 201 for s in scores])


def test_loading_needs_neither_torch_nor_pandas_nor_a_study(reloaded: tuple[Path, dict[str, np.ndarray], str]) -> None:
    assert reloaded[2] == ""


def test_a_folder_holds_json_and_safetensors_alone(reloaded: tuple[Path, dict[str, np.ndarray], str]) -> None:
    files = {file.name for path in (reloaded[0] / "guards").iterdir() for file in path.iterdir()}
    assert files == {"guard.json", "arrays.safetensors"}


def test_a_search_keeps_the_columns_it_reads_and_maps_them_from_the_disk(saved: Path) -> None:
    train = Guard.load(saved).detector.train_
    assert train.columns == ("features",)
    base_array = train.features
    while isinstance(base_array.base, np.ndarray):
        base_array = base_array.base
    assert isinstance(base_array, np.memmap)
    assert np.array_equal(train.features, TRAIN.features)


def test_equal_fits_give_equal_arrays(tmp_path: Path) -> None:
    paths = [Guard.fit("vim", TRAIN, CALIBRATION).save(tmp_path / name) for name in "ab"]
    one, other = ((path / folder.ARRAYS).read_bytes() for path in paths)
    assert one == other


def test_every_kind_of_value_comes_back_as_it_was(planted: type[Detector]) -> None:
    values = {
        "a": [1, 1.0, True, None, "π", (), {}],
        "b": (np.float32(0.1), np.int8(-3), np.bool_(True), np.float64(2.5)),
        "c": {1: float("inf"), "x": -0.0, (2, "y"): [float("-inf")]},
        "d": np.zeros((0, 3), np.float16),
        "e": np.array(7, np.uint16),
        "f": np.arange(12.0).reshape(3, 4).T,
        "g": np.arange(24, dtype=">i4").reshape(2, 3, 4)[:, ::-1, ::2],
    }
    detector = planted()
    detector.learned_ = values
    found = state.decode(*state.encode(detector)).learned_
    for key in "abc":
        assert repr(found[key]) == repr(values[key])
    assert [type(item) for item in found["b"]] == [np.float32, np.int8, np.bool_, np.float64]
    assert [type(item) for item in found["a"][:3]] == [int, float, bool]
    for key in "defg":
        assert found[key].dtype.newbyteorder("=") == values[key].dtype.newbyteorder("=")
        assert np.array_equal(found[key], values[key])
    assert found["f"].flags.f_contiguous
    nan = planted()
    nan.learned_ = float("nan")
    assert np.isnan(state.decode(*state.encode(nan)).learned_)


def test_an_array_that_is_held_twice_is_stored_once() -> None:
    _, arrays = state.encode(create("nnguide", k=5).fit(TRAIN))
    assert len([name for name in arrays if name.endswith("weight")]) == 1


@pytest.fixture
def planted() -> Iterator[type[Detector]]:
    @detectors.detector("planted", needs={"features"})
    class Planted(Detector):
        """Learns whatever a test says."""

        what: Any = None

        def _fit(self, train: Bank, xp: Any) -> None:
            self.learned_ = self.what() if callable(self.what) else 1.0

        def _score(self, bank: Bank, xp: Any) -> Any:
            return bank.features[:, 0] * self.learned_

    yield Planted
    del base._REGISTRY["planted"]


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, lambda: 0, np.array(["a"]), np.zeros(2, complex), 1 << 80, np.array([object()])],
    ids=["object", "set", "function", "text array", "complex", "huge integer", "object array"],
)
def test_state_that_cannot_be_saved_is_named(planted: type[Detector], value: object, tmp_path: Path) -> None:
    detector = planted()
    detector.learned_ = {"deep": [value]}
    with pytest.raises(OodometerError, match=r"planted: a guard cannot save 'learned_\[deep\]\[0\]'"):
        state.encode(detector)


def test_a_detector_of_ones_own_must_be_known_where_it_is_loaded(planted: type[Detector], tmp_path: Path) -> None:
    path = Guard.fit(planted(), TRAIN, CALIBRATION).save(tmp_path / "g")
    found = Guard.load(path)(TEST).score
    assert np.array_equal(found, TEST.features[:, 0].astype(np.float64))
    kept = base._REGISTRY.pop("planted")
    with pytest.raises(OodometerError, match=r"'planted' cannot be restored: .* must be imported before"):
        Guard.load(path)
    base._REGISTRY["planted"] = kept


# --- files ------------------------------------------------------------------------------------------------------


def rewritten(path: Path, change: Callable[[dict[str, Any]], None], *, sign: bool) -> None:
    """guard.json with a change; signed anew, as someone who knows the format would."""
    plain = json.loads((path / folder.FACTS).read_text())
    change(plain)
    if sign:
        del plain["digest"]
        plain["digest"] = folder._digest(plain)
    (path / folder.FACTS).write_text(json.dumps(plain))


def test_a_guard_comes_back_with_its_facts(guard: Guard, saved: Path) -> None:
    loaded = Guard.load(saved)
    assert loaded.facts == guard.facts
    assert repr(loaded) == repr(guard)
    assert (loaded.threshold, loaded.calibration.tail) == (guard.threshold, guard.calibration.tail)
    for one, other in zip(loaded(FAR), guard(FAR), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("file", [folder.FACTS, folder.ARRAYS])
@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "empty"])
def test_damaged_files_are_named(saved: Path, file: str, damage: str) -> None:
    path = saved / file
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        middle = len(content) // 2
        changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        path.write_bytes({"cut": content[:-20], "changed": changed, "empty": b""}[damage])
    with pytest.raises(OodometerError, match=file.replace(".", r"\.")):
        Guard.load(saved)


def test_every_single_change_of_the_json_is_noticed(saved: Path) -> None:
    content = (saved / folder.FACTS).read_text()
    place = content.index('"threshold"') + content[content.index('"threshold"') :].index(".") + 1
    (saved / folder.FACTS).write_text(content[:place] + str((int(content[place]) + 1) % 10) + content[place + 1 :])
    with pytest.raises(OodometerError, match=r"guard\.json is damaged \(it was edited"):
        Guard.load(saved)


def test_checksums_of_arrays_can_be_skipped_but_not_their_size(saved: Path) -> None:
    assert Guard.load(saved, verify=False).threshold == Guard.load(saved).threshold
    (saved / folder.ARRAYS).write_bytes((saved / folder.ARRAYS).read_bytes() + b"0")
    with pytest.raises(OodometerError, match="truncated"):
        Guard.load(saved, verify=False)


EVIL: dict[str, Callable[[dict[str, Any]], None]] = {
    "a class outside": lambda d: d["detector"]["learned"]["head_"].update(kind="subprocess.Popen"),
    "a class that is no record": lambda d: d["detector"]["learned"]["head_"].update(
        kind="oodometer.detectors.base.Detector"
    ),
    "an unknown detector": lambda d: d["detector"].update(name="os.system"),
    "an attribute of Python's": lambda d: d["detector"]["learned"].update(__class__=1),
    "a method": lambda d: d["detector"]["learned"].update(score=1),
    "an unknown parameter": lambda d: d["detector"]["params"].update(evil=1),
    "a parameter out of range": lambda d: d["detector"]["params"].update(k=-1),
    "an unknown kind of node": lambda d: d["detector"]["learned"]["head_"].update({"is": "pickle"}),
    "a missing field": lambda d: d["detector"]["learned"]["head_"]["fields"].pop("bias"),
    "a missing array": lambda d: d["detector"]["learned"]["head_"]["fields"]["bias"].update(name="x"),
    "a detector that is not fitted": lambda d: d["detector"].update(fitted=False),
    "a later schema": lambda d: d.update(schema=2),
    "an entry too many": lambda d: d.update(more=1),
    "an entry too few": lambda d: d.pop("tail"),
}


@pytest.mark.parametrize("change", EVIL.values(), ids=EVIL)
def test_a_folder_can_name_nothing_but_detectors_and_their_records(
    saved: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    rewritten(saved, change, sign=False)
    with pytest.raises(OodometerError, match="edited"):
        Guard.load(saved)
    rewritten(saved, lambda d: None, sign=True)
    with pytest.raises(OodometerError, match=str(saved)):
        Guard.load(saved)


def test_another_version_is_said(saved: Path) -> None:
    rewritten(saved, lambda d: d.update(version="0.0.9"), sign=True)
    with pytest.warns(OodometerWarning, match=r"saved by oodometer 0\.0\.9"):
        Guard.load(saved)


def test_nothing_but_a_guard_is_replaced(guard: Guard, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(OodometerError, match="exists: choose another folder, or pass overwrite=True"):
        guard.save(saved)
    other = Guard.fit("mls", TRAIN, CALIBRATION)
    other.save(saved, overwrite=True)
    assert repr(Guard.load(saved)) == repr(other)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    with pytest.raises(OodometerError, match="is no guard and is not replaced"):
        guard.save(tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years"
    assert {path.name for path in tmp_path.iterdir()} == {"guard", "mine"}
    with pytest.raises(OodometerError, match="is not a saved guard"):
        Guard.load(tmp_path / "mine")
    with pytest.raises(OodometerError, match="is not a saved guard"):
        Guard.load(tmp_path / "absent")


def test_a_failed_save_leaves_the_earlier_guard(guard: Guard, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(OSError, match="No space"):
        guard.save(saved, overwrite=True)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in saved.parent.iterdir()] == ["guard"]


# --- thresholds -------------------------------------------------------------------------------------------------


def test_the_threshold_is_the_rules(guard: Guard) -> None:
    detector = create("knn", k=10).fit(TRAIN)
    scores, far = detector.score(CALIBRATION), detector.score(FAR)
    assert guard.threshold == metrics.threshold_conformal(scores, alpha=0.05) == np.sort(scores)[190]
    assert guard.calibration.rate == 10 / 201
    at_tnr = Guard.fit(create("knn", k=10), TRAIN, CALIBRATION, rule="tnr", tnr=0.9)
    assert at_tnr.threshold == metrics.threshold_at_tnr(scores, tnr=0.9)
    assert at_tnr.calibration.rate == 21 / 201
    val = Guard.fit(create("knn", k=10), TRAIN, CALIBRATION, rule="val", ood_validation=FAR)
    assert val.threshold == metrics.threshold_equal_error(scores, far)
    assert val.calibration.rate == 10 / 201


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("alpha", [0.05, 0.29, 0.5, 0.93])
def test_flagged_rows_are_those_with_a_p_value_in_the_tail(ties: bool, alpha: float) -> None:
    rng = np.random.default_rng(0)
    scores, new = rng.standard_normal(99), rng.standard_normal(500)
    if ties:
        scores, new = np.round(scores), np.round(new)
    for chosen in (calibrate(scores, alpha=alpha), calibrate(scores, "tnr", tnr=1 - alpha)):
        p = chosen.p_values(new)
        assert np.array_equal(p, [(1 + sum(c >= s for c in scores)) / 100 for s in new])
        assert np.array_equal(new > chosen.threshold, p <= chosen.rate)


def test_too_few_calibration_rows_are_refused() -> None:
    few = CALIBRATION.rows(slice(0, 18))
    with pytest.raises(OodometerError, match=r"alpha = 0\.05 needs at least 19 calibration scores, 18 were found"):
        Guard.fit("mls", TRAIN, few)
    with pytest.raises(OodometerError, match=r"tnr = 0\.95 needs at least 19 calibration scores, 18 were found"):
        Guard.fit("mls", TRAIN, few, rule="tnr")
    with pytest.raises(OodometerError, match="needs at least 19"):
        Guard.fit("mls", TRAIN, few, rule="val", ood_validation=FAR)
    assert Guard.fit("mls", TRAIN, CALIBRATION.rows(slice(0, 19))).calibration.tail == 1
    assert Guard.fit("mls", TRAIN, few.rows(slice(0, 9)), rule="tnr", tnr=0.9).calibration.tail == 1
    with pytest.raises(OodometerError, match="at least one score"):
        Guard.fit("mls", TRAIN, few.rows(slice(0, 0)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 5}, r"alpha must be a fraction in \(0, 1\) \(5 % is \.05\); found 5"),
        ({"alpha": float("nan")}, "alpha must be a fraction"),
        ({"rule": "tnr", "tnr": 1.0}, "tnr must be a fraction"),
        ({"rule": "fpr"}, "rule must be 'conformal', 'tnr' or 'val'; found 'fpr'"),
        ({"rule": "val"}, "pass ood_validation=Bank"),
        ({"ood_validation": FAR}, "read by rule='val' alone, and the rule is 'conformal'"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_fitted(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OodometerError, match=message):
        Guard.fit("mls", Bank(features=np.zeros((0, 3))), CALIBRATION, **settings)


def test_arrays_in_place_of_banks_are_named_by_their_role() -> None:
    for role, banks in {"train": (TRAIN.features, CALIBRATION), "calibration": (TRAIN, None)}.items():
        with pytest.raises(OodometerError, match=f"the {role} rows must be a Bank, found (ndarray|NoneType)"):
            Guard.fit("mls", *banks)
    guard = Guard.fit("mls", TRAIN, CALIBRATION)
    with pytest.raises(OodometerError, match="the ID rows must be a Bank"):
        guard.check(TEST.features)
    with pytest.raises(OodometerError, match="the far rows must be a Bank"):
        guard.check(TEST, {"far": FAR.features})


def test_rows_that_were_fitted_on_are_counted() -> None:
    with pytest.warns(OodometerWarning, match="200 of 200 calibration rows are rows of the train bank too"):
        Guard.fit("mls", TRAIN, TRAIN.rows(np.arange(200)))
    mixed = Bank.concat([CALIBRATION, VAL.rows([3, 5])])
    with pytest.warns(OodometerWarning, match="2 of 202 calibration rows are rows of the val bank too"):
        Guard.fit(create("react"), TRAIN, mixed, val=VAL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Guard.fit(create("react"), TRAIN, CALIBRATION, val=VAL)


def test_the_given_detector_stays_as_it_is() -> None:
    detector = create("vim", dim=8)
    Guard.fit(detector, TRAIN, CALIBRATION)
    assert not detector.is_fitted


def test_facts_say_what_was_fitted_on_what(guard: Guard) -> None:
    facts = guard.facts
    assert facts["detector"] == "KNN(k=10)"
    assert facts["fingerprints"] == {"train": TRAIN.fingerprint, "calibration": CALIBRATION.fingerprint}
    assert facts["rows"] == {"train": 400, "calibration": 200}
    assert (facts["n_calibration"], facts["alpha"], facts["threshold"]) == (200, 0.05, guard.threshold)
    assert facts["fitted"].endswith("+00:00")
    assert repr(guard) == (
        f"Guard(KNN(k=10), rule='conformal', alpha=0.05: out of distribution above {guard.threshold:.6g}, "
        "from 200 calibration rows)"
    )


# --- calls ------------------------------------------------------------------------------------------------------


def test_banks_arrays_and_single_rows_get_the_same_decisions(guard: Guard) -> None:
    decision, score, p_value = guard(FAR)
    assert decision.dtype == bool
    assert decision.mean() > 0.9
    assert guard(TEST).decision.mean() < 0.2
    assert np.array_equal(guard(features=FAR.features).score, score)
    assert np.array_equal(guard(features=FAR.features.tolist()).decision, decision)
    for row in (0, 7):
        one = guard(features=FAR.features[row])
        assert [type(value) for value in one] == [bool, float, float]
        assert one.decision == decision[row]
        assert one.p_value == p_value[row]
        assert one.score == pytest.approx(score[row], rel=1e-5)
    assert [len(values) for values in guard(features=FAR.features[:0])] == [0, 0, 0]


def test_logits_alone_serve_a_detector_of_logits() -> None:
    guard = Guard.fit("mls", TRAIN.select(["features", "labels"]), CALIBRATION)
    assert guard(logits=TEST.logits[4]).score == pytest.approx(-TEST.logits[4].max())
    assert np.array_equal(guard(logits=TEST.logits).score, -TEST.logits.max(1).astype(np.float64))


@pytest.mark.torch
def test_tensors_are_taken_and_a_guard_fitted_on_them_is_the_same() -> None:
    torch = pytest.importorskip("torch")
    moved = Guard.fit("knn", TRAIN.to("torch"), CALIBRATION.to("torch"))
    plain = Guard.fit("knn", TRAIN, CALIBRATION)
    assert isinstance(moved.detector.train_.features, np.ndarray)
    assert moved(features=torch.as_tensor(np.array(TEST.features))).score.tobytes() == plain(TEST).score.tobytes()
    assert moved(TEST.to("torch")).decision.tolist() == plain(TEST).decision.tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_never_decided_on(guard: Guard, value: float) -> None:
    bad = np.array(TEST.features)
    bad[5, 2] = value
    stream = guard.stream()
    for call in (guard, stream):
        with pytest.raises(OodometerError, match="row 5"):
            call(features=bad)
        with pytest.raises(OodometerError, match="NaN or infinity"):
            call(features=bad[5])
    assert stream.rows == 0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "no columns were given; knn reads features"),
        ({"logits": TEST.logits}, "knn needs 'features' in the score bank; it has logits"),
        ({"features": TEST.features[:, :-1]}, r"'features' has shape \(120, 23\); rows of shape \(24,\)"),
        ({"features": TEST.features[0, :-1]}, r"'features' has shape \(23,\); rows of shape \(24,\)"),
        ({"features": TEST.features[None]}, r"shape \(1, 120, 24\)"),
        ({"features": TEST.features[0], "logits": TEST.logits}, "some columns hold one row and others many"),
        ({"features": TEST.features, "logits": TEST.logits[:5]}, "same number of rows"),
        ({"features": [["a"] * 24]}, "must be numeric"),
    ],
)
def test_wrong_arrays_are_explained(guard: Guard, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(OodometerError, match=message):
        guard(**columns)


def test_what_is_no_bank_and_another_networks_bank_are_refused(guard: Guard) -> None:
    with pytest.raises(OodometerError, match="found ndarray"):
        guard(TEST.features)
    with pytest.raises(OodometerError, match="not both"):
        guard(TEST, features=TEST.features)
    known = make_bank(9, 10).head
    other = Bank(features=TEST.features, head=Head(known.weight + 1, known.bias))
    with pytest.raises(OodometerError, match="two networks"):
        guard(other)


# --- check ------------------------------------------------------------------------------------------------------


def test_errors_on_fresh_rows_against_the_promise(guard: Guard) -> None:
    check = guard.check(TEST, {"far": FAR})
    scores, far = guard.detector.score(TEST), guard.detector.score(FAR)
    k = int((scores > guard.threshold).sum())
    assert check.fpr.share == metrics.wilson(k, 120)
    assert check.fnr["far"].share == metrics.wilson(int((far <= guard.threshold).sum()), 120)
    assert check.fnr["far"].rule == check.fpr.rule == "@alpha=0.05"
    assert check.promised == 10 / 201
    assert check.p_value == pytest.approx(betabinom(120, 10, 191).sf(k - 1), rel=1e-9)
    assert check.kept
    broken = guard.check(FAR)
    assert not broken.kept
    assert "BREAKS the promise of at most 4.975 %" in str(broken)


def test_the_threshold_never_sees_the_evaluated_set_but_under_its_name() -> None:
    val = Guard.fit("mls", TRAIN, CALIBRATION, rule="val", ood_validation=FAR)
    near = make_bank(8, 90, far=True)
    before = (val.threshold, val.calibration.scores.tobytes())
    check = val.check(TEST, {"seen": FAR, "new": near})
    assert {name: one.rule for name, one in check.fnr.items()} == {"seen": "@test", "new": "@val"}
    assert (check.promised, check.p_value, check.kept) == (None, None, True)
    assert "no FPR was promised" in str(check)
    assert (val.threshold, val.calibration.scores.tobytes()) == before
    others = [val.check(TEST, {"new": other}).threshold for other in (near, make_bank(11, 50), FAR)]
    assert set(others) == {val.threshold}


def test_rows_the_guard_was_made_on_measure_nothing(guard: Guard) -> None:
    with pytest.warns(OodometerWarning, match="those of the calibration bank"):
        guard.check(CALIBRATION)
    with pytest.raises(OodometerError, match="the far bank has no rows"):
        guard.check(TEST, {"far": FAR.rows(slice(0, 0))})

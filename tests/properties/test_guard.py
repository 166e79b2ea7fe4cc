"""The guard's guarantees, by simulation and in closed form: conformal coverage, and the stream test's false alarms."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy.special import betaln, logsumexp
from scipy.stats import beta, kstest

from oodometer import Bank, Guard
from oodometer.errors import OodometerError
from oodometer.guard import Stream, calibrate
from oodometer.guard.stream import Evidence

DRAWS = 10_000


def within_binomial_error(count: int, draws: int, rate: float) -> bool:
    """Four standard deviations: a true statement fails once in 16,000 seeds."""
    return abs(count - draws * rate) <= 4 * (draws * rate * (1 - rate)) ** 0.5


def guard_on(rows: int, *, alpha: float = 0.05, seed: int = 0, **rule: object) -> Guard:
    """A guard whose scores are −max of two normal logits."""
    train, calibration = (Bank(logits=np.random.default_rng((seed, n)).standard_normal((n, 2))) for n in (40, rows))
    return Guard.fit("mls", train, calibration, alpha=alpha, **rule)


# --- conformal --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "alpha"), [(19, 0.05), (50, 0.05), (200, 0.05), (99, 0.1), (30, 0.29), (999, 0.001)])
def test_a_new_row_is_flagged_as_often_as_promised(n: int, alpha: float) -> None:
    """Each draw has calibration rows and a new row of its own, scored by one fitted detector."""
    detector = guard_on(2000).detector
    rng, flagged, small = np.random.default_rng(n), 0, 0
    for _ in range(DRAWS // 500):
        logits = rng.standard_t(3, (500 * (n + 1), 2))
        for scores in detector.score(Bank(logits=logits)).reshape(500, n + 1):
            chosen = calibrate(scores[:n], alpha=alpha)
            flagged += bool(scores[n] > chosen.threshold)
            small += bool(chosen.p_values(scores[n:])[0] <= alpha)
    assert chosen.rate <= alpha
    assert within_binomial_error(flagged, DRAWS, chosen.rate)
    assert small == flagged


def test_ties_flag_less_never_more() -> None:
    rng = np.random.default_rng(0)
    scores = np.round(rng.exponential(1, (DRAWS, 100)))
    flagged = sum(row[99] > calibrate(row[:99]).threshold for row in scores)
    assert flagged < DRAWS * 0.05 - 4 * (DRAWS * 0.05 * 0.95) ** 0.5


def test_the_fpr_of_one_guard_follows_the_beta_law() -> None:
    """Given its calibration rows a guard's own FPR is Beta(l, n + 1 − l) (Vovk, ACML 2012), not alpha."""
    rng = np.random.default_rng(1)
    fpr = [1 - calibrate(rng.random(99), alpha=0.1).threshold for _ in range(2000)]
    assert kstest(fpr, beta(10, 90).cdf).pvalue > 0.01


@pytest.mark.parametrize(("alpha", "fewest"), [(0.05, 19), (0.1, 9), (0.01, 99), (0.3, 3), (0.001, 999), (0.07, 14)])
def test_sets_too_small_for_the_promise_are_refused(alpha: float, fewest: int) -> None:
    with pytest.raises(OodometerError, match=f"at least {fewest} calibration scores, {fewest - 1} were found"):
        guard_on(fewest - 1, alpha=alpha)
    assert guard_on(fewest, alpha=alpha).calibration.tail == 1


def test_p_values_are_uniform_on_their_ranks() -> None:
    rng = np.random.default_rng(2)
    p = np.array([calibrate(row[:19]).p_values(row[19:])[0] for row in rng.standard_normal((DRAWS, 20))])
    counts = np.bincount(np.rint(20 * p).astype(int), minlength=21)[1:]
    assert counts.sum() == DRAWS
    assert ((counts - DRAWS / 20) ** 2 / (DRAWS / 20)).sum() < 43.8  # χ² with 19 degrees of freedom, p = .001


# --- the stream -------------------------------------------------------------------------------------------------


def urn(tail: int, rest: int, rows: np.ndarray) -> float:
    """Probability of a sequence of tail rows under a Pólya urn, ball by ball."""
    p, balls = 1.0, [rest, tail]
    for row in rows.astype(int):
        p *= balls[row] / sum(balls)
        balls[row] += 1
    return p


@pytest.mark.parametrize(("tail", "rest"), [(1, 19), (5, 95), (3, 4), (9, 1)])
def test_the_evidence_is_a_martingale_of_the_law_of_the_tail(tail: int, rest: int) -> None:
    sequences = [np.array(rows, bool) for rows in product((0, 1), repeat=10)]
    paths = np.exp([Evidence(tail, rest).extend(rows) for rows in sequences])
    weights = np.array([urn(tail, rest, rows) for rows in sequences])
    assert weights.sum() == pytest.approx(1)
    assert weights @ paths == pytest.approx(np.ones(10))
    assert paths.max() > 2 or rest == 1


def test_the_evidence_is_the_mean_of_beta_binomial_ratios() -> None:
    rng = np.random.default_rng(0)
    rows, tail, rest = rng.random(3000) < 0.1, 50, 951
    evidence = Evidence(tail, rest)
    found = evidence.extend(rows)
    k, m, c = np.cumsum(rows), np.arange(1, 3001), evidence._moved[:, None]
    shifted = betaln(tail + c + k, rest - c + m - k) - betaln(tail + c, rest - c)
    plain = betaln(tail + k, rest + m - k) - betaln(tail, rest)
    assert found == pytest.approx(logsumexp(shifted - plain, axis=0) - np.log(len(c)), abs=1e-8)


def test_a_row_in_the_tail_always_adds_evidence() -> None:
    """Ties can only take rows out of the tail: then there is less evidence than under the law without ties."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows = rng.random(300) < rng.choice([0.02, 0.05, 0.3])
        more = rows | (rng.random(300) < 0.05)
        assert (Evidence(5, 96).extend(more) >= Evidence(5, 96).extend(rows) - 1e-12).all()


def false_alarms(streams: int, rows: int, n: int, *, trust: int = 1, **settings: float) -> int:
    """How many unshifted streams are ever called shifted; `trust` > 1 pretends to more calibration rows."""
    rng, found, guard = np.random.default_rng(n), 0, guard_on(n)
    tail, rest = guard.calibration.tail, n + 1 - guard.calibration.tail
    for _ in range(streams):
        stream = Stream(guard, **settings)
        stream._whole = Evidence(trust * tail, trust * rest)
        threshold = calibrate(rng.random(n)).threshold
        stream._take(rng.random(rows) > threshold)
        found += stream.shifted
    return found


@pytest.mark.parametrize("n", [19, 100, 1000])
def test_unshifted_streams_are_rarely_ever_called_shifted(n: int) -> None:
    delta, streams = 0.1, 300
    found = false_alarms(streams, 4000, n, delta=delta)
    assert found <= delta * streams + 4 * (streams * delta * (1 - delta)) ** 0.5
    assert found < streams / 10


def test_a_test_that_takes_alpha_for_the_rate_would_cry_wolf() -> None:
    """Why the law is beta-binomial: half of all guards have an FPR above alpha, and a long stream tells."""
    assert false_alarms(100, 20_000, 100, trust=1000, delta=0.01, window=100_000) > 10


def test_shifted_streams_are_noticed_early_and_late() -> None:
    guard = guard_on(500)
    at_once, late = [], []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        stream = guard.stream()
        stream._take(rng.random(1000) < 0.25)
        at_once.append(stream.shifted)
        stream = guard.stream()
        stream._take(rng.random(20_000) < 0.05)
        assert not stream.shifted
        stream._take(rng.random(1000) < 0.5)
        late.append(stream.shifted)
        assert not stream.shifted or stream.shifted_at >= 20_000
    assert sum(at_once) == sum(late) == 40


def test_batches_do_not_matter() -> None:
    guard, rng = guard_on(200), np.random.default_rng(3)
    logits = np.concatenate([rng.standard_normal((3000, 2)), rng.standard_normal((700, 2)) - 1])
    whole, pieces, rows = guard.stream(window=250), guard.stream(window=250), guard.stream(window=250)
    together = whole(logits=logits)
    parts = [pieces(logits=block) for block in np.array_split(logits, [1, 249, 250, 251, 999, 3001])]
    singles = [rows(logits=row).decision for row in logits]
    assert np.concatenate([part.decision for part in parts]).tolist() == together.decision.tolist() == singles
    facts = [
        (s.rows, s.alarms, s.p_value, s.shifted_at, s.alarm_rate, s.recent_alarm_rate, str(s))
        for s in (whole, pieces, rows)
    ]
    assert facts[0] == facts[1] == facts[2]
    assert whole.shifted_at is not None
    assert whole.alarm_rate == together.decision.mean() == whole.tail_rate
    assert whole.recent_alarm_rate == together.decision[-250:].mean()
    assert "SHIFTED, noticed at row" in str(whole)


def test_memory_does_not_grow_with_the_stream() -> None:
    stream = guard_on(100).stream(window=500)

    def held() -> int:
        evidence = [stream._whole, stream._part]
        return len(stream._latest) + sum(np.size(value) for one in evidence for value in vars(one).values())

    stream(logits=np.zeros((600, 2)))
    before = held()
    stream(logits=np.zeros((50_000, 2)))
    assert held() == before
    assert stream.rows == 50_600


def test_a_stream_under_the_val_rule_watches_the_tail_beside_its_alarms() -> None:
    ood = Bank(logits=np.random.default_rng(0).standard_normal((80, 2)) - 2)
    guard = guard_on(400, rule="val", ood_validation=ood)
    stream = guard.stream()
    rows = np.random.default_rng(5).standard_normal((2000, 2))
    found = stream(logits=rows)
    assert stream.alarm_rate == found.decision.mean() > 0.1
    assert stream.tail_rate == (found.p_value <= 20 / 401).mean() < 0.08
    assert stream.expected_rate == 20 / 401
    assert not stream.shifted
    assert "% in the tail, expected at most 4.99 %; no evidence of a shift" in str(stream)


def test_an_empty_stream_and_wrong_settings() -> None:
    stream = guard_on(50).stream()
    assert (stream.rows, stream.p_value, stream.shifted) == (0, 1.0, False)
    assert np.isnan([stream.alarm_rate, stream.recent_alarm_rate, stream.tail_rate]).all()
    assert str(stream) == "no rows yet"
    stream(logits=np.zeros((0, 2)))
    assert stream.rows == 0
    for settings, message in (({"delta": 0}, "delta must be a probability"), ({"window": 0}, "window must be")):
        with pytest.raises(OodometerError, match=message):
            guard_on(50).stream(**settings)

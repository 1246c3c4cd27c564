"""Statistics against published tables, closed forms, brute force and simulation."""

import itertools
import math

import numpy as np
import pytest
from draws import examples
from hypothesis import given
from hypothesis import strategies as st

from turnwise.evaluate.statistics import (
    mcnemar,
    mean_interval,
    paired_bootstrap,
    paired_share_interval,
    pairs_to_settle,
    sign_flip_test,
    t_quantile,
    tasks_to_settle,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [  # Newcombe 1998, table I, method 3 (score without continuity correction)
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_equals_the_published_table(
    successes: int, total: int, low: float, high: float
) -> None:
    interval = wilson(successes, total)
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
@examples(60)
def test_wilson_solves_its_own_equation(case: tuple[int, int]) -> None:
    successes, total = case
    interval = wilson(successes, total)
    z = 1.959963984540054
    for bound in {interval.low, interval.high} - {0.0, 1.0}:
        error = math.sqrt(bound * (1 - bound) / total)
        assert abs(abs(successes / total - bound) - z * error) < 1e-9
    mirrored = wilson(total - successes, total)
    assert interval.low == pytest.approx(1 - mirrored.high, abs=1e-12)


@pytest.mark.parametrize(
    ("probability", "degrees", "value"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.3027),
        (0.95, 5, 2.0150),
        (0.995, 30, 2.7500),
        (0.975, 255, 1.9693),
    ],
)
def test_t_quantiles_equal_the_table(probability: float, degrees: int, value: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(value, abs=6e-5)
    assert t_quantile(1 - probability, degrees) == pytest.approx(-value, abs=6e-5)


def test_mean_interval_covers_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    covered = sum(
        interval.low <= 3.0 <= interval.high
        for interval in (mean_interval(list(random.normal(3.0, 2.0, size=6))) for _ in range(800))
    )
    assert wilson(covered, 800, level=0.999).low <= 0.95 <= wilson(covered, 800, level=0.999).high


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 0), (5, 0), (2, 7), (4, 4)])
def test_mcnemar_equals_counting_all_outcomes(only_a: int, only_b: int) -> None:
    total = only_a + only_b
    extreme = abs(only_a - only_b)
    outcomes = [sum(signs) for signs in itertools.product((1, -1), repeat=total)]
    assert mcnemar(only_a, only_b) == pytest.approx(np.mean([abs(s) >= extreme for s in outcomes]))


def test_sign_flips_agree_with_mcnemar_on_successes() -> None:
    assert sign_flip_test([1.0] * 8 + [-1.0] * 3 + [0.0] * 9) == pytest.approx(mcnemar(8, 3))


def test_sampled_sign_flips_agree_with_all_of_them() -> None:
    differences = list(np.random.default_rng(1).normal(0.5, 1.0, size=14))
    exact = sign_flip_test(differences)
    # One more than is enumerated, and it changes nothing.
    sampled = sign_flip_test([*differences, 1e-9])
    assert sampled == pytest.approx(exact, abs=0.012)


def test_no_difference_is_no_evidence() -> None:
    assert sign_flip_test([0.0] * 30) == 1.0
    assert pairs_to_settle([0.0] * 30) is None
    assert tasks_to_settle(4, 4, 50) is None


def test_intervals_of_paired_differences_agree() -> None:
    differences = [1.0] * 40 + [-1.0] * 15 + [0.0] * 145
    shares, bootstrap = paired_share_interval(40, 15, 200), paired_bootstrap(differences)
    assert shares.estimate == bootstrap.estimate == 0.125
    assert shares.low == pytest.approx(bootstrap.low, abs=0.01)
    assert shares.high == pytest.approx(bootstrap.high, abs=0.01)


def test_so_many_tasks_give_the_power_that_was_asked_for() -> None:
    needed = tasks_to_settle(20, 8, 100)
    assert needed is not None
    random = np.random.default_rng(0)
    cells = random.multinomial(needed, [0.20, 0.08, 0.72], size=1500)
    # The formula is for the test without a continuity correction; the exact test is a little more
    # cautious.
    found = np.mean([abs(a - b) / math.sqrt(a + b) > 1.96 for a, b, _ in cells])
    exact = np.mean([mcnemar(a, b) < 0.05 for a, b, _ in cells.tolist()])
    assert found == pytest.approx(0.8, abs=0.04)
    assert 0.7 < exact <= found + 0.01


def test_pairs_to_settle_gives_the_power_that_was_asked_for() -> None:
    pilot = [0.0, 1.0, -0.5, 0.5] * 10
    needed = pairs_to_settle(pilot)
    assert needed is not None
    random = np.random.default_rng(0)
    p_values = [
        sign_flip_test(list(random.choice(pilot, size=needed)), resamples=400, seed=i)
        for i in range(300)
    ]
    assert np.mean([p < 0.05 for p in p_values]) == pytest.approx(0.8, abs=0.08)


@pytest.mark.parametrize(
    "call", [lambda: wilson(3, 2), lambda: wilson(0, 0), lambda: mean_interval([])]
)
def test_nonsense_is_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match="got"):
        call()

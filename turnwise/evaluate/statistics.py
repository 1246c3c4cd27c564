# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
"""Statistics of evaluations: how sure one success rate is, whether two policies differ, and how
much would settle it.

Two policies are compared on the same tasks, so every test here is paired: what counts is where they
differ. Standard library and numpy only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate and the interval around it.

    Example:
        >>> print(wilson(8, 10))
        0.800 [0.490, 0.943]
    """

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}]"


def wilson(successes: float, total: int, *, level: float = 0.95) -> Interval:
    """Wilson's score interval of a share (Wilson 1927).

    Stays within [0, 1] and keeps its coverage near 0 and 1, where estimate +- z * error collapses
    to a point. Where a task was played several times, its share of successes counts as a part of
    one.

    Example:
        >>> print(wilson(0, 10))
        0.000 [0.000, 0.278]
    """
    if not 0 <= successes <= total or total == 0:
        raise ValueError(
            f"a share needs 0 <= successes <= total and total > 0, got {successes} of {total}"
        )
    share, z2 = successes / total, _z(level) ** 2
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = math.sqrt(z2 * (share * (1 - share) / total + z2 / (4 * total**2))) / (1 + z2 / total)
    low, high = (
        0.0 if successes == 0 else middle - half,
        1.0 if successes == total else middle + half,
    )
    return Interval(estimate=share, low=low, high=high)


def mean_interval(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """Student's t interval of a mean. One value alone says nothing of its spread: the interval is
    infinite.

    Example:
        >>> print(mean_interval([1.0, 2.0, 3.0, 4.0]))
        2.500 [0.446, 4.554]
    """
    if not values:
        raise ValueError("a mean needs at least one value, got none")
    data = np.asarray(values, dtype=np.float64)
    mean = float(data.mean())
    if len(data) == 1:
        return Interval(estimate=mean, low=-math.inf, high=math.inf)
    half = (
        t_quantile(0.5 + level / 2, len(data) - 1) * float(data.std(ddof=1)) / math.sqrt(len(data))
    )
    return Interval(estimate=mean, low=mean - half, high=mean + half)


def mcnemar(only_a: int, only_b: int) -> float:
    """The two-sided p-value of McNemar's exact test.

    Of the tasks that only one of two policies solved, each is as likely to be A's as B's if the
    policies are equally good. Tasks that both solved, or neither, say nothing about the difference.

    Example:
        >>> round(mcnemar(6, 16), 4), mcnemar(3, 3)
        (0.0525, 1.0)
    """
    total = only_a + only_b
    tail = sum(math.comb(total, k) for k in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / 2**total)


def sign_flip_test(
    differences: Sequence[float], *, resamples: int = 20_000, seed: int = 0
) -> float:
    """The two-sided p-value that paired differences are symmetric around 0.

    If the policies were equally good, each difference could as well have the other sign. All sign
    patterns are tried where there are at most 2^14, a random part of them otherwise (the observed
    one counts as one of those).

    Example:
        >>> sign_flip_test([1.0, 1.0, 1.0])  # two of the eight patterns are as extreme
        0.25
    """
    data = np.asarray([value for value in differences if value != 0.0], dtype=np.float64)
    if len(data) == 0:
        return 1.0
    observed = (
        abs(data.sum()) - 1e-12 * np.abs(data).sum()
    )  # sums of the same numbers differ in the last bits
    if len(data) <= 14:
        codes = np.arange(2 ** len(data))[:, None] >> np.arange(len(data))
        return float((np.abs((1 - 2 * (codes & 1)) @ data) >= observed).mean())
    random = np.random.default_rng(seed)
    extreme = 0
    for start in range(0, resamples, 1000):
        signs = random.integers(0, 2, size=(min(1000, resamples - start), len(data))) * 2 - 1
        extreme += int((np.abs(signs @ data) >= observed).sum())
    return (extreme + 1) / (resamples + 1)


def paired_share_interval(only_a: int, only_b: int, total: int, *, level: float = 0.95) -> Interval:
    """The difference of two paired shares, A minus B (Agresti and Min 2005: Wald after adding 1/2
    to all four cells).

    Example:
        >>> print(paired_share_interval(16, 6, 100))
        0.100 [0.008, 0.188]
    """
    if not 0 <= only_a + only_b <= total or total == 0:
        raise ValueError(
            f"only_a + only_b must not exceed total > 0, got {only_a} + {only_b} of {total}"
        )
    size, a, b = total + 2, only_a + 0.5, only_b + 0.5
    middle = (a - b) / size
    half = _z(level) * math.sqrt((a + b) - (a - b) ** 2 / size) / size
    return Interval(
        estimate=(only_a - only_b) / total,
        low=max(-1.0, middle - half),
        high=min(1.0, middle + half),
    )


def paired_bootstrap(
    differences: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """The mean of paired differences with its percentile bootstrap interval.

    Example:
        >>> interval = paired_bootstrap([0.0, 1.0] * 50)
        >>> interval.estimate, 0.38 < interval.low < 0.42, 0.58 < interval.high < 0.62
        (0.5, True, True)
    """
    data = np.asarray(differences, dtype=np.float64)
    if len(data) == 0:
        raise ValueError("a mean needs at least one difference, got none")
    random = np.random.default_rng(seed)
    rows = max(1, 1_000_000 // len(data))  # at a time, to bound the memory
    means: list[Floats] = []
    for start in range(0, resamples, rows):
        picks = random.integers(0, len(data), size=(min(rows, resamples - start), len(data)))
        means.append(data[picks].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [0.5 - level / 2, 0.5 + level / 2])
    return Interval(estimate=float(data.mean()), low=float(low), high=float(high))


def tasks_to_settle(
    only_a: int, only_b: int, total: int, *, alpha: float = 0.05, power: float = 0.8
) -> int | None:
    """How many tasks, those played included, would show the observed difference in success.

    That is: if A alone solves the share only_a / total of all tasks and B alone only_b / total,
    McNemar's test on so many tasks rejects at `alpha` with probability `power` (Miettinen 1968).
    None: no difference was seen, and no number of tasks would show it.

    Example:
        >>> tasks_to_settle(16, 6, 100), tasks_to_settle(5, 5, 100)
        (171, None)
    """
    if not 0 <= only_a + only_b <= total or total == 0:
        raise ValueError(
            f"only_a + only_b must not exceed total > 0, got {only_a} + {only_b} of {total}"
        )
    discordant, difference = (only_a + only_b) / total, (only_a - only_b) / total
    if difference == 0:
        return None
    spread = math.sqrt(max(0.0, discordant - difference**2))
    needed = (
        _z(1 - alpha) * math.sqrt(discordant) + _NORMAL.inv_cdf(power) * spread
    ) ** 2 / difference**2
    return math.ceil(needed)


def pairs_to_settle(
    differences: Sequence[float], *, alpha: float = 0.05, power: float = 0.8
) -> int | None:
    """How many paired differences of this mean and spread a two-sided test of their mean needs.
    None: mean 0.

    Example:
        >>> pairs_to_settle([0.0, 1.0, -0.5, 0.5] * 10)
        41
    """
    data = np.asarray(differences, dtype=np.float64)
    if len(data) < 2 or data.mean() == 0:
        return None
    scale = _z(1 - alpha) + _NORMAL.inv_cdf(power)
    return max(2, math.ceil((scale * float(data.std(ddof=1)) / float(data.mean())) ** 2))


def t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution.

    Example:
        >>> round(t_quantile(0.975, 9), 4)
        2.2622
    """
    if not 0.0 < probability < 1.0 or degrees < 1:
        raise ValueError(
            f"needs 0 < probability < 1 and degrees >= 1, got {probability} and {degrees}"
        )
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)

    def above(x: float) -> float:  # P(T > x) - (1 - probability)
        return 0.5 * _beta_share(degrees / (degrees + x * x), degrees / 2, 0.5) - (1 - probability)

    high = 1.0
    while above(high) > 0:
        high *= 2
    return _bisect(above, 0.0, high)


def _z(level: float) -> float:
    return _NORMAL.inv_cdf(0.5 + level / 2)


def _bisect(falling: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


def _beta_share(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (Lentz's
    method)."""
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly, use the other tail
        return 1 - _beta_share(1 - x, b, a)
    scale = (
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 1000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            c, d = 1 + term / c, 1 / (1 + term * d)
            fraction *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return math.exp(scale) * fraction / a

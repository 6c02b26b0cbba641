"""Means, Student-t intervals and quantiles; the unit of replication is the run."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

SURE = 0.05
"""Largest probability, by chance, of a difference between calls or steps of one process that is shown as one."""
WIDE = 0.25
"""Largest half width of a useful interval, as a share of the value; a wider one says little more than noise."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over `n` runs; `std` and the half width `ci95` are None if n < 2."""

    mean: float
    std: float | None
    ci95: float | None
    n: int

    @property
    def is_wide(self) -> bool:
        """Whether the interval shows little more than that there were too few runs."""
        return self.ci95 is not None and self.ci95 > WIDE * abs(self.mean)


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean, sample standard deviation and half width of the 95 % Student-t interval."""
    num_values = len(values)
    if num_values == 0:
        raise ValueError("no values to estimate from")
    mean = statistics.fmean(values)
    if num_values == 1:
        return Estimate(mean=mean, std=None, ci95=None, n=1)
    std = math.sqrt(variance(values))
    return Estimate(
        mean=mean, std=std, ci95=t_quantile(0.975, num_values - 1) * std / math.sqrt(num_values), n=num_values
    )


def variance(values: Sequence[float]) -> float:
    """Return the sample variance of at least two values; the standard library's exact one is too slow for thousands."""
    mean = statistics.fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def quantiles(values: Sequence[float], probabilities: Sequence[float]) -> list[float]:
    """Return the linear-interpolation quantiles (Hyndman and Fan's type 7) of `values`."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values to take quantiles of")
    result = []
    for probability in probabilities:
        position = probability * (len(ordered) - 1)
        low = math.floor(position)
        high = min(low + 1, len(ordered) - 1)
        result.append(ordered[low] + (position - low) * (ordered[high] - ordered[low]))
    return result


class Sample:
    """A sample of a long stream of values: all up to `capacity` of them, then a random choice of that size.

    Every value is equally likely to be in it (algorithm R: Vitter, ACM Transactions on Mathematical Software 11, 1985).
    The same stream gives the same choice. Number, mean, smallest and largest are those of all values.
    """

    def __init__(self, capacity: int) -> None:
        self.count = 0
        self.smallest, self.largest = math.inf, -math.inf
        self._total = 0.0
        self._capacity = capacity
        self._kept = array("d")
        self._random = random.Random(0)

    def add(self, value: float) -> None:
        """Add one value."""
        self.count += 1
        self._total += value
        self.smallest, self.largest = min(self.smallest, value), max(self.largest, value)
        if len(self._kept) < self._capacity:
            self._kept.append(value)
        elif (index := self._random.randrange(self.count)) < self._capacity:
            self._kept[index] = value

    @property
    def mean(self) -> float:
        """The mean of all values. Raises ValueError if there are none."""
        if not self.count:
            raise ValueError("no values to take the mean of")
        return self._total / self.count

    def quantiles(self, probabilities: Sequence[float]) -> list[float]:
        """Return the quantiles of the sample; smallest and largest are exact."""
        exact = {0.0: self.smallest, 1.0: self.largest}
        inner = quantiles(self._kept, probabilities)
        return [exact.get(probability, value) for probability, value in zip(probabilities, inner, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio of two means with Welch's 95 % interval on logarithms.

    `low`, `high` and `p_value` (two-sided, of ratio 1) come from the logarithms and are None if a side has fewer
    than two runs. `value` is the ratio of the arithmetic means, so that it can be recomputed from a table of means.
    If an outlier moves it out of the interval, it is the ratio of the geometric means, on which the interval is based.
    `std` is that of the ratio of two single runs.
    """

    value: float
    low: float | None
    high: float | None
    p_value: float | None
    std: float | None
    n: int
    n_base: int

    @property
    def ci95(self) -> float | None:
        """Half the width of the interval."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    @property
    def is_wide(self) -> bool:
        """Whether the interval shows little more than that there were too few runs."""
        return self.ci95 is not None and self.ci95 > WIDE * self.value

    def scaled(self, factor: float) -> Ratio:
        """Return the ratio times an exact positive number."""
        low, high, std = (None if value is None else value * factor for value in (self.low, self.high, self.std))
        return dataclasses.replace(self, value=self.value * factor, low=low, high=high, std=std)


def welch_log_ratio(values: Sequence[float], base: Sequence[float], *, confidence: float = 0.95) -> Ratio:
    """Return the ratio of positive `values` to `base`, by Welch's t on logarithms (Welch, Biometrika 34, 1947).

    A percentile bootstrap would cover only about 81 % with three runs a side; this covers 95 %.
    """
    if min(*values, *base) <= 0:
        raise ValueError("a ratio on logarithms needs positive values")
    sizes = (len(values), len(base))
    logs = ([math.log(number) for number in values], [math.log(number) for number in base])
    difference = statistics.fmean(logs[0]) - statistics.fmean(logs[1])
    value = statistics.fmean(values) / statistics.fmean(base)
    if min(sizes) < 2:
        return Ratio(value=value, low=None, high=None, p_value=None, std=None, n=sizes[0], n_base=sizes[1])
    variances = (variance(logs[0]), variance(logs[1]))
    return _welch(difference, value, variances, sizes, confidence)


def estimate_of(mean: float, ci95: float | None, n: int) -> Estimate:
    """Return the estimate with this mean and half width of n runs."""
    std = None if ci95 is None or n < 2 else ci95 * math.sqrt(n) / t_quantile(0.975, n - 1)
    return Estimate(mean=mean, std=std, ci95=ci95, n=n)


def welch_of_estimates(values: Estimate, base: Estimate) -> Ratio:
    """Return `welch_log_ratio` if only means and deviations are known: the logarithm's deviation is std / mean."""
    value, sizes = values.mean / base.mean, (values.n, base.n)
    if values.std is None or base.std is None:
        return Ratio(value=value, low=None, high=None, p_value=None, std=None, n=values.n, n_base=base.n)
    variances = ((values.std / values.mean) ** 2, (base.std / base.mean) ** 2)
    return _welch(math.log(value), value, variances, sizes, 0.95)


def _welch(
    difference: float, value: float, variances: tuple[float, float], sizes: tuple[int, int], confidence: float
) -> Ratio:
    """Return the ratio `value` whose logarithm is about `difference`, from the variances of the logarithms."""
    error = math.sqrt(variances[0] / sizes[0] + variances[1] / sizes[1])
    freedom = _welch_freedom(variances, sizes)
    reach = t_quantile(0.5 + confidence / 2, freedom) * error if error > 0 else 0.0
    low, high = math.exp(difference - reach), math.exp(difference + reach)
    return Ratio(
        value=value if low <= value <= high or reach == 0 else math.exp(difference),
        low=low,
        high=high,
        p_value=_two_sided(difference, error, freedom),
        # First order: the standard deviation of a logarithm is a relative one.
        std=value * math.sqrt(variances[0] + variances[1]),
        n=sizes[0],
        n_base=sizes[1],
    )


@functools.lru_cache(maxsize=4096)
def t_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t at `probability`, between 0 and 1. Raises ValueError otherwise."""
    from scipy.special import stdtrit

    if not 0 < probability < 1 or not freedom > 0:
        raise ValueError(f"no quantile of {probability} with {freedom} degrees of freedom")
    return float(stdtrit(freedom, probability))


def tail(value: float, freedom: float) -> float:
    """Return the probability that a t of `freedom` degrees exceeds `value`, which is not negative."""
    from scipy.special import stdtr

    return float(stdtr(freedom, -value))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's step-down adjustment (Scandinavian Journal of Statistics 6, 1979), in the given order."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for position, index in enumerate(order):
        # An adjusted value is never below that of a smaller one.
        running = max(running, min(1.0, (len(order) - position) * p_values[index]))
        adjusted[index] = running
    return adjusted


def _welch_freedom(variances: tuple[float, float], sizes: tuple[int, int]) -> float:
    shares = [variance / size for variance, size in zip(variances, sizes, strict=True)]
    total = sum(shares)
    if total <= 0:
        return float(sum(sizes) - 2)
    # Divide by the total first: squares of tiny variances would underflow.
    spread = sum((share / total) ** 2 / (size - 1) for share, size in zip(shares, sizes, strict=True))
    return 1 / spread


def _two_sided(difference: float, error: float, freedom: float) -> float:
    if error <= 0:
        return 1.0 if difference == 0 else 0.0
    return 2 * tail(abs(difference) / error, freedom)


_FAR_OFF = 5.0
_LEAST_OFF = math.log(1.2)


def outliers(values: Sequence[float]) -> list[int]:
    """Return the indices of positive values far from the others, by the median and its deviations.

    One value cannot move these. The limit is five robust standard deviations (1.4826 x the median absolute deviation)
    or a fifth of the value, whichever is larger; fewer than three values have no outliers.
    """
    if len(values) < 3:
        return []
    logs = [math.log(value) for value in values]
    middle = statistics.median(logs)
    spread = 1.4826 * statistics.median(abs(log - middle) for log in logs)
    return [index for index, log in enumerate(logs) if abs(log - middle) > max(_FAR_OFF * spread, _LEAST_OFF)]


_SURE_DRIFT = 0.001
_LEAST_DRIFT = 0.01


def drift(repeats: Sequence[Sequence[float]]) -> float:
    """Return the relative change from the first to the last repeat, common to all settings; 0 if it may be chance.

    `repeats` holds the positive values of each setting in the order of measuring. The slope is that of the logarithms.
    """
    pairs, settings = [], [values for values in repeats if len(values) > 1]
    for values in settings:
        logs = [math.log(value) for value in values]
        middle = statistics.fmean(logs)
        # Each setting is centred by itself: its level drops out, and only the change within it counts.
        pairs += [(index / (len(logs) - 1) - 0.5, log - middle) for index, log in enumerate(logs)]
    freedom = len(pairs) - len(settings) - 1  # a mean for each setting and one slope are estimated
    if freedom <= 2:
        return 0.0
    square = math.fsum(offset**2 for offset, _ in pairs)
    slope = math.fsum(offset * log for offset, log in pairs) / square
    error = math.sqrt(math.fsum((log - slope * offset) ** 2 for offset, log in pairs) / freedom / square)
    # The first case is an exact fit, whose error is only rounding.
    sure = error <= 1e-9 * abs(slope) or 2 * tail(abs(slope) / error, freedom) < _SURE_DRIFT
    return math.expm1(slope) if sure and abs(slope) > _LEAST_DRIFT else 0.0


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if there are no values, or if one is unknown."""
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers and len(numbers) == len(values) else None

"""Means of what was measured, as cells."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hpcdl.core.statistics import estimate
from hpcdl.report.document import Interval


def mean_of(values: Iterable[float | None]) -> Interval | None:
    """Mean and 95 % half width of the values that are known, finite and not negative; None without any."""
    known = [value for value in values if value is not None and math.isfinite(value) and value >= 0]
    if not known:
        return None
    found = estimate(known)
    return Interval(value=found.mean, half=found.ci95, n=found.n)

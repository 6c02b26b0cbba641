"""Staleness: how many writes of others the center saw between a worker's read and its next write."""

from __future__ import annotations

import collections
from typing import Any


class Staleness:
    """Counts how often each staleness was seen."""

    def __init__(self) -> None:
        self._counts: collections.Counter[int] = collections.Counter()

    def add(self, staleness: int) -> None:
        """Count one write."""
        self._counts[staleness] += 1

    def as_json(self) -> dict[str, int]:
        """Number of writes by staleness."""
        return {str(staleness): number for staleness, number in sorted(self._counts.items())}


def summary_of(counts: list[dict[str, Any]]) -> tuple[float | None, float | None, dict[str, int]]:
    """Mean, maximum and histogram of what several ranks have counted; None and empty where nobody has."""
    total: collections.Counter[int] = collections.Counter()
    for one in counts:
        total.update({int(staleness): int(number) for staleness, number in one.items()})
    num_writes = sum(total.values())
    if not num_writes:
        return None, None, {}
    mean = sum(staleness * number for staleness, number in total.items()) / num_writes
    histogram = {str(staleness): number for staleness, number in sorted(total.items())}
    return mean, float(max(total)), histogram

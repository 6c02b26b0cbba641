"""The alpha-beta model of a network: a message of n bytes takes alpha + beta n seconds (Hockney 1994)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """Latency in seconds, and seconds per byte; neither is negative."""

    latency_s: float
    seconds_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        """What the model says for `num_bytes`."""
        return self.latency_s + self.seconds_per_byte * num_bytes

    @property
    def bytes_per_second(self) -> float | None:
        """The bandwidth that long messages reach; None where time does not grow with size."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte > 0 else None


def alpha_beta(num_bytes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta | None:
    """The least-squares fit of relative errors, so that short messages count as much as long ones.

    None with fewer than two different sizes: one point fits any latency.
    """
    if len(set(num_bytes)) < 2:
        return None
    # Minimise sum((alpha x + beta y - 1)^2) with x = 1/t, y = n/t, over alpha, beta >= 0.
    columns = [(1 / t, n / t) for n, t in zip(num_bytes, seconds, strict=True)]
    xx = sum(x * x for x, _ in columns)
    xy = sum(x * y for x, y in columns)
    yy = sum(y * y for _, y in columns)
    x1 = sum(x for x, _ in columns)
    y1 = sum(y for _, y in columns)
    determinant = xx * yy - xy * xy
    alpha = (x1 * yy - y1 * xy) / determinant
    beta = (y1 * xx - x1 * xy) / determinant
    if alpha < 0:
        alpha, beta = 0.0, y1 / yy
    elif beta < 0:
        alpha, beta = x1 / xx, 0.0
    return AlphaBeta(latency_s=alpha, seconds_per_byte=beta)

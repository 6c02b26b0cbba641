"""What `hpcdl predict` says of a report's runs; it computes this (hpcdl/predict), a report only shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcdl.core.units import IMAGES


@dataclass(frozen=True, kw_only=True)
class MeasuredRate:
    """What the runs of one strategy, size and batch reached in the mean."""

    strategy: str
    nodes: int
    workers: int
    batch_per_rank: float
    images_per_second: float


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """One network's forecasts: `document` is that of `hpcdl predict --json`, `measured` what it was made from.

    `left_out` says why there is none, or what of the runs it does not know. `counted` is what rates count.
    """

    subject: str
    document: Mapping[str, Any] = field(default_factory=dict)
    measured: Sequence[MeasuredRate] = ()
    counted: str = IMAGES
    left_out: str = ""

    def as_json(self) -> dict[str, Any]:
        """An entry of `prediction` in report.json."""
        return {"subject": self.subject, "left_out": self.left_out or None, **self.document}

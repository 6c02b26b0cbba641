"""Everything that the sections of a report are made from, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcdl.report.communication import CommunicationFit
from hpcdl.report.contests import Contest
from hpcdl.report.fitting import CurveFit
from hpcdl.report.references import Reference
from hpcdl.report.runs import Run
from hpcdl.report.scaling import Curve
from hpcdl.report.tunings import TunedNode
from hpcdl.report.verdicts import Comparison


@dataclass(frozen=True, kw_only=True)
class Study:
    """The runs of a report with what was computed from all of them.

    `comparisons` are those of strategies and with the baseline together, because they share one correction.
    """

    runs: Sequence[Run]
    curves: Sequence[Curve]
    unreadable: Sequence[str] = ()
    warnings: Sequence[str] = ()
    contests: Sequence[Contest] = ()
    comparisons: Sequence[Comparison] = ()
    fits: Sequence[CurveFit] = ()
    communication: Sequence[CommunicationFit] = ()
    references: Sequence[Reference] = ()
    tunings: Sequence[TunedNode] = ()
    link_bytes_per_second: float | None = None
    baseline_name: str = ""

"""Everything that the sections of a report are made from, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcdl.report.analysis.communication import CommunicationFit
from hpcdl.report.analysis.contests import Contest
from hpcdl.report.analysis.fitting import CurveFit
from hpcdl.report.analysis.scaling import Curve
from hpcdl.report.analysis.verdicts import Comparison
from hpcdl.report.runs.references import Reference
from hpcdl.report.runs.run import Run
from hpcdl.report.runs.tunings import TunedNode


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

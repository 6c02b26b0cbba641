"""From runs to their analysis: everything that sections and report.json show is computed here, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcdl.core.errors import UsageError
from hpcdl.report.analysis.baseline import compare_with
from hpcdl.report.analysis.caveats import caveats
from hpcdl.report.analysis.comparisons import Comparison, Contest, build_contests, comparisons, corrected
from hpcdl.report.analysis.fits import CommunicationFit, CurveFit, fit_communication, fit_curves
from hpcdl.report.analysis.names import told_apart
from hpcdl.report.analysis.scaling import Curve, build_curves
from hpcdl.report.runs.references import Reference
from hpcdl.report.runs.run import Run
from hpcdl.report.runs.sources import Gathered
from hpcdl.report.runs.tunings import TunedNode


@dataclass(frozen=True, kw_only=True)
class Analysis:
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


def analyse(
    gathered: Gathered,
    *,
    baseline: Gathered | None = None,
    baseline_name: str = "",
    references: Sequence[Reference] = (),
    tunings: Sequence[TunedNode] = (),
    link_bytes_per_second: float | None = None,
) -> Analysis:
    """Compute what a report shows; UsageError where there are no runs, or none to compare with the baseline."""
    if not gathered.runs and not tunings:
        raise UsageError("no runs to report; name run directories of `hpcdl train`, or use --import FILE")
    runs = told_apart(gathered.runs)
    curves = build_curves(runs)
    contests = build_contests(runs)
    compared, remarks = comparisons(contests), list(gathered.remarks)
    if baseline is not None:
        against, told = compare_with(runs, told_apart(baseline.runs))
        compared, remarks = compared + against, remarks + told
    return Analysis(
        runs=runs,
        curves=curves,
        unreadable=gathered.unreadable,
        warnings=[*caveats(runs, gathered.unreadable, curves), *remarks],
        contests=contests,
        comparisons=corrected(compared),
        fits=fit_curves(curves),
        communication=fit_communication(runs),
        references=references,
        tunings=tunings,
        link_bytes_per_second=link_bytes_per_second,
        baseline_name=baseline_name,
    )

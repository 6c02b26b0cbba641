"""From runs to a study: everything that sections and report.json show is computed here, once."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdl.core.errors import UsageError
from hpcdl.report.analysis.baseline import compare_with
from hpcdl.report.analysis.caveats import caveats
from hpcdl.report.analysis.communication import fit_communication
from hpcdl.report.analysis.contests import build_contests, comparisons
from hpcdl.report.analysis.fitting import fit_curves
from hpcdl.report.analysis.scaling import build_curves
from hpcdl.report.analysis.study import Study
from hpcdl.report.analysis.variants import told_apart
from hpcdl.report.analysis.verdicts import corrected
from hpcdl.report.runs.references import Reference
from hpcdl.report.runs.sources import Gathered
from hpcdl.report.runs.tunings import TunedNode


def analyse(
    gathered: Gathered,
    *,
    baseline: Gathered | None = None,
    baseline_name: str = "",
    references: Sequence[Reference] = (),
    tunings: Sequence[TunedNode] = (),
    link_bytes_per_second: float | None = None,
) -> Study:
    """Compute a study; UsageError where there are no runs, or none that the baseline could be compared with."""
    if not gathered.runs and not tunings:
        raise UsageError("no runs to report; name run directories of `hpcdl train`, or use --import FILE")
    runs = told_apart(gathered.runs)
    curves = build_curves(runs)
    contests = build_contests(runs)
    compared, remarks = comparisons(contests), list(gathered.remarks)
    if baseline is not None:
        against, told = compare_with(runs, told_apart(baseline.runs))
        compared, remarks = compared + against, remarks + told
    return Study(
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

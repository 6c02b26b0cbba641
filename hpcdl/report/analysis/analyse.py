"""From runs to their analysis: everything that sections and report.json show is computed here, once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hpcdl.core.errors import UsageError
from hpcdl.core.units import common_unit, listed
from hpcdl.report.analysis.caveats import caveats
from hpcdl.report.analysis.comparisons import (
    Comparison,
    Contest,
    build_contests,
    check_comparable,
    compare_with,
    comparisons,
    corrected,
)
from hpcdl.report.analysis.laws import CommunicationFit, CurveFit, fit_communication, fit_curves, misses
from hpcdl.report.analysis.scaling import Breakdown, Curve, breakdowns, build_curves, with_base_of
from hpcdl.report.analysis.settings import by_varied_settings, settings_of_runs, varying_keys, with_variants_by_content
from hpcdl.report.runs.findings import Inferred, Outlook, TracedRun
from hpcdl.report.runs.published import Published
from hpcdl.report.runs.run import Run
from hpcdl.report.runs.searches import SearchRecord, TunedNode
from hpcdl.report.runs.sources import Gathered


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The runs of a report and everything computed from them.

    `settings` are the usable runs, grouped by setting. `comparisons` holds those of strategies, of --compare
    (`compared`) and with the baseline, because they share one correction. `varying` are the keys of `hpcdl train` in
    which the runs differ. `breakdowns` holds those of each curve. `outlooks` are forecasts for sizes that were not run,
    for each network (hpcdl/predict).
    """

    runs: Sequence[Run]
    curves: Sequence[Curve]
    settings: Sequence[Sequence[Run]] = ()
    varying: Sequence[str] = ()
    compared: str = ""
    breakdowns: Sequence[Sequence[Breakdown]] = ()
    unreadable: Sequence[str] = ()
    warnings: Sequence[str] = ()
    contests: Sequence[Contest] = ()
    comparisons: Sequence[Comparison] = ()
    fits: Sequence[CurveFit] = ()
    communication: Sequence[CommunicationFit] = ()
    references: Published = Published()
    tunings: Sequence[TunedNode] = ()
    searches: Sequence[SearchRecord] = ()
    traced: Sequence[TracedRun] = ()
    link_bytes_per_second: float | None = None
    baseline_name: str = ""
    outlooks: Sequence[Outlook] = ()
    inferences: Sequence[Inferred] = ()

    @property
    def counted(self) -> str:
        """The unit of all throughputs of this report: images if each of them counts images, else samples."""
        measured: list[Run | TunedNode | Inferred] = [*self.runs, *self.tunings, *self.inferences]
        return common_unit(item.counted for item in measured if item.images_per_second is not None)


def analyse(
    gathered: Gathered,
    *,
    baseline: Gathered | None = None,
    baseline_name: str = "",
    references: Published = Published(),  # noqa: B008  frozen
    tunings: Sequence[TunedNode] = (),
    searches: Sequence[SearchRecord] = (),
    traced: Sequence[TracedRun] = (),
    link_bytes_per_second: float | None = None,
    base: str = "",
    compare: str = "",
    outlooks: Sequence[Outlook] = (),
) -> Analysis:
    """Compute what a report shows. Raises UsageError without runs, or without any that fit `base` or `compare`.

    `base`: strategy whose one-worker runs are the base of curves without one; `compare`: what else to compare.
    """
    if not gathered.runs and not gathered.inferences and not tunings and not searches:
        raise UsageError("no runs to report; name run directories of `hpcdl train`, or use --import FILE")
    gathered, baseline = kept_apart(gathered, baseline)
    runs = gathered.runs
    curves = _based(build_curves(runs), runs, base)
    contests = build_contests(runs)
    if compare:
        check_comparable(compare, [run for run in runs if run.usable])
        contests += build_contests(runs, compare)
    verdicts, remarks = comparisons(contests), list(gathered.remarks)
    if baseline is not None:
        against, notes = compare_with(runs, baseline.runs)
        verdicts, remarks = verdicts + against, [*remarks, *baseline.remarks, *notes]
    fits = fit_curves(curves)
    return Analysis(
        runs=runs,
        curves=curves,
        settings=settings_of_runs(runs),
        varying=varying_keys(run for run in runs if run.usable),
        compared=compare,
        breakdowns=[breakdowns(curve) for curve in curves],
        unreadable=gathered.unreadable,
        warnings=[*caveats(runs, gathered.unreadable, curves), *misses(fits), *remarks, *_chosen(searches)],
        contests=contests,
        # One correction over all kinds: with one for each kind, verdicts by chance would add up.
        comparisons=corrected(verdicts),
        fits=fits,
        communication=fit_communication(runs),
        references=references,
        tunings=tunings,
        searches=searches,
        traced=traced,
        link_bytes_per_second=link_bytes_per_second,
        baseline_name=baseline_name,
        outlooks=outlooks,
        inferences=gathered.inferences,
    )


def _chosen(searches: Sequence[SearchRecord]) -> list[str]:
    """Return the caveats of searches, whose best value was chosen because it is the best."""
    return [f"search {search.name}: {doubt}" for search in searches for doubt in search.doubts]


def kept_apart(gathered: Gathered, baseline: Gathered | None = None) -> tuple[Gathered, Gathered | None]:
    """Return both with the distinguishing settings of their runs. It costs nothing if those are known already."""
    if gathered.kept_apart:
        return gathered, baseline
    # Include the baseline: a setting in which only the two sides differ distinguishes runs as well.
    everything, caveat = with_variants_by_content([*gathered.runs, *(baseline.runs if baseline is not None else ())])
    everything = by_varied_settings(everything)
    runs, before = everything[: len(gathered.runs)], everything[len(gathered.runs) :]
    remarks = (*gathered.remarks, caveat) if caveat else gathered.remarks
    separated = dataclasses.replace(gathered, runs=tuple(runs), remarks=remarks, kept_apart=True)
    return separated, None if baseline is None else dataclasses.replace(baseline, runs=tuple(before), kept_apart=True)


def _based(curves: Sequence[Curve], runs: Sequence[Run], base: str) -> list[Curve]:
    if base and not any(run.usable and run.strategy == base and run.workers == 1 for run in runs):
        strategies = listed(sorted({run.strategy for run in runs if run.usable and run.workers == 1}), 6) or "none"
        raise UsageError(f"--base {base}: no usable run of one worker by it; strategies that have one: {strategies}")
    return with_base_of(curves, runs, base) if base else list(curves)

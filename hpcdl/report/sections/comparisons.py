"""Strategies side by side, and changes against the baseline. A verdict is given only if the runs support it."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdl.core.units import counted
from hpcdl.report.analysis.analyse import Analysis
from hpcdl.report.analysis.comparisons import (
    KIND,
    STRATEGIES,
    Comparison,
    Contender,
    Contest,
    communication_and_step,
    seconds_to,
)
from hpcdl.report.document import Bounds, Cell, Column, Interval, Section, Table
from hpcdl.report.runs.run import learned_apart


def build(analysis: Analysis) -> Section | None:
    """One row for each strategy at each setting that several strategies ran, and the verdict on each pair."""
    return _section(analysis, STRATEGIES, "strategies", "Strategies side by side")


def build_compared(analysis: Analysis) -> Section | None:
    """The same for the contenders of --compare: machines, or the values of a setting."""
    if not analysis.compared:
        return None
    return _section(analysis, analysis.compared, "compared", f"Compared by {analysis.compared}")


def _section(analysis: Analysis, kind: str, name: str, title: str) -> Section | None:
    contests = [contest for contest in analysis.contests if contest.kind == kind]
    if not contests:
        return None
    compared = [comparison for comparison in analysis.comparisons if comparison.kind == kind]
    rate = Column.rate(analysis.counted)
    items = [_contenders(contests, rate)]
    if compared:
        items.append(verdict_table("Verdicts", compared, rate))
    lines = [
        "A verdict is given where Welch's test on logarithms, Holm-corrected over all comparisons of this report,"
        " excludes equality at 95 %; else the difference is not distinguishable with the runs there are."
    ]
    return Section(name=name, title=title, lines=lines, items=items)


def verdict_table(title: str, compared: Sequence[Comparison], rate: Column) -> Table:
    """Return each comparison with its ratio, interval, corrected p and verdict. `rate` is the column of throughput."""
    measures = {"images_per_second": rate.name, "seconds_to_accuracy": "time to accuracy"}
    columns = (
        Column(name="setting"), Column(name="measure"), Column(name="a"), Column(name="b"),
        Column(name="runs"), Column(name="a / b", kind="number"), Column(name="p (Holm)", kind="number"),
        Column(name="verdict"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = [
        (
            comparison.where, measures[comparison.measure], comparison.a, comparison.b,
            f"{comparison.ratio.n} : {comparison.ratio.n_base}",
            Bounds(value=comparison.ratio.value, low=comparison.ratio.low, high=comparison.ratio.high),
            comparison.p_holm, comparison.verdict,
        )
        for comparison in compared
    ]  # fmt: skip
    return Table(title=title, columns=columns, rows=rows, note="Intervals are those of the single comparison, at 95 %.")


def _contenders(contests: Sequence[Contest], rate: Column) -> Table:
    columns = (
        Column(name="setting"), Column(name="contender"), Column(name="runs", kind="count"),
        rate, Column(name="communication share", kind="percent"),
        Column(name="mean staleness", kind="number"), Column(name="max staleness", kind="number"),
        Column(name="target", kind="percent"), Column(name="time to target", kind="seconds"),
    )  # fmt: skip
    rows = [_row(contest, contender) for contest in contests for contender in contest.contenders]
    note = "Target: the highest whole percentage of held-out accuracy that every run of the setting reached."
    return Table(title="Each contender at each shared setting", columns=columns, rows=rows, note=note)


def _row(contest: Contest, contender: Contender) -> tuple[Cell, ...]:
    runs = contender.runs
    times = [] if contest.target is None else [seconds_to(run, contest.target) for run in learned_apart(runs)]
    return (
        contest.where,
        contender.name,
        len(runs),
        Interval.of([run.images_per_second for run in runs]),
        Interval.of_ratio([communication_and_step(run) for run in runs]),
        Interval.of([run.staleness_mean for run in runs]),
        max((run.staleness_max for run in runs if run.staleness_max is not None), default=None),
        contest.target,
        Interval.of(times),
    )


def build_baseline(analysis: Analysis) -> Section | None:
    """One row for each setting that both studies measured."""
    compared = [comparison for comparison in analysis.comparisons if comparison.kind == KIND]
    if not compared:
        return None
    faster = sum(comparison.decided and comparison.a_is_better for comparison in compared)
    slower = sum(comparison.decided and not comparison.a_is_better for comparison in compared)
    settings = counted(len(compared), "setting")
    lines = [
        f"Of {settings} that both have, {faster} became faster and {slower} slower beyond noise;"
        f" {len(compared) - faster - slower} did not change distinguishably. Baseline: {analysis.baseline_name}."
    ]
    table = verdict_table("This study (a) against the baseline (b)", compared, Column.rate(analysis.counted))
    return Section(name="baseline", title="Against the baseline", lines=lines, items=(table,))

"""What changed against the baseline, beyond noise."""

from __future__ import annotations

from hpcdl.core.units import counted
from hpcdl.report.analysis.analyse import Analysis
from hpcdl.report.analysis.comparisons import KIND
from hpcdl.report.document.document import Column, Section
from hpcdl.report.sections.strategies import verdict_table


def build(analysis: Analysis) -> Section | None:
    """One row for each setting that both studies measured."""
    compared = [item for item in analysis.comparisons if item.kind == KIND]
    if not compared:
        return None
    faster = sum(item.decided and item.a_is_better for item in compared)
    slower = sum(item.decided and not item.a_is_better for item in compared)
    settings = counted(len(compared), "setting")
    lines = [
        f"Of {settings} that both have, {faster} became faster and {slower} slower beyond noise;"
        f" {len(compared) - faster - slower} did not change distinguishably. Baseline: {analysis.baseline_name}."
    ]
    table = verdict_table("This study (a) against the baseline (b)", compared, Column.rate(analysis.counted))
    return Section(name="baseline", title="Against the baseline", lines=lines, items=(table,))

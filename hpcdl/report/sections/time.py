"""Where the time goes: the parts of a step, and what the lost efficiency consists of."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hpcdl.core.records.run_record import PARTS
from hpcdl.core.units import counted, listed
from hpcdl.report.analysis.analyse import Analysis
from hpcdl.report.analysis.names import curve_names
from hpcdl.report.analysis.parts import Breakdown
from hpcdl.report.document.document import Cell, Column, Figure, Section, Series, Table

MOST_BARS = 24
"""Points in one figure."""


def build(analysis: Analysis) -> Section | None:
    """Parts of a step at every point that measured them."""
    names, modes = curve_names(analysis.curves), {curve.mode for curve in analysis.curves}
    found = [
        (_label(modes, curve.mode, name, item), item)
        for curve, name, own in zip(analysis.curves, names, analysis.breakdowns, strict=True)
        for item in own
    ]
    if not found:
        return None
    table = _table(found)
    lost = _lost_table(found)
    items: list[Figure | Table] = [_shares_figure(found[-MOST_BARS:], table), table]
    if lost is not None:
        losing = [pair for pair in found if max(pair[1].lost.values(), default=0.0) > 0]
        items += [*([_lost_figure(losing[-MOST_BARS:], lost)] if losing else []), lost]
    lines = [
        "The parts are means over workers and steps after warm-up, and sum to the step. Wait is for the slowest rank;"
        " exposed communication is what computing did not hide. Imbalance is slowest minus mean compute."
    ]
    if len(found) > MOST_BARS:
        lines.append(f"The figures show the last {MOST_BARS} of {len(found)} points.")
    return Section(name="time", title="Where the time goes", lines=lines, items=items)


def _label(modes: Collection[str], mode: str, name: str, item: Breakdown) -> str:
    axis = "thread" if mode == "scale-up" else "worker"
    return f"{name}, {counted(item.point.n, axis)}" + (f", {mode}" if len(modes) > 1 else "")


def _table(found: Sequence[tuple[str, Breakdown]]) -> Table:
    shown = [name for name in PARTS if any(name in item.parts for _, item in found)]
    columns = (
        Column(name="point"), Column(name="runs", kind="count"), Column(name="step", kind="seconds"),
        *(Column(name=name.replace("_", " "), kind="seconds") for name in shown),
        Column(name="imbalance", kind="seconds"), Column(name="communication share", kind="percent"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = [
        (
            label, item.num_runs, item.step_seconds, *(item.parts.get(name) for name in shown),
            item.imbalance_seconds, _share(item),
        )
        for label, item in found
    ]  # fmt: skip
    note = "Communication share is (exposed communication + wait) / step."
    return Table(title="Seconds of a step", columns=columns, rows=rows, note=note)


def _share(item: Breakdown) -> float | None:
    if "exposed_communication" not in item.parts:
        return None
    return (item.parts["exposed_communication"] + item.parts.get("wait", 0.0)) / item.step_seconds


def _lost_table(found: Sequence[tuple[str, Breakdown]]) -> Table | None:
    losing = [(label, item) for label, item in found if item.lost]
    if not losing:
        return None
    columns = (
        Column(name="point"), Column(name="efficiency by step time", kind="percent"),
        *(Column(name=name.replace("_", " "), kind="percent") for name in PARTS),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = [
        (label, 1 - sum(item.lost.values()), *(item.lost[name] for name in PARTS)) for label, item in losing
    ]
    note = "Each part's seconds beyond ideal scaling from the base, as a share of the step; they sum to 1 - efficiency."
    return Table(title="Lost efficiency by part", columns=columns, rows=rows, note=note)


def _shares_figure(found: Sequence[tuple[str, Breakdown]], table: Table) -> Figure:
    shares = {name: [item.parts.get(name, 0.0) / item.step_seconds for _, item in found] for name in PARTS}
    texts = [f"{label} {100 * (_share(item) or 0):.0f} %" for label, item in found]
    return Figure(
        name="time-parts",
        title="Parts of a step",
        alt=f"Shares of a step by part; communication share: {listed(texts, 8)}.",
        x_label="share of the step",
        y_label="",
        series=_stack(found, shares),
        table=table,
        y_percent=True,
    )


def _lost_figure(losing: Sequence[tuple[str, Breakdown]], table: Table) -> Figure:
    shares = {name: [max(0.0, item.lost[name]) for _, item in losing] for name in PARTS}
    texts = [f"{label} {100 * sum(item.lost.values()):.0f} %" for label, item in losing]
    return Figure(
        name="time-lost",
        title="Lost efficiency by part (parts that got faster are in the table only)",
        alt=f"Lost efficiency by part; in all: {listed(texts, 8)}.",
        x_label="lost efficiency, share of the step",
        y_label="",
        series=_stack(losing, shares),
        table=table,
        y_percent=True,
    )


def _stack(found: Sequence[tuple[str, Breakdown]], shares: Mapping[str, Sequence[float]]) -> list[Series]:
    labels = [label for label, _ in found]
    return [
        Series(label=name.replace("_", " "), x=labels, y=shares[name], style="stack", part=name)
        for name in PARTS
        if any(shares[name])
    ]

"""The study's efficiency beside published points, on the same axes and clearly labelled as published."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdl.core.units import listed
from hpcdl.report.analysis.analyse import Analysis
from hpcdl.report.analysis.names import curve_names
from hpcdl.report.analysis.scaling import Curve
from hpcdl.report.document import Cell, Column, Figure, Section, Series, Table
from hpcdl.report.runs.published import Reference, Statement

MOST_CURVES = 4
"""Maximum number of the user's curves in one figure."""


def build(analysis: Analysis) -> Section | None:
    """A figure for each mode in which both the study and a publication have points, and other published results."""
    items: list[Figure | Table] = []
    models = {run.model for run in analysis.runs}
    shown = {curve.mode for curve in analysis.curves if len(curve.points) > 1}
    for mode in ("weak", "strong"):
        curves = [curve for curve in analysis.curves if curve.mode == mode and len(curve.points) > 1]
        published = [point for point in analysis.references.points if point.mode in (mode, "unstated")]
        # Prefer points of the same networks: the efficiency of another network says little.
        same_model = [point for point in published if point.model in models]
        published = (
            [point for point in published if point.model in (*models, _UNSPECIFIED)] if same_model else published
        )
        if curves and published:
            items += _beside(mode, curves, published)
    stated = [
        statement for statement in analysis.references.statements if not statement.mode or statement.mode in shown
    ]
    if not items and not any(statement.mode for statement in stated):
        return None
    lines = [
        "Published points are of other people on other machines: they say what was reached there, not what is due here."
        " The study beside each is the one of `hpcdl sweep` that repeats it."
    ]
    if stated:
        items.append(_statements(stated))
    return Section(name="references", title="Beside published results", lines=lines, items=items, in_files=True)


_UNSPECIFIED = "unspecified"


def _statements(statements: Sequence[Statement]) -> Table:
    columns = (
        Column(name="published by"),
        Column(name="states"),
        Column(name="its sentence"),
        Column(name="confidence"),
        Column(name="study"),
    )
    rows: list[tuple[Cell, ...]] = [
        (
            f"{statement.source}: {statement.citation}",
            statement.claim,
            statement.sentence,
            statement.confidence,
            statement.study,
        )
        for statement in statements
    ]
    return Table(title="Published without a number to draw", columns=columns, rows=rows)


def _beside(mode: str, curves: Sequence[Curve], published: Sequence[Reference]) -> tuple[Figure, Table]:
    sources = sorted({point.source for point in published})
    our_series = [
        Series(
            label=f"this study: {name}",
            x=[point.n for point in curve.points],
            y=[point.efficiency.value for point in curve.points],
            low=[None if point.efficiency.is_wide else point.efficiency.low for point in curve.points],
            high=[None if point.efficiency.is_wide else point.efficiency.high for point in curve.points],
            color=color,
            strategy=curve.first.strategy,
        )
        for color, (curve, name) in enumerate(list(zip(curves, curve_names(curves), strict=True))[:MOST_CURVES])
    ]
    published_series = [
        _series(f"published: {source}", [point for point in published if point.source == source], MOST_CURVES + number)
        for number, source in enumerate(sources)
    ]
    table = _table(mode, published)
    texts = [
        f"{point.source} {point.model} {point.quoted_efficiency} at {point.workers} {point.unit}" for point in published
    ]
    figure = Figure(
        name=f"references-{mode}",
        title=f"{mode.capitalize()} scaling beside published points (stars)",
        alt=f"Efficiency of this study with published points: {listed(texts, 8)}.",
        x_label="workers (as each source counts them)",
        y_label="efficiency",
        series=(*our_series, *published_series),
        table=table,
        x_log=True,
        y_percent=True,
    )
    return figure, table


def _series(label: str, points: Sequence[Reference], color: int) -> Series:
    return Series(
        label=label,
        x=[point.workers for point in points],
        y=[point.efficiency for point in points],
        style="published",
        color=color,
    )


def _table(mode: str, published: Sequence[Reference]) -> Table:
    columns = (
        Column(name="published by"), Column(name="network"), Column(name="strategy"), Column(name="n", kind="count"),
        Column(name="counts"), Column(name="servers", kind="count"), Column(name="efficiency"),
        Column(name="its sentence"), Column(name="confidence"), Column(name="note"), Column(name="study"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = [
        (
            f"{point.source}: {point.citation}", point.named or point.model, point.strategy, point.workers, point.unit,
            point.servers or None, point.quoted_efficiency, point.sentence, point.confidence, point.note,
            point.study,
        )
        for point in published
    ]  # fmt: skip
    return Table(title=f"Published points, {mode} scaling", columns=columns, rows=rows)

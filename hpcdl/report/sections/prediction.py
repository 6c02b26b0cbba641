"""Forecasts with intervals for sizes that were not run, beside the test on a held-out size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcdl.core.units import NOT_BOUNDED, counted, format_half_width, listed
from hpcdl.report.analysis.analyse import Analysis
from hpcdl.report.document import Bounds, Cell, Column, Figure, Section, Series, Table
from hpcdl.report.runs.findings import MeasuredRate, Outlook

MOST_CURVES = 8
Row = Mapping[str, Any]
"""A prediction as `hpcdl predict --json` prints it."""


def build(analysis: Analysis) -> Section | None:
    """A figure and tables for each network, or the reason why there are none."""
    if not analysis.outlooks:
        return None
    lines: list[str] = []
    items: list[Figure | Table] = []
    shown = [outlook for outlook in analysis.outlooks if outlook.document]
    if shown:
        lines.append(
            "From these runs alone, for sizes that were not run. Intervals hold one more run nine times of ten, if"
            " what limits it is in the model. `hpcdl predict` asks for other sizes, strategies, networks and machines."
        )
    for number, outlook in enumerate(shown, start=1):
        lines += [f"{outlook.subject}: {line}" for line in _sentences(outlook.document)]
        items += _items(outlook, f"prediction-{number}")
    lines += [
        f"{outlook.subject} is left out: {outlook.left_out}" for outlook in analysis.outlooks if not outlook.document
    ]
    lines += [f"{outlook.subject}: {outlook.left_out}" for outlook in shown if outlook.left_out]
    return Section(name="prediction", title="Prediction", lines=lines, items=items)


def _sentences(document: Row) -> Iterator[str]:
    for row in document["crossings"]:
        if row["what"] == "best strategy":
            rivals = listed(row["not_distinguishable"], 6)
            close = f" (not distinguishable from it: {rivals})" if rivals else ""
            instead = f" in place of {row['before']}" if row["before"] else ""
            rank = "is perhaps the best" if rivals else "is the best"
            yield f"{row['strategy']}{instead} {rank} from {counted(row['nodes'], 'node')} on{close}."
    for line in document["warnings"]:
        yield f"{line}."
    if run := document["next_run"]:
        widths = f"from {format_half_width(run['width'])} to {format_half_width(run['width_after'])}"
        yield f"the most informative next run narrows the widest interval {widths}: {run['command']}"


def _items(outlook: Outlook, name: str) -> list[Figure | Table]:
    rows: Sequence[Row] = outlook.document["predictions"]
    table = _forecasts(outlook, rows)
    items: list[Figure | Table] = [
        # The section's table has these numbers, so that its figures need no tables of their own (html.py).
        dataclasses.replace(forecast_figure(f"{name}-{measure}", measure, rows, outlook.counted, outlook.measured,
                                            f"{outlook.subject}: "), table=table)
        for measure in ("throughput", "efficiency") if any(map(is_bounded, rows))
    ]  # fmt: skip
    items.append(table)
    if outlook.document["backtest"]:
        items.append(_backtest(outlook))
    below = _below(outlook)
    return [*items, below] if below.rows else items


def _forecasts(outlook: Outlook, rows: Sequence[Row]) -> Table:
    columns = (
        Column(name="strategy"), Column(name="nodes", kind="count"), Column(name="workers", kind="count"),
        Column(name="servers", kind="count"), Column(name="step", kind="seconds"), Column.rate(outlook.counted),
        Column(name="efficiency", kind="percent"), Column(name="node-hours per epoch", kind="number"),
        Column(name="limited by"), Column(name="held-out error", kind="percent"),
    )  # fmt: skip
    error = {test["strategy"]: test["error"] for test in outlook.document["backtest"]}
    cells: list[tuple[Cell, ...]] = [
        (
            row["strategy"] + (" *" if row["marks"] else ""), row["nodes"], row["workers"], row["servers"] or None,
            _bounds(row["step_seconds"]), _bounds(row["images_per_second"]), _bounds(row["efficiency"]),
            _bounds(row["epoch_node_hours"]), row["limited_by"] if is_bounded(row) else None,
            error.get(row["strategy"]),
        )
        for row in rows
    ]  # fmt: skip
    note = (
        "[low, high] is the 90 % interval of one more run. Held-out error: by how much this strategy's largest measured"
        " size is missed when it is predicted from the smaller ones. * trust it less: `hpcdl predict` and the report's"
        " page say why."
    )
    return Table(title=f"{outlook.subject}: predicted steps", columns=columns, rows=cells, note=note)


def is_bounded(row: Row) -> bool:
    """Return whether the runs bound this prediction."""
    return row["step_seconds"]["mean"] is not None


def _bounds(interval: Mapping[str, float | None] | None) -> Cell:
    if interval is not None and interval["mean"] is None:
        return NOT_BOUNDED
    return None if interval is None else Bounds(value=interval["mean"], low=interval["low"], high=interval["high"])


def _backtest(outlook: Outlook) -> Table:
    columns = (
        Column(name="strategy"), Column(name="workers", kind="count"), Column(name="measured", kind="seconds"),
        Column(name="predicted", kind="seconds"), Column(name="error", kind="percent"), Column(name="its interval"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = [
        (
            row["strategy"], row["workers"], row["measured"], row["predicted"], row["error"],
            "holds it" if row["covered"] else "misses it",
        )
        for row in outlook.document["backtest"]
    ]  # fmt: skip
    note = "The largest measured size of each strategy, predicted without it; a step's time."
    return Table(title=f"{outlook.subject}: the test on held-out sizes", columns=columns, rows=rows, note=note)


def _below(outlook: Outlook) -> Table:
    columns = (Column(name="strategy"), Column(name="nodes"), Column(name="90 %"))
    rows: list[tuple[Cell, ...]] = []
    for row in outlook.document["crossings"]:
        if row["what"] != "best strategy":
            middle, low, high = (_nodes(row[key]) for key in ("nodes", "low", "high"))
            rows.append((row["strategy"], middle, f"[{low}, {high}]"))
    title = f"{outlook.subject}: nodes from which efficiency is below 80 %"
    return Table(title=title, columns=columns, rows=rows, note="beyond: not on up to 4,096 nodes.")


def _nodes(nodes: int | None) -> str:
    return "beyond" if nodes is None else f"{nodes:,}"


def forecast_figure(
    name: str, measure: str, rows: Sequence[Row], counting: str, measured: Sequence[MeasuredRate] = (), of: str = ""
) -> Figure:
    """Return a figure of `measure` (efficiency or throughput) of all strategies against nodes, with 90 % intervals.

    Throughputs, in units of `counting`, are shown beside the `measured` ones. `of` begins the title.
    """
    percent = measure == "efficiency"
    key = "efficiency" if percent else "images_per_second"
    column = Column(name="efficiency", kind="percent") if percent else Column.rate(counting)
    series = []
    for color, strategy in enumerate(list(dict.fromkeys(row["strategy"] for row in rows))[:MOST_CURVES]):
        strategy_rows = [row for row in rows if row["strategy"] == strategy and is_bounded(row)]
        series.append(
            Series(
                label=strategy if percent or not measured else f"{strategy}, predicted",
                x=[row["nodes"] for row in strategy_rows],
                y=[row[key]["mean"] for row in strategy_rows],
                low=[row[key]["low"] for row in strategy_rows],
                high=[row[key]["high"] for row in strategy_rows],
                color=color,
                strategy=strategy,
            )
        )
        seen = [measurement for measurement in measured if measurement.strategy == strategy and not percent]
        if seen:
            nodes, rates = (
                [measurement.nodes for measurement in seen],
                [measurement.images_per_second for measurement in seen],
            )
            open_ends = [None] * len(seen)
            series.append(Series(label=f"{strategy}, measured", x=nodes, y=rates, low=open_ends, high=open_ends,
                                 style="dots", color=color, strategy=strategy))  # fmt: skip
    table = Table(
        title=f"{of}predicted {column.name}",
        columns=(Column(name="strategy"), Column(name="nodes", kind="count"), column),
        rows=[(row["strategy"], row["nodes"], _bounds(row[key])) for row in rows],
        note="[low, high] is the 90 % interval of one more run.",
    )
    return Figure(
        name=name, title=f"{of}predicted {column.name}", alt=f"{of}predicted {column.name} against nodes.",
        x_label="nodes", y_label=column.name, series=series, table=table, x_log=True, y_log=not percent,
        y_percent=percent,
    )  # fmt: skip

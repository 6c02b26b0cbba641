"""Predictions as figures, drawn by the report's renderer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcdl.predict.forecast import Prediction
from hpcdl.report.document import Bounds, Column, Figure, Series, Table
from hpcdl.report.figures import save, svg

MOST_CURVES = 8


def draw(predictions: Sequence[Prediction], folder: Path, counted: str) -> list[Path]:
    """Write efficiency and throughput against nodes, one pair for each network, as SVG files into `folder`.

    `counted` is what the throughputs count.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for model in dict.fromkeys(item.job.model for item in predictions):
        rows = [item for item in predictions if item.job.model == model]
        for name in ("efficiency", "throughput"):
            figure = figure_of(f"{model}-{name}", name, rows, counted)
            paths += save(figure, svg(figure), folder, ["svg"])
    return paths


def figure_of(name: str, measure: str, predictions: Sequence[Prediction], counted: str) -> Figure:
    """One measure of all strategies against nodes, with its 90 % intervals."""
    percent = measure == "efficiency"
    found = [(item.job, item.efficiency if percent else item.images_per_second) for item in predictions]
    strategies = list(dict.fromkeys(job.strategy for job, _ in found))[:MOST_CURVES]
    column = Column(name="efficiency", kind="percent") if percent else Column.rate(counted)
    label = column.name
    series = []
    for color, strategy in enumerate(strategies):
        own = [(job.nodes, value) for job, value in found if job.strategy == strategy]
        series.append(
            Series(
                label=strategy,
                x=[nodes for nodes, _ in own],
                y=[value.mean for _, value in own],
                low=[value.low for _, value in own],
                high=[value.high for _, value in own],
                color=color,
            )
        )
    table = Table(
        title=f"Predicted {label}",
        columns=(Column(name="strategy"), Column(name="nodes", kind="count"), column),
        rows=[(job.strategy, job.nodes, Bounds(value=value.mean, low=value.low, high=value.high))
              for job, value in found],
        note="[low, high] is the 90 % interval of one more run.",
    )  # fmt: skip
    return Figure(
        name=name, title=f"Predicted {label}", alt=f"Predicted {label} against nodes; the table has the numbers.",
        x_label="nodes", y_label=label, series=series, table=table, x_log=True, y_log=not percent, y_percent=percent,
    )  # fmt: skip

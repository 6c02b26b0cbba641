"""Predictions of published series from their smaller sizes are as docs/performance.md says."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from hpcdl.predict.jobs import lengths_of
from tests.conftest import CommandLine
from tests.predict.published_series import (
    BEGIN,
    COLUMNS,
    END,
    PAGE,
    TABLE,
    Foreseen,
    Point,
    all_points,
    all_series,
    foreseen,
    name_cells,
    summary,
    words_for,
)

POINTS = all_points()
SAMPLE = ("resnet50, batch 64, 64 GPUs", "vgg16, batch 32, 8 GPUs", "PaddlePaddle, bert-base, batch 64, 32 GPUs")
"""A point within 10 %, a point outside, and a point of another source."""


def descriptions_of(point: Point) -> tuple[float, Foreseen, bool]:
    """Return a point's row of the table: published value, prediction, and whether the interval holds."""
    with TABLE.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == COLUMNS
    names = name_cells(point)
    (row,) = [row for row in rows if row[: len(names)] == names]
    mean, low, high = map(float, row[len(names) : -1])
    return float(row[len(names) - 1]), Foreseen(mean=mean, low=low, high=high), row[-1] == "yes"


def check(ask: CommandLine, folder: Path, point: Point) -> None:
    reported = ask(words_for(point, folder))
    assert reported.code == 0, reported.err
    found = foreseen(reported.json(), point)
    published, messages, inside = descriptions_of(point)
    assert published == pytest.approx(point.published, rel=1e-4)
    # Rounding on another machine may change a few weighted draws, but not the table's statement on a point.
    assert found.mean == pytest.approx(messages.mean, rel=0.01)
    assert found.holds(point.published) == inside == messages.holds(point.published)


@pytest.mark.parametrize("end", SAMPLE)
def test_a_sample_comes_out_as_the_table_says(ask_hpcdl: CommandLine, tmp_path: Path, end: str) -> None:
    (point,) = [one for one in POINTS if one.name.endswith(end)]
    check(ask_hpcdl, tmp_path, point)


@pytest.mark.soak
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_every_point_comes_out_as_the_table_says(ask_hpcdl: CommandLine, tmp_path: Path, point: Point) -> None:
    check(ask_hpcdl, tmp_path, point)


def test_the_line_of_the_page_is_that_of_the_table() -> None:
    reported = [(point, descriptions_of(point)[1]) for point in POINTS]
    assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip() == summary(reported)
    assert len(POINTS) >= 30


@pytest.mark.parametrize("one", all_series(), ids=lambda one: f"{one.source} {one.table} {one.model}")
def test_a_series_is_whole(one: object) -> None:
    series = next(found for found in all_series() if found == one)
    counts = {len(values) for values in (series.workers, series.nodes, series.servers, series.images_per_second)}
    assert counts == {len(series.workers)} and 2 <= series.known < len(series.workers)
    assert [*series.workers] == sorted(series.workers) and [*series.nodes] == sorted(series.nodes)
    if series.model in ("resnet50", "alexnet"):
        assert series.parameters == sum(lengths_of(series.model, None))

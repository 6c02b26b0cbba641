"""Published series of throughputs, foreseen from their smaller sizes: docs/performance.md says what comes out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcdl.predict.jobs import lengths_of
from tests.conftest import CommandLine
from tests.predict.published_series import BEGIN, END, PAGE, Point, all_points, all_series, foreseen, words_for

POINTS = all_points()
SAMPLE = ("resnet50, batch 64, 64 GPUs", "vgg16, batch 32, 8 GPUs", "PaddlePaddle, bert-base, batch 64, 32 GPUs")
"""A point that is foreseen, one that is not, and one of another source."""


def told_of(point: Point) -> tuple[str, float, str, str]:
    """Its row of the table: the published value, the predicted one, how far off in %, and whether it is inside."""
    one = point.series
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()
    who = one.table.rpartition(", ")[2] if one.source == "DLPerf" else one.machine.rpartition(" x ")[2]
    start = f"| {one.source}, {who} | {one.model}, {one.batch_per_rank} | `{one.strategy}` | "
    (row,) = [
        row for row in table
        if row.startswith(start) and f" | {one.workers[point.place]} | {point.published:,.5g} | " in row
    ]  # fmt: skip
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    return cells[5], float(cells[6].partition(" ")[0].replace(",", "")), cells[7], cells[8]


def check(ask: CommandLine, folder: Path, point: Point) -> None:
    told = ask(words_for(point, folder))
    assert told.code == 0, told.err
    found = foreseen(told.json(), point)
    published, mean, off, inside = told_of(point)
    assert published == f"{point.published:,.5g}"
    # Another machine's arithmetic moves a weighed draw or two; what the table says of a point does not change.
    assert found.mean == pytest.approx(mean, rel=0.01)
    assert found.holds(point.published) == (inside == "yes")
    assert 100 * (found.mean / point.published - 1) == pytest.approx(float(off.removesuffix(" %")), abs=1.0)


@pytest.mark.parametrize("end", SAMPLE)
def test_a_sample_comes_out_as_the_table_says(ask_hpcdl: CommandLine, tmp_path: Path, end: str) -> None:
    (point,) = [one for one in POINTS if one.name.endswith(end)]
    check(ask_hpcdl, tmp_path, point)


@pytest.mark.soak
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_every_point_comes_out_as_the_table_says(ask_hpcdl: CommandLine, tmp_path: Path, point: Point) -> None:
    check(ask_hpcdl, tmp_path, point)


def test_the_sum_of_the_table_is_that_of_its_rows() -> None:
    rows = [told_of(point) for point in POINTS]
    near = sum(abs(float(off.removesuffix(" %"))) <= 10 for _, _, off, _ in rows)
    inside = sum(said == "yes" for *_, said in rows)
    table = " ".join(PAGE.read_text().partition(BEGIN)[2].partition(END)[0].split())
    found = re.match(r"Of (\d+) points (\d+) are within 10 % \(\d+ %\), and (\d+) inside", table)
    assert found is not None
    assert [int(number) for number in found.groups()] == [len(POINTS), near, inside]
    assert len(POINTS) >= 30


@pytest.mark.parametrize("one", all_series(), ids=lambda one: f"{one.source} {one.table} {one.model}")
def test_a_series_is_whole(one: object) -> None:
    series = next(found for found in all_series() if found == one)
    counts = {len(values) for values in (series.workers, series.nodes, series.servers, series.images_per_second)}
    assert counts == {len(series.workers)} and 2 <= series.known < len(series.workers)
    assert [*series.workers] == sorted(series.workers) and [*series.nodes] == sorted(series.nodes)
    if series.model in ("resnet50", "alexnet"):
        assert series.parameters == sum(lengths_of(series.model, None))

"""Predict published series of throughputs from their smaller sizes: a line of performance.md, and a table.

`python -m tests.predict.published_series` predicts all points, which takes some minutes, and writes both again,
whatever the outcome. The strategy that stands for each exchange was fixed before any prediction.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.core.paths import share_folder
from tests.conftest import ROOT

FILES = ("tensorflow-benchmarks.toml", "dlperf.toml")
PAGE = ROOT / "docs" / "performance.md"
TABLE = ROOT / "docs" / "reference" / "prediction" / "published-series.csv"
BEGIN, END = "<!-- begin: published series -->", "<!-- end: published series -->"
COLUMNS = ["source", "machine or framework", "network", "batch", "exchange", "GPUs seen", "GPUs", "published"]
COLUMNS += ["predicted", "low", "high", "inside"]
HEADER = "strategy,model,nodes,ranks,workers,servers,batch_per_rank,gradient_bytes,images_per_second\n"


@dataclass(frozen=True, kw_only=True)
class Series:
    """Throughputs of one network on one machine by size; a prediction sees the first `known` of them."""

    source: str
    table: str
    machine: str
    model: str
    parameters: int
    strategy: str
    batch_per_rank: int
    workers: Sequence[int]
    nodes: Sequence[int]
    servers: Sequence[int]
    images_per_second: Sequence[float]
    known: int


@dataclass(frozen=True, kw_only=True)
class Point:
    """One hidden size of a series, by its index."""

    series: Series
    place: int

    @property
    def published(self) -> float:
        """Samples per second of all workers."""
        return self.series.images_per_second[self.place]

    @property
    def name(self) -> str:
        """A name that identifies the point."""
        one = self.series
        return f"{one.source}, {one.table}, {one.model}, batch {one.batch_per_rank}, {one.workers[self.place]} GPUs"


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """A predicted throughput: the value, and the ends of the 90 % interval."""

    mean: float
    low: float
    high: float

    def near(self, published: float) -> bool:
        """Return whether the prediction is within 10 % of the published value."""
        return abs(self.mean / published - 1) <= 0.10

    def holds(self, published: float) -> bool:
        """Return whether the interval includes the published value."""
        return self.low <= published <= self.high


def all_series() -> list[Series]:
    """Return the series of share/hpcdl/references."""
    found = []
    for name in FILES:
        document = tomllib.loads((share_folder() / "references" / name).read_text())
        assert document["source"]["citation"] and document["source"]["url"].startswith("https://")
        found += [Series(source=document["source"]["name"], **item) for item in document["series"]]
    return found


def all_points() -> list[Point]:
    """Return the points that no prediction has seen."""
    return [Point(series=one, place=place) for one in all_series() for place in range(one.known, len(one.workers))]


def words_for(point: Point, folder: Path) -> list[str]:
    """Return the command line that predicts a point, with its smaller sizes in a table in `folder`."""
    one = point.series
    rows = [
        f"{one.strategy},{one.model},{one.nodes[place]},{one.workers[place] + one.servers[place]},{one.workers[place]},"
        f"{one.servers[place]},{one.batch_per_rank},{4 * one.parameters},{one.images_per_second[place]}\n"
        for place in range(one.known)
    ]
    path = folder / "known.csv"
    path.write_text(HEADER + "".join(rows))
    servers = ["--servers", str(one.servers[point.place])] if one.servers[point.place] else []
    size = ["--nodes", str(one.nodes[point.place])]
    return ["predict", "--import", "csv", str(path), *size, *servers, "--strategy", one.strategy, "--json"]


def foreseen(document: dict[str, Any], point: Point) -> Foreseen:
    """Return the prediction in the output of `hpcdl predict --json`."""
    (row,) = document["predictions"]
    assert row["workers"] == point.series.workers[point.place], "another size than was published"
    return Foreseen(**row["images_per_second"])


def summary(reported: Sequence[tuple[Point, Foreseen]]) -> str:
    """Return the summary line of the page."""
    near = sum(found.near(point.published) for point, found in reported)
    inside = sum(found.holds(point.published) for point, found in reported)
    shares = [f"{100 * count / len(reported):.0f} %" for count in (near, inside)]
    first = f"Of {len(reported)} points {near} are within 10 % ({shares[0]})"
    return f"{first}, and {inside} inside the 90 % interval ({shares[1]})."


def name_cells(point: Point) -> list[str]:
    """Return the first cells of a row of the table: the question and the published value."""
    one = point.series
    framework = one.table.rpartition(", ")[2] if one.source == "DLPerf" else one.machine.rpartition(" x ")[2]
    seen = " ".join(map(str, one.workers[: one.known]))
    size = one.workers[point.place]
    return [
        *(one.source, framework, one.model, str(one.batch_per_rank), one.strategy),
        *(seen, str(size), f"{point.published:.5g}"),
    ]


def _rows(reported: Sequence[tuple[Point, Foreseen]]) -> Iterator[list[str]]:
    yield COLUMNS
    for point, found in reported:
        values = [f"{value:.5g}" for value in (found.mean, found.low, found.high)]
        yield [*name_cells(point), *values, "yes" if found.holds(point.published) else "no"]


def main() -> None:
    """Predict every point and write the results."""
    reported = []
    for point in all_points():
        with tempfile.TemporaryDirectory() as folder:
            line = [sys.executable, "-m", "hpcdl", *words_for(point, Path(folder))]
            finished = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
        if finished.returncode:
            sys.exit(f"{point.name}: {finished.stderr}")
        reported.append((point, foreseen(json.loads(finished.stdout), point)))
        print(point.name, reported[-1][1], point.published, flush=True)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text("\n".join([f"{before}{BEGIN}", summary(reported), f"{END}{after}"]))
    with TABLE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(_rows(reported))


if __name__ == "__main__":
    main()

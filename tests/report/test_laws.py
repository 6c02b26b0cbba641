"""Studies made from known laws: the report finds their groups, bases, numbers and verdicts again."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from hpcdl.core.records.run_record import HistoryPoint
from hpcdl.core.statistics import estimate
from hpcdl.report.analysis.analyse import Analysis, analyse
from hpcdl.report.analysis.comparisons import STRATEGIES
from hpcdl.report.analysis.scaling import scaling_rows
from hpcdl.report.runs.run import Run
from hpcdl.report.runs.sources import Gathered
from hpcdl.report.sections.learning import final_accuracy
from tests.report.synthetic import make_run

NOISE = 0.02
BASE_RATE = 100.0
BUSIEST = 0.06
"""Seconds of the busiest server for each worker that sends to it, over those of a step."""


def ring(n: int, servers: int, serial: float) -> float:
    return 1 / (1 + serial * (n - 1) / n)


def parameter_servers(n: int, servers: int, serial: float) -> float:
    """The one-constant law of the Cori facts: the busiest server bounds the step."""
    return 1 / max(1.0, BUSIEST * n / servers)


def asynchronous(n: int, servers: int, serial: float) -> float:
    return 1 / (1 + serial)


LAWS: dict[str, Callable[[int, int, float], float]] = {
    "ring": ring,
    "ps": parameter_servers,
    "async-easgd": asynchronous,
}


@dataclass(frozen=True)
class Point:
    """One setting of the study as it was made."""

    strategy: str
    n: int
    servers: int
    rate: str
    compress: str


@dataclass(frozen=True)
class Study:
    """Its runs, the true efficiency of each point over one worker, and the usable runs' throughputs."""

    runs: tuple[Run, ...]
    truth: dict[Point, float]
    usable: dict[Point, list[float]]
    failed: int


def make_study(seed: int) -> Study:
    """Some strategies and settings at some sizes; uneven repeats, one run in ten failed, all shuffled."""
    chance = random.Random(seed)
    sizes = sorted(chance.sample([1, 2, 4, 8, 16, 32], chance.randint(2, 5)))
    mode = chance.choice(["weak", "strong", ""])
    rates = chance.sample(["0.1", "0.01", "0.001"], chance.randint(1, 2))
    compressions = ["none", *(["fp16"] if chance.random() < 0.4 else [])]
    serial = chance.uniform(0.0, 0.5)
    runs: list[Run] = []
    truth: dict[Point, float] = {}
    usable: dict[Point, list[float]] = {}
    for strategy in chance.sample(list(LAWS), chance.randint(1, 3)):
        for n in sizes:
            servers = 0 if strategy == "ring" else max(1, n // 4)
            for rate in rates:
                for compress in compressions:
                    point = Point(strategy, n, servers, rate, compress)
                    speed = BASE_RATE * (1.5 if compress == "fp16" else 1.0)
                    truth[point] = LAWS[strategy](n, servers, serial)
                    for _ in range(chance.randint(1, 5)):
                        images = n * speed * truth[point] * chance.lognormvariate(0, NOISE)
                        failed = chance.random() < 0.1
                        if not failed:
                            usable.setdefault(point, []).append(images)
                        runs.append(run_of(point, images, mode, failed, chance))
    chance.shuffle(runs)
    return Study(tuple(runs), truth, usable, sum(run.status == "failed" for run in runs))


def run_of(point: Point, images: float, mode: str, failed: bool, chance: random.Random) -> Run:
    config = {"learning-rate": point.rate, "compress": point.compress, "seed": str(chance.randrange(99)),
              "keep-checkpoints": str(chance.choice([3, 5]))}  # fmt: skip
    batch = 1024 // point.n if mode == "strong" else 32
    return make_run(
        point.n, images, strategy=point.strategy, servers=point.servers, nodes=point.n + point.servers, mode=mode,
        batch_per_rank=batch, config=config, status="failed" if failed else "finished",
    )  # fmt: skip


def check(seed: int) -> None:
    study = make_study(seed)
    if not study.usable:
        return
    analysis = analyse(Gathered(runs=study.runs))
    rows = scaling_rows(analysis.curves, analysis.varying)
    found = {point_of(row, analysis, study): row for row in rows}
    assert set(found) == set(study.usable) and len(rows) == len(found), "every setting is one point, and only one"
    for point, row in found.items():
        values = study.usable[point]
        assert row["n"] == len(values)
        assert row["images_per_second"]["mean"] == pytest.approx(statistics.fmean(values))
        base = base_of(point, study)
        assert (row["base"], row["base_strategy"]) == (base.n, point.strategy)
        expected = statistics.fmean(values) / statistics.fmean(study.usable[base]) * base.n / point.n
        assert row["efficiency"]["mean"] == pytest.approx(expected)
        assert expected == pytest.approx(study.truth[point] / study.truth[base], rel=6 * NOISE)
        assert (row["efficiency"]["low"] is None) == (min(len(values), len(study.usable[base])) < 2 and point != base)
    told = [line for line in analysis.warnings if "failed, left out of every mean" in line]
    assert bool(told) == bool(study.failed)
    check_verdicts(analysis)


def point_of(row: dict[str, Any], analysis: Analysis, study: Study) -> Point:
    (rate,) = {row["settings"].get("learning-rate", float(next(iter(study.usable)).rate))}
    compress = row["settings"].get("compress", next(iter(study.usable)).compress)
    (text,) = [item for item in ("0.1", "0.01", "0.001") if float(item) == rate]
    return Point(row["strategy"], row["workers"], row["servers"], text, compress)


def base_of(point: Point, study: Study) -> Point:
    alike = (point.strategy, point.rate, point.compress)
    return min(
        (other for other in study.usable if (other.strategy, other.rate, other.compress) == alike),
        key=lambda other: other.n,
    )


def check_verdicts(analysis: Analysis) -> None:
    """What is decided is so: the ratio of the true laws is on the verdict's side, within the noise of its runs."""
    for item in analysis.comparisons:
        if item.decided and item.ratio.low is not None and item.ratio.high is not None:
            assert not item.ratio.low <= 1 <= item.ratio.high
            assert item.a_is_better == (item.ratio.value > 1)
        if item.ratio.p_value is None:
            assert not item.decided
    for contest in analysis.contests:
        assert contest.kind == STRATEGIES
        settings = [(item.first.strategy, *item.first.settings.items()) for item in contest.contenders]
        assert len(set(settings)) == len(settings), "no setting contends twice"


@pytest.mark.parametrize("seed", range(50))
def test_a_random_study_comes_back_right(seed: int) -> None:
    check(seed)


@pytest.mark.soak
def test_a_thousand_random_studies_come_back_right() -> None:
    for seed in range(1000, 2000):
        check(seed)


def cover(num_studies: int) -> dict[str, float]:
    """How often the intervals of a report hold the truth: three runs a point, five at the base, 4 % noise."""
    chance = random.Random(11)
    held = dict.fromkeys(("throughput", "efficiency", "speed-up", "log ratio", "accuracy"), 0)
    for _ in range(num_studies):
        runs = [make_run(1, 100 * chance.lognormvariate(0, 0.04), history=reached(0.9, chance)) for _ in range(5)]
        runs += [make_run(8, 640 * chance.lognormvariate(0, 0.04), history=reached(0.9, chance)) for _ in range(3)]
        runs += [make_run(8, 800 * chance.lognormvariate(0, 0.04), strategy="tree") for _ in range(3)]
        analysis = analyse(Gathered(runs=tuple(runs)))
        (curve,) = [item for item in analysis.curves if item.first.strategy == "ring"]
        point = curve.points[1]
        rate = point.throughput
        (verdict,) = analysis.comparisons
        accuracy = estimate([final[0] for run in runs[:5] if (final := final_accuracy(run)) is not None])
        held["throughput"] += abs(rate.mean - 640) <= (rate.ci95 or 0)
        held["efficiency"] += (point.efficiency.low or 9) <= 0.8 <= (point.efficiency.high or 0)
        held["speed-up"] += (point.speedup.low or 9) <= 6.4 <= (point.speedup.high or 0)
        truth = 0.8 if verdict.a == "ring" else 1.25
        held["log ratio"] += (verdict.ratio.low or 9) <= truth <= (verdict.ratio.high or 0)
        held["accuracy"] += abs(accuracy.mean - 0.9) <= (accuracy.ci95 or 0)
    return {name: count / num_studies for name, count in held.items()}


def reached(truth: float, chance: random.Random) -> tuple[HistoryPoint, ...]:
    return (HistoryPoint(epoch=1.0, step=1, seconds=1.0, val_accuracy=truth + chance.gauss(0, 0.01)),)


def test_intervals_cover_what_they_should_in_a_few_studies() -> None:
    assert all(0.9 <= share <= 0.99 for share in cover(300).values())


@pytest.mark.soak
def test_intervals_cover_93_to_97_percent() -> None:
    covered = cover(2000)
    assert all(0.93 <= share <= 0.97 for share in covered.values()), covered

"""A verdict needs evidence, and the evidence is corrected for multiple comparisons."""

from __future__ import annotations

import random

import pytest

from hpcdl.core.errors import UnknownNameError, UsageError
from hpcdl.core.records.run_record import HistoryPoint
from hpcdl.report.analysis.analyse import analyse
from hpcdl.report.analysis.comparisons import build_contests, check_comparable, compare, comparisons, corrected
from hpcdl.report.analysis.settings import by_varied_settings
from hpcdl.report.compose.build import compose
from hpcdl.report.document import Interval, Table
from hpcdl.report.runs.run import Run
from hpcdl.report.runs.sources import Gathered
from tests.report.synthetic import make_run


def pair(a: list[float], b: list[float]) -> list[Run]:
    return [make_run(2, rate, strategy="ring") for rate in a] + [make_run(2, rate, strategy="ps") for rate in b]


def verdict(runs: list[Run]) -> str:
    (found,) = corrected(comparisons(build_contests(runs)))
    return found.verdict


def test_a_clear_difference_is_a_verdict() -> None:
    assert verdict(pair([150, 151, 149], [100, 101, 99])) == "ring better than ps, 1.5 times"


def test_noise_is_no_verdict() -> None:
    assert verdict(pair([100, 130, 90], [100, 95, 120])) == "not distinguishable with 3 runs"


def test_single_runs_are_no_verdict_however_far_apart() -> None:
    assert verdict(pair([1000], [1])) == "not distinguishable with 1 run"


def test_more_looks_need_more_evidence() -> None:
    one = compare("strategies", "images_per_second", "here", ("a", [100, 103, 106]), ("b", [95, 97, 99]))
    assert one is not None
    assert corrected([one])[0].decided
    noise = [
        compare("strategies", "images_per_second", f"n{i}", ("a", [100 + i, 107, 91]), ("b", [104, 99, 93 + i]))
        for i in range(9)
    ]
    among_many = corrected([one, *(item for item in noise if item is not None)])[0]
    assert among_many.ratio == one.ratio
    assert not among_many.decided


def test_false_verdicts_are_rare_over_a_whole_report() -> None:
    """For ten equal strategies, Holm's method keeps the chance of any verdict in a report at 5 %."""
    random_source = random.Random(1)
    wrong = 0
    for _ in range(200):
        runs = [
            make_run(2, 100 * random_source.lognormvariate(0, 0.03), strategy=f"s{number}")
            for number in range(5)
            for _ in range(4)
        ]
        wrong += any(item.decided for item in corrected(comparisons(build_contests(runs))))
    assert wrong <= 20


def test_only_the_same_job_is_compared() -> None:
    runs = [make_run(2, 100.0, strategy="ring"), make_run(2, 100.0, strategy="ps", batch_per_rank=64)]
    assert build_contests(runs) == []
    placed = [make_run(4, 1.0, nodes=1, ranks_per_node=4), make_run(4, 1.0, strategy="ps", nodes=4, ranks_per_node=1)]
    assert comparisons(build_contests(placed)) == []


def test_time_to_accuracy_is_compared_at_an_accuracy_that_all_reached() -> None:
    def run(strategy: str, seconds: float, accuracy: float) -> Run:
        points = (
            HistoryPoint(epoch=1.0, step=1, seconds=seconds, val_accuracy=0.7),
            HistoryPoint(epoch=2.0, step=2, seconds=2 * seconds, val_accuracy=accuracy),
        )
        return make_run(2, 100.0 + seconds, strategy=strategy, history=points)

    runs = [run("ring", 10 + i, 0.905) for i in range(3)] + [run("ps", 30 + i, 0.95) for i in range(3)]
    (contest,) = build_contests(runs)
    assert contest.target == 0.9
    found = {item.measure: item for item in corrected(comparisons([contest]))}
    assert found["seconds_to_accuracy"].verdict.startswith("ring better than ps, 2.8")
    assert found["images_per_second"].verdict.startswith("ps better")


def machines(rates: dict[str, float], **changes: object) -> list[Run]:
    noise = (0.99, 1.0, 1.01)
    return [
        make_run(2, rate * factor, machine=machine, threads=threads, **changes)
        for threads, (machine, rate) in enumerate(rates.items(), start=1)
        for factor in noise
    ]


def test_machines_are_compared_at_equal_settings() -> None:
    """Machines are compared with their own thread counts, as the documents do; strategies are never mixed."""
    runs = machines({"KNL": 100, "SKX": 150, "GPU": 900}) + machines({"KNL": 50}, strategy="ps")
    contests = build_contests(runs, "machine")
    (contest,) = contests
    assert [item.name for item in contest.contenders] == ["KNL", "SKX", "GPU"]
    judged = {(item.a, item.b): item for item in corrected(comparisons(contests))}
    assert len(judged) == 3
    assert judged["KNL", "GPU"].ratio.value == pytest.approx(1 / 9)
    assert judged["KNL", "GPU"].ratio.low is not None and judged["KNL", "GPU"].verdict == "GPU better than KNL, 9 times"


def test_values_of_a_setting_are_compared_with_all_else_equal() -> None:
    configs = [{"learning-rate": rate, "compress": kind} for rate in ("0.1", "0.01") for kind in ("none", "fp16")]
    runs = by_varied_settings([make_run(2, 100.0 + i, config=config) for config in configs for i in range(3)])
    contests = build_contests(runs, "compress")
    assert len(contests) == 2, "one for each learning rate"
    assert {item.name for contest in contests for item in contest.contenders} == {"compress none", "compress fp16"}
    with pytest.raises(UsageError, match="every report compares strategies; leave --compare out"):
        check_comparable("strategy", [make_run(1, 100.0), make_run(1, 90.0, strategy="tree")])
    with pytest.raises(UsageError, match="all runs that were measured have the same"):
        check_comparable("period", runs)
    with pytest.raises(UnknownNameError, match="did you mean 'machine'"):
        check_comparable("machin", runs)


def test_the_communication_share_is_the_same_in_every_table() -> None:
    """Every table computes the communication share from mean times, not as the mean of the runs' shares."""
    runs = [
        make_run(workers, 100.0 * workers, strategy=strategy,
                 parts={"compute": 0.5 + 0.3 * repeat, "exposed_communication": 0.1 * workers, "wait": 0.02 * repeat})
        for strategy in ("ring", "tree") for workers in (1, 2) for repeat in (0, 1, 2)
    ]  # fmt: skip
    tables = {table.title: table for section in compose(analyse(Gathered(runs=tuple(runs)))).sections
              for table in section.items if isinstance(table, Table)}  # fmt: skip
    by_point = tables["Seconds of a step"]
    at = [column.name for column in by_point.columns].index("communication share")
    shares = sorted(row[at] for row in by_point.rows if isinstance(row[at], float))
    contenders = tables["Each contender at each shared setting"]
    at = [column.name for column in contenders.columns].index("communication share")
    cells = [row[at] for row in contenders.rows]
    assert shares and sorted(cell.value for cell in cells if isinstance(cell, Interval)) == pytest.approx(shares)
    assert all(isinstance(cell, Interval) and cell.half and cell.n == 3 for cell in cells)


def test_many_contenders_are_compared_with_the_fastest_only() -> None:
    runs = by_varied_settings(
        [make_run(2, 100.0 + i, config={"learning-rate": str(i + 1)}) for i in range(40) for _ in "ab"]
    )
    found = comparisons(build_contests(runs))
    assert len(found) == 39

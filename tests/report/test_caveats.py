"""Every caveat appears if it applies, and only then."""

from __future__ import annotations

import pytest

from hpcdl.core.records.run_record import RankRecord
from hpcdl.report.analysis.caveats import caveats
from hpcdl.report.analysis.scaling import build_curves
from hpcdl.report.runs.run import Run
from tests.report.synthetic import as_run, make_record, make_run


def told(runs: list[Run], unreadable: tuple[str, ...] = ()) -> list[str]:
    return caveats(runs, unreadable, build_curves(runs))


def study(sizes: tuple[int, ...] = (1, 2), repeats: int = 3, **changes: object) -> list[Run]:
    return [make_run(n, 100.0 * n + i, **changes) for n in sizes for i in range(repeats)]


def slowing(n: int) -> list[Run]:
    """Four repeats, each slower than the one before, as a node that gets warmer."""
    rates = (100.0, 97.2, 95.0, 92.1)
    return [make_run(n, n * rate, started_at=f"2026-01-0{day}T00:00:00") for day, rate in enumerate(rates, start=1)]


def with_losses(*losses: float | None, **changes: object) -> list[Run]:
    return [make_run(1, 100.0 + i, loss=loss, **changes) for i, loss in enumerate(losses)]


@pytest.mark.parametrize(
    "runs",
    [
        with_losses(0.02, 0.05, 0.021),
        with_losses(-0.02, 0.5, -0.021),
        with_losses(None, None, None),
        with_losses(0.02, None),
        with_losses(0.02, None, 0.02, imported=True),
        with_losses(0.02, None, 0.02, model="emulated:lenet"),
        with_losses(0.02, 0.5, 0.02, accuracy=0.9),
    ],
)
def test_losses_that_tell_nothing_are_not_called_diverged(runs: list[Run]) -> None:
    assert not [line for line in told(runs) if "diverged" in line]


def test_one_run_is_counted_as_one() -> None:
    lines = told([make_run(1, 100.0)])
    assert any("one size alone" in line for line in lines)
    assert any("single measurement" in line for line in lines)


def test_a_clean_study_has_no_caveat() -> None:
    assert told(study()) == []


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (study(repeats=1), "single measurement"),
        ([*study(), make_run(2, 201.0)], "uneven repeats"),
        (study(sizes=(4, 8)), "missing base"),
        ([*study(sizes=(1,), strategy="single"), *study(sizes=(4,))], "(--base single makes its one worker the base"),
        (
            [
                *study(sizes=(1,), strategy="ps", ranks=2, servers=1),
                *study(sizes=(1,), strategy="single"),
                *study(sizes=(4,)),
            ],
            "(--base single makes its one worker the base",
        ),
        (study(sizes=(1,), loss=0.5, accuracy=0.9, config={"seed": "0"}), "ring lenet with 1 worker as 1 measurement"),
        ([*study(), *study(machine="other")], "mixed machines"),
        ([*study(), *study(version="hpcdl 2")], "mixed versions"),
        ([*study(), make_run(1, -5.0, name="broken")], "zero or negative"),
        ([*study(), make_run(1, None, name="absent")], "without a throughput"),
        ([*study(), make_run(1, 50.0, status="failed", message="rank 1 died")], "failed"),
        ([*study(), make_run(1, None, status="running")], "did not finish"),
        ([*study(sizes=(1,), threads=4), *study(sizes=(2,), threads=2)], "threads per worker change"),
        ([*study(), *study(sizes=(1,), batch_per_rank=100)], "one size alone"),
        ([*study(), make_run(1, 100.5, parts={"compute": -1.0})], "negative part"),
        (study(warnings=("bound to nothing",)), "bound to nothing"),
        (
            [*study(), make_run(1, 100.5, name="kr", resumed_from_steps=(9, 30))],
            "node-hours are of all its steps as if on its last nodes",
        ),
        ([*study(sizes=(2,)), make_run(1, 99.5), make_run(1, 99.5)], "exactly the same throughput at 1 point:"),
        ([make_run(1, 100.0), make_run(2, 230.0)], "above 100 % that may be chance"),
        ([make_run(n, x) for n, x in ((1, 100.0), (2, 160.0), (4, 380.0))], "rises again at a larger size"),
        ([make_run(n, 90.0 * n, ranks_per_node=per) for n, per in ((4, 1), (8, 4))], "ranks per node change"),
        (study(first_and_last_steps=(0.02, 0.044)), "steps of 6 runs changed their speed during the run"),
        (
            [make_run(1, 100.0 + i, accuracy=value) for i, value in enumerate((0.1, 0.9, 0.88))],
            "1 run ended with less than half the accuracy of the repeats, kept in every mean",
        ),
        (with_losses(0.02, 0.1, 0.021), "1 run ended with a loss above 3 x that of the repeats, or not finite"),
        (with_losses(0.02, None, 0.021), "run-1 no finite number, median 0.0205"),
        ([run for n in (1, 2) for run in slowing(n)], "drifts from the first to the last repeat of a setting"),
        ([run for n in (2, 1) for run in reversed(slowing(n))], "weak ring lenet -8 %"),
    ],
)
def test_each_caveat_is_reported(runs: list[Run], words: str) -> None:
    assert any(words in line for line in told(runs)), told(runs)


@pytest.mark.parametrize("rates", [(100.0, 210.0, 420.0), (100.0, 190.0, 400.0)])
def test_efficiencies_that_hardly_rise_are_no_caveat(rates: tuple[float, ...]) -> None:
    assert not any(
        "rises again" in line for line in told([make_run(n, x) for n, x in zip((1, 2, 4), rates, strict=True)])
    )


@pytest.mark.parametrize(
    ("steps", "told_of"),
    [
        ([0.02] * 100 + [0.04] * 100, True),
        ([0.04] * 100 + [0.02] * 100, True),
        ([0.02, 0.02, 0.2] * 70, False),
        ([0.02] * 3 + [0.025] * 100 + [0.02] * 100, False),
        ([0.02] * 10 + [0.04] * 15, False),
    ],
)
def test_steps_that_change_their_speed_in_a_run_are_reported(steps: list[float], told_of: bool) -> None:
    run = as_run(make_record(1, 1600.0, step_seconds=steps, steps=len(steps)), "one")
    assert any("one 20 ms to 40 ms" in line or "one 40 ms to 20 ms" in line for line in told([run])) is told_of


@pytest.mark.parametrize(
    ("seconds", "told_of"),
    [
        ((0.02, 0.02, 0.05, 0.021), "one rank 2 on node2 2.5 x"),
        ((0.02, 0.05), "one rank 1 on node1 2.5 x"),
        ((0.02, 0.02, 0.025, 0.021), ""),
        ((0.0001, 0.0001, 0.0003, 0.0001), ""),
        ((0.02, 0.05, 0.05, 0.05), ""),
    ],
)
def test_a_worker_that_computes_much_longer_is_reported(seconds: tuple[float, ...], told_of: str) -> None:
    ranks = [
        RankRecord(rank=rank, host=f"node{rank}", role="worker", parts={"compute": compute})
        for rank, compute in enumerate(seconds)
    ]
    run = as_run(make_record(len(seconds), 1000.0, rank_records=ranks), "one")
    lines = [line for line in told([run]) if "one worker computes 1.5 times" in line]
    assert [line.rpartition(": ")[2] for line in lines] == ([told_of] if told_of else [])


@pytest.mark.parametrize(("num_steps", "told_of"), [(3, False), (5, True), (7, True), (8, False), (50, False)])
def test_few_steps_after_the_warm_up_are_reported_and_call_no_worker_slow(num_steps: int, told_of: bool) -> None:
    ranks = [
        RankRecord(rank=rank, host="n0", role="worker", parts={"compute": 0.02 + 0.03 * rank}) for rank in range(2)
    ]
    record = make_record(2, 1000.0, step_seconds=[0.064] * num_steps, steps=num_steps, rank_records=ranks)
    lines = told([as_run(record, "one")])
    assert any("fewer than 5 steps after the warm-up in 1 run" in line for line in lines) is told_of
    assert any("one worker computes" in line for line in lines) is (num_steps >= 8)


def test_runs_of_one_seed_that_learned_apart_are_no_caveat() -> None:
    runs = [make_run(1, 100.0 + i, loss=0.5 + i, accuracy=0.9, config={"seed": "0"}) for i in range(3)]
    assert told([*runs, make_run(2, 200.0), make_run(2, 201.0), make_run(2, 202.0)]) == []


def test_repeats_in_no_order_do_not_drift() -> None:
    shuffled = [make_run(n, n * rate) for n in (1, 2) for rate in (95.0, 100.0, 92.0, 97.0)]
    assert not any("drift" in line for line in told(shuffled))


def test_unreadable_records_are_reported() -> None:
    assert any("could not be read" in line and "a.json" in line for line in told(study(), ("a.json is damaged",)))


def test_many_points_are_named_by_a_few() -> None:
    lines = told(study(sizes=tuple(range(1, 40)), repeats=1))
    (line,) = [line for line in lines if "single measurement" in line]
    assert "39 points" in line
    assert "36 more" in line


def test_repeats_with_other_variables_of_the_environment_are_reported() -> None:
    def said(*environments: dict[str, str]) -> str:
        runs = [make_run(2, 100.0, environment=environment) for environment in environments]
        return " ".join(line for line in told(runs) if "variables of the environment" in line)

    assert "UCX_TLS (rc, tcp, unset)" in said({"UCX_TLS": "rc"}, {"UCX_TLS": "tcp"}, {})
    assert not said({"UCX_TLS": "rc"}, {"UCX_TLS": "rc"})
    # A launcher's own, and those of a job.
    assert not said({"OMPI_MCA_ess_base_jobid": "1", "SLURM_JOB_ID": "1"}, {"OMPI_MCA_ess_base_jobid": "2"})
    assert not said({"FI_OPX_UUID": "1"}, {"FI_OPX_UUID": "2"})

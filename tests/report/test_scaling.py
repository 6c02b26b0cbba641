"""Efficiency follows its definitions, on runs with known numbers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.config.load import all_settings
from hpcdl.config.schema import TrainConfig
from hpcdl.report.analysis.analyse import analyse
from hpcdl.report.analysis.caveats import caveats
from hpcdl.report.analysis.comparisons import build_contests
from hpcdl.report.analysis.scaling import COLUMNS, Curve, build_curves, flat_row, scaling_rows, with_base_of
from hpcdl.report.analysis.settings import MATTERING, by_varied_settings, trifling_differences
from hpcdl.report.runs.anonymous import anonymised
from hpcdl.report.runs.run import Run
from hpcdl.report.runs.sources import Gathered
from tests.report.synthetic import NOISE, as_run, make_record, make_run


def of_mode(runs: list[Run], mode: str) -> list[Curve]:
    return [curve for curve in build_curves(runs) if curve.mode == mode]


def test_weak_efficiency_is_throughput_per_worker_over_the_base_s() -> None:
    runs = [make_run(n, rate * noise, mode="weak") for n, rate in ((1, 100), (4, 320)) for noise in NOISE]
    (curve,) = of_mode(runs, "weak")
    assert [point.n for point in curve.points] == [1, 4]
    assert curve.points[1].speedup.value == pytest.approx(3.2)
    assert curve.points[1].efficiency.value == pytest.approx(0.8)
    assert curve.points[1].efficiency.low < 0.8 < curve.points[1].efficiency.high  # type: ignore[operator]
    assert (curve.base.efficiency.value, curve.base.efficiency.ci95) == (1.0, 0.0)


def test_strong_efficiency_is_speedup_over_n() -> None:
    runs = [make_run(n, rate, mode="strong", batch_per_rank=64 // n) for n, rate in ((2, 100), (8, 200))]
    (curve,) = of_mode(runs, "strong")
    assert curve.base.n == 2
    assert curve.points[1].speedup.value == pytest.approx(2.0)
    assert curve.points[1].efficiency.value == pytest.approx(0.5)


def test_scale_up_counts_threads() -> None:
    runs = [make_run(1, rate, threads=threads) for threads, rate in ((1, 100), (4, 300))]
    (curve,) = of_mode(runs, "scale-up")
    assert curve.axis == "threads"
    assert curve.points[1].efficiency.value == pytest.approx(0.75)


def test_servers_count_per_node_only() -> None:
    runs = [make_run(n, 100 * n, strategy="ps", servers=1, nodes=n + 1) for n in (1, 3)]
    (curve,) = of_mode(runs, "weak")
    assert curve.points[1].efficiency.value == pytest.approx(1.0)
    assert curve.points[1].efficiency_per_node.value == pytest.approx(3.0 * 2 / 4)


def test_runs_without_a_mode_join_the_curves_that_they_make() -> None:
    runs = [make_run(1, 100, batch_per_rank=64), make_run(2, 190, batch_per_rank=64), make_run(2, 150)]
    assert {(curve.mode, tuple(point.n for point in curve.points)) for curve in build_curves(runs)} == {
        ("weak", (1, 2)),
        ("strong", (1, 2)),
    }


def test_a_lonely_run_is_a_weak_point_of_its_own() -> None:
    (curve,) = build_curves([make_run(2, 150)])
    assert (curve.mode, len(curve.points)) == ("weak", 1)


def test_machines_and_versions_are_never_averaged() -> None:
    runs = [make_run(n, 100 * n, machine=machine) for n in (1, 2) for machine in ("a", "b")]
    runs += [make_run(n, 50 * n, machine="a", version="hpcdl 2") for n in (1, 2)]
    curves = of_mode(runs, "weak")
    assert len(curves) == 3
    assert all(len(point.runs) == 1 for curve in curves for point in curve.points)


def test_two_settings_at_one_n_split_the_curve() -> None:
    runs = [make_run(n, 100 * n, strategy="ps", servers=servers) for n in (1, 2) for servers in (1, 2)]
    curves = of_mode(runs, "weak")
    assert {curve.split for curve in curves} == {(("servers", 1),), (("servers", 2),)}


def test_servers_that_grow_with_the_workers_are_one_curve() -> None:
    runs = [make_run(n, 100 * n, strategy="ps", servers=n) for n in (1, 2, 4)]
    (curve,) = of_mode(runs, "weak")
    assert len(curve.points) == 3


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf"), None])
def test_impossible_throughput_is_in_no_mean(rate: float | None) -> None:
    (curve,) = build_curves([make_run(1, 100), make_run(1, rate)])
    assert curve.base.throughput.mean == 100
    assert curve.base.throughput.n == 1


@given(
    st.lists(
        st.builds(
            lambda workers, batch, rate, strategy, servers, mode: make_run(
                workers, rate, batch_per_rank=batch, strategy=strategy, servers=servers, mode=mode
            ),
            st.integers(1, 4), st.sampled_from([8, 16]), st.floats(1, 1e3), st.sampled_from(["ring", "ps"]),
            st.integers(0, 2), st.sampled_from(["", "weak", "strong"]),
        ),
        max_size=20,
    )
)  # fmt: skip
def test_no_run_is_lost_or_mixed(runs: list[Run]) -> None:
    curves = build_curves(runs)
    assert {id(run) for curve in curves for point in curve.points for run in point.runs} == set(map(id, runs))
    for curve in curves:
        for point in curve.points:
            settings = {(run.strategy, run.workers, run.servers, run.batch_per_rank) for run in point.runs}
            assert len(settings) == 1
            assert len({id(run) for run in point.runs}) == len(point.runs)


def test_rows_have_the_documented_keys() -> None:
    (row, _) = scaling_rows(build_curves([make_run(n, 100 * n, threads=2) for n in (1, 2)]))
    assert set(row) >= {
        "mode", "strategy", "model", "nodes", "ranks", "workers", "servers", "ranks_per_node", "threads",
        "batch_per_rank", "global_batch", "machine", "version", "n", "images_per_second", "speedup", "efficiency",
    }  # fmt: skip
    assert all(set(row[name]) >= {"mean", "std", "ci95"} for name in ("images_per_second", "speedup", "efficiency"))
    assert row["n"] == 1
    assert set(flat_row(row)) == set(COLUMNS)


def test_efficiency_intervals_cover_the_truth() -> None:
    """Efficiency intervals cover the truth: 1,000 studies, three runs per point, 4 % noise."""
    random_source = random.Random(3)
    covered = {2: 0, 8: 0}
    truth = {1: 1.0, 2: 0.95, 8: 0.8}
    for _ in range(1000):
        runs = [
            make_run(n, 100 * n * e * random_source.lognormvariate(0, 0.04)) for n, e in truth.items() for _ in "abc"
        ]
        (curve,) = build_curves(runs)
        for point in curve.points[1:]:
            low, high = point.efficiency.low or 0, point.efficiency.high or 0
            covered[point.n] += low <= truth[point.n] <= high
    assert all(900 <= count <= 990 for count in covered.values()), covered


def test_settings_that_cost_time_make_curves_of_their_own() -> None:
    settings = ({"compress": "none"}, {"compress": "fp16"})
    runs = by_varied_settings([make_run(n, 100.0 * n, config=config) for n in (1, 2) for config in settings])
    curves = of_mode(runs, "weak")
    assert {curve.variant for curve in curves} == {"compress none", "compress fp16"}
    mixed = by_varied_settings([make_run(1, 100.0, config=settings[0]), make_run(2, 190.0, config=settings[1])])
    assert [len(curve.points) for curve in build_curves(mixed)] == [1, 1], "no efficiency over two kinds of step"


def other_value(key: str) -> str:
    item = next(item for item in all_settings(TrainConfig) if item.key == key)
    return next((choice for choice in item.choices if choice != item.default), "7")


@pytest.mark.parametrize("key", MATTERING)
def test_runs_that_differ_in_a_setting_that_matters_are_never_averaged(key: str) -> None:
    configs = ({"warmup-steps": "3"}, {key: other_value(key), "warmup-steps": "3"})
    runs = by_varied_settings([make_run(n, 100.0 * n, config=config) for n in (1, 2) for config in configs])
    points = [point for curve in build_curves(runs) for point in curve.points]
    assert [len(point.runs) for point in points] == [1] * 4
    (contest,) = build_contests([run for run in runs if run.workers == 2])
    assert len(contest.contenders) == 2


def test_data_that_changed_under_one_name_are_never_averaged() -> None:
    """Runs on a folder that was sharded again between them are not averaged: the name is the same, the data are not."""
    sums = {"before": "0123456789abcdef", "after": "fedcba9876543210"}
    runs = [
        as_run(make_record(n, rate * n, data="digits", data_checksum=sums[when]), f"{when}-{n}")
        for n in (1, 2) for when, rate in (("before", 100.0), ("after", 200.0))
    ]  # fmt: skip
    found = analyse(Gathered(runs=tuple(runs)))
    rates = {point.throughput.mean for curve in found.curves for point in curve.points}
    assert len(found.curves) == 2 and rates == {100.0, 200.0, 400.0}
    assert {curve.first.data for curve in found.curves} == {"digits (01234567)", "digits (fedcba98)"}
    assert any("several contents" in line and "digits (01234567, fedcba98)" in line for line in found.warnings)
    hidden = analyse(anonymised(Gathered(runs=tuple(runs))))
    assert {curve.first.data for curve in hidden.curves} == {"digits (1)", "digits (2)"}


def test_synthetic_data_of_other_seeds_are_repeats_but_shards_of_them_are_others() -> None:
    name = "synthetic:mnist"
    sums = [*(f"{name}#{seed}" for seed in range(3)), "0123456789abcdef"]
    runs = [
        as_run(make_record(1, 100.0, data=name, data_checksum=checksum), checksum) for checksum in sums
    ]  # fmt: skip
    for count, names in ((3, {name: 3}), (4, {f"{name} (made up)": 3, f"{name} (01234567)": 1})):
        for gathered in (Gathered(runs=tuple(runs[:count])), anonymised(Gathered(runs=tuple(runs[:count])))):
            found = [(curve.first.data, len(curve.points[0].runs)) for curve in analyse(gathered).curves]
            assert dict(found) == names or dict(found) == {f"{name} (1)": 3, f"{name} (2)": 1}


def test_a_learning_rate_that_grows_with_the_workers_is_one_curve() -> None:
    configs = [(n, {"learning-rate": str(0.1 * n), "momentum": m}) for n in (1, 2, 4) for m in ("0.5", "0.9")]
    curves = of_mode(by_varied_settings([make_run(n, 100.0 * n, config=config) for n, config in configs]), "weak")
    assert [curve.variant for curve in curves] == ["momentum 0.5", "momentum 0.9"]
    assert all(len(curve.points) == 3 for curve in curves)


def test_settings_that_do_not_matter_are_averaged_and_reported() -> None:
    configs = ({"warmup-steps": "3", "seed": "1", "run-dir": "a"}, {"warmup-steps": "9", "seed": "2", "run-dir": "b"})
    runs = by_varied_settings([make_run(n, 100.0 * n, config=config) for n in (1, 2) for config in configs])
    (curve,) = build_curves(runs)
    assert [len(point.runs) for point in curve.points] == [2, 2]
    (line,) = trifling_differences(runs)
    assert "warmup-steps (3, 9)" in line and "seed" not in line and "run-dir" not in line


def test_settings_that_agree_say_nothing() -> None:
    runs = by_varied_settings([make_run(n, 100.0 * n, config={"compress": "fp16"}) for n in (1, 2)])
    assert {run.variant for run in runs} == {""}
    assert list(trifling_differences(runs)) == []


def test_a_base_may_be_another_strategy_s_worker() -> None:
    runs = [make_run(n, 90.0 * n * noise, strategy="sync-easgd") for n in (2, 4) for noise in NOISE]
    runs += [make_run(1, 100.0 * noise, strategy="single") for noise in NOISE]
    runs += [make_run(n, 80.0 * n, strategy="ring") for n in (1, 2)]
    found = {curve.first.strategy: curve for curve in with_base_of(build_curves(runs), runs, "single")}
    assert found["sync-easgd"].borrowed and not found["ring"].borrowed
    assert [point.efficiency.value for point in found["sync-easgd"].points] == pytest.approx([0.9, 0.9])
    assert found["ring"].points[1].efficiency.value == pytest.approx(1.0)
    rows = [row for row in scaling_rows(found.values()) if row["strategy"] == "sync-easgd"]
    assert {(row["base"], row["base_strategy"]) for row in rows} == {(1, "single")}


def test_runs_over_two_mpi_libraries_are_never_averaged() -> None:
    """Their mean was of two networks' speeds; the runs of one process, which have no MPI, are the base of both."""
    speeds = {"MPICH 5.0.2": 95.0, "Open MPI 4.1.4": 60.0}
    runs = [make_run(1, 100.0 * noise) for noise in NOISE]
    runs += [make_run(2, 2 * rate * noise, software={"mpi": name}) for name, rate in speeds.items() for noise in NOISE]
    curves = build_curves(runs)
    efficiencies = {dict(curve.split)["mpi"]: curve.points[-1].efficiency.value for curve in curves}
    assert efficiencies == pytest.approx({name: rate / 100 for name, rate in speeds.items()})
    assert all([len(point.runs) for point in curve.points] == [len(NOISE)] * 2 for curve in curves)
    assert "mixed MPI libraries, never averaged with each other" in " ".join(caveats(runs, (), curves))
    (one,) = build_curves([run for run in runs if run.mpi != "MPICH 5.0.2"])
    assert not one.split and len(one.points) == 2


def test_runs_on_gpus_and_on_processors_of_one_node_are_never_averaged() -> None:
    rates = [(accelerators, 100.0 * n * speed, n) for accelerators, speed in ((0, 1), (1, 12)) for n in (1, 2)]
    runs = [
        as_run(make_record(n, rate, accelerators={"NVIDIA H200": n} if on_gpus else {}), f"{on_gpus}-{n}")
        for on_gpus, rate, n in rates
    ]
    curves = build_curves(runs)
    assert {curve.first.processor.rpartition(" with ")[2] for curve in curves} > {"NVIDIA H200"} and len(curves) == 2
    assert "mixed machines by processor" in " ".join(caveats(runs, (), curves))

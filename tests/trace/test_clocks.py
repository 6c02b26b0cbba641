"""One clock for all ranks: clocks that differ by two seconds and drift are put in order, within the stated error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest

from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec
from hpcdl.comm.clocks import clock_identity, measure, parents_of
from hpcdl.comm.observed import observe
from hpcdl.comm.threads import ThreadCommunicator, run
from hpcdl.core.errors import CorruptError
from hpcdl.trace.file import POINT, RankTrace, read_trace
from hpcdl.trace.recorder import file_name
from hpcdl.trace.steps import ClockModel, Merged, merge
from tests.conftest import ROOT, patience
from tests.trace.clock_ranks import TURNS, passed_around


@pytest.mark.parametrize("same", [(), (1, 4)], ids=["six clocks", "two ranks on one clock"])
def test_shifted_and_drifting_clocks_come_back_in_true_order(tmp_path: Path, same: tuple[int, ...]) -> None:
    began_s = time.monotonic()
    hosts = [f"host{rank}" for rank in range(6)]
    if same:
        hosts[4] = hosts[1]
    truth = run(6, lambda group: passed_around(group, tmp_path, began_s, same=same), hosts)
    merged = merge([read_trace(tmp_path / file_name(rank)) for rank in range(6)])
    in_true_order(merged, truth)
    clocks = {clock.host: clock for clock in merged.clocks}
    assert len(clocks) == len(set(hosts))
    assert clocks["host1"].offset_s == pytest.approx(2.0, abs=0.01 + merged.errors_s[1])
    seconds = time.monotonic() - began_s
    assert clocks["host5"].drift == pytest.approx(100e-6, abs=4 * merged.errors_s[5] / seconds + 2e-6)


@pytest.mark.mpi
def test_clocks_of_mpi_ranks_come_back_in_true_order(tmp_path: Path) -> None:
    mpiexec = find_mpiexec()
    script = Path(__file__).with_name("clock_ranks.py")
    began_s = time.monotonic()
    command = [str(mpiexec.path), "-n", "4", sys.executable, str(script), str(tmp_path), repr(began_s)]
    environment = {**os.environ, **environment_for(mpiexec.flavour), "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    truth = json.loads((tmp_path / "truth.json").read_text())
    in_true_order(merge([read_trace(tmp_path / file_name(rank)) for rank in range(4)]), truth)


def in_true_order(merged: Merged, truth: list[list[float]]) -> None:
    """Check that each event is at its true time within the stated error, and that events are in order."""
    num_ranks = len(truth)
    found = {rank: merged.spans(rank, "had it")["begin_s"] for rank in range(num_ranks)}
    for rank in range(num_ranks):
        off_s = numpy.abs(found[rank] - numpy.array(truth[rank])).max()
        assert off_s <= merged.errors_s[rank] + 1e-9, f"rank {rank} is {off_s} s off"
        assert merged.errors_s[rank] < patience(0.05)
    if max(merged.errors_s.values()) < 1e-3:  # a busy machine answers late, and then the error bars say so
        order = sorted((when, rank) for rank in range(num_ranks) for when in found[rank])
        assert [rank for _, rank in order] == list(range(num_ranks)) * TURNS


def test_ranks_of_one_kernel_need_no_messages() -> None:
    def body(group: ThreadCommunicator) -> Any:
        observed = observe(group)
        point = measure(observed)
        return point.parent, point.own_s - point.parent_s, point.error_s, observed.monitor.traffic("control")

    assert clock_identity() == clock_identity()
    for parent, offset_s, error_s, traffic in run(4, body, ["a", "a", "b", "b"]):
        assert (parent, offset_s, traffic.messages_sent) == (0, 0.0, 0)
        assert error_s <= 1e-6


@pytest.mark.parametrize("num_clocks", [1, 2, 3, 7, 8, 300])
def test_the_tree_of_clocks_is_shallow(num_clocks: int) -> None:
    parents = parents_of([f"clock {rank % num_clocks}" for rank in range(2 * num_clocks)])
    assert parents[0] == 0
    for rank in range(1, 2 * num_clocks):
        steps, here = 0, rank
        while here:
            assert parents[here] < here
            here, steps = parents[here], steps + 1
        assert steps <= num_clocks.bit_length() + 1
    for rank in range(num_clocks, 2 * num_clocks):
        assert parents[rank] == rank - num_clocks  # the first rank with its clock


def trace_of(rank: int, points: list[tuple[float, float, float]], parent: int = 0) -> RankTrace:
    nothing = numpy.zeros(0)
    return RankTrace(
        path=Path("x"),
        rank=rank,
        size=2,
        host=f"host{rank}",
        role="worker",
        level="steps",
        parent=parent,
        begin_s=0,
        wall_s=0,
        cost_s=0,
        points=numpy.array(points, POINT),
        names=("",),
        records=numpy.zeros(0, [("begin_s", "f8"), ("end_s", "f8"), ("name", "u2")]),
        counters=nothing,
    )


def test_a_merge_without_measured_clocks_is_refused() -> None:
    with pytest.raises(CorruptError, match="the clock of rank 1 was not measured"):
        merge([trace_of(0, [(0, 0, 0)]), trace_of(1, [])])
    with pytest.raises(CorruptError, match="the clock of rank 2 was not measured"):  # its parent left no file
        merge([trace_of(0, [(0, 0, 0)]), trace_of(3, [(0, 0, 1e-6)], parent=2)])
    with pytest.raises(CorruptError, match="was not measured"):  # a cycle
        merge([trace_of(1, [(0, 0, 1e-6)], parent=1)])


def test_the_error_grows_where_nothing_was_measured() -> None:
    once = ClockModel(parent=0, points=numpy.array([(10.0, 8.0, 1e-5)], POINT))
    assert once.to_parent(numpy.array([20.0])) == pytest.approx([18.0])
    assert once.error_s(numpy.array([10.0, 20.0])) == pytest.approx([1e-5, 1e-5 + 10e-4])
    twice = ClockModel(parent=0, points=numpy.array([(10.0, 8.0, 1e-5), (20.0, 18.001, 1e-5)], POINT))
    assert twice.to_parent(numpy.array([0.0, 15.0, 30.0])) == pytest.approx([-2.001, 13.0005, 28.002])
    assert twice.error_s(numpy.array([15.0, 30.0])) == pytest.approx([1e-5, 3e-5])
    assert twice.drift == pytest.approx(-1e-4)
    bent = ClockModel(parent=0, points=numpy.array([(0, 0, 1e-5), (10, 10.001, 1e-5), (20, 20, 1e-5)], POINT))
    assert bent.error_s(numpy.array([5.0]))[0] > 0.9e-3  # a clock that was set during the run is not trusted

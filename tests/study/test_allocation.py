from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hpcdl.cluster.launchers import find_launcher
from hpcdl.cluster.launchers.base import STOP_VARIABLE
from hpcdl.core.errors import UsageError
from hpcdl.core.protocols import LaunchPlan
from hpcdl.node.machines import read_topology
from hpcdl.node.profile import read_profile
from hpcdl.study.jobs import LEAVING_S, check_room, find_allocation, seconds_for_runs
from hpcdl.study.points import profile_of_point, thread_settings
from tests.study.studies import small_study


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script on three nodes."""
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "c[101-103]", "PATH": str(tmp_path)}


def test_a_laptop_is_this_machine() -> None:
    allocation = find_allocation({})
    assert not allocation.nodes_variable and list(allocation.nodes) == [socket.gethostname()]
    assert allocation.environment(allocation.nodes) == {}


@pytest.mark.parametrize(("answer", "seconds"), [
    ("1-02:03:04", 93_784.0), ("2:00:00", 7_200.0), ("10:00", 600.0), ("42", 42.0), ("0:00", 0.0),
    ("UNLIMITED", None), ("INVALID", None), ("", None),
])  # fmt: skip
def test_runs_end_a_minute_before_the_job_that_slurm_limits(
    job: dict[str, str], tmp_path: Path, answer: str, seconds: float | None
) -> None:
    """Runs end a minute before squeue's time limit; a limit that `hpcdl submit` passed to the job takes precedence."""
    squeue = tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\n[ "$2 $3" = "--jobs=7 --format=%L" ] && echo "{answer}"\n')
    squeue.chmod(0o755)
    assert seconds_for_runs(job) == (None if seconds is None else max(seconds - LEAVING_S, 0.0))
    assert seconds_for_runs({}) is None
    assert seconds_for_runs(job | {STOP_VARIABLE: "0"}) == 0.0


def test_a_job_of_one_node_is_one_machine(job: dict[str, str]) -> None:
    allocation = find_allocation(job | {"SLURM_JOB_NODELIST": "c101"})
    assert not allocation.nodes_variable and list(allocation.nodes) == ["c101"]


def test_a_job_of_several_nodes_gives_each_run_nodes_of_its_own(job: dict[str, str]) -> None:
    allocation = find_allocation(job)
    assert allocation.nodes_variable and list(allocation.nodes) == ["c101", "c102", "c103"]
    environment = job | allocation.environment(["c101", "c103"])
    launcher = find_launcher(environment)
    assert launcher.hosts(environment) == ["c101", "c103"], "all that hpcdl train sees of the job"
    ranks = LaunchPlan(num_ranks=1, ranks_per_node=1)
    line, _ = launcher.line(ranks, ["rank"], mpi=True, environment=environment)
    assert {"--nodes=1", "--nodelist=c101"} <= set(line)


def test_nodes_that_cannot_be_chosen_are_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\nb\n")
    with pytest.raises(UsageError, match="2 nodes under hostfile"):
        find_allocation({"HPCDL_HOSTFILE": str(tmp_path / "hosts")})


def test_a_rank_does_not_start_a_sweep() -> None:
    with pytest.raises(UsageError, match="without mpiexec or srun"):
        find_allocation({"PMI_RANK": "0", "PMI_SIZE": "2"})


def test_too_few_nodes_are_reported_with_the_remedy(job: dict[str, str]) -> None:
    _, plan = small_study(workers="1,4", ranks_per_node=1)
    with pytest.raises(UsageError, match="salloc -N 4"):
        check_room(plan, find_allocation({}))
    with pytest.raises(UsageError, match="ask for 4 nodes"):
        check_room(plan, find_allocation(job))


@pytest.mark.parametrize(
    "threads, ranks, per_core, binding",
    [
        (64, 1, 1, "balanced"),
        (128, 1, 2, "balanced"),
        (32, 4, 2, "balanced"),
        (272, 1, 4, "balanced"),
        (300, 1, 1, "none"),
    ],
)
def test_threads_of_a_knl(threads: int, ranks: int, per_core: int, binding: str) -> None:
    """On 68 cores with four hardware threads, a core gets as few threads as possible; more threads are not bound."""
    settings = thread_settings(threads, ranks, read_topology("stampede2-knl-quadrant-cache"))
    assert (settings.threads_per_core, settings.binding, settings.intra_op_threads) == (per_core, binding, threads)


def test_threads_reach_train_as_a_profile(tmp_path: Path) -> None:
    _, plan = small_study(workers="1", threads="1,3")
    files = [profile_of_point(point, tmp_path) for point in plan.points]
    assert [read_profile(path).settings.intra_op_threads for path in files if path] == [1, 3]
    _, plain = small_study(workers="1")
    assert profile_of_point(plain.points[0], tmp_path) is None

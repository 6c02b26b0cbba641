"""Every launcher: when it is used, what it reads from the environment, and its command line."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdl.cluster.launchers import JOB_VARIABLES, LAUNCHERS, find_launcher, hostfile, load_launcher
from hpcdl.cluster.launchers.base import LEFT_OUT_VARIABLE, Casualty, ranks_per_node, seconds_left
from hpcdl.cluster.launchers.hostfile import read_hosts
from hpcdl.cluster.launchers.mpiexec import Mpiexec, mpi_flavour
from hpcdl.cluster.launchers.slurm import PMI_BY_FLAVOUR
from hpcdl.core.errors import UnknownNameError, UsageError
from hpcdl.core.protocols import LaunchPlan

PLAN = LaunchPlan(num_ranks=4, ranks_per_node=2)


def with_programs(tmp_path: Path, *names: str) -> dict[str, str]:
    for name in names:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    return {"PATH": str(tmp_path)}


def test_each_job_has_its_launcher(tmp_path: Path) -> None:
    path = with_programs(tmp_path, "srun", "ibrun")
    slurm = {**path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "c401-[001-002]"}
    assert find_launcher(slurm).name == "slurm"
    assert find_launcher({**slurm, "TACC_SYSTEM": "stampede3"}).name == "ibrun"
    assert find_launcher({**path, "PBS_JOBID": "7", "PBS_NODEFILE": "nodes"}).name == "pbs"
    assert find_launcher({**path, "HPCDL_HOSTFILE": "hosts"}).name == "hostfile"
    assert find_launcher(path).name == "local"
    assert find_launcher({**slurm, "SLURM_STEP_ID": "0"}).name == "local", "a rank starts no ranks over the job"
    assert find_launcher({**slurm, "SLURM_STEP_ID": "4294967291"}).name == "slurm", "a batch script is no rank"
    assert find_launcher({**slurm, "HPCDL_LAUNCHER": "local"}).name == "local"
    with pytest.raises(UnknownNameError, match="did you mean 'slurm'"):
        find_launcher({"HPCDL_LAUNCHER": "slrum"})


HOSTS = {
    "slurm": ["c401-001", "c401-002", "x"],
    "ibrun": ["c401-001", "c401-002", "x"],
    "flux": ["n1", "n2"],
    "pbs": ["n1", "n2"],
    "lsf": ["n1", "n2"],
    "hostfile": ["n1", "n2"],
    "local": [],
}


@pytest.fixture
def in_every_job(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which every launcher finds its job."""
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "c401-[001-002],x", "TACC_SYSTEM": "stampede3"}
    lists = dict.fromkeys(("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "HPCDL_HOSTFILE"), str(tmp_path / "nodes"))
    path = with_programs(tmp_path, "srun", "ibrun", "flux")
    (tmp_path / "flux").write_text("#!/bin/sh\necho 'n[1-2]'\n")
    return {**path, **job, **lists, "PBS_JOBID": "7", "FLUX_URI": "local:///run/flux/local", "LSB_JOBID": "7"}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_hosts_of_the_job(name: str, in_every_job: dict[str, str]) -> None:
    assert load_launcher(name).hosts(in_every_job) == HOSTS[name]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_it_is_found_by_its_name_and_starts_the_command_as_it_is(name: str, in_every_job: dict[str, str]) -> None:
    launcher = find_launcher({**in_every_job, "HPCDL_LAUNCHER": name})
    assert launcher.name == name and launcher.present(in_every_job)
    line, needed = launcher.line(PLAN, ["python", "a b;$(x)"], mpi=True, environment=in_every_job)
    assert line[-2:] == ["python", "a b;$(x)"]
    assert "4" in line or "--ntasks=4" in line
    assert all(isinstance(value, str) for value in needed.values())


@pytest.mark.parametrize(("name", "variable"), JOB_VARIABLES.items())
def test_none_is_present_without_the_variable_that_it_is_looked_for_by(
    name: str, variable: str, in_every_job: dict[str, str]
) -> None:
    alone = {key: text for key, text in in_every_job.items() if key not in JOB_VARIABLES.values() or key == variable}
    alone |= {"SLURM_JOB_ID": "7"} if name == "ibrun" else {}
    assert find_launcher(alone).name == name
    del in_every_job[variable]
    assert not load_launcher(name).present(in_every_job)


@pytest.mark.parametrize("name", [name for name in LAUNCHERS if HOSTS[name] and load_launcher(name).leaves_nodes_out])
def test_ranks_start_on_the_nodes_that_are_not_left_out(name: str, in_every_job: dict[str, str]) -> None:
    first, *others = HOSTS[name]
    environment = {**in_every_job, LEFT_OUT_VARIABLE: first}
    assert load_launcher(name).hosts(environment) == others
    line, needed = load_launcher(name).line(PLAN, ["x"], mpi=True, environment=environment)
    assert first not in " ".join(line[:-1]) and others[0] in " ".join(line)
    assert needed.get("SLURM_OVERLAP") == ("1" if name == "slurm" else None)


def test_slurm_says_which_nodes_are_gone(tmp_path: Path) -> None:
    environment = {**with_programs(tmp_path, "srun", "sinfo"), "SLURM_JOB_NODELIST": "n[1-5]"}
    (tmp_path / "sinfo").write_text(
        '#!/bin/sh\necho "n1 allocated\nn2 down*\nn3 allocated*\nn4 draining\nn5 failing"\n'
    )
    assert load_launcher("slurm").lost_hosts(environment) == {"n2", "n3", "n5"}
    (tmp_path / "sinfo").write_text("#!/bin/sh\nexit 1\n")
    assert load_launcher("slurm").lost_hosts(environment) == set()
    reported = "srun: error: Task launch for StepId=1.1 failed on node n2: Communication connection failure\n"
    assert load_launcher("slurm").first_casualty(reported) == Casualty(lost_host="n2")


def test_a_host_file_is_read_as_mpiexec_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the machine\nn1 slots=2\nn2:4  # big\n\nn[3-4]\nn1\n")
    assert read_hosts(path) == ["n1", "n2", "n3", "n4"]
    path.write_text("# nobody\n")
    with pytest.raises(UsageError, match="names no host"):
        read_hosts(path)
    with pytest.raises(UsageError, match="cannot read host file"):
        read_hosts(tmp_path / "none")


def test_srun_gets_nodes_ranks_and_the_right_pmi(tmp_path: Path) -> None:
    environment = with_programs(tmp_path, "srun")
    line, needed = load_launcher("slurm").line(PLAN, ["python", "a b"], mpi=True, environment=environment)
    assert line[0] == str(tmp_path / "srun") and line[-2:] == ["python", "a b"]
    assert {"--kill-on-bad-exit=0", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpu-bind=none"} <= set(line)
    assert f"--mpi={PMI_BY_FLAVOUR[mpi_flavour()]}" in line and isinstance(dict(needed), dict)
    assert needed["SLURM_PMIX_FENCE"] == "tree"
    environment |= {"HPCDL_SRUN_MPI": "pmix_v4", "SLURM_PMIX_FENCE": "ring"}
    assert "SLURM_PMIX_FENCE" not in load_launcher("slurm").line(PLAN, ["x"], mpi=True, environment=environment)[1]
    assert "--mpi=pmix_v4" in load_launcher("slurm").line(PLAN, ["x"], mpi=True, environment=environment)[0]
    assert "--mpi=none" in load_launcher("slurm").line(PLAN, ["x"], mpi=False, environment=environment)[0]
    with pytest.raises(UsageError, match="srun, which is not on PATH"):
        load_launcher("slurm").line(PLAN, ["x"], mpi=True, environment={"PATH": "/nonexistent"})


def test_flux_run_takes_all_cores_of_the_jobs_nodes(tmp_path: Path) -> None:
    environment = {**with_programs(tmp_path, "flux"), "FLUX_URI": "local:///run/flux/local"}
    assert find_launcher(environment).name == "flux"
    assert find_launcher({**environment, "FLUX_TASK_RANK": "0"}).name == "local", "a task starts no ranks over the job"
    line, _ = load_launcher("flux").line(PLAN, ["python", "a b"], mpi=True, environment=environment)
    assert line[:2] == [str(tmp_path / "flux"), "run"] and line[-2:] == ["python", "a b"]
    assert {"--nodes=2", "--ntasks=4", "--exclusive", "--setopt=cpu-affinity=off"} <= set(line)
    with pytest.raises(UsageError, match="flux, which is not on PATH"):
        load_launcher("flux").line(PLAN, ["x"], mpi=True, environment={"PATH": "/nonexistent"})


def test_ibrun_and_what_it_cannot_do(tmp_path: Path) -> None:
    environment = with_programs(tmp_path, "ibrun")
    line, _ = load_launcher("ibrun").line(PLAN, ["x"], mpi=True, environment=environment)
    assert line == [str(tmp_path / "ibrun"), "-n", "4", "-o", "0", "x"]
    with pytest.raises(UsageError, match=r"by MPI only.*grpc"):
        load_launcher("ibrun").line(PLAN, ["x"], mpi=False, environment=environment)


def test_a_warning_of_slurm_does_not_kill_a_rank_that_is_starting(tmp_path: Path) -> None:
    warned = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); print('alive')"]
    environment = with_programs(tmp_path, "srun")
    line, _ = load_launcher("slurm").line(PLAN, warned, mpi=False, environment=environment)
    of_rank = line[next(index for index, word in enumerate(line) if index and not word.startswith("-")) :]
    assert subprocess.run(of_rank, capture_output=True, text=True, check=False).stdout == "alive\n"


def test_the_first_casualty_is_the_one_that_srun_names_first() -> None:
    log = (
        "srun: cluster configuration lacks support for cpu binding\nsrun: error: node3: task 2: Killed\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=5.0\nsrun: error: node1: task 0: Killed\n"
    )
    assert load_launcher("slurm").first_casualty(log) == Casualty(rank=2, host="node3")
    assert load_launcher("ibrun").first_casualty(log) == Casualty(rank=2, host="node3")
    several = "srun: error: node2: tasks 4,6-7: Segmentation fault\n"
    assert load_launcher("slurm").first_casualty(several) == Casualty(rank=4, host="node2")
    for none in ("Terminated", "Exited with exit code 75"):
        assert load_launcher("slurm").first_casualty(f"srun: error: node1: task 0: {none}\n") is None


def test_ranks_are_spread_evenly() -> None:
    assert [ranks_per_node(["a", "b"], ranks) for ranks in (1, 2, 3, 4)] == [1, 1, 2, 2]
    assert ranks_per_node([], 3) == 3


def test_time_left() -> None:
    assert seconds_left({}) is None
    assert seconds_left({"HPCDL_STOP_AT": "990"}, now=940.0) == 50.0
    assert seconds_left({"HPCDL_STOP_AT": "990"}, now=2000.0) == 0.0


@pytest.mark.mpi
def test_a_host_file_with_this_node_starts_real_ranks(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    environment = {**os.environ, "HPCDL_HOSTFILE": str(tmp_path / "hosts")}
    plan = LaunchPlan(num_ranks=2, ranks_per_node=2)
    command = [sys.executable, "-m", "hpcdl.doctor.mpi"]
    line, needed = load_launcher("hostfile").line(plan, command, mpi=True, environment=environment)
    finished = subprocess.run(line, env={**environment, **needed}, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == ['{"size": 2, "sum": 3}'] * 2


def test_open_mpi_hands_on_the_users_variables_but_not_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI passes on the user's variables as MPICH's mpiexec and srun do: a script may read any of them."""
    found = Mpiexec(path=Path("mpiexec"), flavour="openmpi", library=Path("libmpi.so"), version="5.0.11")
    monkeypatch.setattr(hostfile, "find_mpiexec", lambda: found)
    handed_on = {"MY_DATA": "/x", "HPCDL_LAUNCH": "1", "TF_X": "1", "PATH": "/bin", "_MINE": "1", "PWDS": "1"}
    own = {
        "PWD": "/",
        "OLDPWD": "/",
        "HOSTNAME": "a",
        "SSH_AUTH_SOCK": "s",
        "DISPLAY": ":0",
        "_": "x",
        "SLURM_JOB_ID": "1",
    }
    odd = {"BASH_FUNC_module%%": "() { :; }", "OMPI_MCA_btl": "tcp"}
    line, _ = hostfile.mpiexec_line(PLAN, ["x"], ["a", "b"], handed_on | own | odd)
    assert {word for before, word in itertools.pairwise(line) if before == "-x"} == set(handed_on)

"""LSF, checked against its documentation with fakes of bsub, bjobs and blaunch: hpcdl was never run under it.

IBM Spectrum LSF 10.1, command reference: bsub (job_script, -R, -rn), bjobs (-o, -p), blaunch; administration: span
string, job states. The fakes imitate only what hpcdl relies on.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from hpcdl.cluster.batch.script import batch_launcher, render
from hpcdl.cluster.batch.systems import InQueue, NodeWishes, find_system
from hpcdl.cluster.launchers import load_launcher
from hpcdl.core.errors import UsageError
from hpcdl.core.protocols import LaunchPlan
from tests.cluster.test_batch import program, request
from tests.conftest import CommandLine

PENDING = """JOBID   USER    STAT  QUEUE      FROM_HOST   EXEC_HOST   JOB_NAME   SUBMIT_TIME
7678    user1   PEND  priority   hostD                   verilog    Oct 28 13:08
 Queue's resource requirements not satisfied:3 hosts;
 Unable to reach slave lsbatch server: 1 host;
"""
"""Output of `bjobs -p 7678`."""

BSUB = """
cat > {folder}/script
grep -q '^#BSUB -n 2$' {folder}/script && grep -q '^#BSUB -R "span\\[ptile=1\\]"$' {folder}/script || exit 255
export LSB_JOBID=12 LSB_MCPU_HOSTS="n1 1 n2 1"
bash {folder}/script </dev/null
echo $? > {folder}/code
echo "Job <12> is submitted to default queue <normal>."
"""
BLAUNCH = """
echo "$*" >> {folder}/launched
while [[ $1 == -* ]]; do shift; done
shift
exec bash -c "$*"
"""
"""Ignore ssh's options, and pass the words to a shell of the host, here of this machine."""


def read_bsub(script: str) -> list[str]:
    """Return the options of a script, split as a shell does: bsub reads them so, also before the first command."""
    lines = [line.removeprefix("#BSUB ") for line in script.splitlines() if line.startswith("#BSUB ")]
    return [" ".join(shlex.split(line)) for line in lines]


def test_the_script_asks_for_slots_time_and_names() -> None:
    made = request(launcher="lsf", name="my job [1-9]", time_s=3725.0, partition="debug", account="bank")
    options = read_bsub(render(made, {}))
    assert {"-n 6", "-R span[ptile=3]", "-W 1:03", "-q debug", "-P bank", "-rn"} <= set(options)
    assert "-J my_job__1-9_" in options, "brackets would make an array"
    assert "-x" not in options and "-o /dev/null" in options
    assert '>/shared/run.job/log-"$LSB_JOBID".txt' in render(made, {})


def test_ranks_get_the_cores_and_the_hosts_that_are_asked_for() -> None:
    own = ("-sla gold", "-outdir out")
    wanted = NodeWishes(cpus_per_task=4, exclusive=True, constraint="rome", exclude="n1,n2", options=own)
    options = read_bsub(render(request(launcher="lsf", nodes_wanted=wanted), {}))
    chosen = "-R select[(rome) && hname!='n1' && hname!='n2']"
    assert {"-n 24", "-R span[ptile=12]", "-x", chosen, "-sla gold", "-outdir out"} <= set(options)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (NodeWishes(mem="8G"), "--mem: LSF has no such option"),
        (NodeWishes(gres="gpu:4"), "--gres: LSF has no such option"),
        (NodeWishes(constraint='rome"'), "--constraint"),
        (NodeWishes(exclude="n1,n[2-3]"), "takes names of hosts"),
        (NodeWishes(options=("-W 10",)), "type --time"),
        (NodeWishes(options=("-W10",)), "type --time"),
        (NodeWishes(options=("-oo x",)), "submit sets it itself"),
    ],
)
def test_what_lsf_has_otherwise_is_refused(wanted: NodeWishes, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        render(request(launcher="lsf", nodes_wanted=wanted), {})
    with pytest.raises(UsageError, match="does not requeue itself"):
        render(request(launcher="lsf", until_done=True), {})


@pytest.mark.parametrize(
    ("status", "found"),
    [
        ("PEND", InQueue(state="pending", reason="Queue's resource requirements not satisfied:3 hosts")),
        ("RUN", InQueue(state="running")),
        ("DONE", InQueue(state="completed")),
        ("EXIT", InQueue(state="failed")),
        ("SSUSP", InQueue(state="suspended", reason="Queue's resource requirements not satisfied:3 hosts")),
        ("UNKWN", InQueue(state="unknown")),
    ],
)
def test_the_state_is_that_of_bjobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, found: InQueue
) -> None:
    (tmp_path / "pending").write_text(PENDING)
    body = f'echo "$@" >>{tmp_path}/asked; if [ "$1" = -p ]; then cat {tmp_path}/pending; else echo {status}; fi'
    program(tmp_path / "bin", "bjobs", body)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    assert find_system("lsf").look("7678") == found
    assert (tmp_path / "asked").read_text().splitlines()[0] == "-noheader -o stat 7678"
    assert find_system("lsf").cancel("7678") == ["bkill", "7678"]


def test_hosts_are_those_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n1\nn1\nn2\n")
    launcher = load_launcher("lsf")
    job = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a1 4 a2 4"}
    assert launcher.present(job) and launcher.hosts(job) == ["a1", "a2"]
    assert launcher.hosts({**job, "LSB_DJOB_HOSTFILE": str(tmp_path / "hosts")}) == ["n1", "n2"]
    assert not launcher.present({"LSB_JOBID": "7"})
    with pytest.raises(UsageError, match="use `hpcdl submit`"):
        launcher.hosts({})


def test_a_users_own_way_to_the_hosts_stays() -> None:
    job = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a1 4 a2 4", "HYDRA_LAUNCHER_EXEC": "ssh"}
    _, own = load_launcher("lsf").line(LaunchPlan(num_ranks=2, ranks_per_node=1), ["true"], mpi=True, environment=job)
    assert "HYDRA_LAUNCHER_EXEC" not in own and own["OMPI_MCA_plm_rsh_agent"] == "blaunch"


@pytest.mark.mpi
def test_a_job_trains_over_the_hosts_that_blaunch_reaches(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    program(tmp_path / "bin", "bsub", BSUB.format(folder=tmp_path))
    program(tmp_path / "bin", "blaunch", BLAUNCH.format(folder=tmp_path))
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    assert batch_launcher({"PATH": str(tmp_path / "bin")}) == "lsf"
    train = ["train", "--model", "lenet", "--data", "synthetic:mnist@400", "--batch-size", "8", "--steps", "4"]
    line = ["submit", "--nodes", "2", "--", *train, "--profile", "none", "--run-dir", tmp_path / "run"]
    finished = session_hpcdl(line, env={"PATH": path, "HPCDL_LAUNCHER": "lsf"})
    assert finished.code == 0 and finished.out == "12\n", finished.err
    log = "\n".join(path.read_text() for path in tmp_path.rglob("log-12.txt"))
    assert (tmp_path / "code").read_text() == "0\n", log
    assert "4 steps on 2 workers" in log
    launched = (tmp_path / "launched").read_text().splitlines()
    assert {next(word for word in line.split() if not word.startswith("-")) for line in launched} == {"n1", "n2"}

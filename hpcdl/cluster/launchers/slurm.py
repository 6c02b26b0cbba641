"""Ranks by `srun`, inside a job of Slurm."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from hpcdl.cluster.launchers.base import LEFT_OUT_VARIABLE, Casualty, Launcher, expand_hosts, remaining
from hpcdl.cluster.launchers.mpiexec import environment_for, mpi_flavour
from hpcdl.core.errors import StoppedEarly, UsageError
from hpcdl.core.protocols import LaunchPlan

PMI_VARIABLE = "HPCDL_SRUN_MPI"
"""Overrides `srun --mpi`, for a site whose MPI was built for another interface."""
PMI_BY_FLAVOUR = {
    "openmpi": "pmix",
    "mpich": "pmi2",
    "intel": "pmi2",
    "mvapich": "pmi2",
    "cray": "cray_shasta",
}
"""The interface that each MPI requests of its launcher; a wrong one starts N jobs of one rank each."""
_FENCE_VARIABLE = "SLURM_PMIX_FENCE"
"""How Slurm's PMIx makes the ranks wait for each other.

By default ranks that exchange something wait by another algorithm than ranks that only wait. On a busy node Slurm 22.05
then let ranks go on too early: 1 of 25 starts of Open MPI 4.1 crashed in MPI_Init, as a rank got a message over
TCP that it could not handle yet. With one algorithm for both, none of 260 did.
"""
_NO_STEP = "42949672"
"""Slurm numbers batch scripts and interactive shells from 4294967290 up: these steps have no ranks."""
_NO_LOSS = rf"Terminated|Exited with exit code {StoppedEarly.exit_code}$"
# srun reports ranks that it ended itself, and ranks that stopped to be resumed, in the same form as lost ones.
_CASUALTY = re.compile(rf"srun: error: (?P<host>\S+): tasks? (?P<rank>\d+)\S*: (?!{_NO_LOSS})", re.MULTILINE)
_LOST_NODE = re.compile(
    r"srun: error: (?:Node failure on|Task launch for StepId=\S+ failed on node) (?P<hosts>[^\s:]+)"
)
_GONE = re.compile(r"down|fail|\S+\*$")
_ASK_S = 20.0
_DEAF = ("/bin/sh", "-c", 'trap "" USR1; exec "$@"', "rank")
"""Starts a rank that ignores the warning before the time limit until Python catches it.

Slurm sends the warning to the ranks, up to a minute early, and it would kill those that are still importing. They also
know the time from HPCDL_STOP_AT.
"""


def srun_mpi(flavour: str, environment: Mapping[str, str]) -> str:
    """Return the value of `srun --mpi` for an MPI of this flavour."""
    return environment.get(PMI_VARIABLE) or PMI_BY_FLAVOUR[flavour]


class Slurm(Launcher):
    """srun leaves binding to hpcdl, and keeps the other ranks when one is lost (-K0).

    With -K1 it would send them SIGTERM, which they cannot obey without the lost rank. They would then ignore anything
    else for KillWait (30 s by default). At a SIGTERM to itself it kills them at once.
    """

    name = "slurm"
    batch = "slurm"
    leaves_nodes_out = True
    continues = False
    leaves_others = True

    def present(self, environment: Mapping[str, str]) -> bool:
        """Return whether this is inside an allocation, outside its steps."""
        step = environment.get("SLURM_STEP_ID", _NO_STEP)
        return "SLURM_JOB_ID" in environment and step.startswith(_NO_STEP) and bool(_srun(environment))

    def hosts(self, environment: Mapping[str, str]) -> list[str]:
        """Return the allocation's nodes."""
        return remaining(expand_hosts(environment.get("SLURM_JOB_NODELIST", "")), environment)

    def lost_hosts(self, environment: Mapping[str, str]) -> set[str]:
        """Return the nodes that sinfo reports as down, failed, or not responding (`*`)."""
        states = _states(self.hosts(environment), environment)
        return {node for node, state in states.items() if _GONE.match(state)}

    def answering(self, left_out: Sequence[str], environment: Mapping[str, str]) -> set[str]:
        """Return those that are healthy by sinfo and still in the job: Slurm removes a node that goes down."""
        job = ["squeue", "--noheader", f"--jobs={environment.get('SLURM_JOB_ID', '')}", "--format=%N"]
        job_hosts = set(expand_hosts(_answer(job, environment)))
        states = _states(left_out, environment)
        return {node for node, state in states.items() if node in job_hosts and not _GONE.match(state)}

    def job_seconds_left(self, environment: Mapping[str, str]) -> float | None:
        """Return the job's time left by squeue, such as 1-02:03:04, in seconds."""
        job = ["squeue", "--noheader", f"--jobs={environment.get('SLURM_JOB_ID', '')}", "--format=%L"]
        match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", _answer(job, environment).strip())
        if match is None:  # UNLIMITED, or no answer
            return None
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)

    def line(
        self, plan: LaunchPlan, command: Sequence[str], *, mpi: bool, environment: Mapping[str, str]
    ) -> tuple[list[str], Mapping[str, str]]:
        """Return `srun` on as many nodes as the plan needs, the first in the list; several ranks may share a core."""
        srun = _srun(environment)
        if not srun:
            raise UsageError("the launcher slurm needs srun, which is not on PATH; load the site's Slurm module")
        num_nodes, hosts = -(-plan.num_ranks // plan.ranks_per_node), self.hosts(environment)
        flavour = mpi_flavour() if mpi and plan.num_ranks > 1 else ""
        arguments = [
            srun,
            "--kill-on-bad-exit=0",
            f"--mpi={srun_mpi(flavour, environment) if flavour else 'none'}",
            f"--nodes={num_nodes}",
            *([f"--nodelist={','.join(hosts[:num_nodes])}"] if num_nodes <= len(hosts) else []),
            f"--ntasks={plan.num_ranks}",
            f"--ntasks-per-node={plan.ranks_per_node}",
            "--cpu-bind=none",
            "--overcommit",
            "--input=none",
        ]
        # The earlier step never ends on a node that is gone, and Slurm counts its cores on all nodes as busy.
        beside = {"SLURM_OVERLAP": "1"} if LEFT_OUT_VARIABLE in environment else {}
        fence = {} if _FENCE_VARIABLE in environment else {_FENCE_VARIABLE: "tree"}
        return [*arguments, *_DEAF, *command], {**environment_for(flavour), **fence, **beside}

    def first_casualty(self, log: str) -> Casualty | None:
        """Return a node that went down, which ends all other tasks too; else the first task that srun reports."""
        if lost := _LOST_NODE.search(log):
            return Casualty(lost_host=expand_hosts(lost["hosts"])[0])
        match = _CASUALTY.search(log)
        return Casualty(rank=int(match["rank"]), host=match["host"]) if match else None


def _states(nodes: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the state of each node by sinfo; empty if it does not answer."""
    line = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N %T"]
    rows = (fields.split() for fields in _answer(line, environment).splitlines())
    return {fields[0]: fields[1] for fields in rows if len(fields) == 2}


def _answer(line: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the output of a Slurm command; empty if it fails, since srun will report the problem."""
    try:
        answer = subprocess.run(line, capture_output=True, text=True, timeout=_ASK_S, check=True, env=environment)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout


def _srun(environment: Mapping[str, str]) -> str:
    return shutil.which("srun", path=environment.get("PATH")) or ""


LAUNCHER = Slurm()

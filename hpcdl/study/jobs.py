"""Where the runs of a study go: this machine, the nodes of an allocation, or a batch job for each number of nodes."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcdl.cluster.batch.script import batch_launcher
from hpcdl.cluster.batch.submission import Wanted, submit_job
from hpcdl.cluster.batch.systems import NodeWishes, find_system
from hpcdl.cluster.environment import placement
from hpcdl.cluster.launchers import LAUNCHER_VARIABLE, find_launcher, load_launcher
from hpcdl.cluster.launchers.base import seconds_left
from hpcdl.config.study import Study, study_tables
from hpcdl.core.errors import UsageError
from hpcdl.core.paths import own_program
from hpcdl.core.records.from_json import read_as
from hpcdl.core.storage.disk import make_folder
from hpcdl.core.storage.files import write_json, write_toml
from hpcdl.study.plan import StudyRuns
from hpcdl.study.state import FILE_NAME as STATE_FILE
from hpcdl.study.state import StudyState, check_tries, digest_of, new_state, read_state

NODES_VARIABLE = "SLURM_JOB_NODELIST"
SETTLE_S = 10.0
"""Seconds without changes in what an earlier call left in a job, whose ranks may still be ending on other nodes."""
LEAVING_S = 60.0
"""Seconds of a job's time reserved for running runs to save and leave."""
TRAIN = tuple(own_program("hpcdl", "train"))


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Nodes for the runs of a study, which the sweep gives to one run at a time, and how a run starts on some of them.

    `remedy` says how to get more nodes. `settle_s`: seconds for which the folder of a run that an earlier call left
    must be unchanged before it is reused. `nodes_variable` gives a run only its own nodes, if nodes can be chosen.
    """

    nodes: Sequence[str]
    remedy: str = "ask for {num} nodes"
    settle_s: float = SETTLE_S
    nodes_variable: str = ""
    command: Sequence[str] = TRAIN

    def environment(self, nodes: Sequence[str]) -> dict[str, str]:
        """Return the variables that a run on `nodes` gets in addition to the sweep's environment."""
        return {self.nodes_variable: ",".join(nodes)} if self.nodes_variable else {}


def find_allocation(environment: Mapping[str, str], sizes: Collection[int] = ()) -> Allocation:
    """Return the nodes that `environment` names, or this machine outside a job. `sizes` are those that runs need.

    Raises UsageError inside a job step, whose ranks would each start a sweep, and if nodes cannot be chosen for a run:
    under launchers other than Slurm's every run takes all nodes of the job.
    """
    inside = placement(environment)
    if inside is not None:
        raise UsageError(
            f"hpcdl sweep starts ranks itself, but {inside.launcher} has started this one of {inside.size}; "
            "call it without mpiexec or srun"
        )
    launcher = find_launcher(environment)
    nodes = launcher.hosts(environment)
    if not nodes:
        # Outside a job no rank of an earlier call is on another node, so nothing has to settle.
        remedy = "start the sweep inside an allocation (such as salloc -N {num}), or with --small"
        return Allocation(nodes=(socket.gethostname(),), remedy=remedy, settle_s=0.0)
    if len(nodes) == 1:
        return Allocation(nodes=tuple(nodes))
    if launcher.name != "slurm":
        if set(sizes) == {len(nodes)}:
            return Allocation(nodes=nodes)
        raise UsageError(
            f"hpcdl sweep cannot give runs some of the {len(nodes)} nodes under {launcher.name}; add "
            f"--only-nodes {len(nodes)} to run the points that need them all, or set {LAUNCHER_VARIABLE}=slurm where "
            "srun works"
        )
    return Allocation(nodes=nodes, nodes_variable=NODES_VARIABLE)


def seconds_for_runs(environment: Mapping[str, str]) -> float | None:
    """Return the seconds until the last run must have ended; None without a limit.

    The limit is the one that `hpcdl submit` passed to the job, else the scheduler's, less the time a run takes to stop.
    """
    left_s = seconds_left(environment)
    if left_s is not None:
        return left_s
    limit_s = find_launcher(environment).job_seconds_left(environment)
    return None if limit_s is None else max(limit_s - LEAVING_S, 0.0)


def check_room(plan: StudyRuns, allocation: Allocation) -> None:
    """Raise UsageError if a run needs more nodes than the allocation has."""
    most = max(point.nodes for point in plan.points)
    if most > len(allocation.nodes):
        too_large = sum(point.nodes > len(allocation.nodes) for point in plan.points)
        raise UsageError(
            f"{too_large} of {len(plan.points)} points need more than the {len(allocation.nodes)} nodes here, "
            f"up to {most}; " + allocation.remedy.format(num=most)
        )


SCHEMA = "hpcdl.study-jobs/1"
FILE_NAME, STUDY_FILE = "jobs.json", "study.toml"
ALIVE = ("pending", "configuring", "running", "suspended", "requeued", "requeue_hold", "held")
"""States of a job that still has runs to do."""


@dataclass(frozen=True, kw_only=True)
class PartJob:
    """The last job submitted for the points of `nodes` nodes."""

    nodes: int
    number: str
    system: str
    folder: str


@dataclass(frozen=True, kw_only=True)
class JobsState:
    """The file of a study that runs as jobs."""

    schema: str = SCHEMA
    name: str
    digest: str
    jobs: Sequence[PartJob] = ()


@dataclass(frozen=True, kw_only=True)
class JobLimits:
    """What each job requests of the batch system. Under Slurm a job at its time limit requeues itself and continues."""

    time_s: float
    partition: str = ""
    account: str = ""
    nodes_wanted: NodeWishes = NodeWishes()


@dataclass(frozen=True, kw_only=True)
class Part:
    """The points of one number of nodes: their progress, and the job that runs them (empty once all are finished)."""

    nodes: int
    runs: int
    finished: int
    failed: int
    folder: str
    job: str = ""
    state: str = ""
    submitted: bool = False


def submit_parts(folder: Path, study: Study, plan: StudyRuns, limits: JobLimits, *, resume: bool) -> list[Part]:
    """Submit a job for each part that has runs to do and no job in the queue. Return the state of every part.

    Raises UsageError if `folder` holds something else or another study, or if there is no batch system.
    """
    state = _opened(folder, study, plan, resume=resume)
    by_nodes = {job.nodes: job for job in state.jobs}
    system = load_launcher(batch_launcher()).batch
    if not system:
        raise UsageError(
            "--jobs needs a batch system, and neither sbatch nor qsub nor flux nor bsub is on PATH; leave it out to "
            "run here"
        )
    make_folder(folder)
    write_toml(folder / STUDY_FILE, study_tables(study))
    parts = []
    for nodes in plan.node_counts:
        part = _look(folder, study, plan.only_nodes(nodes), nodes, by_nodes.get(nodes))
        if part.finished < part.runs and part.state not in ALIVE:
            by_nodes[nodes] = _submit(folder, study, plan.only_nodes(nodes), nodes, limits, system)
            part = dataclasses.replace(part, job=by_nodes[nodes].number, state="pending", submitted=True)
            # Written after each submission: a call that is killed here must not submit the same part again.
            jobs = [by_nodes[number] for number in sorted(by_nodes)]
            write_json(folder / FILE_NAME, dataclasses.asdict(dataclasses.replace(state, jobs=jobs)))
        parts.append(part)
    return parts


def part_folder(folder: Path, nodes: int) -> Path:
    """Return the folder of the points of `nodes` nodes, which is a study of its own."""
    return folder / (f"{nodes}-nodes" if nodes > 1 else "1-node")


def _opened(folder: Path, study: Study, plan: StudyRuns, *, resume: bool) -> JobsState:
    path, digest = folder / FILE_NAME, digest_of(study, plan)
    if not path.exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} exists and holds no study of jobs; choose another --out DIR")
        return JobsState(name=study.name, digest=digest)
    if not resume:
        raise UsageError(f"{folder} holds a study; continue with --resume, or choose another --out DIR")
    state = read_as(JobsState, path, SCHEMA, "; choose another --out DIR")
    if state.digest == digest:
        return state
    fewer = (_up_to(plan, repeats) for repeats in range(1, study.plan.repeats))
    if all(state.digest != digest_of(study, earlier) for earlier in fewer):
        raise UsageError(
            f"{folder} holds runs of a study with another matrix, other settings or more repeats; choose another --out "
            "DIR, or give the study as it was"
        )
    check_tries(folder, study)
    return dataclasses.replace(state, digest=digest)


def _up_to(plan: StudyRuns, repeats: int) -> StudyRuns:
    return dataclasses.replace(plan, runs=[run for run in plan.runs if run.repeat <= repeats])


def _look(folder: Path, study: Study, plan: StudyRuns, nodes: int, job: PartJob | None) -> Part:
    nodes_folder = part_folder(folder, nodes)
    state: StudyState = read_state(nodes_folder) if (nodes_folder / STATE_FILE).exists() else new_state(study, plan)
    num_runs = max(len(state.runs), len(plan.runs))  # the part's next job adds more repeats
    done = state.count("finished") == num_runs
    return Part(
        nodes=nodes, runs=num_runs, finished=state.count("finished"), failed=state.count("failed"),
        folder=str(nodes_folder), job=job.number if job and not done else "",
        state="finished" if done else find_system(job.system).state(job.number) if job else "",
    )  # fmt: skip


def _submit(folder: Path, study: Study, plan: StudyRuns, nodes: int, limits: JobLimits, system: str) -> PartJob:
    nodes_folder = part_folder(folder, nodes)
    # --resume from the start: a job that is requeued runs the same line again.
    command = ["sweep", str(folder / STUDY_FILE), "--only-nodes", str(nodes), "--out", str(nodes_folder), "--resume"]
    wanted = Wanted(
        command=command,
        nodes=nodes,
        # The job must have room for the largest run.
        ranks_per_node=max(point.ranks_per_node for point in plan.points),
        time_s=limits.time_s,
        partition=limits.partition,
        account=limits.account,
        nodes_wanted=limits.nodes_wanted,
        name=f"{study.name}-{nodes}n",
        folder=folder / "jobs" / nodes_folder.name,
        until_done=system == "slurm",
    )
    job, _ = submit_job(wanted)
    return PartJob(nodes=nodes, number=job.number, system=job.system, folder=job.folder)

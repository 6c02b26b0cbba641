"""A study as batch jobs, one for each number of nodes: `hpcdl sweep --only-nodes N` in a folder of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcdl.cluster.batch.script import batch_launcher
from hpcdl.cluster.batch.submission import Wanted, submit_job
from hpcdl.cluster.batch.systems import NodeWishes, find_system
from hpcdl.cluster.launchers import load_launcher
from hpcdl.config.study import Study, study_tables
from hpcdl.core.errors import UsageError
from hpcdl.core.records.from_json import read_as
from hpcdl.core.storage.disk import make_folder
from hpcdl.core.storage.files import write_json, write_toml
from hpcdl.study.plan import StudyRuns
from hpcdl.study.state import FILE_NAME as STATE_FILE
from hpcdl.study.state import StudyState, digest_of, new_state, read_state

SCHEMA = "hpcdl.study-jobs/1"
FILE_NAME, STUDY_FILE = "jobs.json", "study.toml"
ALIVE = ("pending", "configuring", "running", "suspended", "requeued", "requeue_hold", "held")
"""States in which a job still has its runs to do."""


@dataclass(frozen=True, kw_only=True)
class PartJob:
    """The job that was submitted last for the points of `nodes` nodes."""

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
    """What each job asks of the batch system; with `until_done` a job at its time limit requeues itself and goes on."""

    time_s: float
    partition: str = ""
    account: str = ""
    nodes_wanted: NodeWishes = NodeWishes()


@dataclass(frozen=True, kw_only=True)
class Part:
    """The points of one number of nodes: how far they are, and the job that has them (empty once all is finished)."""

    nodes: int
    runs: int
    finished: int
    failed: int
    folder: str
    job: str = ""
    state: str = ""
    submitted: bool = False


def submit_parts(folder: Path, study: Study, plan: StudyRuns, limits: JobLimits, *, resume: bool) -> list[Part]:
    """Submit a job for each part that has runs to do and no job in the queue; every part as it then stands.

    UsageError where `folder` holds something else, or another study, or where there is no batch system.
    """
    state = _opened(folder, study, plan, resume=resume)
    by_nodes = {job.nodes: job for job in state.jobs}
    system = load_launcher(batch_launcher()).batch
    if not system:
        raise UsageError(
            "--jobs needs a batch system, and neither sbatch nor qsub nor flux is on PATH; leave it out to run here"
        )
    make_folder(folder)
    write_toml(folder / STUDY_FILE, study_tables(study))
    parts = []
    for nodes in plan.node_counts:
        part = _look(folder, study, plan.only_nodes(nodes), nodes, by_nodes.get(nodes))
        if part.finished < part.runs and part.state not in ALIVE:
            by_nodes[nodes] = _submit(folder, study, plan.only_nodes(nodes), nodes, limits, system)
            part = dataclasses.replace(part, job=by_nodes[nodes].number, state="pending", submitted=True)
            jobs = [by_nodes[number] for number in sorted(by_nodes)]
            write_json(folder / FILE_NAME, dataclasses.asdict(dataclasses.replace(state, jobs=jobs)))
        parts.append(part)
    return parts


def part_folder(folder: Path, nodes: int) -> Path:
    """Where the points of `nodes` nodes lie: a study of its own."""
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
    if state.digest != digest:
        raise UsageError(
            f"{folder} holds runs of a study with another matrix or other settings; choose another --out DIR, or give "
            "the study as it was"
        )
    return state


def _look(folder: Path, study: Study, plan: StudyRuns, nodes: int, job: PartJob | None) -> Part:
    own = part_folder(folder, nodes)
    state: StudyState = read_state(own) if (own / STATE_FILE).exists() else new_state(study, plan)
    done = state.count("finished") == len(state.runs)
    return Part(
        nodes=nodes, runs=len(state.runs), finished=state.count("finished"), failed=state.count("failed"),
        folder=str(own), job=job.number if job and not done else "",
        state="finished" if done else find_system(job.system).state(job.number) if job else "",
    )  # fmt: skip


def _submit(folder: Path, study: Study, plan: StudyRuns, nodes: int, limits: JobLimits, system: str) -> PartJob:
    own = part_folder(folder, nodes)
    command = ["sweep", str(folder / STUDY_FILE), "--only-nodes", str(nodes), "--out", str(own), "--resume"]
    wanted = Wanted(
        command=command,
        nodes=nodes,
        ranks_per_node=max(point.ranks_per_node for point in plan.points),
        time_s=limits.time_s,
        partition=limits.partition,
        account=limits.account,
        nodes_wanted=limits.nodes_wanted,
        name=f"{study.name}-{nodes}n",
        folder=folder / "jobs" / own.name,
        until_done=system == "slurm",
    )
    job, _ = submit_job(wanted)
    return PartJob(nodes=nodes, number=job.number, system=job.system, folder=job.folder)

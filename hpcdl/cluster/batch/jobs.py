"""The jobs that this user has submitted with hpcdl: one small file per job, in the user's cache."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcdl.cluster.batch.script import CANCELLED
from hpcdl.cluster.batch.systems import ENDED, WAITING, InQueue, call, find_system
from hpcdl.core.errors import CorruptError, HpcdlError, UsageError
from hpcdl.core.paths import user_cache_folder
from hpcdl.core.records.run_record import (
    FAILED,
    FILE_NAME,
    FINISHED,
    STOPPED,
    continues,
    event_of,
    from_json,
    read_record,
    state_of,
)
from hpcdl.core.storage.disk import touch
from hpcdl.core.storage.files import MOST_JSON_BYTES, open_regular, read_json, write_json
from hpcdl.core.units import IMAGES


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as submitted; `submitted_at` is Unix time, `run_dir` empty for commands without one.

    `flags` are those of `hpcdl submit` besides the job's size, `working` the folder in which it was typed.
    """

    number: str
    system: str
    name: str
    folder: str
    command: tuple[str, ...]
    nodes: int
    ranks: int
    run_dir: str = ""
    submitted_at: float = 0.0
    flags: tuple[str, ...] = ()
    working: str = ""


@dataclass(frozen=True, kw_only=True)
class JobView:
    """The present state of a job: the batch system's state, the run's last step, and the end of the log.

    `state` is `ended` if the batch system does not know the job and the record of its run says so.
    `counted` is the unit of `images_per_second`. `run_state` is the state of its run, empty before the run has a
    record (core/records/run_record.py). `reason`: why the job waits, in the batch system's own words.
    """

    job: Job
    state: str
    step: int | None = None
    steps: int | None = None
    images_per_second: float | None = None
    counted: str = IMAGES
    loss: float | None = None
    log_tail: str = ""
    run_state: str = ""
    reason: str = ""


def folder() -> Path:
    """Return the folder of these files."""
    return user_cache_folder() / "jobs"


def remember(job: Job) -> bool:
    """Store `job` for `hpcdl jobs` and `hpcdl cancel`. If that fails, warn and return False: it is queued anyway."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        write_json(folder() / f"{job.system}-{job.number}.json", asdict(job))
    except OSError as error:
        why = f"cannot write to {folder()}: {error.strerror}"
        sys.stderr.write(
            f"hpcdl: warning: job {job.number} is queued, but {why}; `hpcdl jobs` and `hpcdl cancel` will not know it, "
            f"ask {job.system}\n"
        )
        return False
    return True


def known_jobs() -> list[Job]:
    """Return every stored job, oldest first; damaged files are skipped."""
    jobs = []
    for path in folder().glob("*.json"):
        with contextlib.suppress(CorruptError, TypeError, ValueError, FileNotFoundError):
            jobs.append(from_json(Job, read_json(path)))
    return sorted(jobs, key=lambda job: job.submitted_at)


def find_job(number: str) -> Job:
    """Return the job of this number. Raises UsageError listing the newest ones."""
    jobs = known_jobs()
    for job in reversed(jobs):
        if job.number == number or job.number.partition(".")[0] == number:
            return job
    newest = ", ".join(job.number for job in jobs[-5:]) or "none"
    raise UsageError(f"job {number} was not submitted by `hpcdl submit` from this account; the newest: {newest}")


def look(job: Job) -> JobView:
    """Return state, progress and log end of `job`."""
    try:
        queued = find_system(job.system).look(job.number)
    except HpcdlError:
        queued = InQueue(state="unknown")
    run_dir = Path(job.run_dir) if job.run_dir else None
    events = _last_events(run_dir, job) if run_dir else {}
    # Step events come at most twice a second: only the event of its epoch reports a run's last steps.
    newest, start = events.get("newest", {}), events.get("start", {})
    unseen = f"no log: do its nodes see {job.folder}?" if queued.state == "failed" else ""
    run_state = state_of(run_dir) if run_dir and _has_record(run_dir, job) else ""
    step = newest.get("step")
    if run_dir and run_state and not continues(run_state):  # a run that stops within an epoch has no later event
        with contextlib.suppress(CorruptError):
            step = max(step or 0, read_record(run_dir).steps) or None
    return JobView(
        job=job,
        state="ended" if queued.state == "unknown" and _has_ended(job, run_state) else queued.state,
        reason=queued.reason,
        step=step,
        steps=start.get("steps"),
        images_per_second=events.get("step", {}).get("images_per_second"),
        counted=start.get("counted", IMAGES),
        loss=newest.get("loss"),
        log_tail=_log_tail(job) or unseen,
        run_state=run_state,
    )


def asked_too_much(job: Job) -> str:
    """Return a line for a job of Slurm that waits in vain, as submitted; empty for others."""
    with contextlib.suppress(HpcdlError):
        return doubt_of(job, find_system(job.system).look(job.number)) if job.system == "slurm" else ""
    return ""


_LATEST = 5


def still_queued(run_dir: Path) -> tuple[Job, str] | None:
    """Return the newest job of this run directory that waits or runs, with its state."""
    place = str(run_dir.absolute())
    for job in [job for job in reversed(known_jobs()) if job.run_dir == place][:_LATEST]:
        with contextlib.suppress(HpcdlError):
            if (state := find_system(job.system).state(job.number)) in (*WAITING, "running"):
                return job, state
    return None


def doubt_of(job: Job, queued: InQueue) -> str:
    """Return a line for a job that waits in vain; empty for others."""
    if not queued.never_starts:
        return ""
    return (
        f"job {job.number} cannot start as asked ({queued.reason}): cancel it, and ask for less (nodes, CPUs, time) "
        "or for another --partition"
    )


def cancel(job: Job) -> str:
    """Ask the batch system to end `job`, and prevent its requeue. Returns the state of a job that had already ended."""
    system = find_system(job.system)
    with contextlib.suppress(OSError):
        # First: the job script looks for it before it requeues a run that left with 75.
        touch(Path(job.folder) / f"{CANCELLED}-{job.number}")
    with contextlib.suppress(HpcdlError):
        if (state := system.state(job.number)) in ENDED:
            return state
    call(system.cancel(job.number))
    return ""


def _has_ended(job: Job, run_state: str) -> bool:
    """Return whether `job` is over by the state of its run. With --until-done a stopped run may be requeued."""
    return run_state in (FINISHED, FAILED) or (run_state == STOPPED and "--until-done" not in job.flags)


def _has_record(run_dir: Path, job: Job) -> bool:
    """Return whether the record in `run_dir` is from `job`, not from another job that continued the run."""
    with contextlib.suppress(CorruptError, OSError, AttributeError):
        variables = read_json(run_dir / FILE_NAME).get("environment", {})
        return bool(_is_number(job, variables.get(find_system(job.system).job_variable, "")))
    return False


def _is_number(job: Job, number: object) -> bool:
    """Return whether `number` is the job's number, with or without the name of its server."""
    return str(number).partition(".")[0] == job.number.partition(".")[0]


def _last_events(run_dir: Path, job: Job) -> dict[str, Any]:
    """Return the last event of each kind that `job` wrote to a run's journal, and the `newest` with a step.

    A start event names its job. In files of older versions it does not, and counts for a job submitted before it.
    """
    by_kind: dict[str, Any] = {}
    is_own = False
    with contextlib.suppress(OSError), open_regular(run_dir / "metrics.jsonl") as file:
        # A line without an end is still being written, or is too long to be an event.
        while (line := file.readline(MOST_JSON_BYTES)).endswith(b"\n"):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                event = event_of(line)
                if event["kind"] == "start":
                    later = event.get("at", job.submitted_at) >= job.submitted_at
                    is_own = _is_number(job, event["job"]) if "job" in event else later
                if not is_own:
                    continue
                by_kind[event["kind"]] = event
                if event["kind"] in ("step", "epoch"):
                    by_kind["newest"] = event
    return by_kind


def _log_tail(job: Job) -> str:
    """Return the log's last line that is not blank."""
    logs = sorted(Path(job.folder).glob(f"*{job.number.partition('.')[0]}*"))
    for path in logs:
        with contextlib.suppress(OSError):
            with path.open("rb") as file:
                file.seek(max(path.stat().st_size - 4096, 0))
                lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
            if lines:
                return lines[-1][:200]
    return ""

"""The jobs that this user has submitted with hpcdl: a small file each, in the user's cache."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcdl.cluster.batch.script import CANCELLED
from hpcdl.cluster.batch.systems import ENDED, InQueue, call, find_system
from hpcdl.core.errors import CorruptError, HpcdlError, UsageError
from hpcdl.core.paths import user_cache_folder
from hpcdl.core.records.run_record import FILE_NAME, event_of, from_json, state_of
from hpcdl.core.storage.disk import touch
from hpcdl.core.storage.files import MOST_JSON_BYTES, open_regular, read_json, write_json
from hpcdl.core.units import IMAGES


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as it was submitted; `submitted_at` is Unix time, `run_dir` empty for commands without one."""

    number: str
    system: str
    name: str
    folder: str
    command: tuple[str, ...]
    nodes: int
    ranks: int
    run_dir: str = ""
    submitted_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class JobView:
    """A job as it stands: the batch system's state, the run's last step, and the end of the log.

    `counted` is what `images_per_second` counts. `run_state` is what has become of its run, empty before it has a
    record (core/records/run_record.py). `reason`: why it waits, in the batch system's own words.
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
    """Where the files lie."""
    return user_cache_folder() / "jobs"


def remember(job: Job) -> bool:
    """Keep `job` for `hpcdl jobs` and `hpcdl cancel`; where that cannot be, say so: it is queued all the same."""
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
    """Every job that is remembered, oldest first; damaged files are left out."""
    found = []
    for path in folder().glob("*.json"):
        with contextlib.suppress(CorruptError, TypeError, ValueError, FileNotFoundError):
            found.append(from_json(Job, read_json(path)))
    return sorted(found, key=lambda job: job.submitted_at)


def find_job(number: str) -> Job:
    """The job of this number; UsageError lists the newest ones."""
    jobs = known_jobs()
    for job in reversed(jobs):
        if job.number == number or job.number.partition(".")[0] == number:
            return job
    newest = ", ".join(job.number for job in jobs[-5:]) or "none"
    raise UsageError(f"job {number} was not submitted by `hpcdl submit` from this account; the newest: {newest}")


def look(job: Job) -> JobView:
    """State, progress and log end of `job`."""
    try:
        queued = find_system(job.system).look(job.number)
    except HpcdlError:
        queued = InQueue(state="unknown")
    run_dir = Path(job.run_dir) if job.run_dir else None
    events = _last_events(run_dir, job) if run_dir else {}
    # Step events come twice a second at most: a run's last steps are told by the end of its epoch alone.
    newest, start = events.get("newest", {}), events.get("start", {})
    unseen = f"no log: do its nodes see {job.folder}?" if queued.state == "failed" else ""
    return JobView(
        job=job,
        state=queued.state,
        reason=queued.reason,
        step=newest.get("step"),
        steps=start.get("steps"),
        images_per_second=events.get("step", {}).get("images_per_second"),
        counted=start.get("counted", IMAGES),
        loss=newest.get("loss"),
        log_tail=_log_tail(job) or unseen,
        run_state=state_of(run_dir) if run_dir and _has_record(run_dir, job) else "",
    )


def cancel(job: Job) -> str:
    """Ask the batch system to end `job`; it does not requeue itself any more. The state of one that had ended."""
    system = find_system(job.system)
    with contextlib.suppress(OSError):
        touch(Path(job.folder) / CANCELLED)
    with contextlib.suppress(HpcdlError):
        if (state := system.state(job.number)) in ENDED:
            return state
    call(system.cancel(job.number))
    return ""


def _has_record(run_dir: Path, job: Job) -> bool:
    """Whether the record in `run_dir` is of `job`, not of another one that has gone on with the run."""
    with contextlib.suppress(CorruptError, OSError, AttributeError):
        variables = read_json(run_dir / FILE_NAME).get("environment", {})
        return bool(_is_number(job, variables.get(find_system(job.system).job_variable, "")))
    return False


def _is_number(job: Job, number: object) -> bool:
    """Whether `number` is the job's, with or without the name of its server."""
    return str(number).partition(".")[0] == job.number.partition(".")[0]


def _last_events(run_dir: Path, job: Job) -> dict[str, Any]:
    """The last event of each kind that `job` has left in a run's journal, and the `newest` that tells a step.

    A start names its job; what older versions wrote does not, and counts for who was submitted before it.
    """
    found: dict[str, Any] = {}
    own = False
    with contextlib.suppress(OSError), open_regular(run_dir / "metrics.jsonl") as file:
        while (line := file.readline(MOST_JSON_BYTES)).endswith(b"\n"):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                event = event_of(line)
                if event["kind"] == "start":
                    later = event.get("at", job.submitted_at) >= job.submitted_at
                    own = _is_number(job, event["job"]) if "job" in event else later
                if not own:
                    continue
                found[event["kind"]] = event
                if event["kind"] in ("step", "epoch"):
                    found["newest"] = event
    return found


def _log_tail(job: Job) -> str:
    """The log's last line that says anything."""
    logs = sorted(Path(job.folder).glob(f"*{job.number.partition('.')[0]}*"))
    for path in logs:
        with contextlib.suppress(OSError):
            with path.open("rb") as file:
                file.seek(max(path.stat().st_size - 4096, 0))
                lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
            if lines:
                return lines[-1][:200]
    return ""

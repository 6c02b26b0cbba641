"""One attempt at a run: a fresh `hpcdl train` process whose end, whatever it is, becomes a record."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from hpcdl.config.study import Study
from hpcdl.core.errors import CorruptError
from hpcdl.core.records.run_record import RunRecord, read_record, write_record
from hpcdl.core.storage.disk import make_folder, open_to_append
from hpcdl.study.plan import PlannedRun
from hpcdl.tuning.trials import last_words

"""What a run leaves beside its records."""
SOFT_STOP_S = 20.0
"""How long a run may take to leave when it is asked to."""


Started = TypeVar("Started")


@dataclass(kw_only=True)
class Attempt(Generic[Started]):
    """A process under way on `nodes` for `run`; `log` takes all that it says."""

    run: Started
    nodes: Sequence[str]
    process: subprocess.Popen[bytes]
    log: Path
    began: float
    timed_out: bool = False

    @property
    def seconds(self) -> float:
        """Time since its start."""
        return time.monotonic() - self.began


def begin(
    run: Started, command: Sequence[str], environment: Mapping[str, str], nodes: Sequence[str], log: Path
) -> Attempt[Started]:
    """Start a run on `nodes`; `environment` is what it has beyond this process's own."""
    with os.fdopen(open_to_append(log), "ab") as output:
        try:
            process = _process(command, environment, output)
        except OSError as error:
            output.write(f"hpcdl: cannot start {command[0]}: {error.strerror}\n".encode())
            output.flush()
            process = _process(["false"], environment, output)
    return Attempt(run=run, nodes=nodes, process=process, log=log, began=time.monotonic())


def _process(command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(command),
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,  # Ctrl-C reaches the sweep alone, which asks the run to leave
    )


def stop(attempts: Sequence[Attempt[Any]]) -> None:
    """Ask runs to leave, twice (their launchers then kill the ranks), and kill those that do not."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        for attempt in attempts:
            if attempt.process.poll() is None:
                attempt.process.send_signal(number)
        deadline = time.monotonic() + SOFT_STOP_S
        for attempt in attempts:
            with contextlib.suppress(subprocess.TimeoutExpired):
                attempt.process.wait(max(deadline - time.monotonic(), 0.01))


def wait_until_still(folders: Sequence[Path], still_s: float, longest_s: float = 60.0) -> None:
    """Return when nothing in `folders` has changed for `still_s`, or after `longest_s`.

    Ranks of a job that was just killed live on for moments, on other nodes, and save as they leave.
    """
    began = last = time.monotonic()
    before = _stamps(folders)
    while folders and time.monotonic() - last < still_s and time.monotonic() - began < longest_s:
        time.sleep(min(still_s / 4, 1.0))
        now = _stamps(folders)
        if now != before:
            before, last = now, time.monotonic()


def _stamps(folders: Sequence[Path]) -> dict[Path, tuple[int, int]]:
    """Of all files: a clock that was set back makes later changes no newer than those before."""
    found = {}
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            with contextlib.suppress(OSError):  # it has just been renamed
                status = path.stat()
                found[path] = status.st_mtime_ns, status.st_size
    return found


def finished_record(run_dir: Path) -> RunRecord | None:
    """The record of a run that came to its end; None where it did not, or where it cannot be read."""
    try:
        record = read_record(run_dir)
    except CorruptError:
        return None
    return record if record.status == "finished" else None


def why_failed(attempt: Attempt[Any], run_dir: Path) -> str:
    """The last words of a run that failed."""
    code = attempt.process.returncode
    if attempt.timed_out:
        return f"ended after {attempt.seconds:.0f} s by --run-timeout"
    if code == 0:
        return f"ended without a finished record in {run_dir.name}"
    return last_words(attempt.log, code)


def stamp(run_dir: Path, run: PlannedRun, study: Study, failure: str = "") -> None:
    """Write into the run's record which study it belongs to, and how it failed; a run without a record gets one."""
    point = run.point
    try:
        record = read_record(run_dir)
    except CorruptError:
        make_folder(run_dir)
        record = RunRecord(
            strategy=point.strategy, model=point.model, data=point.data, ranks=point.ranks, workers=point.workers,
            servers=point.servers, nodes=point.nodes, ranks_per_node=point.ranks_per_node,
            batch_per_rank=point.batch_size, global_batch=point.batch_size * point.workers,
        )  # fmt: skip
    changes: dict[str, Any] = {"status": "failed", "message": failure} if failure else {}
    changes |= {"study": study.name, "mode": study.plan.mode, "labels": dict(study.labels)}
    write_record(run_dir, dataclasses.replace(record, repeat=run.repeat, **changes))

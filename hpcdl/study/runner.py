"""Execute a study or a search: start its runs when there is room, watch them, and end them when it must stop.

A run is a fresh `hpcdl train` process. The runner's Policy, a sweep (sweep.py) or a search (search.py), decides what to
start and what an end means.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from hpcdl.cluster.processes import end_marked, stop
from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.processes.streams import caught, suspended_alone
from hpcdl.core.records.run_record import TIME_FORMAT, RunRecord, read_record
from hpcdl.core.storage.disk import free_name, make_folder, open_to_append
from hpcdl.core.storage.files import write_toml
from hpcdl.core.storage.lock import writing
from hpcdl.run.rundir import discard, removal_of
from hpcdl.study.jobs import Allocation
from hpcdl.trace.recorder import collect_abandoned
from hpcdl.tuning.trials import MARK, last_words

LOGS, SETTINGS = "logs", "train.toml"
SOFT_STOP_S = 20.0
"""Seconds that a run may take to leave when it is asked to."""
Planned = TypeVar("Planned")


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Room for one run: nodes of the allocation, and on a shared node the processors it may use (empty: all)."""

    nodes: Sequence[str]
    cpus: Sequence[int] = ()


@dataclass(kw_only=True, eq=False)
class Task(Generic[Planned]):
    """A run to start in `slot`: `hpcdl train --run-dir RUN_DIR` with `words` for the settings of `planned`."""

    planned: Planned
    run_dir: Path
    slot: Slot
    words: Sequence[str]


# Compared by identity: two attempts at one run are not the same.
@dataclass(kw_only=True, eq=False)
class Attempt(Task[Planned]):
    """A task whose process has started. `log` receives its output."""

    process: subprocess.Popen[bytes]
    log: Path
    began: float = field(default_factory=time.monotonic)
    timed_out: bool = False

    @property
    def seconds(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.began


class Policy(Protocol[Planned]):
    """The differences between a sweep and a search. Only the Runner calls these methods."""

    def startable(self) -> Iterable[Task[Planned]]:
        """Return the tasks to start next in free room, recorded as running. None, with no active run, ends the work."""

    def watch(self) -> Collection[Attempt[Planned]]:
        """Check the active attempts, once a round. Return those to end early."""

    def close(self, attempt: Attempt[Planned]) -> bool:
        """Record the result of an ended attempt. Return False if it was asked to stop, as all others will be."""


@dataclass(kw_only=True)
class Runner(Generic[Planned]):
    """One call of `hpcdl sweep` or `hpcdl search` in `folder`. `mark` is in the environment of all its processes.

    `settings` are common to all runs, as written in their file. If a run starts again, its old files go into the folder
    `aside`. A run may take `run_timeout_s`, all runs together `stop_after_s`, the time left in the job's limit.
    """

    folder: Path
    mark: str
    allocation: Allocation
    settings: Mapping[str, Any]
    aside: str
    poll_s: float
    run_timeout_s: float | None
    stop_after_s: float | None
    active: list[Attempt[Planned]] = field(default_factory=list)
    stopping: bool = False

    def __post_init__(self) -> None:
        self._stop_at = math.inf if self.stop_after_s is None else time.monotonic() + self.stop_after_s

    @contextlib.contextmanager
    def opened(self, folders: Sequence[str] = ()) -> Iterator[None]:
        """Hold the folder with its `folders` for this call alone; inside the context a signal requests a stop.

        Processes that a killed call has left running are ended first.
        """
        try:
            for folder in (self.folder, *(self.folder / name for name in folders)):
                make_folder(folder)
        except OSError as error:
            raise UsageError(f"cannot make {self.folder}: {error.strerror}; choose another --out DIR") from None
        # The lock comes first: `end_marked` would end the runs of another call in this folder.
        with writing(self.folder), caught(self._stop_soon), suspended_alone("runs"):
            write_toml(self.folder / SETTINGS, dict(self.settings))
            end_marked(MARK, self.mark)
            yield

    def carry_out(self, policy: Policy[Planned]) -> None:
        """Start and close runs until none is left, or until a signal or the time limit requests a stop (`stopping`)."""
        try:
            while not self.stopping:
                if self.ends_within(0.0):  # also before any start: a job's last minute is too short for a run
                    self.stopping = True
                    break
                for task in policy.startable():
                    self._begin(task)
                if not self.active:
                    break
                self._end(policy.watch())
                for attempt in [item for item in self.active if item.process.poll() is not None]:
                    self.active.remove(attempt)
                    if not policy.close(attempt):
                        self.active.append(attempt)  # it starts again with --resume
                        self.stopping = True
                time.sleep(self.poll_s)
        finally:
            stop([attempt.process for attempt in self.active], SOFT_STOP_S)
            if self.active:
                end_marked(MARK, self.mark)

    def ends_within(self, seconds: float) -> bool:
        """Return whether the job's time limit is at most `seconds` away."""
        return time.monotonic() >= self._stop_at - seconds

    def set_aside(self, run_dir: Path) -> Path:
        """Return the place for the old files of a run that starts again."""
        return free_name(self.folder / self.aside / run_dir.name)

    def _stop_soon(self, number: int) -> None:
        """Handle a signal. It sets a flag without a lock, because a handler may interrupt the holder of the lock."""
        self.stopping = True

    def _begin(self, task: Task[Planned]) -> None:
        if task.run_dir.exists():
            # Its killed ranks left their traces on the node, and the note of their place is about to be moved.
            collect_abandoned(task.run_dir)
            discard(task.run_dir, self.set_aside(task.run_dir))  # a partial run is not a measurement
        command = [*self.allocation.command, "--config", str(self.folder / SETTINGS)]
        environment = {**self.allocation.environment(task.slot.nodes), MARK: self.mark}
        log = self.folder / LOGS / f"{task.run_dir.name}.log"
        self.active.append(begin(task, command, environment, log))

    def _end(self, unwanted: Collection[Attempt[Planned]]) -> None:
        """End active attempts that are unwanted or have used up their time."""
        limit = math.inf if self.run_timeout_s is None else self.run_timeout_s
        for attempt in self.active:
            if attempt.process.poll() is None:
                attempt.timed_out = attempt.seconds > limit
                if attempt.timed_out or attempt in unwanted:
                    stop([attempt.process], SOFT_STOP_S)


def begin(task: Task[Planned], command: Sequence[str], environment: Mapping[str, str], log: Path) -> Attempt[Planned]:
    """Start `task`: its words are appended to `command`; `environment` is added to that of this process."""
    line = [*command, "--run-dir", str(task.run_dir), *task.words]
    with os.fdopen(open_to_append(log), "ab") as output, _on(task.slot.cpus):

        def start(words: Sequence[str]) -> subprocess.Popen[bytes]:
            variables, none = {**os.environ, **environment}, subprocess.DEVNULL
            # A session of its own: Ctrl-C reaches only the sweep, which asks the run to leave.
            return subprocess.Popen(
                words, env=variables, stdin=none, stdout=output, stderr=output, start_new_session=True
            )

        try:
            process = start(line)
        except OSError as error:
            output.write(f"hpcdl: cannot start {line[0]}: {error.strerror}\n".encode())
            output.flush()
            # A process that fails at once takes the usual way: its log is read, and the others continue.
            process = start(["false"])
    return Attempt(**vars(task), process=process, log=log)


@contextlib.contextmanager
def _on(cpus: Sequence[int]) -> Iterator[None]:
    """Start processes only on these processors inside this context, or on all if none are named."""
    # Children inherit the affinity; a preexec_fn would not be safe beside threads.
    before = os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def record_of(run_dir: Path) -> RunRecord | None:
    """Return the record of a run; None if there is none or it cannot be read."""
    try:
        return read_record(run_dir)
    except CorruptError:
        return None


def finished_record(run_dir: Path) -> RunRecord | None:
    """Return the record of a finished run; None if it did not finish."""
    record = record_of(run_dir)
    return record if record is not None and record.status == "finished" else None


def wall_seconds(record: RunRecord) -> float | None:
    """Return the time from a run's start to its end, to the second; None if its record lacks one of them."""
    try:
        began, ended = (datetime.strptime(text, TIME_FORMAT) for text in (record.started_at, record.finished_at))
    except ValueError:
        return None
    # Stamps have whole seconds: a difference of 0 says nothing.
    return (ended - began).total_seconds() or None


def why_failed(attempt: Attempt[Any]) -> str:
    """Return the last message of a failed run."""
    code = attempt.process.returncode
    if attempt.timed_out:
        return f"ended after {attempt.seconds:.0f} s by --run-timeout"
    if code == 0:
        return f"ended without a finished record in {attempt.run_dir.name}"
    return last_words(attempt.log, code).removesuffix(removal_of(attempt.run_dir))  # a study's folder stays

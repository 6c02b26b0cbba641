"""Carries a study or a search out: starts its runs where there is room, watches them, and ends them when it must stop.

A run is a fresh `hpcdl train` process. What is to be started, and what an end means, is told by the runner's Policy: a
sweep (sweep.py) or a search (search.py).
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
from hpcdl.core.processes.streams import caught
from hpcdl.core.records.run_record import TIME_FORMAT, RunRecord, read_record
from hpcdl.core.storage.disk import free_name, make_folder, open_to_append
from hpcdl.core.storage.files import write_toml
from hpcdl.core.storage.lock import writing
from hpcdl.run.rundir import discard
from hpcdl.study.jobs import Allocation
from hpcdl.trace.recorder import collect_abandoned
from hpcdl.tuning.trials import MARK, last_words

LOGS, SETTINGS = "logs", "train.toml"
SOFT_STOP_S = 20.0
"""How long a run may take to leave when it is asked to."""
Planned = TypeVar("Planned")


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Room for one run: nodes of the allocation, and on one shared node the processors it may use (empty: all)."""

    nodes: Sequence[str]
    cpus: Sequence[int] = ()


@dataclass(kw_only=True, eq=False)
class Task(Generic[Planned]):
    """A run to start in `slot`: `hpcdl train --run-dir RUN_DIR` with `words` for the settings that `planned` has."""

    planned: Planned
    run_dir: Path
    slot: Slot
    words: Sequence[str]


@dataclass(kw_only=True, eq=False)
class Attempt(Task[Planned]):
    """A task whose process has started; `log` takes all that it says."""

    process: subprocess.Popen[bytes]
    log: Path
    began: float = field(default_factory=time.monotonic)
    timed_out: bool = False

    @property
    def seconds(self) -> float:
        """Time since its start."""
        return time.monotonic() - self.began


class Policy(Protocol[Planned]):
    """What differs between a sweep and a search; each method is called by the Runner alone."""

    def startable(self) -> Iterable[Task[Planned]]:
        """What is to be started next on what is free, noted as running; nothing, with nothing under way, ends it."""

    def watch(self) -> Collection[Attempt[Planned]]:
        """Look at what is under way, once a round; the attempts to be ended before their time."""

    def close(self, attempt: Attempt[Planned]) -> bool:
        """Keep what has come of an attempt that is over; False where it was told to leave, as all others will be."""


@dataclass(kw_only=True)
class Runner(Generic[Planned]):
    """One call of `hpcdl sweep` or `hpcdl search` in `folder`; `mark` is in the environment of all its processes.

    `settings` are those that all runs have, in words of their file. Where a run begins anew, what there is of it goes
    into the folder `aside`. A run may take `run_timeout_s`, all of them `stop_after_s`: what the job's time limit
    leaves.
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
        """Inside, the folder with its `folders` is there and this call's alone, and a signal asks to stop.

        What a killed call has left running has ended.
        """
        try:
            for folder in (self.folder, *(self.folder / name for name in folders)):
                make_folder(folder)
        except OSError as error:
            raise UsageError(f"cannot make {self.folder}: {error.strerror}; choose another --out DIR") from None
        with writing(self.folder), caught(self._stop_soon):
            write_toml(self.folder / SETTINGS, dict(self.settings))
            end_marked(MARK, self.mark)
            yield

    def carry_out(self, policy: Policy[Planned]) -> None:
        """Start and close runs until nothing is left, or a signal or the time limit asks to stop (`stopping`)."""
        try:
            while not self.stopping:
                if self.ends_within(0.0):  # before anything starts, too: a job's last minute is no time for a run
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
                        self.active.append(attempt)  # it begins anew with --resume
                        self.stopping = True
                time.sleep(self.poll_s)
        finally:
            stop([attempt.process for attempt in self.active], SOFT_STOP_S)
            if self.active:
                end_marked(MARK, self.mark)

    def ends_within(self, seconds: float) -> bool:
        """Whether the job's time limit is so near."""
        return time.monotonic() >= self._stop_at - seconds

    def set_aside(self, run_dir: Path) -> Path:
        """Where what there is of a run that begins anew is kept out of its way."""
        return free_name(self.folder / self.aside / run_dir.name)

    def _stop_soon(self, number: int) -> None:
        """What a signal does; a flag and no lock, because a handler may interrupt whoever holds the lock."""
        self.stopping = True

    def _begin(self, task: Task[Planned]) -> None:
        if task.run_dir.exists():
            collect_abandoned(task.run_dir)
            discard(task.run_dir, self.set_aside(task.run_dir))  # a part of a run is not a measurement
        command = [*self.allocation.command, "--config", str(self.folder / SETTINGS)]
        environment = {**self.allocation.environment(task.slot.nodes), MARK: self.mark}
        log = self.folder / LOGS / f"{task.run_dir.name}.log"
        self.active.append(begin(task, command, environment, log))

    def _end(self, unwanted: Collection[Attempt[Planned]]) -> None:
        """End the attempts under way that are unwanted, or beyond their time."""
        limit = math.inf if self.run_timeout_s is None else self.run_timeout_s
        for attempt in self.active:
            if attempt.process.poll() is None:
                attempt.timed_out = attempt.seconds > limit
                if attempt.timed_out or attempt in unwanted:
                    stop([attempt.process], SOFT_STOP_S)


def begin(task: Task[Planned], command: Sequence[str], environment: Mapping[str, str], log: Path) -> Attempt[Planned]:
    """Start `task`: `command` is what its words are for, `environment` what it has beyond this process's own."""
    line = [*command, "--run-dir", str(task.run_dir), *task.words]
    with os.fdopen(open_to_append(log), "ab") as output, _on(task.slot.cpus):

        def start(words: Sequence[str]) -> subprocess.Popen[bytes]:
            own, none = {**os.environ, **environment}, subprocess.DEVNULL
            # In a session of its own: Ctrl-C reaches the sweep alone, which asks the run to leave.
            return subprocess.Popen(words, env=own, stdin=none, stdout=output, stderr=output, start_new_session=True)

        try:
            process = start(line)
        except OSError as error:
            output.write(f"hpcdl: cannot start {line[0]}: {error.strerror}\n".encode())
            output.flush()
            process = start(["false"])
    return Attempt(**vars(task), process=process, log=log)


@contextlib.contextmanager
def _on(cpus: Sequence[int]) -> Iterator[None]:
    """Inside, processes start on these processors alone; all where none are named."""
    before = os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def record_of(run_dir: Path) -> RunRecord | None:
    """The record of a run; None where there is none, or where it cannot be read."""
    try:
        return read_record(run_dir)
    except CorruptError:
        return None


def finished_record(run_dir: Path) -> RunRecord | None:
    """The record of a run that came to its end; None where it did not."""
    record = record_of(run_dir)
    return record if record is not None and record.status == "finished" else None


def wall_seconds(record: RunRecord) -> float | None:
    """Time from a run's start to its end, to the second; None where its record does not say both."""
    try:
        began, ended = (datetime.strptime(text, TIME_FORMAT) for text in (record.started_at, record.finished_at))
    except ValueError:
        return None
    return (ended - began).total_seconds() or None


def why_failed(attempt: Attempt[Any]) -> str:
    """The last words of a run that failed."""
    code = attempt.process.returncode
    if attempt.timed_out:
        return f"ended after {attempt.seconds:.0f} s by --run-timeout"
    if code == 0:
        return f"ended without a finished record in {attempt.run_dir.name}"
    return last_words(attempt.log, code)

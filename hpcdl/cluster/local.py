"""Starts ranks, on this node or on those of the job that this process is in, and sees to it that all of them end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcdl.cluster.environment import own_placement
from hpcdl.cluster.launcher import Launcher
from hpcdl.cluster.launchers import find_launcher
from hpcdl.cluster.status import STATES, RankStatus, read_statuses
from hpcdl.cluster.watch import DeathWatch
from hpcdl.core.errors import RankError, StoppedEarly
from hpcdl.core.protocols import LaunchPlan

STATUS_VARIABLE = "HPCDL_STATUS_DIR"
BINDING_VARIABLE = "HPCDL_CPUS_BY_LOCAL_RANK"
GRACE_S = 8.0
"""How long the other ranks may take to leave after one has failed."""


def start(
    plan: LaunchPlan,
    command: Sequence[str],
    *,
    folder: Path,
    mpi: bool = True,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Run `command` on `plan.num_ranks` ranks and return when all are done; RankError names the rank that failed.

    `folder` takes the ranks' status files and the launcher's log. `tick` is called about ten times a second.
    SIGINT and SIGTERM are handed on to the ranks, which may save and leave with 75. Without `mpi` the ranks are
    started one by one and find each other by other means.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("[0-9]*.json"):
        stale.unlink()
    log = folder / "launcher.log"
    launcher = find_launcher()
    said_before = log.stat().st_size if log.exists() else 0
    with log.open("ab") as output:
        processes = _start_processes(launcher, plan, command, folder, output.fileno(), mpi=mpi)
        watcher = _Watcher(processes, folder, tick)
        with _Forwarding(watcher.stop_softly):
            watcher.wait()
    chatter = log.read_bytes()[said_before:].decode(errors="replace")
    casualty = launcher.first_casualty(chatter)
    _raise_for(read_statuses(folder), plan.num_ranks, watcher, log, casualty)


def _start_processes(
    launcher: Launcher, plan: LaunchPlan, command: Sequence[str], folder: Path, output: int, *, mpi: bool
) -> list[subprocess.Popen[bytes]]:
    environment = {**os.environ, **plan.environment, STATUS_VARIABLE: str(folder), "PYTHONUNBUFFERED": "1"}
    environment[BINDING_VARIABLE] = json.dumps([list(cpus) for cpus in plan.cpus_by_local_rank])
    each: list[dict[str, str]] = [{}]
    line, needed = launcher.line(plan, command, mpi=mpi, environment=environment)
    environment.update(needed)
    if not mpi and launcher.name == "local":
        each = [own_placement(rank, plan.num_ranks) for rank in range(plan.num_ranks)]
    return [
        subprocess.Popen(
            line,
            env={**environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches this process alone, which tells the ranks
        )
        for own in each
    ]


class _Forwarding:
    """While active, SIGINT and SIGTERM call `action` instead of ending this process."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __enter__(self) -> None:
        self._before = {
            number: signal.signal(number, lambda *_: self._action()) for number in (signal.SIGINT, signal.SIGTERM)
        }

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class _Watcher:
    """Waits for the launcher, sees which rank ends first, and cleans up when the others do not follow."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], folder: Path, tick: Callable[[], None]) -> None:
        self._processes = processes
        self._folder = folder
        self._tick = tick
        self._host = socket.gethostname()
        self.first_dead_pid: int | None = None
        self.stop_requests = 0

    def stop_softly(self) -> None:
        """Ask every rank of this host to save and leave; a second request kills them."""
        self.stop_requests += 1
        number = signal.SIGTERM if self.stop_requests == 1 else signal.SIGKILL
        running = [status.pid for status in self._statuses() if status.state == "running"]
        for pid in running or [process.pid for process in self._processes]:
            _send(pid, number)

    def wait(self) -> None:
        """Return when the launcher has ended; ranks that stay behind after a failure are killed."""
        watch = DeathWatch()
        deadline: float | None = None
        try:
            while any(process.poll() is None for process in self._processes):
                statuses = self._statuses()
                for status in statuses:
                    watch.add(status.pid)
                for pid in watch.poll(0.1):
                    last_word = next((status for status in self._statuses() if status.pid == pid), None)
                    if self.first_dead_pid is None and (last_word is None or last_word.state == "running"):
                        self.first_dead_pid = pid
                if deadline is None and (self.first_dead_pid or any(status.state == "failed" for status in statuses)):
                    deadline = time.monotonic() + GRACE_S
                if deadline is not None and time.monotonic() > deadline:
                    self._kill()
                self._tick()
        finally:
            watch.close()
            self._kill()
            self._tick()

    def _statuses(self) -> list[RankStatus]:
        return [status for status in read_statuses(self._folder) if status.host == self._host]

    def _kill(self) -> None:
        for status in self._statuses():
            if status.state == "running":
                _send(status.pid, signal.SIGKILL)
        for process in self._processes:
            if process.poll() is None:
                _send(-process.pid, signal.SIGKILL)
            process.wait()


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _raise_for(
    statuses: Sequence[RankStatus], num_ranks: int, watcher: _Watcher, log: Path, casualty: int | None = None
) -> None:
    """Raise what the ranks' last words amount to: an own failure counts before a death, a death before mourning.

    `casualty` is the rank that died first by the launcher's word; without one, the kernel's word on this node counts.
    """
    by_state = {state: [status for status in statuses if status.state == state] for state in STATES}
    for status in sorted(by_state["failed"], key=lambda status: status.at):
        named = num_ranks == 1 or status.message.startswith("rank ")
        where = "" if named else f"rank {status.rank} on {status.host}: "
        raise RankError(where + status.message, rank=status.rank, host=status.host, exit_code=status.exit_code)
    for status in by_state["stopped"]:
        raise StoppedEarly(status.message)
    for status in sorted(
        by_state["running"],
        key=lambda status: status.pid != watcher.first_dead_pid if casualty is None else status.rank != casualty,
    ):
        message = f"rank {status.rank} on {status.host} ended without a word (killed, out of memory or crashed)"
        raise RankError(f"{message}; see {log}", rank=status.rank, host=status.host)
    for status in by_state["bereaved"]:
        raise RankError(f"rank {status.rank} on {status.host}: {status.message}", rank=status.rank, host=status.host)
    if len(statuses) < num_ranks:
        raise RankError(f"{num_ranks - len(statuses)} of {num_ranks} ranks never started; see {log}")

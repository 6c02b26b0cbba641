"""Starts ranks, on this node or on those of this process's job, and ensures that all of them end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpcdl.cluster.deaths import DeathWatch
from hpcdl.cluster.environment import own_placement
from hpcdl.cluster.launchers.base import Casualty, Launcher
from hpcdl.cluster.launchers.hostfile import mpiexec_casualty
from hpcdl.cluster.limits import check_node
from hpcdl.cluster.processes import end_marked
from hpcdl.cluster.status import ALONE, TABLE, WATCH_FOLDER, RankStatus, heard, raise_for, read_statuses, read_table
from hpcdl.core.errors import CorruptError, HpcdlError, Interrupted, RankError, StoppedEarly, without_place
from hpcdl.core.paths import quoted
from hpcdl.core.processes.lifeline import ends_with_parent, identity, remove_abandoned
from hpcdl.core.processes.streams import caught, suspended_alone
from hpcdl.core.protocols import LaunchPlan
from hpcdl.core.storage.disk import make_folder, open_to_append, remove_file
from hpcdl.core.storage.files import read_json
from hpcdl.core.units import format_seconds

STATUS_VARIABLE = "HPCDL_STATUS_DIR"
BINDING_VARIABLE = "HPCDL_CPUS_BY_LOCAL_RANK"
LAUNCH_VARIABLE = "HPCDL_LAUNCH"
"""Marks every process of one launch with a unique word."""
LAUNCHED_BY_VARIABLE = "HPCDL_LAUNCHED_BY"
"""The process that supervises the launch; its ranks end with it."""
GRACE_S = 8.0
"""Time for the other ranks to leave after one has failed."""
GOING_ON_S = 12.0
"""Time for the other ranks to report that they continue: they give up earlier themselves (supervision/regroup.py).
Ranks on other nodes that are killed before they report get the same time."""
LAUNCHER_S = 3.0
"""Time for a launcher to end after all its ranks, some of them killed: Open MPI's sometimes waits forever."""
END_WAIT_S = 1.0
"""Time for ranks under a launcher that keeps them after a loss: enough for their last messages."""
LOOK_S = 1.0
"""Interval of checking the heartbeat of a single remaining rank."""
_BY_SIGNAL = re.compile(r"\bsignal \d+ ?\(|\(signal \d+\)")
"""How each mpiexec reports a killed rank; they also report a program that cannot start, in other words."""
_ROOM_BYTES = 1 << 16
"""A file system that accepts this many bytes is not full."""
_WARNINGS = (signal.SIGUSR1, signal.SIGHUP)
"""A scheduler may repeat its warning, and a closing terminal sends several hangups."""


def start(
    launcher: Launcher,
    plan: LaunchPlan,
    command: Sequence[str],
    *,
    folder: Path,
    mpi: bool = True,
    tick: Callable[[], None] = lambda: None,
    warn: Callable[[str], None] = lambda text: None,
) -> None:
    """Run `command` on `plan.num_ranks` ranks by `launcher` and return when all are done.

    Raises RankError naming the failed rank, Interrupted if a second signal killed them.
    `folder` holds status files and the launcher's log. `tick` is called ten times a second, `warn` if `folder` moves.
    SIGINT, SIGTERM, SIGUSR1 and SIGHUP become a SIGTERM for the ranks, which may save and leave with 75. Without `mpi`
    the ranks are started one by one and find each other by other means. Call it from the main thread: the processes
    that it starts end with that thread.
    """
    check_node(plan.ranks_per_node, mpi=mpi)
    make_folder(folder)
    # Statuses of an earlier launch would count as those of this one.
    for stale in (*folder.glob("[0-9]*.json"), *folder.glob(TABLE)):
        remove_file(stale)
    log, place = folder / "launcher.log", _Place(folder, tick, warn)
    # An earlier launch's messages must not name a casualty of this one.
    log_bytes_before = log.stat().st_size if log.exists() else 0
    launch = uuid.uuid4().hex
    marks = {LAUNCH_VARIABLE: launch, LAUNCHED_BY_VARIABLE: identity(os.getpid())}
    marked = dataclasses.replace(plan, environment={**plan.environment, **marks})
    remove_abandoned()
    with os.fdopen(open_to_append(log), "ab") as output:
        deaths = DeathWatch(launch)  # before the first rank starts: a rank connects to it at once
        processes = _start_processes(launcher, marked, command, folder, output.fileno(), mpi=mpi)
        chatter = _Chatter(launcher, log, log_bytes_before)
        watcher = _Watcher(processes, folder, launch, deaths, place.tick, chatter, continues=marked.continues)
        with caught(watcher.hear), suspended_alone("ranks"):
            watcher.wait()
    if watcher.silent is not None:
        raise watcher.silent
    place.check()
    statuses = watcher.statuses()
    casualty = launcher.first_casualty(chatter.text()) or watcher.casualty()
    if casualty is None and not statuses:
        casualty = _killed_unheard(processes, chatter.text())
    try:
        raise_for(statuses, plan.num_ranks, casualty=casualty, log=log, hosts=launcher.hosts(os.environ))
    except RankError as error:
        if watcher.stop_requests > 1 and (error.lost or not statuses):
            raise Interrupted(f"stopped at once by a second signal: what was not saved is lost; see {log}") from error
        if error.lost and (why := _no_place(folder)):
            error.args = (f"{error}; the launcher may have ended the ranks because it {why}",)
        error.lost = (
            error.lost and not watcher.stop_requests
        )  # a rank that was asked to stop and killed is not replaced
        raise
    except StoppedEarly as error:
        # Whoever asked for the stop wants an end: neither a lost node nor room for more ranks starts new ones.
        if watcher.stop_requests:
            error.node, error.grows = "", False
        raise


class _Place:
    """The folder in which the ranks began. Its path may come to lead elsewhere, to which they then write."""

    def __init__(self, folder: Path, tick: Callable[[], None], warn: Callable[[str], None]) -> None:
        self._folder, self._tick, self._warn, self._began = folder, tick, warn, folder.stat()
        self._looked_s, self._warned = time.monotonic(), False

    def tick(self) -> None:
        """Call the given `tick`. Warn once, within a few seconds, if the folder is elsewhere now."""
        self._tick()
        now_s = time.monotonic()
        if self._warned or now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        if self._is_elsewhere():
            self._warned = True
            self._warn(
                f"{quoted(self._folder.parent)} was moved or removed while its ranks run: from now on they"
                " save into a new folder of this name; stop them, and continue the moved one with --resume"
            )

    def check(self) -> None:
        """Raise HpcdlError if the path no longer leads to the folder, or to none."""
        if self._is_elsewhere(unknown=True):
            raise HpcdlError(
                f"{quoted(self._folder.parent)} was moved or removed while its ranks ran: what they saved since is in "
                "a new folder of this name, all else where you have moved it; put them together, or continue the moved "
                "one with --resume"
            )

    def _is_elsewhere(self, *, unknown: bool = False) -> bool:
        try:
            return not os.path.samestat(self._folder.stat(), self._began)
        except FileNotFoundError:
            return True
        except OSError:  # as from a file server that is away for a while
            return unknown


def _no_place(folder: Path) -> str:
    """Return `cannot write FOLDER: WHY` with the remedy if the folder accepts no more data; else an empty text."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM_BYTES))
            os.fsync(file.fileno())  # some file systems only now find that they are full
    except OSError as error:
        error.filename = str(folder)
        return without_place(error)
    return ""


def _killed_unheard(processes: Sequence[subprocess.Popen[bytes]], chatter: str) -> Casualty | None:
    """Return the rank killed before any rank reported: by mpiexec, or the process itself if it is the rank."""
    killed = (process.pid for process in processes if process.returncode < 0)
    if (pid := next(killed, None)) is not None:
        return Casualty(host=socket.gethostname(), pid=pid)
    return mpiexec_casualty(chatter) if _BY_SIGNAL.search(chatter) else None


def _start_processes(
    launcher: Launcher, plan: LaunchPlan, command: Sequence[str], folder: Path, output: int, *, mpi: bool
) -> list[subprocess.Popen[bytes]]:
    # Unbuffered: what Python holds back is lost if the rank is killed.
    environment = {**os.environ, **plan.environment, STATUS_VARIABLE: str(folder), "PYTHONUNBUFFERED": "1"}
    # Else a set has another order in each rank, and again after --resume: classes from one would get other numbers.
    environment.setdefault("PYTHONHASHSEED", "0")
    environment[BINDING_VARIABLE] = json.dumps([list(cpus) for cpus in plan.cpus_by_local_rank])
    variables_by_process: list[dict[str, str]] = [{}]
    line, needed = launcher.line(plan, command, mpi=mpi, environment=environment)
    environment.update(needed)
    if not mpi and launcher.name == "local":
        variables_by_process = [own_placement(rank, plan.num_ranks) for rank in range(plan.num_ranks)]
    return [
        subprocess.Popen(
            line,
            env={**environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches only this process, which informs the ranks
            preexec_fn=ends_with_parent(_parting(line[0])),
        )
        for variables in variables_by_process
    ]


def _parting(launcher: str) -> signal.Signals:
    """Return the signal that a launcher gets when this process is gone.

    At SIGTERM srun ends its step, and Open MPI's mpiexec cleans up /dev/shm and /tmp. Hydra would pass it on and wait;
    if Hydra is killed, its proxies on every node end their ranks.
    """
    return signal.SIGKILL if "hydra" in Path(launcher).name else signal.SIGTERM


class _Chatter:
    """The launcher's messages after the first `log_bytes_before` bytes of its log."""

    def __init__(self, launcher: Launcher, log: Path, log_bytes_before: int) -> None:
        self._launcher, self._log, self._from = launcher, log, log_bytes_before
        self._read_to, self._others_to_end = log_bytes_before, False

    def text(self) -> str:
        """Return all of them."""
        return self._log.read_bytes()[self._from :].decode(errors="replace")

    def others_to_end(self) -> bool:
        """Return whether they report a lost rank, and the launcher leaves ending the other ranks to hpcdl."""
        if (
            self._launcher.leaves_others
            and not self._others_to_end
            and self._log.exists()  # else the folder was moved, which is reported when the ranks have ended
            and (size := self._log.stat().st_size) > self._read_to
        ):
            self._read_to, self._others_to_end = size, self._launcher.first_casualty(self.text()) is not None
        return self._others_to_end

    @property
    def end_signal(self) -> signal.Signals:
        """The signal that makes the launcher end its ranks on all nodes: SIGTERM if it keeps ranks after a loss."""
        return signal.SIGTERM if self._launcher.leaves_others else signal.SIGKILL


class _SignOfLife:
    """The heartbeat file of the only remaining rank: no other rank would notice if it were stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written_ns, self._looked_s, self._silent_s = 0, time.monotonic(), 0.0

    def missed(self) -> RankError | None:
        """Return the error of a rank that has been silent for too long; None otherwise."""
        now_s = time.monotonic()
        since_s = now_s - self._looked_s
        if since_s < LOOK_S:
            return None
        self._looked_s = now_s
        try:
            written_ns = self._path.stat().st_mtime_ns
        except OSError:  # there are several ranks, or none yet
            self._silent_s = 0.0
            return None
        if written_ns != self._written_ns:
            self._written_ns, self._silent_s = written_ns, 0.0
            return None
        # If this process itself was stopped, with its whole job, the rank was not silent for that time.
        self._silent_s += min(since_s, 2 * LOOK_S)
        with contextlib.suppress(CorruptError, OSError, TypeError, KeyError):
            status = read_json(self._path)
            if self._silent_s > status["silent_s"]:
                return _silent(status, self._silent_s)
        return None


def _silent(status: dict[str, Any], seconds: float) -> RankError:
    """Return the error of a run's only rank, from its last heartbeat."""
    rank, host = status["rank"], status["host"]
    text = (
        f"rank {rank} on {host}, the only one left, is not responding (stopped, swapped out, or its node is gone "
        f"or cut off) for {format_seconds(seconds)}; it was last {status['doing']}"
    )
    return RankError(text, rank=rank, host=host, lost=True)


class _Watcher:
    """Waits for the launcher, notes which rank ends first, and cleans up if the others do not follow."""

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        folder: Path,
        launch: str,
        deaths: DeathWatch,
        tick: Callable[[], None],
        chatter: _Chatter,
        *,
        continues: bool = False,
    ) -> None:
        self._continues = continues
        self._ended: set[int] = set()
        self._processes = processes
        self._folder, self._launch = folder, launch
        self._deaths, self._tick, self._chatter = deaths, tick, chatter
        self._host = socket.gethostname()
        self._sign = _SignOfLife(folder / WATCH_FOLDER / launch / ALONE)
        self.silent: RankError | None = None
        self.first_dead_pid: int | None = None
        self.stop_requests = 0
        self._asked: set[int] = set()
        self._table: tuple[float, list[RankStatus]] = (0.0, [])

    def hear(self, number: int) -> None:
        """Let every rank of this host save and leave; a second request, other than a warning, kills them."""
        if self.stop_requests and number in _WARNINGS:
            return
        self.stop_requests += 1
        if self.stop_requests == 1:
            self._ask()
            return
        running = [status.pid for status in self._own() if status.state == "running"]
        for pid in running:
            _send(pid, signal.SIGKILL)
        for process in () if running else self._processes:
            _send(process.pid, self._chatter.end_signal)

    def _ask(self) -> None:
        """Signal each rank of this host once; ranks that have not reported yet are signalled when they do."""
        if not self.statuses():
            return
        local = self._own()
        pids, number = {status.pid for status in local if status.state == "running"}, signal.SIGTERM
        if not local:  # all on other hosts: every launcher passes SIGUSR1 on, but some end their ranks at SIGTERM
            pids, number = {process.pid for process in self._processes}, signal.SIGUSR1
        for pid in pids - self._asked:
            _send(pid, number)
        self._asked |= pids

    def casualty(self) -> Casualty | None:
        """Return the first death that the kernel reported, which covers this node only."""
        return None if self.first_dead_pid is None else Casualty(host=self._host, pid=self.first_dead_pid)

    def wait(self) -> None:
        """Return when the launcher has ended; ranks that remain after a failure are killed."""
        deadline = math.inf
        try:
            while any(process.poll() is None for process in self._processes):
                if self.stop_requests:
                    self._ask()
                statuses = self.statuses()
                for status in self._of_this_host(statuses):
                    self._deaths.add(status.pid)
                self._note_dead(self._deaths.poll(0.1))
                patience_s = self._patience_s(statuses)
                # The deadline only moves closer, unless the others report that they continue: then there is none.
                deadline = min(deadline, time.monotonic() + patience_s) if patience_s < math.inf else math.inf
                self.silent = self.silent or self._sign.missed()
                if time.monotonic() > deadline or self.silent is not None:
                    self._kill()
                self._tick()
            self._note_dead(self._deaths.poll(0.0))  # launcher and ranks may all have ended during one tick
        finally:
            self._deaths.close()
            self._kill()
            self._tick()

    def _note_dead(self, pids: Sequence[int]) -> None:
        """Note the first of these processes that ended without a final status, if none was noted before."""
        self._ended.update(pids)
        for pid in pids:
            last_word = next((status for status in self._own() if status.pid == pid), None)
            if self.first_dead_pid is None and (last_word is None or last_word.state == "running"):
                self.first_dead_pid = pid

    def _patience_s(self, statuses: Sequence[RankStatus]) -> float:
        """Return the time that ranks may still take to end; forget a dead rank without which the others continue."""
        if self.first_dead_pid in {status.pid for status in statuses if status.state == "left behind"}:
            self.first_dead_pid = None
        if self._chatter.others_to_end():
            return END_WAIT_S
        if any(status.state == "failed" for status in statuses):
            return GRACE_S
        if (patience_s := self._until_lost_ranks_are_killed_s(statuses)) < math.inf:
            return patience_s
        if self.first_dead_pid is None:
            return math.inf
        return GOING_ON_S if self._continues else GRACE_S

    def _until_lost_ranks_are_killed_s(self, statuses: Sequence[RankStatus]) -> float:
        """Return the time left for the launcher once only ranks that were left behind remain.

        Such a rank may be stopped, and a launcher would wait for it forever.
        """
        lost = {status.rank for status in statuses if status.state == "left behind"}
        remaining = [status for status in statuses if status.rank not in lost]
        if not remaining or not (lost or self._continues):
            return math.inf
        local_pids = {status.pid for status in self._of_this_host(remaining)}
        elsewhere = {status.state for status in remaining if status.host != self._host}
        if local_pids <= self._ended and elsewhere <= {"done"}:
            return LAUNCHER_S
        # If asked to stop, only rank 0 reports it, after all have saved.
        return GRACE_S if lost and any(status.state == "stopped" for status in remaining) else math.inf

    def statuses(self) -> list[RankStatus]:
        """Return the newest known status of each rank: from its own file, by its line, or from the table of all."""
        announced = [status for text in self._deaths.words.values() if (status := heard(text)) is not None]
        table = self._table_now()
        # The table's `done` comes last and wins: how a process exits after that is no failure.
        done = [status for status in table if status.state == "done"]
        return read_statuses(self._folder, [*table, *announced, *done])

    def _own(self) -> list[RankStatus]:
        return self._of_this_host(self.statuses())

    def _of_this_host(self, statuses: Sequence[RankStatus]) -> list[RankStatus]:
        return [status for status in statuses if status.host == self._host]

    def _table_now(self) -> list[RankStatus]:
        """Return the table of all ranks; it is long in a large run, so it is read only after a change."""
        with contextlib.suppress(OSError):
            written_s = (self._folder / TABLE).stat().st_mtime
            if written_s != self._table[0]:
                self._table = written_s, read_table(self._folder)
        return self._table[1]

    def _kill(self) -> None:
        for status in self._own():
            # The kernel may give the process id of an ended rank to another process.
            if status.state in ("running", "left behind") and status.pid not in self._ended:
                _send(status.pid, signal.SIGKILL)
        for process in self._processes:
            if process.poll() is None and self._chatter.end_signal == signal.SIGTERM:
                _send(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=LAUNCHER_S)
            if process.poll() is None:
                _send(-process.pid, signal.SIGKILL)  # its whole group: it leads one (start_new_session)
            if process.wait():  # mpiexec may leave an ssh, in a separate session, that waits for a lost node
                end_marked(LAUNCH_VARIABLE, self._launch)


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return

"""Starts ranks, on this node or on those of the job that this process is in, and sees to it that all of them end."""

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
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpcdl.cluster.deaths import DeathWatch
from hpcdl.cluster.environment import own_placement
from hpcdl.cluster.launchers import find_launcher
from hpcdl.cluster.launchers.base import Casualty, Launcher
from hpcdl.cluster.launchers.hostfile import mpiexec_casualty
from hpcdl.cluster.limits import check_node
from hpcdl.cluster.processes import end_marked
from hpcdl.cluster.status import ALONE, TABLE, WATCH_FOLDER, RankStatus, heard, raise_for, read_statuses, read_table
from hpcdl.core.errors import CorruptError, Interrupted, RankError, StoppedEarly
from hpcdl.core.processes.lifeline import identity, remove_abandoned, told_to_end_with_parent
from hpcdl.core.processes.streams import caught
from hpcdl.core.protocols import LaunchPlan
from hpcdl.core.storage.disk import make_folder, open_to_append, remove_file
from hpcdl.core.storage.files import read_json
from hpcdl.core.units import format_seconds

STATUS_VARIABLE = "HPCDL_STATUS_DIR"
BINDING_VARIABLE = "HPCDL_CPUS_BY_LOCAL_RANK"
LAUNCH_VARIABLE = "HPCDL_LAUNCH"
"""Marks every process of one launch by a word that no other has."""
LAUNCHED_BY_VARIABLE = "HPCDL_LAUNCHED_BY"
"""The process that supervises the launch; its ranks do not outlive it."""
GRACE_S = 8.0
"""How long the other ranks may take to leave after one has failed."""
GOING_ON_S = 12.0
"""How long they may take, where they can go on without it, to say that they do: they give up before that themselves
(supervision/regroup.py). Those that are killed before they can say it, on other nodes, are waited for as long."""
LAUNCHER_S = 3.0
"""How long a launcher may take whose ranks have all ended, some killed: Open MPI's now and then waits for ever."""
ENDING_S = 1.0
"""How long they may take under a launcher that leaves them alone: what they still have to say is said by then."""
LOOK_S = 1.0
"""How often the sign of life of a rank that is alone is looked for."""
_BY_SIGNAL = re.compile(r"\bsignal \d+ ?\(|\(signal \d+\)")
"""How each mpiexec tells that a rank was killed: of a program that cannot start they tell as well."""
_WARNINGS = (signal.SIGUSR1, signal.SIGHUP)
"""A scheduler's warning may be sent again, and a terminal that closes hangs up several times."""


def start(
    plan: LaunchPlan,
    command: Sequence[str],
    *,
    folder: Path,
    mpi: bool = True,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Run `command` on `plan.num_ranks` ranks and return when all are done; RankError names the rank that failed.
    Interrupted where a second signal has killed them.

    `folder` takes the ranks' words and the launcher's log. `tick` is called about ten times a second.
    SIGINT, SIGTERM, SIGUSR1 and SIGHUP become a SIGTERM for the ranks, which may save and leave with 75. Without `mpi`
    the ranks are started one by one and find each other by other means. To be called from the main thread: what it
    starts ends with the thread.
    """
    check_node(plan.ranks_per_node, mpi=mpi)
    make_folder(folder)
    for stale in (*folder.glob("[0-9]*.json"), *folder.glob(TABLE)):
        remove_file(stale)
    log = folder / "launcher.log"
    launcher = find_launcher()
    said_before = log.stat().st_size if log.exists() else 0
    launch = uuid.uuid4().hex
    own = {LAUNCH_VARIABLE: launch, LAUNCHED_BY_VARIABLE: identity(os.getpid())}
    marked = dataclasses.replace(plan, environment={**plan.environment, **own})
    remove_abandoned()
    with os.fdopen(open_to_append(log), "ab") as output:
        deaths = DeathWatch(launch)
        processes = _start_processes(launcher, marked, command, folder, output.fileno(), mpi=mpi)
        chatter = _Chatter(launcher, log, said_before)
        watcher = _Watcher(processes, folder, launch, deaths, tick, chatter, continues=marked.continues)
        with caught(watcher.hear):
            watcher.wait()
    if watcher.silent is not None:
        raise watcher.silent
    statuses = watcher.statuses()
    casualty = launcher.first_casualty(chatter.text()) or watcher.casualty()
    if casualty is None and not statuses:
        casualty = _killed_unheard(processes, chatter.text())
    try:
        raise_for(statuses, plan.num_ranks, casualty=casualty, log=log, hosts=launcher.hosts(os.environ))
    except RankError as error:
        if watcher.stop_requests > 1 and (error.lost or not statuses):
            raise Interrupted(f"stopped at once by a second signal: what was not saved is lost; see {log}") from error
        error.lost = error.lost and not watcher.stop_requests  # who was asked to stop and killed is not to come back
        raise
    except StoppedEarly as error:
        if watcher.stop_requests:
            error.node, error.grows = "", False
        raise


def _killed_unheard(processes: Sequence[subprocess.Popen[bytes]], chatter: str) -> Casualty | None:
    """Who was killed before any rank had said a word: by mpiexec, or by its own end where the process is the rank."""
    killed = (process.pid for process in processes if process.returncode < 0)
    if (pid := next(killed, None)) is not None:
        return Casualty(host=socket.gethostname(), pid=pid)
    return mpiexec_casualty(chatter) if _BY_SIGNAL.search(chatter) else None


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
            preexec_fn=told_to_end_with_parent(_parting(line[0])),
        )
        for own in each
    ]


def _parting(launcher: str) -> signal.Signals:
    """What a launcher is to hear when this process is gone.

    At SIGTERM srun ends its step, and Open MPI's mpiexec removes what it has in /dev/shm and /tmp. Hydra would hand it
    on and wait; its proxies, on every node, end their ranks when it is gone.
    """
    return signal.SIGKILL if "hydra" in Path(launcher).name else signal.SIGTERM


class _Chatter:
    """What a launcher has said since `said_before` bytes of its log were there."""

    def __init__(self, launcher: Launcher, log: Path, said_before: int) -> None:
        self._launcher, self._log, self._from = launcher, log, said_before
        self._read_to, self._others_to_end = said_before, False

    def text(self) -> str:
        """All of it."""
        return self._log.read_bytes()[self._from :].decode(errors="replace")

    def others_to_end(self) -> bool:
        """Whether it tells of a lost rank, and the launcher leaves the others to hpcdl."""
        if (
            self._launcher.leaves_others
            and not self._others_to_end
            and (size := self._log.stat().st_size) > self._read_to
        ):
            self._read_to, self._others_to_end = size, self._launcher.first_casualty(self.text()) is not None
        return self._others_to_end

    @property
    def ending(self) -> signal.Signals:
        """What has the launcher's ranks end on all nodes: who leaves them to hpcdl still has to tell them."""
        return signal.SIGTERM if self._launcher.leaves_others else signal.SIGKILL


class _SignOfLife:
    """The file that the only rank left writes again and again: no other rank notices when that one is stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written_ns, self._looked_s, self._silent_s = 0, time.monotonic(), 0.0

    def missed(self) -> RankError | None:
        """The error of a rank that has been silent for longer than it may be; None where all is well."""
        now_s = time.monotonic()
        since_s = now_s - self._looked_s
        if since_s < LOOK_S:
            return None
        self._looked_s = now_s
        try:
            written_ns = self._path.stat().st_mtime_ns
        except OSError:  # several ranks are there, or none yet
            self._silent_s = 0.0
            return None
        if written_ns != self._written_ns:
            self._written_ns, self._silent_s = written_ns, 0.0
            return None
        # Where this process was stopped itself, with all of its job, the rank has not been silent for as long.
        self._silent_s += min(since_s, 2 * LOOK_S)
        with contextlib.suppress(CorruptError, OSError, TypeError, KeyError):
            status = read_json(self._path)
            if self._silent_s > status["silent_s"]:
                return _silent(status, self._silent_s)
        return None


def _silent(status: dict[str, Any], seconds: float) -> RankError:
    """The error of the only rank of a run, by its last sign of life."""
    rank, host = status["rank"], status["host"]
    text = (
        f"rank {rank} on {host}, the only one left, is not responding (stopped, swapped out, or its node is gone "
        f"or cut off) for {format_seconds(seconds)}; it was last {status['doing']}"
    )
    return RankError(text, rank=rank, host=host, lost=True)


class _Watcher:
    """Waits for the launcher, sees which rank ends first, and cleans up when the others do not follow."""

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
        """Have every rank of this host save and leave; a second request, but for warnings, kills them."""
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
            _send(process.pid, self._chatter.ending)

    def _ask(self) -> None:
        """Tell each rank of this host once; ranks that have not reported yet are told when they do."""
        if not self.statuses():
            return
        own = self._own()
        pids, number = {status.pid for status in own if status.state == "running"}, signal.SIGTERM
        if not own:  # all on other hosts: every launcher hands SIGUSR1 on, but at SIGTERM some end their ranks
            pids, number = {process.pid for process in self._processes}, signal.SIGUSR1
        for pid in pids - self._asked:
            _send(pid, number)
        self._asked |= pids

    def casualty(self) -> Casualty | None:
        """What died first by the kernel's word, which tells of this node alone."""
        return None if self.first_dead_pid is None else Casualty(host=self._host, pid=self.first_dead_pid)

    def wait(self) -> None:
        """Return when the launcher has ended; ranks that stay behind after a failure are killed."""
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
                deadline = min(deadline, time.monotonic() + patience_s) if patience_s < math.inf else math.inf
                self.silent = self.silent or self._sign.missed()
                if time.monotonic() > deadline or self.silent is not None:
                    self._kill()
                self._tick()
            self._note_dead(self._deaths.poll(0.0))  # all may have ended, launcher and ranks, during one tick
        finally:
            self._deaths.close()
            self._kill()
            self._tick()

    def _note_dead(self, pids: Sequence[int]) -> None:
        """Remember the first of these processes, if none was before, that went without a last word."""
        self._ended.update(pids)
        for pid in pids:
            last_word = next((status for status in self._own() if status.pid == pid), None)
            if self.first_dead_pid is None and (last_word is None or last_word.state == "running"):
                self.first_dead_pid = pid

    def _patience_s(self, statuses: Sequence[RankStatus]) -> float:
        """How long ranks may still take to end, from now; one that the others go on without is forgotten."""
        if self.first_dead_pid in {status.pid for status in statuses if status.state == "left behind"}:
            self.first_dead_pid = None
        if self._chatter.others_to_end():
            return ENDING_S
        if any(status.state == "failed" for status in statuses):
            return GRACE_S
        if (patience_s := self._until_lost_ranks_are_killed_s(statuses)) < math.inf:
            return patience_s
        if self.first_dead_pid is None:
            return math.inf
        return GOING_ON_S if self._continues else GRACE_S

    def _until_lost_ranks_are_killed_s(self, statuses: Sequence[RankStatus]) -> float:
        """How long the launcher may take once all ranks are over but those that the run has continued without.

        Such a rank may be stopped, and a launcher would wait for it for ever.
        """
        lost = {status.rank for status in statuses if status.state == "left behind"}
        others = [status for status in statuses if status.rank not in lost]
        if not others or not (lost or self._continues):
            return math.inf
        own = {status.pid for status in self._of_this_host(others)}
        elsewhere = {status.state for status in others if status.host != self._host}
        if own <= self._ended and elsewhere <= {"done"}:
            return LAUNCHER_S
        # Who is asked to stop says so on rank 0 alone, when all have saved.
        return GRACE_S if lost and any(status.state == "stopped" for status in others) else math.inf

    def statuses(self) -> list[RankStatus]:
        """The newest status of each rank that is known: from its own file, or by its line, or from the table of all."""
        words = [status for word in self._deaths.words.values() if (status := heard(word)) is not None]
        table = self._table_now()
        over = [status for status in table if status.state == "done"]
        return read_statuses(self._folder, [*table, *words, *over])

    def _own(self) -> list[RankStatus]:
        return self._of_this_host(self.statuses())

    def _of_this_host(self, statuses: Sequence[RankStatus]) -> list[RankStatus]:
        return [status for status in statuses if status.host == self._host]

    def _table_now(self) -> list[RankStatus]:
        """The table of all ranks, which is long in a large run and changes once: read when it has."""
        with contextlib.suppress(OSError):
            written_s = (self._folder / TABLE).stat().st_mtime
            if written_s != self._table[0]:
                self._table = written_s, read_table(self._folder)
        return self._table[1]

    def _kill(self) -> None:
        for status in self._own():
            if status.state in ("running", "left behind") and status.pid not in self._ended:
                _send(status.pid, signal.SIGKILL)
        for process in self._processes:
            if process.poll() is None and self._chatter.ending == signal.SIGTERM:
                _send(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=LAUNCHER_S)
            if process.poll() is None:
                _send(-process.pid, signal.SIGKILL)
            if process.wait():  # mpiexec may leave an ssh, in a session of its own, that waits for a lost node
                end_marked(LAUNCH_VARIABLE, self._launch)


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return

"""What ranks tell the process that started them, and what the end of a launch amounts to.

Exit codes of mpiexec mean different things under different MPIs; these words mean one thing. They come in a number of
files that does not grow with the ranks: rank 0 writes a table of all, and only who fails writes one of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpcdl.cluster.deaths import send_word
from hpcdl.cluster.launchers.base import Casualty
from hpcdl.core.errors import CorruptError, RankError, StoppedEarly
from hpcdl.core.processes.wall import WALL
from hpcdl.core.records.run_record import RANKS, from_json
from hpcdl.core.storage.disk import rewrite
from hpcdl.core.storage.files import parse_json, read_json, write_json

FOLDER = RANKS
"""Folder inside a run directory that holds the status files and the launcher's log."""
TABLE = "all.json"
"""In it, the table of all ranks."""

WATCH_FOLDER = "watch"
"""In it, what ranks leave for each other, in a folder by launch (supervision/watchdog.py)."""
ALONE = "alone.json"
"""There, the sign of life of a rank that no other one waits for: which rank it is, and how long it may be silent."""

STATES = ("running", "done", "stopped", "failed", "bereaved", "left behind")
"""stopped: left early with something to resume; bereaved: failed because another rank did; left behind: gave no sign of
life, and the others went on without it."""
_FILED = ("failed", "bereaved")


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """A rank's last word: `state` is one of STATES; `at` is Unix time in seconds.

    `lost`: what it has failed of is that another one is gone or is not responding: `cause`, on `cause_host`.
    `evicted`: that one is too slow. `grows`: it has stopped so that more ranks can start. `kind`: of the error that it
    has failed of (core/errors.py).
    """

    rank: int
    host: str
    pid: int
    state: str
    exit_code: int = 0
    message: str = ""
    at: float = 0.0
    lost: bool = False
    cause: int | None = None
    cause_host: str = ""
    evicted: bool = False
    grows: bool = False
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class StatusReport:
    """How a rank tells the process that started it what becomes of it.

    On that process's own node by `line` (cluster/deaths.py). In a file of its own only where it ends in another way
    than all others: a healthy run's ranks write nothing, rank 0 writes one table for all (`report_all`).
    """

    folder: Path
    rank: int
    line: int | None = None

    def publish(
        self,
        state: str,
        *,
        exit_code: int = 0,
        message: str = "",
        of: RankError | None = None,
        filed: bool | None = None,
        grows: bool = False,
        kind: str = "",
    ) -> None:
        """`of`: another rank's failure that this is about. `filed`: whether a file says so too; by default where
        something went wrong. `grows`: as StoppedEarly has it. `kind`: of this rank's own error.
        """
        other = of or RankError("")
        status = RankStatus(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            state=state,
            exit_code=exit_code,
            message=message,
            at=WALL.now_s(),
            lost=other.lost,
            cause=other.rank,
            cause_host=other.host,
            evicted=other.evicted,
            grows=grows,
            kind=kind,
        )
        send_word(self.line, json.dumps(asdict(status)).encode())
        if state in _FILED if filed is None else filed:
            with contextlib.suppress(OSError):  # a disk that is full must not hide the error that is being reported
                write_json(self.folder / f"{self.rank}.json", asdict(status))


def report_all(folder: Path, state: str, processes: Sequence[tuple[str, int]]) -> None:
    """Write the table of all ranks, which are in one state, `running` or `done`: host and process id by rank."""
    by_host: dict[str, dict[str, int]] = {}
    for rank, (host, pid) in enumerate(processes):
        by_host.setdefault(host, {})[str(rank)] = pid
    path, table = folder / TABLE, {"state": state, "at": WALL.now_s(), "processes": by_host}
    try:
        write_json(path, table)
    except OSError:
        with contextlib.suppress(OSError):
            rewrite(path, json.dumps(table, indent=1).encode())  # the room that this file has is there already


def report_left(folder: Path, rank: int, message: str) -> None:
    """Write the status of another rank, one that the run goes on without."""
    for status in read_table(folder):
        if status.rank == rank:
            left = replace(status, state="left behind", message=message, at=WALL.now_s())
            write_json(folder / f"{rank}.json", asdict(left))


def failed_of(folder: Path, ranks: Collection[int]) -> list[int]:
    """Those of `ranks` that have filed a failure: they end the job, and are not lost to it."""
    return [status.rank for status in read_statuses(folder, ()) if status.rank in ranks and status.state in _FILED]


def read_statuses(folder: Path, known: Iterable[RankStatus] | None = None) -> list[RankStatus]:
    """The newest status of each rank, by rank: of `known` (by default the table), or from a file of its own.

    Files that are damaged are left out.
    """
    found = {status.rank: status for status in (read_table(folder) if known is None else known)}
    for path in folder.glob("[0-9]*.json"):
        with contextlib.suppress(CorruptError, TypeError, ValueError, FileNotFoundError):
            status = from_json(RankStatus, read_json(path))
            found[status.rank] = status
    return [found[rank] for rank in sorted(found)]


def read_table(folder: Path) -> list[RankStatus]:
    """What the table of all ranks says, nothing where there is none or it is damaged."""
    with contextlib.suppress(CorruptError, TypeError, ValueError, KeyError, AttributeError, FileNotFoundError):
        table = read_json(folder / TABLE)
        common = {"state": table["state"], "at": table["at"]}
        return [
            from_json(RankStatus, {"rank": int(rank), "host": host, "pid": pid, **common})
            for host, pids in table["processes"].items()
            for rank, pid in pids.items()
        ]
    return []


def heard(word: bytes) -> RankStatus | None:
    """The status that came by a line; None where it makes no sense."""
    with contextlib.suppress(TypeError, ValueError):
        return from_json(RankStatus, parse_json(word))
    return None


def raise_for(
    statuses: Sequence[RankStatus],
    num_ranks: int,
    *,
    casualty: Casualty | None,
    log: Path,
    hosts: Sequence[str] = (),
) -> None:
    """Return when every rank is done; else raise RankError or StoppedEarly with the cause.

    A rank's own failure counts before a saved stop, that before a node that went away, that before a death without
    a word, and that before those who lost another rank. `casualty` says which of several deaths was the first, `hosts`
    where ranks were to start.
    """
    lost = casualty.lost_host if casualty else ""
    by_state = {state: [status for status in statuses if status.state == state] for state in STATES}
    for status in sorted(by_state["failed"], key=lambda status: status.at):
        named = num_ranks == 1 or status.message.startswith("rank ")
        where = "" if named else f"rank {status.rank} on {status.host}: "
        raise RankError(
            where + status.message,
            rank=status.rank if status.cause is None else status.cause,
            host=status.cause_host or status.host,
            exit_code=status.exit_code,
            lost=status.lost,
            evicted=status.evicted,
            kind=status.kind,
        )
    if len(statuses) >= num_ranks and len(by_state["done"]) + len(by_state["left behind"]) == len(statuses):
        return  # whatever the launcher has to say of those that the others did without
    for status in by_state["stopped"]:
        grows = any(one.grows for one in by_state["stopped"])
        raise StoppedEarly(status.message + (f" (node {lost} went down)" if lost else ""), node=lost, grows=grows)
    if lost:
        raise _lost_node(statuses, lost, log)
    if casualty and len(statuses) < num_ranks and not any(_is(status, casualty) for status in statuses):
        raise _unknown(casualty, log)
    for status in sorted(by_state["running"], key=lambda status: not _is(status, casualty)):
        message = f"rank {status.rank} on {status.host} ended without a word (killed, out of memory or crashed)"
        raise RankError(f"{message}; see {log}", rank=status.rank, host=status.host, lost=True)
    for status in by_state["bereaved"]:
        message = f"rank {status.rank} on {status.host}: {status.message}"
        raise RankError(message, rank=status.rank, host=status.host, lost=True, kind=status.kind)
    if len(statuses) < num_ranks:
        raise RankError(
            f"{num_ranks - len(statuses)} of {num_ranks} ranks never started; see {log}{_unseen(hosts, log)}"
        )


def _lost_node(statuses: Sequence[RankStatus], host: str, log: Path) -> RankError:
    """The error for a whole node that went away, and every rank on it."""
    ranks = [status.rank for status in statuses if same_host(status.host, host)]
    also = f" with rank {', '.join(map(str, ranks))}" if ranks else ""
    message = f"node {host}{also} went down or cannot be reached; continue with --resume, without it (see {log})"
    return RankError(message, rank=ranks[0] if ranks else None, host=host, lost=True, node=host)


def _unknown(casualty: Casualty, log: Path) -> RankError:
    """The error for a rank that ended on another node before the ranks had found each other."""
    who = "a rank" if casualty.rank is None else f"rank {casualty.rank}"
    message = f"{who} on {casualty.host} ended without a word before all ranks had started; see {log}"
    message += _unseen([casualty.host], log)
    return RankError(message, rank=casualty.rank, host=casualty.host, lost=True)


def _unseen(hosts: Sequence[str], log: Path) -> str:
    """What to ask about ranks on other nodes that left no word: they write theirs into the run directory."""
    others = [host for host in hosts if not same_host(host, socket.gethostname())]
    if not others:
        return ""
    who = f"{others[0]} sees" if len(others) == 1 else "all nodes see"
    return f", and whether {who} {log.parent.parent.absolute()} and {sys.prefix}"


def _is(status: RankStatus, casualty: Casualty | None) -> bool:
    """Whether `status` is of the rank that died first."""
    if casualty is None:
        return False
    if casualty.rank is not None:
        return status.rank == casualty.rank
    return same_host(status.host, casualty.host) and status.pid == casualty.pid


def same_host(one: str, other: str) -> bool:
    """Launchers and nodes may name a node with or without its domain."""
    return one.partition(".")[0] == other.partition(".")[0]

"""The status that ranks report to the process that started them, and the outcome of a launch.

Exit codes of mpiexec differ between MPIs; these statuses do not. The number of their files does not grow with the
ranks: rank 0 writes a table of all ranks, and only a rank that fails writes its own file.
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
"""A file in it: the table of all ranks."""

WATCH_FOLDER = "watch"
"""A folder in it for files that ranks leave for each other, by launch (supervision/watchdog.py)."""
ALONE = "alone.json"
"""A file there: the heartbeat of a rank for which no other rank waits, with its number and longest allowed silence."""

STATES = ("running", "done", "stopped", "failed", "bereaved", "left behind")
"""stopped: left early with something to resume; bereaved: failed because another rank did; left behind: gave no sign
of life, and the others continued without it."""
_FILED = ("failed", "bereaved")


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """A rank's last status: `state` is one of STATES; `at` is Unix time in seconds.

    `lost`: it failed because another rank is gone or not responding: `cause`, on `cause_host`. `evicted`: that one is
    too slow. `grows`: it stopped so that more ranks can start. `kind`: that of the error with which it failed
    (core/errors.py).
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
    """Reports of a rank to the process that started it.

    On that process's own node they use `line` (cluster/deaths.py). Only a rank that ends differently from all others
    writes a file of its own. In a healthy run only rank 0 writes, one table for all (`report_all`).
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
        """Report a state. `of`: the failure of another rank that caused it. `kind`: of this rank's own error.

        `filed`: whether to write a file too; by default only after a failure. `grows`: as in StoppedEarly.
        """
        failure = of or RankError("")
        status = RankStatus(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            state=state,
            exit_code=exit_code,
            message=message,
            at=WALL.now_s(),
            lost=failure.lost,
            cause=failure.rank,
            cause_host=failure.host,
            evicted=failure.evicted,
            grows=grows,
            kind=kind,
        )
        send_word(self.line, json.dumps(asdict(status)).encode())
        if state in _FILED if filed is None else filed:
            with contextlib.suppress(OSError):  # a full disk must not hide the reported error
                write_json(self.folder / f"{self.rank}.json", asdict(status))


def report_all(folder: Path, state: str, processes: Sequence[tuple[str, int]]) -> None:
    """Write the table of all ranks, which share one state, `running` or `done`: host and process id by rank."""
    by_host: dict[str, dict[str, int]] = {}
    for rank, (host, pid) in enumerate(processes):
        by_host.setdefault(host, {})[str(rank)] = pid
    path, table = folder / TABLE, {"state": state, "at": WALL.now_s(), "processes": by_host}
    try:
        write_json(path, table)
    except OSError:
        with contextlib.suppress(OSError):
            rewrite(path, json.dumps(table, indent=1).encode())  # overwrite in place: this needs no new disk space


def report_left(folder: Path, rank: int, message: str) -> None:
    """Write the status of another rank, without which the run continues."""
    for status in read_table(folder):
        if status.rank == rank:
            left = replace(status, state="left behind", message=message, at=WALL.now_s())
            write_json(folder / f"{rank}.json", asdict(left))


def failed_of(folder: Path, ranks: Collection[int]) -> list[int]:
    """Return those of `ranks` that have filed a failure: they end the job, and are not lost."""
    return [status.rank for status in read_statuses(folder, ()) if status.rank in ranks and status.state in _FILED]


def read_statuses(folder: Path, known: Iterable[RankStatus] | None = None) -> list[RankStatus]:
    """Return the newest status of each rank, by rank: of `known` (by default the table), or from its own file.

    Damaged files are skipped.
    """
    by_rank = {status.rank: status for status in (read_table(folder) if known is None else known)}
    for path in folder.glob("[0-9]*.json"):
        with contextlib.suppress(CorruptError, TypeError, ValueError, FileNotFoundError):
            status = from_json(RankStatus, read_json(path))
            by_rank[status.rank] = status
    return [by_rank[rank] for rank in sorted(by_rank)]


def read_table(folder: Path) -> list[RankStatus]:
    """Return the statuses in the table of all ranks; empty if it is missing or damaged."""
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
    """Return the status that came by a line; None if it is invalid."""
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

    The order of precedence: a rank's own failure, a saved stop, a lost node, a death without a message, ranks that lost
    another one. `casualty` says which of several deaths was the first, `hosts` where ranks were to start.
    """
    lost = casualty.lost_host if casualty else ""
    by_state = {state: [status for status in statuses if status.state == state] for state in STATES}
    for status in sorted(by_state["failed"], key=lambda status: status.at):  # the first failure often causes the others
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
        return  # whatever the launcher reports about ranks that were left behind
    for status in by_state["stopped"]:
        grows = any(stopped.grows for stopped in by_state["stopped"])
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
    """Return the error for a lost node with every rank on it."""
    ranks = [status.rank for status in statuses if same_host(status.host, host)]
    also = f" with rank {', '.join(map(str, ranks))}" if ranks else ""
    message = f"node {host}{also} went down or cannot be reached; continue with --resume, without it (see {log})"
    return RankError(message, rank=ranks[0] if ranks else None, host=host, lost=True, node=host)


def _unknown(casualty: Casualty, log: Path) -> RankError:
    """Return the error for a rank that ended on another node before the ranks had found each other."""
    who = "a rank" if casualty.rank is None else f"rank {casualty.rank}"
    message = f"{who} on {casualty.host} ended without a word before all ranks had started; see {log}"
    message += _unseen([casualty.host], log)
    return RankError(message, rank=casualty.rank, host=casualty.host, lost=True)


def _unseen(hosts: Sequence[str], log: Path) -> str:
    """Return a hint about nodes whose ranks left no status: do they see the run directory, where ranks write it?"""
    other_hosts = [host for host in hosts if not same_host(host, socket.gethostname())]
    if not other_hosts:
        return ""
    who = f"{other_hosts[0]} sees" if len(other_hosts) == 1 else "all nodes see"
    return f", and whether {who} {log.parent.parent.absolute()} and {sys.prefix}"


def _is(status: RankStatus, casualty: Casualty | None) -> bool:
    """Return whether `status` is that of the rank that died first."""
    if casualty is None:
        return False
    if casualty.rank is not None:
        return status.rank == casualty.rank
    return same_host(status.host, casualty.host) and status.pid == casualty.pid


def same_host(host: str, other: str) -> bool:
    """Compare names of nodes, which may have a domain or not."""
    return host.partition(".")[0] == other.partition(".")[0]

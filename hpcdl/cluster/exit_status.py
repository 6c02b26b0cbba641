"""What the end of a launch amounts to, by the ranks' last words and by what died first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcdl.cluster.launchers.base import Casualty
from hpcdl.cluster.status import STATES, RankStatus
from hpcdl.core.errors import RankError, StoppedEarly


def raise_for(statuses: Sequence[RankStatus], num_ranks: int, *, casualty: Casualty | None, log: Path) -> None:
    """Return when every rank is done; else raise RankError or StoppedEarly with the cause.

    A rank's own failure counts before a saved stop, that before a node that went away, that before a death without
    a word, and that before those who lost another rank. `casualty` says which of several deaths was the first.
    """
    lost = casualty.lost_host if casualty else ""
    by_state = {state: [status for status in statuses if status.state == state] for state in STATES}
    for status in sorted(by_state["failed"], key=lambda status: status.at):
        named = num_ranks == 1 or status.message.startswith("rank ")
        where = "" if named else f"rank {status.rank} on {status.host}: "
        raise RankError(where + status.message, rank=status.rank, host=status.host, exit_code=status.exit_code)
    for status in by_state["stopped"]:
        raise StoppedEarly(status.message + (f" (node {lost} went down)" if lost else ""))
    if lost:
        raise _lost_node(statuses, lost, log)
    for status in sorted(by_state["running"], key=lambda status: not _is(status, casualty)):
        message = f"rank {status.rank} on {status.host} ended without a word (killed, out of memory or crashed)"
        raise RankError(f"{message}; see {log}", rank=status.rank, host=status.host)
    for status in by_state["bereaved"]:
        raise RankError(f"rank {status.rank} on {status.host}: {status.message}", rank=status.rank, host=status.host)
    if len(statuses) < num_ranks:
        raise RankError(f"{num_ranks - len(statuses)} of {num_ranks} ranks never started; see {log}")


def _lost_node(statuses: Sequence[RankStatus], host: str, log: Path) -> RankError:
    """The error for a whole node that went away, and every rank on it."""
    ranks = [status.rank for status in statuses if _same_host(status.host, host)]
    told = f" with rank {', '.join(map(str, ranks))}" if ranks else ""
    message = f"node {host}{told} went down or cannot be reached; go on with --resume, without it (see {log})"
    return RankError(message, rank=ranks[0] if ranks else None, host=host)


def _is(status: RankStatus, casualty: Casualty | None) -> bool:
    """Whether `status` is of the rank that died first."""
    if casualty is None:
        return False
    if casualty.rank is not None:
        return status.rank == casualty.rank
    return _same_host(status.host, casualty.host) and status.pid == casualty.pid


def _same_host(one: str, other: str) -> bool:
    """Launchers and nodes may name a node with or without its domain."""
    return one.partition(".")[0] == other.partition(".")[0]

"""What every launcher can do, and host lists as schedulers write them: `c401-[001-004,010],login1` names six hosts."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpcdl.core.errors import UsageError
from hpcdl.core.protocols import LaunchPlan

STOP_VARIABLE = "HPCDL_STOP_AT"
"""Unix time at which a run should save and leave, some time before the limit; job scripts of `hpcdl submit` set it.

Slurm sends its warning once, to the steps that are there: a run that is still starting up then would never hear of it.
"""
STOP_UPTIME_VARIABLE = "HPCDL_STOP_UPTIME"
"""The same once more, and by the uptime of the node on which the job's script runs: its kernel's start, and seconds."""
LEFT_OUT_VARIABLE = "HPCDL_LEFT_OUT"
"""Nodes of the job, by commas, that no rank is to be started on: those that a run has lost."""
MAX_HOSTS = 100_000
"""More than any machine has: a list that names more is a slip, and would fill the memory."""
_ITEM = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


@dataclass(frozen=True, kw_only=True)
class Casualty:
    """What ended first by a launcher's word: a rank, by its number or by `host` and `pid`; or all of `lost_host`."""

    rank: int | None = None
    host: str = ""
    pid: int | None = None
    lost_host: str = ""


class Launcher(Protocol):
    """Starts ranks on the nodes of one job. Stateless; everything comes from `environment`.

    A launcher that inherits from it needs no method for what it knows nothing of.
    """

    name: str
    batch: str
    """The batch system that takes this launcher's scripts (hpcdl/cluster/batch/script.py); empty for none."""
    leaves_nodes_out: bool
    """Whether ranks can be started on some of a job's nodes without the first ones."""
    continues: bool
    """Whether it can leave the other ranks alone when one ends, where MPI can go on without it."""
    leaves_others: bool
    """Whether it leaves them alone in any case, and tells of the one in its log: then hpcdl has it end them."""

    def present(self, environment: Mapping[str, str]) -> bool:
        """Whether this process is in a job that this launcher starts ranks in."""

    def hosts(self, environment: Mapping[str, str]) -> list[str]:
        """The job's nodes in rank order, but for those of LEFT_OUT_VARIABLE; empty for this node alone."""

    def lost_hosts(self, environment: Mapping[str, str]) -> set[str]:
        """Those of `hosts` that the scheduler knows to be gone; none where nobody is asked."""
        return set()

    def answering(self, left_out: Sequence[str], environment: Mapping[str, str]) -> set[str]:
        """Those of the nodes `left_out` that ranks could be started on again; may take seconds for each.

        None for a launcher that leaves no node out.
        """
        return set()

    def job_seconds_left(self, environment: Mapping[str, str]) -> float | None:
        """Seconds until the scheduler ends the job; None where it sets no limit or is not asked."""
        return None

    def line(
        self, plan: LaunchPlan, command: Sequence[str], *, mpi: bool, environment: Mapping[str, str]
    ) -> tuple[list[str], Mapping[str, str]]:
        """The command that starts `command` on every rank of `plan`, and what it needs in its environment.

        Without `mpi` the ranks must find each other by other means. UsageError says why it cannot work here.
        """

    def first_casualty(self, log: str) -> Casualty | None:
        """What died first, as the launcher's own chatter tells it; None where it does not.

        Then the ranks' own words and the kernel's have to do.
        """
        return None


def remaining(hosts: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """`hosts` without those of LEFT_OUT_VARIABLE."""
    left_out = environment.get(LEFT_OUT_VARIABLE, "").split(",")
    return [host for host in hosts if host not in left_out]


def ranks_per_node(hosts: Sequence[str], num_ranks: int) -> int:
    """Ranks on the fullest node when `num_ranks` are spread evenly over `hosts` (empty: this node alone)."""
    return math.ceil(num_ranks / max(len(hosts), 1))


def num_nodes(hosts: Sequence[str], num_ranks: int) -> int:
    """Nodes that `num_ranks` take when they are spread evenly over `hosts` (empty: this node alone)."""
    return math.ceil(num_ranks / ranks_per_node(hosts, num_ranks))


def seconds_left(environment: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds that a run may still work in this job, never negative; None where nobody says.

    By the seconds since the node was started where the job has said so on this one: its clock may have been set since.
    """
    text = environment.get(STOP_VARIABLE, "")
    if not text.isdigit():
        return None
    said_for, _, by_uptime = environment.get(STOP_UPTIME_VARIABLE, "").partition(" ")
    if now is None and said_for == text and (left_s := _left_by_uptime(by_uptime)) is not None:
        return max(left_s, 0.0)
    return max(int(text) - (time.time() if now is None else now), 0.0)


def _left_by_uptime(text: str) -> float | None:
    """Seconds until the uptime that `text` tells, after the start of a kernel; None where that is not this one."""
    boot, _, stop_s = text.partition(" ")
    try:
        here = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return int(stop_s) - uptime_s if boot == here and stop_s.isdigit() else None


def refuse_without_mpi(name: str, mpi: bool) -> None:
    """UsageError where a strategy that goes without MPI is to be started by a launcher that cannot do that."""
    if not mpi:
        raise UsageError(
            f"the launcher {name} starts ranks by MPI only; take a strategy other than grpc-*, or run on one node"
        )


def expand_hosts(text: str) -> list[str]:
    """The hosts that `text` names, in its order; UsageError shows what cannot be read.

    Items are separated by commas, blanks or line ends. Each may hold any number of brackets with numbers and ranges;
    numbers keep the width of a range's first one, so that `[08-10]` gives 08, 09, 10.
    """
    rest = _ITEM.sub("", text)
    if re.sub(r"[,\s]", "", rest):
        raise UsageError(f"host list {text!r} has an unmatched bracket; write it like c401-[001-004,010],login1")
    hosts: list[str] = []
    for item in _ITEM.findall(text):
        remaining = MAX_HOSTS - len(hosts)
        found = list(itertools.islice(_hosts_of(item), remaining + 1))
        if len(found) > remaining:
            raise UsageError(f"host list {text[:60]!r} names more than {MAX_HOSTS} hosts; check its ranges")
        hosts += found
    return hosts


def _hosts_of(item: str) -> Iterator[str]:
    """The hosts of one item: every combination of its brackets, the last one running fastest."""
    head, bracket, tail = item.partition("[")
    if not bracket:
        yield head
        return
    inside, _, tail = tail.partition("]")
    for number in _numbers(inside, item):
        for ending in _hosts_of(tail):
            yield f"{head}{number}{ending}"


def _numbers(inside: str, item: str) -> Iterator[str]:
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        if not match:
            raise UsageError(
                f"host list item {item!r} has {part!r} in brackets; numbers and ranges like 001-004 go there"
            )
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise UsageError(f"host list item {item!r} has the range {part!r}, which runs backwards; swap its ends")
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))

"""The interface of a launcher, and host lists of schedulers: `c401-[001-004,010],login1` names six hosts."""

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
"""Unix time, before the job's limit, at which a run should save and leave; job scripts of `hpcdl submit` set it.

Slurm sends its warning once, to the existing steps: a run that is still starting would miss it.
"""
STOP_UPTIME_VARIABLE = "HPCDL_STOP_UPTIME"
"""The same time by the uptime of the node that runs the job's script: its kernel's boot id, and seconds."""
LEFT_OUT_VARIABLE = "HPCDL_LEFT_OUT"
"""Nodes of the job, by commas, on which no rank may start: those that a run has lost."""
MAX_HOSTS = 100_000
"""More than any machine has: a list that names more is a mistake, and would fill the memory."""
_ITEM = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


@dataclass(frozen=True, kw_only=True)
class Casualty:
    """The first end that a launcher reports: a rank, by its number or by `host` and `pid`; or all of `lost_host`."""

    rank: int | None = None
    host: str = ""
    pid: int | None = None
    lost_host: str = ""


class Launcher(Protocol):
    """Starts ranks on the nodes of one job. Stateless; everything comes from `environment`.

    A launcher that inherits from it may omit the methods for which the defaults are right.
    """

    name: str
    batch: str
    """The batch system that takes this launcher's scripts (hpcdl/cluster/batch/script.py); empty for none."""
    leaves_nodes_out: bool
    """Whether ranks can start on a subset of a job's nodes that omits the first ones."""
    continues: bool
    """Whether it can keep the other ranks when one ends, if MPI can continue without it."""
    leaves_others: bool
    """Whether it always keeps them and reports the lost rank in its log: then hpcdl makes it end them."""

    def present(self, environment: Mapping[str, str]) -> bool:
        """Return whether this process is in a job in which this launcher starts ranks."""

    def hosts(self, environment: Mapping[str, str]) -> list[str]:
        """Return the job's nodes in rank order, without those of LEFT_OUT_VARIABLE; empty for this node only."""

    def lost_hosts(self, environment: Mapping[str, str]) -> set[str]:
        """Return those of `hosts` that the scheduler reports as gone; empty without a scheduler."""
        return set()

    def answering(self, left_out: Sequence[str], environment: Mapping[str, str]) -> set[str]:
        """Return those of the nodes `left_out` on which ranks can start again; may take seconds for each.

        Empty for a launcher that cannot exclude nodes.
        """
        return set()

    def job_seconds_left(self, environment: Mapping[str, str]) -> float | None:
        """Return the seconds until the scheduler ends the job; None if it has no limit or cannot be asked."""
        return None

    def line(
        self, plan: LaunchPlan, command: Sequence[str], *, mpi: bool, environment: Mapping[str, str]
    ) -> tuple[list[str], Mapping[str, str]]:
        """Return the command that starts `command` on every rank of `plan`, and the environment that it needs.

        Without `mpi` the ranks must find each other by other means. Raises UsageError if it cannot work here.
        """

    def first_casualty(self, log: str) -> Casualty | None:
        """Return the first death that the launcher's log reports; None if there is none.

        The messages of ranks and kernel must then suffice.
        """
        return None


def remaining(hosts: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return `hosts` without those of LEFT_OUT_VARIABLE."""
    left_out = environment.get(LEFT_OUT_VARIABLE, "").split(",")
    return [host for host in hosts if host not in left_out]


def ranks_per_node(hosts: Sequence[str], num_ranks: int) -> int:
    """Return the ranks on the fullest node when `num_ranks` are spread evenly over `hosts` (empty: this node only)."""
    return math.ceil(num_ranks / max(len(hosts), 1))


def num_nodes(hosts: Sequence[str], num_ranks: int) -> int:
    """Return the number of nodes for `num_ranks` spread evenly over `hosts` (empty: this node only)."""
    return math.ceil(num_ranks / ranks_per_node(hosts, num_ranks))


def seconds_left(environment: Mapping[str, str], now: float | None = None) -> float | None:
    """Return the seconds that a run may still work in this job, never negative; None if unknown.

    Uses the node's uptime if the job gave it for this node, whose clock may have been set since.
    """
    text = environment.get(STOP_VARIABLE, "")
    if not text.isdigit():
        return None
    stop_text, _, by_uptime = environment.get(STOP_UPTIME_VARIABLE, "").partition(" ")
    # The uptime counts only beside the stop time that it was computed for: a job inside a job has another one.
    if now is None and stop_text == text and (left_s := _left_by_uptime(by_uptime)) is not None:
        return max(left_s, 0.0)
    return max(int(text) - (time.time() if now is None else now), 0.0)


def _left_by_uptime(text: str) -> float | None:
    """Return the seconds until the uptime in `text`, after the boot of a kernel; None if that is another kernel."""
    boot, _, stop_s = text.partition(" ")
    try:
        here = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return int(stop_s) - uptime_s if boot == here and stop_s.isdigit() else None


def refuse_without_mpi(name: str, mpi: bool) -> None:
    """Raise UsageError if a launcher that needs MPI should start a strategy without MPI."""
    if not mpi:
        raise UsageError(
            f"the launcher {name} starts ranks by MPI only; take a strategy other than grpc-*, or run on one node"
        )


def expand_hosts(text: str) -> list[str]:
    """Return the hosts that `text` names, in its order. Raises UsageError showing the unreadable part.

    Items are separated by commas, blanks or line ends. Each may hold any number of brackets with numbers and ranges;
    numbers keep the width of a range's first one, so that `[08-10]` gives 08, 09, 10.
    """
    remainder = _ITEM.sub("", text)
    if re.sub(r"[,\s]", "", remainder):
        raise UsageError(f"host list {text!r} has an unmatched bracket; write it like c401-[001-004,010],login1")
    hosts: list[str] = []
    for part in _ITEM.findall(text):
        remaining = MAX_HOSTS - len(hosts)
        # One more shows that there are too many, without counting out a huge range.
        part_hosts = list(itertools.islice(_hosts_of(part), remaining + 1))
        if len(part_hosts) > remaining:
            raise UsageError(f"host list {text[:60]!r} names more than {MAX_HOSTS} hosts; check its ranges")
        hosts += part_hosts
    return hosts


def _hosts_of(item: str) -> Iterator[str]:
    """Yield the hosts of one item: every combination of its brackets, the last one varying fastest."""
    head, bracket, tail = item.partition("[")
    if not bracket:
        yield head
        return
    inside, _, tail = tail.partition("]")
    for number in _numbers(inside, item):
        for rest in _hosts_of(tail):
            yield f"{head}{number}{rest}"


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

"""What `--inject` puts between nodes: partitions, slow links and clocks that differ, on one rank of a run.

A partition begins where the first rank of its place says so, by a mark on the disk; every rank keeps its own messages
across it back, and ranks inside are not responding either, as if their node could not reach the file system. The mark
names the node: one that is cut off for good is so from the start for new ranks on it, whatever its number is by then.

A slow link sends through a token bucket (tc-tbf(8)) as long as the process lives that asked for it: another one takes
the bucket away as soon as it is gone. A link that somebody has shaped already is left alone.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from hpcdl.comm.observed import Observed, RankMonitor
from hpcdl.core.processes.wall import WALL
from hpcdl.faults.impaired import Impaired, Impairment
from hpcdl.run.faults import PARTITION, SKEW, Fault

DEVICES = Path("/sys/class/net")
INFINIBAND = Path("/sys/class/infiniband")
_BURST_S, _LEAST_BURST = 0.004, 65536
"""Bytes that may leave at once: those of one tick of a slow kernel clock, and of one large packet."""
_TIMEOUT_S = 10.0
_AWAY = (
    "import os, signal, subprocess, sys, time\n"
    "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\n"
    "while os.path.exists(f'/proc/{sys.argv[1]}/fd'): time.sleep(0.1)\n"
    "subprocess.run(sys.argv[2:])\n"
)


def shape(bytes_per_s: float) -> str:
    """How this node's link is as slow as that from now on, in words; empty where tc cannot do it, or may not."""
    tc, device = shutil.which("tc"), _only_device()
    if tc is None or not device or any(INFINIBAND.glob("*")):
        return ""
    if any(" 0: " not in line for line in _output_of(tc, "qdisc", "show", "dev", device).splitlines()):
        return ""
    burst = max(_LEAST_BURST, int(bytes_per_s * _BURST_S))
    bucket = ("tbf", "rate", f"{bytes_per_s * 8:.0f}bit", "burst", f"{burst}b", "latency", "400ms")
    line = [sys.executable, "-P", "-S", "-c", _AWAY, str(os.getpid()), tc, "qdisc", "del", "dev", device, "root"]
    made = subprocess.run([tc, "qdisc", "add", "dev", device, "root", *bucket], capture_output=True, check=False)
    if made.returncode:
        return ""
    subprocess.Popen(line, stdin=subprocess.DEVNULL, start_new_session=True)
    return f"by tc on {device}"


def _output_of(*line: str) -> str:
    finished = subprocess.run(line, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    return finished.stdout


def _only_device() -> str:
    """The one network device that is up, but for the loopback; empty where there are several: which one counts?"""
    names = [path.name for path in DEVICES.iterdir()] if DEVICES.is_dir() else []
    up = [name for name in names if name != "lo" and _state(DEVICES / name) == "up"]
    return up[0] if len(up) == 1 else ""


def _state(device: Path) -> str:
    try:
        return (device / "operstate").read_text(encoding="ascii").strip()
    except OSError:
        return ""


OWN_MESSAGES = "in hpcdl's own messages"
"""How a link is slowed where tc cannot, or may not."""


class NetworkFaults:
    """The faults of a run's network that have not struck yet, by their numbers, and what of them holds now.

    Nodes that are `cut_off` are so for good, since earlier ranks.
    """

    def __init__(self, faults: Mapping[int, Fault], monitor: RankMonitor, cut_off: Iterable[str] = ()) -> None:
        self.faults = dict(faults)
        self._cut_off = [*cut_off]
        self._seen = monitor
        self._network = Impairment(monitor.rank)
        self._hosts: Sequence[str] = [monitor.host] * monitor.size
        self._cuts: list[tuple[frozenset[int], float]] = []

    def impair(self, communicator: Observed, log: Callable[[int, str], None]) -> Observed:
        """`communicator`, the world's, as these faults have it; collective. `log` gets what holds from now on."""
        if not self.faults and not self._cut_off:
            return communicator
        self._hosts = communicator.allgather_json(communicator.host)
        for host in self._cut_off:
            self._part(self._ranks_on(host), math.inf)
        for number, fault in [*self.faults.items()]:
            if fault.kind == PARTITION:
                continue
            place = self.place(fault)
            if fault.kind == SKEW:
                self._holds(number, place, "", log)
                WALL.shift_s += (fault.value or 0.0) * (self._seen.rank in place)
            else:
                self._holds(number, place, self._slow_down(fault, place, communicator), log)
        return communicator.over(lambda inner: Impaired(inner, self._network, range(self._seen.size)))

    def _holds(self, number: int, place: frozenset[int], how: str, log: Callable[[int, str], None]) -> None:
        del self.faults[number]
        if self._seen.rank == min(place):
            log(number, how)

    def _slow_down(self, fault: Fault, place: frozenset[int], communicator: Observed) -> str:
        """Make the link of `place` slow; how, in words. Collective: where tc does it, hpcdl must not."""
        rank, rate = self._seen.rank, fault.value or 0.0
        by_tc = shape(rate) if fault.of_host and rank == min(place) else ""
        how: str = communicator.allgather_json(by_tc)[min(place)]
        if not how and rank in place:
            self._network.slow_down(place, rate / len(place))
        return how or OWN_MESSAGES

    @property
    def host(self) -> str:
        """This rank's node, as all know it."""
        return self._hosts[self._seen.rank]

    def number_of(self, *, hosts: bool) -> int:
        """How many nodes, or ranks, a random fault may strike."""
        return len({*self._hosts}) if hosts else self._seen.size

    def place(self, fault: Fault, number: int | None = None) -> frozenset[int]:
        """The ranks that `fault` strikes; those of rank or node `number` where it is a random one."""
        which = fault.rank if number is None else number
        assert which is not None
        if not fault.of_host:
            return frozenset([which])
        return self._ranks_on([*dict.fromkeys(self._hosts)][which])

    def _ranks_on(self, host: str) -> frozenset[int]:
        return frozenset(rank for rank, name in enumerate(self._hosts) if name == host)

    def part(self, fault: Fault, place: frozenset[int]) -> None:
        """From now on no message passes between `place` and the others, until it heals."""
        self._part(place, math.inf if fault.duration_s is None else time.monotonic() + fault.duration_s)

    def _part(self, place: frozenset[int], until_s: float) -> None:
        self._cuts.append((place, until_s))
        self._apply()

    def heal(self) -> None:
        """Let through what is to go on by now."""
        now_s = time.monotonic()
        if any(until_s <= now_s for _, until_s in self._cuts):
            self._cuts = [(place, until_s) for place, until_s in self._cuts if until_s > now_s]
            self._apply()

    def begin(self, number: int) -> None:
        """The partition of that number begins."""
        fault = self.faults.pop(number)
        self.part(fault, self.place(fault))

    def follow(self, has_struck: Callable[[int], bool]) -> None:
        """Part where the first rank of a place has said so."""
        for number, fault in [*self.faults.items()]:
            if fault.rank is not None and has_struck(number):
                self.begin(number)

    def leads(self, fault: Fault) -> bool:
        """Whether this rank says when a partition begins: the first of its place, by its own steps."""
        return fault.rank is not None and self._seen.rank == min(self.place(fault))

    def _apply(self) -> None:
        self._network.parts = tuple(place for place, _ in self._cuts)
        self._seen.cut_off = any(self._seen.rank in place for place, _ in self._cuts)

"""Injected faults, `--inject`, to test what a run, or an installation, survives.

`kill:rank=1@step=50` and the like, several separated by commas:

    KIND:rank=R[:VALUE][@step=N|@time=T][+DURATION]
    KIND:rank=random[:VALUE]@every=T[:seed=N][+DURATION]
    eio:shard=N
    full:checkpoint[@step=N]
    flip:bucket=N@step=N
    partition:host=N[@step=N|@time=T|@every=T][+DURATION]
    link:host=N:100mbit
    skew:host=N:+2s

In the last three, `host` numbers the run's nodes from 0, the node of rank 0; the first two also take `rank=R`. A fault
strikes once in a run, even if the run restarts by itself. Only `@every` repeats, at random ranks or nodes and random
times. A node that is cut off for good stays cut off for new ranks. The journal reports each fault.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.cluster.environment import placement
from hpcdl.cluster.launchers import find_launcher
from hpcdl.cluster.launchers.base import num_nodes
from hpcdl.cluster.status import FOLDER
from hpcdl.config.forms import OFF, UNASKED
from hpcdl.config.load import ResolvedConfig
from hpcdl.core.errors import ConfigError, UsageError, shown
from hpcdl.core.units import format_seconds, parse_seconds
from hpcdl.data.format.dataset import Dataset
from hpcdl.run.rundir import STRUCK

STRUCK_FROM_BESIDE = ("kill", "term", "stop", "slow", "exit")
"""Faults that strike a process at any moment of a step: workers, servers and scripts."""
PLANTED = ("error", "nan")
"""Faults inside a worker's step: an exception, or NaN in its batch."""
UNREADABLE, FULL = "eio", "full"
"""Faults of the file system: a shard that cannot be read; a full disk while rank 0 writes a checkpoint."""
FLIPPED = "flip"
"""A fault of memory or network: one bit of a bucket differs on one rank from the other ranks."""
FLIPPED_RANK = 1
"""Not rank 0: if two ranks differ, the other rank is reported as the odd one."""
_WHERE = {UNREADABLE: "shard", FULL: "checkpoint", FLIPPED: "bucket"}
_ASKED = "a fault is asked for: "
PARTITION, LINK, SKEW = "partition", "link", "skew"
"""Faults between nodes: blocked messages, a slow link, clocks that differ (faults/network.py)."""
NETWORK = (PARTITION, LINK, SKEW)
KINDS = (*STRUCK_FROM_BESIDE, *PLANTED, *_WHERE, *NETWORK)
BUCKETS_OF = ("all-reduce", "parameter servers")
"""Families of strategies that exchange gradients in buckets."""
AGAIN = ("kill", "term", "stop", "exit", PARTITION)
"""Faults that may repeat."""

_SPEC = re.compile(
    r"(?P<kind>[a-z]+):(?:(?P<of>rank|host)=(?P<rank>\d+|random)|shard=(?P<shard>\d+)|(?P<checkpoint>checkpoint)|bucket=(?P<bucket>\d+))"
    r"(?::x?(?P<value>\d+(?:\.\d+)?)(?P<rate>[kmg]bit)?|:(?P<shift>[+-][0-9.]+[a-z]*))?"
    r"(?:@(?:step=(?P<step>\d+)|time=(?P<time>[^+@:]+)|every=(?P<every>[^+@:]+)))?(?::seed=(?P<seed>\d+))?"
    r"(?:\+(?P<duration>[^+@:]+))?"
)
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, at `step` of the rank or `time_s` seconds after its start; `duration_s` is for faults that end.

    `rank` is None for a random rank or for a fault of files; for random ones `every_s` is the mean interval, with
    `seed`.
    """

    kind: str
    rank: int | None
    of_host: bool = False
    """If true, `rank` is the number of a node."""
    shard: int | None = None
    bucket: int | None = None
    every_s: float | None = None
    seed: int = 0
    value: float | None = None
    step: int | None = None
    time_s: float | None = None
    duration_s: float | None = None
    text: str

    @property
    def stays(self) -> bool:
        """Whether the fault also holds for new ranks after a restart: a node that is cut off stays so."""
        return self.kind == PARTITION and self.of_host and self.rank is not None and self.duration_s is None

    @property
    def place(self) -> str:
        """The target of the fault, in words."""
        if self.shard is not None:
            return f"shard {self.shard}"
        if self.kind == FULL:
            return "a checkpoint"
        if self.bucket is not None:
            return f"bucket {self.bucket} on rank {self.rank}"
        what = "host" if self.of_host else "rank"
        return f"a random {what}" if self.rank is None else f"{what} {self.rank}"

    @property
    def moment(self) -> str:
        """The time of the fault, in words."""
        if self.every_s is not None:
            return f"every {format_seconds(self.every_s)} in the mean"
        if self.step is None and self.time_s is None:
            return "from the start"
        return f"at step {self.step}" if self.step is not None else f"after {format_seconds(self.time_s or 0.0)}"


def parse_faults(text: str, num_ranks: int, num_hosts: int | None = None) -> list[Fault]:
    """Return the faults that `--inject` names. Raises ConfigError with a line for each impossible one.

    Node numbers are checked against `num_hosts` if it is known.
    """
    faults, problems = [], []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            faults.append(_parse(part, num_ranks, num_hosts))
        except ValueError as error:
            problems.append(f"--inject {part}: {error}")
    if problems:
        raise ConfigError(problems)
    return faults


def _parse(text: str, num_ranks: int, num_hosts: int | None) -> Fault:
    match = _SPEC.fullmatch(text)
    if match is None:
        raise ValueError("give KIND:rank=R@step=N or @time=T, for example kill:rank=1@step=50")
    kind = match["kind"]
    if kind not in KINDS:
        raise ValueError(f"unknown fault {shown(kind)}; known: {', '.join(KINDS)}")
    if not match[_WHERE.get(kind, "rank")] or (match["of"] == "host" and kind not in NETWORK):
        raise ValueError(
            "a fault strikes rank=R; partition, link and skew strike host=N, eio strikes shard=N, flip bucket=N, "
            "and full strikes checkpoint"
        )
    if kind in _WHERE:
        return _parse_of_file(match, text)
    if (match["rate"] and kind != LINK) or (match["shift"] and kind != SKEW):
        raise ValueError(f"{kind} takes no {'rate' if match['rate'] else 'shift of a clock'}")
    _check_number(match, num_ranks, num_hosts)
    if match["rank"] == "random":
        return _parse_random(match, text)
    rank = int(match["rank"])
    if kind in NETWORK:
        return _parse_of_network(match, text)
    if match["every"] or match["seed"]:
        raise ValueError("@every and seed belong to rank=random, for example kill:rank=random@every=60s:seed=3")
    if kind == "slow" and float(match["value"] or 0) <= 1:
        raise ValueError("say how many times slower, for example slow:rank=1:x3")
    if kind not in ("slow", "exit") and match["value"]:
        raise ValueError(f"{kind} takes no value")
    if match["duration"] and kind != "stop":
        raise ValueError("only stop and partition have a duration")
    if not match["step"] and not match["time"] and kind != "slow":
        raise ValueError("say when: @step=N or @time=T")
    if kind in PLANTED and not match["step"]:
        raise ValueError(f"{kind} strikes in a step: give @step=N")
    return Fault(
        kind=kind,
        rank=rank,
        value=float(match["value"]) if match["value"] else None,
        step=int(match["step"]) if match["step"] else None,
        time_s=parse_seconds(match["time"]) if match["time"] else None,
        duration_s=parse_seconds(match["duration"]) if match["duration"] else None,
        text=text,
    )


def _check_number(match: re.Match[str], num_ranks: int, num_hosts: int | None) -> None:
    """Raise ValueError if no rank or node has this number, or if there is no network between several."""
    on_host, number = match["of"] == "host", match["rank"]
    if on_host and num_hosts == 1:
        raise ValueError("this run is on one node" + ("; rank=R is possible there" if match["kind"] != SKEW else ""))
    if match["kind"] in NETWORK and num_ranks == 1:
        raise ValueError("a run of one rank has no messages")
    num = num_hosts if on_host else num_ranks
    if number != "random" and num is not None and int(number) >= num:
        raise ValueError(f"there are {'hosts' if on_host else 'ranks'} 0 to {num - 1}")


def _parse_of_network(match: re.Match[str], text: str) -> Fault:
    kind, when = match["kind"], match["step"] or match["time"]
    if match["every"] or match["seed"]:
        raise ValueError("@every and seed belong to random ones, for example partition:host=random@every=60s:seed=3+5s")
    if kind == PARTITION and (match["value"] or not when):
        raise ValueError("say when: partition:host=3@step=50, with +20s where it heals after that time")
    if kind != PARTITION and (when or match["duration"]):
        raise ValueError(f"{kind} holds from the start on: give no time")
    if kind == LINK and not (match["rate"] and float(match["value"])):
        raise ValueError("say how fast, for example link:host=1:100mbit")
    if kind == SKEW and (match["of"] == "rank" or not match["shift"]):
        raise ValueError("say which node's clock, and how far it is ahead or behind, for example skew:host=2:+2s")
    value = None
    if kind == LINK:
        # Bits to bytes per second, as the network impairment counts.
        value = float(match["value"]) * _BITS[match["rate"]] / 8
    elif kind == SKEW:
        value = parse_seconds(match["shift"][1:]) * (-1 if match["shift"][0] == "-" else 1)
    return Fault(
        kind=kind,
        rank=int(match["rank"]),
        of_host=match["of"] == "host",
        value=value,
        step=int(match["step"]) if match["step"] else None,
        time_s=parse_seconds(match["time"]) if match["time"] else None,
        duration_s=parse_seconds(match["duration"]) if match["duration"] else None,
        text=text,
    )


def _parse_of_file(match: re.Match[str], text: str) -> Fault:
    kind = match["kind"]
    if match["value"] or match["duration"] or match["time"] or match["every"] or match["seed"]:
        raise ValueError(f"{kind} takes no value and no time" + ("; @step=N is possible" if kind != UNREADABLE else ""))
    if kind == UNREADABLE and match["step"]:
        raise ValueError("a shard is unreadable from the start: give no step")
    if kind == FLIPPED and not match["step"]:
        raise ValueError("flip strikes in a step: give @step=N")
    return Fault(
        kind=kind,
        rank={FULL: 0, FLIPPED: FLIPPED_RANK}.get(kind),
        bucket=int(match["bucket"]) if match["bucket"] else None,
        shard=int(match["shard"]) if match["shard"] else None,
        step=int(match["step"]) if match["step"] else None,
        text=text,
    )


def _parse_random(match: re.Match[str], text: str) -> Fault:
    kind = match["kind"]
    if kind not in AGAIN:
        raise ValueError(f"{kind} does not come at random; {', '.join(AGAIN)} do")
    if not match["every"] or match["step"] or match["time"]:
        raise ValueError("say how often in the mean: rank=random@every=60s")
    if match["duration"] and kind not in ("stop", PARTITION):
        raise ValueError("only stop and partition have a duration")
    if match["value"] and kind != "exit":
        raise ValueError(f"{kind} takes no value")
    every_s = parse_seconds(match["every"])
    if every_s <= 0:
        raise ValueError("the time between two must be above 0")
    return Fault(
        kind=kind,
        rank=None,
        of_host=match["of"] == "host",
        value=float(match["value"]) if match["value"] else None,
        every_s=every_s,
        seed=int(match["seed"] or 0),
        duration_s=parse_seconds(match["duration"]) if match["duration"] else None,
        text=text,
    )


def check_possible(
    text: str, num_ranks: int, dataset: Dataset, *, family: str, num_workers: int, sees_messages: bool
) -> None:
    """Raise UsageError if a fault cannot happen in this run.

    Examples: the training split lacks the shard, or does not verify it; the strategy's `family` has no buckets, or
    there is only one worker; hpcdl does not see the messages.
    """
    for fault in parse_faults(text, num_ranks):
        if fault.kind in (PARTITION, LINK) and not sees_messages:
            raise UsageError(
                f"--inject {fault.text}: TensorFlow's own gRPC carries the messages of grpc-*, and hpcdl does not "
                "see them; take another --strategy"
            )
        if fault.bucket is not None and (family not in BUCKETS_OF or num_workers < 2):
            raise UsageError(
                f"--inject {fault.text}: only two workers or more of {' or '.join(BUCKETS_OF)} have buckets"
            )
        if fault.shard is None:
            continue
        entry = dataset.train_split.entry
        if entry is None:
            raise UsageError(f"--inject {fault.text}: this data has no shards; give a folder that `hpcdl shard` made")
        if fault.shard >= len(entry.shards):
            raise UsageError(f"--inject {fault.text}: the training split has shards 0 to {len(entry.shards) - 1}")
        if not dataset.verified:
            raise UsageError(f"--inject {fault.text} needs --verify-data, which reads a shard from its first byte on")


def check_injected(resolved: ResolvedConfig[Any], kinds: Sequence[str] = KINDS, why: str = "") -> None:
    """Raise UsageError if faults are impossible, not of `kinds`, or set outside the command line.

    `why` says why other kinds are not possible.
    """
    if resolved.config.run.trace not in (OFF, UNASKED) and f"{FLIPPED}:" in resolved.config.safety.inject:
        raise UsageError(f"--inject {FLIPPED}:... takes the place of the recorder of --trace; leave one of them out")
    text, origin = resolved.config.safety.inject, resolved.origins["inject"]
    if text and origin != "flag":
        raise UsageError(f"{origin}: inject breaks runs on purpose; it is taken from the command line alone (--inject)")
    ranks = resolved.config.run.ranks
    # In a rank the nodes are not looked up: the starting process has checked them.
    here = None if not text or placement() is not None else num_nodes(find_launcher().hosts(os.environ), ranks)
    for fault in parse_faults(text, ranks, here):
        if fault.kind not in kinds:
            raise UsageError(f"--inject {fault.text}: {why}; {', '.join(kinds)} are")


def marker_of(run_dir: Path, number: int) -> Path:
    """Return the file that marks the fault of this number as injected."""
    return run_dir / FOLDER / f"{STRUCK}{number}"


def descriptions_of(faults: Sequence[Fault], run_dir: Path, *, over: bool = False) -> list[str]:
    """Return a line for each fault: requested, injected or, once the run is `over`, not reached."""
    lines = []
    for number, fault in enumerate(faults):
        what = f"{fault.kind} of {fault.place} {fault.moment}"
        if fault.every_s is not None:
            lines.append(f"faults are injected again and again: {what}")
        elif marker_of(run_dir, number).exists():
            lines.append(f"a fault was injected: {what}")
        elif over:
            lines.append(f"a fault was not reached: {what}; --inject {fault.text} has done nothing")
        else:
            lines.append(f"{_ASKED}{what}")
    return lines


def settled(warnings: Sequence[str], faults: Sequence[Fault], run_dir: Path) -> list[str]:
    """Return the warnings of a finished run, with the outcome of each requested fault instead of the request."""
    kept = [line for line in warnings if not line.startswith(_ASKED)]
    return list(dict.fromkeys([*kept, *descriptions_of(faults, run_dir, over=True)]))

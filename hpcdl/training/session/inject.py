"""Faults on purpose, `--inject`: what a run, or an installation, survives can be tried before it happens.

`kill:rank=1@step=50` and the like, several separated by commas:

    KIND:rank=R[:VALUE][@step=N|@time=T][+DURATION]
    KIND:rank=random[:VALUE]@every=T[:seed=N][+DURATION]
    eio:shard=N
    full:checkpoint[@step=N]
    flip:bucket=N@step=N

A fault strikes once in a run, also where the run goes on by itself, but for `@every`, which comes again and again at
random ranks and times; the journal tells of each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdl.cluster.status import FOLDER
from hpcdl.comm.observed import NOTHING, NoRecorder, Observation
from hpcdl.config.load import Effective
from hpcdl.config.tracing import OFF
from hpcdl.core.errors import ConfigError, UsageError, shown
from hpcdl.core.units import format_seconds, parse_seconds
from hpcdl.data.dataset import Dataset
from hpcdl.training.launch.rundir import STRUCK
from hpcdl.training.loop.journal import FileJournal, JournalReader

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

TOLD = "injected: "
"""Begins the journal's message of a fault, which has the step too."""
LOOK_S = 0.005
"""Time between two looks at a rank's step: a fault strikes at its step or the next ones."""
PERIOD_S = 0.05
"""A slow rank stands still for its share of each period."""
_SPEC = re.compile(
    r"(?P<kind>[a-z]+):(?:rank=(?P<rank>\d+|random)|shard=(?P<shard>\d+)|(?P<checkpoint>checkpoint)|bucket=(?P<bucket>\d+))"
    r"(?::x?(?P<value>\d+(?:\.\d+)?))?"
    r"(?:@(?:step=(?P<step>\d+)|time=(?P<time>[^+@:]+)|every=(?P<every>[^+@:]+)))?(?::seed=(?P<seed>\d+))?"
    r"(?:\+(?P<duration>[^+@:]+))?"
)
_NEVER_READABLE = Path("/proc/self/mem")
"""Its first bytes are of no process: the kernel answers with EIO."""
_PAUSES = (
    "import os, signal, sys, time\n"
    "pid, still_s, going_s, times = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])\n"
    "while times and os.path.exists(f'/proc/{pid}/fd'):\n"
    "    os.kill(pid, signal.SIGSTOP); time.sleep(still_s); os.kill(pid, signal.SIGCONT); time.sleep(going_s)\n"
    "    times -= 1\n"
)
"""A process of its own that stops another one and lets it go on, `times` times (-1: until it is gone)."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: `step` of the rank, or `time_s` seconds after its start; `duration_s` for a stop that ends.

    `rank` is None where any may be struck, or what they read: then `every_s` is the mean time between two, by `seed`.
    """

    kind: str
    rank: int | None
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
    def place(self) -> str:
        """What it strikes, for people."""
        if self.shard is not None:
            return f"shard {self.shard}"
        if self.kind == FULL:
            return "a checkpoint"
        if self.bucket is not None:
            return f"bucket {self.bucket} on rank {self.rank}"
        return "a random rank" if self.rank is None else f"rank {self.rank}"

    @property
    def moment(self) -> str:
        """When it strikes, for people."""
        if self.every_s is not None:
            return f"every {format_seconds(self.every_s)} in the mean"
        if self.step is None and self.time_s is None:
            return "from the start"
        return f"at step {self.step}" if self.step is not None else f"after {format_seconds(self.time_s or 0.0)}"


def _send(number: signal.Signals) -> Callable[[Fault], None]:
    return lambda fault: os.kill(os.getpid(), number)


def _stop(fault: Fault) -> None:
    if fault.duration_s is None:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        _pause(fault.duration_s, 0.0, 1)


def _slow(fault: Fault) -> None:
    assert fault.value is not None
    _pause(PERIOD_S * (1 - 1 / fault.value), PERIOD_S / fault.value, -1)


def _pause(still_s: float, going_s: float, times: int) -> None:
    line = [sys.executable, "-P", "-S", "-c", _PAUSES, *map(str, (os.getpid(), still_s, going_s, times))]
    subprocess.Popen(line, stdin=subprocess.DEVNULL)


STRIKES: Mapping[str, Callable[[Fault], None]] = {
    "kill": _send(signal.SIGKILL),
    "term": _send(signal.SIGTERM),
    "stop": _stop,
    "slow": _slow,
    "exit": lambda fault: os._exit(int(fault.value or 0)),
}
"""What strikes from beside, by kind: at any moment of a step, on workers, servers and scripts."""
PLANTED = ("error", "nan")
"""What happens in a worker's step: an exception; NaN in its batch."""
UNREADABLE, FULL = "eio", "full"
"""What the system does to files: a shard that cannot be read; no room while rank 0 writes a checkpoint."""
FLIPPED = "flip"
"""What memory or the network does: a bit of a bucket is another one on one rank than it is on the others."""
FLIPPED_RANK = 1
"""Not rank 0: of two ranks that differ the other one is told to be odd."""
_WHERE = {UNREADABLE: "shard", FULL: "checkpoint", FLIPPED: "bucket"}
KINDS = (*STRIKES, *PLANTED, *_WHERE)
BUCKETS_OF = ("all-reduce", "parameter servers")
"""Families of strategies that exchange gradients in buckets."""
AGAIN = ("kill", "term", "stop", "exit")
"""What may come again and again."""


def parse_faults(text: str, num_ranks: int) -> list[Fault]:
    """The faults that `--inject` names; ConfigError with a line for each that cannot be."""
    faults, problems = [], []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            faults.append(_parse(part, num_ranks))
        except ValueError as error:
            problems.append(f"--inject {part}: {error}")
    if problems:
        raise ConfigError(problems)
    return faults


def _parse(text: str, num_ranks: int) -> Fault:
    found = _SPEC.fullmatch(text)
    if found is None:
        raise ValueError("give KIND:rank=R@step=N or @time=T, for example kill:rank=1@step=50")
    kind = found["kind"]
    if kind not in KINDS:
        raise ValueError(f"unknown fault {shown(kind)}; known: {', '.join(KINDS)}")
    if not found[_WHERE.get(kind, "rank")]:
        raise ValueError("a fault strikes rank=R; eio strikes shard=N, flip bucket=N, and full strikes checkpoint")
    if kind in _WHERE:
        return _parse_of_file(found, text)
    if found["rank"] == "random":
        return _parse_random(found, text)
    rank = int(found["rank"])
    if rank >= num_ranks:
        raise ValueError(f"there are ranks 0 to {num_ranks - 1}")
    if found["every"] or found["seed"]:
        raise ValueError("@every and seed belong to rank=random, for example kill:rank=random@every=60s:seed=3")
    if kind == "slow" and float(found["value"] or 0) <= 1:
        raise ValueError("say how many times slower, for example slow:rank=1:x3")
    if kind not in ("slow", "exit") and found["value"]:
        raise ValueError(f"{kind} takes no value")
    if found["duration"] and kind != "stop":
        raise ValueError("only stop has a duration")
    if not found["step"] and not found["time"] and kind != "slow":
        raise ValueError("say when: @step=N or @time=T")
    if kind in PLANTED and not found["step"]:
        raise ValueError(f"{kind} strikes in a step: give @step=N")
    return Fault(
        kind=kind,
        rank=rank,
        value=float(found["value"]) if found["value"] else None,
        step=int(found["step"]) if found["step"] else None,
        time_s=parse_seconds(found["time"]) if found["time"] else None,
        duration_s=parse_seconds(found["duration"]) if found["duration"] else None,
        text=text,
    )


def _parse_of_file(found: re.Match[str], text: str) -> Fault:
    kind = found["kind"]
    if found["value"] or found["duration"] or found["time"] or found["every"] or found["seed"]:
        raise ValueError(f"{kind} takes no value and no time" + ("; @step=N is possible" if kind != UNREADABLE else ""))
    if kind == UNREADABLE and found["step"]:
        raise ValueError("a shard is unreadable from the start: give no step")
    if kind == FLIPPED and not found["step"]:
        raise ValueError("flip strikes in a step: give @step=N")
    return Fault(
        kind=kind,
        rank={FULL: 0, FLIPPED: FLIPPED_RANK}.get(kind),
        bucket=int(found["bucket"]) if found["bucket"] else None,
        shard=int(found["shard"]) if found["shard"] else None,
        step=int(found["step"]) if found["step"] else None,
        text=text,
    )


def _parse_random(found: re.Match[str], text: str) -> Fault:
    kind = found["kind"]
    if kind not in AGAIN:
        raise ValueError(f"{kind} does not come at random; {', '.join(AGAIN)} do")
    if not found["every"] or found["step"] or found["time"]:
        raise ValueError("say how often in the mean: rank=random@every=60s")
    if found["duration"] and kind != "stop":
        raise ValueError("only stop has a duration")
    if found["value"] and kind != "exit":
        raise ValueError(f"{kind} takes no value")
    every_s = parse_seconds(found["every"])
    if every_s <= 0:
        raise ValueError("the time between two must be above 0")
    return Fault(
        kind=kind,
        rank=None,
        value=float(found["value"]) if found["value"] else None,
        every_s=every_s,
        seed=int(found["seed"] or 0),
        duration_s=parse_seconds(found["duration"]) if found["duration"] else None,
        text=text,
    )


def check_possible(text: str, num_ranks: int, dataset: Dataset, *, family: str, num_workers: int) -> None:
    """UsageError where a shard is to be unreadable that the training split has not got, or that nobody looks at.

    Also where a bit of a bucket is to flip of a strategy of a `family` that has none, or of one worker alone.
    """
    for fault in parse_faults(text, num_ranks):
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


def check_injected(effective: Effective[Any], kinds: Sequence[str] = KINDS) -> None:
    """UsageError where faults are asked for elsewhere than on the command line, cannot be, or are not of `kinds`."""
    if effective.config.run.trace != OFF and f"{FLIPPED}:" in effective.config.safety.inject:
        raise UsageError(f"--inject {FLIPPED}:... takes the place of the recorder of --trace; leave one of them out")
    text, origin = effective.config.safety.inject, effective.origins["inject"]
    if text and origin != "flag":
        raise UsageError(f"{origin}: inject breaks runs on purpose; it is taken from the command line alone (--inject)")
    for fault in parse_faults(text, effective.config.run.ranks):
        if fault.kind not in kinds:
            raise UsageError(
                f"--inject {fault.text}: not in a script, which can do that itself; {', '.join(kinds)} are"
            )


class _FlipsBits(NoRecorder):
    """Hears of each bucket that comes back from its exchange, as a recorder does, and may change it."""

    def __init__(self, exchanged: Callable[[int, Array], None]) -> None:
        self._exchanged = exchanged

    def exchanged(self, bucket: int, values: Array) -> None:
        """Hand it on."""
        self._exchanged(bucket, values)


class Injection:
    """A run's faults on this rank. Context: inside, they strike."""

    def __init__(self, text: str, observation: Observation, run_dir: Path) -> None:
        self._seen, self._run_dir = observation, run_dir
        self._all = parse_faults(text, observation.size)
        self._mine = {
            number: fault
            for number, fault in enumerate(self._all)
            if fault.rank == observation.rank and not self._marker(number).exists()
        }
        self._over = threading.Event()
        self._steps = JournalReader(run_dir)
        self._told_step = 0

    def __enter__(self) -> Injection:
        again = any(fault.every_s is not None for fault in self._all)
        if again or any(fault.kind in STRIKES for fault in self._mine.values()):
            threading.Thread(target=self._watch, name="inject", daemon=True).start()
        if any(fault.bucket is not None for fault in self._mine.values()):
            self._seen.recorder = _FlipsBits(self._flip)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if isinstance(self._seen.recorder, _FlipsBits):
            self._seen.recorder = NOTHING

    def batch(self, step: int, images: Any) -> Any:
        """What a worker's step is fed: `images`, unless a fault strikes; ValueError is one of them."""
        for number, fault in [*self._mine.items()]:
            if fault.kind not in PLANTED or step < (fault.step or 0):
                continue
            self._tell(number)
            if fault.kind == "error":
                raise ValueError(f"injected: {fault.text}")
            return _not_a_number(images)
        return images

    def free_steps(self, step: int) -> int:
        """How many steps from `step` on are fed their batches as they are."""
        planted = [fault.step or 0 for fault in self._mine.values() if fault.kind in PLANTED]
        return max(min(planted) - step, 0) if planted else sys.maxsize

    def readable(self, dataset: Dataset) -> Dataset:
        """`dataset`, but for the shards that are to be unreadable: the kernel itself answers with EIO."""
        entry = dataset.train_split.entry
        copies = dict(dataset.copies)
        for number, fault in enumerate(self._all):
            if fault.shard is None or entry is None or dataset.folder is None:
                continue
            copies[dataset.folder / entry.shards[fault.shard].file] = _NEVER_READABLE
            if self._seen.rank == 0 and not self._marker(number).exists():
                self._marker(number).touch()
                self._say(fault.text)
        return dataclasses.replace(dataset, copies=copies) if copies != dataset.copies else dataset

    def writing(self, step: int) -> None:
        """Called where a checkpoint is about to be written; OSError where there is to be no room."""
        for number, fault in [*self._mine.items()]:
            if fault.kind == FULL and step >= (fault.step or 0):
                self._tell(number)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _flip(self, bucket: int, values: Array) -> None:
        """Flip one bit of the largest number: a float32 is 4 times as large then, or a quarter of it."""
        for number, fault in [*self._mine.items()]:
            if fault.bucket == bucket and (self._seen.step or 0) >= (fault.step or 0):
                self._tell(number)
                flat = values.reshape(-1)
                place = int(abs(flat).argmax())
                flat[place : place + 1].view("uint8")[-1] ^= 1

    def _watch(self) -> None:
        began = time.monotonic()
        schedules = [self._schedule(number, fault) for number, fault in enumerate(self._all) if fault.every_s]
        while not self._over.wait(LOOK_S):
            for schedule in schedules:
                next(schedule)
            for number, fault in [*self._mine.items()]:
                if fault.kind in STRIKES and self._is_due(fault, time.monotonic() - began):
                    self._tell(number)
                    STRIKES[fault.kind](fault)

    def _schedule(self, number: int, fault: Fault) -> Iterator[None]:
        """Strikes this rank at its moments, one look an item. Every rank draws the same moments and ranks.

        They count from the run's first start; what would have struck while no ranks were there is left out.
        """
        origin, launched_s = self._origin(number), time.time()
        drawn = random.Random(fault.seed)
        moment = origin
        while True:
            assert fault.every_s is not None
            moment += drawn.expovariate(1 / fault.every_s)
            rank = drawn.randrange(self._seen.size)
            if moment < launched_s:
                continue
            while time.time() < moment:
                yield
            if rank == self._seen.rank:
                self._say(f"{fault.kind}:rank={rank}, as {fault.text} has it")
                STRIKES[fault.kind](fault)

    def _origin(self, number: int) -> float:
        """When the run has first started, in Unix seconds, as whoever came first has written it down."""
        path = self._marker(number)
        if not path.exists():
            written = path.with_name(f"{path.name}.{self._seen.rank}")
            written.write_text(repr(time.time()))
            with contextlib.suppress(FileExistsError):
                os.link(written, path)
            written.unlink()
        return float(path.read_text())

    def _is_due(self, fault: Fault, age_s: float) -> bool:
        if fault.time_s is not None:
            return age_s >= fault.time_s
        return fault.step is None or self._step() >= fault.step

    def _step(self) -> int:
        """This rank's own step; a server has none and goes by what worker 0 has told."""
        own = self._seen.step
        if own is not None:
            return own
        for event in self._steps.read():
            self._told_step = max(self._told_step, int(event.get("step", 0)))
        return self._told_step

    def _tell(self, number: int) -> None:
        fault = self._mine.pop(number)
        self._marker(number).touch()
        self._say(fault.text)

    def _say(self, text: str) -> None:
        journal = FileJournal(self._run_dir)
        with contextlib.closing(journal):
            journal.write("message", text=f"{TOLD}{text}", step=self._step())

    def _marker(self, number: int) -> Path:
        return self._run_dir / FOLDER / f"{STRUCK}{number}"


def _not_a_number(images: Any) -> Array:
    import numpy

    return numpy.full(images.shape, numpy.nan, numpy.float32)


def spoken_of(faults: Sequence[Fault]) -> Iterator[str]:
    """A warning for each fault, which the run's record keeps."""
    for fault in faults:
        yield f"a fault was injected: {fault.kind} of {fault.place} {fault.moment}"

"""Faults on purpose, `--inject`: what a run, or an installation, survives can be tried before it happens.

`kill:rank=1@step=50` and the like, several separated by commas:

    KIND:rank=R[:VALUE][@step=N|@time=T][+DURATION]

A fault strikes once in a run, also where the run goes on by itself; the journal tells of it.
"""

from __future__ import annotations

import contextlib
import os
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
from hpcdl.comm.observed import Observation
from hpcdl.config.load import Effective
from hpcdl.core.errors import ConfigError, UsageError, shown
from hpcdl.core.units import format_seconds, parse_seconds
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
    r"(?P<kind>[a-z]+):rank=(?P<rank>\d+)(?::x?(?P<value>\d+(?:\.\d+)?))?"
    r"(?:@(?:step=(?P<step>\d+)|time=(?P<time>[^+@:]+)))?(?:\+(?P<duration>[^+@:]+))?"
)
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
    """One fault: `step` of the rank, or `time_s` seconds after its start; `duration_s` for a stop that ends."""

    kind: str
    rank: int
    value: float | None = None
    step: int | None = None
    time_s: float | None = None
    duration_s: float | None = None
    text: str

    @property
    def moment(self) -> str:
        """When it strikes, for people."""
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
KINDS = (*STRIKES, *PLANTED)


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
    kind, rank = found["kind"], int(found["rank"])
    if kind not in KINDS:
        raise ValueError(f"unknown fault {shown(kind)}; known: {', '.join(KINDS)}")
    if rank >= num_ranks:
        raise ValueError(f"there are ranks 0 to {num_ranks - 1}")
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


def check_injected(effective: Effective[Any], kinds: Sequence[str] = KINDS) -> None:
    """UsageError where faults are asked for elsewhere than on the command line, cannot be, or are not of `kinds`."""
    text, origin = effective.config.safety.inject, effective.origins["inject"]
    if text and origin != "flag":
        raise UsageError(f"{origin}: inject breaks runs on purpose; it is taken from the command line alone (--inject)")
    for fault in parse_faults(text, effective.config.run.ranks):
        if fault.kind not in kinds:
            raise UsageError(
                f"--inject {fault.text}: not in a script, which can do that itself; {', '.join(kinds)} are"
            )


class Injection:
    """A run's faults on this rank. Context: inside, they strike."""

    def __init__(self, text: str, observation: Observation, run_dir: Path) -> None:
        self._seen, self._run_dir = observation, run_dir
        found = enumerate(parse_faults(text, observation.size))
        self._mine = {
            number: fault
            for number, fault in found
            if fault.rank == observation.rank and not self._marker(number).exists()
        }
        self._over = threading.Event()
        self._steps = JournalReader(run_dir)
        self._told_step = 0

    def __enter__(self) -> Injection:
        if any(fault.kind in STRIKES for fault in self._mine.values()):
            threading.Thread(target=self._watch, name="inject", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

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

    def _watch(self) -> None:
        began = time.monotonic()
        while not self._over.wait(LOOK_S):
            for number, fault in [*self._mine.items()]:
                if fault.kind in STRIKES and self._is_due(fault, time.monotonic() - began):
                    self._tell(number)
                    STRIKES[fault.kind](fault)

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
        journal = FileJournal(self._run_dir)
        with contextlib.closing(journal):
            journal.write("message", text=f"{TOLD}{fault.text}", step=self._step())

    def _marker(self, number: int) -> Path:
        return self._run_dir / FOLDER / f"{STRUCK}{number}"


def _not_a_number(images: Any) -> Array:
    import numpy

    return numpy.full(images.shape, numpy.nan, numpy.float32)


def spoken_of(faults: Sequence[Fault]) -> Iterator[str]:
    """A warning for each fault, which the run's record keeps."""
    for fault in faults:
        yield f"a fault was injected: {fault.kind} of rank {fault.rank} {fault.moment}"

"""Injection of the faults of `--inject` (run/faults.py) into a rank; the journal reports each."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdl.comm.observed import NOTHING, NoRecorder, Observed, RankMonitor
from hpcdl.config.forms import OFF
from hpcdl.core.storage.disk import publish, touch
from hpcdl.data.format.dataset import Dataset
from hpcdl.faults.network import NetworkFaults
from hpcdl.run.faults import FULL, NETWORK, PARTITION, PLANTED, Fault, descriptions_of, marker_of, parse_faults, settled
from hpcdl.run.journal import FileJournal, JournalReader

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

INJECTED = "injected: "
"""Prefix of the journal's message of a fault, which also holds the step."""
LOOK_S, FOLLOW_S = 0.005, 0.05
"""Interval of checking a rank's step: a fault strikes at its step or soon after. Interval of checking others' marks."""
PERIOD_S = 0.01
"""Period of the pauses of a slow rank on an idle core. It is short compared with a step: otherwise a rank's part of it
could fall between two pauses, step after step."""
_NEVER_READABLE = Path("/proc/self/mem")
"""Its first bytes belong to no process: the kernel answers with EIO."""
_PAUSES = """
import os, signal, sys, time

pid, still_s = int(sys.argv[1]), float(sys.argv[2])
os.kill(pid, signal.SIGSTOP)
time.sleep(still_s)
os.kill(pid, signal.SIGCONT)
"""
"""A separate process that stops another one for a time."""
# `(~pid << 3) | 2` is the clock of a process's processor time, as clock_getcpuclockid(3) makes it.
_SLOWS = """
import contextlib, os, signal, sys, time

pid, factor, going_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the rank, which must not stay stopped

def used_ns():
    found = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                found[thread] = int(file.read().split()[0])
        except OSError:  # it has ended, or this kernel counts for the whole process alone
            pass
    return found or {"": time.clock_gettime_ns((~pid << 3) | 2)}

def slow_down():
    before, owed_ns = used_ns(), 0
    while os.path.exists(f"/proc/{pid}/fd"):
        time.sleep(going_s)
        os.kill(pid, signal.SIGSTOP)
        try:
            began_ns, now = time.process_time_ns(), used_ns()
            owed_ns += (factor - 1) * max(value - before.get(thread, 0) for thread, value in now.items())
            while time.process_time_ns() - began_ns < owed_ns:
                pass
            owed_ns -= time.process_time_ns() - began_ns
            before = now
        finally:
            os.kill(pid, signal.SIGCONT)

with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
    slow_down()
"""
"""A separate process that makes another one `factor` times slower: it stops that process, and computes in its place.

It computes for the time of the other's busiest thread, times `factor` - 1, in processor time. On a shared core a pause
by the clock would not slow a rank that had to wait for the core anyway.
"""


def _send(number: signal.Signals) -> Callable[[Fault], None]:
    return lambda fault: os.kill(os.getpid(), number)


def _stop(fault: Fault) -> None:
    if fault.duration_s is None:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        _beside(_PAUSES, os.getpid(), fault.duration_s)


def _slow(fault: Fault) -> None:
    assert fault.value is not None
    _beside(_SLOWS, os.getpid(), fault.value, PERIOD_S / fault.value)


def _beside(program: str, *values: float) -> None:
    # -P and -S: it imports nothing of the current folder or of installed packages.
    line = [sys.executable, "-P", "-S", "-c", program, *map(str, values)]
    # Not with the rank's pipes: a reader would wait for this process, which waits for the rank's end.
    subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


STRIKES: Mapping[str, Callable[[Fault], None]] = {
    "kill": _send(signal.SIGKILL),
    "term": _send(signal.SIGTERM),
    "stop": _stop,
    "slow": _slow,
    "exit": lambda fault: os._exit(int(fault.value or 0)),
}
"""Faults that strike at any moment of a step, by kind: on workers, servers and scripts."""


class _FlipsBits(NoRecorder):
    """Receives each bucket after its exchange, as a recorder does, and may change it."""

    def __init__(self, exchanged: Callable[[int, Array], None]) -> None:
        self._exchanged = exchanged

    def exchanged(self, bucket: int, values: Array) -> None:
        """Pass the bucket on."""
        self._exchanged(bucket, values)


class Injection:
    """A run's faults on this rank. They strike while its context is open."""

    def __init__(self, text: str, monitor: RankMonitor, run_dir: Path) -> None:
        self._seen, self._run_dir = monitor, run_dir
        self._all = parse_faults(text, monitor.size)
        left = {number: fault for number, fault in enumerate(self._all) if not self._has_struck(number)}
        between = {number: fault for number, fault in left.items() if fault.kind in NETWORK}
        self._mine = {
            number: fault for number, fault in left.items() if fault.rank == monitor.rank and number not in between
        }
        stay = [number for number, fault in enumerate(self._all) if fault.stays and self._has_struck(number)]
        cut_off = [self._marker(number).read_text() for number in stay]
        self._network = NetworkFaults(between, monitor, cut_off)
        self._over = threading.Event()
        self._steps = JournalReader(run_dir)
        self._reported_step, self._looked_s = 0, 0.0

    def impaired(self, communicator: Observed) -> Observed:
        """Return `communicator` (the world's) over the impaired network. Collective, before any exchange."""
        parse_faults(",".join(fault.text for fault in self._all), communicator.size, self._num_hosts(communicator))
        return self._network.impair(communicator, self._report_network)

    def trace_beside(self, text: str) -> str:
        """Return the possible part of the trace `text` (config/forms.py): flipping bits replaces the recorder."""
        return OFF if any(fault.bucket is not None for fault in self._all) else text

    def _num_hosts(self, communicator: Observed) -> int | None:
        """Return the number of nodes if a fault needs it. Collective: every rank must call it."""
        if not any(fault.of_host for fault in self._all):
            return None
        return len({*communicator.allgather_json(communicator.host)})

    def log_lines(self) -> list[str]:
        """Return a line for each fault, for the run's record."""
        return descriptions_of(self._all, self._run_dir)

    def __enter__(self) -> Injection:
        # Random faults of all ranks: each draws which rank they strike.
        again = any(fault.every_s is not None for fault in self._all)
        if again or self._network.faults or any(fault.kind in STRIKES for fault in self._mine.values()):
            # A daemon: the rank must be able to end while it watches.
            threading.Thread(target=self._watch, name="inject", daemon=True).start()
        if any(fault.bucket is not None for fault in self._mine.values()):
            self._seen.recorder = _FlipsBits(self._flip)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if isinstance(self._seen.recorder, _FlipsBits):
            self._seen.recorder = NOTHING

    def batch(self, step: int, images: Any) -> Any:
        """Return the input of a worker's step: `images`, unless a fault strikes, which may also raise ValueError."""
        # A copy, because a fault that strikes leaves the table.
        for number, fault in [*self._mine.items()]:
            if fault.kind not in PLANTED or step < (fault.step or 0):
                continue
            self._log_fault(number)
            if fault.kind == "error":
                raise ValueError(f"injected: {fault.text}")
            return _not_a_number(images)
        return images

    def free_steps(self, step: int) -> int:
        """Return the number of steps from `step` on whose batches stay unchanged."""
        planted = [fault.step or 0 for fault in self._mine.values() if fault.kind in PLANTED]
        return max(min(planted) - step, 0) if planted else sys.maxsize

    def readable(self, dataset: Dataset) -> Dataset:
        """Return `dataset` with the chosen shards unreadable: the kernel itself answers with EIO."""
        entry = dataset.train_split.entry
        copies = dict(dataset.copies)
        for number, fault in enumerate(self._all):
            if fault.shard is None or entry is None or dataset.folder is None:
                continue
            copies[dataset.folder / entry.shards[fault.shard].file] = _NEVER_READABLE
            if self._seen.rank == 0 and not self._marker(number).exists():
                touch(self._marker(number))
                self._log(fault.text)
        return dataclasses.replace(dataset, copies=copies) if copies != dataset.copies else dataset

    def settled(self, warnings: Sequence[str]) -> list[str]:
        """Return the warnings of a finished run, with the outcome of each requested fault."""
        return settled(warnings, self._all, self._run_dir)

    def writing(self, step: int) -> None:
        """Run just before a checkpoint is written. Raises OSError if the disk must appear full."""
        for number, fault in [*self._mine.items()]:
            if fault.kind == FULL and step >= (fault.step or 0):
                self._log_fault(number)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _flip(self, bucket: int, values: Array) -> None:
        """Flip one bit of the largest number: a float32 becomes 4 times as large, or a quarter."""
        for number, fault in [*self._mine.items()]:
            if fault.bucket == bucket and (self._seen.step or 0) >= (fault.step or 0):
                self._log_fault(number)
                flat = values.reshape(-1)
                index = int(abs(flat).argmax())
                # The last byte on little-endian machines: the sign and the upper exponent bits.
                flat[index : index + 1].view("uint8")[-1] ^= 1

    def _watch(self) -> None:
        began_s = time.monotonic()
        schedules = [self._schedule(number, fault) for number, fault in enumerate(self._all) if fault.every_s]
        while not self._over.wait(LOOK_S):
            for schedule in schedules:
                next(schedule)
            for number, fault in [*self._mine.items()]:
                # Noted first: a killed rank writes nothing more, and new ranks would inject the fault again.
                if fault.kind in STRIKES and self._is_due(fault, time.monotonic() - began_s):
                    self._log_fault(number)
                    STRIKES[fault.kind](fault)
            self._part(began_s)

    def _part(self, began: float) -> None:
        """Let partitions begin and heal."""
        for number, fault in [*self._network.faults.items()]:
            if self._network.leads(fault) and self._is_due(fault, time.monotonic() - began):
                self._network.begin(number)
                touch(self._marker(number), self._network.host.encode())
                self._log(fault.text)
        if time.monotonic() - self._looked_s > FOLLOW_S:
            self._looked_s = time.monotonic()
            self._network.follow(self._has_struck)
        self._network.heal()

    def _schedule(self, number: int, fault: Fault) -> Iterator[None]:
        """Strike this rank at its moments; each item is one check. Every rank draws the same moments and ranks.

        The moments count from the run's first start; those at which no ranks existed are omitted.
        """
        launched_s = time.monotonic()
        # The file has Unix time: the monotonic clocks of two nodes or boots differ.
        origin = self._origin(number) - time.time() + launched_s
        drawn = random.Random(fault.seed)
        moment = origin
        while True:
            assert fault.every_s is not None
            moment += drawn.expovariate(1 / fault.every_s)
            # Before the `continue`: every rank must draw the same numbers in the same order.
            rank = drawn.randrange(self._network.number_of(hosts=fault.of_host))
            if moment < launched_s:
                continue
            while time.monotonic() < moment:
                yield
            if fault.kind == PARTITION:
                self._part_at_random(fault, rank)
            elif rank == self._seen.rank:
                self._log(f"{fault.kind}:rank={rank}, as {fault.text} has it")
                STRIKES[fault.kind](fault)

    def _part_at_random(self, fault: Fault, number: int) -> None:
        ranks = self._network.place(fault, number)
        if self._seen.rank == min(ranks):
            self._log(f"{fault.kind}:{'host' if fault.of_host else 'rank'}={number}, as {fault.text} has it")
        self._network.part(fault, ranks)

    def _origin(self, number: int) -> float:
        """Return the time of the run's first start, in Unix seconds, written by the first rank that came."""
        path = self._marker(number)
        if not path.exists():
            publish(path, repr(time.time()).encode())
        # Read in any case: another rank may have been faster.
        return float(path.read_text())

    def _is_due(self, fault: Fault, age_s: float) -> bool:
        if fault.time_s is not None:
            return age_s >= fault.time_s
        return fault.step is None or self._step() >= fault.step

    def _step(self) -> int:
        """Return this rank's step; a server has none and uses the last step that worker 0 reported."""
        step = self._seen.step_of_run
        if step is not None:
            return step
        for event in self._steps.read():
            self._reported_step = max(self._reported_step, int(event.get("step", 0)))
        return self._reported_step

    def _log_fault(self, number: int) -> None:
        fault = self._mine.pop(number)
        touch(self._marker(number))
        self._log(fault.text)

    def _report_network(self, number: int, how: str) -> None:
        touch(self._marker(number))
        self._log(self._all[number].text + (f" ({how})" if how else ""))

    def _has_struck(self, number: int) -> bool:
        return self._marker(number).exists()

    def _log(self, text: str) -> None:
        journal = FileJournal(self._run_dir)
        with contextlib.closing(journal):
            journal.write("message", text=f"{INJECTED}{text}", step=self._step())

    def _marker(self, number: int) -> Path:
        return marker_of(self._run_dir, number)


def _not_a_number(images: Any) -> Array:
    import numpy

    return numpy.full(images.shape, numpy.nan, numpy.float32)

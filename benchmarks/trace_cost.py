"""Cost of a trace: steps with and without recording in turn, in one run; and the cost of reading the counters.

python benchmarks/trace_cost.py [--model lenet] [--ranks 2] [--steps 2000] [--levels steps,full]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hpcdl.comm.observed import BUCKET, CONTROL, EXCHANGE, NOTHING, SENDING, NoRecorder
from hpcdl.comm.threads import alone
from hpcdl.config.forms import FULL, OFF, STEPS
from hpcdl.config.schema import ExchangeConfig, OptimizerConfig
from hpcdl.core.processes.wall import WALL
from hpcdl.core.records.run_record import read_record
from hpcdl.core.statistics import estimate
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.table import find_strategy, load_strategy
from hpcdl.supervision import runtime
from hpcdl.trace.counters import sample
from hpcdl.trace.recorder import CPU_EVERY_S, TraceRecorder

WARM = 100
"""Number of first steps that do not count."""
LOOKED_S = 10.0
EVERY, BLOCK = 3, 150
"""One step of EVERY is traced, an odd number because batches come by twos and fours; medians are compared over blocks
of BLOCK steps."""


def _traced_and_not(seconds: Sequence[float]) -> float:
    """Return the difference of the medians of steps with a trace (the last of each EVERY) and without."""
    traced = set(range(EVERY - 1, len(seconds), EVERY))
    medians = [statistics.median(s for at, s in enumerate(seconds) if (at in traced) == kind) for kind in (True, False)]
    return medians[0] - medians[1]


def cost(level: str, given: argparse.Namespace, folder: Path) -> str:
    run_dir = folder / level
    words = ["train", "--model", given.model, "--data", given.data, "--strategy", "ring", "--ranks", str(given.ranks)]
    words += ["--steps", str(given.steps), "--batch-size", str(given.batch_size), "--run-dir", str(run_dir)]
    words += ["--profile", "none", "--trace", f"{level},every={EVERY}"]
    subprocess.run([sys.executable, "-m", "hpcdl", *words], check=True, stdout=subprocess.DEVNULL)
    seconds = read_record(run_dir).step_seconds
    first = min(WARM, given.steps // 2) // EVERY * EVERY
    blocks = [seconds[at : at + BLOCK] for at in range(first, len(seconds) - EVERY + 1, BLOCK)]
    step_s = statistics.median(seconds)
    differences = [_traced_and_not(block) for block in blocks]
    found = estimate(differences)
    width = f" +- {found.ci95 / step_s:.2%}" if found.ci95 is not None else ""
    return f"{level}: {found.mean * 1e6:.0f} us of a step of {step_s * 1e3:.2f} ms: {found.mean / step_s:+.2%}{width}"


def recording_us(level: str, folder: Path, buckets: int = 4, messages: int = 12) -> float:
    """Return the processor time of recording a step, which a busy machine does not change."""
    facts = {"rank": 0, "size": 2, "host": "here", "role": "worker"}
    recorder = TraceRecorder(level, folder, **facts)
    steps, now_s = 5000, time.monotonic()
    borders = [WALL.now_s()] * 6
    began = time.thread_time()
    for step in range(steps):
        recorder.step(step)
        for bucket in range(buckets):
            recorder.span(BUCKET, now_s, now_s, num_bytes=1, bucket=bucket)
        for _ in range(messages):
            recorder.operation(EXCHANGE, SENDING, 1, 1, now_s, now_s)
        recorder.parts(borders)
        recorder.operation(CONTROL, "an all-reduce", -1, 8, now_s, now_s)
    return (time.thread_time() - began) / steps * 1e6


def looks_ms(folder: Path, *, num_threads: int) -> float:
    """Return processor time per second of the thread that samples processor time and counters, in a sleeping process.

    `num_threads` others sleep beside it: the kernel adds up the time of all of them at each sample.
    """
    over = threading.Event()
    others = [threading.Thread(target=over.wait) for _ in range(num_threads)]
    for one in others:
        one.start()
    recorder = TraceRecorder(STEPS, folder, rank=0, size=2, host="here", role="worker")
    recorder.start()
    recorder.step(0)
    began_s, began = time.monotonic(), time.process_time()
    time.sleep(LOOKED_S)
    used = time.process_time() - began
    seconds = time.monotonic() - began_s
    over.set()
    recorder.close()
    return 1e3 * used / seconds


class TakesLayers(NoRecorder):
    """A recorder that requests layers and drops them."""

    wants_layers = True


def layers(given: argparse.Namespace) -> str:
    """Compare steps whose graph records its layers with steps whose graph does not, on one rank without an exchange."""
    runtime.silence()
    runtime.configure(deterministic=False, seed=1)
    import numpy

    from hpcdl.models.load import load_model
    from hpcdl.step.objective import Classification
    from hpcdl.step.optimizers import build_optimizer
    from hpcdl.step.step import build_step

    info = find_strategy("single")
    steps = []
    for recorder in (TakesLayers(), NOTHING):
        model = load_model(given.model)
        optimizer = build_optimizer(OptimizerConfig(), model.trainable_variables, loss_scaling=False)
        context = Context(
            info=info, communicator=alone(), num_workers=1, num_servers=0,
            exchange=ExchangeConfig(strategy="single"), optimizer=OptimizerConfig(),
        )  # fmt: skip
        worker = load_strategy(info).worker(context)
        steps.append(build_step(model, optimizer, worker, Classification(), recorder=recorder))
    shape = (given.batch_size, *model.input_shape[1:])
    images, labels = numpy.random.default_rng(1).random(shape, numpy.float32), numpy.zeros(given.batch_size, int)
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(WARM + given.steps // 2):
        for step, own in zip(steps, seconds, strict=True):
            began = time.process_time()
            float(step(images, labels)[0])
            own.append(time.process_time() - began if number >= WARM else 0.0)
    with_s, without_s = (statistics.median(own[WARM:]) for own in seconds)
    told = f"layers: {(with_s - without_s) * 1e6:.0f} us of processor time in a step of {without_s * 1e3:.2f} ms of it"
    return f"{told}: {with_s / without_s - 1:+.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--data", default="synthetic:mnist")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--levels", default="steps,full")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hpcdl-bench-") as name:
        for level in filter(None, given.levels.split(",")):
            print(cost(level, given, Path(name)), flush=True)
        for level in (OFF, STEPS, FULL):
            (Path(name) / f"calls-{level}").mkdir()
            took_us = recording_us(level, Path(name) / f"calls-{level}")
            print(f"{level}: {took_us:.1f} us of processor time to record 4 buckets and 12 messages of a step")
    began = time.thread_time()
    for _ in range(100):
        sample()
    print(f"counters, once a second in a thread of their own: {(time.thread_time() - began) * 1e4:.0f} us")
    with tempfile.TemporaryDirectory(prefix="hpcdl-bench-") as name:
        for num_threads in (0, 64):
            took_ms = looks_ms(Path(name), num_threads=num_threads)
            print(f"looks, {1 / CPU_EVERY_S:.0f} a second, and the counters, {num_threads} threads: {took_ms:.2f} ms/s")
    print(layers(given), flush=True)


if __name__ == "__main__":
    main()

"""`--bucket-size auto`: trial steps before the first step, with buckets of several sizes in turn.

The trials use the run's own step and first batch, at a learning rate of zero. What they still change (random states,
moving statistics, residuals of compression) is restored, so trials affect results only through the order of sums. The
times are cached for runs with the same steps on as many ranks of such nodes.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hpcdl.checkpoint import state
from hpcdl.collectives.auto import host_family
from hpcdl.comm.agree import decided
from hpcdl.comm.observed import NOTHING, observe
from hpcdl.config.schema import BUCKET_BYTES, ExchangeConfig, ModelConfig, OptimizerConfig
from hpcdl.core.errors import CorruptError
from hpcdl.core.paths import user_cache_folder
from hpcdl.core.protocols import Communicator
from hpcdl.core.records.from_json import read_as
from hpcdl.core.records.run_record import from_json
from hpcdl.core.storage.files import write_json
from hpcdl.core.units import format_bytes, format_seconds
from hpcdl.step.optimizers import build_optimizer
from hpcdl.strategies.allreduce.worker import AllReduceWorker

SCHEMA = "hpcdl.buckets/2"
"""Schema /1 had times of another division into buckets: its first bucket was as large as the others."""
TRIED = (BUCKET_BYTES, 1 << 20, 4 << 20, 64 << 20)
"""Bucket sizes to try, in bytes, besides one bucket for all gradients. The first is the default of a run."""
HARDLY = 0.01
"""A size must be faster by more than this fraction to be preferred to an earlier one."""


@dataclass(frozen=True, kw_only=True)
class BucketTimes:
    """Seconds of a step by bucket size in bytes: the slowest rank's, in the fastest step. `facts` identify the step."""

    schema: str = SCHEMA
    facts: Mapping[str, str]
    seconds: Mapping[str, float]

    @property
    def best(self) -> int:
        """The bucket size in bytes with the fastest step, or the first one that is nearly as fast."""
        limit = min(self.seconds.values()) * (1 + HARDLY)
        return int(next(size for size, seconds in self.seconds.items() if seconds <= limit))


def sizes_worth_a_try(total_bytes: int, buckets: Callable[[int], Sequence[Sequence[int]]]) -> tuple[int, ...]:
    """Return the bucket sizes that divide gradients of `total_bytes` differently; `buckets` divides them."""
    ways: dict[tuple[tuple[int, ...], ...], int] = {}
    # The default first: of sizes that give equal buckets the first is kept.
    for size in (BUCKET_BYTES, max(total_bytes, 1), *TRIED):
        ways.setdefault(tuple(map(tuple, buckets(size))), size)
    return tuple(ways.values())


def times_file(facts: Mapping[str, str]) -> Path:
    """Return the file that caches the times for these facts."""
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=10).hexdigest()
    return user_cache_folder() / "buckets" / f"{digest}.json"


def load_times(facts: Mapping[str, str], sizes: Sequence[int]) -> BucketTimes | None:
    """Return the cached times of `sizes`; None if missing or unusable, since a new measurement replaces them."""
    try:
        times = read_as(BucketTimes, times_file(facts), SCHEMA)
    except (OSError, CorruptError):
        return None
    # In this order: `best` prefers the first of nearly equal sizes.
    usable = times.facts == facts and list(times.seconds) == [str(size) for size in sizes]
    return times if usable and min(times.seconds.values()) > 0 else None


def save_times(times: BucketTimes) -> None:
    """Save `times` for later runs."""
    path = times_file(times.facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(times))


WARMUP, FEWEST, MOST = 2, 3, 30
"""Uncounted steps per size (the first one traces the graph), and the minimum and maximum number of counted steps."""
TIME_LIMIT_S = 4.0
"""After this many seconds of counted steps only the minimum number is taken."""


@dataclass(frozen=True, kw_only=True)
class BucketChoice:
    """The bucket size in bytes that a run chose, and the seconds of a step by bucket size.

    `why` names the source of the times.
    """

    bucket_bytes: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    why: str = ""

    def __str__(self) -> str:
        times = (f"{format_bytes(int(size))} {format_seconds(took)}" for size, took in self.seconds.items())
        return f"--bucket-size auto: {format_bytes(self.bucket_bytes)} ({', '.join([self.why, *times])})"


@dataclass(frozen=True)
class TrialStep:
    """A model's step to be timed: `build` compiles it for an optimizer; `batch` returns its input."""

    model: keras.Model
    settings: tuple[ModelConfig, ExchangeConfig, OptimizerConfig]
    build: Callable[[Any], Callable[..., Any]]
    batch: Callable[[], tuple[Any, Any]]
    samples: Sequence[int]
    """Samples of each slice of the batch, on the worker with most."""


def choose_buckets(
    worker: AllReduceWorker, group: Communicator, step: TrialStep, *, deterministic: bool
) -> BucketChoice:
    """Return the bucket size for `worker`, the same on every rank. Collective over `group`, with equal weights.

    A deterministic run measures nothing, because its choice could differ between runs.
    """
    gradients = [variable.value for variable in step.model.trainable_variables]
    total_bytes = sum(gradient.shape.num_elements() * gradient.dtype.size for gradient in gradients)
    sizes = sizes_worth_a_try(total_bytes, lambda size: worker.buckets(gradients, size))
    if group.size == 1 or len(sizes) == 1:
        return BucketChoice(bucket_bytes=BUCKET_BYTES, why="there is nothing to choose")
    if deterministic:
        return BucketChoice(bucket_bytes=BUCKET_BYTES, why="not measured, because of --deterministic")
    facts = _facts(group, step, gradients)
    # Only rank 0's cache counts: a rank with another file would choose other buckets, and the exchange would hang.
    document = decided(group, lambda: asdict(cached) if (cached := load_times(facts, sizes)) else None)
    if document is not None:
        times = from_json(BucketTimes, document)
        return BucketChoice(bucket_bytes=times.best, seconds=times.seconds, why="as an earlier run has measured")
    times = BucketTimes(facts=facts, seconds=_timed(worker, group, step, sizes))
    if group.rank == 0:
        with contextlib.suppress(OSError):  # without a writable home the next run measures again, which takes seconds
            save_times(times)
    return BucketChoice(bucket_bytes=times.best, seconds=times.seconds, why="as measured")


def _facts(group: Communicator, step: TrialStep, gradients: Sequence[Any]) -> dict[str, str]:
    """Return the facts on which a step's time depends, as far as they are known."""
    hosts = group.allgather_json(group.host)
    model, exchange, optimizer = step.settings
    forms = [(gradient.dtype.name, *gradient.shape) for gradient in gradients]
    return {
        "model": model.model,
        "gradients": hashlib.blake2b(repr(forms).encode(), digest_size=10).hexdigest(),
        "precision": model.precision,
        "kernels": model.fast_kernels,
        "xla": str(model.xla),
        "optimizer": optimizer.optimizer,
        "strategy": exchange.strategy,
        "compress": exchange.compress,
        "samples": ",".join(map(str, step.samples)),
        "library": group.library,
        "hosts": host_family(hosts[0]),  # several kinds of nodes may share a home folder
        "ranks": str(group.size),
        "nodes": str(len(set(hosts))),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads": str(tf.config.threading.get_intra_op_parallelism_threads()),
    }


def _timed(worker: AllReduceWorker, group: Communicator, step: TrialStep, sizes: Sequence[int]) -> dict[str, float]:
    """Return the seconds of the fastest step with each of `sizes` on the slowest rank; the same on every rank."""
    model, _, optimizer_settings = step.settings
    # One of its own: the momenta of trial gradients must not remain in the run's.
    optimizer = build_optimizer(
        optimizer_settings, step.model.trainable_variables, loss_scaling=model.precision == "mixed_float16"
    )
    optimizer.learning_rate = 0.0
    variables, begun_with = step.model.variables, worker.bucket_bytes
    before, worker_state = state.copy_of(state.reader(variables)(), "trial"), worker.state()
    monitor = observe(group).monitor
    recorder, monitor.recorder = monitor.recorder, NOTHING  # traces begin with the first training step
    try:
        return _in_turn(worker, group, {size: step.build(optimizer) for size in sizes}, step.batch())
    finally:
        monitor.recorder, worker.bucket_bytes = recorder, begun_with
        state.assign(variables, before, "trial")
        worker.restore(worker_state)
        del optimizer
        gc.collect()  # graphs and optimizers are in reference cycles, which would keep their memory


def _in_turn(
    worker: AllReduceWorker, group: Communicator, steps: Mapping[int, Callable[..., Any]], batch: tuple[Any, Any]
) -> dict[str, float]:
    seconds: dict[int, list[float]] = {size: [] for size in steps}
    spent_s = 0.0  # the same on every rank, as each time is
    for number in range(WARMUP + MOST):
        if number >= WARMUP + FEWEST and spent_s > TIME_LIMIT_S:
            break
        for size, take in steps.items():
            worker.bucket_bytes = size
            group.barrier()  # else waiting for the last rank would count as the step's time
            began_s = time.perf_counter()
            # On a GPU only reading the loss waits for the step.
            float(take(*batch)[0])
            took_s = max(group.allgather_json(time.perf_counter() - began_s))
            if number >= WARMUP:
                seconds[size].append(took_s)
                spent_s += took_s
    return {str(size): min(times) for size, times in seconds.items()}

"""A network and a preprocessing function that are slow on one rank after another, by the planned cause of each step.

`hpcdl train --model tests.trace.planted_model:network --preprocess tests.trace.planted_model:prepared` reads
the plan, a JSON list of [cause, rank, whether a clock rate is reported], from the file PLAN. Each entry holds for
WINDOW steps; before it begins, rank 0 waits until the test has answered in the folder of the plan.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hpcdl.core.errors import carried
from hpcdl.trace import counters
from hpcdl.trace.stragglers import CLOCK, CONTENTION, INPUT_CAUSE

PLAN = "PLANTED_PLAN"
WINDOW = 20
"""Number of steps."""
SIDE, ROUNDS, USUAL_KHZ = 128, 400, 2_400_000
"""Rows of the matrices, their products per step, and the clock rate in kHz."""
SLOW_READ_S = 1.5
"""Longer than a step: a batch that arrives while the rank computes slows no rank."""


class Planted:
    """What this rank has to do in each step, by the plan."""

    def __init__(self, plan: Path, rank: int) -> None:
        self._folder, self._rank = plan.parent, rank
        self._plan = json.loads(plan.read_text())
        self._steps, self._batches = itertools.count(), itertools.count()
        self._neighbour = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"], stdin=subprocess.DEVNULL)
        self._neighbour.send_signal(signal.SIGSTOP)
        atexit.register(self._neighbour.kill)
        self._khz: int | None = None
        counters._clock_khz = lambda: self._khz  # this machine may have no clock rate that can be lowered

    def _here(self, cause: str, step: int) -> bool:
        planted, rank, _ = self._plan[min(step // WINDOW, len(self._plan) - 1)]
        return bool((planted, rank) == (cause, self._rank))

    def rounds(self, *_: Any) -> Any:
        """Return how much the next step computes. Doubling the work imitates halving the clock rate."""
        step = next(self._steps)
        half_clock = self._here(CLOCK, step)
        if step % WINDOW == 0:
            self._neighbour.send_signal(signal.SIGCONT if self._here(CONTENTION, step) else signal.SIGSTOP)
            reported = self._plan[min(step // WINDOW, len(self._plan) - 1)][2]
            self._khz = USUAL_KHZ // (1 + half_clock) if reported else None
            if self._rank == 0 and step // WINDOW < len(self._plan):
                (self._folder / f"asked-{step // WINDOW}").touch()
                while not (self._folder / f"answered-{step // WINDOW}").exists():
                    time.sleep(0.01)
        return np.int32(ROUNDS * (1 + half_clock))

    def read(self) -> Any:
        """Return when the next batch is ready."""
        if self._here(INPUT_CAUSE, next(self._batches)):
            time.sleep(SLOW_READ_S)
        return np.float32(0.0)


def _on_one_core(rank: int) -> None:
    """Bind the rank to one core, so that the busy neighbour shares it."""
    cores = sorted(os.sched_getaffinity(0))
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), {cores[rank % len(cores)]})


class Rounds(keras.layers.Layer):
    """A layer that returns its input after the planned number of matrix products."""

    def call(self, inputs: Any) -> Any:
        """Return the input, changed by less than float32 resolves: TensorFlow would skip an unused product."""
        rounds = tf.numpy_function(carried(_planted().rounds), [inputs], tf.int32)
        rounds.set_shape(())
        same = tf.constant(np.eye(SIDE, dtype=np.float32))
        _, product = tf.while_loop(
            lambda done, _: done < rounds,
            lambda done, product: (done + 1, tf.matmul(product, same)),
            (0, tf.random.normal((SIDE, SIDE))),
        )
        return inputs + tf.stop_gradient(1e-30 * tf.reduce_sum(product))


@functools.cache
def _planted() -> Planted:
    """Return the one object of this process, shared by the model and the preprocessing."""
    rank = int(os.environ["PMI_RANK"])
    _on_one_core(rank)
    return Planted(Path(os.environ[PLAN]), rank)


def network() -> keras.Model:
    """Return a network for images of 28 x 28 with as many gradient bytes as LeNet."""
    layers = [Rounds(), keras.layers.Flatten(), keras.layers.Dense(540, "relu"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((28, 28, 1)), *layers])


def prepared(inputs: Any, targets: Any, training: bool) -> tuple[Any, Any]:
    """Return the batch unchanged, after the delay that the plan asks for."""
    if not training:
        return inputs, targets
    with tf.control_dependencies([tf.numpy_function(carried(_planted().read), [], tf.float32)]):
        return tf.identity(inputs), targets

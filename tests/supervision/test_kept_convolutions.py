"""A rank's convolutions are set up once, by oneDNN's own log, and anew in each step where the environment says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STEPS = 5
PROGRAM = f"""
from hpcdl.supervision.runtime import import_tensorflow
import_tensorflow()
import tensorflow as tf

@tf.function
def step(images, kernel):
    with tf.GradientTape() as tape:
        tape.watch(kernel)
        loss = tf.reduce_sum(tf.nn.conv2d(images, kernel, 1, "SAME") ** 2)
    return tape.gradient(loss, kernel)

tf.config.threading.set_inter_op_parallelism_threads(1)
for _ in range({STEPS}):
    step(tf.ones([4, 12, 12, 3]), tf.ones([3, 3, 3, 8]))
"""


@pytest.mark.parametrize(("set_by_user", "times"), [({}, 1), ({"TF_MKL_OPTIMIZE_PRIMITIVE_MEMUSE": "1"}, STEPS)])
def test_the_gradient_of_a_kernel_is_set_up(set_by_user: dict[str, str], times: int) -> None:
    asked = {"TF_ENABLE_ONEDNN_OPTS": "1", "ONEDNN_VERBOSE": "2", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **asked, **set_by_user},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    created = [line for line in done.stdout.splitlines() if "create:cache" in line and "backward_weights" in line]
    assert len(created) == times, done.stdout

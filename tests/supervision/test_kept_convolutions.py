"""oneDNN's own log shows: convolutions of fixed shapes are set up once, others, or if a user says so, in each step."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpcdl.supervision.runtime import SET_UP_ANEW

STEPS = 5
PROGRAM = f"""
import sys
from hpcdl.supervision.runtime import import_tensorflow
import_tensorflow(fixed_shapes=sys.argv[1] == "fixed")
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("shapes", "set_by_user", "times"), [("fixed", {}, 1), ("fixed", {SET_UP_ANEW: "1"}, STEPS), ("varying", {}, STEPS)]
)
def test_the_gradient_of_a_kernel_is_set_up(shapes: str, set_by_user: dict[str, str], times: int) -> None:
    asked = {"TF_ENABLE_ONEDNN_OPTS": "1", "ONEDNN_VERBOSE": "2", "CUDA_VISIBLE_DEVICES": ""}
    before = {name: value for name, value in os.environ.items() if name != SET_UP_ANEW}  # another test may have set it
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, shapes], env={**before, **asked, **set_by_user},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    created = [line for line in done.stdout.splitlines() if "create:cache" in line and "backward_weights" in line]
    assert len(created) == times, done.stdout

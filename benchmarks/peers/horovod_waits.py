"""One Horovod rank whose computing is a wait: steps with and without exchange in turn; rank 0 prints JSON.

mpirun ... PYTHON benchmarks/peers/horovod_waits.py PLAN STEPS

benchmarks/peers_hosts.py writes PLAN. Gradients use DistributedGradientTape, with Horovod's fusion and cycle.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waits import Waits

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod_steps import print_steps

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)  # one of them waits


def main() -> None:
    waits, num_steps = Waits(Path(sys.argv[1])), int(sys.argv[2])
    hvd.init()
    tf.random.set_seed(1)
    # In a network's order: from the input to the output.
    variables = [tf.Variable(tf.zeros(shape)) for piece in reversed(waits.pieces) for shape in reversed(piece)]
    print_steps(variables, lambda: computed(waits, [variable.read_value() for variable in variables]), num_steps)


def computed(waits: Waits, weights: list[Any]) -> Any:
    """Return zero after the forward pass's wait; gradients of `weights` come piece by piece, the last weights first."""

    @tf.custom_gradient
    def pass_forward(*values: Any) -> tuple[Any, Callable[[Any], list[Any]]]:
        def pass_backward(upstream: Any) -> list[Any]:
            ready, changing, gradients = upstream, tf.reshape(values[0], [-1])[0], []
            for place, piece in enumerate(waits.pieces):
                zeros = waited(functools.partial(waits.backward, place), [ready, changing], len(piece))
                # Add a separate zero to each: TensorFlow merges equal tensors, and would merge their exchanges.
                gradients += [tf.zeros(shape) + zeros[number] for number, shape in enumerate(piece)]
                ready = zeros[0]
            return gradients[::-1]

        return waited(waits.forward, [tf.constant(0.0)], 1, first=True)[0], pass_backward

    return pass_forward(*weights)


def waited(wait: Callable[[], None], after: list[Any], count: int, first: bool = False) -> Any:
    """Return `count` zeros, once all of `after` is available and `wait` is over."""

    def sleep(*_before: Any) -> Any:
        wait()
        return np.zeros(count, np.float32)

    # As in hpcdl/models/emulated.py: an operation with side effects would delay the exchange.
    done = tf.numpy_function(sleep, after, tf.float32, stateful=first)
    done.set_shape((count,))
    return done


if __name__ == "__main__":
    main()

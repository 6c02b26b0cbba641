"""One tensor to and fro between two ranks' TensorFlow servers: what a message costs the grpc-* strategies."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from hpcdl.core.errors import HpcdlError
from hpcdl.core.protocols import Communicator
from hpcdl.core.units import format_bytes
from hpcdl.strategies.tensorflow_grpc.server import start_server

v1 = tf.compat.v1
TRIPS = 10
"""Round trips in one call of the session, which has a cost of its own."""
_PATTERN = 251


class GrpcLink:
    """The link between the two ranks of `pair`; to make one is collective. Only its rank 0 calls the other methods."""

    def __init__(self, pair: Communicator) -> None:
        self._server = start_server(pair, pair.size)
        # Without the optimiser: it takes a tensor that only travels for one that need not.
        self._config = v1.ConfigProto()
        self._config.graph_options.rewrite_options.disable_meta_optimizer = True

    def trips(self, num_bytes: int, repeats: int) -> tuple[list[float], list[float]]:
        """Seconds of half a round trip, and of a call of the session beside its trips, `repeats` times.

        Each is what calls with one and with many trips, one after the other, differ by. HpcdlError where other bytes
        come back than have left.
        """
        with tf.Graph().as_default(), v1.Session(self._server.target, config=self._config) as session:
            with v1.device(_task(0)):
                made = tf.tile(tf.cast(tf.range(_PATTERN), tf.uint8), [num_bytes // _PATTERN + 1])[:num_bytes]
                source = v1.get_variable(f"source_{num_bytes}", initializer=made, use_resource=False)
            backs, back = [], source
            for _ in range(TRIPS):
                with v1.device(_task(1)):
                    there = tf.identity(back)
                with v1.device(_task(0)):
                    back = tf.identity(there)
                backs.append(back)
            with v1.device(_task(0)):
                same = tf.reduce_all(tf.equal(source, back))
            session.run(source.initializer)
            if not session.run(same):
                raise HpcdlError(f"other bytes came back of {format_bytes(num_bytes)} over gRPC than had left")
            halves, calls = [], []
            for repeat in range(repeats + 1):
                one_s, many_s = (_timed(session, operation.op) for operation in (backs[0], backs[-1]))
                if repeat:
                    half_s = max(many_s - one_s, 0.0) / (2 * (TRIPS - 1))
                    halves.append(half_s)
                    calls.append(max(one_s - 2 * half_s, 0.0))
        return halves, calls


def _task(number: int) -> str:
    return f"/job:worker/task:{number}/cpu:0"


def _timed(session: Any, operation: Any) -> float:
    began = time.perf_counter()
    session.run(operation)
    return time.perf_counter() - began

"""How the ranks of a grpc-* strategy meet: addresses, reserved ports, TensorFlow's servers and a fence around them.

`GrpcLink` sends one tensor to and fro between two ranks' servers: what a message costs the grpc-* strategies.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hpcdl.core.errors import HpcdlError
from hpcdl.core.protocols import Communicator
from hpcdl.core.units import format_bytes
from hpcdl.strategies.tensorflow_grpc.fence import ReservedPort, fence

LOOPBACK = "127.0.0.1"
_LISTENS_WITHIN_S = 60.0
_POLL_S = 0.002


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Places of all ranks, `address:port` in rank order."""

    rank: int
    places: tuple[str, ...]

    @property
    def address(self) -> str:
        """This rank's address."""
        return self.places[self.rank].rpartition(":")[0]

    @property
    def port(self) -> int:
        """This rank's port."""
        return int(self.places[self.rank].rpartition(":")[2])

    @property
    def addresses(self) -> set[str]:
        """The addresses of the job's hosts."""
        return {place.rpartition(":")[0] for place in self.places}


@contextmanager
def rendezvous(communicator: Communicator) -> Iterator[Cluster]:
    """Agree on a place for every rank; start TensorFlow's server inside the block. Collective.

    While the block runs the port is this rank's, and the server is fenced in as soon as it listens. HpcdlError where
    that is not possible: a server that everybody can reach is worse than none.
    """
    address = getattr(communicator, "address", LOOPBACK)
    with ReservedPort() as port:
        places = communicator.allgather_json(f"{address}:{port.number}")
        cluster = Cluster(rank=communicator.rank, places=tuple(places))
        os.environ["TF_GRPC_REUSE_PORT"] = "true"
        guard = _Guard(cluster)
        guard.start()
        yield cluster
        guard.finish()


class _Guard(threading.Thread):
    """Waits until this process listens on its port, and fences it in at once."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(name="fence", daemon=True)
        self._cluster = cluster
        self._problem: HpcdlError | None = None

    def run(self) -> None:
        deadline_s = time.monotonic() + _LISTENS_WITHIN_S
        while True:
            try:
                fence(self._cluster.port, self._cluster.address, self._cluster.addresses)
            except HpcdlError as error:
                self._problem = error
                if time.monotonic() > deadline_s:
                    return
                time.sleep(_POLL_S)
                continue
            self._problem = None
            return

    def finish(self) -> None:
        """Wait for the fence; HpcdlError where there is none."""
        self.join()
        if self._problem is not None:
            raise self._problem


def start_server(communicator: Communicator, num_workers: int) -> Any:
    """This rank's server: a `worker` on the first `num_workers` ranks, a `ps` on the others; collective over all."""
    with rendezvous(communicator) as cluster:
        jobs = {"worker": list(cluster.places[:num_workers]), "ps": list(cluster.places[num_workers:])}
        serves = cluster.rank >= num_workers
        config = tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=tf.config.threading.get_intra_op_parallelism_threads(),
            inter_op_parallelism_threads=tf.config.threading.get_inter_op_parallelism_threads(),
        )
        return tf.distribute.Server(
            tf.train.ClusterSpec({job: places for job, places in jobs.items() if places}),
            job_name="ps" if serves else "worker",
            task_index=cluster.rank - num_workers if serves else cluster.rank,
            config=config,
        )


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

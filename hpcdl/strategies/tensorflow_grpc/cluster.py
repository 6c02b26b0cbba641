"""How the ranks of a grpc-* strategy meet: addresses, reserved ports, and a fence around TensorFlow's servers.

No TensorFlow here: what a server needs to know is plain text.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hpcdl.core.errors import HpcdlError
from hpcdl.core.protocols import Communicator
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

"""A Communicator without MPI, over a group's connections: for what ranks agree on between steps, not for gradients.

Everything goes through rank 0 as JSON. Strategies that bring their own engine for gradients use it to meet, to stop
together, to add up evaluations, and to build the record.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy

from hpcdl.comm.tcp.group import TcpGroup, create_secret, join
from hpcdl.core.errors import HpcdlError, RankError
from hpcdl.core.storage.disk import make_folder, remove_file

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array, Communicator, RemoteArray, Request

SECRET_FILE = "secret"
RENDEZVOUS_NAMES = r"secret(\.address|\.\d+-\d+)*|\..+\.tmp"
"""What lies in a folder in which ranks without MPI find each other."""
APPEAR_S = 120.0
"""How long ranks wait for the file that the first of them makes."""


class ControlRequest:
    """A message that was sent already, or one that `wait` receives."""

    def __init__(self, group: TcpGroup, source: int | None = None, buffer: Array | None = None) -> None:
        self._group, self._source, self._buffer = group, source, buffer

    def wait(self) -> None:
        """Receive, where this is a receive."""
        if self._source is not None and self._buffer is not None:
            _fill(self._buffer, self._group.channel(self._source).receive())
            self._source = None

    def test(self) -> bool:
        """Only waiting tells."""
        return True


class ControlCommunicator:
    """The control messages of one group of ranks; `address` is this rank's own on the job's network."""

    library = "tcp"

    def __init__(self, rank: int, size: int, address: str, secret_file: Path) -> None:
        self.rank, self.size, self.address = rank, size, address
        self.host = os.uname().nodename
        self._secret_file = secret_file
        self._num_groups = 0
        self._group = join(rank, size, address, secret_file) if size > 1 else TcpGroup(0, 1, [])
        self._group.be_patient()

    def isend(self, buffer: Array, destination: int, tag: int = 0) -> ControlRequest:
        """Send `buffer` to or from rank 0, the only pairs that are connected. Tags are not kept apart."""
        self._group.channel(destination).send(_text(buffer))
        return ControlRequest(self._group)

    def irecv(self, buffer: Array, source: int, tag: int = 0) -> ControlRequest:
        """Receive into `buffer` when the request is waited for."""
        return ControlRequest(self._group, source, buffer)

    def wait_any(self, requests: Sequence[Request], look: Callable[[], None] = lambda: None) -> int:
        """Wait for the first request."""
        requests[0].wait()
        return 0

    def barrier(self) -> None:
        """Return when every rank has called."""
        self._group.barrier()

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Fill `buffer` on every rank with the root's bytes, in place."""
        texts = self.allgather_json(_text(buffer) if self.rank == root else None)
        _fill(buffer, texts[root])

    def allreduce(self, buffer: Array, add: Add | None = None) -> None:
        """Sum in rank order, the same on every rank."""
        incoming = numpy.empty_like(buffer)
        for rank, text in enumerate(self.allgather_json(_text(buffer))):
            _fill(incoming, text)
            if rank == 0:
                buffer[...] = incoming
            elif add is None:
                numpy.add(buffer, incoming, out=buffer)
            else:
                add(buffer, incoming)

    def allgather_json(self, value: Any, *, patient: bool = False) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank; who waits for a connection sleeps anyway."""
        return self._group.allgather_json(value)

    def duplicate(self) -> Communicator:
        """The same group with connections of its own."""
        return self.split(0, self.rank)

    def split(self, color: int, key: int = 0) -> ControlCommunicator:
        """The group of the ranks that gave the same `color`; its first rank makes a secret of the group's own."""
        self._num_groups += 1
        answers = self.allgather_json([color, key])
        members = [rank for _, rank in sorted((k, rank) for rank, (c, k) in enumerate(answers) if c == color)]
        secret_file = self._secret_file.with_name(f"{self._secret_file.name}.{self._num_groups}-{color}")
        if self.rank == members[0]:
            remove_file(secret_file)
            create_secret(secret_file)
        self.barrier()
        group = ControlCommunicator(members.index(self.rank), len(members), self.address, secret_file)
        self.barrier()
        if self.rank == members[0]:
            remove_file(secret_file)
        return group

    def shared_array(self, shape: Sequence[int], dtype: Any) -> Array:
        """Ranks without MPI share no memory."""
        raise RankError("ranks that talk over tcp share no memory", rank=self.rank)

    def remote_array(self, length: int, dtype: Any) -> RemoteArray:
        """Ranks without MPI reach no memory of others."""
        raise RankError("ranks that talk over tcp cannot reach each other's memory", rank=self.rank)

    def failed(self) -> set[int]:
        """A dead rank shows as a connection that is closed: the job ends."""
        return set()

    def survivors(self, lost: AbstractSet[int] = frozenset()) -> Communicator:
        """Everything goes through rank 0: nobody can be done without."""
        return self.duplicate()

    def free(self) -> None:
        """Hang up; a rank that still waits gets RankError."""
        self._group.close()

    def abort(self, exit_code: int) -> NoReturn:
        """Hang up: the others' next control message fails, and whoever started this rank ends those that do not ask."""
        self._group.close()
        os._exit(exit_code)


def make_secret(folder: Path) -> None:
    """Write a fresh secret into `folder`, in place of one that an earlier job left there."""
    make_folder(folder)
    remove_file(folder / SECRET_FILE)
    create_secret(folder / SECRET_FILE)


def control_world(rank: int, size: int, address: str, folder: Path) -> ControlCommunicator:
    """Meet all ranks of the job; `folder` is one that every rank sees, with the job's secret (`make_secret`) in it.

    The secret is gone when all have met.
    """
    secret_file = folder / SECRET_FILE
    deadline_s = time.monotonic() + APPEAR_S
    while not secret_file.exists():
        if time.monotonic() > deadline_s:
            raise RankError(f"{secret_file} has not appeared within {APPEAR_S:g} s; does every node see it?", rank=0)
        time.sleep(0.05)
    world = ControlCommunicator(rank, size, address, secret_file)
    world.barrier()
    if rank == 0:
        remove_file(secret_file)
    return world


def _text(buffer: Array) -> str:
    return base64.b64encode(buffer.tobytes()).decode()


def _fill(buffer: Array, text: str) -> None:
    content = numpy.frombuffer(base64.b64decode(text), buffer.dtype)
    if content.size != buffer.size:
        raise HpcdlError(f"{content.size} numbers were sent where {buffer.size} are expected")
    buffer[...] = content.reshape(buffer.shape)

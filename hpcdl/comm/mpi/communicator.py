"""Ranks as MPI processes."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.comm.arithmetic import plain_add
from hpcdl.comm.mpi.calls import MpiRemoteArray, asleep, failed_ranks, first_done, translated
from hpcdl.comm.mpi.library import import_mpi, library_path, refuse_finalized
from hpcdl.core.errors import BrokenGroup, UsageError

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array, Communicator, Request

_SUMMED_BY_MPI = {"f4": "FLOAT", "f8": "DOUBLE", "i4": "INT", "i8": "LONG", "u4": "UNSIGNED", "u8": "UNSIGNED_LONG"}
"""Number types that MPI adds itself. Half precision is not among them: it needs a Python operation."""
_MOVED_AS = {1: "BYTE", 2: "UNSIGNED_SHORT", 4: "UNSIGNED", 8: "UNSIGNED_LONG"}
"""Types used to send messages, by item size: counts are in elements, so messages may exceed 2 GiB."""
FORWARDED_S = 0.3  # launchers may drop the last output of a rank that aborts at once


def world(expected_size: int | None = None) -> MpiCommunicator:
    """Start MPI, if necessary, and return the communicator of all ranks.

    MPI_THREAD_MULTIPLE is requested and required: TensorFlow's threads send gradients. Raises UsageError if launcher
    and library do not match (`expected_size` ranks started as that many jobs of one rank).
    """
    mpi = import_mpi(initialize=True)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise UsageError(
            f"{_name_and_version(mpi)} was built without MPI_THREAD_MULTIPLE; load an MPI that has it, "
            "or pip install 'hpcdl[mpich]'"
        )
    size = mpi.COMM_WORLD.Get_size()
    if expected_size is not None and size != expected_size:
        raise UsageError(
            f"{expected_size} ranks were asked for but MPI started {size}: the launcher does not belong to "
            f"{_name_and_version(mpi)} ({library_path()}); use its own mpiexec, "
            "or srun --mpi=pmi2 (MPICH) or --mpi=pmix (Open MPI)"
        )
    return MpiCommunicator(mpi, mpi.COMM_WORLD)


def finalize() -> None:
    """End MPI, if it runs and no rank is dead. Collective over all ranks.

    Under ULFM MPI_Finalize of Open MPI 5 synchronises all ranks, sometimes including dead ones, and then hangs (1 in 12
    on a busy machine). The caller then ends the process; all messages have been sent.
    """
    mpi = import_mpi(initialize=False)
    if mpi.Is_initialized() and not mpi.Is_finalized() and not failed_ranks(mpi, mpi.COMM_WORLD):
        mpi.Finalize()
        refuse_finalized()


def _name_and_version(mpi: Any) -> str:
    name, version = mpi.get_vendor()
    return f"{name} {'.'.join(str(part) for part in version)}"


def _has_revocation(mpi: Any, handle: Any) -> bool:
    try:
        handle.Is_revoked()
    except (AttributeError, NotImplementedError, mpi.Exception):
        return False
    return True


class MpiRequest:
    """A message between two processes; keeps its buffer alive until the message is complete."""

    def __init__(self, communicator: MpiCommunicator, handle: Any, buffer: Array) -> None:
        self._mpi = communicator._mpi
        self._check_usable = communicator.check_usable
        self._buffer = buffer
        self.rank, self.host = communicator.rank, communicator.host
        self.handle = handle

    @translated
    def wait(self) -> None:
        """Return when the buffer may be used again (send) or is filled (receive)."""
        self.handle.Wait()

    @translated
    def test(self) -> bool:
        """Whether the message is complete."""
        self._check_usable()
        return bool(self.handle.Test())


class MpiCommunicator:
    """Communicator over an MPI group. Errors become RankError if the library returns them at all."""

    def __init__(self, mpi: Any, handle: Any, family: list[Any] | None = None) -> None:
        self._mpi = mpi
        self._handle = handle
        self._family: list[Any] = [] if family is None else family
        """The handles of all groups derived from the same one."""
        self._family.append(handle)
        self._windows: list[Any] = []
        self._operations: dict[Any, Any] = {}
        self._may_be_revoked = _has_revocation(mpi, handle)
        self.rank: int = handle.Get_rank()
        self.size: int = handle.Get_size()
        self.host = os.uname().nodename
        self.library = _name_and_version(mpi)

    @translated
    def isend(self, buffer: Array, destination: int, tag: int = 0) -> MpiRequest:
        """Start sending `buffer`."""
        return MpiRequest(self, self._handle.Isend(self._moved(buffer), destination, tag), buffer)

    @translated
    def irecv(self, buffer: Array, source: int, tag: int = 0) -> MpiRequest:
        """Start receiving into `buffer`."""
        return MpiRequest(self, self._handle.Irecv(self._moved(buffer), source, tag), buffer)

    @translated
    def wait_any(self, requests: Sequence[Request], look: Callable[[], None] = lambda: None) -> int:
        """Return the index of the first completed request; sleeps between polls, because every MPI's own wait spins."""
        handles = [request.handle for request in requests if isinstance(request, MpiRequest)]
        return first_done(self._mpi, handles, look, self.check_usable)

    @translated
    def barrier(self) -> None:
        """Return when every rank has called."""
        self._handle.Barrier()
        self._check_whole("a barrier")

    @translated
    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Fill `buffer` on every rank with the root's bytes, in place."""
        self._handle.Bcast(self._moved(buffer), root)
        self._check_whole("a broadcast")

    @translated
    def allreduce(self, buffer: Array, add: Add | None = None) -> None:
        """MPI_Allreduce in place; half precision and a given `add` run as a user operation in Python."""
        name = _SUMMED_BY_MPI.get(buffer.dtype.str[1:])
        if add is None and name is not None:
            self._check(buffer)
            spec = [buffer, buffer.size, getattr(self._mpi, name)]
            self._handle.Allreduce(self._mpi.IN_PLACE, spec, self._mpi.SUM)
        else:
            operation = self._operation(add or plain_add, buffer.dtype)
            self._handle.Allreduce(self._mpi.IN_PLACE, self._moved(buffer), operation)
        self._check_whole("an all-reduce")

    @translated
    def allgather_json(self, value: Any, *, patient: bool = False) -> list[Any]:
        """Return every rank's `value` in rank order, sent as JSON. `patient` polls: MPI's own wait spins."""
        own_text = numpy.frombuffer(json.dumps(value).encode(), numpy.uint8)
        # numpy's default integer is a C long on Linux.
        size, lengths = numpy.array([own_text.size]), numpy.zeros(self.size, numpy.int64)
        sizes = [size, self._mpi.LONG], [lengths, self._mpi.LONG]
        asleep(self._handle.Iallgather(*sizes)) if patient else self._handle.Allgather(*sizes)
        gathered = numpy.zeros(int(lengths.sum()), numpy.uint8)
        texts = [own_text, self._mpi.BYTE], [gathered, lengths.tolist(), self._mpi.BYTE]
        asleep(self._handle.Iallgatherv(*texts)) if patient else self._handle.Allgatherv(*texts)
        self._check_whole("gathering")
        ends = numpy.cumsum(lengths).tolist()
        return [json.loads(gathered[end - length : end].tobytes()) for end, length in zip(ends, lengths, strict=True)]

    @translated
    def duplicate(self) -> Communicator:
        """Return the same group with a message space of its own."""
        return MpiCommunicator(self._mpi, self._handle.Dup(), self._family)

    @translated
    def split(self, color: int, key: int = 0) -> Communicator:
        """Return the group of the ranks with the same `color`."""
        return MpiCommunicator(self._mpi, self._handle.Split(color, key), self._family)

    @translated
    def shared_array(self, shape: Sequence[int], dtype: Any) -> Array:
        """Return a shared-memory window allocated by rank 0 of the group; MPI refuses if ranks are on several nodes."""
        item_bytes = numpy.dtype(dtype).itemsize
        num_bytes = math.prod(shape) * item_bytes if self.rank == 0 else 0
        window = self._mpi.Win.Allocate_shared(num_bytes, item_bytes, comm=self._handle)
        self._windows.append(window)
        memory, _ = window.Shared_query(0)
        array: Array = numpy.frombuffer(memory, dtype=dtype, count=math.prod(shape)).reshape(shape)
        if self.rank == 0:
            array[...] = 0
        self._handle.Barrier()
        return array

    @translated
    def remote_array(self, length: int, dtype: Any) -> MpiRemoteArray:
        """Return a window that all ranks may get from and accumulate into at any time."""
        kind = getattr(self._mpi, _SUMMED_BY_MPI[numpy.dtype(dtype).str[1:]])
        return MpiRemoteArray(self._mpi, self._handle, length, dtype, kind)

    def failed(self) -> set[int]:
        """Return the dead ranks by ULFM, which Open MPI 5 has under `mpiexec --with-ft ulfm`."""
        return failed_ranks(self._mpi, self._handle)

    @translated
    def survivors(self, lost: AbstractSet[int] = frozenset()) -> Communicator:
        """Use MPIX_Comm_shrink if the library detected the dead ranks, else MPI_Comm_create_group of the others.

        In a revoked group some ranks may not know yet which ranks are dead: shrinking agrees on that.
        """
        if self.failed() or self.is_revoked():
            return MpiCommunicator(self._mpi, self._handle.Shrink(), self._family)
        group = self._handle.Get_group().Excl(sorted(lost))
        return MpiCommunicator(self._mpi, self._handle.Create_group(group), self._family)

    def is_revoked(self) -> bool:
        """Whether `revoke` was called, here or on another rank; always False without ULFM."""
        return self._may_be_revoked and bool(self._handle.Is_revoked())

    def check_usable(self) -> None:
        """Raise BrokenGroup if the group is revoked; called before messages are polled.

        In a revoked group Open MPI's MPI_Test reports a message complete at once, although it may still be in transit.
        When it then arrives, it ends the whole job. MPI_Wait, which is called later, returns when the message is
        complete.
        """
        if self._may_be_revoked and self._handle.Is_revoked():
            text = f"rank {self.rank} on {self.host}: the group was revoked"
            raise BrokenGroup(text, rank=self.rank, host=self.host)

    @translated
    def revoke(self) -> None:
        """MPIX_Comm_revoke of the whole family. The handles are kept: freeing one would need all of its ranks.

        Each group is revoked only once.
        """
        for handle in self._family:
            if not handle.Is_revoked():
                handle.Revoke()
        self._family[1:] = []

    @translated
    def free(self) -> None:
        """Free windows, operations and, except for the world, the communicator itself."""
        while self._windows:
            self._windows.pop().Free()
        while self._operations:
            self._operations.popitem()[1].Free()
        if self._handle != self._mpi.COMM_WORLD:
            if self._handle in self._family:
                self._family.remove(self._handle)
            self._handle.Free()

    def abort(self, exit_code: int) -> None:
        """MPI_Abort: end every rank of the job now; never returns, although some libraries' MPI_Abort does."""
        sys.stderr.flush()
        time.sleep(FORWARDED_S)
        self._handle.Abort(exit_code)
        os._exit(exit_code)

    def _check_whole(self, what: str) -> None:
        """Raise BrokenGroup if a rank died: Open MPI 5 then completes collectives without its contribution."""
        if dead := self.failed():
            text = f"rank {self.rank} on {self.host}: {what} has lost {len(dead)} of {self.size} ranks"
            raise BrokenGroup(text, rank=self.rank, host=self.host)

    def _operation(self, add: Add, dtype: Any) -> Any:
        if (add, dtype) not in self._operations:

            def combine(incoming: Any, target: Any, _: Any) -> None:
                add(numpy.frombuffer(target, dtype), numpy.frombuffer(incoming, dtype))

            self._operations[add, dtype] = self._mpi.Op.Create(combine, commute=True)
        return self._operations[add, dtype]

    def _moved(self, buffer: Array) -> list[Any]:
        self._check(buffer)
        name = _MOVED_AS.get(buffer.dtype.itemsize)
        if name is None:
            return [buffer, buffer.nbytes, self._mpi.BYTE]
        return [buffer, buffer.size, getattr(self._mpi, name)]

    def _check(self, buffer: Array) -> None:
        if not buffer.flags.c_contiguous:
            raise ValueError("a message's buffer must be C-contiguous; copy it first")

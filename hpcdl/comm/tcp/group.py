"""Control messages without MPI: JSON between rank 0 and the rest, for strategies that bring their own engine.

The launcher makes a job's secret (`create_secret`, mode 0600) where all ranks can read it. Rank 0 listens on the
address it is given, on a free port, and announces both beside the secret; the announcement is signed, so that one left
over from another job is not followed. Both sides prove that they know the secret, and every message carries an HMAC of
its content, direction and number: nobody else on the network can join, replay or alter.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hpcdl.comm.tcp.channel import TIMEOUT_S, Channel, greet, welcome
from hpcdl.core.errors import RankError, UsageError
from hpcdl.core.storage.disk import create, remove_file
from hpcdl.core.storage.files import write_json

Started = TypeVar("Started")


def create_secret(path: Path) -> None:
    """Write a fresh secret that only this user can read; FileExistsError where the file is there already."""
    create(path, secrets.token_hex(32).encode(), 0o600)


def read_secret(path: Path) -> bytes:
    """The secret in `path`; UsageError where others could have read or written it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise UsageError(
            f"cannot read the job's secret {path}: {error.strerror}; is the folder on every node?"
        ) from error
    with os.fdopen(descriptor) as file:
        status = os.fstat(descriptor)
        if status.st_mode & 0o077 or status.st_uid != os.geteuid():
            raise UsageError(f"{path} is not this user's alone; remove it and start the job again")
        return file.read().strip().encode()


class TcpGroup:
    """The control messages of one rank. Every call is one of all ranks, in the same order."""

    def __init__(self, rank: int, size: int, channels: Sequence[Channel]) -> None:
        self.rank = rank
        self.size = size
        self._channels = channels

    def gather_json(self, value: Any) -> list[Any]:
        """On rank 0 every rank's `value` in rank order; an empty list elsewhere."""
        if self.rank != 0:
            self._channels[0].send(value)
            return []
        return [value, *(channel.receive() for channel in self._channels)]

    def broadcast_json(self, value: Any = None) -> Any:
        """Rank 0's `value`, on every rank."""
        if self.rank != 0:
            return self._channels[0].receive()
        for channel in self._channels:
            channel.send(value)
        return value

    def allgather_json(self, value: Any) -> list[Any]:
        """Every rank's `value` in rank order, on every rank."""
        gathered: list[Any] = self.broadcast_json(self.gather_json(value))
        return gathered

    def barrier(self) -> None:
        """Return when every rank has called."""
        self.allgather_json(None)

    def channel(self, rank: int) -> Channel:
        """The connection to `rank`: rank 0 has one to everybody, everybody one to rank 0."""
        for channel in self._channels:
            if channel.peer == rank:
                return channel
        raise RankError(f"rank {self.rank} has no connection to rank {rank}: messages go through rank 0", rank=rank)

    def be_patient(self) -> None:
        """Wait for messages as long as the peer lives: between two may lie hours of training."""
        for channel in self._channels:
            channel.be_patient()

    def close(self) -> None:
        """Hang up; a rank that still waits gets RankError."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> TcpGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join(rank: int, size: int, address: str, secret_file: Path, timeout_s: float = TIMEOUT_S) -> TcpGroup:
    """Meet all ranks of the job. `address` is where rank 0 listens: an interface of its own, never a wildcard.

    RankError names the ranks that have not come after `timeout_s`.
    """
    secret = read_secret(secret_file)
    announcement = secret_file.with_name(secret_file.name + ".address")
    if rank == 0:
        return TcpGroup(0, size, _gather_ranks(size, address, secret, announcement, timeout_s))
    deadline_s = time.monotonic() + timeout_s
    while True:
        place = _read_announcement(announcement, secret)
        if place is not None:
            with contextlib.suppress(ConnectionRefusedError):
                return TcpGroup(rank, size, [greet(rank, place, secret, timeout_s)])
        if time.monotonic() > deadline_s:
            raise RankError(f"rank {rank}: rank 0 has not announced itself within {timeout_s:g} s", rank=0)
        time.sleep(0.05)


def free_ports(address: str, count: int) -> list[int]:
    """Ports of `address` that nobody listens on now; somebody may by the time they are used (`with_free_ports`)."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(listen(address)) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def with_free_ports(
    address: str,
    count: int,
    start: Callable[[list[int]], Started],
    *,
    failures: tuple[type[Exception], ...] = (OSError,),
    attempts: int = 5,
) -> Started:
    """What `start(ports)` returns; tried again with other ports when it raises one of `failures`."""
    for attempt in range(attempts):
        try:
            return start(free_ports(address, count))
        except failures as error:
            if attempt == attempts - 1:
                raise RankError(f"no free port on {address} could be used in {attempts} attempts: {error}") from error
    raise AssertionError("attempts must be positive")


def listen(address: str) -> socket.socket:
    """A socket that listens on a free port of `address`; UsageError for a wildcard or a foreign address."""
    if address in ("", "0.0.0.0", "::", "*"):
        raise UsageError(f"refusing to listen on every interface ({address!r}); name the address of the job's own")
    family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {address}: {error.strerror}; name an address of this node") from error
    return listener


def _gather_ranks(size: int, address: str, secret: bytes, announcement: Path, timeout_s: float) -> list[Channel]:
    channels: dict[int, Channel] = {}
    with listen(address) as listener, contextlib.ExitStack() as on_failure:
        place = [address, listener.getsockname()[1]]
        write_json(announcement, {"place": place, "signature": _signature(place, secret)})
        on_failure.callback(remove_file, announcement)
        deadline_s = time.monotonic() + timeout_s
        while len(channels) < size - 1:
            listener.settimeout(max(0.01, deadline_s - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, size)) - set(channels))
                names = ", ".join(str(rank) for rank in missing[:10])
                raise RankError(f"ranks {names} have not come within {timeout_s:g} s", rank=missing[0]) from None
            channel = welcome(connection, secret, timeout_s)
            if channel is None or not 0 < channel.peer < size or channel.peer in channels:
                connection.close()
                continue
            on_failure.callback(channel.close)
            channels[channel.peer] = channel
        on_failure.pop_all()
    remove_file(announcement)
    return [channels[rank] for rank in range(1, size)]


def _read_announcement(path: Path, secret: bytes) -> tuple[str, int] | None:
    try:
        document = json.loads(path.read_text())
        if hmac.compare_digest(document["signature"], _signature(document["place"], secret)):
            address, port = document["place"]
            return str(address), int(port)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


def _signature(place: Sequence[Any], secret: bytes) -> str:
    return hmac.new(secret, b"place" + json.dumps(list(place)).encode(), hashlib.sha256).hexdigest()

"""A Communicator without MPI, and its connections: for agreements between steps, not for gradients.

All messages go through rank 0 as JSON. Strategies with their own engine for gradients use it to connect, to stop
together, to sum evaluations, and to build the record.

Connections are authenticated: JSON messages, each with its length and an HMAC.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy

from hpcdl.core.errors import HpcdlError, RankError, UsageError
from hpcdl.core.storage.disk import create, make_folder, remove_file
from hpcdl.core.storage.files import write_json

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array, Communicator, RemoteArray, Request


TIMEOUT_S = 300.0
"""How long a rank waits for a message; two messages may be a step of the slowest rank apart."""
GREETING_S = 10.0
"""How long a newcomer has to authenticate: a silent one must not block the others."""
MAX_MESSAGE_BYTES = 64 << 20
_NONCE_BYTES = 32
_PROOF = 2**64 - 1
"""Number of the greeting's proofs; messages count from 0 and never reach it."""
_HEADER = struct.Struct("!I32s")  # length, HMAC-SHA256
_GREETING = struct.Struct("!I32s32s")  # rank, nonce, HMAC-SHA256


class Channel:
    """Messages to and from one peer. Keys differ by direction, and messages are numbered."""

    def __init__(self, connection: socket.socket, peer: int, sending_key: bytes, receiving_key: bytes) -> None:
        # Without it the kernel holds a short message back until the peer has acknowledged the one before.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._sending_key = sending_key
        self._receiving_key = receiving_key
        self._num_sent = 0
        self._num_received = 0
        self.peer = peer

    def send(self, value: Any) -> None:
        """Send anything that JSON can hold."""
        content = json.dumps(value).encode()
        if len(content) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a control message of {len(content)} bytes is too long")
        header = _HEADER.pack(len(content), _mac(self._sending_key, self._num_sent, content))
        self._num_sent += 1
        try:
            self._connection.sendall(header + content)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self) -> Any:
        """Return the next message. Raises RankError if the peer is gone, silent for too long, or not authentic."""
        try:
            length, signature = _HEADER.unpack(_read(self._connection, _HEADER.size))
            # Not authenticated yet: a stranger must not make this rank collect up to 4 GiB.
            if length > MAX_MESSAGE_BYTES:
                raise ConnectionError(f"a message of {length} bytes is announced")
            content = _read(self._connection, length)
        except OSError as error:
            raise self._lost(error) from error
        # In constant time: otherwise its duration would tell how far a forged signature is right.
        if not hmac.compare_digest(signature, _mac(self._receiving_key, self._num_received, content)):
            raise RankError(f"a message in the name of rank {self.peer} is not authentic", rank=self.peer)
        self._num_received += 1
        return json.loads(content)

    def be_patient(self) -> None:
        """Wait without limit for the next message; the kernel's keep-alive probes detect a lost host."""
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _lost(self, error: OSError) -> RankError:
        why = "is silent" if isinstance(error, TimeoutError) else "has hung up"
        return RankError(f"rank {self.peer} {why} ({error})", rank=self.peer)


def greet(rank: int, address: tuple[str, int], secret: bytes, timeout_s: float) -> Channel:
    """Connect to rank 0 and prove to know the secret. Raises RankError if rank 0 does not know it."""
    connection = socket.create_connection(address, timeout=timeout_s)
    try:
        challenge = _read(connection, _NONCE_BYTES)
        own_nonce = secrets.token_bytes(_NONCE_BYTES)
        keys = _keys(secret, challenge + own_nonce, rank)
        connection.sendall(_GREETING.pack(rank, own_nonce, _mac(keys[0], _PROOF, b"worker")))
        if not hmac.compare_digest(_read(connection, 32), _mac(keys[1], _PROOF, b"leader")):
            raise ConnectionError("it does not know the job's secret")
    except OSError as error:
        connection.close()
        raise RankError(f"rank {rank} cannot join rank 0 at {address[0]}:{address[1]}: {error}", rank=0) from error
    return Channel(connection, 0, keys[0], keys[1])


def welcome(connection: socket.socket, secret: bytes, timeout_s: float) -> Channel | None:
    """Challenge a newcomer; return None if it does not prove in time to know the secret."""
    connection.settimeout(min(timeout_s, GREETING_S))
    try:
        challenge = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(challenge)
        rank, nonce, proof = _GREETING.unpack(_read(connection, _GREETING.size))
        keys = _keys(secret, challenge + nonce, rank)
        if not hmac.compare_digest(proof, _mac(keys[0], _PROOF, b"worker")):
            return None
        connection.sendall(_mac(keys[1], _PROOF, b"leader"))
    except OSError:
        return None
    connection.settimeout(timeout_s)
    return Channel(connection, rank, keys[1], keys[0])


def _keys(secret: bytes, nonces: bytes, rank: int) -> tuple[bytes, bytes]:
    """Return the keys of this connection: for messages of the worker, and for messages of rank 0."""
    # Nonces of both sides: no earlier connection can be replayed. A key for each way: no message can be sent back.
    base = nonces + rank.to_bytes(4, "big")
    return hmac.digest(secret, b"up" + base, hashlib.sha256), hmac.digest(secret, b"down" + base, hashlib.sha256)


def _mac(key: bytes, number: int, content: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + content, hashlib.sha256)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    content = bytearray()
    while len(content) < num_bytes:
        piece = connection.recv(min(num_bytes - len(content), 1 << 20))  # recv allocates all that it may return
        if not piece:
            raise ConnectionError("the connection ended")
        content += piece
    return bytes(content)


def create_secret(path: Path) -> None:
    """Write a new secret that only this user can read. Raises FileExistsError if the file exists."""
    create(path, secrets.token_hex(32).encode(), 0o600)


def read_secret(path: Path) -> bytes:
    """Return the secret in `path`. Raises UsageError if others could have read or written it."""
    try:
        # A link could lead to a file whose content another user knows.
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
    """The control messages of one rank. All ranks must make every call, in the same order."""

    def __init__(self, rank: int, size: int, channels: Sequence[Channel]) -> None:
        self.rank = rank
        self.size = size
        self._channels = channels

    def gather_json(self, value: Any) -> list[Any]:
        """Return every rank's `value` in rank order on rank 0; an empty list elsewhere."""
        if self.rank != 0:
            self._channels[0].send(value)
            return []
        return [value, *(channel.receive() for channel in self._channels)]

    def broadcast_json(self, value: Any = None) -> Any:
        """Return rank 0's `value`, on every rank."""
        if self.rank != 0:
            return self._channels[0].receive()
        for channel in self._channels:
            channel.send(value)
        return value

    def allgather_json(self, value: Any) -> list[Any]:
        """Return every rank's `value` in rank order, on every rank."""
        gathered: list[Any] = self.broadcast_json(self.gather_json(value))
        return gathered

    def barrier(self) -> None:
        """Return when every rank has called."""
        self.allgather_json(None)

    def channel(self, rank: int) -> Channel:
        """Return the connection to `rank`: rank 0 has one to each rank, each other rank one to rank 0."""
        for channel in self._channels:
            if channel.peer == rank:
                return channel
        raise RankError(f"rank {self.rank} has no connection to rank {rank}: messages go through rank 0", rank=rank)

    def be_patient(self) -> None:
        """Wait for messages as long as the peer lives: two messages may be hours of training apart."""
        for channel in self._channels:
            channel.be_patient()

    def close(self) -> None:
        """Close the connections; a rank that still waits gets RankError."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> TcpGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join(rank: int, size: int, address: str, secret_file: Path, timeout_s: float = TIMEOUT_S) -> TcpGroup:
    """Connect all ranks of the job. `address` is where rank 0 listens: one of its interfaces, never a wildcard.

    Raises RankError, which names the missing ranks, after `timeout_s`.
    """
    secret = read_secret(secret_file)
    announcement = secret_file.with_name(secret_file.name + ".address")
    if rank == 0:
        return TcpGroup(0, size, _gather_ranks(size, address, secret, announcement, timeout_s))
    deadline_s = time.monotonic() + timeout_s
    while True:
        leader = _read_announcement(announcement, secret)
        if leader is not None:
            with contextlib.suppress(ConnectionRefusedError):
                return TcpGroup(rank, size, [greet(rank, leader, secret, timeout_s)])
        if time.monotonic() > deadline_s:
            raise RankError(f"rank {rank}: rank 0 has not announced itself within {timeout_s:g} s", rank=0)
        time.sleep(0.05)


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of `address`. Raises UsageError for wildcard or foreign addresses."""
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
        own_address = [address, listener.getsockname()[1]]
        write_json(announcement, {"place": own_address, "signature": _signature(own_address, secret)})
        on_failure.callback(remove_file, announcement)
        deadline_s = time.monotonic() + timeout_s
        while len(channels) < size - 1:
            # Past the deadline this must still end in TimeoutError: settimeout refuses negative numbers, and 0 would
            # raise BlockingIOError.
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
        # An earlier job's announcement fails: it had another secret.
        if hmac.compare_digest(document["signature"], _signature(document["place"], secret)):
            address, port = document["place"]
            return str(address), int(port)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


def _signature(address: Sequence[Any], secret: bytes) -> str:
    # `place` keeps this apart from the keys that are made of the same secret (`_keys`).
    return hmac.new(secret, b"place" + json.dumps(list(address)).encode(), hashlib.sha256).hexdigest()


SECRET_FILE = "secret"
RENDEZVOUS_NAMES = r"secret(\.address|\.\d+-\d+)*|\..+\.tmp"
"""The files in a folder in which ranks without MPI connect."""
APPEAR_S = 120.0
"""How long ranks wait for the file that the first of them creates."""


class ControlRequest:
    """A message already sent, or one that `wait` receives."""

    def __init__(self, group: TcpGroup, source: int | None = None, buffer: Array | None = None) -> None:
        self._group, self._source, self._buffer = group, source, buffer

    def wait(self) -> None:
        """Receive the message, if this is a receive."""
        if self._source is not None and self._buffer is not None:
            _fill(self._buffer, self._group.channel(self._source).receive())
            self._source = None

    def test(self) -> bool:
        """Return True: only `wait` receives."""
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
        """Send `buffer` to or from rank 0, the only pairs that are connected. Tags are ignored."""
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
        """Return every rank's `value`, in rank order, on every rank; waits on a connection sleep anyway."""
        return self._group.allgather_json(value)

    def duplicate(self) -> Communicator:
        """Return the same group with connections of its own."""
        return self.split(0, self.rank)

    def split(self, color: int, key: int = 0) -> ControlCommunicator:
        """Return the group of the ranks with the same `color`; its first rank creates a secret for the group."""
        self._num_groups += 1
        answers = self.allgather_json([color, key])
        # As MPI_Comm_split orders a group: by key, then by rank.
        members = [rank for _, rank in sorted((k, rank) for rank, (c, k) in enumerate(answers) if c == color)]
        # A name for each split and color: all parts connect in this folder at the same time.
        secret_file = self._secret_file.with_name(f"{self._secret_file.name}.{self._num_groups}-{color}")
        if self.rank == members[0]:
            remove_file(secret_file)
            create_secret(secret_file)
        self.barrier()
        # The barriers frame the connecting: nobody reads an older secret, and nobody finds this one removed.
        group = ControlCommunicator(members.index(self.rank), len(members), self.address, secret_file)
        self.barrier()
        if self.rank == members[0]:
            remove_file(secret_file)
        return group

    def shared_array(self, shape: Sequence[int], dtype: Any) -> Array:
        """Raise RankError: ranks without MPI share no memory."""
        raise RankError("ranks that talk over tcp share no memory", rank=self.rank)

    def remote_array(self, length: int, dtype: Any) -> RemoteArray:
        """Raise RankError: ranks without MPI cannot access each other's memory."""
        raise RankError("ranks that talk over tcp cannot reach each other's memory", rank=self.rank)

    def failed(self) -> set[int]:
        """Return no ranks: a dead rank shows as a closed connection, which ends the job."""
        return set()

    def survivors(self, lost: AbstractSet[int] = frozenset()) -> Communicator:
        """Return all ranks: none can be lost, since all messages go through rank 0."""
        return self.duplicate()

    def free(self) -> None:
        """Close the connections; a rank that still waits gets RankError."""
        self._group.close()

    def abort(self, exit_code: int) -> NoReturn:
        """Close the connections: the others' next control message fails; the starting process ends the other ranks."""
        self._group.close()
        os._exit(exit_code)


def make_secret(folder: Path) -> None:
    """Write a new secret into `folder`, replacing one of an earlier job."""
    make_folder(folder)
    remove_file(folder / SECRET_FILE)
    create_secret(folder / SECRET_FILE)


def control_world(rank: int, size: int, address: str, folder: Path) -> ControlCommunicator:
    """Connect all ranks of the job; `folder` is visible to every rank, with the job's secret (`make_secret`) in it.

    The secret is removed once all are connected.
    """
    secret_file = folder / SECRET_FILE
    deadline_s = time.monotonic() + APPEAR_S
    while not secret_file.exists():
        if time.monotonic() > deadline_s:
            raise RankError(f"{secret_file} has not appeared within {APPEAR_S:g} s; does every node see it?", rank=0)
        time.sleep(0.05)
    world = ControlCommunicator(rank, size, address, secret_file)
    # No rank may still wait for the file when it is removed.
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

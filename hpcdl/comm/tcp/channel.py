"""One authenticated connection of comm/tcp: JSON messages, each with its length and an HMAC."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
from typing import Any

from hpcdl.core.errors import RankError

TIMEOUT_S = 300.0
"""How long a rank waits for a message; between two of them may lie a step of the slowest rank."""
GREETING_S = 10.0
"""How long a newcomer has to prove itself: one that stays silent must not keep the others out."""
MAX_MESSAGE_BYTES = 64 << 20
_NONCE_BYTES = 32
_PROOF = 2**64 - 1
"""Number of the greeting's proofs; messages count from 0 and never reach it."""
_HEADER = struct.Struct("!I32s")
_GREETING = struct.Struct("!I32s32s")


class Channel:
    """Messages to and from one peer. Keys differ by direction, and messages are numbered."""

    def __init__(self, connection: socket.socket, peer: int, sending_key: bytes, receiving_key: bytes) -> None:
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
        """The next message; RankError where the peer is gone, silent for too long, or not who it was."""
        try:
            length, signature = _HEADER.unpack(_read(self._connection, _HEADER.size))
            if length > MAX_MESSAGE_BYTES:
                raise ConnectionError(f"a message of {length} bytes is announced")
            content = _read(self._connection, length)
        except OSError as error:
            raise self._lost(error) from error
        if not hmac.compare_digest(signature, _mac(self._receiving_key, self._num_received, content)):
            raise RankError(f"a message in the name of rank {self.peer} is not authentic", rank=self.peer)
        self._num_received += 1
        return json.loads(content)

    def be_patient(self) -> None:
        """Wait without end for the next message; the kernel's own probes notice a peer whose host is gone."""
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _lost(self, error: OSError) -> RankError:
        why = "is silent" if isinstance(error, TimeoutError) else "has hung up"
        return RankError(f"rank {self.peer} {why} ({error})", rank=self.peer)


def greet(rank: int, place: tuple[str, int], secret: bytes, timeout_s: float) -> Channel:
    """Connect to rank 0 and prove to know the secret; RankError where rank 0 does not."""
    connection = socket.create_connection(place, timeout=timeout_s)
    try:
        challenge = _read(connection, _NONCE_BYTES)
        own = secrets.token_bytes(_NONCE_BYTES)
        keys = _keys(secret, challenge + own, rank)
        connection.sendall(_GREETING.pack(rank, own, _mac(keys[0], _PROOF, b"worker")))
        if not hmac.compare_digest(_read(connection, 32), _mac(keys[1], _PROOF, b"leader")):
            raise ConnectionError("it does not know the job's secret")
    except OSError as error:
        connection.close()
        raise RankError(f"rank {rank} cannot join rank 0 at {place[0]}:{place[1]}: {error}", rank=0) from error
    return Channel(connection, 0, keys[0], keys[1])


def welcome(connection: socket.socket, secret: bytes, timeout_s: float) -> Channel | None:
    """Challenge a newcomer; None where it does not prove to know the secret in time."""
    connection.settimeout(min(timeout_s, GREETING_S))
    try:
        challenge = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(challenge)
        rank, theirs, proof = _GREETING.unpack(_read(connection, _GREETING.size))
        keys = _keys(secret, challenge + theirs, rank)
        if not hmac.compare_digest(proof, _mac(keys[0], _PROOF, b"worker")):
            return None
        connection.sendall(_mac(keys[1], _PROOF, b"leader"))
    except OSError:
        return None
    connection.settimeout(timeout_s)
    return Channel(connection, rank, keys[1], keys[0])


def _keys(secret: bytes, nonces: bytes, rank: int) -> tuple[bytes, bytes]:
    """Keys of this connection: for what the worker sends, and for what rank 0 sends."""
    base = nonces + rank.to_bytes(4, "big")
    return hmac.digest(secret, b"up" + base, hashlib.sha256), hmac.digest(secret, b"down" + base, hashlib.sha256)


def _mac(key: bytes, number: int, content: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + content, hashlib.sha256)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    content = bytearray()
    while len(content) < num_bytes:
        piece = connection.recv(min(num_bytes - len(content), 1 << 20))
        if not piece:
            raise ConnectionError("the connection ended")
        content += piece
    return bytes(content)

"""Reserves a port for a server of another library, and closes its socket to all but the job's own address.

TensorFlow's gRPC servers listen on every interface (the address is fixed in grpc_server_lib.cc) and authenticate
nobody. A classic BPF program on the listening socket makes the kernel drop what is not sent to the job's address by
one of the job's hosts, before any handshake. Kernels that keep such programs for administrators let every process tie
its socket to one network interface instead (SO_BINDTODEVICE, free since Linux 5.7).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from hpcdl.core.errors import HpcdlError

_SO_ATTACH_FILTER = 26
_SIOCGIFADDR = 0x8915
_LISTENING = "0A"
_LOAD_WORD, _LOAD_HALF, _JUMP_EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06
_PROTOCOL = 0xFFFFF000  # SKF_AD_OFF + SKF_AD_PROTOCOL
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF
_IPV4, _SOURCE, _DESTINATION = 0x0800, 12, 16
_WHOLE = 0xFFFFFFFF
_MAX_PEERS = 2000
"""A program has room for 4096 instructions."""


class ReservedPort:
    """A free port that no other user can take; used as a context manager around the start of the server.

    The reservation listens to nobody. It is bound with SO_REUSEPORT, so a server of the same user that sets it too
    (TensorFlow's does with TF_GRPC_REUSE_PORT) can bind the port beside it. The kernel picks the port: there is no
    moment at which it is known and free to take.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET6 if _has_ipv6() else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if self._socket.family == socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._socket.bind(("", 0))
        self.number = int(self._socket.getsockname()[1])

    def release(self) -> None:
        """Give the reservation back; the server's own binding stays."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def fence(port: int, address: str, peers: Iterable[str]) -> None:
    """Keep this process's listening sockets on `port` to messages from `peers` to `address` (IPv4, dotted).

    HpcdlError where this process does not listen on `port`, or the kernel allows neither way.
    """
    program = _program(address, sorted({address, *peers}))
    sockets = _listening(port)
    if not sockets:
        raise HpcdlError(f"nothing in this process listens on port {port}; it cannot be fenced in")
    with contextlib.ExitStack() as stack:
        for listener in sockets:
            stack.enter_context(listener)
        for listener in sockets:
            try:
                _attach(listener, program)
            except OSError:
                _tie_to_interface(listener, address)


def _attach(listener: socket.socket, program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: number of instructions, padding, pointer.
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, header)


def _tie_to_interface(listener: socket.socket, address: str) -> None:
    interface = "lo" if address.startswith("127.") else _interface_of(address)
    # What a host sends to its own address counts as coming over that address's interface.
    if listener.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 32).rstrip(b"\0") == interface.encode():
        return
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode() + b"\0")
    except OSError as error:
        raise HpcdlError(
            f"the kernel lets nobody fence in a server of TensorFlow's ({error.strerror}); use ring or ps"
        ) from error


def _interface_of(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise HpcdlError(f"no interface of this node has the address {address}; set HPCDL_ADDRESS to one that has")


def _program(address: str, peers: Sequence[str]) -> bytes:
    """Accept IPv4 packets to `address` from one of `peers`; drop all others."""
    accept, drop = (_RETURN, 0, 0, _WHOLE), (_RETURN, 0, 0, 0)
    rows = [
        (_LOAD_HALF, 0, 0, _PROTOCOL),
        (_JUMP_EQUAL, 1, 0, _IPV4),
        drop,
        (_LOAD_WORD, 0, 0, _NETWORK_HEADER + _DESTINATION),
        (_JUMP_EQUAL, 1, 0, _number(address)),
        drop,
        (_LOAD_WORD, 0, 0, _NETWORK_HEADER + _SOURCE),
    ]
    for peer in peers[:_MAX_PEERS]:
        rows += [(_JUMP_EQUAL, 0, 1, _number(peer)), accept]
    # More hosts than a program has room for: the address alone must do.
    rows.append(drop if len(peers) <= _MAX_PEERS else accept)
    return b"".join(struct.pack("HBBI", *row) for row in rows)


def _number(address: str) -> int:
    return int.from_bytes(socket.inet_aton(address), "big")


def _listening(port: int) -> list[socket.socket]:
    """Duplicates of this process's sockets that listen on `port`."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net") / table
        rows = [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []
        inodes |= {f"socket:[{row[9]}]" for row in rows if row[3] == _LISTENING and _port_of(row[1]) == port}
    found: dict[str, socket.socket] = {}
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            target = str(entry.readlink())
            if target in inodes and target not in found:
                found[target] = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed meanwhile
            continue
    return list(found.values())


def _port_of(place: str) -> int:
    return int(place.rpartition(":")[2], 16)

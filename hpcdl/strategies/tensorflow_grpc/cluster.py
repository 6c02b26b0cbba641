"""How the ranks of a grpc-* strategy connect: addresses, reserved ports, TensorFlow's servers and a fence around them.

`GrpcLink` sends one tensor back and forth between two ranks' servers, to measure the cost of a message.

Reserves a port for a server of another library, and closes its socket to all but the job's own addresses.

TensorFlow's gRPC servers listen on every interface (the address is fixed in grpc_server_lib.cc) without authentication.
A classic BPF program on the listening socket makes the kernel drop packets, before any handshake, unless one of the
job's hosts sends them to the job's address. Kernels that reserve such programs for administrators let every process
bind its socket to one network interface instead (SO_BINDTODEVICE, unprivileged since Linux 5.7).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import tensorflow as tf

from hpcdl.core.errors import HpcdlError
from hpcdl.core.protocols import Communicator
from hpcdl.core.units import format_bytes

# Numbers of Linux (asm-generic/socket.h, linux/sockios.h) that Python's socket module lacks.
_SO_ATTACH_FILTER = 26
_SIOCGIFADDR = 0x8915
_LISTENING = "0A"  # TCP_LISTEN, as /proc/net/tcp writes it
# Opcodes of classic BPF: BPF_LD with BPF_ABS by word and half word, BPF_JMP with BPF_JEQ, BPF_RET (linux/filter.h).
_LOAD_WORD, _LOAD_HALF, _JUMP_EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06
_PROTOCOL = 0xFFFFF000  # SKF_AD_OFF + SKF_AD_PROTOCOL
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF
_IPV4, _SOURCE, _DESTINATION = 0x0800, 12, 16  # the Ethernet type, and byte offsets in the IPv4 header
_WHOLE = 0xFFFFFFFF
_MAX_PEERS = 2000
"""A program has room for 4096 instructions."""


class ReservedPort:
    """A free port that no other user can take; used as a context manager around the start of the server.

    The reservation does not listen. It is bound with SO_REUSEPORT, so a server of the same user that also sets it
    (TensorFlow's does with TF_GRPC_REUSE_PORT) can bind the same port. The kernel picks the port, so at no moment is it
    known and free to take.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET6 if _has_ipv6() else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if self._socket.family == socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # reserves the port in IPv4 too
        self._socket.bind(("", 0))
        self.number = int(self._socket.getsockname()[1])

    def release(self) -> None:
        """Release the reservation; the server's own binding stays."""
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
    """Restrict this process's listening sockets on `port` to packets from `peers` to `address` (IPv4, dotted).

    Raises HpcdlError if this process does not listen on `port`, or the kernel allows neither way.
    """
    program = _program(address, sorted({address, *peers}))
    sockets = _listening(port)
    if not sockets:
        raise HpcdlError(f"nothing in this process listens on port {port}; it cannot be fenced in")
    with contextlib.ExitStack() as stack:
        for listener in sockets:
            # All of them first: an error below must close those not yet reached, too.
            stack.enter_context(listener)
        for listener in sockets:
            try:
                _attach(listener, program)
            except OSError:
                _tie_to_interface(listener, address)


def _attach(listener: socket.socket, program: bytes) -> None:
    # A name of its own keeps it alive: the kernel gets only its address.
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: number of instructions, padding, pointer.
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, header)


def _tie_to_interface(listener: socket.socket, address: str) -> None:
    interface = "lo" if address.startswith("127.") else _interface_of(address)
    # The kernel treats packets from a host to its own address as received on that address's interface.
    # A bound socket can be bound again with CAP_NET_RAW only, even to the same interface.
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
            # In struct ifreq a sockaddr_in begins at byte 16, its address four bytes later.
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise HpcdlError(f"no interface of this node has the address {address}; set HPCDL_ADDRESS to one that has")


def _program(address: str, peers: Sequence[str]) -> bytes:
    """Accept IPv4 packets to `address` from one of `peers`; drop all others."""
    accept, drop = (_RETURN, 0, 0, _WHOLE), (_RETURN, 0, 0, 0)
    # Columns: operation; instructions to skip if equal; if not equal; operand.
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
    # More hosts than fit in a program: check the address only.
    rows.append(drop if len(peers) <= _MAX_PEERS else accept)
    return b"".join(struct.pack("HBBI", *row) for row in rows)


def _number(address: str) -> int:
    return int.from_bytes(socket.inet_aton(address), "big")


def _listening(port: int) -> list[socket.socket]:
    """Return duplicates of this process's sockets that listen on `port`."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net") / table
        rows = [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []
        inodes |= {f"socket:[{row[9]}]" for row in rows if row[3] == _LISTENING and _port_of(row[1]) == port}
    sockets: dict[str, socket.socket] = {}
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            target = str(entry.readlink())
            if target in inodes and target not in sockets:
                # A duplicate, so that closing it leaves the server's own descriptor open.
                sockets[target] = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed in the meantime
            continue
    return list(sockets.values())


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


LOOPBACK = "127.0.0.1"
_LISTENS_WITHIN_S = 60.0
_POLL_S = 0.002


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Addresses of all ranks, `address:port` in rank order."""

    rank: int
    endpoints: tuple[str, ...]

    @property
    def address(self) -> str:
        """This rank's address."""
        return self.endpoints[self.rank].rpartition(":")[0]

    @property
    def port(self) -> int:
        """This rank's port."""
        return int(self.endpoints[self.rank].rpartition(":")[2])

    @property
    def addresses(self) -> set[str]:
        """The addresses of the job's hosts."""
        return {address.rpartition(":")[0] for address in self.endpoints}


@contextmanager
def rendezvous(communicator: Communicator) -> Iterator[Cluster]:
    """Agree on an address and port for every rank; start TensorFlow's server inside the block. Collective.

    During the block the port is reserved for this rank, and the server is fenced as soon as it listens. Raises
    HpcdlError if that is not possible: a server open to everyone is worse than none.
    """
    address = getattr(communicator, "address", LOOPBACK)
    with ReservedPort() as port:
        addresses = communicator.allgather_json(f"{address}:{port.number}")
        cluster = Cluster(rank=communicator.rank, endpoints=tuple(addresses))
        os.environ["TF_GRPC_REUSE_PORT"] = "true"
        guard = _Guard(cluster)
        # A thread, because TensorFlow's server listens before its constructor returns.
        guard.start()
        yield cluster
        guard.finish()


class _Guard(threading.Thread):
    """Waits until this process listens on its port, and fences it at once."""

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
        """Wait for the fence. Raises HpcdlError if it could not be set."""
        self.join()
        if self._problem is not None:
            raise self._problem


def start_server(communicator: Communicator, num_workers: int) -> Any:
    """Start this rank's server: a `worker` on the first `num_workers` ranks, else a `ps`; collective over all."""
    with rendezvous(communicator) as cluster:
        jobs = {"worker": list(cluster.endpoints[:num_workers]), "ps": list(cluster.endpoints[num_workers:])}
        serves = cluster.rank >= num_workers
        # The server does not see the threads that are set through tf.config.
        config = tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=tf.config.threading.get_intra_op_parallelism_threads(),
            inter_op_parallelism_threads=tf.config.threading.get_inter_op_parallelism_threads(),
        )
        return tf.distribute.Server(
            tf.train.ClusterSpec({job: addresses for job, addresses in jobs.items() if addresses}),
            job_name="ps" if serves else "worker",
            task_index=cluster.rank - num_workers if serves else cluster.rank,
            config=config,
        )


v1 = tf.compat.v1
TRIPS = 10
"""Round trips in one call of the session, because the call has a cost of its own."""
_PATTERN = 251


class GrpcLink:
    """The link between the two ranks of `pair`. The constructor is collective; only rank 0 calls the other methods."""

    def __init__(self, pair: Communicator) -> None:
        self._server = start_server(pair, pair.size)
        # Without TensorFlow's graph optimizer, which would remove the transfers of the tensor as redundant.
        self._config = v1.ConfigProto()
        self._config.graph_options.rewrite_options.disable_meta_optimizer = True

    def trips(self, num_bytes: int, repeats: int) -> tuple[list[float], list[float]]:
        """Return the seconds of half a round trip, and of a session call without its trips, `repeats` times.

        Both follow from the difference between calls with one and with many trips. Raises HpcdlError if the bytes
        returned differ from those sent.
        """
        with tf.Graph().as_default(), v1.Session(self._server.target, config=self._config) as session:
            with v1.device(_task(0)):
                values = tf.tile(tf.cast(tf.range(_PATTERN), tf.uint8), [num_bytes // _PATTERN + 1])[:num_bytes]
                source = v1.get_variable(f"source_{num_bytes}", initializer=values, use_resource=False)
            backs, back = [], source
            for _ in range(TRIPS):
                with v1.device(_task(1)):
                    on_second = tf.identity(back)
                with v1.device(_task(0)):
                    back = tf.identity(on_second)
                backs.append(back)
            with v1.device(_task(0)):
                same = tf.reduce_all(tf.equal(source, back))
            session.run(source.initializer)
            if not session.run(same):
                raise HpcdlError(f"other bytes came back of {format_bytes(num_bytes)} over gRPC than had left")
            halves, calls = [], []
            for repeat in range(repeats + 1):
                one_s, many_s = (_timed(session, operation.op) for operation in (backs[0], backs[-1]))
                # The first call also sets up the transfer, so it does not count.
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

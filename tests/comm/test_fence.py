"""A fenced socket is open to the job's hosts at the job's address, and closed to everybody else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from hpcdl.comm.fence import fence
from hpcdl.comm.ports import ReservedPort
from hpcdl.core.errors import HpcdlError

WAIT_S = 0.5


def answers(address: str, port: int, source: str = "") -> bool:
    with socket.socket() as probe:
        probe.settimeout(WAIT_S)
        if source:
            probe.bind((source, 0))
        try:
            probe.connect((address, port))
            return probe.recv(2) == b"hi"
        except OSError:
            return False


def greets(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.sendall(b"hi")


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A server on every interface, as TensorFlow's."""
    with socket.socket(request.param) as listener:
        if request.param == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("", 0))
        listener.listen()
        threading.Thread(target=greets, args=(listener,), daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_only_the_own_address_answers(port: int) -> None:
    assert answers("127.0.0.1", port)
    assert answers("127.0.0.2", port)
    fence(port, "127.0.0.1", [])
    assert answers("127.0.0.1", port)
    assert not answers("127.0.0.2", port)


def test_only_the_jobs_hosts_come_in(port: int) -> None:
    fence(port, "127.0.0.1", ["127.0.0.5", "127.0.0.6"])
    assert answers("127.0.0.1", port, source="127.0.0.5")
    assert answers("127.0.0.1", port, source="127.0.0.6")
    assert not answers("127.0.0.1", port, source="127.0.0.7")


def test_a_job_of_very_many_hosts_is_still_kept_to_its_address(port: int) -> None:
    fence(port, "127.0.0.1", [f"10.{number // 256}.{number % 256}.1" for number in range(3000)])
    assert answers("127.0.0.1", port)
    assert not answers("127.0.0.2", port)


def test_a_port_that_nobody_listens_on_cannot_be_fenced() -> None:
    with ReservedPort() as reserved, pytest.raises(HpcdlError, match="nothing in this process listens"):
        fence(reserved.number, "127.0.0.1", [])


def test_a_reserved_port_is_taken_for_strangers_and_free_for_the_server() -> None:
    with ReservedPort() as reserved:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", reserved.number))
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            server.bind(("0.0.0.0", reserved.number))
    with socket.socket() as later:
        later.bind(("127.0.0.1", reserved.number))

"""A fenced socket is open to the job's hosts at the job's address, and closed to all others."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator

import pytest

from hpcdl.core.errors import HpcdlError
from hpcdl.strategies.tensorflow_grpc.cluster import ReservedPort, _attach, _listening, _program, fence

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


def programs_allowed() -> bool:
    """Return whether this kernel accepts socket filters from this user."""
    with socket.socket() as plain:
        try:
            _attach(plain, _program("127.0.0.1", ["127.0.0.1"]))
        except PermissionError:
            return False
    return True


filters = pytest.mark.skipif(not programs_allowed(), reason="this kernel keeps socket filters for administrators")


@filters
def test_only_the_own_address_answers(port: int) -> None:
    assert answers("127.0.0.1", port)
    assert answers("127.0.0.2", port)
    fence(port, "127.0.0.1", [])
    assert answers("127.0.0.1", port)
    assert not answers("127.0.0.2", port)


@filters
def test_only_the_jobs_hosts_come_in(port: int) -> None:
    fence(port, "127.0.0.1", ["127.0.0.5", "127.0.0.6"])
    assert answers("127.0.0.1", port, source="127.0.0.5")
    assert answers("127.0.0.1", port, source="127.0.0.6")
    assert not answers("127.0.0.1", port, source="127.0.0.7")


@filters
def test_a_job_of_very_many_hosts_is_still_kept_to_its_address(port: int) -> None:
    fence(port, "127.0.0.1", [f"10.{number // 256}.{number % 256}.1" for number in range(3000)])
    assert answers("127.0.0.1", port)
    assert not answers("127.0.0.2", port)


def own_addresses() -> list[str]:
    """Return this host's IPv4 addresses other than the loopback's."""
    answer = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True)
    return [address for address in answer.stdout.split() if ":" not in address]


def refused(listener: socket.socket, program: bytes) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_where_programs_are_for_administrators_the_socket_is_tied_to_its_interface(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcdl.strategies.tensorflow_grpc.cluster._attach", refused)
    fence(port, "127.0.0.1", [])
    assert answers("127.0.0.1", port)
    for listener in _listening(port):
        with listener:
            device = listener.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 32)
            assert device.rstrip(b"\0") == b"lo"


def test_tied_to_another_interface_the_loopback_is_closed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcdl.strategies.tensorflow_grpc.cluster._attach", refused)
    for address in own_addresses()[:1]:
        fence(port, address, [])
        fence(port, address, [])
        assert answers(address, port), "ranks of the same node must meet"
        assert not answers("127.0.0.1", port)
    with pytest.raises(HpcdlError, match="no interface of this node has"):
        fence(port, "203.0.113.7", [])


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

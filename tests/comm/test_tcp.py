"""Control messages without MPI: who may join, what arrives, and what happens when a rank is gone."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcdl.comm import tcp
from hpcdl.comm.tcp import greet
from hpcdl.core.errors import RankError, UsageError

HERE = "127.0.0.1"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    tcp.create_secret(path)
    return path


def together(size: int, secret: Path, body: Callable[[tcp.TcpGroup], Any], timeout_s: float = 20.0) -> list[Any]:
    """Return what `body` returned, or raised, on each of `size` threads."""
    results: list[Any] = [None] * size

    def one(rank: int) -> None:
        try:
            with tcp.join(rank, size, HERE, secret, timeout_s) as group:
                results[rank] = body(group)
        except (RankError, UsageError) as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("size", [1, 2, 5])
def test_everybody_learns_everything(secret: Path, size: int) -> None:
    def body(group: tcp.TcpGroup) -> list[Any]:
        gathered = group.gather_json({"rank": group.rank})
        reported = group.broadcast_json("ports" if group.rank == 0 else None)
        group.barrier()
        return [len(gathered), reported, group.allgather_json([group.rank, "ü" * 100_000])[-1][0]]

    assert together(size, secret, body) == [[size if rank == 0 else 0, "ports", size - 1] for rank in range(size)]


def test_the_secret_is_for_this_user_alone(tmp_path: Path, secret: Path) -> None:
    assert secret.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        tcp.create_secret(secret)
    secret.chmod(0o644)
    with pytest.raises(UsageError, match="not this user's alone"):
        tcp.read_secret(secret)
    link = tmp_path / "link"
    link.symlink_to(secret)
    with pytest.raises(UsageError, match="cannot read"):
        tcp.read_secret(link)
    first, second = tmp_path / "a", tmp_path / "b"
    tcp.create_secret(first)
    tcp.create_secret(second)
    assert first.read_text() != second.read_text()


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "", "*"])
def test_no_wildcard(secret: Path, address: str) -> None:
    with pytest.raises(UsageError, match="every interface"):
        tcp.join(0, 2, address, secret, 1.0)


def test_only_the_job_can_join(secret: Path) -> None:
    """Only the job's ranks can join: strangers with a wrong secret, garbage or without a message disturb nothing."""
    announced = secret.with_name("secret.address")
    outcomes: list[str] = []

    def strangers() -> None:
        while not announced.exists():
            time.sleep(0.01)
        place = tuple(json.loads(announced.read_text())["place"])
        try:
            greet(1, place, b"guessed", 5.0)
        except RankError as error:
            outcomes.append(str(error))
        with contextlib.suppress(ConnectionError), socket.create_connection(place) as garbage:
            garbage.sendall(os.urandom(200))
            garbage.recv(1000)
        outcomes.append("garbage")
        with tcp.join(1, 2, HERE, secret, 10.0) as group:
            results.append(group.allgather_json("rank 1"))

    results: list[Any] = []
    thread = threading.Thread(target=strangers)
    thread.start()
    with tcp.join(0, 2, HERE, secret, 20.0) as group:
        assert group.allgather_json("rank 0") == ["rank 0", "rank 1"]
        thread.join(30)
    assert len(outcomes) == 2 and "cannot join rank 0" in outcomes[0]
    assert results == [["rank 0", "rank 1"]]
    assert not announced.exists()


def test_an_announcement_of_another_job_is_not_followed(tmp_path: Path, secret: Path) -> None:
    with tcp.listen(HERE) as foreign:
        place = [HERE, foreign.getsockname()[1]]
        secret.with_name("secret.address").write_text(json.dumps({"place": place, "signature": "0" * 64}))
        with pytest.raises(RankError, match="has not announced itself"):
            tcp.join(1, 2, HERE, secret, 0.3)


def test_a_changed_message_is_refused(secret: Path) -> None:
    def body(group: tcp.TcpGroup) -> Any:
        if group.rank == 1:
            channel = group._channels[0]
            channel._num_sent += 1  # as if a message had been lost or sent twice
            channel.send("hello")
            return None
        return group.gather_json(None)

    results = together(2, secret, body)
    assert isinstance(results[0], RankError) and "not authentic" in str(results[0])


def test_missing_ranks_are_named(secret: Path) -> None:
    with pytest.raises(RankError, match=r"ranks 1, 2 have not come within 0\.3 s") as caught:
        tcp.join(0, 3, HERE, secret, 0.3)
    assert caught.value.rank == 1


def test_a_rank_that_hangs_up_is_named(secret: Path) -> None:
    def body(group: tcp.TcpGroup) -> Any:
        if group.rank == 2:
            return None
        return group.allgather_json(group.rank)

    results = together(3, secret, body)
    assert isinstance(results[0], RankError) and results[0].rank == 2
    assert isinstance(results[1], RankError), "rank 0 left, so rank 1 must be woken"


def test_a_silent_rank_is_named(secret: Path) -> None:
    release = threading.Event()

    def body(group: tcp.TcpGroup) -> Any:
        if group.rank == 1:
            release.wait(60)
            return None
        try:
            return group.gather_json(None)
        finally:
            release.set()

    results = together(2, secret, body, timeout_s=3.0)
    assert isinstance(results[0], RankError) and "rank 1 is silent" in str(results[0])

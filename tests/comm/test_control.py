"""Control messages as a Communicator: what training requires of one, on real connections between threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from hpcdl.comm.tcp import SECRET_FILE, ControlCommunicator, control_world, make_secret
from hpcdl.core.errors import RankError

LOOPBACK = "127.0.0.1"


def run(num_ranks: int, folder: Path, body: Callable[[ControlCommunicator], Any]) -> list[Any]:
    make_secret(folder)
    results: list[Any] = [None] * num_ranks

    def rank(number: int) -> None:
        world = control_world(number, num_ranks, LOOPBACK, folder)
        try:
            results[number] = body(world)
        except RankError as error:
            results[number] = error
        finally:
            world.free()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def test_sums_and_broadcasts_are_the_same_on_every_rank(tmp_path: Path) -> None:
    def body(world: ControlCommunicator) -> tuple[list[float], list[int], list[Any]]:
        sums = numpy.array([[0.1, 1.0], [world.rank, 1e-17]])
        world.allreduce(sums)
        reported = numpy.arange(3) * (world.rank + 1)
        world.broadcast(reported, root=2)
        return sums.ravel().tolist(), reported.tolist(), world.allgather_json({"rank": world.rank})

    results = run(3, tmp_path, body)
    assert results[0] == results[1] == results[2]
    assert results[0][0] == [0.1 + 0.1 + 0.1, 3.0, 3.0, 3e-17]
    assert results[0][1:] == ([0, 3, 6], [{"rank": 0}, {"rank": 1}, {"rank": 2}])


def test_groups_talk_apart_and_leave_no_secret(tmp_path: Path) -> None:
    def body(world: ControlCommunicator) -> list[Any]:
        group = world.split(world.rank % 2)
        twin = group.duplicate()
        try:
            return [group.rank, group.size, twin.allgather_json(world.rank), group.allgather_json(-world.rank)]
        finally:
            world.barrier()
            twin.free()
            group.free()

    assert run(3, tmp_path, body) == [[0, 2, [0, 2], [0, -2]], [0, 1, [1], [-1]], [1, 2, [0, 2], [0, -2]]]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(SECRET_FILE)]


def test_messages_to_and_from_rank_0(tmp_path: Path) -> None:
    def body(world: ControlCommunicator) -> float:
        number = numpy.array([world.rank + 0.5])
        if world.rank == 0:
            world.irecv(number, 1).wait()
        else:
            world.isend(number, 0).wait()
        return float(number[0])

    assert run(2, tmp_path, body) == [1.5, 1.5]


def test_a_rank_that_hangs_up_wakes_the_others(tmp_path: Path) -> None:
    def body(world: ControlCommunicator) -> None:
        if world.rank != 1:
            world.allgather_json(None)

    first, _, third = run(3, tmp_path, body)
    assert isinstance(first, RankError)
    assert isinstance(third, RankError)


def test_no_memory_is_shared(tmp_path: Path) -> None:
    (found,) = run(1, tmp_path, lambda world: world.shared_array((1,), "f4"))
    assert isinstance(found, RankError)


def test_a_secret_that_an_earlier_job_left_is_replaced(tmp_path: Path) -> None:
    make_secret(tmp_path)
    before = (tmp_path / SECRET_FILE).read_text()
    make_secret(tmp_path)
    assert (tmp_path / SECRET_FILE).read_text() != before
    assert (tmp_path / SECRET_FILE).stat().st_mode & 0o777 == 0o600


def test_lengths_must_agree(tmp_path: Path) -> None:
    def body(world: ControlCommunicator) -> str:
        try:
            world.allreduce(numpy.zeros(2 + world.rank))
        except Exception as error:  # noqa: BLE001  the message is what is tested
            return str(error)
        return ""

    assert "2 numbers were sent where 3 are expected" in run(2, tmp_path, body)[1]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_world_of_any_size_has_its_ranks_in_order(tmp_path: Path, num_ranks: int) -> None:
    assert run(num_ranks, tmp_path, lambda world: [world.rank, world.size]) == [
        [r, num_ranks] for r in range(num_ranks)
    ]

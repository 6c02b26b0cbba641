"""Agreement between the workers of a synchronous run; ranks as threads."""

from __future__ import annotations

import os
import signal
import time

from hpcdl.checkpoint.interval import CheckpointInterval
from hpcdl.comm import threads
from hpcdl.core.processes.streams import StopRequest
from hpcdl.core.protocols import Communicator
from hpcdl.strategies.base.strategy import Worker
from hpcdl.strategies.parameter_server.placement import NUM_FLAGS
from hpcdl.supervision.control import Control, ControlFlags, Room


def control_of(
    communicator: Communicator, stop: StopRequest, time_limit_s: float | None, save_every_s: float
) -> Control:
    interval = CheckpointInterval(save_every_s, node_mtbf_s=1.0, num_nodes=1)
    return Control(communicator, stop, Worker(), interval=interval, time_limit_s=time_limit_s, room=Room(None))


def steps_until(
    communicator: Communicator, *, asks: int | None = None, time_limit_s: float | None = None, save_every_s: float = 1e9
) -> tuple[int, ControlFlags]:
    """Return the step and the wishes that the group agrees on, at 5 ms a step; rank 1 asks to stop at step `asks`."""
    stop = StopRequest()
    control = control_of(communicator, stop, time_limit_s, save_every_s)
    for step in range(2000):
        time.sleep(0.005)
        if communicator.rank == 1 and step == asks:
            stop.asked = True
        flags = control.after_steps()
        if flags.stop or flags.save:
            return step, flags
    raise AssertionError("nothing was agreed on")


def test_a_signal_to_one_rank_stops_all_at_the_same_step() -> None:
    results = threads.run(3, lambda communicator: steps_until(communicator, asks=7))
    assert len({step for step, _ in results}) == 1
    assert all(flags.stop and flags.reason == "a signal" for _, flags in results)
    assert results[0][0] >= 7


def test_the_time_limit_stops_all() -> None:
    results = threads.run(2, lambda communicator: steps_until(communicator, time_limit_s=0.2))
    assert len({step for step, _ in results}) == 1
    assert {flags.reason for _, flags in results} == {"the time limit"}


def test_rank_0_decides_when_to_save() -> None:
    results = threads.run(2, lambda communicator: steps_until(communicator, save_every_s=0.1))
    assert len({step for step, _ in results}) == 1
    assert all(flags.save and not flags.stop for _, flags in results)


def test_signals_are_remembered_instead_of_died_of() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        for number in before:
            stop = StopRequest()
            stop.install()
            os.kill(os.getpid(), number)
            assert stop.asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_parameter_servers_have_room_for_every_wish() -> None:
    """Parameter servers have space for all wishes of `Control`, which they add up in headers of fixed length."""
    (flags,) = threads.run(1, lambda alone: control_of(alone, StopRequest(), None, 1e9)._own())
    assert len(flags) == NUM_FLAGS

"""An impaired network: nothing is lost or changed, messages that cross the impairment wait, the others arrive."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from hpcdl.collectives.slices import Workspace
from hpcdl.collectives.table import COLLECTIVES
from hpcdl.comm.observed import Observed, observe
from hpcdl.comm.threads import ThreadCommunicator, run
from hpcdl.faults import network
from hpcdl.faults.network import Impaired, Impairment

HELD_S = 0.3
LONG_S = 60.0
"""Seconds: messages that cross no impairment never wait that long, even on a busy machine."""
MIBIT_100 = 12.5e6


def over(communicator: ThreadCommunicator, network: Impairment) -> Observed:
    return observe(communicator).over(lambda inner: Impaired(inner, network, range(inner.size)))


def impaired(body: Callable[[Observed, Impairment], Any], num_ranks: int) -> list[Any]:
    def on_rank(communicator: ThreadCommunicator) -> Any:
        network = Impairment(communicator.rank)
        return body(over(communicator, network), network)

    return run(num_ranks, on_rank)


def part_for_a_while(network: Impairment, *ranks: int, held_s: float = HELD_S) -> float:
    """Cut `ranks` off for `held_s`; return when that began."""
    began_s = time.monotonic()
    network.parts = (frozenset(ranks),)
    healing = threading.Timer(held_s, lambda: setattr(network, "parts", ()))
    healing.daemon = True
    healing.start()
    return began_s


@pytest.mark.parametrize("how", ["message", "barrier", "all-reduce", "part of a group", "remote memory"])
def test_what_crosses_a_partition_waits_until_it_heals(how: str) -> None:
    waits_all = how in ("barrier", "all-reduce")

    def body(group: Observed, network: Impairment) -> float:
        pair = group.split(0 if group.rank < 2 else 1)
        memory = group.remote_array(4, numpy.float64)
        group.barrier()
        began_s = part_for_a_while(network, 1, held_s=HELD_S if group.rank < 2 or waits_all else LONG_S)
        if how == "message" and group.rank < 2:
            buffer = numpy.full(4, float(group.rank))
            requests = [group.isend(buffer, 1 - group.rank), group.irecv(incoming := buffer.copy(), 1 - group.rank)]
            for request in requests:
                request.wait()
            assert (incoming == 1 - group.rank).all()
        elif how == "barrier":
            group.barrier()
        elif how == "all-reduce":
            group.allreduce(total := numpy.ones(4))
            assert (total == 3).all()
        elif how == "part of a group":
            pair.barrier()
        elif how == "remote memory" and group.rank < 2:
            memory.add(1 - group.rank, numpy.ones(4))
        took_s = time.monotonic() - began_s
        network.parts = ()
        group.barrier()
        return took_s

    took_s = impaired(body, 3)
    assert min(took_s[:2]) >= HELD_S
    if not waits_all:
        assert took_s[2] < LONG_S, "rank 2 has nobody on the other side"


def test_the_first_of_several_is_one_that_is_not_cut_off() -> None:
    """The first of several is a message that is not cut off: rank 1 sent first, but rank 2 is served first."""

    def body(group: Observed, network: Impairment) -> list[int]:
        buffers = [numpy.zeros(1), numpy.zeros(1)]
        if group.rank:
            if group.rank == 2:
                time.sleep(HELD_S / 3)
            group.isend(buffers[0], 0).wait()
            return []
        network.parts = (frozenset([1]),)
        requests = [group.irecv(buffers[0], 1), group.irecv(buffers[1], 2)]
        first = group.wait_any(requests)
        network.parts = ()
        left = [request for index, request in enumerate(requests) if index != first]
        group.wait_any(left)
        return [first]

    assert impaired(body, 3)[0] == [1]


@pytest.mark.parametrize("sends", [True, False])
def test_a_slow_link_takes_its_time_in_each_direction(sends: bool) -> None:
    num_bytes, messages = 250_000, 3

    def body(group: Observed, network: Impairment) -> float:
        if group.rank == 0:
            network.slow_down(frozenset([0]), MIBIT_100)
        buffers = [numpy.zeros(num_bytes, numpy.uint8) for _ in range(messages)]
        began_s = time.monotonic()
        act = group.isend if (group.rank == 0) == sends else group.irecv
        for request in [act(buffer, 1 - group.rank) for buffer in buffers]:
            request.wait()
        return time.monotonic() - began_s

    assert impaired(body, 2)[0] >= messages * num_bytes / MIBIT_100


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(COLLECTIVES))
def test_every_all_reduce_gives_the_same_sums(name: str) -> None:
    def body(group: Observed, network: Impairment) -> bytes:
        if group.rank == 0:
            network.slow_down(frozenset([0]), 50e6)
        part_for_a_while(network, 1)
        values = numpy.arange(9000, dtype=numpy.float32) * (group.rank + 1)
        workspace = Workspace()
        COLLECTIVES.load(name)(group, values, workspace)
        workspace.close()
        assert numpy.allclose(values, 6 * numpy.arange(9000))
        return values.tobytes()

    assert len({*impaired(body, 3)}) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what undoes it ends later
@pytest.mark.parametrize("hangs_at", ["show", "add"])
def test_a_tc_that_hangs_leaves_the_slow_link_to_hpcdl(
    hangs_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tc").write_text(f"#!/bin/sh\n[ $2 = {hangs_at} ] && exec sleep 60\ntrue\n")
    (tmp_path / "tc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(network, "INFINIBAND", tmp_path / "none")
    monkeypatch.setattr(network, "_only_device", lambda: "eth0")
    monkeypatch.setattr(network, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(network, "_AWAY", "")
    assert network.shape(1e6) == ""

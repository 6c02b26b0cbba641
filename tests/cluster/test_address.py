"""The address at which a rank without MPI can be reached."""

from __future__ import annotations

import socket

import pytest

from hpcdl.cluster.environment import Placement, job_address


def placement(local_size: int) -> Placement:
    return Placement(launcher="slurm", rank=1, size=4, local_rank=0, local_size=local_size)


def test_ranks_of_one_node_use_the_loopback() -> None:
    assert job_address(placement(4), {"HPCDL_ADDRESS": "10.0.0.9"}) == "127.0.0.1"


def test_an_interface_can_be_named() -> None:
    assert job_address(placement(2), {"HPCDL_ADDRESS": "10.0.0.9"}) == "10.0.0.9"


def test_a_name_of_the_loopback_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert job_address(placement(2), {"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}) == "127.0.0.1"
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.1.2.3")
    assert job_address(placement(2), {}) == "10.1.2.3"

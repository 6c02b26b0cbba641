"""Topologies and engines shared by the tests of this folder."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import pytest

from hpcdl.node.engine import Engine
from hpcdl.node.machines import read_machine
from hpcdl.node.topology import Topology

# As the command does: the search's matrices are small, so BLAS threads would only disturb each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def machine() -> Callable[[str], Topology]:
    """The topology of a known machine, by name."""
    return lambda name: read_machine(name).topology


@pytest.fixture(scope="session")
def gpu_node(machine: Callable[[str], Topology]) -> Topology:
    """Two sockets of 24 cores with two GPUs each; as on many nodes, GPUs are numbered in reverse order of sockets."""
    topology = machine("stampede2-skx")
    first, second = (
        tuple(cpu for core in topology.cores if core.package == package for cpu in core.cpus) for package in (0, 1)
    )
    near = (second, second, first, first)
    return dataclasses.replace(topology, devices={"NVIDIA H200": 4}, near_devices=near)


@pytest.fixture(scope="session")
def stock() -> Engine:
    """A stock wheel on a processor with AVX-512."""
    return Engine(
        package="tensorflow", version="2.21.0", threading="own pool", isa_caps=("default", "AVX2"),
        allocators=("default", "glibc-tuned", "glibc-huge"),
    )  # fmt: skip


@pytest.fixture(scope="session")
def openmp() -> Engine:
    """An MKL/OpenMP build."""
    return Engine(
        package="intel-tensorflow", version="2.14.0", threading="OpenMP", isa_caps=("default",), allocators=("default",)
    )

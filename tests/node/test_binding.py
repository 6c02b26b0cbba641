from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.core.errors import UsageError
from hpcdl.node.binding import PLACEMENTS, cpus_of, place_ranks
from hpcdl.node.machines import machine_names, read_machine
from hpcdl.node.topology import Topology, restricted

Machine = Callable[[str], Topology]
TOPOLOGIES = {name: read_machine(name).topology for name in machine_names()}


@given(
    name=st.sampled_from(sorted(TOPOLOGIES)), ranks=st.integers(1, 40), cores_each=st.integers(1, 80),
    binding=st.sampled_from(sorted(PLACEMENTS)), free=st.integers(0, 8),
)  # fmt: skip
def test_ranks_never_share_a_core_and_all_get_as_many(
    name: str, ranks: int, cores_each: int, binding: str, free: int
) -> None:
    topology = TOPOLOGIES[name]
    available = len(topology.cores) - free
    if ranks > available:
        with pytest.raises(UsageError, match="cannot have a core each"):
            place_ranks(topology, ranks, cores_each, binding, free)
        return
    placed = place_ranks(topology, ranks, cores_each, binding, free)
    indices = [core.index for cores in placed for core in cores]
    assert len(placed) == ranks
    assert all(placed)
    assert len(indices) == len(set(indices))
    assert max(indices) < available
    assert max(map(len, placed)) <= max(cores_each, 1)


def indices(topology: Topology, ranks: int, cores_each: int, binding: str) -> list[list[int]]:
    return [[core.index for core in cores] for cores in place_ranks(topology, ranks, cores_each, binding)]


def test_compact_packs(machine: Machine) -> None:
    assert indices(machine("stampede2-skx"), 2, 4, "compact") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_scatter_uses_every_package_and_tile(machine: Machine) -> None:
    assert indices(machine("stampede2-skx"), 1, 4, "scatter") == [[0, 24, 1, 25]]
    assert indices(machine("theta-knl"), 1, 4, "scatter") == [[0, 2, 4, 6]]  # one core of each tile first


def test_balanced_spreads_each_rank_over_its_own_stretch(machine: Machine) -> None:
    assert indices(machine("stampede2-skx"), 2, 4, "balanced") == [[0, 6, 12, 18], [24, 30, 36, 42]]


def test_ranks_share_out_all_cores_near_their_devices(gpu_node: Topology) -> None:
    placed = indices(gpu_node, 4, 1, "devices")
    assert placed == [[*range(24, 36)], [*range(36, 48)], [*range(12)], [*range(12, 24)]]
    assert indices(gpu_node, 2, 1, "devices") == placed[:2], "ranks take devices in turn"
    assert indices(gpu_node, 6, 1, "devices")[0] == [*range(24, 30)], "four share that socket"


@pytest.mark.parametrize("near", [(), ((), ()), ((0, 1), (0, 1, 2, 3)), ((0,), (0,))])
def test_without_sure_nearness_ranks_share_out_the_numa_nodes(
    near: tuple[tuple[int, ...], ...], machine: Machine
) -> None:
    """Ranks share out the NUMA nodes if nearness is unknown or ambiguous, or if cores are fewer than ranks."""
    topology = dataclasses.replace(machine("stampede2-skx"), devices={"GPU": 2}, near_devices=near)
    assert indices(topology, 2, 1, "devices") == [[*range(24)], [*range(24, 48)]]


def test_numa_keeps_ranks_inside_uneven_nodes(machine: Machine) -> None:
    topology = machine("stampede2-knl-snc4-flat")
    for ranks in (4, 8, 12, 34):
        for cores in place_ranks(topology, ranks, 99, "numa"):
            assert len({core.numa_node for core in cores}) == 1
    assert [len(cores) for cores in place_ranks(topology, 4, 16, "numa")] == [16, 16, 16, 16]


def test_numa_with_fewer_ranks_than_nodes_takes_whole_nodes(machine: Machine) -> None:
    placed = place_ranks(machine("stampede3-spr-hbm"), 2, 56, "numa")
    assert [sorted({core.numa_node for core in cores}) for cores in placed] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_only_allowed_cpus_are_given(machine: Machine) -> None:
    topology = restricted(machine("stampede2-skx"), [0, 1, 2, 3, 48])  # core 0 has both threads, the others one
    placed = place_ranks(topology, 2, 2, "compact")
    assert [cpus_of(cores, 2) for cores in placed] == [(0, 1, 48), (2, 3)]


def test_nothing_is_bound_on_request(machine: Machine) -> None:
    assert place_ranks(machine("generic"), 500, 1, "none") == []

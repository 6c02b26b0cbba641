"""Which cores each rank of a node gets: pure functions from a topology to disjoint lists of cores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from hpcdl.core.errors import UsageError
from hpcdl.node.topology.model import Core, Topology

Item = TypeVar("Item")
Placement = Callable[[Sequence[Core], int, int], list[list[Core]]]


def place_ranks(topology: Topology, ranks: int, cores_each: int, binding: str, free_cores: int = 0) -> list[list[Core]]:
    """The cores of each local rank: `cores_each` apiece, or their fair share where that is less; never shared.

    The `free_cores` highest cores stay with the system: so does Slurm's core specialization. UsageError where ranks
    outnumber the cores; an empty list means that nothing is bound.
    """
    cores = topology.usable_cores
    cores = cores[: len(cores) - free_cores] if free_cores else cores
    if binding == "none":
        return []
    if ranks > len(cores):
        raise UsageError(
            f"{ranks} ranks cannot have a core each: {len(topology.usable_cores)} cores may be used and {free_cores} "
            "are left free; ask for fewer ranks per node, or binding 'none'"
        )
    return PLACEMENTS[binding](cores, ranks, max(min(cores_each, len(cores) // ranks), 1))


def _compact(cores: Sequence[Core], ranks: int, cores_each: int) -> list[list[Core]]:
    """One rank after the other, on consecutive cores."""
    return [list(cores[rank * cores_each : (rank + 1) * cores_each]) for rank in range(ranks)]


def _scatter(cores: Sequence[Core], ranks: int, cores_each: int) -> list[list[Core]]:
    """Cores are dealt in turn from every NUMA node, and within it from every tile, so that a rank uses all caches."""
    nodes = sorted({core.numa_node for core in cores})
    stacks = [_by_tile([core for core in cores if core.numa_node == node]) for node in nodes]
    dealt = [stack[turn] for turn in range(max(map(len, stacks))) for stack in stacks if turn < len(stack)]
    return _compact(dealt, ranks, cores_each)


def _balanced(cores: Sequence[Core], ranks: int, cores_each: int) -> list[list[Core]]:
    """Every rank has an equal stretch of the node and spreads its cores evenly over that."""
    return [_spread(part, cores_each) for part in _equal_parts(cores, ranks)]


def _numa(cores: Sequence[Core], ranks: int, cores_each: int) -> list[list[Core]]:
    """No rank crosses NUMA nodes while there are ranks enough; uneven nodes share out the ranks by their cores."""
    nodes = sorted({core.numa_node for core in cores})
    by_node = [[core for core in cores if core.numa_node == node] for node in nodes]
    if ranks < len(nodes):
        parts = [[core for group in groups for core in group] for groups in _equal_parts(by_node, ranks)]
        return [part[:cores_each] for part in parts]
    counts = [1] * len(nodes)
    for _ in range(ranks - len(nodes)):
        loads = [len(group) / (count + 1) for group, count in zip(by_node, counts, strict=True)]
        counts[loads.index(max(loads))] += 1
    if any(count > len(group) for group, count in zip(by_node, counts, strict=True)):
        return _balanced(cores, ranks, cores_each)
    return [
        part[:cores_each]
        for group, count in zip(by_node, counts, strict=True)
        for part in _equal_parts(group, count)
    ]  # fmt: skip


PLACEMENTS: dict[str, Placement] = {"compact": _compact, "scatter": _scatter, "balanced": _balanced, "numa": _numa}


def cpus_of(cores: Sequence[Core], threads_per_core: int) -> tuple[int, ...]:
    """The first `threads_per_core` hardware threads of each core, ascending."""
    return tuple(sorted(cpu for core in cores for cpu in core.cpus[:threads_per_core]))


def cores_needed(threads: int, threads_per_core: int) -> int:
    """Cores that `threads` threads fill."""
    return math.ceil(threads / threads_per_core)


def _by_tile(cores: Sequence[Core]) -> list[Core]:
    """First one core of every tile, then the second ones."""
    turns: dict[int, int] = {}
    keyed = []
    for core in cores:
        turns[core.tile] = turns.get(core.tile, -1) + 1
        keyed.append((turns[core.tile], core.index, core))
    return [core for _, _, core in sorted(keyed, key=lambda item: item[:2])]


def _spread(cores: Sequence[Core], num: int) -> list[Core]:
    return [cores[position * len(cores) // num] for position in range(num)]


def _equal_parts(items: Sequence[Item], num: int) -> list[list[Item]]:
    """`items` in `num` consecutive parts whose lengths differ by one at most."""
    edges = [part * len(items) // num for part in range(num + 1)]
    return [list(items[low:high]) for low, high in itertools.pairwise(edges)]

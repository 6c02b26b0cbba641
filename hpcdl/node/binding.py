"""The cores of each rank of a node, and the memory policy of a process, as numactl sets it, but without numactl."""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.core.units import format_list
from hpcdl.node.topology import Core, Topology

Item = TypeVar("Item")
Placement = Callable[[Sequence[Core], int, int], list[list[Core]]]
MODES = {"default": 0, "preferred": 1, "membind": 2, "interleave": 3, "preferred-many": 5}
"""set_mempolicy(2): MPOL_DEFAULT, MPOL_PREFERRED, MPOL_BIND, MPOL_INTERLEAVE, MPOL_PREFERRED_MANY (Linux >= 5.15)."""
SYSTEM_CALLS = {"x86_64": 238, "aarch64": 237, "ppc64le": 261}  # set_mempolicy, for which glibc has no function
MEMORY_POLICY = "HPCDL_MEMORY_POLICY"
"""Variable in which a launch plan passes the policy and the memory nodes of each local rank, as JSON."""
_BITS = 1024  # the most NUMA nodes that Linux can be built for


def place_ranks(topology: Topology, ranks: int, cores_each: int, binding: str, free_cores: int = 0) -> list[list[Core]]:
    """Return the cores of each local rank: `cores_each`, or their equal share if that is less; never shared.

    The `free_cores` highest cores stay with the system, as in Slurm's core specialization. Raises UsageError if ranks
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
    if binding == "devices":
        return _near_devices(cores, ranks, topology.near_devices)
    return PLACEMENTS[binding](cores, ranks, max(min(cores_each, len(cores) // ranks), 1))


def _near_devices(cores: Sequence[Core], ranks: int, near: Sequence[Sequence[int]]) -> list[list[Core]]:
    """Give devices to ranks in turn, and divide all cores near a device among its ranks.

    All these cores are used even if an operation has fewer threads, because the input, the exchange and the driver have
    threads too. If it is unknown which cores are near, or the sets overlap, divide the NUMA nodes among the ranks.
    """
    near_by_rank = [
        tuple(core for core in cores if {*core.cpus} & {*near[rank % len(near)]})
        for rank in range(ranks if near else 0)
    ]
    sharing = Counter(near_by_rank)
    apart = sum(map(len, sharing)) == len({core.index for near_cores in sharing for core in near_cores})
    if not near_by_rank or not apart or any(len(near_cores) < number for near_cores, number in sharing.items()):
        return _numa(cores, ranks, len(cores))
    parts = {near_cores: iter(_equal_parts(near_cores, number)) for near_cores, number in sharing.items()}
    return [next(parts[near_cores]) for near_cores in near_by_rank]


def _compact(cores: Sequence[Core], ranks: int, cores_each: int) -> list[list[Core]]:
    """Place rank after rank on consecutive cores."""
    return [list(cores[rank * cores_each : (rank + 1) * cores_each]) for rank in range(ranks)]


def _scatter(cores: Sequence[Core], ranks: int, cores_each: int) -> list[list[Core]]:
    """Take cores in turn from every NUMA node, and within it from every tile, so that a rank uses all caches."""
    nodes = sorted({core.numa_node for core in cores})
    stacks = [_by_tile([core for core in cores if core.numa_node == node]) for node in nodes]
    dealt = [stack[turn] for turn in range(max(map(len, stacks))) for stack in stacks if turn < len(stack)]
    return _compact(dealt, ranks, cores_each)


def _balanced(cores: Sequence[Core], ranks: int, cores_each: int) -> list[list[Core]]:
    """Give every rank an equal section of the node, and spread its cores evenly over the section."""
    return [_spread(part, cores_each) for part in _equal_parts(cores, ranks)]


def _numa(cores: Sequence[Core], ranks: int, cores_each: int) -> list[list[Core]]:
    """Keep ranks within NUMA nodes if there are enough ranks; uneven nodes get ranks in proportion to their cores."""
    nodes = sorted({core.numa_node for core in cores})
    by_node = [[core for core in cores if core.numa_node == node] for node in nodes]
    if ranks < len(nodes):
        parts = [[core for group in groups for core in group] for groups in _equal_parts(by_node, ranks)]
        return [part[:cores_each] for part in parts]
    counts = [1] * len(nodes)
    for _ in range(ranks - len(nodes)):
        loads = [len(group) / (count + 1) for group, count in zip(by_node, counts, strict=True)]
        counts[loads.index(max(loads))] += 1  # the node with most cores for each rank, the next included
    if any(count > len(group) for group, count in zip(by_node, counts, strict=True)):
        return _balanced(cores, ranks, cores_each)
    return [
        part[:cores_each]
        for group, count in zip(by_node, counts, strict=True)
        for part in _equal_parts(group, count)
    ]  # fmt: skip


PLACEMENTS: dict[str, Placement] = {"compact": _compact, "scatter": _scatter, "balanced": _balanced, "numa": _numa}


def cpus_of(cores: Sequence[Core], threads_per_core: int) -> tuple[int, ...]:
    """Return the first `threads_per_core` hardware threads of each core, ascending."""
    return tuple(sorted(cpu for core in cores for cpu in core.cpus[:threads_per_core]))


def cores_needed(threads: int, threads_per_core: int) -> int:
    """Return the number of cores that `threads` threads fill."""
    return math.ceil(threads / threads_per_core)


def _by_tile(cores: Sequence[Core]) -> list[Core]:
    """Order the cores: first one of every tile, then the second ones."""
    turns: dict[int, int] = {}
    keyed = []
    for core in cores:
        turns[core.tile] = turns.get(core.tile, -1) + 1
        keyed.append((turns[core.tile], core.index, core))
    return [core for _, _, core in sorted(keyed, key=lambda item: item[:2])]


def _spread(cores: Sequence[Core], num: int) -> list[Core]:
    return [cores[position * len(cores) // num] for position in range(num)]


def _equal_parts(items: Sequence[Item], num: int) -> list[list[Item]]:
    """Split `items` in `num` consecutive parts whose lengths differ by at most one."""
    edges = [part * len(items) // num for part in range(num + 1)]
    return [list(items[low:high]) for low, high in itertools.pairwise(edges)]


def apply_planned(local_rank: int) -> None:
    """Apply the memory policy of the launch plan for `local_rank`, if the plan has one."""
    planned = os.environ.get(MEMORY_POLICY)
    if planned:
        policy, nodes = json.loads(planned)
        apply_memory_policy(policy, nodes[local_rank % len(nodes)])


def apply_memory_policy(policy: str, nodes: Sequence[int]) -> None:
    """Allocate the memory of this process, its future threads and its children by `policy` from `nodes`.

    Call it before the memory is touched. Raises HpcdlError if the kernel refuses: no such node, or outside the cpuset.
    """
    number = SYSTEM_CALLS.get(platform.machine())
    if policy == "default" or number is None:
        return
    if policy == "preferred" and len(nodes) > 1:  # the older mode takes one node alone
        policy = "preferred-many"
    # The kernel reads the mask as unsigned longs, 64 bits each on these machines.
    mask = (ctypes.c_ulong * (_BITS // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    library = ctypes.CDLL(None, use_errno=True)
    # One bit more: the kernel reads one less than the number that it gets.
    if library.syscall(number, MODES[policy], mask, _BITS + 1) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise HpcdlError(
            f"memory policy {policy} on NUMA nodes {format_list(nodes)} refused by the kernel ({reason}); "
            "use --profile none, or tune this node again with `hpcdl tune-threads`"
        )

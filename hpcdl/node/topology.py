"""The parts of a node, those that this process may use, and a drawing of both in plain characters."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from hpcdl.core.errors import UsageError
from hpcdl.core.units import format_bytes, format_list, parse_list

FAST_KINDS = ("MCDRAM", "HBM")
"""Kinds of memory that are faster than the DRAM beside them."""


@dataclass(frozen=True, kw_only=True)
class Core:
    """One core: its hardware threads `cpus` by the kernel's numbers, and its position."""

    index: int
    package: int
    numa_node: int
    tile: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """One memory node: `cpus` belong to it, `near_cpus` are nearest to it (flat MCDRAM and HBM have no own CPUs)."""

    index: int
    memory_bytes: int
    kind: str
    cpus: tuple[int, ...]
    near_cpus: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Cache:
    """All caches of one level and size: `num` of them, each shared by `cores_each` cores."""

    level: str
    size_bytes: int
    num: int
    cores_each: int


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One node. `allowed_*` is what this process may use: the cpuset of Slurm, a container, taskset.

    `devices` is the number of GPUs that its ranks share, by the name of their kind; `near_devices` are the CPUs near
    each, if known. Neither is in the fingerprint: the same node may show other GPUs to another job.
    """

    source: str
    processor: str
    num_packages: int
    cores: tuple[Core, ...]
    numa_nodes: tuple[NumaNode, ...]
    caches: tuple[Cache, ...]
    allowed_cpus: tuple[int, ...]
    allowed_memory_nodes: tuple[int, ...]
    memory_side_cache_bytes: int = 0
    devices: Mapping[str, int] = field(default_factory=dict)
    near_devices: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def usable_cores(self) -> tuple[Core, ...]:
        """The cores that this process may use, each with the hardware threads that it may use."""
        allowed = set(self.allowed_cpus)
        trimmed = (dataclasses.replace(core, cpus=tuple(c for c in core.cpus if c in allowed)) for core in self.cores)
        return tuple(core for core in trimmed if core.cpus)

    @property
    def cpus(self) -> tuple[int, ...]:
        """Every hardware thread of the node."""
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    @property
    def threads_per_core(self) -> int:
        """The number of hardware threads of the largest core that may be used."""
        return max(len(core.cpus) for core in self.usable_cores)

    @property
    def memory_bytes(self) -> int:
        """Memory of all NUMA nodes."""
        return sum(node.memory_bytes for node in self.numa_nodes)

    @property
    def fast_nodes(self) -> tuple[NumaNode, ...]:
        """Fast memory nodes that may be used, on a node that also has slower ones (flat modes)."""
        # Without slower memory, as on a Xeon Max without DIMMs, no node is faster than another.
        if not any(node.kind not in FAST_KINDS for node in self.numa_nodes):
            return ()
        return tuple(n for n in self.numa_nodes if n.kind in FAST_KINDS and n.index in self.allowed_memory_nodes)

    @property
    def core_nodes(self) -> tuple[int, ...]:
        """The NUMA nodes of the usable cores, ascending."""
        return tuple(sorted({core.numa_node for core in self.usable_cores}))

    @property
    def memory_mode(self) -> str:
        """`flat` (fast memory is its own node), `cache` (it caches the DRAM), `hbm-only` or `plain`."""
        if self.fast_nodes:
            return "flat"
        if self.memory_side_cache_bytes:
            return "cache"
        return "hbm-only" if all(node.kind in FAST_KINDS for node in self.numa_nodes) else "plain"

    @property
    def cluster_mode(self) -> str:
        """`snc2`, `snc4` if each package is split into several NUMA nodes with cores, else `one node per package`."""
        split = len({core.numa_node for core in self.cores}) // max(self.num_packages, 1)
        return f"snc{split}" if split > 1 else "one node per package"

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits common to a node type: from layout and memory kinds, not host, mask or DRAM size."""
        # Rounded: firmware and kernel keep a part of it, which differs from node to node.
        sizes = {n.index: round(n.memory_bytes / 2**30) if n.kind in FAST_KINDS else 0 for n in self.numa_nodes}
        nodes = [(n.index, n.kind, format_list(n.cpus), sizes[n.index]) for n in self.numa_nodes]
        cores = [(core.package, core.numa_node, core.cpus) for core in self.cores]
        described = repr((self.processor, self.memory_mode, self.cluster_mode, nodes, cores))
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    @property
    def summary(self) -> str:
        """One line: processor, packages, cores, threads, memory."""
        kinds: dict[str, int] = {}
        for node in self.numa_nodes:
            kinds[node.kind] = kinds.get(node.kind, 0) + node.memory_bytes
        memory = " + ".join(f"{size / 2**30:.0f} GiB {kind}" for kind, size in kinds.items())
        threads = max(len(core.cpus) for core in self.cores)
        cores = f"{self.num_packages} x {len(self.cores) // self.num_packages} cores x {threads}"
        return f"{self.processor}: {cores}, {memory}"


def restricted(topology: Topology, cpus: Sequence[int], memory_nodes: Sequence[int] | None = None) -> Topology:
    """Return `topology` for a process limited to `cpus` (and `memory_nodes`). Raises UsageError if nothing is left."""
    allowed = tuple(sorted(set(topology.cpus) & set(cpus)))
    if not allowed:
        raise UsageError(
            f"none of the CPUs {format_list(cpus) or '(none)'} is on this node, "
            f"which has {format_list(topology.cpus)}; check the job's cpuset"
        )
    all_nodes = {node.index for node in topology.numa_nodes}
    wanted = all_nodes if memory_nodes is None else all_nodes & set(memory_nodes)
    return dataclasses.replace(topology, allowed_cpus=allowed, allowed_memory_nodes=tuple(sorted(wanted or all_nodes)))


def own_affinity() -> tuple[int, ...]:
    """Return the CPUs on which the kernel lets this process run."""
    return tuple(sorted(os.sched_getaffinity(0)))


def own_memory_nodes(status: Path = Path("/proc/self/status")) -> tuple[int, ...] | None:
    """Return the memory nodes that this process may use, None if the kernel does not tell."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("Mems_allowed_list:"):
            return parse_list(line.partition(":")[2])
    return None


MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"
FREE, FORBIDDEN = ".", "x"
CORES_PER_LINE = 32


def draw(topology: Topology, cpus_by_local_rank: Sequence[Sequence[int]] = ()) -> list[str]:
    """Return the drawing: a cell per core with its rank's mark, `.` for a free core, `x` for a forbidden one."""
    owner = {cpu: rank for rank, cpus in enumerate(cpus_by_local_rank) for cpu in cpus}
    allowed = set(topology.allowed_cpus)
    lines = []
    for package in range(topology.num_packages):
        lines.append(f"package {package}")
        cores = [core for core in topology.cores if core.package == package]
        for node in topology.numa_nodes:
            own_cores = [core for core in cores if core.numa_node == node.index]
            # Fast memory may be a node without cores; it is drawn in the package that is near.
            here = own_cores or (cores and set(node.near_cpus) & {cpu for core in cores for cpu in core.cpus})
            if not here:
                continue
            usable = "" if node.index in topology.allowed_memory_nodes else ", not allowed"
            text = (
                f"{len(own_cores)} cores, CPUs {format_list(cpu for core in own_cores for cpu in core.cpus)}"
                if own_cores
                else "no cores"
            )
            lines.append(f"  node {node.index}  {node.kind} {format_bytes(node.memory_bytes)}{usable}  {text}")
            cells = [_cell(core, owner, allowed) for core in own_cores]
            starts = range(0, len(cells), CORES_PER_LINE)
            lines += ["    [" + " ".join(cells[start : start + CORES_PER_LINE]) + "]" for start in starts]
    lines.append(_legend(owner, topology))
    return lines


def _cell(core: Core, owner: dict[int, int], allowed: set[int]) -> str:
    """Return the rank's mark, repeated for each hardware thread of the core that the rank has."""
    ranks = [owner[cpu] for cpu in core.cpus if cpu in owner]
    if ranks:
        return "".join(MARKS[rank % len(MARKS)] for rank in ranks)
    return FREE if allowed & set(core.cpus) else FORBIDDEN


def _legend(owner: dict[int, int], topology: Topology) -> str:
    parts = ["one cell a core"]
    if owner:
        parts.append("digits are local ranks, repeated for each hardware thread")
    parts.append(f"{FREE} free")
    if len(topology.allowed_cpus) < len(topology.cpus):
        parts.append(f"{FORBIDDEN} not allowed for this process")
    return "; ".join(parts)

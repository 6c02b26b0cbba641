"""A node drawn in plain characters: packages, NUMA nodes, cores, and which rank sits where."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdl.core.units import format_bytes, format_list
from hpcdl.node.topology import Core, Topology

MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"
FREE, FORBIDDEN = ".", "x"
CORES_PER_LINE = 32


def draw(topology: Topology, cpus_by_local_rank: Sequence[Sequence[int]] = ()) -> list[str]:
    """Lines: a cell per core with the mark of its rank, `.` for a free core, `x` for one that may not be used."""
    owner = {cpu: rank for rank, cpus in enumerate(cpus_by_local_rank) for cpu in cpus}
    allowed = set(topology.allowed_cpus)
    lines = []
    for package in range(topology.num_packages):
        lines.append(f"package {package}")
        cores = [core for core in topology.cores if core.package == package]
        for node in topology.numa_nodes:
            own = [core for core in cores if core.numa_node == node.index]
            here = own or (cores and set(node.near_cpus) & {cpu for core in cores for cpu in core.cpus})
            if not here:
                continue
            usable = "" if node.index in topology.allowed_memory_nodes else ", not allowed"
            words = (
                f"{len(own)} cores, CPUs {format_list(cpu for core in own for cpu in core.cpus)}" if own else "no cores"
            )
            lines.append(f"  node {node.index}  {node.kind} {format_bytes(node.memory_bytes)}{usable}  {words}")
            cells = [_cell(core, owner, allowed) for core in own]
            starts = range(0, len(cells), CORES_PER_LINE)
            lines += ["    [" + " ".join(cells[start : start + CORES_PER_LINE]) + "]" for start in starts]
    lines.append(_legend(owner, topology))
    return lines


def _cell(core: Core, owner: dict[int, int], allowed: set[int]) -> str:
    """The rank's mark, doubled or more where it has several hardware threads of the core."""
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

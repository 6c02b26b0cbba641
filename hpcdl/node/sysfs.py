"""The topology from Linux's /sys, for nodes without hwloc."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from hpcdl.core.errors import UsageError
from hpcdl.core.units import parse_bytes, parse_list
from hpcdl.node.hwloc import numa_nodes
from hpcdl.node.topology import Cache, Core, NumaNode, Topology, own_affinity, own_memory_nodes, restricted

_UNITS = {"K": "KiB", "M": "MiB", "G": "GiB"}


def read_live() -> Topology:
    """Return the topology of this node."""
    return restricted(read(Path("/sys"), Path("/proc/cpuinfo")), own_affinity(), own_memory_nodes())


def read(sys: Path, cpuinfo: Path) -> Topology:
    """Return the node that a /sys tree and a cpuinfo file describe. Raises UsageError if they have no CPUs."""
    folder = sys / "devices/system/cpu"
    cpus = parse_list(_text(folder / "online"))
    if not cpus:
        raise UsageError(f"{folder} lists no CPU; install hwloc, or hand in a file with HWLOC_XMLFILE")
    processor = _processor(cpuinfo)
    nodes = _nodes(sys / "devices/system/node", cpus, processor)
    cores = _cores(folder, cpus, nodes)
    return Topology(
        source="sys",
        processor=processor,
        num_packages=len({core.package for core in cores}),
        cores=cores,
        numa_nodes=nodes,
        caches=_caches(folder, cores),
        allowed_cpus=cpus,
        allowed_memory_nodes=tuple(node.index for node in nodes),
        memory_side_cache_bytes=_memory_side_cache(sys / "devices/system/node", nodes),
    )


def _cores(folder: Path, cpus: tuple[int, ...], nodes: tuple[NumaNode, ...]) -> tuple[Core, ...]:
    home = {cpu: node.index for node in nodes for cpu in node.cpus}
    packages: dict[int, int] = {}
    groups: dict[tuple[int, ...], tuple[int, str]] = {}
    for cpu in cpus:
        of_cpu = folder / f"cpu{cpu}"
        siblings = parse_list(_text(of_cpu / "topology/thread_siblings_list")) or (cpu,)
        package = int(_text(of_cpu / "topology/physical_package_id") or 0)
        packages.setdefault(package, len(packages))  # renumbered: the kernel's numbers may have gaps
        online = tuple(sibling for sibling in siblings if sibling in cpus)
        # Index 2 is L2: the first two are the instruction and data caches of L1.
        groups.setdefault(online, (packages[package], _text(of_cpu / "cache/index2/shared_cpu_list") or str(cpu)))
    tiles: dict[str, int] = {}
    ordered = sorted(groups.items(), key=lambda item: (item[1][0], home.get(item[0][0], 0), item[0]))
    return tuple(
        Core(
            index=index,
            package=package,
            numa_node=home.get(core_cpus[0], nodes[0].index),
            tile=tiles.setdefault(tile, len(tiles)),
            cpus=core_cpus,
        )
        for index, (core_cpus, (package, tile)) in enumerate(ordered)
    )


def _nodes(folder: Path, cpus: tuple[int, ...], processor: str) -> tuple[NumaNode, ...]:
    """Return the memory nodes; one without CPUs gets those at the least distance by the kernel."""
    indices = parse_list(_text(folder / "online"))
    if not indices:
        return numa_nodes([(0, _memory_of(Path("/proc/meminfo")), "DRAM", cpus)], processor)
    own_cpus = {index: parse_list(_text(folder / f"node{index}/cpulist")) for index in indices}
    raw = []
    for index in indices:
        near = own_cpus[index] or own_cpus[_nearest(folder, index, indices, own_cpus)]
        raw.append((index, _memory_of(folder / f"node{index}/meminfo"), "", near))
    return numa_nodes(raw, processor)


def _nearest(folder: Path, index: int, indices: tuple[int, ...], cpus_of: Mapping[int, tuple[int, ...]]) -> int:
    distances = [int(word) for word in _text(folder / f"node{index}/distance").split()]
    with_cpus = [other for other in indices if cpus_of[other]]
    if len(distances) != len(indices):
        return with_cpus[0]
    return min(with_cpus, key=lambda other: (distances[indices.index(other)], other))


def _caches(folder: Path, cores: tuple[Core, ...]) -> tuple[Cache, ...]:
    first = {core.cpus[0] for core in cores}
    seen: dict[tuple[str, str], tuple[str, int, int]] = {}
    for cpu in sorted(first):
        for index in sorted((folder / f"cpu{cpu}/cache").glob("index*")):
            if _text(index / "type") == "Instruction":
                continue
            level = f"L{_text(index / 'level')}"
            shared = _text(index / "shared_cpu_list")
            size = _size(_text(index / "size"))
            # Every CPU that shares a cache lists it, so the list of sharers identifies the cache.
            seen[(level, shared)] = ("L1d" if level == "L1" else level, size, len(first & set(parse_list(shared))))
    kinds = list(seen.values())
    unique = sorted(set(kinds))
    return tuple(Cache(level=k[0], size_bytes=k[1], num=kinds.count(k), cores_each=k[2]) for k in unique)


def _memory_side_cache(folder: Path, nodes: tuple[NumaNode, ...]) -> int:
    files = (folder / f"node{node.index}/memory_side_cache/index1/size" for node in nodes)
    return sum(_size(_text(path)) for path in files)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    return parse_bytes(match[1] + _UNITS.get(match[2], "")) if match else 0


def _memory_of(path: Path) -> int:
    # The kernel writes kB and means KiB.
    match = re.search(r"MemTotal:\s+(\d+) kB", _text(path))
    return int(match[1]) * 1024 if match else 0


def _processor(cpuinfo: Path) -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _text(cpuinfo), re.MULTILINE)
    return " ".join(match[1].split()) if match else "unknown processor"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

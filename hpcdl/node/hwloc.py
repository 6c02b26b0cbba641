"""The topology from hwloc's XML (format 2): from `lstopo`, from `HWLOC_XMLFILE`, or from a file."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from hpcdl.core.errors import UsageError
from hpcdl.core.storage.files import MOST_DEPTH, read_bytes
from hpcdl.core.units import parse_mask
from hpcdl.node.topology import Cache, Core, NumaNode, Topology, own_affinity, own_memory_nodes, restricted

PROGRAMS = ("lstopo-no-graphics", "lstopo")
TIMEOUT_S = 30.0
MOST_BYTES = 8 << 20
# L1Cache is the data cache; hwloc calls the other one L1iCache.
_CACHES = {"L1Cache": "L1d", "L2Cache": "L2", "L3Cache": "L3", "L4Cache": "L4"}


@dataclass
class _Objects:
    packages: list[int] = field(default_factory=list)
    cores: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    nodes: list[tuple[int, int, str, tuple[int, ...]]] = field(default_factory=list)
    caches: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)
    memory_side_cache_bytes: int = 0


def read_live() -> Topology | None:
    """Return the topology of this node, or of `HWLOC_XMLFILE`; None if hwloc is not installed."""
    named = os.environ.get("HWLOC_XMLFILE")
    if named:
        topology = read_file(Path(named))
        # In a file of another machine the CPU numbers of this process mean nothing.
        foreign = os.environ.get("HWLOC_THISSYSTEM", "1") == "0" or not set(own_affinity()) <= set(topology.cpus)
        return topology if foreign else restricted(topology, own_affinity(), own_memory_nodes())
    text = _lstopo()
    if text is None:
        return None
    return restricted(parse(text, source="hwloc"), own_affinity(), own_memory_nodes())


def read_file(path: Path) -> Topology:
    """Return the node that an XML file of `lstopo --of xml` describes. Raises UsageError if it is no such file."""
    try:
        return parse(read_bytes(path, MOST_BYTES).decode(), source=str(path))
    except OSError as error:
        raise UsageError(
            f"cannot read topology {path}: {error.strerror}; make one with `lstopo --of xml {path}`"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not hwloc XML; make one with `lstopo --of xml {path}`") from None


def parse(text: str, *, source: str) -> Topology:
    """Return the node that an hwloc 2 XML document describes. Raises UsageError if it is none, or has no cores."""
    try:
        if "<!ENTITY" in text:  # nested entities expand a small file to gigabytes
            raise ValueError("it declares entities")
        root = ElementTree.fromstring(text, ElementTree.XMLParser(target=_ShallowTree()))
    except (ElementTree.ParseError, ValueError) as error:
        raise UsageError(f"{source} is not hwloc XML ({error}); make one with `lstopo --of xml FILE`") from None
    machine = root.find("object[@type='Machine']")
    if root.tag != "topology" or machine is None:
        raise UsageError(f"{source} is not hwloc XML of format 2; make one with `lstopo --of xml FILE` of hwloc >= 2.0")
    contents = _Objects()
    try:
        _walk(machine, contents, package=0)
        allowed = parse_mask(machine.get("allowed_cpuset") or machine.get("cpuset") or "")
        allowed_nodes = parse_mask(machine.get("allowed_nodeset") or machine.get("nodeset") or "")
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{source} is damaged hwloc XML ({error}); make it again with `lstopo --of xml FILE`"
        ) from None
    if not contents.cores or not contents.nodes:
        raise UsageError(f"{source} has no cores or no memory; make it with `lstopo --of xml FILE` without filters")
    return _assemble(contents, machine, allowed, allowed_nodes, source)


class _ShallowTree(ElementTree.TreeBuilder):
    """Builds a tree that is safe for recursion. Raises ValueError for a deeper one."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def start(self, tag: str, attributes: dict[str, str], /) -> ElementTree.Element:
        """Enter a level."""
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
        return super().start(tag, attributes)

    def end(self, tag: str, /) -> ElementTree.Element:
        """Leave a level."""
        self._depth -= 1
        return super().end(tag)


def _whole(element: ElementTree.Element, name: str, default: str = "") -> int:
    number = int(element.get(name, default))
    if not 0 <= number < 2**60:
        raise ValueError(f"{name} is {number}")
    return number


def _walk(element: ElementTree.Element, objects: _Objects, package: int) -> None:
    for child in element.findall("object"):
        kind = child.get("type", "")
        cpus = parse_mask(child.get("cpuset") or "0x0")
        if kind == "Package":
            package = len(objects.packages)
            objects.packages.append(package)
        elif kind == "Core":
            pu_cpus = tuple(_whole(pu, "os_index") for pu in child.iter("object") if pu.get("type") == "PU")
            if not pu_cpus:
                raise ValueError("a core without hardware threads")
            # Not walked further: in hwloc's tree all caches are above the cores.
            objects.cores.append((package, len(objects.cores), pu_cpus))
            continue
        elif kind == "PU":  # a machine that reports threads without cores
            if not cpus:
                raise ValueError("a hardware thread without a number")
            objects.cores.append((package, len(objects.cores), cpus))
            continue
        elif kind == "NUMANode":
            size = _whole(child, "local_memory", "0")
            objects.nodes.append((_whole(child, "os_index"), size, child.get("subtype") or "", cpus))
        elif kind == "MemCache":
            objects.memory_side_cache_bytes += _whole(child, "cache_size", "0")
        elif kind in _CACHES:
            objects.caches.append((_CACHES[kind], _whole(child, "cache_size", "0"), cpus))
        _walk(child, objects, package)


def _assemble(
    objects: _Objects,
    machine: ElementTree.Element,
    allowed: tuple[int, ...],
    allowed_nodes: tuple[int, ...],
    source: str,
) -> Topology:
    info = {entry.get("name"): entry.get("value") or "" for entry in machine.iter("info")}
    # Some processors pad their name with blanks.
    processor = " ".join((info.get("CPUModel") or info.get("Architecture") or "unknown processor").split())
    nodes = numa_nodes(objects.nodes, processor)
    home = {cpu: node.index for node in nodes for cpu in node.cpus}
    tiles = [set(cpus) for level, _, cpus in objects.caches if level == "L2"]
    cores = tuple(
        Core(
            index=index,
            package=package,
            numa_node=home.get(cpus[0], nodes[0].index),
            tile=next((number for number, tile in enumerate(tiles) if cpus[0] in tile), index),
            cpus=cpus,
        )
        for package, index, cpus in objects.cores
    )
    return Topology(
        source=source,
        processor=processor,
        num_packages=max(len(objects.packages), 1),
        cores=cores,
        numa_nodes=nodes,
        caches=_caches(objects.caches, cores),
        allowed_cpus=allowed,
        allowed_memory_nodes=allowed_nodes,
        memory_side_cache_bytes=objects.memory_side_cache_bytes or _cache_mode_bytes(info),
    )


def numa_nodes(raw: list[tuple[int, int, str, tuple[int, ...]]], processor: str) -> tuple[NumaNode, ...]:
    """Return memory nodes from (index, bytes, kind or "", near CPUs); CPUs of several belong to the first slow one."""
    kinds = {index: kind or _guess(index, cpus, raw, processor) for index, _, kind, cpus in raw}
    owners: dict[tuple[int, ...], int] = {}
    # Slow memory first: cores near DRAM and HBM belong to the DRAM node, as in the kernel.
    for index, _, _, cpus in sorted(raw, key=lambda item: (kinds[item[0]] in ("MCDRAM", "HBM"), item[0])):
        owners.setdefault(cpus, index)
    return tuple(
        NumaNode(
            index=index,
            memory_bytes=size,
            kind=kinds[index],
            cpus=tuple(sorted(cpus)) if owners[cpus] == index else (),
            near_cpus=tuple(sorted(cpus)),
        )
        for index, size, _, cpus in sorted(raw)
    )


def _guess(index: int, cpus: tuple[int, ...], raw: list[tuple[int, int, str, tuple[int, ...]]], processor: str) -> str:
    """Return HBM if an earlier node has the same CPUs, or the processor is known for it; else DRAM."""
    second = any(earlier < index and near == cpus for earlier, _, _, near in raw)
    if second or not cpus:
        return "MCDRAM" if "Phi" in processor else "HBM"
    return "DRAM"


def _cache_mode_bytes(info: dict[str | None, str]) -> int:
    """Return the MCDRAM that hwloc reports as the machine's attribute rather than as an object."""
    # Every Knights Landing has 16 GiB of MCDRAM.
    return int(info.get("ClusterMode") is not None and info.get("MemoryMode") == "Cache") * 16 * 2**30


def _caches(raw: list[tuple[str, int, tuple[int, ...]]], cores: tuple[Core, ...]) -> tuple[Cache, ...]:
    first = {core.cpus[0] for core in cores}
    counted = Counter((level, size, len(first & set(cpus))) for level, size, cpus in raw)
    return tuple(
        Cache(level=level, size_bytes=size, num=num, cores_each=cores_each)
        for (level, size, cores_each), num in sorted(counted.items())
    )


def _lstopo() -> str | None:
    """Return `lstopo`'s XML of this node; None if it is missing or fails."""
    program = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if program is None:
        return None
    # The whole node, with what the cpuset forbids: the fingerprint must be the same in every job.
    command = [program, "--of", "xml", "--no-io", "--disallowed"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 and done.stdout.lstrip().startswith("<?xml") else None

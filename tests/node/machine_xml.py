"""Write the hwloc XML of share/hpcdl/machines: lstopo's synthetic nodes cannot have uneven NUMA nodes.

`python tests/node/machine_xml.py` writes the files again; test_machines.py compares and reads them with hwloc's tools.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "share" / "hpcdl" / "machines"
GIB = 2**30
KNL_7250 = "Intel(R) Xeon Phi(TM) CPU 7250 @ 1.40GHz"
KNL_7230 = "Intel(R) Xeon Phi(TM) CPU 7230 @ 1.30GHz"
MAX_9480 = "Intel(R) Xeon(R) CPU Max 9480"


def format_words(numbers: Iterable[int]) -> str:
    """Return `numbers` as an hwloc mask, in words of 32 bits: `0x00000001,0x00000003`."""
    value = sum(1 << number for number in set(numbers))
    words: list[str] = []
    while value or not words:
        words.append(f"0x{value & 0xFFFFFFFF:08x}")
        value >>= 32
    return ",".join(reversed(words))


@dataclass(frozen=True, kw_only=True)
class Node:
    """`cores_by_group[package][group]` cores of each NUMA node; kinds and sizes of a group's memory nodes."""

    processor: str
    cores_by_group: tuple[tuple[int, ...], ...]
    threads: int
    memory: tuple[tuple[str, int], ...]
    cores_per_l2: int = 1
    l2_bytes: int = 2**20
    l3_bytes: int = 0
    cache_mode_bytes: int = 0


NODES = {
    "knl-7250-quadrant-cache": Node(
        processor=KNL_7250, cores_by_group=((68,),), threads=4, memory=(("DRAM", 96 * GIB),), cores_per_l2=2,
        cache_mode_bytes=16 * GIB,
    ),
    "knl-7250-quadrant-flat": Node(
        processor=KNL_7250, cores_by_group=((68,),), threads=4, memory=(("DRAM", 96 * GIB), ("MCDRAM", 16 * GIB)),
        cores_per_l2=2,
    ),
    "knl-7250-snc4-flat": Node(
        processor=KNL_7250, cores_by_group=((18, 18, 16, 16),), threads=4,
        memory=(("DRAM", 24 * GIB), ("MCDRAM", 4 * GIB)), cores_per_l2=2,
    ),
    "knl-7230-quadrant-cache": Node(
        processor=KNL_7230, cores_by_group=((64,),), threads=4, memory=(("DRAM", 192 * GIB),), cores_per_l2=2,
        cache_mode_bytes=16 * GIB,
    ),
    "skx-8160": Node(
        processor="Intel(R) Xeon(R) Platinum 8160 CPU @ 2.10GHz", cores_by_group=((24,), (24,)), threads=2,
        memory=(("DRAM", 96 * GIB),), l3_bytes=33 * 2**20,
    ),
    "clx-8280": Node(
        processor="Intel(R) Xeon(R) Platinum 8280 CPU @ 2.70GHz", cores_by_group=((28,), (28,)), threads=1,
        memory=(("DRAM", 96 * GIB),), l3_bytes=38 * 2**20 + 2**19,
    ),
    "max-9480-snc4-hbm": Node(
        processor=MAX_9480, cores_by_group=((14,) * 4, (14,) * 4), threads=1, memory=(("HBM", 16 * GIB),),
        l2_bytes=2 * 2**20,
    ),
    "max-9480-snc4-flat": Node(
        processor=MAX_9480, cores_by_group=((14,) * 4, (14,) * 4), threads=2,
        memory=(("DRAM", 32 * GIB), ("HBM", 16 * GIB)), l2_bytes=2 * 2**20,
    ),
    "generic-2x16": Node(
        processor="generic x86-64", cores_by_group=((16,), (16,)), threads=2, memory=(("DRAM", 64 * GIB),),
        l3_bytes=32 * 2**20,
    ),
}  # fmt: skip


class Writer:
    """Write objects in hwloc's format 2, in the order of lstopo."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.lines: list[str] = []
        self.counts: dict[str, int] = {}
        self.depth = 1
        self.num_cores = sum(map(sum, node.cores_by_group))
        self.num_groups = sum(map(len, node.cores_by_group))

    def pus(self, cores: range) -> list[int]:
        """Return kernel numbers: all first threads, then all second ones, as Linux counts on x86."""
        return [core + turn * self.num_cores for core in cores for turn in range(self.node.threads)]

    def open(self, element: str, cpus: list[int], nodes: list[int], **extra: object) -> None:
        index = self.counts[element] = self.counts.get(element, -1) + 1
        extra.setdefault("os_index", index)
        number = sum(value + 1 for value in self.counts.values())
        words = {"cpuset": format_words(cpus), "nodeset": format_words(nodes)}
        sets = "".join(f' {name}="{value}" complete_{name}="{value}"' for name, value in words.items())
        if element == "Machine":
            sets += "".join(f' allowed_{name}="{value}"' for name, value in words.items())
        rest = "".join(f' {name}="{value}"' for name, value in extra.items() if value is not None)
        self.lines.append(f'{" " * self.depth}<object type="{element}"{sets} gp_index="{number}"{rest}>')
        self.depth += 1

    def close(self) -> None:
        self.depth -= 1
        self.lines.append(f"{' ' * self.depth}</object>")

    def info(self, name: str, value: str) -> None:
        self.lines.append(f'{" " * self.depth}<info name="{name}" value="{value}"/>')

    def write(self) -> str:
        """Return the whole document."""
        kinds = len(self.node.memory)
        every = list(range(kinds * self.num_groups))
        self.open("Machine", self.pus(range(self.num_cores)), every)
        self.info("Architecture", "x86_64")
        group, first = 0, 0
        for sizes in self.node.cores_by_group:
            starts = [first + offset for offset in accumulate((0, *sizes))]
            numbers = [g + kind * self.num_groups for g in range(group, group + len(sizes)) for kind in range(kinds)]
            self.open("Package", self.pus(range(first, starts[-1])), numbers)
            self.info("CPUVendor", "GenuineIntel")
            self.info("CPUModel", self.node.processor)
            for size, start in zip(sizes, starts, strict=False):
                self.group(group, range(start, start + size), nested=len(sizes) > 1)
                group += 1
            first = starts[-1]
            self.close()
        self.close()
        head = '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n'
        return head + '<topology version="2.0">\n' + "\n".join(self.lines) + "\n</topology>\n"

    def group(self, group: int, cores: range, *, nested: bool) -> None:
        numbers = [group + kind * self.num_groups for kind in range(len(self.node.memory))]
        if nested:
            self.open("Group", self.pus(cores), numbers, kind=1001, subkind=0, os_index=None)
        for number, (kind, size) in zip(numbers, self.node.memory, strict=True):
            self.memory(number, kind, size, cores)
        if self.node.l3_bytes:
            self.cache("L3Cache", 3, self.node.l3_bytes, cores, numbers)
        for start in range(cores.start, cores.stop, self.node.cores_per_l2):
            tile = range(start, min(start + self.node.cores_per_l2, cores.stop))
            self.cache("L2Cache", 2, self.node.l2_bytes, tile, numbers)
            for core in tile:
                self.core(core, numbers)
            self.close()
        if self.node.l3_bytes:
            self.close()
        if nested:
            self.close()

    def memory(self, number: int, kind: str, size: int, cores: range) -> None:
        if self.node.cache_mode_bytes:
            extra = {"cache_size": self.node.cache_mode_bytes, "depth": 1, "cache_linesize": 64}
            self.open(
                "MemCache", self.pus(cores), [number], os_index=None, cache_associativity=1, cache_type=0, **extra
            )
        subtype = None if kind == "DRAM" else kind
        self.open("NUMANode", self.pus(cores), [number], os_index=number, subtype=subtype, local_memory=size)
        self.lines.append(f'{" " * self.depth}<page_type size="4096" count="{size // 4096}"/>')
        self.close()
        if self.node.cache_mode_bytes:
            self.close()

    def cache(self, kind: str, depth: int, size: int, cores: range, nodes: list[int]) -> None:
        extra = {"cache_size": size, "depth": depth, "cache_linesize": 64, "cache_associativity": 16, "cache_type": 0}
        self.open(kind, self.pus(cores), nodes, os_index=None, **extra)

    def core(self, core: int, nodes: list[int]) -> None:
        self.open("Core", self.pus(range(core, core + 1)), nodes, os_index=core)
        for cpu in self.pus(range(core, core + 1)):
            self.open("PU", [cpu], nodes, os_index=cpu)
            self.close()
        self.close()


def documents() -> dict[str, str]:
    """Return the text of each file by name."""
    return {f"{name}.xml": Writer(node).write() for name, node in NODES.items()}


if __name__ == "__main__":
    for file_name, text in documents().items():
        (FOLDER / file_name).write_text(text)

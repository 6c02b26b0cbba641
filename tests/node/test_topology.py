from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcdl.core.errors import UsageError
from hpcdl.node import hwloc, sysfs
from hpcdl.node.machines import machine_names, read_machine, read_topology
from hpcdl.node.topology import Topology, restricted

Machine = Callable[[str], Topology]
SHAPES = {
    # name: packages, cores, threads per core, NUMA nodes with cores, fast memory nodes, memory mode, cluster mode
    "stampede2-knl": (1, 68, 4, 1, 0, "cache", "one node per package"),
    "stampede2-knl-quadrant-cache": (1, 68, 4, 1, 0, "cache", "one node per package"),
    "stampede2-knl-quadrant-flat": (1, 68, 4, 1, 1, "flat", "one node per package"),
    "stampede2-knl-snc4-flat": (1, 68, 4, 4, 4, "flat", "snc4"),
    "cori-knl": (1, 68, 4, 1, 0, "cache", "one node per package"),
    "theta-knl": (1, 64, 4, 1, 0, "cache", "one node per package"),
    "stampede2-skx": (2, 48, 2, 2, 0, "plain", "one node per package"),
    "stampede3-spr-hbm": (2, 112, 1, 8, 0, "hbm-only", "snc4"),
    "xeon-max-snc4-flat": (2, 112, 2, 8, 8, "flat", "snc4"),
    "frontera-clx": (2, 56, 1, 2, 0, "plain", "one node per package"),
    "generic": (2, 32, 2, 2, 0, "plain", "one node per package"),
}


def test_every_known_machine_is_listed() -> None:
    assert set(machine_names()) == set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_and_modes_are_recognised(name: str) -> None:
    topology = read_machine(name).topology
    seen = (
        topology.num_packages, len(topology.cores), topology.threads_per_core, len(topology.core_nodes),
        len(topology.fast_nodes), topology.memory_mode, topology.cluster_mode,
    )  # fmt: skip
    assert seen == SHAPES[name]


def test_flat_mcdram_is_node_1_without_cores(machine: Machine) -> None:
    dram, mcdram = machine("stampede2-knl-quadrant-flat").numa_nodes
    assert (dram.kind, dram.memory_bytes // 2**30, len(dram.cpus)) == ("DRAM", 96, 272)
    assert (mcdram.index, mcdram.kind, mcdram.memory_bytes // 2**30, mcdram.cpus) == (1, "MCDRAM", 16, ())
    assert mcdram.near_cpus == dram.cpus


def test_uneven_sub_numa_nodes(machine: Machine) -> None:
    topology = machine("stampede2-knl-snc4-flat")
    sizes = [sum(core.numa_node == node for core in topology.cores) for node in topology.core_nodes]
    assert sizes == [18, 18, 16, 16]
    assert topology.cores[18].cpus == (18, 86, 154, 222)


def test_tiles_pair_cores(machine: Machine) -> None:
    assert [core.tile for core in machine("theta-knl").cores[:4]] == [0, 0, 1, 1]


def test_fingerprint_knows_the_node_type_not_the_mask(machine: Machine) -> None:
    flat = machine("stampede2-knl-quadrant-flat")
    assert flat.fingerprint == restricted(flat, [0, 1, 2]).fingerprint
    assert flat.fingerprint != machine("stampede2-knl-snc4-flat").fingerprint
    assert machine("stampede2-knl").fingerprint == machine("cori-knl").fingerprint  # same node type and mode


def test_a_cpuset_of_one_core(machine: Machine) -> None:
    one = restricted(machine("stampede2-skx"), [3], [0])
    assert [core.cpus for core in one.usable_cores] == [(3,)]
    assert one.threads_per_core == 1
    assert one.allowed_memory_nodes == (0,)


def test_a_foreign_cpuset_is_an_error(machine: Machine) -> None:
    with pytest.raises(UsageError, match="none of the CPUs 900 is on this node"):
        restricted(machine("generic"), [900])


def test_hwloc_xml_file_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(read_machine("theta-knl").topology.source)
    monkeypatch.setenv("HWLOC_XMLFILE", str(path))
    monkeypatch.setenv("HWLOC_THISSYSTEM", "0")
    assert len(read_topology().usable_cores) == 64


@pytest.mark.parametrize("text", ["", "no xml", "<topology/>", "<html><object type='Machine'/></html>"])
def test_damaged_xml_says_how_to_make_one(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.xml"
    path.write_text(text)
    with pytest.raises(UsageError, match="lstopo --of xml"):
        hwloc.read_file(path)


def test_missing_xml(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read topology"):
        read_topology(str(tmp_path / "absent.xml"))


def test_unknown_machine_suggests() -> None:
    with pytest.raises(UsageError, match="did you mean 'theta-knl'"):
        read_topology("teta-knl")


def test_without_hwloc_sys_states_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("HWLOC_XMLFILE", raising=False)
    bare = read_topology()
    assert bare.source == "sys"
    assert bare.allowed_cpus == tuple(sorted(os.sched_getaffinity(0)))


@pytest.mark.lab("hwloc")
def test_hwloc_and_sys_agree_here() -> None:
    from_hwloc, from_sys = hwloc.read_live(), sysfs.read_live()
    assert from_hwloc is not None
    assert [core.cpus for core in from_hwloc.cores] == [core.cpus for core in from_sys.cores]
    assert [node.cpus for node in from_hwloc.numa_nodes] == [node.cpus for node in from_sys.numa_nodes]
    assert from_hwloc.caches == from_sys.caches
    assert from_hwloc.fingerprint == from_sys.fingerprint


def test_a_real_cpuset_of_one_cpu_is_seen() -> None:
    if shutil.which("taskset") is None:
        pytest.fail("taskset is missing: apt-get install util-linux")
    cpu = str(min(os.sched_getaffinity(0)))
    code = (
        "from hpcdl.node.machines import read_topology\n"
        "node = read_topology(); print(node.allowed_cpus, len(node.usable_cores))"
    )
    command = ["taskset", "-c", cpu, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"({cpu},) 1"


def write_sys(root: Path, nodes: dict[int, tuple[str, str]], cpus: list[tuple[int, str, str]]) -> Path:
    """Write a /sys tree: nodes as (cpulist, distances), CPUs as (package, siblings, L2 sharers)."""
    folder = root / "devices/system"
    for index, (cpulist, distance) in nodes.items():
        place = folder / f"node/node{index}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(cpulist + "\n")
        (place / "distance").write_text(distance + "\n")
        (place / "meminfo").write_text(f"Node {index} MemTotal:       1048576 kB\n")
    (folder / "node/online").write_text(f"0-{len(nodes) - 1}\n")
    for index, (package, siblings, sharers) in enumerate(cpus):
        place = folder / f"cpu/cpu{index}"
        (place / "topology").mkdir(parents=True)
        (place / "topology/physical_package_id").write_text(f"{package}\n")
        (place / "topology/thread_siblings_list").write_text(siblings + "\n")
        (place / "cache/index2").mkdir(parents=True)
        for name, text in {"shared_cpu_list": sharers, "level": "2", "type": "Unified", "size": "1024K"}.items():
            (place / "cache/index2" / name).write_text(text + "\n")
    (folder / "cpu/online").write_text(f"0-{len(cpus) - 1}\n")
    info = root / "cpuinfo"
    info.write_text("model name\t: Intel(R) Xeon  Phi(TM) CPU\n")
    return info


def test_sys_with_flat_mcdram_and_hardware_threads(tmp_path: Path) -> None:
    cpus = [(0, f"{n % 4},{n % 4 + 4}", "0-1,4-5" if n % 4 < 2 else "2-3,6-7") for n in range(8)]
    info = write_sys(tmp_path, {0: ("0-7", "10 31"), 1: ("", "31 10")}, cpus)
    topology = sysfs.read(tmp_path, info)
    assert [core.cpus for core in topology.cores] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [core.tile for core in topology.cores] == [0, 0, 1, 1]
    assert topology.memory_mode == "flat"
    assert topology.numa_nodes[1].kind == "MCDRAM"
    assert topology.numa_nodes[1].near_cpus == tuple(range(8))
    assert (topology.caches[0].num, topology.caches[0].cores_each) == (2, 2)


def test_sys_places_cpuless_nodes_by_distance(tmp_path: Path) -> None:
    cpus = [(n // 2, str(n), str(n)) for n in range(4)]
    nodes = {0: ("0-1", "10 21 13 23"), 1: ("2-3", "21 10 23 13"), 2: ("", "13 23 10 25"), 3: ("", "23 13 25 10")}
    topology = sysfs.read(tmp_path, write_sys(tmp_path, nodes, cpus))
    assert [node.near_cpus for node in topology.numa_nodes] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    assert topology.num_packages == 2


def test_an_empty_sys_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="lists no CPU"):
        sysfs.read(tmp_path, tmp_path / "cpuinfo")

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpcdl.core.errors import UsageError
from hpcdl.core.paths import share_folder
from hpcdl.node.machines import machine_names, read_machine
from hpcdl.node.plan import launch_plan

from .machine_xml import documents


def test_topologies_are_what_the_writer_writes() -> None:
    folder = share_folder() / "machines"
    assert {path.name: path.read_text() for path in folder.glob("*.xml")} == documents()


@pytest.mark.parametrize("name", machine_names())
def test_published_settings_can_be_started(name: str) -> None:
    machine = read_machine(name)
    assert machine.sources
    ranks = machine.settings.ranks_per_node or 1 if machine.settings else 1
    assert launch_plan(machine.topology, machine.settings, ranks, ranks, openmp=False).cpus_by_local_rank


def test_unknown_keys_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text('name = "m"\nsummry = "typo"\n')
    with pytest.raises(UsageError, match="unknown key 'summry'; did you mean 'summary'"):
        read_machine(str(path))


@pytest.mark.lab("hwloc")
@pytest.mark.parametrize("file_name", documents())
def test_hwloc_reads_the_topologies_alike(file_name: str) -> None:
    path = share_folder() / "machines" / file_name
    topology = read_machine(str(path)).topology

    def calc(*words: str) -> str:
        command = ["hwloc-calc", "-i", str(path), *words]
        environment = os.environ | {"HWLOC_THISSYSTEM": "0"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert calc("--number-of", "core", "all") == str(len(topology.cores))
    assert calc("--number-of", "pu", "all") == str(len(topology.cpus))
    assert calc("--number-of", "numanode", "all") == str(len(topology.numa_nodes))
    last = topology.cores[-1]
    cpus = calc("--physical-output", "--intersect", "pu", f"core:{last.index}")
    assert sorted(map(int, cpus.split(","))) == sorted(last.cpus)

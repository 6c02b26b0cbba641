from __future__ import annotations

from collections.abc import Callable

from hpcdl.node.plan import launch_plan
from hpcdl.node.profile import Settings
from hpcdl.node.topology import Topology, draw, restricted

Machine = Callable[[str], Topology]


def test_knl_with_four_cores_free(machine: Machine) -> None:
    topology = machine("stampede2-knl-quadrant-flat")
    plan = launch_plan(topology, Settings(intra_op_threads=64, binding="compact"), 1, 1, openmp=False)
    lines = draw(topology, plan.cpus_by_local_rank)
    assert lines[0] == "package 0"
    assert lines[1].startswith("  node 0  DRAM 96 GiB  68 cores")
    assert lines[4] == "    [. . . .]"
    assert lines[5] == "  node 1  MCDRAM 16 GiB  no cores"
    assert "".join(lines).count("0 0") > 0


def test_ranks_and_hardware_threads_and_forbidden_cores(machine: Machine) -> None:
    topology = restricted(machine("generic"), [0, 1, 32, 33, 16], [0])
    settings = Settings(ranks_per_node=2, intra_op_threads=2, threads_per_core=2, binding="compact")
    lines = draw(topology, launch_plan(topology, settings, 2, 2, openmp=False).cpus_by_local_rank)
    assert lines[2].startswith("    [00 11 x x")
    assert "not allowed" in lines[4]
    assert lines[5].startswith("    [. x x")

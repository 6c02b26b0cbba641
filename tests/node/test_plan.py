"""Plans for known machines equal golden files: a changed plan must be read before it is accepted."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.node.binding import MEMORY_POLICY, apply_memory_policy
from hpcdl.node.plan import command_line, fill, launch_plan, numactl_words, verify_binding
from hpcdl.node.profile import Settings
from hpcdl.node.topology import Topology, restricted

Machine = Callable[[str], Topology]
GOLDEN = Path(__file__).parent / "golden"
CASES = {
    "knl-quadrant-flat-64-of-68": (
        "stampede2-knl-quadrant-flat",
        Settings(ranks_per_node=1, intra_op_threads=64, inter_op_threads=2, binding="compact",
                 memory_policy="preferred-fast"),
    ),
    "knl-quadrant-flat-mcdram-only": (
        "stampede2-knl-quadrant-flat",
        Settings(ranks_per_node=2, intra_op_threads=64, inter_op_threads=1, threads_per_core=2, binding="balanced",
                 memory_policy="membind-fast"),
    ),
    "knl-snc4-flat-4-ranks": (
        "stampede2-knl-snc4-flat",
        Settings(ranks_per_node=4, intra_op_threads=16, inter_op_threads=2, binding="numa",
                 memory_policy="preferred-fast"),
    ),
    "knl-snc4-flat-interleave": (
        "stampede2-knl-snc4-flat",
        Settings(ranks_per_node=1, intra_op_threads=66, inter_op_threads=2, binding="scatter", free_cores=2,
                 memory_policy="interleave"),
    ),
    "theta-4-by-32": (
        "theta-knl",
        Settings(ranks_per_node=4, intra_op_threads=32, inter_op_threads=1, threads_per_core=2, binding="compact"),
    ),
    "spr-hbm-8-ranks": (
        "stampede3-spr-hbm",
        Settings(ranks_per_node=8, intra_op_threads=14, inter_op_threads=2, binding="numa", memory_policy="membind"),
    ),
    "xeon-max-flat-8-ranks": (
        "xeon-max-snc4-flat",
        Settings(ranks_per_node=8, intra_op_threads=13, inter_op_threads=2, binding="numa",
                 memory_policy="membind-fast"),
    ),
    "xeon-max-flat-2-ranks": (
        "xeon-max-snc4-flat",
        Settings(ranks_per_node=2, intra_op_threads=54, inter_op_threads=2, binding="numa",
                 memory_policy="preferred-fast"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_plans_are_the_golden_ones(name: str, machine: Machine) -> None:
    topology_name, settings = CASES[name]
    ranks = settings.ranks_per_node or 1
    plan = launch_plan(machine(topology_name), settings, ranks, ranks, openmp=False)
    words = [numactl_words(plan, rank) for rank in range(ranks)]
    seen = json.loads(json.dumps(dataclasses.asdict(plan) | {"numactl": words}))
    assert seen == json.loads((GOLDEN / f"{name}.json").read_text())


def test_64_threads_on_68_cores_leave_4_free(machine: Machine) -> None:
    name, settings = CASES["knl-quadrant-flat-64-of-68"]
    plan = launch_plan(machine(name), settings, 1, 1, openmp=False)
    assert plan.cpus_by_local_rank == (tuple(range(64)),)
    assert plan.memory_nodes_by_local_rank == ((1,),)
    assert plan.memory_policy == "preferred"


def test_without_settings_ranks_share_the_cores_equally(machine: Machine) -> None:
    plan = launch_plan(machine("stampede2-skx"), None, 8, 4, openmp=False)
    assert [len(cpus) for cpus in plan.cpus_by_local_rank] == [12, 12, 12, 12]
    assert plan.environment["HPCDL_INTRA_OP_THREADS"] == "12"
    assert int(plan.environment["HPCDL_INTER_OP_THREADS"]) >= 2  # one computes, another waits for the exchange


def test_more_ranks_than_cores_are_not_bound(machine: Machine) -> None:
    one = restricted(machine("generic"), [5])
    plan = launch_plan(one, None, 2, 2, openmp=False)
    assert plan.cpus_by_local_rank == ()
    assert plan.environment["HPCDL_INTRA_OP_THREADS"] == "1"


def test_a_profile_for_other_ranks_shares_its_threads_again(machine: Machine) -> None:
    settings = Settings(ranks_per_node=2, intra_op_threads=16, onednn=False)
    filled = fill(machine("generic"), settings, 4)
    assert (filled.intra_op_threads, filled.ranks_per_node, filled.onednn) == (8, 4, False)
    plan = launch_plan(machine("generic"), settings, 4, 4, openmp=False)
    assert [len(cpus) for cpus in plan.cpus_by_local_rank] == [8, 8, 8, 8]


def test_a_profile_on_too_small_a_cpuset_unbinds(machine: Machine) -> None:
    one = restricted(machine("generic"), [5])
    plan = launch_plan(one, Settings(ranks_per_node=1, intra_op_threads=16), 3, 3, openmp=False)
    assert plan.cpus_by_local_rank == ()


def test_fast_memory_where_there_is_none_is_an_error(machine: Machine) -> None:
    with pytest.raises(UsageError, match="no fast memory of its own"):
        launch_plan(machine("generic"), Settings(memory_policy="membind-fast"), 1, 1, openmp=False)


def test_hardware_threads_that_are_not_there_are_an_error(machine: Machine) -> None:
    with pytest.raises(UsageError, match="threads_per_core=4"):
        launch_plan(machine("frontera-clx"), Settings(threads_per_core=4), 1, 1, openmp=False)


def test_command_line_can_be_typed(machine: Machine) -> None:
    name, settings = CASES["knl-quadrant-flat-64-of-68"]
    line = command_line(launch_plan(machine(name), settings, 1, 1, openmp=False), 0, ["python", "a b.py"])
    assert "numactl --physcpubind=0-63 --preferred=1 python 'a b.py'" in line
    assert "HPCDL_INTRA_OP_THREADS=64" in line
    assert MEMORY_POLICY not in line  # numactl sets it


def test_verify_binding_names_both_masks() -> None:
    own = sorted(os.sched_getaffinity(0))
    assert verify_binding(own) is None
    assert verify_binding([]) is None
    warning = verify_binding([*own, 999])
    assert warning is not None
    assert "999" in warning
    assert f"{hex(sum(1 << cpu for cpu in own))}" in warning


def test_memory_policy_reaches_the_kernel() -> None:
    code = (
        "from hpcdl.node.binding import apply_planned; apply_planned(1);"
        "print(open('/proc/self/numa_maps').readline().split()[1])"
    )
    for policy, seen in {"membind": "bind:0", "preferred": "prefer:0", "interleave": "interleave:0"}.items():
        environment = os.environ | {MEMORY_POLICY: json.dumps([policy, [[0], [0]]])}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == seen


def test_a_refused_memory_policy_says_so() -> None:
    with pytest.raises(HpcdlError, match="refused by the kernel"):
        apply_memory_policy("membind", [777])

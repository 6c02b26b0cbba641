from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hpcdl.config.schema import TuneConfig, TuneOutput, TuneSearch, TuneWorkload
from hpcdl.core.errors import ConfigError, UsageError
from hpcdl.core.paths import share_folder
from hpcdl.node.accelerators import SeenByTensorflow, nearest
from hpcdl.node.engine import Engine
from hpcdl.node.machines import machine_names, read_machine
from hpcdl.node.profile import Settings
from hpcdl.node.topology import Topology, restricted
from hpcdl.tuning.space import build_space, read_space
from hpcdl.tuning.tune import prepare

Machine = Callable[[str], Topology]


@pytest.mark.parametrize("name", machine_names())
def test_spaces_have_a_workable_size_and_their_anchors(name: str, stock: Engine) -> None:
    machine = read_machine(name)
    space = build_space(machine.topology, stock, published={"published": machine.settings} if machine.settings else {})
    assert 200 <= len(space.candidates) <= 6000
    origins = [space.candidates[index].origin for index in space.anchors]
    assert origins[0] == "TensorFlow's defaults"
    assert any("Intel's guide" in origin for origin in origins)
    assert len(origins) == (3 if machine.settings else 2)


def tuning(machine: str | None = None) -> TuneConfig:
    return TuneConfig(workload=TuneWorkload(model="lenet"), search=TuneSearch(machine=machine), output=TuneOutput())


def test_a_live_search_tries_what_is_published_for_its_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: Machine
) -> None:
    """A live search tries published settings for its node: of a known kind, with half of it, and from a user's file."""
    node = machine("stampede2-knl")
    half = restricted(node, node.cpus[:34])
    for here, known in ((node, 2), (half, 0)):
        monkeypatch.setattr("hpcdl.tuning.tune.read_topology", lambda here=here: here)
        run_plan = prepare(tuning())
        origins = [candidate.origin for candidate in run_plan.space.candidates if candidate.origin]
        assert sum(origin.startswith("published for") for origin in origins) == known, origins
    own = tmp_path / "own.toml"
    topology = share_folder() / "machines" / "knl-7250-quadrant-cache.xml"
    own.write_text(f'name = "own"\nsummary = "ours"\ntopology = "{topology}"\n[settings]\nintra_op_threads = 7\n')
    run_plan = prepare(tuning(str(own)))
    anchors = [run_plan.space.candidates[index] for index in run_plan.space.anchors]
    assert [item.settings.intra_op_threads for item in anchors if item.origin == "published for this machine"] == [7]
    with pytest.raises(UsageError, match="add --plan"):
        prepare(tuning("theta-knl"))


def test_candidates_never_overlap_ranks_nor_repeat(machine: Machine, stock: Engine) -> None:
    plans = [candidate.plan for candidate in build_space(machine("stampede2-knl-snc4-flat"), stock).candidates]
    for plan in plans:
        every = [cpu for cpus in plan.cpus_by_local_rank for cpu in cpus]
        assert len(every) == len(set(every))
    assert len({repr(plan) for plan in plans}) == len(plans)


def test_levels_follow_topology_and_engine(machine: Machine, stock: Engine, openmp: Engine) -> None:
    flat = {c.settings.memory_policy for c in build_space(machine("stampede2-knl-quadrant-flat"), stock).candidates}
    assert flat == {"default", "membind-fast", "preferred-fast"}  # one node has cores, so there is no other choice
    plain = build_space(machine("stampede2-skx"), stock).candidates
    assert {c.settings.memory_policy for c in plain} == {"default", "membind", "interleave"}
    assert {c.settings.kmp_blocktime for c in plain} == {None}
    built = build_space(machine("stampede2-knl"), openmp).candidates
    assert {c.settings.kmp_blocktime for c in built} == {None, 0, 1, 30, 200}
    threads = {c.settings.intra_op_threads for c in built if c.settings.ranks_per_node == 1}
    assert {64, 66, 68, 34, 136, 272} <= threads


@pytest.mark.parametrize(
    ("default", "tried"), [(True, {None, False}), (False, {None, True}), (None, {None, True, False})]
)
def test_both_engines_are_tried_whichever_is_the_default(
    machine: Machine, stock: Engine, *, default: bool | None, tried: set[bool | None]
) -> None:
    space = build_space(machine("generic"), dataclasses.replace(stock, onednn=default))
    assert {c.settings.onednn for c in space.candidates} == tried


def test_a_cpuset_of_one_core_leaves_a_small_space(machine: Machine, stock: Engine) -> None:
    space = build_space(restricted(machine("generic"), [3]), stock)
    assert {c.settings.ranks_per_node for c in space.candidates} == {1}
    assert {c.settings.intra_op_threads for c in space.candidates} == {1}


def test_a_node_with_gpus_is_asked_how_many_host_threads_a_rank_needs(gpu_node: Topology, stock: Engine) -> None:
    space = build_space(gpu_node, stock, published={"published for its CPUs": Settings(intra_op_threads=7)})
    settings = [candidate.settings for candidate in space.candidates]
    assert {item.ranks_per_node for item in settings} == {4}, "a rank for each GPU"
    raced = {item.intra_op_threads for item in settings if item.binding == "devices"}
    assert raced == {1, 2, 4, 8, 12}, "up to the cores of a rank"
    assert {item.inter_op_threads for item in settings if item.binding == "devices"} == {1, 2, 4}
    assert all(item.onednn is None and item.allocator == "default" and not item.xla for item in settings)
    assert [space.candidates[index].origin for index in space.anchors] == ["TensorFlow's defaults"]


def test_each_rank_of_a_candidate_takes_a_gpu_of_its_own_near_its_cores(gpu_node: Topology, stock: Engine) -> None:
    """Each rank takes its own GPU near its cores, by the assignment that ranks make when they start."""
    bound = [item.plan for item in build_space(gpu_node, stock).candidates if item.settings.binding == "devices"]
    for plan in bound:
        taken = nearest(4, [frozenset(cpus) for cpus in gpu_node.near_devices], plan.cpus_by_local_rank)
        assert sorted(taken) == [0, 1, 2, 3]
        for cpus, device in zip(plan.cpus_by_local_rank, taken, strict=True):
            assert {*cpus} <= {*gpu_node.near_devices[device]} and len(cpus) in (12, 24)


def test_no_candidate_shares_a_gpu(gpu_node: Topology, stock: Engine) -> None:
    space = build_space(gpu_node, stock, narrowing={"ranks_per_node": [2, 3, 4, 8]})
    assert {item.settings.ranks_per_node for item in space.candidates} == {2, 4}
    assert all("do not divide the 4 GPUs" in reason for reason in space.dropped)
    only = build_space(gpu_node, stock, narrowing={"only": [True], "intra_op_threads": [2]})
    assert [item.settings.ranks_per_node for item in only.candidates] == [4]
    three = restricted(gpu_node, [cpu for core in gpu_node.cores[:3] for cpu in core.cpus])
    assert {item.settings.ranks_per_node for item in build_space(three, stock).candidates} == {2}, "as cores allow"


@pytest.mark.parametrize("seen", [0, 1])
def test_only_gpus_that_tensorflow_sees_are_tuned_for(
    monkeypatch: pytest.MonkeyPatch, gpu_node: Topology, seen: int
) -> None:
    asked: list[str] = []

    def answer(environment: Mapping[str, str]) -> SeenByTensorflow:
        asked.append(environment["CUDA_VISIBLE_DEVICES"])
        return SeenByTensorflow(version="2.21.0", built_for="CUDA 12.5.1", seen=seen)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr("hpcdl.tuning.tune.read_topology", lambda: gpu_node)
    monkeypatch.setattr("hpcdl.tuning.tune.ask_tensorflow", answer)
    run_plan = prepare(tuning())
    assert asked == ["4"], "as a rank sees it: of MIG instances CUDA takes the first alone"
    ranks = {item.settings.ranks_per_node for item in run_plan.space.candidates}
    if seen:
        assert run_plan.topology == gpu_node and run_plan.remark == "4 x NVIDIA H200: a rank for each"
        assert ranks == {4}
    else:
        assert run_plan.topology.devices == {} and {1, 2, 8} <= ranks
        assert run_plan.remark.startswith("warning: TensorFlow 2.21.0 sees none of this node's GPUs (4 x NVIDIA H200)")


def test_a_space_file_narrows(tmp_path: Path, machine: Machine, stock: Engine) -> None:
    path = tmp_path / "s.toml"
    path.write_text("only = true\nranks_per_node = [1, 2]\nintra-op-threads = [4, 8]\nbinding = 'compact'\n")
    space = build_space(machine("generic"), stock, narrowing=read_space(path))
    assert len(space.candidates) == 4
    assert space.anchors == ()
    assert {c.settings.binding for c in space.candidates} == {"compact"}


def test_a_space_file_extends_and_crosses_details(tmp_path: Path, machine: Machine, stock: Engine) -> None:
    path = tmp_path / "s.toml"
    path.write_text("free_cores = [0, 4]\nranks_per_node = [1]\nonednn_fpmath = ['default', 'BF16']\n")
    space = build_space(machine("generic"), stock, narrowing=read_space(path))
    assert {(c.settings.free_cores, c.settings.onednn_fpmath) for c in space.candidates} == {
        (0, "default"), (4, "default"), (0, "BF16"), (4, "BF16"),
    }  # fmt: skip


def test_wrong_space_files_tell_everything(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("bindng = ['compact']\nintra_op_threads = ['many']\nxla = []\n")
    with pytest.raises(ConfigError) as caught:
        read_space(path)
    assert len(caught.value.problems) == 3
    assert "did you mean 'binding'" in caught.value.problems[0]


def test_an_impossible_space_says_why(machine: Machine, stock: Engine) -> None:
    with pytest.raises(UsageError, match=r"the space is empty: 64 ranks cannot have a core each"):
        build_space(machine("generic"), stock, narrowing={"ranks_per_node": [64], "binding": ["compact"]})


def test_impossible_candidates_are_counted(machine: Machine, stock: Engine) -> None:
    narrowing = {"only": [True], "memory_policy": ["default", "membind-fast"], "intra_op_threads": [4]}
    space = build_space(machine("generic"), stock, narrowing=narrowing)
    assert len(space.candidates) == 1
    assert [count for reason, count in space.dropped.items() if "no fast memory" in reason] == [1]


def test_batch_sizes_cross_everything(machine: Machine, stock: Engine) -> None:
    narrowing = {"ranks_per_node": [1], "binding": ["none"], "inter_op_threads": [2]}
    space = build_space(
        machine("generic"), stock, narrowing=narrowing, batch_sizes=[32, 64], published={"published": Settings()}
    )
    assert {c.settings.batch_size for c in space.candidates} == {32, 64}

"""A LaunchPlan: environment, cores and memory of every local rank; and a check that a rank really received them."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hpcdl.core.errors import UsageError
from hpcdl.core.protocols import LaunchPlan
from hpcdl.core.units import format_list, format_mask
from hpcdl.node.binding import MEMORY_POLICY, cores_needed, cpus_of, place_ranks
from hpcdl.node.engine import links_openmp, preload_path
from hpcdl.node.machines import read_machine, read_topology
from hpcdl.node.profile import Settings, find_profile
from hpcdl.node.topology import Core, Topology, own_affinity

INTRA_OP, INTER_OP = "HPCDL_INTRA_OP_THREADS", "HPCDL_INTER_OP_THREADS"
"""Read at the start of a training, which passes them to tf.config.threading."""
GLIBC_TUNED = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184"
"""Keeps freed buffers in the process, to avoid page faults at every step."""

ALLOCATOR = "HPCDL_ALLOCATOR"
"""The name of the preloaded allocator: for records, which hold no paths, and for the check that it was loaded."""
ONEDNN = "TF_ENABLE_ONEDNN_OPTS"

Rule = Callable[[Settings], Mapping[str, str]]


def environment_of(settings: Settings, *, openmp: bool) -> dict[str, str]:
    """Return the variables of `settings`; OMP_* and KMP_* only for an engine that honours them (`openmp`)."""
    rules = (*RULES, *(OPENMP_RULES if openmp else ()))
    return {name: value for rule in rules for name, value in rule(settings).items()}


def _threads(settings: Settings) -> Mapping[str, str]:
    # TensorFlow's own variables act if a script never calls tf.config (process_util.cc, local_device.cc).
    counts = {
        (INTRA_OP, "TF_NUM_INTRAOP_THREADS"): settings.intra_op_threads,
        (INTER_OP, "TF_NUM_INTEROP_THREADS"): settings.inter_op_threads,
    }
    return {name: str(count) for names, count in counts.items() if count is not None for name in names}


def _engine(settings: Settings) -> Mapping[str, str]:
    variables = {}
    if settings.onednn is not None:
        variables[ONEDNN] = "1" if settings.onednn else "0"
    if settings.onednn_isa != "default":
        variables["ONEDNN_MAX_CPU_ISA"] = settings.onednn_isa
    if settings.onednn_fpmath != "default":
        # TensorFlow reads its own variable, the library the other one: only both together are reliable.
        variables["TF_SET_ONEDNN_FPMATH_MODE"] = settings.onednn_fpmath
        variables["ONEDNN_DEFAULT_FPMATH_MODE"] = settings.onednn_fpmath
    return variables


def _allocator(settings: Settings) -> Mapping[str, str]:
    tunables = {"glibc-tuned": GLIBC_TUNED, "glibc-huge": f"glibc.malloc.hugetlb=1:{GLIBC_TUNED}"}
    if settings.allocator in tunables:
        return {"GLIBC_TUNABLES": tunables[settings.allocator]}
    library = preload_path(settings.allocator)
    if library is None:
        return {}
    return {
        ALLOCATOR: settings.allocator,
        # Before the user's own: of two definitions of malloc the loader takes the first.
        "LD_PRELOAD": ":".join(filter(None, (str(library), os.environ.get("LD_PRELOAD", "")))),
    }


def _graph(settings: Settings) -> Mapping[str, str]:
    # Without the second flag, automatic clustering leaves out what runs on the CPU.
    return {"TF_XLA_FLAGS": "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit"} if settings.xla else {}


def _openmp(settings: Settings) -> Mapping[str, str]:
    # Compact, permuted by 1: neighbouring threads on neighbouring cores, a core's further hardware threads last.
    variables = {"KMP_AFFINITY": "granularity=fine,compact,1,0"} if settings.binding != "none" else {}
    if settings.intra_op_threads is not None:
        variables["OMP_NUM_THREADS"] = str(settings.intra_op_threads)
    if settings.kmp_blocktime is not None:
        variables["KMP_BLOCKTIME"] = str(settings.kmp_blocktime)
    return variables


RULES: tuple[Rule, ...] = (_threads, _engine, _allocator, _graph)
OPENMP_RULES: tuple[Rule, ...] = (_openmp,)


def shell_exports(environment: Mapping[str, str]) -> list[str]:
    """Return `export NAME=value` lines, quoted for any POSIX shell."""
    return [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]


INTER_OP_DEFAULT = 2
"""One operation computes while another waits for the exchange of its gradients."""
_KERNEL_POLICIES = {
    "default": "default", "membind": "membind", "membind-fast": "membind",
    "preferred-fast": "preferred", "interleave": "interleave",
}  # fmt: skip


def launch_plan(
    topology: Topology,
    settings: Settings | None,
    num_ranks: int,
    ranks_per_node: int,
    *,
    openmp: bool | None = None,
    chosen: Mapping[str, Any] = MappingProxyType({}),
) -> LaunchPlan:
    """Return the plan for `num_ranks` ranks, `ranks_per_node` of them on each node, on nodes like `topology`.

    `cpus_by_local_rank` never overlap. Without settings every rank gets an equal share of the cores and as many
    intra-op threads; if ranks outnumber the cores, nothing is bound. `openmp`: whether the engine honours OMP_*;
    by default the installed TensorFlow is examined. `chosen` are settings by name that override `settings`.
    """
    filled = dataclasses.replace(fill(topology, settings, ranks_per_node), **chosen)
    placed = _placed(topology, filled, ranks_per_node)
    environment = environment_of(filled, openmp=links_openmp() if openmp is None else openmp)
    nodes = memory_nodes(topology, filled.memory_policy, placed, ranks_per_node)
    policy = _KERNEL_POLICIES[filled.memory_policy]
    if nodes:
        environment[MEMORY_POLICY] = json.dumps([policy, nodes])
    return LaunchPlan(
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        environment=environment,
        cpus_by_local_rank=tuple(cpus_of(cores, filled.threads_per_core) for cores in placed),
        memory_nodes_by_local_rank=nodes,
        memory_policy=policy,
    )


@dataclass(frozen=True, kw_only=True)
class PlannedNode:
    """A node with its launch plan; `sentence` gives the origin of the settings, empty for the defaults."""

    topology: Topology
    plan: LaunchPlan
    sentence: str


def plan_node(machine: str | None, profile: str, model: str, ranks_per_node: int | None) -> PlannedNode:
    """Plan this node or `machine` with the profile that fits, the machine's published settings, or the defaults."""
    known_machine = read_machine(machine) if machine is not None else None
    topology = known_machine.topology if known_machine is not None else read_topology()
    fitting = find_profile(profile, model, topology)
    settings, sentence = (fitting.settings, fitting.sentence) if fitting else (None, "")
    if fitting is None and profile == "auto" and known_machine is not None and known_machine.settings is not None:
        settings, sentence = (
            known_machine.settings,
            f"published settings for {known_machine.name}: {known_machine.sources[0]}",
        )
    ranks = ranks_per_node or (settings.ranks_per_node if settings else None) or 1
    return PlannedNode(topology=topology, plan=launch_plan(topology, settings, ranks, ranks), sentence=sentence)


def fill(topology: Topology, settings: Settings | None, ranks_per_node: int) -> Settings:
    """Return `settings` with thread counts for `ranks_per_node` ranks on this node.

    A profile tuned for another number of ranks keeps its engine, memory and allocator; its threads are redistributed,
    because thread counts for two ranks would overload the cores with four.
    """
    cores = topology.usable_cores
    if settings is None:
        binding = "balanced" if ranks_per_node <= len(cores) else "none"
        settings = Settings(binding=binding)
    available = max(len(cores) - settings.free_cores, 1)
    share = max(available // ranks_per_node, 1)
    threads = settings.intra_op_threads
    tuned_for = settings.ranks_per_node
    if threads is None:
        threads = share * settings.threads_per_core
    elif tuned_for is not None and tuned_for != ranks_per_node:
        threads = max(threads * tuned_for // ranks_per_node, 1)
        settings = dataclasses.replace(settings, ranks_per_node=ranks_per_node)
        if ranks_per_node > available:
            settings = dataclasses.replace(settings, binding="none")  # ranks would have to share cores
    return dataclasses.replace(
        settings, intra_op_threads=threads, inter_op_threads=settings.inter_op_threads or INTER_OP_DEFAULT
    )


def _placed(topology: Topology, settings: Settings, ranks_per_node: int) -> list[list[Core]]:
    if settings.threads_per_core > topology.threads_per_core:
        raise UsageError(
            f"threads_per_core={settings.threads_per_core}: a core that may be used here has "
            f"{topology.threads_per_core} hardware threads; tune this node again with `hpcdl tune-threads`, "
            "or pass --profile none"
        )
    wanted = cores_needed(settings.intra_op_threads or 1, settings.threads_per_core)
    return place_ranks(topology, ranks_per_node, wanted, settings.binding, settings.free_cores)


def memory_nodes(
    topology: Topology, policy: str, placed: Sequence[Sequence[Core]], ranks_per_node: int
) -> tuple[tuple[int, ...], ...]:
    """Return the memory nodes of each local rank; empty for the default. Raises UsageError if no fast one exists."""
    if policy == "default":
        return ()
    everywhere = [topology.usable_cores] * ranks_per_node
    allowed = set(topology.allowed_memory_nodes)
    ranks = placed or everywhere
    if policy == "interleave":
        return tuple(tuple(sorted(allowed)) for _ in ranks)
    if policy == "membind":
        return tuple(tuple(sorted({core.numa_node for core in cores} & allowed)) for cores in ranks)
    if not topology.fast_nodes:
        raise UsageError(
            f"memory_policy={policy}: this node has no fast memory of its own ({topology.summary}, memory mode "
            f"{topology.memory_mode}); use default, membind or interleave"
        )
    return tuple(_near_fast(topology, cores) for cores in ranks)


def _near_fast(topology: Topology, cores: Sequence[Core]) -> tuple[int, ...]:
    own_cpus = {cpu for core in cores for cpu in core.cpus}
    near = tuple(node.index for node in topology.fast_nodes if own_cpus & set(node.near_cpus))
    return near or tuple(node.index for node in topology.fast_nodes)


def numactl_words(plan: LaunchPlan, local_rank: int) -> list[str]:
    """Return the numactl command for a rank, for launchers that do not bind: shown to people and by --plan."""
    options = []
    if plan.cpus_by_local_rank:
        options.append(f"--physcpubind={format_list(plan.cpus_by_local_rank[local_rank])}")
    if plan.memory_policy != "default":
        flag = plan.memory_policy
        nodes = plan.memory_nodes_by_local_rank[local_rank]
        if flag == "preferred" and len(nodes) > 1:
            flag = "preferred-many"
        options.append(f"--{flag}={format_list(nodes)}")
    return ["numactl", *options] if options else []


def command_line(plan: LaunchPlan, local_rank: int, command: Sequence[str]) -> str:
    """Return the command that starts a local rank by hand."""
    spoken = {name: value for name, value in plan.environment.items() if name != MEMORY_POLICY}  # numactl sets it
    environment = [f"{name}={shlex.quote(value)}" for name, value in sorted(spoken.items())]
    return " ".join([*environment, *numactl_words(plan, local_rank), *(shlex.quote(word) for word in command)])


def verify_binding(expected: Sequence[int]) -> str | None:
    """Return a warning with both masks if this process does not run on the `expected` CPUs (none: any); else None."""
    got = own_affinity()
    if not expected or got == tuple(sorted(expected)):
        return None
    return (
        f"binding differs: asked for CPUs {format_list(expected)} ({format_mask(expected)}), "
        f"got {format_list(got)} ({format_mask(got)}); the launcher or the job's cpuset decided otherwise"
    )

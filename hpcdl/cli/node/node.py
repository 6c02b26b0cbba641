"""`hpcdl node`: what this node is made of, and the environment that its profile asks for."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from hpcdl.cli.groups import completer
from hpcdl.cli.options import JsonFlag
from hpcdl.cli.output import print_json, put, say
from hpcdl.core.paths import typed
from hpcdl.core.units import format_bytes

commands = typer.Typer(no_args_is_help=True, help="Look at this node, or at a known machine.")

MachineFlag = Annotated[
    str | None,
    typer.Option(
        "--machine", metavar="NAME", help="A known machine, or an hwloc XML file.", autocompletion=completer("machine")
    ),
]
ProfileFlag = Annotated[
    str,
    typer.Option(
        "--profile", metavar="FILE", help="A profile, `auto` or `none`. [auto]", autocompletion=completer("profile")
    ),
]
ModelFlag = Annotated[
    str,
    typer.Option(
        "--model", metavar="TEXT", help="Network whose profile is looked for.", autocompletion=completer("model")
    ),
]
RanksFlag = Annotated[
    int | None,
    typer.Option("--ranks-per-node", min=1, metavar="N", help="Ranks that share the node. [the profile's, or 1]"),
]


def register(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(commands, name="node")


@commands.command(epilog="Example: hpcdl node show --machine stampede2-knl-quadrant-flat")
def show(
    machine: MachineFlag = None,
    profile: ProfileFlag = "auto",
    model: ModelFlag = "",
    ranks_per_node: RanksFlag = None,
    json: JsonFlag = False,
) -> None:
    """Show packages, NUMA nodes, caches, cores, what this process may use, and where ranks would sit."""
    from hpcdl.core.units import format_list
    from hpcdl.node.accelerators import told
    from hpcdl.node.drawing import draw
    from hpcdl.node.engine import find_engine
    from hpcdl.node.plan import plan_node

    planned = plan_node(machine, profile, model, ranks_per_node)
    topology, plan = planned.topology, planned.plan
    if json:
        document = dataclasses.asdict(topology) | {
            "memory_mode": topology.memory_mode, "cluster_mode": topology.cluster_mode,
            "fingerprint": topology.fingerprint, "cpus_by_local_rank": [list(cpus) for cpus in plan.cpus_by_local_rank],
        }  # fmt: skip
        print_json(document)
        return
    put(topology.summary)
    put(f"memory mode    {topology.memory_mode}, {topology.cluster_mode}")
    for cache in topology.caches:
        put(f"cache {cache.level:<8} {cache.num} x {format_bytes(cache.size_bytes)}, {cache.cores_each} cores each")
    memory = format_list(topology.allowed_memory_nodes)
    put(f"may use        CPUs {format_list(topology.allowed_cpus)}, NUMA nodes {memory}")
    put(f"fingerprint    {topology.fingerprint} (from {topology.source})")
    if topology.devices:
        near = "; ".join(f"{device}: {format_list(cpus)}" for device, cpus in enumerate(topology.near_devices))
        put(f"GPUs           {told(topology.devices)}" + (f", CPUs near them {near}" if near else ""))
    if machine is None:
        put(f"engine         {find_engine().summary}")
    put()
    put("\n".join(draw(topology, plan.cpus_by_local_rank)))
    if planned.sentence:
        say(planned.sentence)
    also = ["--plan", "--machine", machine] if machine else []
    say(f"next: {typed('tune-threads', '--model', 'M', '--batch-size', 'B', *also)}")


@commands.command(epilog='Example: eval "$(hpcdl node env --model resnet50)"')
def env(
    machine: MachineFlag = None,
    profile: ProfileFlag = "auto",
    model: ModelFlag = "",
    ranks_per_node: RanksFlag = None,
    json: JsonFlag = False,
) -> None:
    """Print the profile's environment as shell exports, for use without hpcdl; numactl lines stand as comments."""
    from hpcdl.node.environment import shell_exports
    from hpcdl.node.plan import numactl_words, plan_node

    planned = plan_node(machine, profile, model, ranks_per_node)
    if json:
        every = [numactl_words(planned.plan, rank) for rank in range(planned.plan.ranks_per_node)]
        print_json({"environment": dict(planned.plan.environment), "numactl": every})
    else:
        put("\n".join(shell_exports(planned.plan.environment)))
        for rank in range(planned.plan.ranks_per_node):
            words = numactl_words(planned.plan, rank)
            if words:
                put(f"# local rank {rank}: {' '.join(words)} COMMAND")
    say(planned.sentence or "no profile fits this node: these are hpcdl's defaults; make one with `hpcdl tune-threads`")

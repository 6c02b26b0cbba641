"""A node with what would be started on it: topology, profile and launch plan, for people to look at."""

from __future__ import annotations

from dataclasses import dataclass

from hpcdl.core.protocols import LaunchPlan
from hpcdl.node.plan import launch_plan
from hpcdl.node.profile import find_profile
from hpcdl.node.topology.machines import read_machine, read_topology
from hpcdl.node.topology.model import Topology


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What `hpcdl node` shows; `sentence` says where the settings come from, empty for the defaults."""

    topology: Topology
    plan: LaunchPlan
    sentence: str


def sight(machine: str | None, profile: str, model: str, ranks_per_node: int | None) -> Sight:
    """This node or `machine`, under the profile that fits, the machine's published settings, or the defaults."""
    known = read_machine(machine) if machine is not None else None
    topology = known.topology if known is not None else read_topology()
    found = find_profile(profile, model, topology)
    settings, sentence = (found.settings, found.sentence) if found else (None, "")
    if found is None and profile == "auto" and known is not None and known.settings is not None:
        settings, sentence = known.settings, f"published settings for {known.name}: {known.sources[0]}"
    ranks = ranks_per_node or (settings.ranks_per_node if settings else None) or 1
    return Sight(topology=topology, plan=launch_plan(topology, settings, ranks, ranks), sentence=sentence)

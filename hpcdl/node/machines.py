"""A node to plan for: this one, or a machine that a TOML file of hpcdl describes."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.core.errors import UnknownNameError, UsageError, suggestion
from hpcdl.core.paths import share_folder
from hpcdl.core.storage.files import read_toml
from hpcdl.node import hwloc, sysfs
from hpcdl.node.accelerators import cpus_near_shown, shown
from hpcdl.node.profile import Settings, settings_from
from hpcdl.node.topology import Topology

KEYS = {
    "name",
    "summary",
    "site",
    "scheduler",
    "topology",
    "sources",
    "settings",
    "published",
    "launcher",
    "network",
    "compute",
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A node type: `settings` are a published starting point (a candidate like any other), `sources` say whose."""

    name: str
    summary: str
    topology: Topology
    settings: Settings | None
    sources: tuple[str, ...]
    flop_per_second: float | None = None
    """The published speed of training on one whole node; `flop_spread` is the spread of its logarithm."""
    flop_spread: float = 0.5


def machine_names(folder: Path | None = None) -> list[str]:
    """Return the names that `--machine` accepts."""
    return sorted(path.stem for path in (folder or share_folder() / "machines").glob("*.toml"))


def read_machine(choice: str, folder: Path | None = None) -> Machine:
    """Return the machine named `choice`, or that of a .toml or .xml file. Raises UsageError, ConfigError if invalid."""
    folder = folder or share_folder() / "machines"
    if choice.endswith(".xml"):
        topology = hwloc.read_file(Path(choice))
        return Machine(name=choice, summary=topology.summary, topology=topology, settings=None, sources=())
    path = Path(choice) if choice.endswith(".toml") else folder / f"{choice}.toml"
    if not choice.endswith(".toml") and choice not in machine_names(folder):
        raise UnknownNameError("machine", choice, machine_names(folder))
    return _from_table(read_toml(path), path)


def machines_like(topology: Topology, folder: Path | None = None) -> list[Machine]:
    """Return the known machines of this topology that have published settings; none for a part of a node."""
    if set(topology.cpus) > set(topology.allowed_cpus):
        return []
    machines = (read_machine(name, folder) for name in machine_names(folder))
    return [
        machine
        for machine in machines
        if machine.settings is not None and machine.topology.fingerprint == topology.fingerprint
    ]


def read_topology(machine: str | None = None) -> Topology:
    """Return the topology of this node (`machine` None), or of a file in share/hpcdl/machines or an XML file.

    Uses hwloc if `lstopo` or `HWLOC_XMLFILE` is available, else /sys; GPUs are those that the environment shows.
    """
    if machine is not None:
        return read_machine(machine).topology
    near = tuple(tuple(sorted(cpus)) for cpus in cpus_near_shown(os.environ))
    return dataclasses.replace(hwloc.read_live() or sysfs.read_live(), devices=shown(os.environ), near_devices=near)


def _from_table(table: dict[str, Any], path: Path) -> Machine:
    unknown = sorted(set(table) - KEYS)
    if unknown:
        raise UsageError(f"{path}: unknown key {unknown[0]!r}{suggestion(unknown[0], KEYS)}")
    missing = sorted({"name", "summary", "topology"} - set(table))
    if missing:
        raise UsageError(f"{path}: the key {missing[0]!r} is missing")
    raw = table.get("settings")
    compute = _compute(table.get("compute", {}), path)
    return Machine(
        name=str(table["name"]),
        summary=str(table["summary"]),
        topology=hwloc.read_file(path.parent / str(table["topology"])),
        settings=settings_from(raw, origin=str(path)) if raw else None,
        sources=tuple(str(source) for source in table.get("sources", ())),
        **compute,
    )


def _compute(table: Any, path: Path) -> dict[str, float]:
    keys = {"flop_per_second", "flop_spread"}
    if not isinstance(table, dict) or not set(table) <= keys:
        raise UsageError(f"{path}: [compute] has {' and '.join(sorted(keys))}, numbers above 0")
    for key, value in table.items():
        # A bool is an int for Python.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UsageError(f"{path}: {key} is {value!r}; give a number above 0")
    return {key: float(value) for key, value in table.items()}

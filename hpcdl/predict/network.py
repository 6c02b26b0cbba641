"""What is known of a network before a run: a file, a name, two numbers, or a measured all-reduce.

A link carries n bytes in latency + n / bandwidth. There are three levels: memory (ranks of one node), node (two nodes),
switch (nodes under different switches). Values that are not stated are unknown, within the usual range of networks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.core.errors import CorruptError, UnknownNameError, UsageError, suggestion
from hpcdl.core.paths import share_folder
from hpcdl.core.storage.files import read_json, read_toml
from hpcdl.core.units import parse_size

FORMS = "a name of share/hpcdl/networks, a file, or latency,bandwidth such as 2us,12.5GB"


@dataclass(frozen=True, kw_only=True)
class AllreduceTime:
    """One measured all-reduce of `bench allreduce`: seconds of the slowest rank."""

    strategy: str
    ranks: int
    nodes: int
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Network:
    """Latencies in seconds, bandwidths in bytes per second; None means unknown.

    `spread` is the standard deviation of the logarithm of the stated values. `nodes_per_switch` nodes share `uplinks`
    links of the same bandwidth. `measured` holds all-reduces that were timed on it.
    """

    name: str
    summary: str = ""
    latency_s: float | None = None
    bytes_per_second: float | None = None
    memory_latency_s: float | None = None
    memory_bytes_per_second: float | None = None
    nodes_per_switch: int | None = None
    uplinks: int | None = None
    file_system_bytes_per_second: float | None = None
    spread: float = 0.3
    sources: tuple[str, ...] = ()
    measured: tuple[AllreduceTime, ...] = ()

    def __post_init__(self) -> None:
        for key in _POSITIVE:
            value = getattr(self, key)
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise UsageError(f"--network {self.name}: {key} is {value}; a network has more than nothing of it")

    def oversubscription(self, num_nodes: int) -> float:
        """Return how much longer bytes take if all nodes send to distant ones at once: 1 on a full fat tree."""
        if self.nodes_per_switch is None or num_nodes <= self.nodes_per_switch:
            return 1.0
        # Partners are spread over all nodes: only those under the own switch need no uplink.
        share_crossing = 1 - self.nodes_per_switch / num_nodes
        return max(1.0, share_crossing * self.nodes_per_switch / (self.uplinks or self.nodes_per_switch))


_POSITIVE = (
    "latency_s", "bytes_per_second", "memory_latency_s", "memory_bytes_per_second", "nodes_per_switch", "uplinks",
    "file_system_bytes_per_second", "spread",
)  # fmt: skip
UNKNOWN = Network(name="unknown")
_KEYS = {*_POSITIVE, "name", "summary", "sources"}
_LATENCY = r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(us|µs|ms|ns|s|)"
_UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "ns": 1e-9, "s": 1.0, "": 1.0}


def network_names(folder: Path | None = None) -> list[str]:
    """Return the names that `--network` takes."""
    return sorted(path.stem for path in (folder or share_folder() / "networks").glob("*.toml"))


def read_network(choice: str) -> Network:
    """Return the network that `choice` names, states or has measured. Raises UsageError if it does none of these."""
    if "," in choice and not Path(choice).is_file():
        return _from_numbers(choice)
    if choice in network_names():
        return _from_table(share_folder() / "networks" / f"{choice}.toml")
    path = Path(choice)
    if path.is_file():
        return _from_table(path) if path.suffix == ".toml" else _from_bench(path)
    if "/" in choice or path.suffix:
        raise UsageError(f"--network {choice}: there is no such file; give {FORMS}")
    raise UnknownNameError("network", choice, network_names())


def _from_numbers(text: str) -> Network:
    latency, _, bandwidth = text.partition(",")
    match = re.fullmatch(_LATENCY, latency.strip())
    if match is None:
        raise UsageError(f"--network {text}: {latency!r} is no latency; give {FORMS}")
    try:
        carried = parse_size(bandwidth.strip().removesuffix("/s"))
    except ValueError as error:
        raise UsageError(f"--network {text}: {error}; give {FORMS}") from None
    return Network(
        name=text, latency_s=float(match[1]) * _UNITS[match[2]], bytes_per_second=float(carried), spread=0.15
    )


def _from_table(path: Path) -> Network:
    table: dict[str, Any] = read_toml(path)
    unknown = sorted(set(table) - _KEYS)
    if unknown:
        raise UsageError(f"{path}: unknown key {unknown[0]!r}{suggestion(unknown[0], _KEYS)}")
    values: dict[str, Any] = {key: value for key, value in table.items() if key != "sources"}
    for key in _POSITIVE:
        if key in values and (isinstance(values[key], bool) or not isinstance(values[key], int | float)):
            raise UsageError(f"{path}: {key} is {values[key]!r}; give a number")
    sources = table.get("sources", [])
    if not isinstance(sources, list):
        raise UsageError(f"{path}: sources is no list of sentences")
    return Network(**{"name": path.stem} | values, sources=tuple(map(str, sources)))


def _from_bench(path: Path) -> Network:
    """Return the network in the output of `hpcdl bench allreduce --json`."""
    try:
        document: Mapping[str, Any] = read_json(path)
        link, ranks, nodes = document["link"], int(document["ranks"]), int(document["nodes"])
        rows: Sequence[Mapping[str, Any]] = document["rows"]
        measured = tuple(
            AllreduceTime(
                strategy=str(row["algorithm"]), ranks=ranks, nodes=nodes, bytes=int(row["bytes"]),
                seconds=float(row["seconds"]),
            )
            for row in rows
        )  # fmt: skip
        latency, per_byte = float(link["latency_s"]), float(link["seconds_per_byte"])
    except (CorruptError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise UsageError(
            f"--network {path} is neither a network's TOML file nor what hpcdl bench allreduce --json prints"
        ) from None
    if not per_byte > 0 or ranks < 2 or any(not 0 < row.seconds < math.inf for row in measured):
        raise UsageError(f"--network {path}: its link's time does not grow with size; measure larger --sizes")
    # A fitted latency may be at its bound of 0, which Network refuses.
    values: dict[str, Any] = {"latency_s": max(latency, 1e-8), "bytes_per_second": 1 / per_byte}
    if nodes == 1:  # it measures memory, and nothing between nodes
        values = {f"memory_{key}": value for key, value in values.items()}
    return Network(name=path.name, spread=0.3, measured=measured, **values)

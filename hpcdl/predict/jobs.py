"""The jobs to predict, as far as their settings affect the time of a step, and the placement of ranks on nodes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcdl.collectives.table import COLLECTIVES
from hpcdl.config.forms import NONE, PLAIN
from hpcdl.config.schema import BUCKET_BYTES
from hpcdl.core.errors import UnknownNameError, UsageError
from hpcdl.core.paths import share_folder
from hpcdl.core.storage.files import read_json
from hpcdl.models.table import parse_emulation
from hpcdl.strategies.elastic.methods import METHODS
from hpcdl.strategies.periodic.methods import METHODS as PERIODIC
from hpcdl.strategies.table import ALIASES, STRATEGIES

ITEM_BYTES = 4  # float32, in which gradients are computed
DEFAULT_PLACEMENTS = {"ps": "split", "grpc-ps": "round-robin"}  # the default of replica_device_setter for grpc-ps


@dataclass(frozen=True, kw_only=True)
class StepJob:
    """One point. `batch` is samples per worker and step, `threads` per worker (0 unknown); `nodes` counts all nodes.

    `lengths` are the gradients' elements in creation order; a single total if the network is unknown. `ready`, if a
    trace shows it: shares of all bytes in sending order, and of computing when these are ready. The weights of
    streaming-diloco are exchanged in `fragments`, each beside `overlap` steps. `period_within` (0: none) is for workers
    of one node. Gradients travel as `compress` says; in forms with fewer than 16 bits per value, `coded_bytes`
    represents what a rank sends (messages.py).
    """

    strategy: str
    model: str
    nodes: int
    workers: int
    servers: int = 0
    workers_per_node: int = 1
    batch: float
    threads: int = 0
    lengths: tuple[int, ...]
    compress: str = NONE
    coded_bytes: float = 0.0
    bucket_bytes: int = BUCKET_BYTES
    placement: str = ""
    period: int = 1
    period_within: int = 0
    fragments: int = 1
    overlap: int = 0
    variant: str = "3"
    ready: tuple[tuple[float, float], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients as sent."""
        return ITEM_BYTES * sum(self.lengths) // self.shrunk

    @property
    def shrunk(self) -> int:
        """Factor by which a value is shorter than float32; coded forms are counted in another way."""
        return 2 if self.compress in PLAIN and self.compress != NONE else 1

    @property
    def coded(self) -> bool:
        """Whether gradients are sent in a form that needs computing."""
        return self.compress not in PLAIN and not self.alone

    @property
    def label(self) -> str:
        """The strategy, followed by the form if that is coded: what has its own speed."""
        return label_of(self.strategy, self.compress)

    @property
    def alone(self) -> bool:
        """Whether there is no rank to exchange with."""
        return self.workers == 1 and self.servers == 0

    @property
    def local(self) -> bool:
        """Whether no message leaves the node."""
        return self.nodes == 1

    @property
    def server_nodes(self) -> int:
        """Nodes that hold only servers; 0 if servers share the workers' nodes."""
        return max(0, self.nodes - math.ceil(self.workers / self.workers_per_node))


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The placement of a strategy's ranks on nodes, as in measured runs.

    With `shared`, servers are added to a node's workers; else they are among the ranks of the nodes.
    """

    workers_per_node: int = 1
    shared: bool = False

    def workers(self, num_nodes: int, num_servers: int) -> int:
        """Return the workers on `num_nodes` nodes; below 1 if servers leave no room."""
        return num_nodes * self.workers_per_node - (0 if self.shared else num_servers)


def is_coded(compress: str) -> bool:
    """Return whether only runs show the cost of this form of gradients, which holds for unknown forms too."""
    return compress not in PLAIN


def label_of(strategy: str, compress: str) -> str:
    """Return the label of measured sizes: `ring`, or `ring int8`."""
    return f"{strategy} {compress}" if is_coded(compress) else strategy


def parts_of(label: str) -> tuple[str, str]:
    """Return strategy and form of a label; the form is empty if it is not coded."""
    strategy, _, compress = label.partition(" ")
    return strategy, compress


def kind_of(strategy: str) -> str:
    """Return its timeline: single, all-reduce, servers, center, sync-easgd or periodic. Raises UnknownNameError."""
    name = ALIASES.get(strategy, strategy)
    if name in _KINDS:
        return _KINDS[name]
    raise UnknownNameError("strategy", strategy, [*STRATEGIES, *ALIASES])


_KINDS: Mapping[str, str] = {
    **dict.fromkeys(COLLECTIVES, "all-reduce"),
    **dict.fromkeys(METHODS, "center"),
    "grpc-ring": "all-reduce",
    "nccl": "all-reduce",
    "single": "single",
    "ps": "servers",
    "grpc-ps": "servers",
    "sync-easgd": "sync-easgd",
    **dict.fromkeys(PERIODIC, "periodic"),
}


def has_servers(strategy: str) -> bool:
    """Return whether some of its ranks are servers."""
    return STRATEGIES[ALIASES.get(strategy, strategy)].features.servers


def has_period(strategy: str) -> bool:
    """Return whether its workers may take several steps between exchanges."""
    features = STRATEGIES[ALIASES.get(strategy, strategy)].features
    return features.elastic or bool(features.periodic)


def streaming_of(strategy: str, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of fragments in which a strategy's weights are exchanged, and the steps beside each exchange.

    They come from the run's settings, if given. It is not known here if a model has fewer layers than fragments.
    """
    method = PERIODIC.get(ALIASES.get(strategy, strategy))
    if method is None or method.streaming is None:
        return 1, 0
    period = int(settings.get("period") or method.period)  # no run of such a method finds it by itself
    fragments, overlap = settings.get("fragments"), settings.get("overlap")
    return (
        min(method.streaming.fragments, period) if fragments is None else int(fragments),
        method.streaming.overlap if overlap is None else int(overlap),
    )


@functools.lru_cache(maxsize=64)
def lengths_of(model: str, gradient_bytes: int | None, recorded: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the elements of a network's gradients in creation order; usual ones if only their bytes are known.

    `recorded`: the elements in a run's record, which are exact. Raises UsageError if not even the bytes are known. A
    network with another number of classes keeps its layers: the last ones take up the difference.
    """
    if recorded:
        return recorded
    lengths = _known_lengths(model)
    if lengths is None and not gradient_bytes:
        raise UsageError(
            f"nothing is known of the gradients of {model}: give runs of it, a column gradient_bytes, or --model with"
            f" FILE.keras, FILE.py:FUNCTION or one of {', '.join(_table_of_lengths())}"
        )
    if lengths is None:
        return _usual_lengths(max(1, (gradient_bytes or 0) // ITEM_BYTES))
    missing = (gradient_bytes or ITEM_BYTES * sum(lengths)) // ITEM_BYTES - sum(lengths)
    # The last two are the classifier's kernel and bias; the kernel has nearly all elements of the difference.
    if missing and lengths[-2] + missing > 0:
        return (*lengths[:-2], lengths[-2] + missing, lengths[-1])
    return tuple(lengths) if not missing else (max(1, sum(lengths) + missing),)


def layers_known(model: str) -> bool:
    """Return whether the lengths of a network's variables are known, not only their sum."""
    return _known_lengths(model) is not None


def _known_lengths(model: str) -> list[int] | None:
    emulation = parse_emulation(model)
    return _table_of_lengths().get(model if emulation is None else emulation.network)


def _table_of_lengths() -> Mapping[str, list[int]]:
    table: Mapping[str, list[int]] = read_json(share_folder() / "models" / "variables.json")
    return table


_USUAL_LAYERS = 32


def _usual_lengths(total: int) -> tuple[int, ...]:
    """Return `total` elements as in a network without a dominant layer: later layers grow, weights have biases."""
    shares = [1.08**number for number in range(_USUAL_LAYERS)]
    weights = [int(total * share / sum(shares)) for share in shares]
    # Rounding down has lost some elements.
    weights[-1] += total - sum(weights)
    return tuple(length for length in weights if length)

"""What is to be run, as far as it decides how long a step takes; and how ranks lie on nodes."""

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

ITEM_BYTES = 4
DEFAULT_PLACEMENTS = {"ps": "split", "grpc-ps": "round-robin"}


@dataclass(frozen=True, kw_only=True)
class StepJob:
    """One point. `batch` is samples per worker and step, `threads` per worker (0 unknown), `nodes` counts all.

    `lengths` are the gradients' elements in creation order; one of them all where the network is not known. `ready`,
    where a trace has it: shares of all bytes, as they leave, and of computing when these are there. The weights of
    streaming-diloco are exchanged in `fragments`, each beside `overlap` steps. `period_within` (0: none) is that of the
    workers of one node. Gradients travel as `compress` says; in forms with fewer than 16 bits a value `coded_bytes`
    stand for what a rank sends (messages.py).
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
        """Bytes of all gradients as they travel."""
        return ITEM_BYTES * sum(self.lengths) // self.shrunk

    @property
    def shrunk(self) -> int:
        """How many times fewer bytes a value has than float32; forms that are coded are counted otherwise."""
        return 2 if self.compress in PLAIN and self.compress != NONE else 1

    @property
    def coded(self) -> bool:
        """Whether gradients travel in a form that takes computing of its own."""
        return self.compress not in PLAIN and not self.alone

    @property
    def label(self) -> str:
        """Its strategy, with the form behind it where that is coded: what has a speed of its own."""
        return label_of(self.strategy, self.compress)

    @property
    def alone(self) -> bool:
        """Whether there is nobody to exchange with."""
        return self.workers == 1 and self.servers == 0

    @property
    def local(self) -> bool:
        """Whether no message leaves the node."""
        return self.nodes == 1

    @property
    def server_nodes(self) -> int:
        """Nodes that hold servers alone; 0 where servers share the workers' nodes."""
        return max(0, self.nodes - math.ceil(self.workers / self.workers_per_node))


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """How the ranks of a strategy lie on nodes, as measured runs had it.

    With `shared` servers come on top of a node's workers; else they are among the ranks of the nodes.
    """

    workers_per_node: int = 1
    shared: bool = False

    def workers(self, num_nodes: int, num_servers: int) -> int:
        """Workers on so many nodes; below 1 where servers leave no room."""
        return num_nodes * self.workers_per_node - (0 if self.shared else num_servers)


def is_coded(compress: str) -> bool:
    """Whether gradients of this form cost what only runs tell; so do those of a word that nobody knows."""
    return compress not in PLAIN


def label_of(strategy: str, compress: str) -> str:
    """`ring`, or `ring int8`: what measured sizes are of."""
    return f"{strategy} {compress}" if is_coded(compress) else strategy


def parts_of(label: str) -> tuple[str, str]:
    """Strategy and form of a label; the form is empty where it is not coded."""
    strategy, _, compress = label.partition(" ")
    return strategy, compress


def kind_of(strategy: str) -> str:
    """Which timeline a strategy has: single, all-reduce, servers, center, sync-easgd or periodic; UnknownNameError."""
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
    """Whether some ranks of it serve."""
    return STRATEGIES[ALIASES.get(strategy, strategy)].features.servers


def has_period(strategy: str) -> bool:
    """Whether its workers may take several steps from one exchange to the next."""
    features = STRATEGIES[ALIASES.get(strategy, strategy)].features
    return features.elastic or bool(features.periodic)


def streaming_of(strategy: str, settings: Mapping[str, Any]) -> tuple[int, int]:
    """How many fragments a strategy's weights are exchanged in, and the steps beside each exchange.

    By a run's settings, as far as they say so. What a model has fewer layers than that is not known here.
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


def is_synchronous(strategy: str) -> bool:
    """Whether its workers wait for one another in every step."""
    return STRATEGIES[ALIASES.get(strategy, strategy)].features.synchronous


@functools.lru_cache(maxsize=64)
def lengths_of(model: str, gradient_bytes: int | None, recorded: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The elements of a network's gradients in creation order; usual ones where only their bytes are known.

    `recorded`: as a run of it had them, which is the truth. UsageError where not even their bytes are known. A network
    that was given other classes keeps its layers: the last ones take up the difference.
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
    if missing and lengths[-2] + missing > 0:
        return (*lengths[:-2], lengths[-2] + missing, lengths[-1])
    return tuple(lengths) if not missing else (max(1, sum(lengths) + missing),)


def layers_known(model: str) -> bool:
    """Whether the lengths of a network's variables are known, and not only their sum."""
    return _known_lengths(model) is not None


def _known_lengths(model: str) -> list[int] | None:
    emulation = parse_emulation(model)
    return _table_of_lengths().get(model if emulation is None else emulation.network)


def _table_of_lengths() -> Mapping[str, list[int]]:
    table: Mapping[str, list[int]] = read_json(share_folder() / "models" / "variables.json")
    return table


_USUAL_LAYERS = 32


def _usual_lengths(total: int) -> tuple[int, ...]:
    """So many elements as a network without a dominant layer has them: later layers are larger, weights have biases."""
    shares = [1.08**number for number in range(_USUAL_LAYERS)]
    weights = [int(total * share / sum(shares)) for share in shares]
    weights[-1] += total - sum(weights)
    return tuple(length for length in weights if length)

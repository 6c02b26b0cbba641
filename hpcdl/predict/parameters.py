"""The unknowns of the timeline, and and their priors: what they usually are.

Each is estimated on a scale where it is unbounded: positive ones as logarithms, shares as log odds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.predict.jobs import parts_of
from hpcdl.predict.network import Network

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]


def _same(value: Array) -> Array:
    return value


def _share(value: Array) -> Array:
    result: Array = 1 / (1 + numpy.exp(-value))
    return result


def _positive(value: Array) -> Array:
    result: Array = numpy.exp(numpy.clip(value, -60, 60))
    return result


@dataclass(frozen=True, kw_only=True)
class Prior:
    """One unknown: `center` and `spread` (mean and standard deviation) on the scale that `natural` leads back from.

    `words` say what it is, to a person.
    """

    name: str
    center: float
    spread: float
    natural: Callable[[Array], Array] = _positive
    words: str = ""


def _log(name: str, value: float, spread: float, words: str) -> Prior:
    return Prior(name=name, center=math.log(value), spread=spread, words=words)


USUAL: tuple[Prior, ...] = (
    _log("image_s", 0.01, 4.0, "seconds of computing per sample and worker"),
    _log("batch_overhead", 1.0, 1.0, "samples' worth of computing that a batch of any size costs"),
    _log("update_s", 1e-3, 1.5, "the update and what else is done once a step"),
    _log("input_s", 1e-5, 1.0, "waiting for a batch"),
    _log("latency_s", 15e-6, 2.0, "a message's latency between nodes"),
    _log("byte_s", 1 / 2e9, 1.3, "a byte's way between nodes"),
    _log("memory_latency_s", 10e-6, 1.0, "a message's latency inside a node"),
    _log("memory_byte_s", 1 / 3e9, 0.8, "a byte's way inside a node"),
    _log("sum_byte_s", 1 / 6e9, 0.5, "adding up a byte"),
    Prior(name="overlap", center=0.8, spread=1.0, natural=_share, words="share of an exchange that computing hides"),
    Prior(name="early", center=2.5, spread=1.2, natural=_share, words="how early gradients leave, of what they could"),
    _log("noise", 0.04, 0.8, "variation of a worker's computing from step to step"),
    Prior(name="contention", center=0.04, spread=0.06, natural=_same, words="growth of a byte's cost with nodes"),
    _log("server_factor", 1.2, 0.4, "a byte's cost at a server over that of the link"),
    _log("server_latency_s", 20e-6, 1.0, "a server's work for one request, whatever its size"),
    _log("grpc_byte_s", 1 / 0.8e9, 0.4, "a byte's cost at a gRPC server"),
    Prior(name="thread_power", center=0.9, spread=0.12, natural=_same, words="gain by threads, as a power"),
    _log("file_system_images_s", 1e12, 0.01, "samples per second that the file system gives all nodes"),
)
EFFICACY = "efficacy "
CODING = "coding "
EFFICACY_SPREAD = 0.15
"""How much a strategy's exchange may differ from what its messages would take (logarithm)."""
UNKNOWN_LAYERS_SPREAD = 0.6
"""The same where only the sum of all layers is known."""


def priors(
    strategies: Sequence[str],
    network: Network,
    stated: Mapping[str, tuple[float, float]],
    *,
    layers_known: bool = True,
) -> list[Prior]:
    """The priors: usual values, in place of them what the network states, then `stated`.

    `strategies` are labels (jobs.py). `stated` holds values with the spreads of their logarithms. Where layers are not
    known, buckets and the busiest server's share are guesses, and every strategy's own speed is wide.
    """
    known: dict[str, tuple[float, float]] = {}
    for prefix, latency, bandwidth in (
        ("", network.latency_s, network.bytes_per_second),
        ("memory_", network.memory_latency_s, network.memory_bytes_per_second),
    ):
        if latency is not None:
            # What a program waits for a message is more than what the wire takes.
            known[f"{prefix}latency_s"] = (latency + _SOFTWARE_S, max(network.spread, 0.5))
        if bandwidth is not None:
            known[f"{prefix}byte_s"] = (1 / bandwidth, network.spread)
    known |= stated
    found = [
        dataclasses.replace(item, center=math.log(known[item.name][0]), spread=known[item.name][1])
        if item.name in known
        else item
        for item in USUAL
    ]
    spread = EFFICACY_SPREAD if layers_known else UNKNOWN_LAYERS_SPREAD
    own = (
        Prior(name=EFFICACY + name, center=0.0, spread=spread, natural=_same, words=f"{name}'s own speed")
        for name in sorted(set(strategies))
    )
    return [*found, *own, *_coding(strategies)]


def _coding(labels: Iterable[str]) -> list[Prior]:
    """Of the forms that gradients are coded in: some passes over each value, more or fewer."""
    forms = sorted({form for _, form in map(parts_of, labels) if form})
    return [_log(CODING + form, 10e-9, 1.5, f"packing and unpacking a value as {form}") for form in forms]


_SOFTWARE_S = 5e-6


def natural_values(items: Sequence[Prior], points: Array) -> dict[str, Array]:
    """Points (sets, unknowns) as values by name, (sets,) each."""
    return {item.name: item.natural(points[:, place]) for place, item in enumerate(items)}

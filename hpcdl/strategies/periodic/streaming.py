"""Streaming DiLoCo: fragments of the shared weights are exchanged in turn, each during the steps that follow.

Source: Douillard et al. 2025 (arXiv 2501.18512), algorithm 2. A fragment consists of whole layers: layer l belongs to
fragment l mod P, the strided pattern of its section 2.1. Fragment p is sent once in each period of H steps: after step
(p + 1) H / P, rounded down. Its mean change is merged `overlap` steps later. The run's last step ends with an exchange
of all fragments.

Changes of weights are sent as float32, in 16 bits, or in 8 or 4 bits with a scale for each block. Rounding errors are
not kept: a worker's own weights still contain them if mixing leaves the weights apart, and the paper keeps none either
(docs/decisions/0229-changes-in-few-bits.md).

Two things differ from the printed algorithm. A change is measured from the shared weights, which are equal on all
workers. Line 7 uses the worker's own of H steps ago; without mixing these are the same. And `--mixing` is the share of
the shared weights, 1 minus the paper's alpha: 1 is DiLoCo.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.collectives import auto
from hpcdl.collectives.slices import spans
from hpcdl.comm.observed import BUCKET, recorder_of
from hpcdl.core.errors import UsageError
from hpcdl.strategies.allreduce.few_bits import FP4, INT8, BlockFormat, sum_in_two_passes
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.elastic.replica import Background
from hpcdl.strategies.elastic.sync_easgd import HalfDifferences
from hpcdl.strategies.periodic.methods import METHODS
from hpcdl.strategies.periodic.shared import PREFIX, SharedWeights, given_or, mix

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

HALF_BYTES = 2
BLOCK_FORMATS = {"int8": INT8, "fp4": FP4}
"""The formats of a change in fewer bits, by --compress."""
_FLIGHT, _CHANGE = f"{PREFIX}flight", f"{PREFIX}change"


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A fragment being exchanged: `change`, of its weights and statistics, is the mean over the workers once complete.

    `due`: the number of steps after which it is merged.
    """

    fragment: int
    due: int
    change: Array


class StreamedWeights(SharedWeights):
    """The weights that all workers share, exchanged one fragment after another."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        streaming = METHODS[context.info.name].streaming
        assert streaming is not None
        elastic = context.elastic
        self._asked = elastic.fragments
        self._most = streaming.fragments
        self._overlap = streaming.overlap if elastic.overlap is None else elastic.overlap
        self._mixing = given_or(elastic.mixing, streaming.mixing)
        self._compress = context.exchange.compress
        self._background = Background()
        self._flight: Flight | None = None
        self._kept: tuple[Flight, int] | None = None
        self._parts: list[list[slice]] = []
        self._statistics: list[list[slice]] = []

    def start(self, weights: Array) -> None:
        """Start as for all shared weights. Raises UsageError if the model has fewer layers than --fragments."""
        super().start(weights)
        layers = list(dict.fromkeys(layer_of(name) for name, _ in self.variables))
        if self._asked is not None and self._asked > len(layers):
            raise UsageError(
                f"--fragments {self._asked}: the model has {len(layers)} layers with weights; "
                f"use at most --fragments {len(layers)}, or leave it out"
            )
        count = self._asked or min(self._most, self.period, len(layers))
        self._fragment_of = {layer: number % count for number, layer in enumerate(layers)}
        self._parts = self._grouped(self.variables, count, 0)
        self._statistics = [[] for _ in self._parts]
        saved, self._kept = self._kept, None
        self._flight = saved[0] if saved and saved[1] == count else None  # else its layers are no longer a fragment

    def lay_out(self, statistics: Sequence[tuple[str, int]]) -> None:
        """Assign a layer's moving statistics to its weights' fragment; those without such a layer to the first."""
        self._statistics = self._grouped(statistics, len(self._parts), self.weights.size)

    def before_step(self, step: int, learning_rate: float) -> bool:
        """Whether a fragment is sent or merged after `step`, counted from 0."""
        super().before_step(step, learning_rate)
        return self._comes(step + 1) or bool(self._leaving(step + 1))

    def exchange(self, local: Array) -> Array:
        """Return a worker's `local` weights and statistics, with the fragments merged that are due. Collective.

        The memory of `local` is reused.
        """
        num_done = self._step + 1
        if self._comes(num_done):
            self._merge(local)
        leaving = self._leaving(num_done)
        if leaving:
            self._note_distance(local[: self.weights.size])
        for fragment in leaving:
            self._send(fragment, local, num_done)
            # With --overlap 0, and after the last step, it is merged at once.
            if self._comes(num_done):
                self._merge(local)
        return local

    def meet(self, local: Array, done: int) -> Array:
        """As `exchange` after a run's last step: exchange and merge every fragment once. Collective."""
        self._step = done - 1
        sent = self._leaving(done)
        if self._flight is not None:
            self._merge(local)
        for fragment in range(len(self._parts)):
            if fragment not in sent:
                self._send(fragment, local, done)
                self._merge(local)
        return local

    def state(self) -> dict[str, Array]:
        """Return the state for a checkpoint, with a mean change not merged yet, after waiting for it. Collective."""
        state = super().state()
        if self._flight is not None:
            # Until then the thread writes to `change`.
            self._background.wait()
            state |= {
                _FLIGHT: numpy.array([self._flight.fragment, self._flight.due, len(self._parts)]),
                _CHANGE: self._flight.change.copy(),
            }
        return state

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore the state, at the next `start`."""
        super().restore(arrays)
        if _FLIGHT in arrays:
            fragment, due, count = (int(number) for number in arrays[_FLIGHT])
            self._kept = Flight(fragment=fragment, due=due, change=arrays[_CHANGE].copy()), count

    def details(self) -> dict[str, Any]:
        """Return the details for the record, with the number of fragments."""
        return {**super().details(), "fragments": len(self._parts)}

    def close(self) -> None:
        """Wait for an exchange in progress, and free the buffers."""
        self._background.close()
        super().close()

    def _leaving(self, done: int) -> Sequence[int]:
        """Return the fragments to send after `done` steps."""
        count = len(self._parts)
        if done == self._num_steps:
            return range(count)
        # Steps of a period count from 1, so its last one is `period`, not 0.
        step_of_period = done % self.period or self.period
        return [number for number in range(count) if (number + 1) * self.period // count == step_of_period]

    def _comes(self, done: int) -> bool:
        """Whether the fragment in progress is merged after `done` steps."""
        return self._flight is not None and done in (self._flight.due, self._num_steps)

    def _send(self, fragment: int, local: Array, done: int) -> None:
        """Send a fragment: algorithm 2, lines 7 and 8."""
        parts, statistics = self._parts[fragment], self._statistics[fragment]
        # Copies: the next steps change the weights while these are sent.
        weights, own_weights = _gathered(self.weights, parts), _gathered(local, parts)
        change = numpy.concatenate([weights - own_weights, *(local[part] for part in statistics)])
        self._flight = Flight(fragment=fragment, due=done + self._overlap, change=change)
        if self._compress == "none":
            self._background.start(lambda: self._average(change, self.group, self._workspace, fragment))
        elif self._compress in BLOCK_FORMATS:
            form = BLOCK_FORMATS[self._compress]
            self._background.start(lambda: self._average_in_blocks(form, change, weights.size, fragment))
        else:
            self._background.start(lambda: self._average_in_half(own_weights, weights, change, fragment))

    def _average_in_half(self, local: Array, weights: Array, change: Array, fragment: int) -> None:
        """As `_average`, with the weights' part of `change` in 16 bits per element."""
        sent = HalfDifferences(self._compress)
        sent.start(weights.size)
        began_s = time.monotonic()
        sent.exchange(local, weights, lambda buffer, add: auto.allreduce(self.group, buffer, self._workspace, add))
        recorder_of(self.group).span(
            BUCKET, began_s, time.monotonic(), num_bytes=HALF_BYTES * weights.size, bucket=fragment
        )
        # `total` sums x_i - x, so the sign changes.
        numpy.divide(sent.total, -self.group.size, out=change[: weights.size])
        self._average_statistics(change[weights.size :], fragment)

    def _average_in_blocks(self, form: BlockFormat, change: Array, num_weights: int, fragment: int) -> None:
        """As `_average`, with the weights' part of `change` in a few bits per element, rounded in both directions."""
        part = change[:num_weights]
        num_bytes = sum(form.packed_bytes(stop - start) for start, stop in spans(num_weights, self.group.size))
        began_s = time.monotonic()
        # Weights that have diverged are not finite in the mean either, and are detected when it is merged.
        with numpy.errstate(over="ignore", invalid="ignore"):
            sum_in_two_passes(part, numpy.empty_like(part), self.group, form)
            part /= self.group.size
        recorder_of(self.group).span(BUCKET, began_s, time.monotonic(), num_bytes=num_bytes, bucket=fragment)
        self._average_statistics(change[num_weights:], fragment)

    def _average_statistics(self, statistics: Array, fragment: int) -> None:
        """Average the moving statistics of a fragment whose weights are sent in fewer bits."""
        if statistics.size:
            self._average(statistics, self.group, self._workspace, fragment)

    def _merge(self, local: Array) -> None:
        """Merge the fragment: algorithm 2, lines 11 to 13; statistics are mixed like weights."""
        flight, self._flight = self._flight, None
        assert flight is not None
        self._background.wait()
        parts, statistics = self._parts[flight.fragment], self._statistics[flight.fragment]
        names = [variable for variable in self.variables if self._fragment(variable[0]) == flight.fragment]
        self._check_finite(flight.change, names)
        weights = _gathered(self.weights, parts)
        velocity = _gathered(self._velocity, parts)
        self._rule(weights, velocity, flight.change[: weights.size], self._rates())
        self._check_finite(weights, names)
        _scatter(velocity, self._velocity, parts)
        _scatter(weights, self.weights, parts)
        mixed = _gathered(local, [*parts, *statistics])
        mix(mixed, numpy.concatenate([weights, flight.change[weights.size :]]), self._mixing)
        _scatter(mixed, local, [*parts, *statistics])

    def _fragment(self, name: str) -> int:
        return self._fragment_of.get(layer_of(name), 0)

    def _grouped(self, variables: Sequence[tuple[str, int]], count: int, start: int) -> list[list[slice]]:
        """Return the slices of each fragment's `variables` in a buffer that holds all consecutively from `start` on."""
        edges = itertools.pairwise(itertools.accumulate((length for _, length in variables), initial=start))
        parts: list[list[slice]] = [[] for _ in range(count)]
        for (name, _), edge in zip(variables, edges, strict=True):
            parts[self._fragment(name)].append(slice(*edge))
        return parts


def layer_of(name: str) -> str:
    """Return the layer of a variable by its path (`conv2d/kernel`); the variable itself if it is in none."""
    return name.rpartition("/")[0] or name


def _gathered(buffer: Array, parts: Sequence[slice]) -> Array:
    return numpy.concatenate([buffer[part] for part in parts])


def _scatter(values: Array, buffer: Array, parts: Sequence[slice]) -> None:
    start = 0
    for part in parts:
        stop = start + part.stop - part.start
        buffer[part] = values[start:stop]
        start = stop

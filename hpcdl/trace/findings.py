"""Findings from the steps of a trace: overlap, waits, gaps between updates, the critical path. Functions are pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.comm.observed import (
    BACKWARD,
    BUCKET,
    FORWARD,
    IN_GAPS,
    LAYER_UPDATE,
    OUTSIDE_GAPS,
    RECEIVING,
    UPDATING,
)
from hpcdl.core.records.run_record import PARTS as RECORD_PARTS
from hpcdl.trace.network import HostTraffic, traffic
from hpcdl.trace.steps import (
    BEGAN,
    COMPUTE,
    EXCHANGED,
    EXPOSED,
    HAD_GRADIENTS,
    INPUT,
    UPDATED,
    WAIT,
    HostClock,
    Merged,
    Steps,
)
from hpcdl.trace.stragglers import Straggler, processor_waits_s, stragglers

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

LATE_START = "late start"
"""Part of the critical path: the rank that all others waited for began the step later than they did."""


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """Gaps between the end of one update of weights and the start of the next, over all ranks.

    `usable_s_per_step`: time of a step in which a rank's processors are idle: reading, waiting, exchanging.
    """

    count_per_step: float
    median_s: float | None
    p90_s: float | None
    usable_s_per_step: float


@dataclass(frozen=True, kw_only=True)
class WaitingTime:
    """`rank` waited for `for_rank`, on average per step."""

    rank: int
    for_rank: int
    seconds_per_step: float


@dataclass(frozen=True, kw_only=True)
class PathPart:
    """A part of the critical path of a step. `gain_s`: how much shorter a step would be if it took no time."""

    part: str
    seconds_per_step: float
    gain_s: float


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Mean seconds of one layer per step, and between updates of its weights. None: not in the trace."""

    layer: str
    forward_s: float | None
    backward_s: float | None
    update_s: float | None
    gap_median_s: float | None
    gap_p90_s: float | None


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All findings. `overlap`: share of the exchange that computing hides; None without an exchange.

    `parts` are mean seconds over ranks and steps, by the names of records; `overhead` is the share of the time that
    recording took. `background` has the seconds of background work of all ranks in the whole trace: `in_gaps_s` and
    `outside_s`.
    """

    steps: int
    ranks: int
    clock: Sequence[HostClock]
    overlap: float | None
    gaps: Gaps
    waits: Sequence[WaitingTime]
    stragglers: Sequence[Straggler]
    critical_path: Sequence[PathPart]
    overhead: float
    background: dict[str, float]
    parts: dict[str, float]
    step_s: float
    layers: Sequence[LayerTime] = ()
    """In the order in which the network calls them, as far as it is known; only in traces at level `full`."""
    network: Sequence[HostTraffic] = ()
    processor_waits_s: float | None = None
    """Mean seconds of a step in which ranks wait for processors that others use; None: not in the trace."""

    def as_json(self) -> dict[str, Any]:
        """Return what `hpcdl trace --json` prints."""
        return {
            "steps": self.steps,
            "ranks": self.ranks,
            "clock": [asdict(clock) for clock in self.clock],
            "overlap": self.overlap,
            "gaps": asdict(self.gaps),
            "waits": [asdict(wait) for wait in self.waits],
            "stragglers": [
                {name: getattr(one, name) for name in ("rank", "host", "cause", "seconds_per_step")}
                for one in self.stragglers
            ],
            "critical_path": [
                {"part": one.part, "seconds_per_step": one.seconds_per_step} for one in self.critical_path
            ],
            "overhead": self.overhead,
            "background": self.background,
            "layers": [asdict(layer) for layer in self.layers],
            "network": [host.as_json() for host in self.network],
        }


def findings(merged: Merged, steps: Steps, link_bytes_per_second: float | None = None) -> Findings:
    """Return all findings from `steps` and the other spans of `merged`. The link's speed is that of one direction."""
    parts = steps.parts()
    return Findings(
        steps=len(steps.numbers),
        ranks=len(merged.ranks),
        clock=merged.clocks,
        overlap=overlap(merged, steps),
        gaps=gaps(merged, steps, parts),
        waits=waits(merged, steps),
        stragglers=stragglers(merged, steps, parts),
        critical_path=critical_path(steps, parts),
        overhead=overhead(merged),
        background={"in_gaps_s": total_s(merged, IN_GAPS), "outside_s": total_s(merged, OUTSIDE_GAPS)},
        parts=dict(zip(RECORD_PARTS, parts.mean(axis=(0, 1)).tolist(), strict=True)),
        step_s=steps.step_s,
        layers=layer_times(merged, steps),
        network=traffic(merged, link_bytes_per_second),
        processor_waits_s=processor_waits_s(merged, steps),
    )


def overlap(merged: Merged, steps: Steps) -> float | None:
    """Return the share of the exchange of buckets that happened before the rank's own last gradient."""
    hidden_s = total_s = 0.0
    for row, rank in enumerate(steps.ranks.tolist()):
        buckets = merged.spans(rank, BUCKET)
        indices, inside = steps.index_of(buckets["step"])
        begin_s, end_s = buckets["begin_s"][inside], buckets["end_s"][inside]
        had_s = steps.borders[row, indices[inside], HAD_GRADIENTS]
        total_s += float((end_s - begin_s).sum())
        hidden_s += float(numpy.maximum(numpy.minimum(end_s, had_s) - begin_s, 0).sum())
    return hidden_s / total_s if total_s and len(steps.ranks) > 1 else None


def gaps(merged: Merged, steps: Steps, parts: Array) -> Gaps:
    """Return the times from one update's end to the next one's start, between consecutive steps.

    An update begins with the first bucket whose weights change, if buckets do not wait for the last. An inference has
    no updates.
    """
    follow = numpy.flatnonzero(numpy.diff(steps.numbers) == 1)
    begins_s = steps.borders[:, :, EXCHANGED].copy()
    for row, rank in enumerate(steps.ranks.tolist()):
        early = merged.spans(rank, UPDATING)
        indices, inside = steps.index_of(early["step"])
        # `at`, because a step has several buckets: plain indexing would take only one of them.
        numpy.minimum.at(begins_s[row], indices[inside], early["begin_s"][inside])
    between_s = begins_s[:, follow + 1] - steps.borders[:, follow, UPDATED]
    updates = bool((steps.borders[:, :, UPDATED] > steps.borders[:, :, EXCHANGED]).any())
    measurable = updates and between_s.size > 0
    return Gaps(
        count_per_step=1.0 if measurable else 0.0,
        median_s=float(numpy.median(between_s)) if measurable else None,
        p90_s=float(numpy.quantile(between_s, 0.9)) if measurable else None,
        usable_s_per_step=float(parts[:, :, [INPUT, WAIT, EXPOSED]].sum(axis=2).mean()),
    )


def layer_times(merged: Merged, steps: Steps) -> list[LayerTime]:
    """Return the times of each layer over all ranks, in the order in which layers are called."""
    forward, backward, updates = (_by_layer(merged, steps, kind) for kind in (FORWARD, BACKWARD, LAYER_UPDATE))
    names = list(dict.fromkeys([*forward, *backward, *updates]))
    if set(names) == set(forward):
        names.sort(key=lambda name: _begins_s(forward[name], steps))
    else:  # back-propagation reaches the first layer last
        names.sort(key=lambda name: -_begins_s(backward[name], steps) if name in backward else 0.0)
    times = []
    for name in names:
        gaps_s = _between(updates[name]) if name in updates else numpy.zeros(0)
        times.append(
            LayerTime(
                layer=name,
                forward_s=_mean_s(forward.get(name)),
                backward_s=_mean_s(backward.get(name)),
                update_s=_mean_s(updates.get(name)),
                gap_median_s=float(numpy.median(gaps_s)) if gaps_s.size else None,
                gap_p90_s=float(numpy.quantile(gaps_s, 0.9)) if gaps_s.size else None,
            )
        )
    return times


def _by_layer(merged: Merged, steps: Steps, kind: str) -> dict[str, list[tuple[int, Array]]]:
    """Return each layer's spans of that kind in `steps`, row by row."""
    spans_by_layer: dict[str, list[tuple[int, Array]]] = {}
    for row, rank in enumerate(steps.ranks.tolist()):
        spans = merged.spans(rank, kind)
        spans = spans[steps.index_of(spans["step"])[1]]
        for code in numpy.unique(spans["bucket"]).tolist():
            spans_by_layer.setdefault(merged.traces[rank].names[code], []).append((row, spans[spans["bucket"] == code]))
    return spans_by_layer


def _mean_s(by_rank: Sequence[tuple[int, Array]] | None) -> float | None:
    if not by_rank:
        return None
    return float(numpy.concatenate([spans["end_s"] - spans["begin_s"] for _, spans in by_rank]).mean())


def _begins_s(by_rank: Sequence[tuple[int, Array]], steps: Steps) -> float:
    """Return the mean time in a step at which these spans begin."""
    since_s = [spans["begin_s"] - steps.borders[row, steps.index_of(spans["step"])[0], BEGAN] for row, spans in by_rank]
    return float(numpy.concatenate(since_s).mean())


def _between(by_rank: Sequence[tuple[int, Array]]) -> Array:
    """Return the times from the end of one span to the start of that of the next step."""
    return numpy.concatenate(
        [(spans["begin_s"][1:] - spans["end_s"][:-1])[numpy.diff(spans["step"]) == 1] for _, spans in by_rank]
    )


def waits(merged: Merged, steps: Steps) -> list[WaitingTime]:
    """Return which rank waited for which, the longest first. Waits within the clocks' errors do not count.

    Ranks that step together wait for the last gradient; others wait for the messages of an exchange, if the trace has
    any.
    """
    seconds_by_pair = _for_the_slowest(steps) if steps.synchronous else _for_messages(merged, steps)
    rows = [
        WaitingTime(rank=a, for_rank=b, seconds_per_step=seconds)
        for (a, b), seconds in seconds_by_pair.items()
        if seconds > 0
    ]
    return sorted(rows, key=lambda row: (-row.seconds_per_step, row.rank, row.for_rank))


def _for_the_slowest(steps: Steps) -> dict[tuple[int, int], float]:
    had_s = steps.borders[:, :, HAD_GRADIENTS]
    slowest = had_s.argmax(axis=0)
    # Clocks have errors: a wait ends with the rank's own exchange at the latest.
    wait_s = numpy.minimum(had_s.max(axis=0)[None], steps.borders[:, :, EXCHANGED]) - had_s
    wait_s = numpy.where(wait_s > steps.errors_s[:, None] + steps.errors_s[slowest][None], wait_s, 0)
    matrix = numpy.zeros((len(steps.ranks), len(steps.ranks)))
    for cause in numpy.unique(slowest):
        matrix[:, cause] = wait_s[:, slowest == cause].sum(axis=1) / len(steps.numbers)
    ranks = steps.ranks.tolist()
    return {(ranks[a], ranks[b]): float(matrix[a, b]) for a, b in zip(*numpy.nonzero(matrix), strict=True)}


def _for_messages(merged: Merged, steps: Steps) -> dict[tuple[int, int], float]:
    seconds_by_pair: dict[tuple[int, int], float] = {}
    for row, rank in enumerate(steps.ranks.tolist()):
        messages = merged.spans(rank, RECEIVING)
        indices, inside = steps.index_of(messages["step"])
        messages, indices = messages[inside], indices[inside]
        begin_s = numpy.maximum(messages["begin_s"], steps.borders[row, indices, HAD_GRADIENTS])
        wait_s = numpy.maximum(numpy.minimum(messages["end_s"], steps.borders[row, indices, EXCHANGED]) - begin_s, 0)
        for peer in numpy.unique(messages["peer"]).tolist():
            seconds_by_pair[rank, peer] = float(wait_s[messages["peer"] == peer].sum()) / len(steps.numbers)
    return seconds_by_pair


def critical_path(steps: Steps, parts: Array) -> list[PathPart]:
    """Return the parts of each step on the rank that all others waited for. Their sum is the mean step.

    Without common steps there is no slowest rank to wait for, so the parts are means over all ranks.
    """
    if not steps.synchronous:
        means = parts.mean(axis=(0, 1)).tolist()
        return [PathPart(part=name, seconds_per_step=s, gain_s=s) for name, s in zip(RECORD_PARTS, means, strict=True)]
    began_s, had_s = steps.borders[:, :, BEGAN], steps.borders[:, :, HAD_GRADIENTS]
    slowest, columns = had_s.argmax(axis=0), numpy.arange(len(steps.numbers))
    slowest_parts = parts[slowest, columns].mean(axis=0)
    late_s = float((began_s[slowest, columns] - began_s.mean(axis=0)).mean())
    seconds = dict(zip(RECORD_PARTS, slowest_parts.tolist(), strict=True))
    seconds["exposed_communication"] += seconds.pop("wait")
    seconds |= {LATE_START: max(late_s, 0.0)}
    # Ranks do not begin and end a step at exactly the same time: the mean difference belongs to no part.
    seconds["other"] += steps.step_s - sum(seconds.values())
    if seconds["other"] < 0:
        seconds["compute"] += seconds["other"]
        seconds["other"] = 0.0
    gains = {**seconds, "input": _gain(steps, parts, INPUT), "compute": _gain(steps, parts, COMPUTE)}
    return [PathPart(part=name, seconds_per_step=s, gain_s=gains[name]) for name, s in seconds.items()]


def _gain(steps: Steps, parts: Array, part: int) -> float:
    """Return how much earlier the last gradient comes if `part` takes no time on any rank."""
    had_s = steps.borders[:, :, HAD_GRADIENTS]
    return float((had_s.max(axis=0) - (had_s - parts[:, :, part]).max(axis=0)).mean())


def total_s(merged: Merged, name: str) -> float:
    """Return the total duration of all spans with that name, over all ranks."""
    spans = [merged.spans(rank, name) for rank in merged.ranks]
    return float(sum((rank_spans["end_s"] - rank_spans["begin_s"]).sum() for rank_spans in spans))


def overhead(merged: Merged) -> float:
    """Return the share of a rank's time spent on writing records, as a mean over ranks."""
    shares = []
    for rank in merged.ranks:
        records, trace = merged.records[rank], merged.traces[rank]
        spent_s = (len(records) + len(trace.counters)) * trace.cost_s
        lasted_s = float(records["end_s"].max() - records["begin_s"].min())
        shares.append(spent_s / lasted_s if lasted_s > 0 else 0.0)
    return float(numpy.mean(shares)) if shares else 0.0

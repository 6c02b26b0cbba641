"""Ranks that the others wait for in every step, and the likely cause, by what distinguishes them from the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.comm.observed import PARTS, RECEIVING, SENDING
from hpcdl.trace import counters
from hpcdl.trace.file import COUNTER
from hpcdl.trace.recorder import COLLECTOR
from hpcdl.trace.steps import (
    BEGAN,
    COMPUTE,
    EXCHANGED,
    EXPOSED,
    HAD_GRADIENTS,
    INPUT,
    OTHER,
    UPDATE,
    Merged,
    Steps,
)

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

LEAST_SHARE = 0.02
"""Minimum share of a step that a straggler costs."""
NUM_ERRORS = 3.0
"""A mean that is not this many standard errors above zero may be chance."""
SLOWER_CLOCK = 0.95
CONTENDED_SHARE = 0.5
"""Minimum share of a rank's delay in which its threads waited for a processor longer than usual, for contention."""
SLOWER_LINK = 2.0
LEAST_MESSAGE_BYTES = 1024
CONTENTION, INPUT_CAUSE, NETWORK = "processor contention", "input", "network"
CLOCK, COLLECTOR_CAUSE, BETWEEN = "clock frequency", "collector", "work between steps"
IDLE, UNKNOWN = "waiting or sleeping", "unknown"
COMPUTED, USUALLY_COMPUTED = "computed longer", "computed by the others"
"""Keys of `cause_of`'s `excess`, beside the causes: seconds per step of the part `compute` only."""
LEAST_LEFT = 0.05
"""A rank that uses all but this share of its processors may be limited by a quota."""
BUSY = "processors busy while computing"
"""Key of `_rates`: processor seconds per second of the part `compute`."""
LEAST_LOOKS = 10
BUSY_ERROR = 0.1
"""Largest useful standard error of BUSY, as a share of it or of one processor."""
LEAST_BUSY = 0.2
"""Processors: if ranks use less while they compute, and wait for none, something else computes for them."""
WORKED_SHARE = 0.5
"""Minimum share of a rank's longer computing for which its processors worked more, at the others' rate."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """`rank` makes each step longer by about `seconds_per_step`, likely for this `cause`; `evidence` says why."""

    rank: int
    host: str
    cause: str
    seconds_per_step: float
    evidence: str


def stragglers(merged: Merged, steps: Steps, parts: Array) -> list[Straggler]:
    """Return the stragglers, costliest first; none for a single rank, or if ranks do not step together."""
    if not steps.synchronous:
        return []
    rates = _rates(merged, steps)
    late = _late(merged, steps, parts, rates)
    contended = {straggler.rank for straggler in late if straggler.cause == CONTENTION}
    rows = {rank: row for row, rank in enumerate(steps.ranks.tolist())}
    behind = [
        straggler
        for straggler in _behind_slow_links(merged, steps, parts)
        # A rank that waits for its processor sends and receives messages late: that delay does not mean a slow link.
        if straggler.rank not in contended
        or not _contention(rows[straggler.rank], rates, straggler.seconds_per_step, steps.step_s)
    ]
    all_stragglers = [*late, *behind]
    return sorted(all_stragglers, key=lambda straggler: -straggler.seconds_per_step)


def beyond_others(values: Array) -> Array:
    """Return each row of (R, ...) minus the median of the other rows."""
    rows = [values[row] - numpy.median(numpy.delete(values, row, axis=0), axis=0) for row in range(len(values))]
    return numpy.stack(rows)


def _late(merged: Merged, steps: Steps, parts: Array, rates: Mapping[str, Array]) -> list[Straggler]:
    """Return ranks whose last gradient comes after that of the others.

    A rank that gets the sums of the previous step late is not the cause of its delay. The exception is a rank whose
    messages wait for a processor, as the rest of its work does.
    """
    late_s = beyond_others(steps.borders[:, :, HAD_GRADIENTS])
    least_s = numpy.maximum(LEAST_SHARE * steps.step_s, _chance_s(late_s))
    # A delay within the clocks' errors, the rank's and a typical other's, shows nothing.
    least_s = numpy.maximum(least_s, steps.errors_s + numpy.median(steps.errors_s))
    heard_s = _heard_s(steps).mean(axis=1).clip(0)
    behind_s = beyond_others(parts[:, :, [UPDATE, OTHER]].sum(axis=2)).mean(axis=1)
    excess = {
        INPUT_CAUSE: beyond_others(parts[:, :, INPUT]).mean(axis=1),
        CONTENTION: beyond_others(parts[:, :, COMPUTE]).mean(axis=1) + behind_s,
        COMPUTED: beyond_others(parts[:, :, COMPUTE]).mean(axis=1),
        USUALLY_COMPUTED: parts[:, :, COMPUTE].mean(axis=1) - beyond_others(parts[:, :, COMPUTE]).mean(axis=1),
        BETWEEN: beyond_others(steps.borders[:, :, BEGAN]).mean(axis=1) - heard_s - behind_s,
        COLLECTOR_CAUSE: beyond_others(_collector_s(merged, steps)),
    }
    late_ranks = []
    for row, seconds in enumerate(late_s.mean(axis=1).tolist()):
        rank_excess = {cause: float(values[row]) for cause, values in excess.items()}
        if _contention(row, rates, rank_excess[CONTENTION] + heard_s[row], steps.step_s):
            rank_excess[CONTENTION] += heard_s[row]
        else:
            seconds -= heard_s[row]
        if seconds > least_s[row]:
            cause, evidence = cause_of(row, rank_excess, rates, seconds, steps.step_s)
            late_ranks.append(_straggler(merged, steps, row, cause, seconds, evidence))
    return late_ranks


def _chance_s(late_s: Array) -> Array:
    """Return (R): how much of a mean over steps (R, S) may be chance; 0 if a rank is late in nearly all of them.

    A single very long step makes the standard error as large as the mean. It must not hide delays of each step.
    """
    root = numpy.sqrt(late_s.shape[1])
    # A sign test: by chance n/2 steps are late, with a standard deviation of sqrt(n)/2.
    often = (late_s > 0).sum(axis=1) >= (root + NUM_ERRORS) * root / 2
    result: Array = numpy.where(often, 0.0, NUM_ERRORS * late_s.std(axis=1) / root)
    return result


def _heard_s(steps: Steps) -> Array:
    """Return (R, S): how much later than the others each got the sums of the previous step; 0 without such a step."""
    heard_s = numpy.zeros(steps.borders.shape[:2])
    follow = numpy.flatnonzero(numpy.diff(steps.numbers) == 1)
    heard_s[:, follow + 1] = beyond_others(steps.borders[:, follow, EXCHANGED])
    return heard_s


def _straggler(merged: Merged, steps: Steps, row: int, cause: str, seconds: float, evidence: str) -> Straggler:
    rank = int(steps.ranks[row])
    host = merged.traces[rank].host
    return Straggler(rank=rank, host=host, cause=cause, seconds_per_step=seconds, evidence=evidence)


def cause_of(
    row: int, excess: Mapping[str, float], rates: Mapping[str, Array], late_s: float, step_s: float
) -> tuple[str, str]:
    """Return what distinguishes the rank in `row` most, and the evidence as text.

    `excess`: by cause, seconds per step beyond the others. `rates`: (R) by counter, see `_rates`.
    """
    if excess[COLLECTOR_CAUSE] >= late_s / 2:
        return COLLECTOR_CAUSE, f"Python's collector takes {excess[COLLECTOR_CAUSE] * 1e3:.3g} ms of a step more here"
    part = max((INPUT_CAUSE, CONTENTION, BETWEEN), key=lambda name: excess[name])
    if part == INPUT_CAUSE:
        return INPUT_CAUSE, f"it waits {excess[part] * 1e3:.3g} ms longer for a batch"
    if part == BETWEEN:
        return BETWEEN, f"it begins its steps {excess[part] * 1e3:.3g} ms after the others"
    works = f"its work takes {excess[CONTENTION] * 1e3:.3g} ms longer"
    if counters.CLOCK_KHZ in rates:
        rate = rates[counters.CLOCK_KHZ]
        share = rate[row] / numpy.median(numpy.delete(rate, row))
        if share < SLOWER_CLOCK:
            return CLOCK, f"{works}, and its clock rate is {share:.0%} of the others'"
    if contended := _contention(row, rates, excess[CONTENTION], step_s):
        return CONTENTION, f"{works}, and {contended}"
    cause, evidence = _idle(row, rates, excess, step_s)
    return cause, f"{works}, {evidence}"


def _idle(row: int, rates: Mapping[str, Array], excess: Mapping[str, float], step_s: float) -> tuple[str, str]:
    """Return IDLE if the processors of the rank in `row` do not work while it computes longer, else UNKNOWN."""
    if BUSY not in rates or excess[COMPUTED] <= 0:
        return UNKNOWN, "and the trace does not tell whether its processors work in that time"
    busy, longer_s = float(rates[BUSY][row]), excess[COMPUTED]
    usual = float(numpy.median(numpy.delete(rates[BUSY], row)))
    waited = rates.get(counters.WAITED_US, numpy.zeros(len(rates[BUSY])))
    if usual + float(numpy.median(numpy.delete(waited, row))) / 1e6 < LEAST_BUSY:
        return UNKNOWN, f"but the others use {usual:.2g} of a processor too while they compute: something else computes"
    worked_s = busy * longer_s + (busy - usual) * excess[USUALLY_COMPUTED]
    if worked_s >= WORKED_SHARE * usual * longer_s:
        return UNKNOWN, "and its processors work for it: more to compute, or slower processors that tell no clock rate"
    if counters.WAITED_US not in rates:
        return (
            UNKNOWN,
            "but its processors do not: it waits or sleeps, or waits for a processor, which this kernel does not tell",
        )
    if _left(rates, row) < LEAST_LEFT:
        return UNKNOWN, "and it uses all the processor time that it may: a quota, or more to compute"
    worked = f"but its processors work {max(worked_s, 0) * 1e3:.3g} ms of that"
    waits_s = _waits(row, rates) * step_s
    if waits_s >= CONTENDED_SHARE * longer_s:  # as the others do; more was said above
        return (
            UNKNOWN,
            f"{worked}, and its threads wait {waits_s * 1e3:.3g} ms of a step for processors:"
            " other programs or ranks use them",
        )
    return IDLE, f"{worked}: in a layer or below it waits, sleeps or is stopped"


def _contention(row: int, rates: Mapping[str, Array], late_s: float, step_s: float) -> str:
    """Return how the rank in `row` shares its processors, if that explains much of its delay; else empty.

    Threads of a rank also wait for each other: a rank that uses all of its processors has no neighbors on them.
    Switches count only if waiting times of threads are unknown: a thread that polls for a message and yields to others
    counts as switched off its processor, tens of thousands of times per second.
    """
    if counters.WAITED_US in rates:
        usual, spread = _usual(rates, counters.WAITED_US, row)
        waited = float(rates[counters.WAITED_US][row]) - usual
        taken_s = min(waited / 1e6, _left(rates, row)) * step_s
        if waited > NUM_ERRORS * spread and taken_s >= CONTENDED_SHARE * late_s:
            return f"its threads wait {waited / 1e3 * step_s:.3g} ms more for a processor"
    elif counters.SWITCHES in rates:
        switches, (usual, _) = float(rates[counters.SWITCHES][row]), _usual(rates, counters.SWITCHES, row)
        if switches > 2 * usual + 10:
            return f"it is taken off its processor {switches:.0f} times a second ({usual:.0f})"
    return ""


def processor_waits_s(merged: Merged, steps: Steps) -> float | None:
    """Return the mean seconds of a step in which ranks wait for processors that others use; None if not counted."""
    rates = _rates(merged, steps)
    if counters.WAITED_US not in rates:
        return None
    return steps.step_s * float(numpy.mean([_waits(row, rates) for row in range(len(steps.ranks))]))


def _waits(row: int, rates: Mapping[str, Array]) -> float:
    """Return the share of time in which threads of the rank in `row` wait for a processor that it does not use."""
    return min(float(rates[counters.WAITED_US][row]) / 1e6, _left(rates, row), 1.0)


def _left(rates: Mapping[str, Array], row: int) -> float:
    """Return the unused share of the processors of the rank in `row`; inf if unknown."""
    if not {counters.PROCESSORS, counters.CPU_US} <= rates.keys():
        return math.inf
    allowed, used = float(rates[counters.PROCESSORS][row]) / 1e3, float(rates[counters.CPU_US][row]) / 1e6
    return max(1 - used / max(allowed, 1e-3), 0.0)


def _usual(rates: Mapping[str, Array], name: str, row: int) -> tuple[float, float]:
    """Return the growth of counter `name` per second if the rank in `row` were like the others, and the spread.

    It is proportional to processor time: if all wait for processors, a rank that computes longer waits longer, and a
    rank whose work only takes longer has no neighbors of its own. The spread is a standard deviation.
    """
    work = numpy.maximum(rates.get(counters.CPU_US, numpy.ones(len(rates[name]))), 1.0)
    other_rates = numpy.delete(rates[name] / work, row)
    usual = numpy.median(other_rates)
    spread = numpy.median(numpy.abs(other_rates - usual)) / _MEDIAN_DEVIATION
    return float(usual * work[row]), float(spread * work[row])


_MEDIAN_DEVIATION = 0.6745
"""Median distance of normal numbers from their mean, in standard deviations."""


def _collector_s(merged: Merged, steps: Steps) -> Array:
    """Return (R): mean seconds per step that Python's garbage collector took."""
    spent_s = numpy.zeros(len(steps.ranks))
    for row, rank in enumerate(steps.ranks.tolist()):
        spans = merged.spans(rank, COLLECTOR)
        indices, inside = steps.index_of(spans["step"])
        within = inside & (spans["begin_s"] < steps.borders[row, indices, HAD_GRADIENTS])
        within &= spans["end_s"] > steps.borders[row, indices, BEGAN]
        spent_s[row] = float((spans["end_s"] - spans["begin_s"])[within].sum()) / len(steps.numbers)
    return spent_s


def _rates(merged: Merged, steps: Steps) -> dict[str, Array]:
    """Return (R) for each counter that every rank has: its growth per second in these steps; the mean of a level."""
    names = (counters.CPU_US, counters.WAITED_US, counters.SWITCHES, counters.CLOCK_KHZ, counters.PROCESSORS)
    by_counter = {name: [_rate(merged, steps, row, name) for row in range(len(steps.ranks))] for name in names}
    by_counter[BUSY] = [_busy(merged, steps, row) for row in range(len(steps.ranks))]
    return {name: numpy.array(rates) for name, rates in by_counter.items() if all(rate is not None for rate in rates)}


def _rate(merged: Merged, steps: Steps, row: int, name: str) -> float | None:
    trace = merged.traces[int(steps.ranks[row])]
    samples = trace.counters[trace.counters["name"] == trace.code(COUNTER + name)]
    if len(samples) < 2:
        return None
    if name in counters.LEVELS:
        return float(samples["value"].mean())
    # Within a trace its own clock is sufficient: its error is about a millionth.
    records = trace.records[trace.records["step"] >= 0]
    begin_s, end_s = float(records["begin_s"].min()), float(records["end_s"].max())
    # The waiting time is a sum over living threads: if one ends, the sum falls and then continues from there.
    grown = numpy.append(0, numpy.maximum(numpy.diff(samples["value"].astype(numpy.float64)), 0).cumsum())
    first, last = numpy.interp([begin_s, end_s], samples["begin_s"], grown)
    return float(last - first) / max(end_s - begin_s, 1e-9)


def _busy(merged: Merged, steps: Steps, row: int) -> float | None:
    """Return the processors that work while this rank computes; None if samples were too few or too far apart.

    Each interval between two samples has a share of computing and a share of other work. A least-squares fit over the
    intervals gives the processors' use in each; its standard error shows if it is reliable.
    """
    trace = merged.traces[int(steps.ranks[row])]
    spans = trace.records[trace.records["name"] == trace.code(PARTS[COMPUTE])]
    spans = spans[numpy.isin(spans["step"], steps.numbers)]
    looks = trace.counters[trace.counters["name"] == trace.code(COUNTER + counters.CPU_US)]
    if len(spans):
        within = looks["begin_s"] >= spans["begin_s"].min()
        looks = looks[within & (looks["begin_s"] <= spans["end_s"].max())]
    if not len(spans) or len(looks) < LEAST_LOOKS:
        return None
    borders_s = numpy.stack([spans["begin_s"], spans["end_s"]], axis=1).reshape(-1)
    long_s = numpy.stack([numpy.zeros(len(spans)), spans["end_s"] - spans["begin_s"]], axis=1).reshape(-1)
    computed_s = numpy.diff(numpy.interp(looks["begin_s"], borders_s, long_s.cumsum()))
    other_s = numpy.diff(looks["begin_s"]) - computed_s
    used_s = numpy.diff(looks["value"]) / 1e6
    design = numpy.stack([computed_s, other_s], axis=1)
    products = design.T @ design
    if numpy.linalg.det(products) <= 0:  # intervals with equal shares determine no rates
        return None
    inverse = numpy.linalg.inv(products)
    rates = inverse @ design.T @ used_s
    variance = ((used_s - design @ rates) ** 2).sum() / (len(used_s) - 2)
    busy, error = float(rates[0]), float(numpy.sqrt(variance * inverse[0, 0]))
    return max(busy, 0.0) if error <= BUSY_ERROR * max(busy, 1.0) else None


def _behind_slow_links(merged: Merged, steps: Steps, parts: Array) -> list[Straggler]:
    """Return ranks whose messages take longer per byte than those between the others; needs the level `full`.

    A message travels from the time when both sides were ready: waiting for a late sender does not count.
    """
    ranks = steps.ranks.tolist()
    links = {(a, b): link for a in ranks for b in ranks if a != b and (link := _link(merged, steps, a, b)) is not None}
    behind = []
    for row, rank in enumerate(ranks):
        own_links = [link for ends, link in links.items() if rank in ends]
        other_s_per_byte = [seconds for ends, (seconds, _) in links.items() if rank not in ends]
        if not own_links or not other_s_per_byte:
            continue
        usual, own_s_per_byte = float(numpy.median(other_s_per_byte)), float(min(seconds for seconds, _ in own_links))
        # / 2: a rank sends and receives at once.
        extra_s = sum((seconds - usual) * num_bytes for seconds, num_bytes in own_links) / 2
        extra_s = min(extra_s, float(parts[row, :, EXPOSED].mean()))
        if own_s_per_byte > SLOWER_LINK * usual and extra_s > LEAST_SHARE * steps.step_s:
            evidence = f"its messages travel at {1e-6 / own_s_per_byte:.3g} MB/s, others at {1e-6 / usual:.3g}"
            behind.append(_straggler(merged, steps, row, NETWORK, extra_s, evidence))
    return behind


def _link(merged: Merged, steps: Steps, sender: int, receiver: int) -> tuple[float, float] | None:
    """Return seconds per byte, and bytes per step, from `sender` to `receiver`; None without large messages."""
    sent, came = (
        _messages(merged, steps, rank, name, peer)
        for rank, name, peer in ((sender, SENDING, receiver), (receiver, RECEIVING, sender))
    )
    count = min(len(sent), len(came))
    if not count:
        return None
    sent, came = sent[-count:], came[-count:]  # they arrive in sending order; old ones may be missing
    large = (sent["value"] == came["value"]) & (sent["value"] >= LEAST_MESSAGE_BYTES)
    num_bytes = float(sent["value"][large].sum())
    if not num_bytes:
        return None
    travels_s = came["end_s"] - numpy.maximum(sent["begin_s"], came["begin_s"])
    seconds = float(numpy.maximum(travels_s[large], 0).sum())
    return max(seconds, 1e-9) / num_bytes, num_bytes / len(steps.numbers)


def _messages(merged: Merged, steps: Steps, rank: int, name: str, peer: int) -> Array:
    spans = merged.spans(rank, name)
    _, inside = steps.index_of(spans["step"])
    messages: Array = spans[inside & (spans["peer"] == peer)]
    return messages

"""Synthetic traces with known truth, built from the duration of each part on each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from hpcdl.comm.observed import BACKWARD, FORWARD, LAYER_UPDATE, PARTS
from hpcdl.trace import counters
from hpcdl.trace.file import COUNTER, POINT, RECORD, RankTrace
from hpcdl.trace.recorder import COLLECTOR
from hpcdl.trace.steps import Merged, Steps, merge, steps_of

Array = numpy.ndarray[Any, Any]
LAYER_KINDS, LAYERS = (FORWARD, BACKWARD, LAYER_UPDATE), ("conv1", "dense")
NAMES = ("", *PARTS, "bucket", "updating", COLLECTOR, "sending", "receiving", *LAYER_KINDS, *LAYERS)
COUNTERS = (
    counters.CPU_US, counters.WAITED_US, counters.SWITCHES, counters.CLOCK_KHZ, counters.PROCESSORS, counters.NETWORK,
)  # fmt: skip
EXCHANGE_S, UPDATE_S, OTHER_S = 0.020, 0.005, 0.001


def records(name: str, begin_s: Array, end_s: Array, steps: Array, **columns: Any) -> Array:
    made = numpy.zeros(len(begin_s), RECORD)
    made["name"], made["begin_s"], made["end_s"], made["step"] = NAMES.index(name), begin_s, end_s, steps
    made["peer"] = made["bucket"] = -1
    for column, values in columns.items():
        made[column] = values
    return made


def trace(
    rank: int,
    size: int,
    spans: Sequence[Array],
    *,
    ahead_s: float = 0.0,
    rates: Mapping[str, float] = {},
    busy: tuple[float, float] | None = None,
) -> RankTrace:
    """Return the trace of a rank on its own host, whose clock is ahead by an amount known to a microsecond.

    `busy`: processors in use while the rank computes, and otherwise; sampled every 20 ms.
    """
    together = numpy.concatenate(spans)
    together = together[numpy.argsort(together["begin_s"], kind="stable")]
    last_s = float(together["end_s"].max())
    together["begin_s"] += ahead_s
    together["end_s"] += ahead_s
    names = (*NAMES, *(COUNTER + name for name in COUNTERS))
    times_s = numpy.arange(0.0, last_s + 1.0)
    counts = []
    for name in COUNTERS:
        if name in rates:
            values = rates[name] * (times_s if name not in counters.LEVELS else numpy.ones_like(times_s))
            made = records("", times_s + ahead_s, times_s + ahead_s, numpy.full(len(times_s), -1), value=values)
            made["name"] = names.index(COUNTER + name)
            counts.append(made)
    error_s = 1e-6 if rank else 0.0
    points = [(when + ahead_s, when, error_s) for when in (0.0, last_s)]
    if busy is not None:
        looks_s = numpy.arange(0.0, last_s, 0.02)
        computes = next(one for one in spans if one["name"][0] == NAMES.index("compute"))
        begin_s, end_s = computes["begin_s"], computes["end_s"]
        fine_s = numpy.arange(0.0, last_s, 1e-3)
        place = numpy.searchsorted(begin_s, fine_s, side="right") - 1
        computing = (place >= 0) & (fine_s < end_s[place.clip(0)])
        used_us = numpy.where(computing, *busy).cumsum() * 1e3
        value = numpy.interp(looks_s, fine_s, used_us)
        made = records("", looks_s + ahead_s, looks_s + ahead_s, numpy.full(len(looks_s), -1), value=value)
        made["name"] = names.index(COUNTER + counters.CPU_US)
        counts.append(made)
    return RankTrace(
        path=Path(f"rank-{rank}.trace"),
        rank=rank,
        size=size,
        host=f"host{rank}",
        role="worker",
        level="full",
        parent=0,
        begin_s=0.0,
        wall_s=0.0,
        cost_s=1e-6,
        points=numpy.array(points, POINT),
        names=names,
        records=together,
        counters=numpy.concatenate(counts) if counts else numpy.zeros(0, RECORD),
    )


def synchronous(
    input_s: Array,
    compute_s: Array,
    *,
    hidden_s: float = 0.0,
    rates: Sequence[Mapping[str, float]] = (),
    more: Mapping[int, Sequence[Array]] = {},
    ahead_s: float = 3.0,
    exchange_s: float = EXCHANGE_S,
    hears_late_s: Mapping[int, float] = {},
    updates_longer_s: Mapping[int, float] = {},
    busy: Sequence[tuple[float, float]] = (),
) -> tuple[Merged, Steps]:
    """Return merged steps in which each rank takes (R, S) seconds to read and compute.

    One bucket leaves with the last gradient; another takes `hidden_s` and ends before. A rank that receives the sums of
    each step later than the others, or updates for longer, begins its next step later by that time.
    """
    num_ranks, num_steps = input_s.shape
    slowest_s = (input_s + compute_s).max(axis=0)
    ends_s = numpy.cumsum(slowest_s + exchange_s + UPDATE_S + OTHER_S)
    starts_s = numpy.concatenate([[0.0], ends_s[:-1]])
    numbers = numpy.arange(num_steps)
    traces = []
    for rank in range(num_ranks):
        late_s, update_s = hears_late_s.get(rank, 0.0), updates_longer_s.get(rank, 0.0)
        began_s = starts_s + late_s + update_s
        got_s = began_s + input_s[rank]
        had_s = got_s + compute_s[rank]
        exchanged_s = starts_s + slowest_s + exchange_s + late_s
        borders = (began_s, got_s, had_s, exchanged_s, exchanged_s + UPDATE_S + update_s, ends_s + late_s + update_s)
        spans = [records(name, a, b, numbers) for name, a, b in zip(PARTS, borders, borders[1:], strict=False)]
        spans.append(records("bucket", had_s, exchanged_s, numbers, bucket=1, value=1 << 20))
        if hidden_s:
            spans.append(records("bucket", had_s - hidden_s, had_s, numbers, bucket=0, value=1 << 20))
        spans += more.get(rank, ())
        own_rates = rates[rank] if rates else {}
        own_busy = busy[rank] if busy else None
        traces.append(trace(rank, num_ranks, spans, ahead_s=ahead_s * rank, rates=own_rates, busy=own_busy))
    merged = merge(traces)
    return merged, steps_of(merged, synchronous=True)

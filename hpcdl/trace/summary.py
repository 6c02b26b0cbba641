"""What a trace tells, as tables for a terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcdl.core.units import format_bytes, format_seconds
from hpcdl.trace.findings import Findings, LayerTime, PathPart
from hpcdl.trace.network import HostTraffic

MOST_ROWS = 20
TableOf = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""A heading, the header, the rows."""


def tables(found: Findings) -> Iterator[TableOf]:
    """The tables, in the order in which one asks; one that has nothing to say is left out."""
    yield "Steps", ("What", "Value"), [*_facts(found)]
    path = [_path_row(found, part) for part in found.critical_path if part.seconds_per_step > 0]
    yield "Critical path of a step", ("Part", "Time per step", "Share", "Shorter without it"), path
    if found.layers:
        columns = ("Layer", "Forward", "Backward", "Update", "Gap between updates", "90 % of gaps")
        yield "Layers", columns, [_layer_row(layer) for layer in found.layers]
    if found.stragglers:
        yield (
            "Stragglers",
            ("Rank", "Host", "Likely cause", "Time per step", "Because"),
            [
                (str(one.rank), one.host, one.cause, _seconds(one.seconds_per_step), one.evidence)
                for one in found.stragglers
            ],
        )
    if found.waits:
        rows = [(str(one.rank), str(one.for_rank), _seconds(one.seconds_per_step)) for one in found.waits]
        yield "Who waited for whom", ("Rank", "For rank", "Time per step"), rows[:MOST_ROWS]
    if found.network:
        header = ("Host", "Mean of a second", "Busiest second", "Of the link both ways")
        yield "Network, in and out", header, [_network_row(host) for host in found.network]
    clocks = [
        (one.host, f"{one.offset_s:.6f} s", f"{one.drift * 1e6:.2f} ppm", _seconds(one.error_s)) for one in found.clock
    ]
    yield "Clocks against rank 0's", ("Host", "Ahead", "Drift", "Error"), clocks


def _facts(found: Findings) -> Iterator[tuple[str, str]]:
    yield "steps of all workers", str(found.steps)
    yield "ranks", str(found.ranks)
    yield "mean step", _seconds(found.step_s)
    for part, seconds in found.parts.items():
        yield f"  {part.replace('_', ' ')}", _seconds(seconds)
    yield "exchange hidden behind computing", "unknown" if found.overlap is None else _percent(found.overlap)
    gaps = found.gaps
    if gaps.median_s is not None and gaps.p90_s is not None:
        yield "gap between updates", f"{_seconds(gaps.median_s)} (90 %: {_seconds(gaps.p90_s)})"
    yield "of a step, idle", _seconds(gaps.usable_s_per_step)
    spent = found.background
    if total_s := spent["in_gaps_s"] + spent["outside_s"]:
        yield "background work", f"{_seconds(total_s)}, {_percent(spent['in_gaps_s'] / total_s)} of it in gaps"
    yield "time spent on recording", f"{100 * found.overhead:.3f} %"


def _path_row(found: Findings, one: PathPart) -> tuple[str, str, str, str]:
    share = one.seconds_per_step / found.step_s if found.step_s else 0.0
    gain = _seconds(max(one.gain_s, 0.0))
    return one.part.replace("_", " "), _seconds(one.seconds_per_step), _percent(share), gain


def _network_row(one: HostTraffic) -> tuple[str, ...]:
    share = "unknown" if one.link_share is None else _percent(one.link_share)
    return (one.host, format_bytes(round(one.mean)), format_bytes(round(one.busiest)), share)


def _layer_row(one: LayerTime) -> tuple[str, ...]:
    times_s = (one.forward_s, one.backward_s, one.update_s, one.gap_median_s, one.gap_p90_s)
    return (one.layer, *("" if seconds is None else _seconds(seconds) for seconds in times_s))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _seconds(seconds: float) -> str:
    return "0 s" if seconds == 0 else format_seconds(seconds)

"""The page of a trace and its tables: one file with drawings and no script, light or dark by the reader's setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.comm.observed import BACKWARD, BUCKET, FORWARD
from hpcdl.core.pages.page import escaped, patterns, sentence
from hpcdl.core.pages.page import page as shell
from hpcdl.core.records.run_record import PARTS as RECORD_PARTS
from hpcdl.core.units import format_bytes, format_seconds
from hpcdl.trace.findings import Findings, LayerTime, PathPart
from hpcdl.trace.network import HostTraffic, largest
from hpcdl.trace.steps import BEGAN, ENDED, Merged, Steps

WORTH_A_LOOK = 0.1
"""Share of a step from which waiting for processors is shown."""
MOST_ROWS = 20
TableOf = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""A heading, the header, the rows."""


def tables(findings: Findings) -> Iterator[TableOf]:
    """Yield the tables in order of interest, without empty ones."""
    yield "Steps", ("What", "Value"), [*_facts(findings)]
    path = [_path_row(findings, part) for part in findings.critical_path if part.seconds_per_step > 0]
    yield "Critical path of a step", ("Part", "Time per step", "Share", "Shorter without it"), path
    if findings.layers:
        columns = ("Layer", "Forward", "Backward", "Update", "Gap between updates", "90 % of gaps")
        yield "Layers", columns, [_layer_row(layer) for layer in findings.layers]
    if findings.stragglers:
        yield (
            "Stragglers",
            ("Rank", "Host", "Likely cause", "Time per step", "Because"),
            [
                (str(one.rank), one.host, one.cause, _seconds(one.seconds_per_step), one.evidence)
                for one in findings.stragglers
            ],
        )
    if findings.waits:
        rows = [(str(one.rank), str(one.for_rank), _seconds(one.seconds_per_step)) for one in findings.waits]
        yield "Who waited for whom", ("Rank", "For rank", "Time per step"), rows[:MOST_ROWS]
    if findings.network:
        header = ("Host", "Mean of a second", "Busiest second", "Of the link both ways")
        yield "Network, in and out", header, [_network_row(host) for host in findings.network]
    clocks = [
        (one.host, f"{one.offset_s:.6f} s", f"{one.drift * 1e6:.2f} ppm", _seconds(one.error_s))
        for one in findings.clock
    ]
    yield "Clocks against rank 0's", ("Host", "Ahead", "Drift", "Error"), clocks


def _facts(findings: Findings) -> Iterator[tuple[str, str]]:
    yield "steps of all workers", str(findings.steps)
    yield "ranks", str(findings.ranks)
    yield "mean step", _seconds(findings.step_s)
    for part, seconds in findings.parts.items():
        yield f"  {part.replace('_', ' ')}", _seconds(seconds)
    yield "exchange hidden behind computing", "unknown" if findings.overlap is None else _percent(findings.overlap)
    gaps = findings.gaps
    if gaps.median_s is not None and gaps.p90_s is not None:
        yield "gap between updates", f"median {_seconds(gaps.median_s)} (90 %: {_seconds(gaps.p90_s)})"
    yield "of a step, idle", _seconds(gaps.usable_s_per_step)
    if (waits_s := findings.processor_waits_s or 0.0) > WORTH_A_LOOK * findings.step_s:
        yield "of a step, waiting for processors", f"{_seconds(waits_s)}: other programs or ranks use them"
    spent = findings.background
    if total_s := spent["in_gaps_s"] + spent["outside_s"]:
        yield "background work", f"{_seconds(total_s)}, {_percent(spent['in_gaps_s'] / total_s)} of it in gaps"
    yield "time spent on recording", f"{100 * findings.overhead:.3f} %"


def _path_row(findings: Findings, part: PathPart) -> tuple[str, str, str, str]:
    share = part.seconds_per_step / findings.step_s if findings.step_s else 0.0
    gain = _seconds(max(part.gain_s, 0.0))
    return part.part.replace("_", " "), _seconds(part.seconds_per_step), _percent(share), gain


def _network_row(host: HostTraffic) -> tuple[str, ...]:
    share = "unknown" if host.link_share is None else _percent(host.link_share)
    return (host.host, format_bytes(round(host.mean)), format_bytes(round(host.busiest)), share)


def _layer_row(layer: LayerTime) -> tuple[str, ...]:
    times_s = (layer.forward_s, layer.backward_s, layer.update_s, layer.gap_median_s, layer.gap_p90_s)
    return (layer.layer, *("" if seconds is None else _seconds(seconds) for seconds in times_s))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _seconds(seconds: float) -> str:
    return "0 s" if seconds == 0 else format_seconds(seconds)


if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

MOST_RANKS = 64
"""Maximum number of ranks in one timeline. If there are more, it shows the slowest ones of the step."""
_LEFT, _WIDTH, _ROW, _BAR = 90, 760, 26, 12
_STYLE = """figcaption{color:var(--soft)}
figure svg{max-width:100%;min-width:46rem;height:auto;display:block}
svg text{font:11px system-ui,sans-serif;fill:var(--ink)}
@media (max-width:46rem){figure svg{min-width:0;overflow:visible;margin-top:.5rem}svg text{font-size:22px}}
.key span{display:inline-block;margin-right:1rem}
.key svg{width:1.2em;height:.9em;margin-right:.3em;vertical-align:-.1em}
"""


def page(title: str, merged: Merged, steps: Steps, findings: Findings) -> str:
    """Return the whole page as text."""
    body = _body(merged, steps, findings)
    return shell(f"Trace of {title}", body, style=_STYLE, see="docs/how-to/trace.md")


def _body(merged: Merged, steps: Steps, findings: Findings) -> Iterator[str]:
    yield f'<main>\n{patterns()}\n<p class="key">'
    yield "".join(
        f'<span><svg viewBox="0 0 16 12" aria-hidden="true"><rect width="16" height="12" {_fill(name)}/></svg>'
        f"{name.replace('_', ' ')}</span>"
        for name in (*RECORD_PARTS, BUCKET, *([FORWARD, BACKWARD] if findings.layers else []))
    )
    yield "</p>"
    parts = steps.parts()
    for caption, index in chosen_steps(steps).items():
        yield from _timeline(caption, index, parts[:, index], merged, steps)
    if findings.network:
        yield from _network(findings.network)
    for heading, header, rows in tables(findings):
        yield f'<section><h2>{escaped(heading)}</h2>\n<div class="wide" tabindex="0"><table><thead><tr>'
        yield "".join(f"<th>{escaped(cell)}</th>" for cell in header) + "</tr></thead><tbody>"
        for row in rows:
            yield "<tr>" + "".join(f"<td>{sentence(cell)}</td>" for cell in row) + "</tr>"
        yield "</tbody></table></div></section>"
    yield "</main>"


def chosen_steps(steps: Steps) -> dict[str, int]:
    """Return the indices of a typical, the fastest and the slowest step; fewer if some are the same."""
    seconds = steps.seconds.max(axis=0)
    typical = int(numpy.abs(seconds - numpy.median(seconds)).argmin())
    named = {
        "A typical step": typical,
        "The fastest step": int(seconds.argmin()),
        "The slowest step": int(seconds.argmax()),
    }
    chosen: dict[str, int] = {}
    for caption, index in named.items():
        if index not in chosen.values():
            chosen[caption] = index
    return chosen


def _timeline(words: str, index: int, parts: Array, merged: Merged, steps: Steps) -> Iterator[str]:
    """Draw one step as bars: the parts of each rank above its buckets."""
    borders = steps.borders[:, index]
    start_s, end_s = float(borders[:, BEGAN].min()), float(borders[:, ENDED].max())
    if not steps.synchronous:  # steps of one number do not happen at one time
        borders = borders - borders[:, [BEGAN]]
        start_s, end_s = 0.0, float(borders[:, ENDED].max())
    rows = numpy.argsort(borders[:, ENDED] - borders[:, BEGAN])[::-1][:MOST_RANKS]
    rows = numpy.sort(rows)
    scale = _WIDTH / max(end_s - start_s, 1e-9)
    number, took = int(steps.numbers[index]), format_seconds(end_s - start_s)
    height = len(rows) * _ROW + 26
    yield f'<figure tabindex="0"><figcaption>{escaped(words)}: step {number}, {escaped(took)}</figcaption>'
    yield f'<svg viewBox="0 0 {_LEFT + _WIDTH + 10} {height}" role="img" aria-label="{escaped(words)}, step {number}">'
    for line, row in enumerate(rows.tolist()):
        rank, top = int(steps.ranks[row]), line * _ROW
        yield f'<text x="0" y="{top + 11}">rank {rank}</text>'
        yield from _bars(parts[row], float(borders[row, BEGAN]) - start_s, top, scale)
        if steps.synchronous:
            yield from _buckets(merged, steps, row, number, start_s, top, scale)
            yield from _layers(merged, steps, row, number, start_s, top, scale)
    yield from _axis(end_s - start_s, len(rows) * _ROW, scale)
    yield "</svg></figure>"


def _bars(widths: Array, begin_s: float, top: int, scale: float) -> Iterator[str]:
    for name, width in zip(RECORD_PARTS, widths.tolist(), strict=True):
        label = f"{name.replace('_', ' ')} {format_seconds(max(width, 0.0))}"
        if width * scale >= 0.2:
            yield (
                f'<rect x="{_LEFT + begin_s * scale:.2f}" y="{top}" width="{width * scale:.2f}" height="{_BAR}" '
                f"{_fill(name)}><title>{escaped(label)}</title></rect>"
            )
        begin_s += width


def _buckets(
    merged: Merged, steps: Steps, row: int, number: int, start_s: float, top: int, scale: float
) -> Iterator[str]:
    spans = merged.spans(int(steps.ranks[row]), BUCKET)
    for span in spans[spans["step"] == number]:
        begin, width = float(span["begin_s"]) - start_s, float(span["end_s"] - span["begin_s"])
        label = f"bucket {span['bucket']}, {span['value']} bytes, {format_seconds(max(width, 0.0))}"
        yield (
            f'<rect x="{_LEFT + begin * scale:.2f}" y="{top + _BAR + 2}" width="{max(width * scale, 0.5):.2f}" '
            f'height="5" {_fill(BUCKET)}><title>{escaped(label)}</title></rect>'
        )


def _layers(
    merged: Merged, steps: Steps, row: int, number: int, start_s: float, top: int, scale: float
) -> Iterator[str]:
    rank = int(steps.ranks[row])
    for kind in (FORWARD, BACKWARD):
        spans = merged.spans(rank, kind)
        for span in spans[spans["step"] == number]:
            begin, width = float(span["begin_s"]) - start_s, float(span["end_s"] - span["begin_s"])
            label = f"{kind} {merged.traces[rank].names[span['bucket']]}, {format_seconds(max(width, 0.0))}"
            drawn = max(width * scale - 0.3, 0.3)  # leaves a gap between two bars
            yield (
                f'<rect x="{_LEFT + begin * scale:.2f}" y="{top + _BAR + 8}" width="{drawn:.2f}" height="4" '
                f"{_fill(kind)}><title>{escaped(label)}</title></rect>"
            )


def _network(hosts: Sequence[HostTraffic]) -> Iterator[str]:
    """Draw the traffic of each host's interfaces over time, one below another, all with one scale."""
    first_s = min(float(host.times_s[0]) for host in hosts)
    last_s = max(float(host.times_s[-1]) for host in hosts)
    shown, most = hosts[:MOST_RANKS], largest(hosts)
    scale = _WIDTH / max(last_s - first_s, 1e-9)
    label = f"Network, in and out: at most {format_bytes(round(most))} in a second"
    yield f'<figure tabindex="0"><figcaption>{escaped(label)}</figcaption>'
    height = len(shown) * _ROW + 26
    yield f'<svg viewBox="0 0 {_LEFT + _WIDTH + 10} {height}" role="img" aria-label="{escaped(label)}">'
    for line, host in enumerate(shown):
        bottom = line * _ROW + _ROW - 4
        yield f'<text x="0" y="{bottom - 4}">{escaped(host.host[:14])}</text>'
        for begin_s, end_s, rate in zip(host.times_s, host.times_s[1:], host.rates, strict=False):
            tall, wide = float(rate) / most * (_ROW - 6), float(end_s - begin_s) * scale
            yield (
                f'<rect x="{_LEFT + float(begin_s - first_s) * scale:.2f}" y="{bottom - tall:.2f}" width="{wide:.2f}" '
                f'height="{tall:.2f}" {_fill(BUCKET)}/>'
            )
    yield from _axis(last_s - first_s, len(shown) * _ROW, scale)
    yield "</svg></figure>"


def _axis(seconds: float, top: int, scale: float) -> Iterator[str]:
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = _LEFT + share * seconds * scale
        anchor = "end" if share == 1 else "start" if share == 0 else "middle"
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{top}" style="stroke:var(--line);stroke-width:.5"/>'
        label = escaped(format_seconds(share * seconds))
        yield f'<text x="{x:.1f}" y="{top + 16}" text-anchor="{anchor}">{label}</text>'


def _fill(name: str) -> str:
    """Return the attribute that fills a bar in the style of the part of this name."""
    return f'fill="url(#fill-{name.replace("_", "-")})"'

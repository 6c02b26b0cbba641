"""The page of a trace: one file, drawings inside, no script; light or dark as the reader has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.comm.observed import BACKWARD, BUCKET, FORWARD
from hpcdl.core.pages.page import escaped, patterns, sentence
from hpcdl.core.pages.page import page as shell
from hpcdl.core.records.run_record import PARTS as RECORD_PARTS
from hpcdl.core.units import format_bytes, format_seconds
from hpcdl.trace.findings import Findings
from hpcdl.trace.merge import Merged
from hpcdl.trace.network import HostTraffic, largest
from hpcdl.trace.steps import BEGAN, ENDED, Steps
from hpcdl.trace.summary import tables

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

MOST_RANKS = 64
"""Ranks of one timeline; of more those that were slowest in that step."""
_LEFT, _WIDTH, _ROW, _BAR = 90, 760, 26, 12
_STYLE = """figcaption{color:var(--soft)}
figure svg{max-width:100%;min-width:46rem;height:auto;display:block}
svg text{font:11px system-ui,sans-serif;fill:var(--ink)}
@media (max-width:46rem){figure svg{min-width:0;overflow:visible;margin-top:.5rem}svg text{font-size:22px}}
.key span{display:inline-block;margin-right:1rem}
.key svg{width:1.2em;height:.9em;margin-right:.3em;vertical-align:-.1em}
"""


def page(title: str, merged: Merged, steps: Steps, found: Findings) -> str:
    """The whole page as text."""
    body = _body(merged, steps, found)
    return shell(f"Trace of {title}", body, style=_STYLE, see="docs/how-to/trace.md")


def _body(merged: Merged, steps: Steps, found: Findings) -> Iterator[str]:
    yield f'<main>\n{patterns()}\n<p class="key">'
    yield "".join(
        f'<span><svg viewBox="0 0 16 12" aria-hidden="true"><rect width="16" height="12" {_fill(name)}/></svg>'
        f"{name.replace('_', ' ')}</span>"
        for name in (*RECORD_PARTS, BUCKET, *([FORWARD, BACKWARD] if found.layers else []))
    )
    yield "</p>"
    parts = steps.parts()
    for words, place in chosen_steps(steps).items():
        yield from _timeline(words, place, parts[:, place], merged, steps)
    if found.network:
        yield from _network(found.network)
    for heading, header, rows in tables(found):
        yield f'<section><h2>{escaped(heading)}</h2>\n<div class="wide" tabindex="0"><table><thead><tr>'
        yield "".join(f"<th>{escaped(cell)}</th>" for cell in header) + "</tr></thead><tbody>"
        for row in rows:
            yield "<tr>" + "".join(f"<td>{sentence(cell)}</td>" for cell in row) + "</tr>"
        yield "</tbody></table></div></section>"
    yield "</main>"


def chosen_steps(steps: Steps) -> dict[str, int]:
    """The places of a typical, the fastest and the slowest step; fewer where they are one."""
    seconds = steps.seconds.max(axis=0)
    typical = int(numpy.abs(seconds - numpy.median(seconds)).argmin())
    named = {
        "A typical step": typical,
        "The fastest step": int(seconds.argmin()),
        "The slowest step": int(seconds.argmax()),
    }
    found: dict[str, int] = {}
    for words, place in named.items():
        if place not in found.values():
            found[words] = place
    return found


def _timeline(words: str, place: int, parts: Array, merged: Merged, steps: Steps) -> Iterator[str]:
    """One step as bars: the parts of each rank above its buckets."""
    borders = steps.borders[:, place]
    start_s, end_s = float(borders[:, BEGAN].min()), float(borders[:, ENDED].max())
    if not steps.synchronous:  # steps of one number do not happen at one time
        borders = borders - borders[:, [BEGAN]]
        start_s, end_s = 0.0, float(borders[:, ENDED].max())
    rows = numpy.argsort(borders[:, ENDED] - borders[:, BEGAN])[::-1][:MOST_RANKS]
    rows = numpy.sort(rows)
    scale = _WIDTH / max(end_s - start_s, 1e-9)
    number, took = int(steps.numbers[place]), format_seconds(end_s - start_s)
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
            drawn = max(width * scale - 0.3, 0.3)  # a seam between two
            yield (
                f'<rect x="{_LEFT + begin * scale:.2f}" y="{top + _BAR + 8}" width="{drawn:.2f}" height="4" '
                f"{_fill(kind)}><title>{escaped(label)}</title></rect>"
            )


def _network(hosts: Sequence[HostTraffic]) -> Iterator[str]:
    """What each host's interfaces carried over time, one below the other, all to one scale."""
    first_s = min(float(one.times_s[0]) for one in hosts)
    last_s = max(float(one.times_s[-1]) for one in hosts)
    shown, most = hosts[:MOST_RANKS], largest(hosts)
    scale = _WIDTH / max(last_s - first_s, 1e-9)
    label = f"Network, in and out: at most {format_bytes(round(most))} in a second"
    yield f'<figure tabindex="0"><figcaption>{escaped(label)}</figcaption>'
    height = len(shown) * _ROW + 26
    yield f'<svg viewBox="0 0 {_LEFT + _WIDTH + 10} {height}" role="img" aria-label="{escaped(label)}">'
    for line, one in enumerate(shown):
        bottom = line * _ROW + _ROW - 4
        yield f'<text x="0" y="{bottom - 4}">{escaped(one.host[:14])}</text>'
        for begin_s, end_s, rate in zip(one.times_s, one.times_s[1:], one.rates, strict=False):
            tall, wide = float(rate) / most * (_ROW - 6), float(end_s - begin_s) * scale
            yield (
                f'<rect x="{_LEFT + float(begin_s - first_s) * scale:.2f}" y="{bottom - tall:.2f}" width="{wide:.2f}" '
                f'height="{tall:.2f}" {_fill(BUCKET)}/>'
            )
    yield from _axis(last_s - first_s, len(shown) * _ROW, scale)
    yield "</svg></figure>"


def _axis(seconds: float, top: int, scale: float) -> Iterator[str]:
    for share in (0, 0.25, 0.5, 0.75, 1):
        place = _LEFT + share * seconds * scale
        anchor = "end" if share == 1 else "start" if share == 0 else "middle"
        yield f'<line x1="{place:.1f}" x2="{place:.1f}" y1="0" y2="{top}" style="stroke:var(--line);stroke-width:.5"/>'
        label = escaped(format_seconds(share * seconds))
        yield f'<text x="{place:.1f}" y="{top + 16}" text-anchor="{anchor}">{label}</text>'


def _fill(name: str) -> str:
    """The attribute that fills a bar as the part of this name is filled everywhere."""
    return f'fill="url(#fill-{name.replace("_", "-")})"'

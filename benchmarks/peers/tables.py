"""The tables of docs/performance.md from the tries of `make peers`: pure text from records."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcdl.core.errors import UsageError
from hpcdl.core.storage.files import write_text

BEGIN, END = "<!-- make peers: from here -->", "<!-- make peers: to here -->"
LIMIT = (
    "The limit is one raw in-place MPI_Allreduce of the same bytes on warm memory, whole or in slices of 4 MiB, "
    "whichever is faster, measured in the processes of the loop by hand. The best peer is the one that exposes least; "
    "hpcdl is `auto`, what it does unasked. Ratios are medians of the ratios within a try, and left out where the "
    "other's exchange is no more than the noise around zero."
)
PEERS, LOOP, OWN = ("horovod", "grpc-ring", "mpi-loop"), "mpi-loop", "auto"


@dataclass(frozen=True, kw_only=True)
class Try:
    """One engine's run on a network, medians over its steps in seconds; `error` says why there are none."""

    network: str
    engine: str
    number: int
    batch_size: int
    steps: int
    load: float
    step_seconds: float = 0.0
    compute_seconds: float = 0.0
    raw_seconds: float = 0.0
    sliced_seconds: float = 0.0
    parameters: int = 0
    error: str = ""

    @property
    def exposed_seconds(self) -> float:
        """What the exchange adds to a step."""
        return self.step_seconds - self.compute_seconds

    @property
    def efficiency(self) -> float:
        """Step without over step with exchange."""
        return self.compute_seconds / self.step_seconds

    @property
    def limit_seconds(self) -> float:
        """The raw all-reduce of the same bytes, whole or in slices, whichever is faster."""
        return min(self.raw_seconds, self.sliced_seconds)


@dataclass(frozen=True, kw_only=True)
class Head:
    """What holds for all tries of a run."""

    machine: str
    versions: str
    command: str
    date: str
    priority: str


def section(head: Head, labels: dict[str, str], tries: Sequence[Try]) -> str:
    """Everything between the markers; `labels` are the engines' names for a reader."""
    loads = [one.load for one in tries]
    networks = list(dict.fromkeys(one.network for one in tries))
    said = (
        f"`{head.command}`, {head.date}: {head.machine}; {head.versions}. Two ranks, each with half of the cores; "
        f"{head.priority}; load of the machine before a try {min(loads):.1f} to {max(loads):.1f}. A try is the median "
        "of its steps; the table has medians over the tries (minimum to maximum). Exposed: the step with exchange less "
        "the step without, which take turns in the same processes."
    )
    return "\n".join([
        _paragraph(said),
        "",
        "| network, batch per rank | engine | step with, ms | exposed, ms | efficiency |",
        "|---|---|---|---|---|",
        *(_row(labels, tries, network, engine) for network in networks for engine in _engines(tries, network)),
        "",
        _paragraph(LIMIT),
        "",
        "| network | limit, ms | best peer, exposed ms | hpcdl `auto`, exposed ms | hpcdl / limit | hpcdl / peer |",
        "|---|---|---|---|---|---|",
        *(_held_against(labels, tries, network) for network in networks),
    ])  # fmt: skip


def put(text: str, page: Path) -> None:
    """Replace what stands between the page's markers; UsageError where it has none."""
    before, begin, rest = page.read_text().partition(BEGIN) if page.is_file() else ("", "", "")
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UsageError(f"{page} has no lines {BEGIN!r} and {END!r} to write between")
    write_text(page, f"{before}{begin}\n{text}\n{end}{after}")


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _engines(tries: Sequence[Try], network: str) -> list[str]:
    return list(dict.fromkeys(one.engine for one in tries if one.network == network))


def _of(tries: Sequence[Try], network: str, engine: str) -> list[Try]:
    """Those that have numbers."""
    return [one for one in tries if (one.network, one.engine) == (network, engine) and not one.error]


def _row(labels: dict[str, str], tries: Sequence[Try], network: str, engine: str) -> str:
    every = [one for one in tries if (one.network, one.engine) == (network, engine)]
    good = _of(tries, network, engine)
    failed = next((one.error.replace("|", "/") for one in every if one.error), "")
    counted = f" ({len(good)} of {len(every)} tries; failed: {failed})" if failed else ""
    name = f"| {network}, {every[0].batch_size} | {labels[engine]}{counted} "
    if not good:
        return f"{name}| did not run | | |"
    step = spread([one.step_seconds for one in good], ms)
    exposed = spread([one.exposed_seconds for one in good], ms)
    efficiency = f"{statistics.median(one.efficiency for one in good):.3f}"
    return f"{name}| {step} | {exposed} | {efficiency} |"


def _held_against(labels: dict[str, str], tries: Sequence[Try], network: str) -> str:
    own, loop = _of(tries, network, OWN), _of(tries, network, LOOP)
    medians = {
        engine: statistics.median(one.exposed_seconds for one in found)
        for engine in PEERS
        if (found := _of(tries, network, engine))
    }
    best = min(medians, key=lambda engine: medians[engine], default=None)
    limit = spread([one.limit_seconds for one in loop], ms) if loop else "not measured"
    peer = f"{labels[best]}: {ms(medians[best])}" if best else "none ran"
    ours = ms(statistics.median(one.exposed_seconds for one in own)) if own else "did not run"
    over_limit = _ratio(own, loop, lambda one: one.limit_seconds)
    over_peer = _ratio(own, _of(tries, network, best) if best else [], lambda one: one.exposed_seconds)
    return f"| {network} | {limit} | {peer} | {ours} | {over_limit} | {over_peer} |"


def _ratio(own: Sequence[Try], other: Sequence[Try], of: Callable[[Try], float]) -> str:
    """Of the tries that both have; none where the other's time is no more than the noise around zero."""
    by_number = {one.number: of(one) for one in other}
    pairs = [(one.exposed_seconds, by_number[one.number]) for one in own if one.number in by_number]
    if not pairs or any(below <= 0 for _, below in pairs):
        return ""
    return spread([above / below for above, below in pairs], "{:.2f}".format)


def spread(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """Median, and minimum and maximum where there are several."""
    median = shown(statistics.median(values))
    return f"{median} ({shown(min(values))} to {shown(max(values))})" if len(values) > 1 else median


def ms(seconds: float) -> str:
    """Three digits that mean something, from 0.01 ms on."""
    value = 1e3 * seconds
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"

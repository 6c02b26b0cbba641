"""Make the tables of docs/performance.md from the tries of `make peers`: pure text from records."""

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
    "Engines here: hpcdl's `auto`, what it does unasked, and the peers. The limit is a raw in-place MPI_Allreduce of "
    "the same bytes on warm memory, whole or in slices of 4 MiB, whichever is faster, measured in the processes of the "
    "loop by hand; its ratio is of the exposed time."
)
PEERS, LOOP, OWN = ("horovod", "pytorch-ddp", "grpc-ring", "mpi-loop"), "mpi-loop", "auto"


@dataclass(frozen=True, kw_only=True)
class Try:
    """One engine's run on a network, medians over its steps in seconds; `error` says why there are none."""

    network: str
    engine: str
    number: int
    batch_size: int
    steps: int
    ranks: int = 2
    load: float
    step_seconds: float = 0.0
    compute_seconds: float = 0.0
    raw_seconds: float = 0.0
    sliced_seconds: float = 0.0
    parameters: int = 0
    error: str = ""

    @property
    def exposed_seconds(self) -> float:
        """The time that the exchange adds to a step."""
        return self.step_seconds - self.compute_seconds

    @property
    def efficiency(self) -> float:
        """The time of a step without exchange, relative to one with."""
        return self.compute_seconds / self.step_seconds

    @property
    def limit_seconds(self) -> float:
        """The raw all-reduce of the same bytes, whole or in slices, whichever is faster."""
        return min(self.raw_seconds, self.sliced_seconds)


@dataclass(frozen=True, kw_only=True)
class Head:
    """Facts common to all tries of a run."""

    machine: str
    versions: str
    command: str
    date: str
    priority: str


def section(head: Head, labels: dict[str, str], tries: Sequence[Try]) -> str:
    """Return the text between the markers; `labels` are the engines' names for readers."""
    loads = [one.load for one in tries]
    networks = list(dict.fromkeys(one.network for one in tries))
    alone = tries[0].ranks == 1
    said = (
        f"`{head.command}`, {head.date}: {head.machine}; {head.versions}. "
        f"{'One rank with all cores' if alone else 'Two ranks, each with half of the cores'}; "
        f"{head.priority}; load of the machine before a try {min(loads):.1f} to {max(loads):.1f}. A try is the median "
        "of its steps; below are medians of the tries (minimum..maximum). Ahead: who, and hpcdl's "
        f"`{'single' if alone else 'auto'}` over the row's engine, the median of the ratios within a try."
    )
    if alone:
        return "\n".join([
            _paragraph(said),
            "",
            "| network, batch | engine | whole step, ms | ahead |",
            "|---|---|---|---|",
            *(
                _row({**labels, OWN: "hpcdl `single`"}, tries, network, engine, (_whole,))
                for network in networks
                for engine in _engines(tries, network)
            ),
        ])  # fmt: skip
    said += (
        " Exposed: the step less one without exchange, in turn in the same processes. Where that is noise there is no "
        "ratio."
    )
    rows = [
        _paragraph(said),
        "",
        "| network, batch per rank | engine | whole step, ms | ahead | exposed, ms | ahead |",
        "|---|---|---|---|---|---|",
        *(
            _row(labels, tries, network, engine, (_whole, _exposed))
            for network in networks
            for engine in _engines(tries, network)
        ),
    ]
    if not any(one.engine == LOOP for one in tries):  # there is no limit, and the rows show who is faster
        return "\n".join(rows)
    return "\n".join([
        *rows,
        "",
        _paragraph(LIMIT),
        "",
        "| network | fastest whole step, ms | least exposed, ms | limit, ms | `auto` / limit |",
        "|---|---|---|---|---|",
        *(_summary(labels, tries, network) for network in networks),
    ])  # fmt: skip


def put(text: str, page: Path) -> None:
    """Replace the text between the page's markers; raises UsageError if the page has none."""
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
    """Return the tries that have numbers."""
    return [one for one in tries if (one.network, one.engine) == (network, engine) and not one.error]


def _row(
    labels: dict[str, str],
    tries: Sequence[Try],
    network: str,
    engine: str,
    times: Sequence[Callable[[Try], float]],
) -> str:
    every = [one for one in tries if (one.network, one.engine) == (network, engine)]
    good = _of(tries, network, engine)
    failed = next((one.error.replace("|", "/") for one in every if one.error), "")
    counted = f" ({len(good)} of {len(every)} tries; failed: {failed})" if failed else ""
    name = f"| {network}, {every[0].batch_size} | {labels[engine]}{counted} "
    if not good:
        return f"{name}| did not run |{' |' * (2 * len(times) - 1)}"
    own = _of(tries, network, OWN) if engine in PEERS else []
    cells = []
    for of in times:
        cells += [spread([of(one) for one in good], ms), _ahead(own, good, of, labels[engine])]
    return f"{name}| {' | '.join(cells)} |"


def _whole(one: Try) -> float:
    return one.step_seconds


def _exposed(one: Try) -> float:
    return one.exposed_seconds


def _ahead(own: Sequence[Try], other: Sequence[Try], of: Callable[[Try], float], label: str) -> str:
    """Return who takes less time, with the ratio of hpcdl's time to the other's."""
    ratios = _ratios(own, other, of, of)
    if not ratios:
        return ""
    ahead = "hpcdl" if statistics.median(ratios) < 1 else label
    return f"{ahead}: {spread(ratios, '{:.2f}'.format)}"


def _summary(labels: dict[str, str], tries: Sequence[Try], network: str) -> str:
    own, loop = _of(tries, network, OWN), _of(tries, network, LOOP)
    limit = spread([one.limit_seconds for one in loop], ms) if loop else "not measured"
    ratios = _ratios(own, loop, _exposed, lambda one: one.limit_seconds)
    over_limit = spread(ratios, "{:.2f}".format) if ratios else ""
    first, least = (_least(labels, tries, network, of) for of in (_whole, _exposed))
    return f"| {network} | {first} | {least} | {limit} | {over_limit} |"


def _least(labels: dict[str, str], tries: Sequence[Try], network: str, of: Callable[[Try], float]) -> str:
    """Return the engine with the least median, and the value of `auto` if that is another one."""
    medians = {
        engine: statistics.median(map(of, found)) for engine in (OWN, *PEERS) if (found := _of(tries, network, engine))
    }
    if not medians:
        return "none ran"
    best = min(medians, key=lambda engine: medians[engine])
    own = f" (`auto`: {ms(medians[OWN])})" if best != OWN and OWN in medians else ""
    return f"{labels[best]}: {ms(medians[best])}{own}"


def _ratios(
    own: Sequence[Try], other: Sequence[Try], above: Callable[[Try], float], below: Callable[[Try], float]
) -> list[float]:
    """Return ratios of the tries that both have; none if either's time is within the noise around zero."""
    by_number = {one.number: below(one) for one in other}
    pairs = [(above(one), by_number[one.number]) for one in own if one.number in by_number]
    return [] if any(min(pair) <= 0 for pair in pairs) else [one / against for one, against in pairs]


def spread(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """Return the median, with minimum and maximum if there are several values."""
    median = shown(statistics.median(values))
    return f"{median} ({shown(min(values))}..{shown(max(values))})" if len(values) > 1 else median


def ms(seconds: float) -> str:
    """Return milliseconds with three significant digits, from 0.01 ms on."""
    value = 1e3 * seconds
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"

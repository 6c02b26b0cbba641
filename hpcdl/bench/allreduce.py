"""`hpcdl bench allreduce`: every all-reduce at every size, and the link between every two ranks.

`python -m hpcdl.bench.allreduce FOLDER` is one rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.bench.ranks import REQUEST_FILE, ReportProgress, as_started, launched, on_fresh_ranks, rank_program
from hpcdl.collectives.auto import CANDIDATES, Row, Timetable, save_table, serves_auto, table_file, time_size
from hpcdl.collectives.slices import Workspace
from hpcdl.collectives.table import COLLECTIVES
from hpcdl.comm.observed import Observed
from hpcdl.config.load import Layer, as_toml_values, load
from hpcdl.config.schema import AllreduceBenchConfig
from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.core.progress import progress
from hpcdl.core.records.from_json import from_json
from hpcdl.core.statistics import SURE, holm, quantiles
from hpcdl.core.units import format_bytes, parse_bytes
from hpcdl.report.analysis.laws import AlphaBeta, alpha_beta

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator


SHORT_BYTES = 8
LONG_BYTES = 1 << 20
PINGS = 9
ALL_PAIRS_UP_TO = 48
"""Ranks up to which every pair is measured; with more, only pairs at distances of powers of two."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two ranks and the link between them, one way."""

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    latency_s: float
    seconds_per_byte: float

    @property
    def seconds(self) -> float:
        """The time of one long message."""
        return self.latency_s + self.seconds_per_byte * LONG_BYTES


def choose_pairs(num_ranks: int) -> list[tuple[int, int]]:
    """Return the pairs to measure, each with the lower rank first."""
    if num_ranks <= ALL_PAIRS_UP_TO:
        return [(low, high) for low in range(num_ranks) for high in range(low + 1, num_ranks)]
    distances = [1 << bit for bit in range((num_ranks - 1).bit_length())]
    pairs = {(rank, (rank + distance) % num_ranks) for rank in range(num_ranks) for distance in distances}
    return sorted({(min(pair), max(pair)) for pair in pairs})


def sweep(communicator: Communicator) -> list[Pair]:
    """Measure the pairs one after another while the other ranks wait; every rank calls it and gets all pairs."""
    hosts = communicator.allgather_json(communicator.host)
    buffers = [numpy.zeros(num_bytes, numpy.uint8) for num_bytes in (SHORT_BYTES, LONG_BYTES)]
    own_fits: list[tuple[tuple[int, int], AlphaBeta]] = []
    for low, high in choose_pairs(communicator.size):
        # The other ranks wait in it, so that none of their messages disturbs the pair.
        communicator.barrier()
        if communicator.rank in (low, high):
            peer = high if communicator.rank == low else low
            seconds = [
                statistics.median(one_way(communicator, peer, buffer, first=communicator.rank == low, repeats=PINGS))
                for buffer in buffers
            ]
            fit = alpha_beta([SHORT_BYTES, LONG_BYTES], seconds)
            if communicator.rank == low and fit is not None:
                own_fits.append(((low, high), fit))
    fits = communicator.allgather_json([[*ranks, fit.latency_s, fit.seconds_per_byte] for ranks, fit in own_fits])
    return [
        Pair(ranks=(low, high), hosts=(hosts[low], hosts[high]), latency_s=latency, seconds_per_byte=per_byte)
        for of_rank in fits
        for low, high, latency, per_byte in of_rank
    ]


def find_slowest(communicator: Communicator, pairs: Sequence[Pair]) -> SlowestPair:
    """Time the slowest pair and the median one again, in turn; every rank calls it and gets the same."""
    from scipy.stats import mannwhitneyu  # takes a second to load

    ranked = sorted(pairs, key=lambda pair: pair.seconds)
    # The lower median: of two pairs it is not the slowest one itself.
    compared = (ranked[-1], ranked[(len(ranked) - 1) // 2])
    buffer, own = numpy.zeros(LONG_BYTES, numpy.uint8), list[list[float]]()
    for low, high in (pair.ranks for pair in compared):
        communicator.barrier()
        seconds: list[float] = []
        if communicator.rank in (low, high):
            peer = high if communicator.rank == low else low
            seconds = one_way(communicator, peer, buffer, first=communicator.rank == low, repeats=PINGS)
        own.append(seconds)
    gathered = communicator.allgather_json(own)
    slow, usual = (gathered[pair.ranks[0]][index] for index, pair in enumerate(compared))
    low_s, median_s, high_s = quantiles(slow, [0.25, 0.5, 0.75])
    return SlowestPair(
        ranks=ranked[-1].ranks,
        hosts=ranked[-1].hosts,
        seconds=median_s,
        ratio=median_s / statistics.median(usual) if len(pairs) > 1 else 1.0,
        low_seconds=low_s,
        high_seconds=high_s,
        distinguishable=len(pairs) > 1 and float(mannwhitneyu(slow, usual, alternative="greater").pvalue) < SURE,
    )


def median_link(pairs: Sequence[Pair]) -> AlphaBeta:
    """Return the link with median latency and median bandwidth."""
    return AlphaBeta(
        latency_s=statistics.median(pair.latency_s for pair in pairs),
        seconds_per_byte=statistics.median(pair.seconds_per_byte for pair in pairs),
    )


def one_way(communicator: Communicator, peer: int, buffer: Array, *, first: bool, repeats: int) -> list[float]:
    """Return the seconds of half a round trip of `buffer`, `repeats` times, after two warm-ups."""
    samples = []
    for repeat in range(repeats + 2):
        start_s = time.perf_counter()
        if first:
            communicator.isend(buffer, peer).wait()
        communicator.irecv(buffer, peer).wait()
        if not first:
            communicator.isend(buffer, peer).wait()
        if repeat > 1:
            samples.append((time.perf_counter() - start_s) / 2)
    return samples


@dataclass(frozen=True, kw_only=True)
class AllreduceRow:
    """One algorithm at one size: median seconds of the slowest rank.

    `bus_bandwidth` is 2(p-1)/p n/t in bytes/s, the minimum that each rank must send and receive in that time.
    `share_of_bound` is the bound, lg p latencies and 2(p-1)/p n bytes on the median link, over the time; through shared
    memory it may exceed 1. `low_seconds` and `high_seconds` hold the middle half of the calls. `perhaps_fastest`: the
    calls do not distinguish it from the fastest of its size.
    """

    algorithm: str
    bytes: int
    seconds: float
    bus_bandwidth: float
    share_of_bound: float
    low_seconds: float
    high_seconds: float
    perhaps_fastest: bool


@dataclass(frozen=True, kw_only=True)
class SlowestPair:
    """The two ranks with the slowest message of 1 MiB; `ratio` over the median pair, both timed again.

    The slowest of many is so partly by chance, which new times show. `low_seconds` and `high_seconds` hold the middle
    half of these; `distinguishable`: they differ from those of the median pair.
    """

    ranks: Sequence[int]
    hosts: Sequence[str]
    seconds: float
    ratio: float
    low_seconds: float
    high_seconds: float
    distinguishable: bool


@dataclass(frozen=True, kw_only=True)
class AllreduceResult:
    """The results; `fits` holds alpha and beta of each algorithm, `link` those of the median pair of ranks."""

    library: str
    ranks: int
    nodes: int
    repeats: int
    rows: Sequence[AllreduceRow]
    fits: Mapping[str, AlphaBeta]
    link: AlphaBeta
    slowest_pair: SlowestPair


def run(config: AllreduceBenchConfig, begins: Callable[[int], object]) -> AllreduceResult | None:
    """Measure on new ranks of this node or job, or on those of a launcher, where all but rank 0 get None.

    `begins` is called with the number of new ranks before they start.
    """
    sizes = parse_sizes(config.run.sizes)
    if (rank_place := launched()) is not None:
        result = as_started(
            rank_place, lambda: None, lambda group: measure_on_rank(config, group, lambda done, what: None)
        )  # fmt: skip
        return result if rank_place.rank == 0 else None
    if config.run.ranks < 2:
        raise UsageError(f"--ranks {config.run.ranks}: an all-reduce needs at least two ranks; use --ranks 2")
    begins(config.run.ranks)
    with progress("all-reduces", len(sizes)) as bar:
        document = on_fresh_ranks("hpcdl.bench.allreduce", as_toml_values(config), config.run.ranks, bar)
        return from_json(AllreduceResult, document)


def parse_sizes(text: str, multiple_of: int = 4) -> list[int]:
    """Return the bytes of each size in `4KiB,1MiB`, ascending, cut to whole float32. Raises UsageError if invalid."""
    try:
        sizes = sorted({parse_bytes(part) // multiple_of * multiple_of for part in text.split(",") if part.strip()})
    except ValueError as error:
        raise UsageError(f"--sizes {text}: {error}") from None
    if not sizes or sizes[0] < multiple_of:
        least = f"{multiple_of} byte{'s' if multiple_of > 1 else ''}"
        raise UsageError(f"--sizes {text}: a size is at least {least}; write for example 4KiB,1MiB")
    return sizes


def measure_on_rank(
    config: AllreduceBenchConfig, communicator: Communicator, on_progress: ReportProgress
) -> AllreduceResult:
    """Do one rank's part; every rank gets the result. Raises HpcdlError if an algorithm sums incorrectly.

    Rank 0 saves the times for `--strategy auto`, if the sizes range from small gradients to full buckets.
    """
    workspace = Workspace()
    sizes = parse_sizes(config.run.sizes)
    pairs = sweep(communicator)
    slowest = find_slowest(communicator, pairs)
    calls: dict[int, dict[str, list[float]]] = {}
    for size in sizes:
        for name in CANDIDATES:
            check(communicator, name, size, workspace)
        calls[size] = time_size(communicator, CANDIDATES, size, config.run.repeats, workspace)
        on_progress(len(calls), format_bytes(size))
    workspace.close()
    rows = [
        Row(bytes=size, seconds={name: statistics.median(times) for name, times in by_name.items()})
        for size, by_name in calls.items()
    ]
    nodes = len(set(communicator.allgather_json(communicator.host)))
    table = Timetable(library=communicator.library, ranks=communicator.size, nodes=nodes, rows=rows)
    if communicator.rank == 0 and serves_auto(sizes):
        with contextlib.suppress(OSError):  # a full home must not lose the result
            save_table(table_file(table.library, table.ranks, table.nodes, communicator.host), table)
    link = median_link(pairs)
    fits = {name: alpha_beta(sizes, [row.seconds[name] for row in rows]) for name in CANDIDATES}
    return AllreduceResult(
        library=table.library,
        ranks=table.ranks,
        nodes=table.nodes,
        repeats=config.run.repeats,
        rows=[item for row in rows for item in _rows(row, calls[row.bytes], table.ranks, link)],
        fits={name: fit for name, fit in fits.items() if fit is not None},
        link=link,
        slowest_pair=slowest,
    )


def check(communicator: Communicator, name: str, num_bytes: int, workspace: Workspace) -> None:
    """Sum whole numbers, which float32 adds exactly, and compare with the known result on every rank."""
    # A prime period: slices shifted by any power of two are noticed. Small factors: sums of whole numbers are exact in
    # float32 up to 2^24, so here up to 30,000 ranks.
    pattern = (numpy.arange(num_bytes // 4) % 61).astype(numpy.float32)
    factors = numpy.arange(communicator.size) % 16 + 1
    buffer = pattern * numpy.float32(factors[communicator.rank])
    COLLECTIVES.load(name)(communicator, buffer, workspace)
    expected = pattern * numpy.float32(factors.sum())
    verdicts = communicator.allgather_json([bool((buffer == expected).all()), zlib.crc32(buffer.tobytes())])
    wrong = [rank for rank, (correct, _) in enumerate(verdicts) if not correct]
    if wrong or len({checksum for _, checksum in verdicts}) > 1:
        raise HpcdlError(
            f"{name} sums {format_bytes(num_bytes)} wrongly on rank {wrong[0] if wrong else 0} "
            f"with {communicator.library}; use another strategy and report this"
        )


def perhaps_fastest(calls: Mapping[str, Sequence[float]], best: str) -> set[str]:
    """Return `best` and the names whose seconds do not differ from its by Mann and Whitney's test, after Holm.

    A test on ranks: one call that another program disturbed must not hide a difference of all others.
    """
    from scipy.stats import mannwhitneyu  # takes a second to load

    others = [name for name in calls if name != best]
    adjusted = holm([float(mannwhitneyu(calls[name], calls[best]).pvalue) for name in others])
    return {best, *(name for name, p_value in zip(others, adjusted, strict=True) if p_value >= SURE)}


def fewest_calls(num_algorithms: int) -> int:
    """Return the calls of each of `num_algorithms` without which `perhaps_fastest` cannot leave a single one."""
    calls = 1
    while 2 / math.comb(2 * calls, calls) * (num_algorithms - 1) >= SURE:  # the test's least probability, after Holm
        calls += 1
    return calls


def _rows(row: Row, calls: Mapping[str, Sequence[float]], num_ranks: int, link: AlphaBeta) -> list[AllreduceRow]:
    least_bytes = 2 * (num_ranks - 1) / num_ranks * row.bytes
    # Rounded up: with one message at a time no all-reduce takes fewer rounds.
    bound_s = (num_ranks - 1).bit_length() * link.latency_s + least_bytes * link.seconds_per_byte
    close, results = perhaps_fastest(calls, row.best), []
    for name, seconds in row.seconds.items():
        low_s, high_s = quantiles(calls[name], [0.25, 0.75])
        results.append(
            AllreduceRow(
                algorithm=name,
                bytes=row.bytes,
                seconds=seconds,
                bus_bandwidth=least_bytes / seconds,
                share_of_bound=bound_s / seconds,
                low_seconds=low_s,
                high_seconds=high_s,
                perhaps_fastest=name in close,
            )
        )
    return results


def _on_rank(request: dict[str, Any], group: Observed, on_progress: ReportProgress) -> dict[str, Any]:
    config = load(AllreduceBenchConfig, [Layer(origin=REQUEST_FILE, values=request)]).config
    return dataclasses.asdict(measure_on_rank(config, group, on_progress))


if __name__ == "__main__":
    rank_program(_on_rank)

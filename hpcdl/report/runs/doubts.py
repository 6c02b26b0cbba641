"""What is doubtful in a table that was measured elsewhere: names, units, copies, and whose batch a column counts."""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hpcdl.core.records.run_record import PARTS
from hpcdl.core.units import counted, listed
from hpcdl.report.runs.run import Run

WITH_SERVERS = re.compile("(grpc-)?ps|easgd|async-.*")
"""Strategies of which some ranks serve."""
_LONG_STEP_S = 2.0
"""A median step above this may be a number of milliseconds, which hardly any are below."""
_SAME_THROUGHPUT = 1.25
"""Largest growth of a throughput over four times the workers that looks like no growth."""
_ENOUGH_SIZES = 3
_NEARLY_ALL = 0.6
"""Share of an ideal growth over nodes from which on a throughput has grown with them."""
_UNITS_MIXED = 50.0  # below the factors of mistaken units: 60 of minutes, 1,000 of milliseconds
_EXACT_DIGITS = 5
"""Digits of a measurement that no two runs share by chance."""
_NAMES = ("strategy", "model", "data", "machine", "version")
_TINY = 0.02
"""Share of a step below which computing is in another unit than the step."""
_SAME_EPOCH = 10.0
"""Factor by which samples of an epoch may differ; a mistaken unit makes it 60 or 1,000."""


def doubts(header: Sequence[str], rows: Sequence[Mapping[str, str]], runs: Sequence[Run]) -> Iterator[str]:
    """Yield what is doubtful in a table, a line each; `rows` and `runs` hold the same lines, in one order."""
    timed = [run for run, row in zip(runs, rows, strict=True) if run.usable and not row.get("images_per_second")]
    yield from _long_parts(rows, runs)
    yield from _tiny_parts(runs)
    yield from _uncounted_servers(header, runs)
    yield from _copies(rows)
    yield from _similar_names(rows)
    yield from _hosts_as_machines(runs)
    yield from _long_steps(timed)
    yield from _doubtful_units(header, runs)
    yield from _growing_batches(header, runs)
    yield from _modes_that_vary(runs)
    yield from _ranks_of_a_node(runs)
    yield from _doubtful_epochs(runs)
    yield from _doubtful_totals(runs)


_APART = 1.1
"""Factor between the slowest run of one value and the fastest of another that is no scatter."""
_MOST_VALUES = 10


def divided_settings(columns: Sequence[str], rows: Sequence[Mapping[str, str]], runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line for each unused column that divides the runs of settings into faster and slower ones.

    They would be averaged as repeats: those of two networks, or of two precisions.
    """
    for column in columns:
        settings: dict[object, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for run, row in zip(runs, rows, strict=True):
            if run.usable and row.get(column):
                settings[_setting(run)][row[column]].append(run.images_per_second or 0.0)
        values = sorted({value for by_value in settings.values() for value in by_value})
        pairs = itertools.combinations(values, 2) if len(values) <= _MOST_VALUES else ()
        for one, other in pairs:
            both = [(by_value[one], by_value[other]) for by_value in settings.values() if {one, other} <= {*by_value}]
            faster = sum(min(ours) > _APART * max(theirs) for ours, theirs in both)
            slower = sum(min(theirs) > _APART * max(ours) for ours, theirs in both)
            if max(faster, slower) > 1 and not min(faster, slower):
                first, second = (one, other) if faster else (other, one)
                yield (
                    f"runs with {column} {first} are faster than those with {second} at {max(faster, slower)} settings,"
                    f" and are averaged; if {column} is a setting, call it version, or give each value a file"
                )
                break


def _setting(run: Run) -> object:
    """Return what distinguishes settings: runs that share it are repeats of each other."""
    size = (run.nodes, run.ranks, run.workers, run.servers, run.ranks_per_node, run.threads)
    names = (run.strategy, run.model, run.data, run.machine, run.version, run.mode)
    return (*names, *size, run.batch_per_rank, run.global_batch, *sorted(run.config.items()))


def _long_parts(rows: Sequence[Mapping[str, str]], runs: Sequence[Run]) -> Iterator[str]:
    """Yield the rows whose parts were dropped, because they exceed the step."""
    columns = [f"{name}_seconds" for name in PARTS]
    names = [
        run.name
        for run, row in zip(runs, rows, strict=True)
        if run.usable and not run.parts and any(row.get(name) for name in columns)
    ]
    if names:
        yield f"parts of a step are longer than the step, and are not used: {listed(names)}; all are in seconds"


def _tiny_parts(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the rows in which computing takes next to nothing, as in another unit than the step."""
    names = [
        run.name for run in runs if run.usable and 0 < run.parts.get("compute", 0.0) < _TINY * sum(run.parts.values())
    ]
    if names:
        yield (
            f"computing is less than {100 * _TINY:.0f} % of a step, and the report calls the rest other:"
            f" {listed(names)}; all columns are in seconds"
        )


def _uncounted_servers(header: Sequence[str], runs: Sequence[Run]) -> Iterator[str]:
    """Yield the strategies of which some ranks serve, if no column says how many."""
    names = sorted({run.strategy for run in runs if WITH_SERVERS.fullmatch(run.strategy) and not run.servers})
    if names and not {"servers", "workers"} & set(header):
        yield (
            f"{listed(names)} has servers, and no column says how many of the ranks: all count as workers, which makes"
            " efficiencies wrong if some serve; add columns workers and servers"
        )


def _similar_names(rows: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Yield names that differ in capitals, blanks and dashes alone: rows of different names are never averaged."""
    spellings: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for row in rows:
        for column in _NAMES:
            if name := row.get(column):
                spellings[column, re.sub(r"[\s_-]", "", name.casefold())][name] = None
    for (column, _), names in spellings.items():
        if len(names) > 1:
            yield f"{column} is written in several ways, each taken for another one: {listed(list(names), 5)}"


def _hosts_as_machines(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line if machines differ in digits alone, and none has two sizes: then no size has another to be based on.

    Machines of one name and other numbers may be kinds of node; then some of them ran more than one size.
    """
    sizes: dict[str, set[int]] = defaultdict(set)
    for run in runs:
        if run.usable and run.machine:
            sizes[run.machine].add(run.workers)
    patterns = {re.sub(r"[\d.,;\s-]+", "*", name) for name in sizes}
    if len(sizes) > 2 and len(patterns) == 1 and max(map(len, sizes.values())) == 1 < len(set().union(*sizes.values())):
        yield (
            f"machine has a value for each size ({listed(list(sizes), 3)}), and machines are never compared; if these"
            " are hosts of one machine, give them one name"
        )


def _copies(rows: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Yield how many rows equal an earlier one in all but `repeat`, with too many digits for chance."""
    counts: Counter[tuple[str, ...]] = Counter()
    for row in rows:
        measured = row.get("images_per_second") or row.get("step_seconds") or ""
        # Only significant digits count: not the exponent, the sign, or zeros in front.
        if len(re.sub(r"e.*|\D", "", measured).lstrip("0")) >= _EXACT_DIGITS:
            counts[tuple(value for name, value in row.items() if name != "repeat")] += 1
    copies = sum(count - 1 for count in counts.values())
    if copies:
        yield (
            f"{counted(copies, 'row')} with exactly the numbers of an earlier row; all are used. Delete copies of one"
            " measurement, which make intervals too narrow"
        )


def _long_steps(timed: Sequence[Run]) -> Iterator[str]:
    """Yield how the steps of rows without a throughput were read, if they are long: nothing else shows their unit."""
    middle_s = statistics.median(run.step_seconds or 0.0 for run in timed) if timed else 0.0
    if middle_s > _LONG_STEP_S:
        rate = statistics.median((run.images_per_second or 0.0) / run.workers for run in timed)
        yield (
            f"step_seconds are taken as seconds: the median step takes {middle_s:.3g} s, {rate:.2g} samples a second of"
            " a worker; if these are milliseconds, divide step_seconds by 1,000"
        )


def _doubtful_units(header: Sequence[str], runs: Sequence[Run]) -> Iterator[str]:
    """Yield what looks like another unit than the column's: no number of a table says what it counts."""
    usable = [run for run in runs if run.usable and run.step_seconds]
    for runs_by_size in _sizes(usable):
        (first, base), *_, (last, top) = runs_by_size.items()
        growth = _middle_rate(top) / _middle_rate(base)
        where = f"{base[0].strategy} {base[0].model} from {first} to {last} workers"
        flat = last >= 4 * first and growth < _SAME_THROUGHPUT
        if flat and "images_per_second" in header:
            yield (
                f"images_per_second hardly grows for {where} (x {growth:.2g}). It is the sum of all workers: multiply"
                " the rate of one worker by their number, and call a time step_seconds"
            )
        elif flat and "batch_per_rank" not in header:
            yield (
                f"throughput hardly grows for {where} (x {growth:.2g}). global_batch is taken as the samples of all"
                " workers; if it is the batch of one, call it batch_per_rank"
            )
        steps = [statistics.median(run.step_seconds or 0.0 for run in members) for members in runs_by_size.values()]
        jump = max(max(pair) / min(pair) for pair in itertools.pairwise(steps))
        if jump > _UNITS_MIXED:
            yield f"steps jump by a factor of {jump:,.0f} for {where}; check that all rows have the same unit"


def _modes_that_vary(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line for series whose mode is not the batch that stays the same: they would have no curve."""
    series: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    for run in runs:
        series[run.strategy, run.model, run.data, run.machine, run.version, run.mode].append(run)
    for (strategy, model, *_, mode), members in series.items():
        sizes = {run.workers for run in members}
        per_worker, in_all = ({getattr(run, name) for run in members} for name in ("batch_per_rank", "global_batch"))
        kept, other = {"strong": (in_all, per_worker), "weak": (per_worker, in_all)}.get(mode, ((), ()))
        if len(sizes) > 1 and len(kept) == len(sizes) and len(other) == 1:
            fixed, one = ("weak", "batch of a worker") if mode == "strong" else ("strong", "global batch")
            yield (
                f"{strategy} {model} is called {mode} scaling, but its {one} is {other.pop()} at all sizes, which is"
                f" {fixed} scaling; call it that, leave mode empty, or correct the batch"
            )


def _ranks_of_a_node(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line for series of one number of ranks whose throughput grows with the nodes, as with ranks per node."""
    series: dict[tuple[object, ...], dict[int, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.usable:
            alike = (run.strategy, run.model, run.data, run.machine, run.version, run.mode)
            series[*alike, run.threads, run.batch_per_rank, run.ranks][run.nodes].append(run)
    for runs_by_nodes in series.values():
        first, last = min(runs_by_nodes), max(runs_by_nodes)
        base, top = runs_by_nodes[first], runs_by_nodes[last]
        growth = _middle_rate(top) / _middle_rate(base)
        if len(runs_by_nodes) >= _ENOUGH_SIZES and growth > _NEARLY_ALL * last / first:
            yield (
                f"images_per_second of {base[0].strategy} {base[0].model} grows from {first} to {last} nodes"
                f" (x {growth:.2g}) with {base[0].ranks} ranks in all rows; ranks counts those of all nodes: if it is"
                " ranks per node, multiply it by nodes"
            )


def _growing_batches(header: Sequence[str], runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line for series whose batch per worker grows as the workers do, as a batch of all workers does."""
    series: dict[tuple[str, ...], set[tuple[int, int]]] = defaultdict(set)
    for run in runs:
        series[run.strategy, run.model, run.data, run.machine, run.version, run.mode].add(
            (run.workers, run.batch_per_rank)
        )
    for (strategy, model, *_), sizes in series.items():
        shares = {batch / workers for workers, batch in sizes}
        if "global_batch" not in header and len(sizes) >= _ENOUGH_SIZES and len(shares) == 1:
            yield (
                f"batch_per_rank of {strategy} {model} is {shares.pop():g} x workers in all rows, and is taken as the"
                " batch of one worker; if it is that of all, call it global_batch"
            )


def _doubtful_epochs(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line for networks whose epochs would have different numbers of samples: times of another unit."""
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs:
        if run.usable and run.seconds_per_epoch and run.images_per_second:
            samples[run.model, run.data].append(run.seconds_per_epoch * run.images_per_second)
    for (model, _), sizes in samples.items():
        if max(sizes) > _SAME_EPOCH * min(sizes):
            yield (
                f"seconds_per_epoch do not fit the throughputs of {model}: an epoch would have {min(sizes):,.0f} to"
                f" {max(sizes):,.0f} samples; check their unit, or name other data in a column data"
            )


def _doubtful_totals(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line for networks whose runs differ a lot in length, however it is counted: times of another unit."""
    lengths: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    for run in runs:
        if run.usable and run.seconds_total and run.images_per_second:
            samples = run.seconds_total * run.images_per_second
            lengths[run.model, run.data].append((run.seconds_total, samples, samples / run.global_batch))
    for (model, _), lists in lengths.items():
        factor = min(max(values) / min(values) for values in zip(*lists, strict=True))
        if factor > _UNITS_MIXED:
            yield (
                f"seconds_total of {model} differ by a factor of {factor:,.0f}, as hours and seconds do, and node-hours"
                " follow them; check that all rows have the same unit"
            )


def _sizes(runs: Sequence[Run]) -> Iterator[dict[int, list[Run]]]:
    """Yield the runs by workers of each series of one batch, per worker or in all, with several sizes."""
    series: dict[tuple[object, ...], dict[int, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for name in ("batch_per_rank", "global_batch"):
            key = (run.strategy, run.model, run.data, run.machine, run.version, run.mode, name, getattr(run, name))
            series[key][run.workers].append(run)
    yield from (dict(sorted(sizes.items())) for sizes in series.values() if len(sizes) > 1)


def _middle_rate(runs: Sequence[Run]) -> float:
    return statistics.median(run.images_per_second or 0.0 for run in runs)

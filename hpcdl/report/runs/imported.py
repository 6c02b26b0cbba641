"""Runs that were measured elsewhere, from a CSV file."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

from hpcdl.config.load import all_settings
from hpcdl.config.schema import TrainConfig
from hpcdl.core.errors import ConfigError, SourceError, UsageError, shown, suggestion
from hpcdl.core.progress import Progress
from hpcdl.core.records.run_record import FAILED, FINISHED, STOPPED, is_measured
from hpcdl.core.storage.files import read_bytes
from hpcdl.core.units import counted, listed
from hpcdl.report.runs.run import MODES, Run, positive
from hpcdl.report.runs.sources import Gathered, Walk, gather

REQUIRED = ("strategy", "model", "nodes", "ranks")
ONE_OF = (("batch_per_rank", "global_batch"), ("images_per_second", "step_seconds"))
OPTIONAL = (
    "mode", "repeat", "workers", "servers", "ranks_per_node", "threads", "data", "machine", "version",
    "compute_seconds", "exposed_communication_seconds", "input_seconds", "wait_seconds", "update_seconds",
    "seconds_per_epoch", "seconds_total", "accuracy",
    "gradient_bytes", "rounds_per_step", "round_bytes_per_step", "status",
)  # fmt: skip
_STATUSES = {
    FINISHED: ("", "finished", "done", "complete", "completed", "ok", "success", "succeeded", "successful", "passed"),
    FAILED: ("failed", "failure", "error", "crashed", "killed", "timeout", "cancelled", "canceled", "out_of_memory",
             "oom", "node_fail", "preempted"),
    STOPPED: ("stopped", "interrupted", "running", "pending"),
}  # fmt: skip
"""Words of a column `status`, Slurm's among them, by what they say of a run."""
_RESULTS = ("loss", "metrics", "steps")
"""Settings whose names other tools use for results of a run."""
SETTINGS = {item.name: item for item in all_settings(TrainConfig)
            if item.matters and item.name not in (*REQUIRED, *OPTIONAL, *_RESULTS)}  # fmt: skip
"""Columns that are settings of `hpcdl train`: rows that differ in one are never averaged."""
_KNOWN = (*REQUIRED, *(name for group in ONE_OF for name in group), *OPTIONAL)
_IDENTITY = (
    *REQUIRED, "mode", "repeat", "workers", "servers", "ranks_per_node", "threads", "data", "machine", "version",
    "batch_per_rank", "global_batch",
)  # fmt: skip
_NAMES = ("strategy", "model", "data", "machine", "version")
_PARTS = ("input", "compute", "wait", "exposed_communication", "update")
_MOST_PROBLEMS = 10
_OF_SEVERAL = frozenset(
    ["total", "totals", "sum", "mean", "average", "avg", "median", "std", "stdev", "stddev", "min", "max"]
)
"""Names of rows that spreadsheets add below the measurements."""
_REST = "\n"
"""The key of cells without a column. It cannot be a column name."""
_SEPARATOR_LINE = re.compile(r'"?sep=."?[\r\n]+', re.IGNORECASE)
"""The line that Excel writes above a header."""
_LONG_STEP_S = 2.0
"""A median step above this may be a number of milliseconds, which hardly any are below."""
_SAME_THROUGHPUT = 1.25
"""Largest growth of a throughput over four times the workers that looks like no growth."""
_ENOUGH_SIZES = 3
_UNITS_MIXED = 50.0  # below the factors of mistaken units: 60 of minutes, 1,000 of milliseconds
_EXACT_DIGITS = 5
"""Digits of a measurement that no two runs share by chance."""
WITH_SERVERS = re.compile("(grpc-)?ps|easgd|async-.*")
"""Strategies of which some ranks serve."""
_EXTENTS = ("seconds_per_epoch", "seconds_total", "rounds_per_step", "round_bytes_per_step")
_SAME_RATE = 1.2
"""Factor by which throughput and seconds of a step may differ, as a mean and a median of steps do."""
_TINY = 0.02
"""Share of a step below which computing is in another unit than the step."""
_SAME_EPOCH = 10.0
"""Factor by which samples of an epoch may differ; a mistaken unit makes it 60 or 1,000."""
_SUM_TOLERANCE = 1.02
"""Factor by which parts may exceed the step, because of rounding."""


def gather_with(
    paths: Sequence[Path],
    imported: tuple[str, Path] | None,
    bar: Progress | None = None,
    walks: Mapping[Path, Walk] = MappingProxyType({}),
) -> Gathered:
    """Return the records of `paths`, and those of `imported` (kind and file). Raises UsageError for other than csv."""
    gathered = gather(paths, bar, walks) if paths else Gathered(runs=())
    if imported is not None:
        kind, path = imported
        if kind != "csv":
            raise UsageError(f"--import {kind}: only csv is known; type --import csv FILE")
        gathered += read_csv(path)
    return gathered


def read_csv(path: Path) -> Gathered:
    """Return the rows of `path` as runs. Unknown columns give a remark. Raises ConfigError, a line per wrong cell."""
    try:
        # Excel writes a byte order mark, which would become a part of the first column's name.
        text = read_bytes(path).decode("utf-8-sig")
        of_excel = _SEPARATOR_LINE.match(text)
        table = io.StringIO(text[of_excel.end() :] if of_excel else text, newline="")
        # Without `strict` an open quote would take all following rows into one cell.
        reader = csv.DictReader(table, restkey=_REST, restval="", strict=True)
        header = [name.strip().lower() for name in reader.fieldnames or ()]
        while header and not header[-1]:
            header.pop()  # empty columns of a spreadsheet
        _check_header(path, header)
        reader.fieldnames = header
        # The reader does not count Excel's line, which is cut off above.
        read = [(reader.line_num + (of_excel is not None), dict(row)) for row in reader]
    except FileNotFoundError:
        raise SourceError(f"no such file: {path}; check --import") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"{path} is no readable CSV ({error}); save it as UTF-8 with commas") from None
    problems = [problem for line, row in read for problem in _beyond(f"{path.name}:{line}", row.pop(_REST, ()), header)]
    rows = [(line, _stripped(row)) for line, row in read]
    runs = [run for line, row in rows if (run := _run(path, line, row, problems)) is not None]
    if problems:
        num_more = len(problems) - _MOST_PROBLEMS
        raise ConfigError(
            [*problems[:_MOST_PROBLEMS], *([f"and {num_more} more mistakes in {path}"] if num_more > 0 else [])]
        )
    if not runs:
        raise SourceError(f"{path} has a header and no rows; add one row for each run")
    return Gathered(runs=tuple(runs), remarks=tuple(_remarks(path, header, rows, runs)))


def _stripped(row: Mapping[str, str | None]) -> dict[str, str]:
    return {name: (value or "").strip() for name, value in row.items() if name}


def _beyond(where: str, rest: Sequence[str], header: Sequence[str]) -> Iterator[str]:
    """Yield the problem of a row with more cells than columns: a comma split a number, and shifted the other cells."""
    if any(cell.strip() for cell in rest):
        cells = len(header) + len(rest)
        yield f"{where}: {cells} cells for {len(header)} columns; write numbers with a point, quote text with commas"


def _check_header(path: Path, header: list[str]) -> None:
    if len(header) == 1 and (mark := next((mark for mark in ";\t|" if mark in header[0]), "")):
        raise ConfigError([f"{path}: {mark!r} separates its columns; save it with commas, and numbers with a point"])
    if not set(header) & set(_KNOWN):
        example = ",".join((*REQUIRED, *(group[0] for group in ONE_OF)))
        raise ConfigError([f"{path}: its first line must name the columns, such as {example}"])
    twice = [name for name, count in Counter(map(_as_name, filter(None, header))).items() if count > 1]
    problems = [f"{path}: column {name!r} comes twice; delete one of them" for name in twice]
    problems += [f"{path}: no column {name!r}{suggestion(name, header)}" for name in REQUIRED if name not in header]
    problems += [
        f"{path}: neither column {' nor '.join(map(repr, group))}; one of them is needed"
        for group in ONE_OF
        if not set(group) & set(header)
    ]
    if problems:
        raise ConfigError(problems)


def _run(path: Path, line: int, row: Mapping[str, str], problems: list[str]) -> Run | None:
    cells = _Cells(f"{path.name}:{line}", row)
    ranks = cells.whole("ranks")
    servers = cells.whole("servers", 0, least=0)
    workers = cells.whole("workers", ranks)
    nodes = cells.whole("nodes")
    per_node = cells.whole("ranks_per_node", math.ceil(ranks / nodes))
    batch, whole_batch = _batches(cells, workers)
    _check_counts(cells, row, {"ranks": ranks, "workers": workers, "servers": servers, "nodes": nodes}, per_node)
    mode = row.get("mode", "").lower()
    if mode not in ("", *MODES):
        cells.complain("mode", f"{shown(mode)} is none of {', '.join(MODES)}")
    threads = cells.whole("threads") if row.get("threads") else None
    if mode == "scale-up" and threads is None:
        cells.complain("threads", "scale-up needs the number of threads")
    step = cells.real("step_seconds")
    rate = cells.real("images_per_second")
    if rate is None and step is not None:
        # A rate of 0 is in no mean; the caveats name the row.
        rate = whole_batch / step if step > 0 else 0.0
    _check_rate(cells, step, rate, whole_batch)
    parts, total = _parts(cells), step or (whole_batch / rate if rate is not None and positive(rate) else None)
    config = _config(cells, row)
    _check_names(cells, row)
    per_epoch, in_all, rounds, round_bytes = map(cells.extent, _EXTENTS)
    accuracy = cells.share("accuracy")
    status = cells.status()
    problems += cells.problems
    if cells.problems:
        return None
    return Run(
        name=cells.where,
        mode=mode,
        strategy=row["strategy"],
        model=row["model"],
        data=row.get("data", ""),
        nodes=nodes,
        ranks=ranks,
        workers=workers,
        servers=servers,
        ranks_per_node=per_node,
        threads=threads,
        batch_per_rank=batch,
        global_batch=whole_batch,
        machine=row.get("machine", ""),
        version=row.get("version", ""),
        images_per_second=rate,
        step_seconds=total,
        parts=_completed(parts, total),
        gradient_bytes=cells.whole("gradient_bytes") if row.get("gradient_bytes") else None,
        rounds_per_step=rounds,
        round_bytes_per_step=round_bytes,
        config=config,
        seconds_per_epoch=per_epoch,
        seconds_total=in_all,
        accuracy=accuracy,
        status=status,
        imported=True,
    )


def _config(cells: _Cells, row: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in a row, as text. Empty cells state no settings."""
    settings = {}
    for column, text in row.items():
        setting = SETTINGS.get(_as_name(column))
        if setting is not None and text:
            try:
                settings[setting.key] = str(setting.parse(text))
            except ValueError as error:
                cells.complain(column, str(error))
    return settings


def _as_name(column: str) -> str:
    return column.replace("-", "_")


class _Cells:
    """The cells of one row. Mistakes are collected in `problems`."""

    def __init__(self, where: str, row: Mapping[str, str]) -> None:
        self.where = where
        self._row = row
        self.problems: list[str] = []

    def complain(self, column: str, what: str) -> None:
        """Record a mistake."""
        self.problems.append(f"{self.where}: {column}: {what}")

    def whole(self, column: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number of at least `least`. Without a default an empty cell is a mistake."""
        text = self._row.get(column, "")
        if not text and default is not None:
            return default
        value = self._parsed(column, text, float) if text else None
        # Spreadsheets may write 8 as 8.0. From 2^53 on, floats skip whole numbers.
        if value is None or value != value or value != int(value) or not least <= value < 2**53:
            if text or not self.problems:
                self.complain(column, f"{shown(text)} is no whole number of {least} or more")
            # The row is refused anyway; later checks of it must not divide by 0.
            return max(least, 1)
        return int(value)

    def real(self, column: str) -> float | None:
        """Return a number, or None for an empty cell or nan. Negative numbers are allowed; the report mentions them."""
        text = self._row.get(column, "")
        value = self._parsed(column, text, float) if text else None
        return None if value is None or math.isnan(value) else value

    def extent(self, column: str) -> float | None:
        """Return a number that is not negative, or None."""
        value = self.real(column)
        if value is not None and value < 0:
            self.complain(column, f"{value:g} is negative")
        return value

    def share(self, column: str) -> float | None:
        """Return a number from 0 to 1, or None."""
        value = self.real(column)
        if value is not None and not 0 <= value <= 1:
            instead = f"; for {value:g} % write {value / 100:g}" if 1 < value <= 100 else ""
            self.complain(column, f"{value:g} is no share from 0 to 1{instead}")
        return value

    def status(self) -> str:
        """Return how the run ended: a rate of one that failed is no measurement."""
        text = self._row.get("status", "")
        # Slurm adds to a state who cancelled the job, or a sign for a cut word.
        word = text.lower().split(" by ")[0].rstrip("+").replace(" ", "_")
        for status, words in _STATUSES.items():
            if word in words:
                return status
        self.complain("status", f"{shown(text)} is unknown; write finished, failed or stopped")
        return FAILED

    def _parsed(self, column: str, text: str, parse: Callable[[str], float]) -> float | None:
        try:
            value = parse(text)
        except ValueError:
            self.complain(column, f"{shown(text)} is no number; write it without a unit and thousands separators")
            return None
        if math.isinf(value):
            self.complain(column, f"{shown(text)} is not finite")
            return None
        return value


def _batches(cells: _Cells, workers: int) -> tuple[int, int]:
    """Return batch per worker and pass, and global batch, computing one from the other."""
    whole_batch, passes = cells.whole("global_batch", 0, least=1), cells.whole("accumulate", 1)
    batch = cells.whole("batch_per_rank", max(1, round(whole_batch / workers / passes)) if whole_batch else None)
    if not whole_batch:
        return batch, batch * workers * passes
    if whole_batch < workers:
        cells.complain("global_batch", f"{whole_batch} samples are fewer than the {workers} workers")
    # A global batch need not divide evenly; rounding per worker and pass leaves less than this.
    elif abs(whole_batch - batch * workers * passes) >= workers * passes:
        parts = f"{batch} per worker x {workers} workers" + (f" x {passes} passes" if passes > 1 else "")
        cells.complain(
            "global_batch", f"{whole_batch} is not {parts}; correct one, leave one empty, or give the passes of a step"
            " in a column accumulate",
        )  # fmt: skip
    return batch, whole_batch


def _check_counts(cells: _Cells, row: Mapping[str, str], counts: Mapping[str, int], per_node: int) -> None:
    """Check that ranks count all processes, workers and servers, and that each node has at least one."""
    ranks, workers, servers, nodes = (counts[name] for name in ("ranks", "workers", "servers", "nodes"))
    if servers and not row.get("workers"):
        cells.complain(
            "workers", f"is empty, and {ranks} ranks may count its servers ({servers}) or not; give the workers"
        )
    elif workers + servers > ranks:
        cells.complain("ranks", f"{ranks} cannot be {workers} workers and {servers} servers; it counts all processes")
    if nodes > ranks:
        cells.complain("nodes", f"{nodes} are more than the {ranks} ranks")
    elif per_node < math.ceil(ranks / nodes):
        cells.complain("ranks_per_node", f"{per_node} on each of {nodes} nodes are fewer than {ranks} ranks")


def _check_names(cells: _Cells, row: Mapping[str, str]) -> None:
    """Check that a row names what ran, and does not sum up other rows, which would count as one more run."""
    for name in ("strategy", "model"):
        if not row.get(name):
            cells.complain(name, "is empty")
    for name in ("strategy", "model", "repeat"):
        if row.get(name, "").lower() in _OF_SEVERAL:
            cells.complain(name, f"{shown(row[name])} is no run; delete rows that sum up others")


def _check_rate(cells: _Cells, step: float | None, rate: float | None, whole_batch: int) -> None:
    """Check that both values agree, if a row has both."""
    if step is None or rate is None or not positive(step) or not positive(rate):
        return
    if not 1 / _SAME_RATE <= rate * step / whole_batch <= _SAME_RATE:
        cells.complain(
            "step_seconds", f"{step:g} s for {whole_batch} samples are {whole_batch / step:.4g} a second, and"
            f" images_per_second is {rate:g}; correct one, or leave one empty",
        )  # fmt: skip


def _parts(cells: _Cells) -> dict[str, float]:
    seconds = {name: cells.real(f"{name}_seconds") for name in _PARTS}
    return {name: value for name, value in seconds.items() if value is not None}


def _completed(parts: dict[str, float], step: float | None) -> dict[str, float]:
    """Return the parts with `other` so that they sum to the step; none if they exceed it."""
    total = sum(parts.values())
    if not parts or step is None or total > _SUM_TOLERANCE * step:
        return {}
    return {**parts, "other": max(0.0, step - total)}


def _remarks(path: Path, header: list[str], rows: list[tuple[int, dict[str, str]]], runs: Sequence[Run]) -> list[str]:
    remarks = []
    columns = [f"{name}_seconds" for name in _PARTS]
    longer = [
        run.name for run, (_, row) in zip(runs, rows, strict=True)
        if run.usable and not run.parts and any(row.get(name) for name in columns)
    ]  # fmt: skip
    if longer:
        remarks.append(
            f"parts of a step are longer than the step, and are not used: {listed(longer)}; all are in seconds"
        )
    tiny = [
        run.name for run in runs if run.usable and 0 < run.parts.get("compute", 0.0) < _TINY * sum(run.parts.values())
    ]
    if tiny:
        remarks.append(
            f"computing is less than {100 * _TINY:.0f} % of a step, and the report calls the rest other:"
            f" {listed(tiny)}; all columns are in seconds"
        )
    unknown = [name for name in header if name and name not in _KNOWN and _as_name(name) not in SETTINGS]
    if unknown:
        close = next(((name, near[0]) for name in unknown if (near := get_close_matches(name, _KNOWN, n=1))), None)
        hint = f"; did you mean {close[1]!r} by {close[0]!r}?" if close else ""
        remarks.append(f"{path.name}: unknown columns are not used: {listed(unknown)}{hint}")
    if "repeat" in header:
        identity = (*_IDENTITY, *(name for name in header if _as_name(name) in SETTINGS))
        measured = [row for run, (_, row) in zip(runs, rows, strict=True) if is_measured(run.status)]
        keys = Counter(tuple(row.get(name, "") for name in identity) for row in measured)
        doubled = sum(count - 1 for count in keys.values())
        if doubled:
            remarks.append(f"{path.name}: {doubled} rows repeat the setting and number of an earlier row; all are used")
    serverless = sorted({run.strategy for run in runs if WITH_SERVERS.fullmatch(run.strategy) and not run.servers})
    if serverless and not {"servers", "workers"} & set(header):
        remarks.append(
            f"{path.name}: {listed(serverless)} has servers, and no column says how many of the ranks: all count as"
            " workers, which makes efficiencies wrong if some serve; add columns workers and servers"
        )
    copies = _copies(row for _, row in rows)
    if copies:
        remarks.append(
            f"{path.name}: {counted(copies, 'row')} with exactly the numbers of an earlier row; all are used. Delete "
            "copies of one measurement, which make intervals too narrow"
        )
    timed = [run for run, (_, row) in zip(runs, rows, strict=True) if run.usable and not row.get("images_per_second")]
    doubts = (
        *_similar_names(rows), *_long_steps(timed), *_doubtful_units(header, runs), *_growing_batches(header, runs),
        *_doubtful_epochs(runs), *_doubtful_totals(runs),
    )  # fmt: skip
    return [*remarks, *(f"{path.name}: {line}" for line in doubts)]


def _similar_names(rows: Iterable[tuple[int, Mapping[str, str]]]) -> Iterator[str]:
    """Yield names that differ in capitals, blanks and dashes alone: rows of different names are never averaged."""
    spellings: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for _, row in rows:
        for column in _NAMES:
            if name := row.get(column):
                spellings[column, re.sub(r"[\s_-]", "", name.casefold())][name] = None
    for (column, _), names in spellings.items():
        if len(names) > 1:
            yield f"{column} is written in several ways, each taken for another one: {listed(list(names), 5)}"


def _copies(rows: Iterable[Mapping[str, str]]) -> int:
    """Return how many rows equal an earlier one in all but `repeat`, with too many digits for chance."""
    counts: Counter[tuple[str, ...]] = Counter()
    for row in rows:
        measured = row.get("images_per_second") or row.get("step_seconds") or ""
        # Only significant digits count: not the exponent, the sign, or zeros in front.
        if len(re.sub(r"e.*|\D", "", measured).lstrip("0")) >= _EXACT_DIGITS:
            counts[tuple(value for name, value in row.items() if name != "repeat")] += 1
    return sum(count - 1 for count in counts.values())


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

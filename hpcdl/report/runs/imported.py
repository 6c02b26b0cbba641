"""Runs that were measured elsewhere, from a CSV file."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

from hpcdl.config.load import all_settings
from hpcdl.config.schema import TrainConfig
from hpcdl.core.errors import ConfigError, SourceError, UsageError, shown
from hpcdl.core.progress import Progress
from hpcdl.core.records.run_record import FAILED, FINISHED, STOPPED, is_measured
from hpcdl.core.storage.files import read_bytes
from hpcdl.core.units import listed
from hpcdl.report.runs.doubts import divided_settings, doubts
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
_OTHER_NAMES = {
    name: re.compile(pattern)
    for name, pattern in {
        "strategy": "algorithm|method|mode|allreduce|all_reduce|backend|framework|parallelism",
        "model": "network|net|arch|architecture|dnn|benchmark",
        "nodes": "(num_|n_|#_?)?(nodes?|hosts?|machines?|servers?)|nnodes|node_count",
        "ranks": "(num_|n_|#_?|total_)?(gpus?|procs?|process(es)?|tasks?|devices?|accelerators?|workers?|cores?)"
        "|world_size|mpi_ranks|np|nprocs?|ngpus|ntasks|size",
        "batch_per_rank": "(local_|mini_?|per_gpu_)?batch(_?size)?(_per_(gpu|worker|process|device))?|bs",
        "global_batch": "(global|total|effective)_batch(_?size)?",
        "images_per_second": "(images?|imgs?|samples?|examples?|sequences?|seqs?)(/|_per_)(s|secs?|seconds?)"
        "|(total_)?throughput.*|ips|fps",
        "step_seconds": "(avg_|mean_)?(step|iteration|iter|batch)_?(time|duration)?_?[(\\[]?(s|sec|seconds|ms)?[)\\]]?"
        "|step_seconds.+|(ms|s|secs?|seconds)(/|_per_)(step|iter|iteration|batch)|time(_.*)?",
    }.items()
}
"""Names of columns in other people's tables, with _ for blanks."""
_COUNTS = {
    "ranks": "the number of all together",
    "batch_per_rank": "that of one worker",
    "images_per_second": "the rate of all workers",
}
_RATIO = re.compile("speed.?up|efficiency|scaling")
_STATED = {
    "efficiency": re.compile(r"((weak|strong|parallel)_)?(scaling_)?(efficiency|eff)(_?\(?(%|percent|pct)\)?)?"),
    "speedup": re.compile(r"speed_?up(_?\(?x\)?)?"),
}
"""Names of columns, with _ for blanks, whose ratios the report also computes."""
_MOST_AS_FRACTION = 5.0
"""Largest efficiency above which a column holds percentages."""
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
_EXTENTS = ("seconds_per_epoch", "seconds_total", "rounds_per_step", "round_bytes_per_step")
_SAME_RATE = 1.2
"""Factor by which throughput and seconds of a step may differ, as a mean and a median of steps do."""
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
    runs = _with_stated(header, [row for _, row in rows], runs)
    unknown, of_rows = _unknown(header), [row for _, row in rows]
    lines = (
        *_unknown_columns(unknown),
        *divided_settings(unknown, of_rows, runs),
        *_repeated(header, rows, runs),
        *doubts(header, of_rows, runs),
    )
    return Gathered(runs=tuple(runs), remarks=tuple(f"{path.name}: {line}" for line in lines))


def _with_stated(header: Sequence[str], rows: Sequence[Mapping[str, str]], runs: Sequence[Run]) -> list[Run]:
    """Return the runs with the efficiencies and speed-ups that their table states, as fractions and factors."""
    for name, pattern in _STATED.items():
        column = next((one for one in header if pattern.fullmatch(re.sub(r"[\s_-]+", "_", one))), None)
        if column is None:
            continue
        values = [_ratio_in(row.get(column, "")) for row in rows]
        percent = "%" in column or any("%" in row.get(column, "") for row in rows)
        percent = percent or max(filter(None, values), default=0.0) > _MOST_AS_FRACTION
        scale = 0.01 if name == "efficiency" and percent else 1.0
        runs = [
            replace(run, stated={**run.stated, name: scale * value}) if value else run
            for run, value in zip(runs, values, strict=True)
        ]
    return list(runs)


def _ratio_in(text: str) -> float | None:
    """Return the positive number in a cell, without its %; None if it has none: nothing else is taken from it."""
    try:
        value = float(text.rstrip("%x ") or "nan")
    except ValueError:
        return None
    return value if positive(value) else None


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
    problems += [f"{path}: no column {name!r}{_meant((name,), header)}" for name in REQUIRED if name not in header]
    problems += [
        f"{path}: neither column {' nor '.join(map(repr, group))}{_meant(group, header) or '; one of them is needed'}"
        for group in ONE_OF
        if not set(group) & set(header)
    ]
    if problems:
        raise ConfigError(problems)


def _meant(missing: Sequence[str], header: Sequence[str]) -> str:
    """Return which columns may be the `missing` one under another name, and what they lack; else empty text."""
    unknown = [column for column in header if column and column not in _KNOWN]
    for name in missing:
        for column in unknown:
            if _OTHER_NAMES[name].fullmatch(re.sub(r"[\s_-]+", "_", column)):
                milliseconds = name == "step_seconds" and "ms" in re.split(r"[^a-z]+", column)
                how = f"divide {column!r} by 1,000, and call it" if milliseconds else f"call {column!r}"
                return f"; {how} {name}, if it is {_COUNTS.get(name, 'that')}"
    if "step_seconds" in missing and (ratios := [column for column in header if _RATIO.match(column)]):
        return f"; {ratios[0]!r} has no time in it: give the throughput or the step of each size"
    if "step_seconds" in missing and "seconds_per_epoch" in header:
        return "; seconds_per_epoch alone has no throughput: divide the samples of an epoch by it"
    near = get_close_matches(missing[0], unknown, n=1)
    return f"; did you mean {near[0]!r}?" if near else "; add it" if len(missing) == 1 else ""


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


def _unknown(header: Sequence[str]) -> list[str]:
    return [name for name in header if name and name not in _KNOWN and _as_name(name) not in SETTINGS]


def _unknown_columns(unknown: Sequence[str]) -> Iterator[str]:
    """Yield the columns that are not used, and a known one that may be meant."""
    if unknown:
        close = next(((name, near[0]) for name in unknown if (near := get_close_matches(name, _KNOWN, n=1))), None)
        hint = f"; did you mean {close[1]!r} by {close[0]!r}?" if close else ""
        yield f"unknown columns are not used: {listed(unknown)}{hint}"


def _repeated(
    header: Sequence[str], rows: Sequence[tuple[int, Mapping[str, str]]], runs: Sequence[Run]
) -> Iterator[str]:
    """Yield how many rows have the setting and the number of an earlier one."""
    if "repeat" not in header:
        return
    identity = (*_IDENTITY, *(name for name in header if _as_name(name) in SETTINGS))
    measured = [row for run, (_, row) in zip(runs, rows, strict=True) if is_measured(run.status)]
    keys = Counter(tuple(row.get(name, "") for name in identity) for row in measured)
    doubled = sum(count - 1 for count in keys.values())
    if doubled:
        yield f"{doubled} rows repeat the setting and number of an earlier row; all are used"

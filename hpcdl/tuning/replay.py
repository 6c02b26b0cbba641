"""A search over recorded trials: a CSV table of them takes the node's place, and nothing runs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.core.errors import UsageError
from hpcdl.core.storage.files import read_bytes
from hpcdl.tuning.search import Choice, Search

VALUE = "images_per_second"
REPEAT = "repeat"
"""A column that numbers the samples of a candidate, as in tables for `report --import`. It is no setting."""
REPEATS = 3
"""Samples per candidate of the exhaustive search with which a replay is compared."""
LARGE = 200
PERCENT_LARGE, PERCENT_SMALL = 15, 50
NUM_ROUNDS = 24


@dataclass(frozen=True, kw_only=True)
class TrialTable:
    """Recorded trials: each candidate's values as written in the file, and its samples in order (None: failed)."""

    columns: tuple[str, ...]
    candidates: tuple[Mapping[str, str], ...]
    samples: tuple[tuple[float | None, ...], ...]

    def means(self) -> list[float]:
        """Return the mean images/s of each candidate, or minus infinity if no sample succeeded."""
        sound = [[value for value in values if value is not None] for values in self.samples]
        return [sum(values) / len(values) if values else -math.inf for values in sound]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The search on a table. `regret` is how far the winner's mean is below the best mean, relative."""

    winner: Mapping[str, str]
    trials_used: int
    samples_used: int
    samples_exhaustive: int
    regret: float
    choice: Choice


def read_table(path: Path) -> TrialTable:
    """Return the table in a CSV file. Raises UsageError with the line of a mistake."""
    try:
        rows = list(csv.reader(io.StringIO(read_bytes(path).decode("utf-8-sig"), newline="")))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; hand --replay a CSV file of trials") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is no CSV file ({error}); hand --replay a CSV file of trials") from None
    rows = [[cell.strip() for cell in row] for row in rows]
    if not rows or VALUE not in rows[0] or len(set(rows[0])) < len(rows[0]):
        raise UsageError(f"{path} needs a header of different names with {VALUE} and a column per setting")
    header, at = rows[0], rows[0].index(VALUE)
    columns = tuple(name for name in header if name not in (VALUE, REPEAT))
    samples: dict[tuple[str, ...], list[float | None]] = {}
    for number, row in enumerate(rows[1:], start=2):
        if not any(row):
            continue
        if len(row) != len(header):
            raise UsageError(f"{path}, line {number}: {len(row)} cells, but the header has {len(header)}")
        key = tuple(cell for name, cell in zip(header, row, strict=True) if name in columns)
        samples.setdefault(key, []).append(_sample(row[at], path, number))
    if not any(value is not None for values in samples.values() for value in values):
        raise UsageError(f"{path} holds no successful trial; fill in {VALUE}")
    return TrialTable(
        columns=columns,
        candidates=tuple(dict(zip(columns, key, strict=True)) for key in samples),
        samples=tuple(tuple(values) for values in samples.values()),
    )


def _sample(text: str, path: Path, number: int) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{path}, line {number}: {VALUE} is {text!r}; write a number above 0, or nothing")
    return value


def allowance(num_candidates: int) -> int:
    """Return the number of samples that a replay may use: a fixed share of those of the exhaustive search."""
    percent = PERCENT_LARGE if num_candidates >= LARGE else PERCENT_SMALL
    return max(percent * REPEATS * num_candidates // 100, 1)


def replay(table: TrialTable, *, seed: int = 0, max_samples: int | None = None) -> Replay:
    """Search `table`. Samples of a candidate are drawn in the order of its rows, then from the first again.

    The search knows only what it would know on a node: neither a candidate's number of rows nor that all were drawn.
    """
    num = len(table.candidates)
    budget = max_samples or allowance(num)
    candidates: list[Mapping[str, Any]] = list(table.candidates)
    search = Search(candidates, seed=seed, max_samples=budget)
    drawn = [0] * num
    batch = max(budget // NUM_ROUNDS, 1)
    while asked := search.ask(batch):
        for index in asked:
            values = table.samples[index]
            search.tell(index, values[drawn[index] % len(values)])
            drawn[index] += 1
    choice = search.best()
    if choice is None:
        raise UsageError(f"every one of the {search.num_samples} samples drawn failed; the table is mostly failures")
    means = table.means()
    return Replay(
        winner=table.candidates[choice.index],
        trials_used=search.num_trials,
        samples_used=search.num_samples,
        samples_exhaustive=REPEATS * num,
        regret=1.0 - means[choice.index] / max(means),
        choice=choice,
    )

"""Tables of trials with a known shape for the search: seeded, 24 to 2,000 candidates, 2 to 10 % noise."""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A grid, the true images/s at a point (None: fails), the noise, and the number of rows per candidate."""

    grid: Mapping[str, tuple[Any, ...]]
    speed: Callable[[Row], float | None]
    noise: float
    repeats: int = 8

    @property
    def candidates(self) -> list[dict[str, Any]]:
        """Return every point of the grid."""
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]


def bump(value: float, best: float, width: float) -> float:
    """Return 1 at `best`, falling on both sides on a logarithmic scale."""
    return math.exp(-((math.log(value / best) / width) ** 2))


def threads_only(row: Row) -> float:
    return (
        100 * (0.3 + 0.7 * bump(row["intra_op_threads"], 14, 1.2)) * (1 + 0.1 * bump(row["inter_op_threads"], 2, 0.8))
    )


def ridge(row: Row) -> float:
    """Only the product of ranks and threads matters, and slightly the number of ranks."""
    product = row["ranks_per_node"] * row["intra_op_threads"]
    return 400 * (0.2 + 0.8 * bump(product, 32, 0.9)) * (1 - 0.05 * abs(math.log2(row["ranks_per_node"] / 4)))


def plateau(row: Row) -> float:
    """From 16 threads on all counts are equal, but NUMA binding helps a little."""
    return (
        250
        * min(row["intra_op_threads"] / 16, 1.0) ** 0.8
        * {"none": 0.85, "compact": 0.97, "numa": 1.0}[row["binding"]]
    )


def failing(row: Row) -> float | None:
    """Too many ranks exhaust the memory; so does membind with more than two."""
    ranks, threads = row["ranks_per_node"], row["intra_op_threads"]
    if ranks >= 8 or (row["memory_policy"] == "membind" and ranks > 2):
        return None
    return (
        150
        * bump(ranks * threads, 48, 1.3)
        * {"default": 0.9, "membind": 1.05, "interleave": 0.95}[row["memory_policy"]]
    )


def knl_cache(row: Row) -> float:
    """64 of 68 cores are best, more hardware threads per core lose, spinning hurts: papers.md, section 6."""
    cores = row["intra_op_threads"] / row["threads_per_core"]
    speed = min(cores, 68) ** 0.75 * (0.88 if cores > 64 else 1.0)
    speed *= {1: 1.0, 2: 0.97, 4: 0.82}[row["threads_per_core"]]
    speed *= 0.45 if cores > 68 else 1.0
    speed *= {"compact": 1.0, "scatter": 0.93, "none": 0.62}[row["binding"]]
    speed *= {0: 0.98, 1: 1.0, 30: 0.99, 200: 0.86}[row["kmp_blocktime"]]
    return 4 * speed * {1: 0.94, 2: 1.0, 4: 0.91}[row["inter_op_threads"]]


def knl_flat(row: Row) -> float | None:
    """MCDRAM helps much, but binding to it fails beyond 4 ranks; 4 x 16 threads beat 1 x 64."""
    ranks, threads, policy = row["ranks_per_node"], row["intra_op_threads"], row["memory_policy"]
    if policy == "membind-fast" and ranks > 4:
        return None
    total = ranks * threads
    speed = min(total, 68) ** 0.7 * (0.5 if total > 136 else 0.9 if total > 68 else 1.0)
    speed *= {1: 0.86, 2: 0.94, 4: 1.0, 8: 0.96}[ranks]
    speed *= {"default": 0.66, "membind-fast": 1.0, "preferred-fast": 0.985, "interleave": 0.8}[policy]
    return 5 * speed * (1.0 if row["onednn"] == "true" else 0.55)


def interactions(row: Row) -> float:
    """The best allocator depends on the engine, the best binding on the ranks."""
    engine = {("true", "default"): 0.9, ("true", "glibc-huge"): 1.08, ("true", "jemalloc"): 1.0,
              ("false", "default"): 0.8, ("false", "glibc-huge"): 0.7, ("false", "jemalloc"): 0.82}  # fmt: skip
    place = {(1, "compact"): 0.8, (1, "scatter"): 1.0, (2, "compact"): 1.04, (2, "scatter"): 0.9,
             (4, "compact"): 0.95, (4, "scatter"): 0.75}  # fmt: skip
    factor = engine[row["onednn"], row["allocator"]] * place[row["ranks_per_node"], row["binding"]]
    return 80 * factor * (0.4 + 0.6 * bump(row["intra_op_threads"], 12, 1.1))


def two_hills(row: Row) -> float:
    """A broad hill at few threads and a higher, narrower one at many."""
    threads, ranks = row["intra_op_threads"], row["ranks_per_node"]
    low = 0.85 * bump(threads, 6, 1.0) * bump(ranks, 8, 1.2)
    high = bump(threads, 56, 0.5) * bump(ranks, 1, 1.5)
    return 300 * (0.15 + max(low, high)) * {"compact": 1.0, "scatter": 0.96, "balanced": 0.99}[row["binding"]]


def unknown_columns(row: Row) -> float:
    """Settings unknown to the search, one of them without effect."""
    compiler = {"gcc": 0.92, "icx": 1.0, "aocc": 0.97}[row["compiler"]]
    return 60 * compiler * bump(row["prefetch"], 4, 1.6) * bump(row["tile_kib"], 256, 1.8)


def cliff(row: Row) -> float:
    """Oversubscription drops sharply right beside the best point."""
    total = row["ranks_per_node"] * row["intra_op_threads"] * (1 + 0.1 * (row["inter_op_threads"] - 1))
    speed = total**0.85 if total <= 112 else 0.35 * 112**0.85
    speed *= {"default": 1.0, "membind": 1.06, "interleave": 0.9}[row["memory_policy"]]
    return 3 * speed * {1: 0.9, 2: 0.97, 4: 1.0, 8: 0.99, 16: 0.92}[row["ranks_per_node"]]


def everything(row: Row) -> float:
    """All nine columns, with a ridge, interactions and a plateau."""
    total = row["ranks_per_node"] * row["intra_op_threads"] / row["threads_per_core"]
    speed = (0.2 + 0.8 * bump(total, 60, 1.1)) * {1: 0.95, 2: 1.0, 4: 1.02, 8: 0.96, 16: 0.85}[row["ranks_per_node"]]
    speed *= {"compact": 0.97, "balanced": 1.0, "none": 0.75}[row["binding"]]
    speed *= {"default": 0.8, "preferred-fast": 1.0}[row["memory_policy"]]
    speed *= 1.0 if row["onednn"] == "true" else 0.6
    speed *= {"default": 0.94, "glibc-huge": 1.0}[row["allocator"]] if row["ranks_per_node"] > 1 else 1.0
    return 120 * speed * {1: 1.0, 2: 0.98}[row["threads_per_core"]]


def bumpy(row: Row) -> float:
    """A smooth function, but every candidate has a random offset of 1 %."""
    quirk = random.Random(repr(sorted(row.items()))).gauss(0, 0.01)
    return (
        threads_only(row)
        * (1 + quirk)
        * {"compact": 1.0, "scatter": 0.94, "balanced": 0.98, "numa": 0.99}[row["binding"]]
    )


MANY_THREADS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 60, 64, 68, 72, 80, 96, 112, 128)
CLIFF_THREADS = (1, 2, 3, 4, 6, 7, 8, 12, 14, 16, 24, 28, 32, 56, 64, 96, 104, 108, 112, 224)
ALL_THREADS = (
    2, 4, 8, 12, 15, 16, 20, 24, 30, 32, 40, 48, 56, 60, 64, 66, 68, 72, 80, 96, 104, 112, 120, 128, 136,
)  # fmt: skip

SHAPES: dict[str, Shape] = {
    "threads-24": Shape(
        grid={"intra_op_threads": (1, 2, 4, 8, 12, 16, 24, 32), "inter_op_threads": (1, 2, 4)},
        speed=threads_only, noise=0.02,
    ),
    "ridge-48": Shape(
        grid={"ranks_per_node": (1, 2, 4, 8, 16, 32), "intra_op_threads": (1, 2, 4, 8, 12, 16, 24, 32)},
        speed=ridge, noise=0.05,
    ),
    "plateau-60": Shape(
        grid={"intra_op_threads": (2, 4, 8, 16, 24, 32, 40, 48, 56, 64), "binding": ("none", "compact", "numa"),
              "inter_op_threads": (1, 2)},
        speed=plateau, noise=0.05,
    ),
    "failing-90": Shape(
        grid={"ranks_per_node": (1, 2, 4, 8, 16), "intra_op_threads": (2, 4, 8, 16, 32, 64),
              "memory_policy": ("default", "membind", "interleave")},
        speed=failing, noise=0.04,
    ),
    "bumpy-128": Shape(
        grid={"intra_op_threads": (1, 2, 4, 8, 12, 16, 24, 32), "inter_op_threads": (1, 2, 4, 8),
              "binding": ("compact", "scatter", "balanced", "numa")},
        speed=bumpy, noise=0.06,
    ),
    "interactions-216": Shape(
        grid={"ranks_per_node": (1, 2, 4), "intra_op_threads": (2, 4, 8, 12, 16, 32), "binding": ("compact", "scatter"),
              "onednn": ("true", "false"), "allocator": ("default", "glibc-huge", "jemalloc")},
        speed=interactions, noise=0.04,
    ),
    "unknown-240": Shape(
        grid={"prefetch": (1, 2, 4, 8, 16), "tile_kib": (32, 64, 128, 256, 512, 1024, 2048, 4096),
              "compiler": ("gcc", "icx", "aocc"), "flag": (0, 1)},
        speed=unknown_columns, noise=0.05,
    ),
    "knl-cache-360": Shape(
        grid={"intra_op_threads": (16, 32, 48, 60, 64, 66, 68, 128, 136, 256), "threads_per_core": (1, 2, 4),
              "inter_op_threads": (1, 2, 4), "binding": ("compact", "scatter", "none"),
              "kmp_blocktime": (0, 1, 30, 200)},
        speed=knl_cache, noise=0.03,
    ),
    "knl-flat-256": Shape(
        grid={"ranks_per_node": (1, 2, 4, 8), "intra_op_threads": (4, 8, 12, 16, 32, 64, 68, 136),
              "memory_policy": ("default", "membind-fast", "preferred-fast", "interleave"),
              "onednn": ("true", "false")},
        speed=knl_flat, noise=0.05,
    ),
    "two-hills-300": Shape(
        grid={"ranks_per_node": (1, 2, 4, 8, 16), "intra_op_threads": MANY_THREADS,
              "binding": ("compact", "scatter", "balanced")},
        speed=two_hills, noise=0.06,
    ),
    "noisy-ridge-480": Shape(
        grid={"ranks_per_node": (1, 2, 4, 8, 16, 32), "intra_op_threads": (1, 2, 4, 8, 12, 16, 24, 32),
              "inter_op_threads": (1, 2), "binding": ("compact", "scatter", "balanced", "numa", "none")},
        speed=ridge, noise=0.10, repeats=20,
    ),
    "cliff-900": Shape(
        grid={"ranks_per_node": (1, 2, 4, 8, 16), "intra_op_threads": CLIFF_THREADS,
              "inter_op_threads": (1, 2, 4), "memory_policy": ("default", "membind", "interleave")},
        speed=cliff, noise=0.04,
    ),
    "everything-1920": Shape(
        grid={"ranks_per_node": (1, 2, 4, 8), "intra_op_threads": (2, 4, 8, 12, 15, 16, 30, 32, 60, 64),
              "threads_per_core": (1, 2), "binding": ("compact", "balanced", "none"),
              "memory_policy": ("default", "preferred-fast"), "onednn": ("true", "false"),
              "allocator": ("default", "glibc-huge")},
        speed=everything, noise=0.05,
    ),
    "everything-2000": Shape(
        grid={"ranks_per_node": (1, 2, 4, 8, 16), "intra_op_threads": ALL_THREADS,
              "threads_per_core": (1, 2), "binding": ("balanced",), "memory_policy": ("default", "preferred-fast"),
              "onednn": ("true", "false"), "allocator": ("default", "glibc-huge"), "kmp_blocktime": (0,)},
        speed=everything, noise=0.08, repeats=12,
    ),
}  # fmt: skip


def rows_of(shape: Shape, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table: every candidate's samples, shuffled together."""
    dice = random.Random(seed)
    rows = []
    for candidate in shape.candidates:
        speed = shape.speed(candidate)
        for _ in range(shape.repeats):
            value = "" if speed is None else f"{speed * math.exp(dice.gauss(0, shape.noise)):.6g}"
            rows.append({**candidate, "images_per_second": value})
    dice.shuffle(rows)
    yield from rows


def write_table(name: str, seed: int, path: Path) -> None:
    """Write one table as CSV."""
    rows = list(rows_of(SHAPES[name], seed))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)

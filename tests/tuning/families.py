"""Families of tables that the search was not designed with: each seed draws columns, levels, optimum and noise."""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .tables import Row, bump

THREADS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 66, 68, 80, 96, 112, 128)
BINDINGS = ("compact", "scatter", "balanced", "numa", "none")
KNOWN: Mapping[str, tuple[Any, ...]] = {
    "ranks_per_node": (1, 2, 4, 8, 16), "intra_op_threads": THREADS, "inter_op_threads": (1, 2, 4, 8),
    "threads_per_core": (1, 2, 4), "binding": BINDINGS, "onednn": ("0", "1"),
    "memory_policy": ("default", "membind", "preferred", "interleave"),
    "allocator": ("glibc", "jemalloc", "tcmalloc"), "kmp_blocktime": (0, 1, 30, 200),
}  # fmt: skip
UNORDERED = ("binding", "memory_policy", "onednn", "allocator")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One table: candidates, true images/s (None: fails), noise, most rows per candidate, and special rows."""

    candidates: Sequence[Row]
    speed: Callable[[Row], float | None]
    noise: float
    rows: int = 8
    unequal: bool = False
    hiccups: float = 0.0


def cross(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def some(dice: random.Random, values: Sequence[Any], num: int) -> list[Any]:
    """Draw `num` of `values`, in their order."""
    return [values[place] for place in sorted(dice.sample(range(len(values)), num))]


def weights(dice: random.Random, values: Sequence[Any], low: float, high: float = 1.0) -> dict[Any, float]:
    return {value: dice.uniform(low, high) for value in values}


def random_effects(dice: random.Random) -> Drawn:
    """Any subset of the known columns, effects of any shape, two interactions."""
    size = dice.choice((24, 30, 48, 72, 96, 150, 240, 400, 800))
    while True:
        names = dice.sample(list(KNOWN), dice.randint(2, 6))
        grid = {name: some(dice, KNOWN[name], min(len(KNOWN[name]), dice.randint(2, 8))) for name in names}
        if 0.8 * size <= math.prod(map(len, grid.values())) <= 1.25 * size:
            break
    effects: dict[str, dict[Any, float]] = {}
    for name, levels in grid.items():
        if name in UNORDERED:
            effects[name] = weights(dice, levels, -0.35, 0.0)
        else:
            best, width, depth = max(dice.choice(levels), 0.5), dice.uniform(0.8, 2.5), dice.uniform(0.1, 1.0)
            effects[name] = {level: depth * (bump(max(level, 0.5), best, width) - 1) for level in levels}
    pairs = [dice.sample(names, 2) for _ in range(2)]
    joint = [{pair: dice.gauss(0, 0.06) for pair in itertools.product(grid[a], grid[b])} for a, b in pairs]

    def speed(row: Row) -> float:
        total = sum(effects[name][row[name]] for name in names)
        return 100 * math.exp(total + sum(t[row[a], row[b]] for (a, b), t in zip(pairs, joint, strict=True)))

    return Drawn(candidates=cross(grid), speed=speed, noise=dice.uniform(0.02, 0.1))


def scalability(dice: random.Random) -> Drawn:
    """Contention, coherence, a bandwidth roof, hyper-threads, crossing a socket, more threads than cores."""
    cores = dice.choice((16, 24, 28, 36, 48, 64, 68, 96))
    counts = sorted({1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 68, cores, cores // 2, cores // 4, cores - 2, 2 * cores})
    grid = {
        "ranks_per_node": [1, 2, 4, 8][: dice.randint(2, 4)],
        "intra_op_threads": some(dice, counts, min(len(counts), dice.randint(6, 12))),
        "inter_op_threads": [1, 2, 4][: dice.randint(1, 3)], "threads_per_core": [1, 2][: dice.randint(1, 2)],
        "binding": ["compact", "scatter", "none"],
    }  # fmt: skip
    contention, coherence = dice.uniform(0.005, 0.05), dice.uniform(1e-5, 3e-4)
    roof, exchange, sockets = dice.uniform(0.5, 1.1), dice.uniform(0.0, 0.05), dice.choice((1, 2))

    def speed(row: Row) -> float:
        ranks, threads = row["ranks_per_node"], row["intra_op_threads"]
        own = threads / row["threads_per_core"] * (1.15 if row["threads_per_core"] == 2 else 1)
        value = own / (1 + contention * (own - 1) + coherence * own * (own - 1))
        value *= ranks * (1 - exchange * math.log2(ranks))
        cap = roof * cores / (1 + 0.3 * contention * cores)
        value = (value**-4 + cap**-4) ** -0.25
        if ranks * own > cores:
            value *= 0.9 * (cores / (ranks * own)) ** 0.7
        if sockets == 2 and ranks == 1 and threads > cores / 2:
            value *= 0.85 if row["binding"] == "compact" else 0.93
        value *= {"compact": 1.0, "scatter": 1.03 if threads < cores / 2 else 0.99, "none": 0.9}[row["binding"]]
        return 10 * value * {1: 1.0, 2: 1.03, 4: 0.97}[row["inter_op_threads"]]

    return Drawn(candidates=cross(grid), speed=speed, noise=dice.uniform(0.02, 0.08), rows=6)


def sawtooth(dice: random.Random) -> Drawn:
    """Multiples of eight are good and odd numbers bad, on a flat hill."""
    grid = {
        "intra_op_threads": sorted(dice.sample(range(1, 73), dice.randint(10, 24))),
        "inter_op_threads": [1, 2, 3, 4][: dice.randint(2, 4)], "binding": some(dice, BINDINGS, dice.randint(1, 3)),
    }  # fmt: skip
    top, binding, best = dice.uniform(20, 70), weights(dice, BINDINGS, 0.85), dice.choice((1, 2, 3, 4))

    def speed(row: Row) -> float:
        threads = row["intra_op_threads"]
        fit = next(worth for step, worth in ((8, 1.0), (4, 0.97), (2, 0.94), (1, 0.9)) if threads % step == 0)
        hill = 0.2 + 0.8 * bump(threads, top, 1.0)
        return 200 * fit * hill * binding[row["binding"]] * (1 - 0.04 * abs(row["inter_op_threads"] - best))

    return Drawn(candidates=cross(grid), speed=speed, noise=dice.uniform(0.02, 0.06), rows=10)


def hiccups(dice: random.Random) -> Drawn:
    """A ridge on which 7 % of the samples are far too slow and 1 % fail."""
    grid = {
        "ranks_per_node": [1, 2, 4, 8], "intra_op_threads": some(dice, THREADS[:18], dice.randint(5, 10)),
        "memory_policy": ["default", "membind", "interleave"][: dice.randint(1, 3)], "onednn": ["0", "1"],
    }  # fmt: skip
    cores, width = dice.choice((16, 24, 48, 56)), dice.uniform(0.7, 1.6)
    policy = weights(dice, grid["memory_policy"], 0.8)

    def speed(row: Row) -> float:
        ranks = row["ranks_per_node"]
        ridge = 0.1 + 0.9 * bump(ranks * row["intra_op_threads"], cores, width)
        engine = 1 if row["onednn"] == "1" else 0.7
        return 80 * ridge * policy[row["memory_policy"]] * engine * (1 - 0.03 * math.log2(ranks))

    return Drawn(candidates=cross(grid), speed=speed, noise=dice.uniform(0.02, 0.06), rows=10, hiccups=0.07)


def strangers(dice: random.Random) -> Drawn:
    """Unknown columns only: negative values, zero, decimals, many categories, numbers without a meaningful order."""
    kernels = [f"k{number}" for number in range(dice.randint(3, 7))]
    grid: dict[str, Sequence[Any]] = {
        "alpha": some(dice, (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0), dice.randint(3, 7)),
        "tile": (16, 32, 64, 128, 256, 512)[: dice.randint(3, 6)], "kernel": kernels, "switch": ("yes", "no"),
    }  # fmt: skip
    if math.prod(map(len, grid.values())) < 300:
        grid["slot"] = range(dice.randint(2, 4))
    worth, slot = weights(dice, kernels, 0.75), weights(dice, range(4), 0.93)
    switch = weights(dice, list(itertools.product(("yes", "no"), kernels)), 0.9)
    alpha, tile = dice.uniform(-2, 2), dice.choice((16, 64, 256, 512))

    def speed(row: Row) -> float:
        value = 50 * worth[row["kernel"]] * switch[row["switch"], row["kernel"]] * slot[row.get("slot", 0)]
        return value * (1 - 0.025 * (row["alpha"] - alpha) ** 2) * (0.5 + 0.5 * bump(row["tile"], tile, 1.5))

    return Drawn(candidates=cross(grid), speed=speed, noise=dice.uniform(0.02, 0.08))


def holes(dice: random.Random) -> Drawn:
    """A third of the grid is missing, candidates have 1 to 8 rows, a corner fails."""
    grid = {
        "ranks_per_node": [1, 2, 4, 6, 8, 12], "intra_op_threads": some(dice, THREADS, dice.randint(6, 12)),
        "inter_op_threads": [1, 2, 4], "binding": ["compact", "scatter", "none"][: dice.randint(1, 3)],
        "kmp_blocktime": [0, 1, 30, 200][: dice.randint(1, 3)],
    }  # fmt: skip
    cores, most, width = dice.choice((24, 40, 64)), dice.choice((8, 12, 99)), dice.uniform(0.6, 1.4)
    binding = {"compact": 1.0, "scatter": dice.uniform(0.9, 1.1), "none": 0.8}
    spinning = {0: 1.0, 1: 1.02, 30: dice.uniform(0.9, 1.05), 200: 0.9}
    best = dice.choice((1, 2, 4, 8))

    def speed(row: Row) -> float | None:
        ranks, total = row["ranks_per_node"], row["ranks_per_node"] * row["intra_op_threads"]
        if ranks >= most or total > 4 * cores:
            return None
        value = 60 * (0.15 + 0.85 * bump(total, cores, width)) * (1 - 0.04 * abs(math.log2(ranks / best)))
        return float(
            value * binding[row["binding"]] * spinning[row["kmp_blocktime"]]
            * {1: 0.97, 2: 1.0, 4: 0.98}[row["inter_op_threads"]]
        )  # fmt: skip

    there = [row for row in cross(grid) if dice.random() < 0.7]
    return Drawn(candidates=there, speed=speed, noise=dice.uniform(0.02, 0.05), unequal=True)


def rugged(dice: random.Random) -> Drawn:
    """Every candidate has a random offset of 2 to 3 %, which no model can predict."""
    grid = {
        "ranks_per_node": [1, 2, 4, 8], "intra_op_threads": some(dice, THREADS, dice.randint(5, 10)),
        "inter_op_threads": [1, 2], "binding": ["compact", "scatter", "none"][: dice.randint(1, 3)],
    }  # fmt: skip
    spread, cores, width = dice.uniform(0.015, 0.03), dice.choice((16, 32, 64)), dice.uniform(0.8, 1.5)
    quirks = {repr(sorted(row.items())): dice.gauss(0, spread) for row in cross(grid)}

    def speed(row: Row) -> float:
        ridge = 0.2 + 0.8 * bump(row["ranks_per_node"] * row["intra_op_threads"], cores, width)
        quirk = math.exp(quirks[repr(sorted(row.items()))])
        return 90 * ridge * quirk * {"compact": 1.0, "scatter": 0.97, "none": 0.85}[row["binding"]]

    return Drawn(candidates=cross(grid), speed=speed, noise=0.02, rows=5)


def three_rows(dice: random.Random) -> Drawn:
    """Old records of a centre: three rows per candidate."""
    drawn = dice.choice((scalability, random_effects, strangers))(dice)
    return Drawn(candidates=drawn.candidates, speed=drawn.speed, noise=dice.uniform(0.02, 0.05), rows=3)


def conditional(dice: random.Random) -> Drawn:
    """Spinning matters only with the engine on, the memory policy only with NUMA binding."""
    grid: dict[str, Sequence[Any]] = {
        "onednn": ["true", "false"], "kmp_blocktime": [0, 1, 30, 200], "binding": ["numa", "none"],
        "intra_op_threads": some(dice, THREADS, dice.randint(4, 8)),
        "memory_policy": ["default", "membind", "interleave"],
    }  # fmt: skip
    order = [0, 1, 30, 200]
    spin, threads, off = dice.randrange(3), dice.choice((8, 24, 56, 64)), dice.choice((0.6, 0.95, 1.03))
    policy = {"default": 1.0, "membind": dice.uniform(1.02, 1.25), "interleave": dice.uniform(0.8, 1.1)}

    def speed(row: Row) -> float:
        away = abs(order.index(row["kmp_blocktime"]) - spin)
        engine = 1 - 0.12 * away if row["onednn"] == "true" else off
        return 70 * bump(row["intra_op_threads"], threads, 0.9) * engine * (
            policy[row["memory_policy"]] if row["binding"] == "numa" else 0.92
        )  # fmt: skip

    return Drawn(candidates=cross(grid), speed=speed, noise=dice.uniform(0.02, 0.07))


def small_and_noisy(dice: random.Random) -> Drawn:
    """24 to 54 candidates, 8 to 10 % noise."""
    grid = {
        "intra_op_threads": some(dice, THREADS, 6),
        "binding": some(dice, BINDINGS, dice.randint(2, 3)), "inter_op_threads": [1, 2, 4][: dice.randint(2, 3)],
    }  # fmt: skip
    threads, width = dice.choice(THREADS[3:]), dice.uniform(0.8, 2)
    binding, waiting = weights(dice, BINDINGS, 0.8), weights(dice, (1, 2, 4), 0.92)

    def speed(row: Row) -> float:
        hill = 0.2 + 0.8 * bump(row["intra_op_threads"], threads, width)
        return 33 * hill * binding[row["binding"]] * waiting[row["inter_op_threads"]]

    return Drawn(candidates=cross(grid), speed=speed, noise=dice.uniform(0.08, 0.1), rows=10)


FAMILIES: dict[str, Callable[[random.Random], Drawn]] = {
    family.__name__.replace("_", "-"): family
    for family in (
        random_effects, scalability, sawtooth, hiccups, strangers, holes, rugged, three_rows, conditional,
        small_and_noisy,
    )
}  # fmt: skip


def write_family(name: str, seed: int, path: Path) -> None:
    """Write the table that `seed` draws from a family, with rows and columns shuffled."""
    dice = random.Random(f"{name}/{seed}")
    drawn = FAMILIES[name](dice)
    rows = []
    for candidate in drawn.candidates:
        speed = drawn.speed(candidate)
        for _ in range(dice.randint(1, drawn.rows) if drawn.unequal else drawn.rows):
            slow = dice.uniform(0.2, 0.6) if dice.random() < drawn.hiccups else 0.0
            lost = speed is None or dice.random() < drawn.hiccups / 7
            value = "" if lost or speed is None else f"{speed * math.exp(dice.gauss(0, drawn.noise) - slow):.5g}"
            rows.append({**candidate, "images_per_second": value})
    dice.shuffle(rows)
    columns = dice.sample(list(rows[0]), len(rows[0]))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns)
        writer.writeheader()
        writer.writerows(rows)

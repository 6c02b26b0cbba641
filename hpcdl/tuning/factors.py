"""Candidates as points: ordered settings by rank, categories by equality, and the products that make ridges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
CATEGORICAL = ("binding", "memory_policy", "onednn", "allocator", "xla", "onednn_isa", "onednn_fpmath")
"""Known settings whose values have no order."""
PRODUCTS = (
    (("ranks_per_node", 1), ("intra_op_threads", 1)),
    (("ranks_per_node", 1), ("intra_op_threads", 1), ("threads_per_core", -1)),
    (("intra_op_threads", 1), ("inter_op_threads", 1)),
)
"""What a node really feels: threads in all, cores in use, threads at a time. Exponents by setting."""
START_SHARE = 0.3
START_AT_LEAST = 6


@dataclass(frozen=True, kw_only=True)
class Factor:
    """One coordinate: `levels[i]` of candidate i, and the distances (0 to 1) between levels.

    `main` if it is a setting, else it is the product of `terms`.
    """

    name: str
    ordered: bool
    main: bool
    terms: tuple[str, ...]
    levels: Indices
    distances: Floats


def factors_of(candidates: Sequence[Mapping[str, Any]]) -> list[Factor]:
    """The coordinates in which `candidates` differ; settings that are the same everywhere are left out."""
    names = list(dict.fromkeys(name for candidate in candidates for name in candidate))
    found = [_factor(name, [candidate.get(name) for candidate in candidates]) for name in names]
    factors = [factor for factor in found if factor is not None]
    varying = {factor.name for factor in factors if factor.ordered}
    for terms in PRODUCTS:
        if all(name in varying for name, _ in terms):
            product = _product(terms, candidates)
            if product is not None:
                factors.append(product)
    return factors


def number_of(value: Any) -> float | None:
    """`value` as a number, None where it is none; truth values are categories."""
    if value is None or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _factor(name: str, values: Sequence[Any]) -> Factor | None:
    levels = sorted(set(values), key=str)
    if len(levels) < 2:
        return None
    numbers = {value: number_of(value) for value in levels}
    if name in CATEGORICAL or None in numbers.values() or len(set(numbers.values())) < 2:
        codes_of = {value: code for code, value in enumerate(levels)}
        codes = np.array([codes_of[value] for value in values])
        apart = 1.0 - np.eye(len(levels))
        return Factor(name=name, ordered=False, main=True, terms=(name,), levels=codes, distances=apart)
    return _ordered((name,), [numbers[value] or 0.0 for value in values], main=True)


def _ordered(terms: tuple[str, ...], numbers: Sequence[float], *, main: bool) -> Factor:
    """Half by rank, half by logarithm where all are positive: neither 1-2-4-256 nor 60-64-66-68 is squeezed."""
    levels, codes = np.unique(np.asarray(numbers, dtype=float), return_inverse=True)
    ranks = np.arange(len(levels)) / (len(levels) - 1)
    scaled = np.log(levels) if levels[0] > 0 else levels
    position = 0.5 * (ranks + (scaled - scaled[0]) / (scaled[-1] - scaled[0]))
    distances = np.abs(position[:, None] - position[None, :])
    return Factor(name="*".join(terms), ordered=True, main=main, terms=terms, levels=codes, distances=distances)


def _product(terms: Sequence[tuple[str, int]], candidates: Sequence[Mapping[str, Any]]) -> Factor | None:
    logarithms = np.zeros(len(candidates))
    for name, exponent in terms:
        for index, candidate in enumerate(candidates):
            number = number_of(candidate.get(name, 1))
            if number is None or number <= 0:
                return None
            logarithms[index] += exponent * math.log(number)
    values = np.exp(np.round(logarithms, 9))
    if len(np.unique(values)) < 2:
        return None
    return _ordered(tuple(name for name, _ in terms), list(values), main=False)


def initial_design(
    factors: Sequence[Factor], num_candidates: int, *, anchors: Sequence[int], budget: int, dice: np.random.Generator
) -> list[int]:
    """Anchors, then candidates that bring the least used level of every setting in turn; ties by lot."""
    levels = [factor.levels for factor in factors if factor.main]
    most = max((int(level.max()) + 1 for level in levels), default=1)
    wanted = max(START_AT_LEAST, min(int(START_SHARE * budget), 3 * most + 4 * len(levels)))
    counts = [np.zeros(int(level.max()) + 1) for level in levels]
    order = dice.permutation(num_candidates)
    chosen: list[int] = []
    load = np.zeros(num_candidates)
    for turn in range(min(wanted, num_candidates)):
        index = anchors[turn] if turn < len(anchors) else int(order[np.argmin(load[order])])
        chosen.append(index)
        for count, level in zip(counts, levels, strict=True):
            count[level[index]] += len(count)  # every setting weighs the same, however many levels it has
        load = sum((count[level] for count, level in zip(counts, levels, strict=True)), np.zeros(num_candidates))
        load[chosen] = np.inf
    return list(dict.fromkeys(chosen))


def beside(factors: Sequence[Factor], index: int, num_candidates: int) -> Indices:
    """The candidates one level from `index` in one setting, or along a ridge, with the same product of settings."""
    mains = [factor for factor in factors if factor.main]
    apart = {factor.name: np.abs(factor.levels - factor.levels[index]) for factor in mains}
    steps = {factor.name: apart[factor.name] if factor.ordered else apart[factor.name] > 0 for factor in mains}
    near = sum(steps.values(), np.zeros(num_candidates)) == 1
    for factor in factors:
        if not factor.main:
            others = [step for name, step in steps.items() if name not in factor.terms]
            same = sum(others, np.zeros(num_candidates)) == 0
            near |= same & (factor.levels == factor.levels[index])
    near[index] = False
    return np.flatnonzero(near)

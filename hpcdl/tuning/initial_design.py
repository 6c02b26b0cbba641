"""Where a search looks first: the initial design; and what lies beside a candidate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcdl.tuning.factors import Factor, Indices

START_SHARE = 0.3
START_AT_LEAST = 6


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

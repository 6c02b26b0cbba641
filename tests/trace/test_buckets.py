"""The times at which buckets have their gradients are right, on synthetic traces with known truth."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy
import pytest

from hpcdl.trace.steps import Merged, Steps, readiness
from tests.trace.made import NAMES, records, synchronous

RANKS, STEPS, COMPUTE_S = 3, 20, 0.2
BYTES = (4 << 20, 1 << 20, 2 << 20, 1 << 20)
READY = (0.5, 0.6, 0.8, 1.0)
"""Fractions of the computing time."""


def exchanged(seconds: float, more: float = 0.0) -> tuple[Merged, Steps]:
    """Buckets that leave when ready and after the previous one; `more` adds scale messages before each."""
    random = numpy.random.default_rng(2)
    compute_s = COMPUTE_S * (1 + 0.02 * random.standard_normal((RANKS, STEPS)))
    input_s = numpy.full((RANKS, STEPS), 0.01)
    merged, steps = synchronous(input_s, compute_s, ahead_s=0.0, exchange_s=1.0)
    kept = {}
    for row, rank in enumerate(merged.ranks):
        got_s = steps.borders[row, :, 1]
        own: list[Any] = []
        free_s = got_s
        for number, (size, ready) in enumerate(zip(BYTES, READY, strict=True)):
            begin_s = numpy.maximum(free_s, got_s + ready * compute_s[row])
            if more:
                own.append(records("bucket", begin_s, begin_s + more, steps.numbers, bucket=number, value=4))
            free_s = begin_s + more + seconds
            own.append(records("bucket", begin_s + more, free_s, steps.numbers, bucket=number, value=size))
        others = merged.records[rank][merged.records[rank]["name"] != NAMES.index("bucket")]
        together = numpy.concatenate([others, *own])
        kept[rank] = together[numpy.argsort(together["begin_s"], kind="stable")]
    return dataclasses.replace(merged, records=kept), steps


@pytest.mark.parametrize("more", [0.0, 0.0005])
def test_buckets_that_find_the_link_idle_tell_when_they_are_ready(more: float) -> None:
    shares, ready = zip(*readiness(*exchanged(0.005, more)), strict=True)
    assert shares == pytest.approx(numpy.cumsum(BYTES) / sum(BYTES))
    assert ready == pytest.approx(READY, abs=0.01)


def test_a_bucket_that_waited_for_the_link_is_no_later_than_it_began() -> None:
    """A bucket that waited for the link begins at 0.7; the bytes of its neighbours show that it was ready at 0.6."""
    found = readiness(*exchanged(0.2 * COMPUTE_S - 0.001))
    assert [ready for _, ready in found] == pytest.approx([0.5, 0.62, 0.9, 1.0], abs=0.12)
    assert found[1][1] < 0.7 - 0.01


def test_without_buckets_or_common_steps_nothing_is_reported() -> None:
    merged, steps = exchanged(0.005)
    assert readiness(merged, dataclasses.replace(steps, synchronous=False)) == []
    silent = {rank: rows[rows["name"] != NAMES.index("bucket")] for rank, rows in merged.records.items()}
    assert readiness(dataclasses.replace(merged, records=silent), steps) == []

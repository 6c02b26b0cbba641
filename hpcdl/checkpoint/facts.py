"""The facts in a checkpoint.json: what a run that goes on has to find there, and of which type."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcdl.core.records.from_json import from_json
from hpcdl.core.records.run_record import HistoryPoint

_MOST = 2**53


@dataclass(frozen=True, kw_only=True)
class TrainFacts:
    """Of `hpcdl train`; what has a default is missing in checkpoints of earlier versions."""

    ranks: int
    global_batch: int
    steps_per_epoch: int
    seconds: float
    history: Sequence[HistoryPoint]
    shift: int = 0
    buckets: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class AsynchronousFacts(TrainFacts):
    """Of `hpcdl train` with a strategy whose workers go on by the center's count of updates."""

    count: int
    evaluated_count: int = -1


@dataclass(frozen=True, kw_only=True)
class ScriptFacts:
    """Of a script's hpcdl.State."""

    ranks: int
    values: Mapping[str, Any]
    rates: Sequence[Sequence[float] | None] = ()
    moves: Sequence[Sequence[int] | None] = ()


Facts = TrainFacts | ScriptFacts
_AT_LEAST = {"ranks": 1, "global_batch": 1, "steps_per_epoch": 1, "evaluated_count": -1, "shift": -_MOST}
"""What numbers start at, where it is not 0."""
_STAND_IN = {
    "ranks": 1, "global_batch": 1, "steps_per_epoch": 1, "seconds": 0.0, "history": [], "count": 0, "values": {},
}  # fmt: skip


def check_facts(facts: Any, kind: type[Facts] | None = None) -> None:
    """TypeError or ValueError names what a run of this `kind` misses in `facts`, or what cannot be.

    Where nobody knows the kind, what is there has to be right.
    """
    if not isinstance(facts, dict):
        raise TypeError("its facts are no object")
    missing = [item.name for item in dataclasses.fields(kind or TrainFacts) if _is_needed(item, facts)]
    if kind is not None and missing:
        raise ValueError(f"its facts have no {', '.join(missing)}")
    found = from_json(kind, facts) if kind else from_json(_kind_of(facts), {**_STAND_IN, **facts})
    for name, value in vars(found).items():
        if isinstance(value, int | float) and not _AT_LEAST.get(name, 0) <= value <= _MOST:
            raise ValueError(f"{name} is {value!r}")


def kind_for(*, synchronous: bool) -> type[TrainFacts]:
    """What a run of `hpcdl train` needs, by its strategy."""
    return TrainFacts if synchronous else AsynchronousFacts


def _kind_of(facts: Mapping[str, Any]) -> type[Facts]:
    if "values" in facts:
        return ScriptFacts
    return AsynchronousFacts if {"count", "evaluated_count"} & facts.keys() else TrainFacts


def _is_needed(item: dataclasses.Field[Any], facts: Mapping[str, Any]) -> bool:
    has_default = item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING
    return not has_default and item.name not in facts

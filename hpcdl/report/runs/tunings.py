"""A node's search for its best settings as the report sees it: what `tune-threads` measured, found and says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcdl.core.units import IMAGES


@dataclass(frozen=True, kw_only=True)
class TunedTrial:
    """One candidate: settings as text, its rate over `n` samples, or the status and message of its failure."""

    settings: Mapping[str, str]
    status: str
    n: int
    images_per_second: float | None
    ci95: float | None
    memory_bytes_per_rank: int | None
    message: str
    origin: str


@dataclass(frozen=True, kw_only=True)
class SettingEffect:
    """What a setting's value is worth: speed over that of all candidates, the other settings held equal."""

    setting: str
    value: str
    ratio: float
    num_trials: int


@dataclass(frozen=True, kw_only=True)
class ThreadPoint:
    """The best candidate with `threads` threads on the node in all."""

    threads: int
    images_per_second: float
    ci95: float | None
    n: int
    settings: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class ThreadCurve:
    """The rate against threads at one batch size, None where it was not searched; by rising threads."""

    batch_size: int | None
    points: Sequence[ThreadPoint]


@dataclass(frozen=True, kw_only=True)
class TunedNode:
    """One search: where, for what, the winner with how sure it is, and everything that was tried, the fastest first.

    `counted` is what its rates count.
    """

    name: str
    model: str
    batch_size: int
    machine: str = ""
    processor: str = ""
    fingerprint: str = ""
    engine: str = ""
    created_at: str = ""
    software: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    images_per_second: float | None = None
    counted: str = IMAGES
    ci95: float | None = None
    n: int = 0
    verdict: str = ""
    attempts: Sequence[TunedTrial] = ()
    effects: Sequence[SettingEffect] = ()
    curves: Sequence[ThreadCurve] = ()
    picture: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """What report.json holds."""
        return dataclasses.asdict(self)


def words(settings: Mapping[str, str]) -> str:
    """Settings on one line."""
    return " ".join(f"{name}={value}" for name, value in settings.items())

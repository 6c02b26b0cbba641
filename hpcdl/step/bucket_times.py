"""The size of buckets with which a model's step is quickest: what is worth a try, and what was measured and kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcdl.config.schema import BUCKET_BYTES
from hpcdl.core.errors import CorruptError
from hpcdl.core.paths import user_cache_folder
from hpcdl.core.records.from_json import read_as
from hpcdl.core.storage.files import write_json

SCHEMA = "hpcdl.buckets/1"
TRIED = (BUCKET_BYTES, 1 << 20, 4 << 20, 64 << 20)
"""Bytes; and all gradients in one bucket. The first is what a run has by default."""
HARDLY = 0.01
"""A size that is quicker by no more than this part is not taken in place of one that comes before it."""


@dataclass(frozen=True, kw_only=True)
class BucketTimes:
    """Seconds of a step by the bytes of a bucket: its slowest rank's, of the quickest step. `facts`: of what, where."""

    schema: str = SCHEMA
    facts: Mapping[str, str]
    seconds: Mapping[str, float]

    @property
    def best(self) -> int:
        """Bytes of a bucket with which a step is quickest, or as good as."""
        limit = min(self.seconds.values()) * (1 + HARDLY)
        return int(next(size for size, seconds in self.seconds.items() if seconds <= limit))


def sizes_worth_a_try(total_bytes: int, buckets: Callable[[int], Sequence[Sequence[int]]]) -> tuple[int, ...]:
    """Bytes of a bucket that divide gradients of `total_bytes` each in another way; `buckets` says how they do."""
    ways: dict[tuple[tuple[int, ...], ...], int] = {}
    for size in (BUCKET_BYTES, max(total_bytes, 1), *TRIED):
        ways.setdefault(tuple(map(tuple, buckets(size))), size)
    return tuple(ways.values())


def times_file(facts: Mapping[str, str]) -> Path:
    """Where the times of these facts are kept."""
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=10).hexdigest()
    return user_cache_folder() / "buckets" / f"{digest}.json"


def load_times(facts: Mapping[str, str], sizes: Sequence[int]) -> BucketTimes | None:
    """What was kept of `sizes`; None where there is none, or it cannot be used: measuring again mends it."""
    try:
        found = read_as(BucketTimes, times_file(facts), SCHEMA)
    except (OSError, CorruptError):
        return None
    usable = found.facts == facts and list(found.seconds) == [str(size) for size in sizes]
    return found if usable and min(found.seconds.values()) > 0 else None


def save_times(times: BucketTimes) -> None:
    """Keep `times` for later runs."""
    path = times_file(times.facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(times))

"""Searches as a report shows them: from the profiles and trial logs that `tune-threads` leaves."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.node.profile import SCHEMA, Profile, TrialSummary, read_profile
from hpcdl.node.settings import Settings, chosen, settings_from, spelt
from hpcdl.report.runs.tunings import ThreadCurve, TunedNode, TunedTrial
from hpcdl.tuning.effects import main_effects, thread_curve
from hpcdl.tuning.findings import Found, as_profile, summaries, warnings_of
from hpcdl.tuning.log import SCHEMA as LOG_SCHEMA
from hpcdl.tuning.log import read_log
from hpcdl.tuning.search import Search
from hpcdl.tuning.trials import TrialOutcome

LOG_SUFFIX = ".trials.jsonl"
_MOST_BEFORE_SCHEMA = 256
"""Bytes of a TOML file that are looked at for the name of the schema."""


def find_tunings(path: Path) -> list[Path]:
    """The profiles and trial logs at or below `path`; a log beside its profile is the same search, and left out."""
    if path.is_file():
        return [path] if path.name.endswith(LOG_SUFFIX) or _is_profile(path) else []
    found = []
    for folder, below, files in os.walk(path):
        below.sort()
        paths = [Path(folder) / name for name in sorted(files)]
        profiles = [path for path in paths if _is_profile(path)]
        known = {profile.with_suffix(LOG_SUFFIX) for profile in profiles}
        found += profiles + [path for path in paths if path.name.endswith(LOG_SUFFIX) and path not in known]
    return found


def read_tuning(path: Path) -> TunedNode:
    """The search that a profile or a trial log is of. CorruptError where it is damaged."""
    profile = profile_of_log(path) if path.name.endswith(LOG_SUFFIX) else read_profile(path)
    return as_tuned(profile, path.name)


def as_tuned(profile: Profile, name: str) -> TunedNode:
    """A profile's search as the report wants it: trials, effects of the settings, curves over threads."""
    alike = {item.name: getattr(profile, item.name) for item in fields(TunedNode) if hasattr(profile, item.name)}
    return TunedNode(**{
        **alike,
        "name": name,
        "settings": spelt(chosen(profile.settings)),
        "attempts": tuple(TunedTrial(**vars(item) | {"settings": spelt(item.settings)}) for item in profile.trials),
        "effects": tuple(main_effects(profile.trials)),
        "curves": tuple(_curves(profile.trials)),
    })  # fmt: skip


def profile_of_log(path: Path) -> Profile:
    """What a search has found so far, from its log alone: for one that was killed, or is still under way."""
    recorded = read_log(path)
    if recorded.header.get("schema") != LOG_SCHEMA:
        raise UsageError(f"{path} has schema {recorded.header.get('schema')!r}, this hpcdl reads {LOG_SCHEMA!r}")
    measured: dict[str, tuple[Settings, list[TrialOutcome]]] = {}
    for entry in recorded.entries:
        settings = settings_from(entry.settings, origin=str(path))
        measured.setdefault(repr(settings), (settings, []))[1].append(entry.outcome)
    candidates = list(measured.values())
    search = Search([spelt(dataclasses.asdict(settings)) for settings, _ in candidates])
    for index, (_, outcomes) in enumerate(candidates):
        for outcome in outcomes:
            search.tell(index, outcome.images_per_second if outcome.status == "ok" else None)
    choice = search.best()
    found = Found(
        choice=choice,
        settings=None if choice is None else candidates[choice.index][0],
        trials=summaries(candidates),
        num_samples=search.num_samples,
        seconds=sum(outcome.seconds for _, outcomes in candidates for outcome in outcomes),
        settled=False,
        stopped=True,
        warnings=warnings_of(candidates),
    )
    return as_profile(found, _base(recorded.header, path))


def _base(header: Mapping[str, Any], path: Path) -> Profile:
    workload = header.get("workload")
    try:
        assert isinstance(workload, dict)
        return Profile(
            settings=Settings(), machine="", processor="", num_cores=0, fingerprint=str(header["fingerprint"]),
            engine=str(header["engine"]), model=str(workload["model"]), batch_size=int(workload["batch_size"]),
        )  # fmt: skip
    except (AssertionError, KeyError, TypeError, ValueError):
        raise CorruptError(f"{path} has a damaged header; tune anew") from None


def _is_profile(path: Path) -> bool:
    if path.suffix != ".toml" or not path.is_file():
        return False
    with path.open("rb") as file:
        return SCHEMA.encode() in file.read(_MOST_BEFORE_SCHEMA)


def _curves(trials: Sequence[TrialSummary]) -> Iterable[ThreadCurve]:
    """One curve for each batch size that was searched; None where it was not."""
    sizes = dict.fromkeys(trial.settings.get("batch_size") for trial in trials)
    for size in sorted(sizes, key=lambda size: size or 0):
        points = thread_curve([trial for trial in trials if trial.settings.get("batch_size") == size])
        if points:
            yield ThreadCurve(batch_size=size, points=tuple(points))

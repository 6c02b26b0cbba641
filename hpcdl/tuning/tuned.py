"""Searches as a report shows them: from the profiles and trial logs that `tune-threads` leaves."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.statistics import Estimate
from hpcdl.node.profile import SCHEMA, Profile, TrialSummary, as_document, read_profile
from hpcdl.node.settings import Settings, settings_from, show
from hpcdl.report.runs.tunings import Attempt, SettingEffect, ThreadCurve, ThreadPoint, TunedNode
from hpcdl.tuning.effects import Trial, main_effects, thread_curve
from hpcdl.tuning.findings import Found, as_profile, summaries, warnings_of
from hpcdl.tuning.log import SCHEMA as LOG_SCHEMA
from hpcdl.tuning.log import read_log
from hpcdl.tuning.search import Search
from hpcdl.tuning.trials import TrialOutcome

LOG_ENDING = ".trials.jsonl"
_MOST_BEFORE_SCHEMA = 256
"""Bytes of a TOML file that are looked at for the name of the schema."""


def find_tunings(path: Path) -> list[Path]:
    """The profiles and trial logs at or below `path`; a log beside its profile is the same search, and left out."""
    if path.is_file():
        return [path] if path.name.endswith(LOG_ENDING) or _is_profile(path) else []
    found = []
    for folder, below, files in os.walk(path):
        below.sort()
        places = [Path(folder) / name for name in sorted(files)]
        profiles = [place for place in places if _is_profile(place)]
        known = {profile.with_suffix(LOG_ENDING) for profile in profiles}
        found += profiles + [place for place in places if place.name.endswith(LOG_ENDING) and place not in known]
    return found


def read_tuning(path: Path) -> TunedNode:
    """The search that a profile or a trial log is of. CorruptError where it is damaged."""
    profile = profile_of_log(path) if path.name.endswith(LOG_ENDING) else read_profile(path)
    return as_tuned(profile, path.name)


def as_tuned(profile: Profile, name: str) -> TunedNode:
    """A profile's search as the report wants it: trials, effects of the settings, curves over threads."""
    document = as_document(profile)
    trials = [Trial(settings=item.settings, images_per_second=_estimate(item)) for item in profile.trials]
    effects = [
        SettingEffect(setting=item.setting, value=item.value, ratio=item.ratio, num_trials=item.num_trials)
        for item in main_effects(trials)
    ]
    return TunedNode(
        name=name,
        model=profile.model,
        batch_size=profile.batch_size,
        machine=profile.machine,
        processor=profile.processor,
        fingerprint=profile.fingerprint,
        engine=profile.engine,
        created_at=profile.created_at,
        software=dict(profile.software),
        settings=_spelt(document["settings"]),
        images_per_second=profile.images_per_second,
        ci95=profile.ci95,
        n=profile.n,
        verdict=profile.verdict,
        attempts=tuple(_attempt(item) for item in profile.trials),
        effects=tuple(effects),
        curves=tuple(_curves(trials)),
        picture=tuple(profile.picture),
    )


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
    search = Search([_spelt(dataclasses.asdict(settings)) for settings, _ in candidates])
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


def _estimate(trial: TrialSummary) -> Estimate | None:
    if trial.images_per_second is None:
        return None
    return Estimate(mean=trial.images_per_second, std=None, ci95=trial.ci95, n=trial.n)


def _attempt(trial: TrialSummary) -> Attempt:
    return Attempt(
        settings=_spelt(trial.settings),
        status=trial.status,
        n=trial.n,
        images_per_second=trial.images_per_second,
        ci95=trial.ci95,
        memory_bytes_per_rank=trial.memory_bytes_per_rank,
        message=trial.message,
        origin=trial.origin,
    )


def _curves(trials: Sequence[Trial]) -> Iterable[ThreadCurve]:
    """One curve for each batch size that was searched; None where it was not."""
    sizes = dict.fromkeys(trial.settings.get("batch_size") for trial in trials)
    for size in sorted(sizes, key=lambda size: size or 0):
        points = thread_curve([trial for trial in trials if trial.settings.get("batch_size") == size])
        if points:
            yield ThreadCurve(
                batch_size=size,
                points=tuple(
                    ThreadPoint(
                        threads=point.threads,
                        images_per_second=point.images_per_second.mean,
                        ci95=point.images_per_second.ci95,
                        n=point.images_per_second.n,
                        settings=_spelt(point.settings),
                    )
                    for point in points
                ),
            )


def _spelt(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: show(value) for name, value in settings.items()}

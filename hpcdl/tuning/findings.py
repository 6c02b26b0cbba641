"""Results of a search: outcomes checked, trials summarized, a profile, and rows for reports."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.records.run_record import FILE_NAME as RECORD
from hpcdl.core.statistics import estimate, t_quantile
from hpcdl.core.storage.files import open_regular
from hpcdl.core.units import common_unit, counted
from hpcdl.node.profile import (
    SCHEMA,
    UNSETTLED,
    Profile,
    Settings,
    TrialSummary,
    chosen,
    read_profile,
    settings_from,
    show,
    spelt,
)
from hpcdl.report.runs.searches import SettingEffect, ThreadCurve, ThreadPoint, TunedNode, TunedTrial
from hpcdl.report.runs.sources import PROFILES, STUDY_FILE, Walk
from hpcdl.tuning.log import SCHEMA as LOG_SCHEMA
from hpcdl.tuning.log import read_log
from hpcdl.tuning.space import number_of
from hpcdl.tuning.trials import TrialOutcome

if TYPE_CHECKING:
    from hpcdl.tuning.search import Choice


SAME_LOSS, LIKE_LOSS = 0.02, 0.1
"""Relative difference that a loss may have from the reference for the same, or another, number of ranks."""
Measured = Sequence[tuple[Settings, Sequence[TrialOutcome]]]
"""The outcomes of each candidate, in the order in which candidates were first tried."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """How a search ended: `choice` is None if no trial succeeded; `stopped` if a signal ended it.

    `counted` is the unit of the trials' rates.
    """

    choice: Choice | None
    settings: Settings | None
    trials: tuple[TrialSummary, ...]
    counted: str
    num_samples: int
    seconds: float
    settled: bool
    stopped: bool
    warnings: tuple[str, ...]


def checked(outcome: TrialOutcome, settings: Settings, measured: Measured) -> TrialOutcome:
    """Return `outcome`, or a rejection if its loss differs from that with the engine's defaults."""
    if outcome.status != "ok" or outcome.loss is None:
        return outcome
    reference, tolerance = _reference(settings, measured)
    if math.isfinite(outcome.loss) and (
        reference is None or abs(outcome.loss - reference) <= tolerance * max(abs(reference), 1e-12)
    ):
        return outcome
    expected = "a finite one" if reference is None else f"the reference {reference:.6g}"
    message = f"loss {outcome.loss:.6g} instead of {expected}"
    return dataclasses.replace(outcome, status="inconsistent", images_per_second=None, loss=None, message=message)


def _reference(reference: Settings, measured: Measured) -> tuple[float | None, float]:
    """Return the loss under the engine's defaults: with as many ranks if there is one, else with any; same batch."""
    losses: dict[bool, float] = {}
    for settings, outcomes in measured:
        if plain_engine(settings) and settings.batch_size == reference.batch_size:
            for outcome in outcomes:
                if outcome.status == "ok" and outcome.loss is not None:
                    losses.setdefault(settings.ranks_per_node == reference.ranks_per_node, outcome.loss)
    return (losses[True], SAME_LOSS) if True in losses else (losses.get(False), LIKE_LOSS)


def plain_engine(settings: Settings) -> bool:
    """Return whether the engine computes as it does by default."""
    return (
        settings.onednn in (None, True)
        and settings.onednn_isa == settings.onednn_fpmath == "default"
        and not settings.xla
    )


def unit_of(measured: Measured) -> str:
    """Return the unit of the measured rates."""
    every = (outcome for _, outcomes in measured for outcome in outcomes)
    return common_unit(outcome.counted for outcome in every if outcome.images_per_second is not None)


def summaries(measured: Measured) -> tuple[TrialSummary, ...]:
    """Return a summary of each candidate, the fastest first."""
    ranked = [_summary(settings, outcomes) for settings, outcomes in measured]
    return tuple(sorted(ranked, key=lambda trial: -(trial.images_per_second or 0.0)))


def _summary(tried: Settings, outcomes: Sequence[TrialOutcome]) -> TrialSummary:
    settings: dict[str, Any] = chosen(tried)
    speeds = [outcome.images_per_second for outcome in outcomes if outcome.images_per_second is not None]
    bad = [outcome for outcome in outcomes if outcome.status != "ok"]
    if not speeds:
        return TrialSummary(settings=settings, status=bad[-1].status, message=bad[-1].message)
    summary = estimate(speeds)
    memory = [outcome.memory_bytes_per_rank for outcome in outcomes if outcome.memory_bytes_per_rank is not None]
    return TrialSummary(
        settings=settings, status="ok" if not bad else "unstable", n=len(speeds), images_per_second=summary.mean,
        ci95=summary.ci95, memory_bytes_per_rank=max(memory, default=None), message=bad[-1].message if bad else "",
    )  # fmt: skip


def warnings_of(measured: Measured) -> tuple[str, ...]:
    """Return what to tell the user besides the winner: failures, rejections, missing checks."""
    every = [outcome for _, outcomes in measured for outcome in outcomes]
    lines = []
    failed = [outcome for outcome in every if outcome.status not in ("ok", "inconsistent")]
    if failed:
        lines.append(f"{len(failed)} of {len(every)} samples failed; the last: {failed[-1].message}")
    lines += [f"rejected: {outcome.message}" for outcome in every if outcome.status == "inconsistent"]
    if any(outcome.status == "ok" for outcome in every) and not any(outcome.loss is not None for outcome in every):
        lines.append("results were not checked against a reference: the trials reported no loss")
    return tuple(lines)


def as_profile(result: SearchResult, base: Profile) -> Profile:
    """Return the final profile of a search: `base` says where and what, `result` what was fastest and how certain."""
    base = dataclasses.replace(base, counted=result.counted, trials=result.trials)
    if result.choice is None or result.settings is None:
        return dataclasses.replace(base, verdict="no trial ended with success: the defaults")
    winner = next(trial for trial in result.trials if trial.settings == chosen(result.settings))
    return dataclasses.replace(
        base,
        settings=result.settings,
        batch_size=result.settings.batch_size or base.batch_size,
        images_per_second=winner.images_per_second,
        ci95=winner.ci95,
        n=winner.n,
        verdict=verdict(result.choice, settled=result.settled),
    )


def verdict(choice: Choice, *, settled: bool) -> str:
    """Return the certainty of the winner, in one sentence."""
    ended = "settled" if settled else UNSETTLED
    return (
        f"{ended}; best with probability {choice.probability_best:.2f}, "
        f"expected loss against the true best {100 * choice.expected_loss:.1f} %"
    )


LOG_SUFFIX = ".trials.jsonl"
_MOST_SAMPLES = 1e6
"""Limit of samples of one candidate, which outweigh all others: a file may hold any number."""
_LARGEST_LOG = 700.0
"""Largest logarithm of a number that a computer holds."""
_MOST_BEFORE_SCHEMA = 256
"""Bytes of a TOML file that are searched for the name of the schema."""


def find_tunings(path: Path, walked: Walk) -> list[Path]:
    """Return the profiles and trial logs at or below `path`, without logs that have a profile beside them.

    Profiles that a study has made for its runs are settings, not searches: folders are not searched for them.
    """
    if path.is_file():
        return [path] if path.name.endswith(LOG_SUFFIX) or _is_profile(path) else []
    tunings = []
    for folder, files in walked:
        if RECORD in files:
            continue  # thousands of runs have a TOML file, and none has a search
        if Path(folder).name == PROFILES and (Path(folder).parent / STUDY_FILE).exists():
            continue
        paths = [Path(folder) / name for name in sorted(files) if name.endswith((".toml", LOG_SUFFIX))]
        profiles = [path for path in paths if _is_profile(path)]
        logs_with_profile = {profile.with_suffix(LOG_SUFFIX) for profile in profiles}
        tunings += profiles + [
            path for path in paths if path.name.endswith(LOG_SUFFIX) and path not in logs_with_profile
        ]
    return tunings


def read_tuning(path: Path) -> TunedNode:
    """Return the search of a profile or a trial log. Raises CorruptError if it is damaged."""
    profile = profile_of_log(path) if path.name.endswith(LOG_SUFFIX) else read_profile(path)
    return as_tuned(profile, path.name)


def as_tuned(profile: Profile, name: str) -> TunedNode:
    """Return a profile's search in the form for reports: trials, effects of the settings, curves over threads."""
    shared_values = {
        attribute.name: getattr(profile, attribute.name)
        for attribute in fields(TunedNode)
        if hasattr(profile, attribute.name)
    }
    return TunedNode(**{
        **shared_values,
        "name": name,
        "settings": spelt(chosen(profile.settings)),
        "attempts": tuple(TunedTrial(**vars(trial) | {"settings": spelt(trial.settings)}) for trial in profile.trials),
        "effects": tuple(main_effects(profile.trials)),
        "curves": tuple(_curves(profile.trials)),
    })  # fmt: skip


def main_effects(trials: Sequence[TrialSummary], *, ridge: float = 0.5) -> list[SettingEffect]:
    """Return effects of every setting's levels on the logarithm of speed, fitted together by ridge regression.

    A search measures good corners more often than bad ones. Fitting all settings at once keeps the effects of
    accompanying levels from being attributed to a level. The most important settings come first. There are none if the
    trials are too few for intervals: those of the regression's posterior (Hoerl and Kennard, Technometrics 12, 1970).
    """
    import numpy as np

    measured = [(trial, rate) for trial in trials if (rate := trial.images_per_second) and 0 < rate < math.inf]
    names = list(dict.fromkeys(name for trial, _ in measured for name in trial.settings))
    levels = {name: _levels([trial for trial, _ in measured], name) for name in names}
    columns = [(name, value) for name in names if len(levels[name]) > 1 for value in levels[name]]
    if not columns:
        return []
    speed = np.array([math.log(speed) for _, speed in measured])
    # A mean of n samples has 1/n of the variance.
    weight = np.sqrt(np.clip([float(trial.n) for trial, _ in measured], 1, _MOST_SAMPLES))
    design = np.array(
        [[show(trial.settings.get(name)) == value for name, value in columns] for trial, _ in measured], dtype=float
    )
    scaled = design * weight[:, None]
    centred = (speed - np.average(speed, weights=weight**2)) * weight
    inverse = np.linalg.inv(scaled.T @ scaled + ridge * np.eye(len(columns)))
    fitted = inverse @ scaled.T @ centred
    # A ridge regression uses the trace of its hat matrix as degrees of freedom; one more is the mean.
    freedom = len(measured) - 1 - float(np.trace(scaled @ inverse @ scaled.T))
    if freedom < 1:
        return []
    # Each level beside the mean of its setting's levels.
    contrasts = np.array([
        [float(column == other) - (name == other[0]) / len(levels[name]) for other in columns]
        for column in columns for name in column[:1]
    ])  # fmt: skip
    noise = float(np.sum((centred - scaled @ fitted) ** 2)) / freedom
    reach = t_quantile(0.975, freedom) * np.sqrt(noise * np.einsum("ij,jk,ik->i", contrasts, inverse, contrasts))
    effects = [
        SettingEffect(setting=name, value=value, num_trials=int(count), ratio=math.exp(size),
                      low=math.exp(size - half), high=math.exp(min(size + half, _LARGEST_LOG)))
        for (name, value), size, half, count in zip(
            columns, contrasts @ fitted, reach, design.sum(axis=0), strict=True)
    ]  # fmt: skip
    spans: dict[str, list[float]] = defaultdict(list)
    for effect in effects:
        spans[effect.setting].append(effect.ratio)
    return sorted(effects, key=lambda e: (-max(spans[e.setting]) / min(spans[e.setting]), e.setting, -e.ratio))


def thread_curve(trials: Sequence[TrialSummary]) -> list[ThreadPoint]:
    """Return images/s against all threads of the node (ranks x intra-op), the best trial of each count, ascending."""
    best: dict[int, ThreadPoint] = {}
    for trial in trials:
        threads = number_of(trial.settings.get("intra_op_threads"))
        ranks = number_of(trial.settings.get("ranks_per_node")) or 1
        if threads is None or trial.images_per_second is None:
            continue
        point = ThreadPoint(
            threads=int(threads * ranks), images_per_second=trial.images_per_second, ci95=trial.ci95, n=trial.n,
            settings=spelt(trial.settings),
        )  # fmt: skip
        previous = best.get(point.threads)
        if previous is None or point.images_per_second > previous.images_per_second:
            best[point.threads] = point
    return [best[threads] for threads in sorted(best)]


def _levels(trials: Sequence[TrialSummary], name: str) -> list[str]:
    return sorted({show(trial.settings.get(name)) for trial in trials})


def profile_of_log(path: Path) -> Profile:
    """Return what a search has found so far, from its log alone: for a killed or running search."""
    recorded = read_log(path)
    if recorded.header.get("schema") != LOG_SCHEMA:
        raise UsageError(f"{path} has schema {recorded.header.get('schema')!r}, this hpcdl reads {LOG_SCHEMA!r}")
    measured: dict[str, tuple[Settings, list[TrialOutcome]]] = {}
    for entry in recorded.entries:
        settings = settings_from(entry.settings, origin=str(path))
        measured.setdefault(repr(settings), (settings, []))[1].append(entry.outcome)
    from hpcdl.tuning.search import Search  # imported here: importing scipy takes seconds

    candidates = list(measured.values())
    search = Search([spelt(dataclasses.asdict(settings)) for settings, _ in candidates])
    for index, (_, outcomes) in enumerate(candidates):
        for outcome in outcomes:
            search.tell(index, outcome.images_per_second if outcome.status == "ok" else None)
    choice = search.best()
    search_result = SearchResult(
        choice=choice,
        settings=None if choice is None else candidates[choice.index][0],
        trials=summaries(candidates),
        counted=unit_of(candidates),
        num_samples=search.num_samples,
        seconds=sum(outcome.seconds for _, outcomes in candidates for outcome in outcomes),
        settled=False,
        stopped=True,
        warnings=warnings_of(candidates),
    )
    profile = as_profile(search_result, _base(recorded.header, path))
    if choice is None:
        return profile
    # Candidates that were not measured are not in the log: without them every probability would be too high.
    verdict = (
        f"the best of {counted(len(candidates), 'candidate')} in its log, which does not say if the search settled"
    )
    return dataclasses.replace(profile, verdict=verdict)


def _base(header: Mapping[str, Any], path: Path) -> Profile:
    workload = header.get("workload")
    try:
        assert isinstance(workload, dict)
        devices = {str(name): int(number) for name, number in dict(header.get("devices") or {}).items()}
        return Profile(
            settings=Settings(), machine="", processor="", num_cores=0, fingerprint=str(header["fingerprint"]),
            engine=str(header["engine"]), model=str(workload["model"]), batch_size=int(workload["batch_size"]),
            devices=devices,
        )  # fmt: skip
    except (AssertionError, KeyError, OverflowError, TypeError, ValueError):
        raise CorruptError(f"{path} has a damaged header; tune again") from None


def _is_profile(path: Path) -> bool:
    if path.suffix != ".toml" or not path.is_file():
        return False
    with open_regular(path) as file:
        return SCHEMA.encode() in file.read(_MOST_BEFORE_SCHEMA)


def _curves(trials: Sequence[TrialSummary]) -> Iterable[ThreadCurve]:
    """Yield a curve for each batch size that was searched; its size is None if none was."""
    sizes = dict.fromkeys(trial.settings.get("batch_size") for trial in trials)
    for size in sorted(sizes, key=lambda size: size or 0):
        points = thread_curve([trial for trial in trials if trial.settings.get("batch_size") == size])
        if points:
            yield ThreadCurve(batch_size=size, points=tuple(points))

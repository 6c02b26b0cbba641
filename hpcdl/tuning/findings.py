"""What the outcomes of a search amount to: results checked against a reference, a summary of each trial, a profile."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcdl.core.statistics import estimate
from hpcdl.core.units import common_unit
from hpcdl.node.profile import UNSETTLED, Profile, TrialSummary
from hpcdl.node.settings import Settings, chosen
from hpcdl.tuning.trials import TrialOutcome

if TYPE_CHECKING:
    from hpcdl.tuning.search import Choice

SAME_LOSS, LIKE_LOSS = 0.02, 0.1
"""Relative difference that a loss may have from the reference of the same, or of another, number of ranks."""
Measured = Sequence[tuple[Settings, Sequence[TrialOutcome]]]
"""The outcomes of each candidate, in the order in which candidates were first tried."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """How a search ended: `choice` is None where no trial succeeded; `stopped` where a signal ended it.

    `counted` is what the trials' rates count.
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
    """`outcome`, or a rejection where its loss differs from that of the engine's defaults: speed is not all."""
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


def _reference(own: Settings, measured: Measured) -> tuple[float | None, float]:
    """The loss under the engine's defaults: with as many ranks if there is one, else with any; same batch."""
    found: dict[bool, float] = {}
    for settings, outcomes in measured:
        if plain_engine(settings) and settings.batch_size == own.batch_size:
            for outcome in outcomes:
                if outcome.status == "ok" and outcome.loss is not None:
                    found.setdefault(settings.ranks_per_node == own.ranks_per_node, outcome.loss)
    return (found[True], SAME_LOSS) if True in found else (found.get(False), LIKE_LOSS)


def plain_engine(settings: Settings) -> bool:
    """Whether the engine computes as it does by default."""
    return (
        settings.onednn in (None, True)
        and settings.onednn_isa == settings.onednn_fpmath == "default"
        and not settings.xla
    )


def unit_of(measured: Measured) -> str:
    """What the rates that were measured count."""
    every = (outcome for _, outcomes in measured for outcome in outcomes)
    return common_unit(outcome.counted for outcome in every if outcome.images_per_second is not None)


def summaries(measured: Measured) -> tuple[TrialSummary, ...]:
    """A line for each candidate, the fastest first."""
    ranked = [_summary(settings, outcomes) for settings, outcomes in measured]
    return tuple(sorted(ranked, key=lambda trial: -(trial.images_per_second or 0.0)))


def _summary(own: Settings, outcomes: Sequence[TrialOutcome]) -> TrialSummary:
    settings: dict[str, Any] = chosen(own)
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
    """What the user should hear besides the winner: failures, rejections, missing checks."""
    every = [outcome for _, outcomes in measured for outcome in outcomes]
    found = []
    failed = [outcome for outcome in every if outcome.status not in ("ok", "inconsistent")]
    if failed:
        found.append(f"{len(failed)} of {len(every)} samples failed; the last: {failed[-1].message}")
    found += [f"rejected: {outcome.message}" for outcome in every if outcome.status == "inconsistent"]
    if any(outcome.status == "ok" for outcome in every) and not any(outcome.loss is not None for outcome in every):
        found.append("results were not checked against a reference: the trials reported no loss")
    return tuple(found)


def as_profile(found: Found, base: Profile) -> Profile:
    """The profile that a search ends with: `base` says where and what, `found` what was fastest and how sure."""
    base = dataclasses.replace(base, counted=found.counted, trials=found.trials)
    if found.choice is None or found.settings is None:
        return dataclasses.replace(base, verdict="no trial ended with success: the defaults")
    winner = next(trial for trial in found.trials if trial.settings == chosen(found.settings))
    return dataclasses.replace(
        base,
        settings=found.settings,
        batch_size=found.settings.batch_size or base.batch_size,
        images_per_second=winner.images_per_second,
        ci95=winner.ci95,
        n=winner.n,
        verdict=verdict(found.choice, settled=found.settled),
    )


def verdict(choice: Choice, *, settled: bool) -> str:
    """How sure the winner is, in one sentence."""
    ended = "settled" if settled else UNSETTLED
    return (
        f"{ended}; best with probability {choice.probability_best:.2f}, "
        f"expected loss against the true best {100 * choice.expected_loss:.1f} %"
    )

"""What mixed_bfloat16 would bring on a node, measured beside the winner of a search, and what it costs in accuracy.

It changes results: a search never chooses it, `--precision mixed_bfloat16` does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpcdl.core.from_json import from_json
from hpcdl.core.paths import own_program
from hpcdl.core.units import format_rate
from hpcdl.node.engine import BFLOAT16_INSTRUCTIONS
from hpcdl.tuning.space import Candidate
from hpcdl.tuning.trials import FLOAT32, TrialOutcome, Workload

LOWER = "mixed_bfloat16"
PAIRS = 3
SAMPLES_PER_PAIR = 8
"""A pair of samples, one in each precision, is taken for so many that the whole search may take."""
SHARE_OF_BUDGET = 0.2


@dataclass(frozen=True, kw_only=True)
class LowerPrecision:
    """What was found: rates of the winner's settings in both precisions, in turn, and `check`'s document.

    `check` is what `hpcdl bench precision --json` prints, None where it did not come to an end; `problem` says what
    was not measured, and why.
    """

    precision: str = LOWER
    instructions: Sequence[str] = ()
    float32: Sequence[float] = ()
    lower: Sequence[float] = ()
    counted: str = ""
    check: Mapping[str, Any] | None = None
    problem: str = ""

    @property
    def ratio(self) -> float | None:
        """The median rate over float32's."""
        if not self.float32 or not self.lower:
            return None
        return statistics.median(self.lower) / statistics.median(self.float32)

    @classmethod
    def from_document(cls, document: Mapping[str, Any], counted: str) -> LowerPrecision:
        """What `as_document` has written; a ValueError or TypeError says what is damaged."""
        plain = {**document, "counted": counted, "lower": document.get(str(document.get("precision", LOWER)), ())}
        found = from_json(cls, plain)
        if not all(rate > 0 for rate in (*found.float32, *found.lower)):
            raise ValueError("a rate in lower_precision is not above 0")
        return found

    def as_document(self) -> dict[str, Any]:
        """In types that TOML and JSON have; what is not known is left out."""
        found = {
            "precision": self.precision,
            "instructions": list(self.instructions),
            "float32": list(self.float32),
            self.precision: list(self.lower),
            "ratio": self.ratio,
            "check": self.check,
            "problem": self.problem,
        }
        return {key: value for key, value in found.items() if value not in (None, "", [])}

    def sentences(self) -> list[str]:
        """What to tell the user, the number and what stands beside it."""
        if not self.instructions:
            return [f"{self.precision} was not measured: {self.problem}"]
        told = []
        if self.ratio is not None:
            rates = [format_rate(statistics.median(rates), self.counted) for rates in (self.lower, self.float32)]
            told.append(
                f"{self.precision} ({', '.join(self.instructions)}) would bring {rates[0]} against {rates[1]} in "
                f"float32: {self.ratio:.2f} x, n = {len(self.lower)} each, in turn; "
                f"not chosen, it changes results: hpcdl train --precision {self.precision}"
            )
        if self.check is not None:
            told.append(checked(self.check))
        if self.problem:
            told.append(f"{self.precision}: {self.problem}")
        return told


def checked(check: Mapping[str, Any]) -> str:
    """The sentence about what `hpcdl bench precision` has found."""
    digits, precision = check["digits"], check["precision"]
    means = {name: statistics.fmean(reached) for name, reached in digits["accuracy"].items()}
    return (
        f"its results on one batch differ from float32's by {check['outputs']:.1e} of the largest output and "
        f"{check['gradients']:.1e} of the largest gradient; {digits['network']} on the digits, "
        f"{digits['epochs']} epochs, {len(digits['seeds'])} seeds: "
        f"accuracy {means[precision]:.3f} against {means[FLOAT32]:.3f}"
    )


class Measures(Protocol):
    """What runs samples in either precision, and the check."""

    def measure(
        self, candidate: Candidate, time_limit_s: float, prefix: Sequence[str] = (), precision: str = FLOAT32
    ) -> TrialOutcome:
        """One sample."""

    def document(
        self, words: Sequence[str], time_limit_s: float, prefix: Sequence[str] = ()
    ) -> tuple[Mapping[str, Any] | None, str]:
        """What a command prints as JSON; or None, and why there is none."""


@dataclass(kw_only=True)
class Allowance:
    """What is left of a search's budget: seconds until `deadline_s`, samples (None: no limit).

    `usual_s`: what a sample takes.
    """

    deadline_s: float
    samples: int | None
    trial_timeout_s: float
    usual_s: float = 0.0

    def pairs(self) -> int:
        """How many pairs of samples may be taken."""
        return PAIRS if self.samples is None else min(PAIRS, self.samples // 2)

    def next_s(self, commands: int = 1) -> float:
        """Seconds that the next command may take; 0 where `commands` of them would end half of one too late."""
        left = self.deadline_s - time.monotonic()
        return 0.0 if left <= (commands - 0.5) * self.usual_s else min(left, self.trial_timeout_s)


def reserved_samples(max_samples: int | None) -> int:
    """Of the samples that a search may take, those that are kept for both precisions."""
    return 0 if max_samples is None else 2 * min(PAIRS, max_samples // SAMPLES_PER_PAIR)


def check_command(workload: Workload, batch_size: int) -> list[str]:
    """The command line of the check against float32."""
    words = own_program("hpcdl", "bench", "precision", "--json", "--precision", LOWER, "--model", workload.model)
    words += ["--batch-size", str(batch_size)]
    return [*words, "--data", str(Path(workload.data).absolute())] if workload.data is not None else words


def measure_lower(
    candidate: Candidate,
    workload: Workload,
    measures: Measures,
    instructions: Sequence[str],
    allowance: Allowance,
    prefix: Sequence[str] = (),
) -> LowerPrecision:
    """Samples of `candidate` in both precisions in turn, then their check, as far as the budget goes."""
    if not instructions:
        return LowerPrecision(
            problem=f"this processor has no bfloat16 instructions ({', '.join(BFLOAT16_INSTRUCTIONS)})"
        )
    rates: dict[str, list[float]] = {FLOAT32: [], LOWER: []}
    problem, counted = "", ""
    if allowance.pairs() == 0:
        problem = f"its speed was not measured: --max-samples leaves no room, {SAMPLES_PER_PAIR} or more do"
    for _ in range(allowance.pairs()):
        pair = []
        for left, precision in zip((2, 1), rates, strict=True):
            limit_s = allowance.next_s(left)
            if limit_s <= 0:
                break
            outcome = measures.measure(candidate, limit_s, prefix, precision)
            if outcome.status == "timeout" and limit_s < allowance.trial_timeout_s:
                break  # ended by the budget, not by its own fault
            allowance.usual_s = outcome.seconds
            if outcome.images_per_second is None:
                problem = f"a sample in {precision}: {outcome.status}; {outcome.message}"
                break
            pair.append(outcome.images_per_second)
            counted = outcome.counted
        if len(pair) < len(rates):
            break
        for precision, rate in zip(rates, pair, strict=True):
            rates[precision].append(rate)
    if not rates[LOWER] and not problem:
        problem = "its speed was not measured: the budget leaves no time; give a longer --budget"
    check = None
    if rates[LOWER]:
        why, limit_s = "the budget is used up", allowance.next_s()
        if limit_s > 0:
            batch_size = candidate.settings.batch_size or workload.batch_size
            check, why = measures.document(check_command(workload, batch_size), limit_s, prefix)
        problem = "; ".join(filter(None, [problem, f"its results were not checked: {why}" if check is None else ""]))
    return LowerPrecision(
        instructions=tuple(instructions), float32=rates[FLOAT32], lower=rates[LOWER], counted=counted, check=check,
        problem=problem,
    )  # fmt: skip

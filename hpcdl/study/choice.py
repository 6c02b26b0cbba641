"""Which of the values that a point has tried it runs with: the best by held-out samples, said with all others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcdl.config.load import settings_by_key
from hpcdl.config.schema import TrainConfig
from hpcdl.config.study import TriedSettings
from hpcdl.core.records.run_record import RunRecord
from hpcdl.study.plan import StudyPoint

TRIES = "tries"
"""The folder of a study's tries, which reports leave out (report/runs/sources.py)."""
_SETTINGS = settings_by_key(TrainConfig)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """`values` by key; `accuracies` are those of every try, in words of its values; `samples` says of which.

    An accuracy is None where a try has reached none: its loss was no number, or nothing has classes.
    """

    values: Mapping[str, Any]
    accuracies: Mapping[str, float | None]
    samples: str

    @property
    def sentence(self) -> str:
        """For people."""
        text = ", ".join(f"{name}: {_shown(accuracy)}" for name, accuracy in self.accuracies.items())
        if all(accuracy is None for accuracy in self.accuracies.values()):
            return f"runs with {_words(self.values)}, by the loss of its tries on {self.samples}; none has an accuracy"
        return f"runs with {_words(self.values)}, by the accuracy of its tries on {self.samples} ({text})"

    def as_json(self) -> dict[str, Any]:
        """For the study's file."""
        values = {key: _SETTINGS[key].show(value) for key, value in self.values.items()}
        return {"values": values, "accuracies": dict(self.accuracies), "samples": self.samples}


def choose(tries: Sequence[tuple[RunRecord, StudyPoint]], choice: TriedSettings) -> Chosen:
    """The best of `tries` (one at least) at their end; at equal accuracy that of the smaller loss.

    Training's accuracy counts only where no try was evaluated. All have the same data: a try without held-out accuracy
    beside others with one has diverged, and is not chosen.
    """
    held_out = any(_last(record, "val_accuracy") is not None for record, _ in tries)
    accuracy, loss = ("val_accuracy", "val_loss") if held_out else ("accuracy", "loss")

    def merit(item: tuple[RunRecord, StudyPoint]) -> tuple[float, float]:
        reached, lost = _last(item[0], accuracy), _last(item[0], loss)
        return -math.inf if reached is None else reached, -math.inf if lost is None else -lost

    best = max(tries, key=merit)
    values = [{key: dict(point.settings)[key] for key in choice.axes} for _, point in tries]
    return Chosen(
        values={key: dict(best[1].settings)[key] for key in choice.axes},
        accuracies={_words(own): _last(record, accuracy) for own, (record, _) in zip(values, tries, strict=True)},
        samples="held-out samples" if held_out else "training samples, there being no others",
    )


def _last(record: RunRecord, name: str) -> float | None:
    """The newest value in the record's history; None where there is none, as after a loss that was no number."""
    values = [getattr(point, name) for point in record.history]
    return next((float(value) for value in reversed(values) if value is not None), None)


def _shown(accuracy: float | None) -> str:
    return "none" if accuracy is None else f"{accuracy:.4g}"


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_SETTINGS[key].show(value)}" for key, value in values.items())

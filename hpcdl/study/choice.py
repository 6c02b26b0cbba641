"""Choose the values of a point from those that its tries tested: the best by held-out samples, listed with others."""

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
"""The folder of a study's tries, which reports omit (report/runs/sources.py)."""
_SETTINGS = settings_by_key(TrainConfig)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The chosen `values` by key, the accuracy of every try by a text of its values, and the kind of `samples`.

    An accuracy is None if a try has none: its loss was not a number, or its data have no classes.
    """

    values: Mapping[str, Any]
    accuracies: Mapping[str, float | None]
    samples: str

    @property
    def sentence(self) -> str:
        """The choice as a sentence."""
        text = ", ".join(f"{name}: {_shown(accuracy)}" for name, accuracy in self.accuracies.items())
        if all(accuracy is None for accuracy in self.accuracies.values()):
            return f"runs with {_words(self.values)}, by the loss of its tries on {self.samples}; none has an accuracy"
        return f"runs with {_words(self.values)}, by the accuracy of its tries on {self.samples} ({text})"

    def as_json(self) -> dict[str, Any]:
        """Return the choice for the study's file."""
        values = {key: _SETTINGS[key].show(value) for key, value in self.values.items()}
        return {"values": values, "accuracies": dict(self.accuracies), "samples": self.samples}


def choose(tries: Sequence[tuple[RunRecord, StudyPoint]], choice: TriedSettings) -> Chosen:
    """Return the best of `tries` (at least one) by final accuracy; ties go to the smaller loss.

    Training accuracy counts only if no try was evaluated. All tries have the same data: a try without held-out accuracy
    beside others with one has diverged, and is not chosen.
    """
    held_out = any(_last(record, "val_accuracy") is not None for record, _ in tries)
    accuracy, loss = ("val_accuracy", "val_loss") if held_out else ("accuracy", "loss")

    def merit(pair: tuple[RunRecord, StudyPoint]) -> tuple[float, float]:
        reached, lost = _last(pair[0], accuracy), _last(pair[0], loss)
        return -math.inf if reached is None else reached, -math.inf if lost is None else -lost

    best = max(tries, key=merit)
    values = [{key: dict(point.settings)[key] for key in choice.axes} for _, point in tries]
    return Chosen(
        values={key: dict(best[1].settings)[key] for key in choice.axes},
        accuracies={
            _words(axis_values): _last(record, accuracy) for axis_values, (record, _) in zip(values, tries, strict=True)
        },
        samples="held-out samples" if held_out else "training samples, there being no others",
    )


def _last(record: RunRecord, name: str) -> float | None:
    """Return the last value in the record's history; None if it has none, for example if the loss was not a number."""
    values = [getattr(point, name) for point in record.history]
    return next((float(value) for value in reversed(values) if value is not None), None)


def _shown(accuracy: float | None) -> str:
    return "none" if accuracy is None else f"{accuracy:.4g}"


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_SETTINGS[key].show(value)}" for key, value in values.items())

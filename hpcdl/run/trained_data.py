"""Losses and metrics by target; and data for a trained model, read in the same way as the run's own data.

Each folder has its own class numbers and statistics; a model knows only those of its training data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpcdl.config.schema import CROSS_ENTROPY, ObjectiveConfig, TrainConfig
from hpcdl.core.errors import HpcdlError, UsageError, suggestion
from hpcdl.core.records.run_record import read_record
from hpcdl.core.units import listed
from hpcdl.data.format.dataset import Dataset, open_dataset
from hpcdl.data.format.manifest import Field

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


SHORT = {"mse": "mean_squared_error", "mae": "mean_absolute_error"}
"""Short names for losses and metrics."""


def losses_of(config: ObjectiveConfig, names: Sequence[str]) -> dict[str, str]:
    """Return the loss of each target. Raises UsageError if a target has none or two."""
    found = _by_target(config.loss, names, "--loss")
    for name in names:
        if len(found[name]) != 1:
            raise UsageError(f"--loss {config.loss}: the target {name!r} has {len(found[name])} losses; {_form(names)}")
    return {name: SHORT.get(own[0], own[0]) for name, own in found.items()}


def metrics_of(config: ObjectiveConfig, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the metrics of each target, with long names for `mse` and `mae`."""
    found = _by_target(config.metrics, names, "--metrics")
    return {name: [SHORT.get(metric, metric) for metric in own] for name, own in found.items()}


def _by_target(text: str, names: Sequence[str], flag: str) -> dict[str, list[str]]:
    """Parse `a,b` for the only target, or `target=a,target=b`."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for part in (part.strip() for part in text.split(",")):
        name, equals, value = part.rpartition("=")
        if not part:
            continue
        if not equals:
            if len(names) > 1:
                raise UsageError(f"{flag} {text}: the data has {len(names)} targets; {_form(names)}")
            name = names[0]
        if name not in found:
            raise UsageError(f"{flag} {text}: no target {name!r}{suggestion(name, names)}")
        found[name].append(value)
    return found


def _form(names: Sequence[str]) -> str:
    return "write " + ",".join(f"{name}=LOSS" for name in names)


def check_objective(config: ObjectiveConfig, dataset: Dataset) -> None:
    """Raise UsageError if a loss does not fit its target, or a target has none."""
    losses = losses_of(config, [item.name for item in dataset.targets])
    metrics_of(config, list(losses))
    for item in dataset.targets:
        if losses[item.name] == CROSS_ENTROPY and not _names_classes(item):
            raise UsageError(
                f"--loss {CROSS_ENTROPY} compares with classes, but the target {item.name} holds {item.dtype} numbers; "
                "give another one, such as --loss mse, or shard with --target-kind class"
            )


def _names_classes(item: Field) -> bool:
    """Return whether a target holds a class, or a class per element (a mask)."""
    return item.kind == "class" or (item.kind == "numbers" and not item.dtype.startswith("float") and bool(item.shape))


def shapes_of(fields: Sequence[Field]) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of a sample by field."""
    return {item.name: tuple(item.shape) for item in fields}


_MOST = 8
"""Most names in a message."""


def fields_as_trained(given: Dataset, trained: Dataset) -> tuple[Dataset, list[str]]:
    """Return `given` with the scaling of `trained`, matched by field name, and messages about it.

    Raises UsageError if a field's classes or words have other numbers than the model has learned.
    """
    if given.pictures:
        return given, []  # their classes are matched by name: see classes_as_trained
    own = {item.name: item for item in trained.fields}
    fields, said = [], []
    for item in given.fields:
        learnt = own.get(item.name, item)
        _check_names(given, trained, item.name, item.class_names, learnt.class_names)
        if item.categories != learnt.categories:
            raise UsageError(
                f"{given.name}: the words of {item.name!r} have other numbers than in {trained.name}, which the model "
                f"was trained on; shard it again with --categories-of {trained.folder or trained.name}"
            )
        if (item.normalise, item.statistics) != (learnt.normalise, learnt.statistics):
            said.append(f"{item.name!r} is scaled by the statistics of {trained.name}, as in training")
        fields.append(_scaled_as(item, learnt))
    return dataclasses.replace(given, fields=tuple(fields)), said


def classes_as_trained(given: Dataset, trained: Dataset) -> Array | None:
    """Return the model's number of each class of `given`, int64; None if the numbers agree or classes have no names.

    Raises UsageError if the model has not learned a class of `given`.
    """
    names, learnt = given.class_names, trained.class_names
    if not given.pictures or not names or not learnt or names == learnt[: len(names)]:
        return None
    number_of = {name: number for number, name in enumerate(learnt)}
    unknown = [name for name in names if name not in number_of]
    if unknown:
        raise UsageError(
            f"{given.name} has classes that the model was not trained on: {listed(unknown, _MOST)}; "
            f"{trained.name} has {listed(learnt, _MOST)}"
        )
    return np.array([number_of[name] for name in names], np.int64)


def _scaled_as(item: Field, learnt: Field) -> Field:
    return dataclasses.replace(item, normalise=learnt.normalise, statistics=learnt.statistics)


def _check_names(given: Dataset, trained: Dataset, field: str, names: Sequence[str], learnt: Sequence[str]) -> None:
    if names and learnt and list(names) != list(learnt[: len(names)]):
        raise UsageError(
            f"{given.name}: the classes of {field!r} are {listed(names, _MOST)}, those that the model was trained on "
            f"({trained.name}) {listed(learnt, _MOST)}; shard it with the same classes in the same order"
        )


def read_as_trained(
    run_dir: Path, config: TrainConfig, data: str, *, verified: bool = True
) -> tuple[Dataset, Array | None, list[str]]:
    """Return `data` as the run's model must read it, the model's number of each of its classes, and messages about it.

    `verified`: data are checked against their checksums when read.
    """
    dataset = open_dataset(data, seed=config.run.seed, verified=verified)
    if dataset.checksum == read_record(run_dir).data_checksum:
        return dataset, None, []
    try:
        trained = open_dataset(config.data.data, seed=config.run.seed)
    except HpcdlError:
        return (
            dataset,
            None,
            [
                f"the data that the run was trained on, {config.data.data}, cannot be read: whether {data} numbers its "
                "classes and scales its numbers as that did is not known"
            ],
        )
    dataset, remarks = fields_as_trained(dataset, trained)
    numbers = classes_as_trained(dataset, trained)
    if dataset.pictures and bool(dataset.class_names) != bool(trained.class_names):
        unnamed = trained if dataset.class_names else dataset
        remarks.append(f"{unnamed.name} does not name its classes: their numbers are taken as those of the model")
    if numbers is not None:
        remarks.append(f"classes have the numbers of {trained.name}, by their names")
    return dataset, numbers, remarks

"""Data given to a trained model: read as the run had its own, with the same scaling and the same numbers of classes.

Each folder numbers its classes, and takes its statistics, by itself. A model knows those that it was trained on only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpcdl.config.schema import TrainConfig
from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.core.records.run_record import read_record
from hpcdl.core.units import listed
from hpcdl.data.format.dataset import Dataset, open_dataset
from hpcdl.data.format.fields import Field

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


_MOST = 8
"""Names in a message."""


def fields_as_trained(given: Dataset, trained: Dataset) -> tuple[Dataset, list[str]]:
    """`given` with the scaling of `trained`, field by field of the same name, and what to say about it.

    UsageError where a field's classes or words have other numbers than the model has learnt.
    """
    if given.pictures:
        return given, []  # their classes go by names: see classes_as_trained
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
    """The model's number of each class of `given`, int64; None where the numbers are the same, or nothing is named.

    UsageError where a class of `given` is none that the model has learnt.
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
    """`data` as the run's model must read it, the model's number of each of its classes, and what to say about it.

    `verified`: what is read is held against its checksums.
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

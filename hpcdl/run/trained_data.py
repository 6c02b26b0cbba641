"""Data given to a trained model: read as the run had its own, with the same scaling and the same numbers of classes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpcdl.config.schema import TrainConfig
from hpcdl.core.errors import HpcdlError
from hpcdl.core.records.run_record import read_record
from hpcdl.data.format.as_trained import classes_as_trained, fields_as_trained
from hpcdl.data.format.dataset import Dataset, open_dataset

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


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
    if not dataset.fields and bool(dataset.class_names) != bool(trained.class_names):
        unnamed = trained if dataset.class_names else dataset
        remarks.append(f"{unnamed.name} does not name its classes: their numbers are taken as those of the model")
    if numbers is not None:
        remarks.append(f"classes have the numbers of {trained.name}, by their names")
    return dataset, numbers, remarks

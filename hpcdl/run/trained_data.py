"""Losses and metrics by target; and data for a trained model, read in the same way as the run's own data.

Each folder has its own class numbers and statistics; a model knows only those of its training data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpcdl.config.schema import CROSS_ENTROPY, ObjectiveConfig, TrainConfig
from hpcdl.core.errors import HpcdlError, UsageError, suggestion
from hpcdl.core.records.run_record import read_record
from hpcdl.core.storage.files import read_json
from hpcdl.core.units import listed
from hpcdl.data.format.dataset import KNOWN, PREFIX, Dataset, described_by, open_dataset
from hpcdl.data.format.manifest import Field, document_of, manifest_in
from hpcdl.models.table import MODELS
from hpcdl.run.rundir import DATA_FILE

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


def made_up_data(model: str) -> str | None:
    """Return `synthetic:NAME` like the samples that a network of the table is for; None for a user's own network."""
    if model not in MODELS:
        return None
    classes, channels = MODELS[model].classes, MODELS[model].input_shape[2]
    fits = (name for name, spec in KNOWN.items() if (spec.num_classes, spec.sample_shape[2]) == (classes, channels))
    return f"{PREFIX}{next(fits)}"


SHORT = {"mse": "mean_squared_error", "mae": "mean_absolute_error"}
"""Short names for losses and metrics."""


def losses_of(config: ObjectiveConfig, names: Sequence[str]) -> dict[str, str]:
    """Return the loss of each target. Raises UsageError if a target has none or two."""
    losses = _by_target(config.loss, names, "--loss")
    for name in names:
        if len(losses[name]) != 1:
            raise UsageError(
                f"--loss {config.loss}: the target {name!r} has {len(losses[name])} losses; {_form(names)}"
            )
    return {name: SHORT.get(target_losses[0], target_losses[0]) for name, target_losses in losses.items()}


def metrics_of(config: ObjectiveConfig, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the metrics of each target, with long names for `mse` and `mae`."""
    metrics = _by_target(config.metrics, names, "--metrics")
    return {name: [SHORT.get(metric, metric) for metric in target_metrics] for name, target_metrics in metrics.items()}


def _by_target(text: str, names: Sequence[str], flag: str) -> dict[str, list[str]]:
    """Parse `a,b` for the only target, or `target=a,target=b`."""
    by_target: dict[str, list[str]] = {name: [] for name in names}
    for part in (part.strip() for part in text.split(",")):
        name, equals, value = part.rpartition("=")
        if not part:
            continue
        if not equals:
            if len(names) > 1:
                raise UsageError(f"{flag} {text}: the data has {len(names)} targets; {_form(names)}")
            name = names[0]
        if name not in by_target:
            raise UsageError(f"{flag} {text}: no target {name!r}{suggestion(name, names)}")
        by_target[name].append(value)
    return by_target


def _form(names: Sequence[str]) -> str:
    return "write " + ",".join(f"{name}=LOSS" for name in names)


METRICS = ("r2", "iou")
"""Metrics of hpcdl beside those of Keras."""


def check_functions(loss: str, metrics: Sequence[str], label_smoothing: float) -> None:
    """Raise UsageError if a loss or metric is unknown, or does not go with the other settings of its target."""
    if loss == CROSS_ENTROPY and metrics:
        names = ",".join(metrics)
        raise UsageError(f"--metrics {names}: cross-entropy counts top-1 and top-5 itself; give another --loss too")
    if loss != CROSS_ENTROPY and label_smoothing:
        raise UsageError(f"--label-smoothing goes with --loss cross-entropy, not with {loss!r}")
    for kind, given, own in (("loss", [loss], (CROSS_ENTROPY,)), ("metric", metrics, METRICS)):
        known = _functions_of_keras("losses" if kind == "loss" else "metrics")
        for name in given:
            if known and name not in (*known, *own):
                raise UsageError(f"unknown {kind} {name!r}{suggestion(name, [*known, *own])}")


def _functions_of_keras(module: str) -> list[str]:
    """Return the functions that a module of Keras exports, without importing it; none if they are not found."""
    spec = importlib.util.find_spec("keras")
    with contextlib.suppress(OSError):
        text = (Path((spec and spec.origin) or "").parent / module / "__init__.py").read_text(encoding="utf-8")
        names = re.findall(r" as (\w+)", text)
        return [name for name in names if name.islower() and name not in ("get", "serialize", "deserialize")]
    return []


def check_objective(config: ObjectiveConfig, dataset: Dataset) -> None:
    """Raise UsageError if a loss does not fit its target, or a target has none."""
    if dataset.manifest is not None and dataset.manifest.untargeted:
        raise UsageError(f"{dataset.name} has no targets (--target nothing): `hpcdl infer` alone takes such data")
    losses = losses_of(config, [field.name for field in dataset.targets])
    metrics = metrics_of(config, list(losses))
    for name, loss in losses.items():
        check_functions(loss, metrics[name], config.label_smoothing)
    for field in dataset.targets:
        if losses[field.name] == CROSS_ENTROPY and not _names_classes(field):
            raise UsageError(
                f"--loss {CROSS_ENTROPY} compares with classes, but the target {field.name} holds {field.dtype} "
                "numbers; give another one, such as --loss mse, or shard with --target-kind class"
            )


def unmeasured_target(config: ObjectiveConfig, dataset: Dataset) -> str:
    """Return why nothing measures the target accuracy, so that a run goes on to its end; empty if something does."""
    if config.target_accuracy is None:
        return ""
    given = f"--target-accuracy {config.target_accuracy:g}"
    if dataset.evaluation_split is None:
        return (
            f"{given}: {dataset.name} has no held-out samples to measure it on; leave it out, or hold some out with "
            "hpcdl shard --split train=0.9,val=0.1"
        )
    losses = losses_of(config, [field.name for field in dataset.targets]).values()
    if CROSS_ENTROPY not in losses:
        return f"{given}: --loss {', '.join(dict.fromkeys(losses))} counts no accuracy; leave it out"
    return ""


def _names_classes(field: Field) -> bool:
    """Return whether a target holds a class, or a class per element (a mask)."""
    return field.kind == "class" or (
        field.kind == "numbers" and not field.dtype.startswith("float") and bool(field.shape)
    )


def shapes_of(fields: Sequence[Field]) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of a sample by field."""
    return {field.name: tuple(field.shape) for field in fields}


_MOST = 8
"""Most names in a message."""


def fields_as_trained(given: Dataset, trained: Dataset, *, targets: bool = True) -> tuple[Dataset, list[str]]:
    """Return `given` with the scaling and padding of `trained`, matched by field name, and messages about it.

    Without `targets` nothing depends on the classes of `given`, which may be others.
    Raises UsageError if a field's classes or words have other numbers than the model has learned.
    """
    if given.pictures:
        return given, []  # their classes are matched by name: see classes_as_trained
    missing = [field.name for field in trained.inputs if field.name not in {field.name for field in given.inputs}]
    if missing and not trained.pictures:
        raise UsageError(
            f"{given.name} has no input {missing[0]!r}, which the model was trained on ({trained.name}); it has "
            f"{listed([field.name for field in given.inputs], _MOST)}: shard it with --input PATH={missing[0]}"
        )
    fields: list[Field] = []
    messages: list[str] = []
    by_name = {field.name: field for field in trained.fields}
    for field in given.fields:
        learnt = by_name.get(field.name, field)
        if targets or field.role == "input":
            _check_names(given, trained, field.name, field.class_names, learnt.class_names)
        messages += _compare_columns(given, trained, field, learnt)
        if field.categories != learnt.categories:
            raise UsageError(
                f"{given.name}: the words of {field.name!r} have other numbers than in {trained.name}, which the model "
                f"was trained on; shard it again with --categories-of {trained.folder or trained.name}"
            )
        if (field.normalise, field.statistics) != (learnt.normalise, learnt.statistics):
            how = "is not scaled" if learnt.normalise == "none" else f"is scaled by the statistics of {trained.name}"
            messages.append(f"{field.name!r} {how}, as in training")
        as_trained = _read_as(field, learnt)
        if as_trained.shape != field.shape:
            messages.append(f"{field.name!r} is padded from {field.shape[0]} to {learnt.shape[0]}, as in training")
        fields.append(as_trained)
    return dataclasses.replace(given, fields=tuple(fields)), messages


def _compare_columns(given: Dataset, trained: Dataset, field: Field, learnt: Field) -> list[str]:
    """Raise UsageError if a field is made of other table columns than in training; a message if that is not known."""
    pairs = itertools.zip_longest(field.columns, learnt.columns, fillvalue="none")
    differing = ((number, new, other) for number, (new, other) in enumerate(pairs, 1) if new != other)
    number, new, other = next(differing, (0, "", ""))
    if not number:
        return []
    if not field.columns or not learnt.columns:
        unnamed = given if learnt.columns else trained
        return [f"{unnamed.name} does not name the columns of {field.name!r}: their order is not checked"]
    raise UsageError(
        f"{given.name}: column {number} of {field.name!r} is {new}, and was {other} in {trained.name}, which the model "
        "was trained on; shard a table with the same columns in the same order"
    )


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


def _read_as(field: Field, learnt: Field) -> Field:
    """Return `field` with the scaling of `learnt`, and with its length if samples of varying length are padded."""
    both_vary = field.variable and learnt.variable and tuple(field.shape[1:]) == tuple(learnt.shape[1:])
    # longer samples keep their length: the model's own check refuses them, since cutting would lose data
    shape = learnt.shape if both_vary and field.shape[0] < learnt.shape[0] else field.shape
    return dataclasses.replace(field, shape=shape, normalise=learnt.normalise, statistics=learnt.statistics)


def _check_names(given: Dataset, trained: Dataset, field: str, names: Sequence[str], learnt: Sequence[str]) -> None:
    if names and learnt and list(names) != list(learnt[: len(names)]):
        raise UsageError(
            f"{given.name}: the classes of {field!r} are {listed(names, _MOST)}, those that the model was trained on "
            f"({trained.name}) {listed(learnt, _MOST)}; shard it with the same classes in the same order"
        )


def description_of(dataset: Dataset) -> str:
    """Return what a run keeps of its data for `data_trained_on`, as JSON: classes, fields and scaling, no shards."""
    if dataset.manifest is None:
        return ""
    # Shards are most of a manifest, and a run's own description reads no sample.
    splits = {name: dataclasses.replace(entry, shards=()) for name, entry in dataset.manifest.splits.items()}
    manifest = dataclasses.replace(dataset.manifest, splits=splits)
    return json.dumps({"checksum": dataset.checksum, "manifest": document_of(manifest)}, indent=1) + "\n"


def _described(run_dir: Path, checksum: str) -> Dataset | None:
    """Return the data as the run has described them; None without such a file, as in earlier versions."""
    path = run_dir / DATA_FILE
    with contextlib.suppress(HpcdlError, OSError, KeyError, TypeError):
        document = read_json(path)
        if document["checksum"] == checksum:
            return described_by(manifest_in(document["manifest"], path)[0], checksum)
    return None


def data_trained_on(run_dir: Path, config: TrainConfig) -> Dataset | None:
    """Return the data that the run was trained on, known by their checksum; None if nothing is known of them.

    The name may be relative to the folder in which the run began: one of those above `run_dir`, or the current one.
    If they are nowhere, the run itself describes them, without a sample that can be read.
    """
    name, wanted = config.data.data, read_record(run_dir).data_checksum
    above = [] if name.startswith(PREFIX) else [str(folder / name) for folder in run_dir.absolute().parents]
    for candidate in dict.fromkeys([name, *above]):
        with contextlib.suppress(HpcdlError):
            dataset = open_dataset(candidate, seed=config.run.seed)
            if dataset.checksum == wanted:
                return dataset
    return _described(run_dir, wanted)


def read_as_trained(
    run_dir: Path, config: TrainConfig, data: str, *, verified: bool = True, targets: bool = True
) -> tuple[Dataset, Array | None, list[str]]:
    """Return `data` as the run's model must read it, the model's number of each of its classes, and messages about it.

    `verified`: data are checked against their checksums when read. `targets`: they are needed, and must fit the model.
    """
    dataset = open_dataset(data, seed=config.run.seed, verified=verified)
    if dataset.checksum == read_record(run_dir).data_checksum:
        return dataset, None, []
    trained = data_trained_on(run_dir, config)
    if trained is None:
        unknown = (
            f"warning: the data that the run was trained on, {config.data.data}, cannot be read: "
            f"whether {data} numbers its classes and scales its numbers as that did is not known, so results may "
            "be wrong"
        )
        return dataset, None, [unknown]
    dataset, remarks = fields_as_trained(dataset, trained, targets=targets)
    if not targets:
        return dataset, None, remarks
    numbers = classes_as_trained(dataset, trained)
    if dataset.pictures and bool(dataset.class_names) != bool(trained.class_names):
        unnamed = trained if dataset.class_names else dataset
        remarks.append(f"{unnamed.name} does not name its classes: their numbers are taken as those of the model")
    if numbers is not None:
        remarks.append(f"classes have the numbers of {trained.name}, by their names")
    return dataset, numbers, remarks

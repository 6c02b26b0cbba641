"""Finished (or stopped) runs: their model back in memory, evaluated or exported."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hpcdl.checkpoint import folders as checkpoints
from hpcdl.checkpoint import state
from hpcdl.comm.threads.communicator import alone
from hpcdl.config.schema import TrainConfig
from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.records.run_record import read_record
from hpcdl.core.storage.disk import make_output_folder
from hpcdl.data.format.dataset import Dataset, open_dataset
from hpcdl.data.read.pipeline import evaluation_batches
from hpcdl.models.emulated import LAYERS
from hpcdl.models.saved import load_saved
from hpcdl.rank.worker import build_model, save_model
from hpcdl.run import rundir
from hpcdl.run.outputs import check_objective
from hpcdl.run.rundir import MODEL_FILE
from hpcdl.run.trained_data import read_as_trained
from hpcdl.step.evaluate import Evaluation, Evaluator
from hpcdl.step.objective import objective_of
from hpcdl.step.preprocess import model_shapes, preprocessed


def load_run(run_dir: Path, given: str | None = None) -> tuple[keras.Model, list[str]]:
    """The run's model: that of its end, else that of its newest checkpoint; and what to say about it.

    `given`: data that the user has named; they may be those of the run, found under another path.
    """
    path = run_dir / MODEL_FILE
    if path.is_file():
        try:
            return load_saved(path, LAYERS), []
        except ValueError as error:
            raise CorruptError(f"{path} cannot be loaded: {error}") from error
    resolved, _ = rundir.read(run_dir)
    warnings: list[str] = []
    step = checkpoints.newest_valid(run_dir, warnings)
    if step is None:
        raise rundir.without_model(run_dir)
    dataset = preprocessed(_data_of(run_dir, resolved.config, given), resolved.config.data)
    model = build_model(resolved.config, dataset)
    shared, _ = checkpoints.read_shared(run_dir, step)
    state.assign(model.weights, shared, "weights")
    return model, [*warnings, f"the run is not finished: this is its checkpoint after step {step}"]


def _data_of(run_dir: Path, config: TrainConfig, given: str | None) -> Dataset:
    """What the run was trained on: `given` if it is the same, else what its settings name; UsageError where none is."""
    if given is not None:
        dataset = open_dataset(given, seed=config.run.seed)
        if dataset.checksum == read_record(run_dir).data_checksum:
            return dataset
    try:
        return open_dataset(config.data.data, seed=config.run.seed)
    except UsageError as error:
        raise UsageError(
            f"{run_dir} is not finished, and its checkpoint needs the data that it was trained on; type this in the "
            f"folder in which the run began: {error}"
        ) from error


def evaluate_run(run_dir: Path, data: str, split_name: str | None) -> tuple[Evaluation, str, list[str]]:
    """Loss and metrics of a run's model on `data`, the split that was used, and what to say about it."""
    resolved, _ = rundir.read(run_dir)
    dataset, numbers, remarks = read_as_trained(run_dir, resolved.config, data)
    dataset = preprocessed(dataset, resolved.config.data)
    name = split_name or next(
        (name for name in ("test", "val", "train") if name in dataset.splits), next(iter(dataset.splits))
    )
    if name not in dataset.splits:
        raise UsageError(f"--split {name}: {data} has {', '.join(dataset.splits)}")
    model, model_warnings = load_run(run_dir, data)
    if len(dataset.inputs) < 2:
        taken, given = tuple(model.input_shape[1:]), model_shapes(dataset)[0]
        if taken != given:
            raise UsageError(f"the model of {run_dir} takes samples of {taken}, {data} has {given}")
    config = dataclasses.replace(resolved.config.objective, label_smoothing=0.0)
    check_objective(config, dataset)
    evaluate = Evaluator(model, objective_of(config, dataset.targets))
    batches: Iterable[Any] = evaluation_batches(
        dataset, dataset.splits[name], batch_size=resolved.config.data.batch_size
    )
    if numbers is not None:
        batches = ((inputs, tf.gather(numbers, labels)) for inputs, labels in batches)
    return evaluate(batches, alone()), name, [*remarks, *model_warnings]


def export_run(run_dir: Path, form: str, target: Path) -> tuple[Path, list[str]]:
    """Write a run's model as `keras` (target/model.keras) or `savedmodel` (for TensorFlow Serving)."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists; choose another folder")
    model, model_warnings = load_run(run_dir)
    writers: dict[str, Any] = {"keras": _write_keras, "savedmodel": _write_savedmodel}
    made = make_output_folder(target, "")
    try:
        return writers[form](model, target), model_warnings
    except BaseException:  # half a model would be in the way of the next try
        for folder in made:
            folder.remove(if_empty=folder.path != target)
        raise


def _write_keras(model: keras.Model, target: Path) -> Path:
    save_model(model, target / MODEL_FILE)
    return target / MODEL_FILE


def _write_savedmodel(model: keras.Model, target: Path) -> Path:
    model.export(target, verbose=False)
    return target

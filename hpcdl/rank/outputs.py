"""Trained models loaded again: to evaluate them, export them, or compute outputs from batches read as in the run."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from hpcdl.checkpoint import folders as checkpoints
from hpcdl.checkpoint import state
from hpcdl.comm.threads import alone
from hpcdl.config.schema import TrainConfig
from hpcdl.core.errors import NO_PLACE, CorruptError, HpcdlError, UsageError, cause
from hpcdl.core.paths import typed
from hpcdl.core.records.run_record import FINISHED, read_record
from hpcdl.core.storage.disk import make_output_folder
from hpcdl.core.storage.lock import FILE_NAME as LOCK_NAME
from hpcdl.core.storage.lock import writing
from hpcdl.data.format.dataset import Dataset, Split, open_dataset
from hpcdl.data.format.manifest import Field, is_name
from hpcdl.data.read.pipeline import evaluation_batches
from hpcdl.data.show.copies import num_trained_on
from hpcdl.data.write.outputs import SAMPLE
from hpcdl.models.emulated import LAYERS
from hpcdl.models.load import user_function
from hpcdl.models.saved import OwnCode, check_saved, load_saved
from hpcdl.models.table import parse_spec
from hpcdl.rank.ranges import first_inputs, other_ranges
from hpcdl.rank.worker import build_model, save_model
from hpcdl.run import rundir
from hpcdl.run.inference import InferencePlan
from hpcdl.run.rundir import MODEL_FILE
from hpcdl.run.trained_data import check_objective, data_trained_on, read_as_trained
from hpcdl.step.evaluate import Evaluation, Evaluator
from hpcdl.step.objective import objective_of
from hpcdl.step.preprocess import fed, model_shapes, preprocessed
from hpcdl.step.step import as_model_input
from hpcdl.supervision.control import digest_of

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


_ONLY = "output"
"""The field name of a model's only output."""


class Predictor:
    """The model of an inference, and its inputs and outputs.

    `warnings` also go into the record; `notes` are only logged. `digest` covers the weights and layers. `fields`, the
    outputs, are known once the first batch is computed.
    """

    def __init__(self, plan: InferencePlan) -> None:
        self.plan = plan
        self._model, self.warnings = _loaded(plan)
        self.dataset = preprocessed(plan.dataset, plan.trained.data) if plan.trained else plan.dataset
        self.notes = [line for line in [fed(self.dataset).removesuffix("; --scale chooses")] if line]
        _check_input(self._model, self.dataset, plan.model)
        self.digest = _digest(self._model)
        self.fields: tuple[Field, ...] = ()
        self._call: Callable[[Any], Any] = _never_called

    def first_batch(self, *, asks: bool) -> float:
        """Compute the first batch of the first split to set `fields`. Return its seconds, including compilation.

        `asks`: whether this rank compares the range of the inputs with that of the training data.
        """
        split = self.plan.splits[0]
        inputs = first_inputs(self.dataset, split, self.plan.batch_size)
        if self.plan.trained and asks:
            trained = _other_data(self.plan.model, self.plan.trained, self.dataset)
            self.warnings += other_ranges(trained, self.plan.trained, self.dataset, inputs) if trained else []
        began = time.perf_counter()
        self._call = _graph_of(self._model, inputs)
        try:
            answer = self._call(inputs)
        # Too little memory says nothing about whether model and data fit.
        except (HpcdlError, tf.errors.ResourceExhaustedError):
            raise
        except Exception as error:  # the layers of a user's own model may raise anything
            raise UsageError(
                f"the model of {self.plan.model} does not take {self.dataset.name}: {cause(error)}"
            ) from error
        arrays = self._named(answer)
        seconds = time.perf_counter() - began
        count = tf.nest.flatten(inputs)[0].shape[0]
        for name, array in arrays.items():
            if array.ndim == 0 or len(array) != count:
                raise UsageError(
                    f"the model of {self.plan.model} gives {name} of shape {list(array.shape)} for {count} samples; "
                    "only outputs with one row for each sample can be written"
                )
        self.fields = tuple(
            Field(name=name, role="input", dtype=array.dtype.name, shape=array.shape[1:])
            for name, array in arrays.items()
        )
        return seconds

    def outputs(self, inputs: Any) -> dict[str, Array]:
        """Return a batch's outputs by field, each (samples, *shape). Raises UsageError if the shape changes."""
        arrays = self._named(self._call(inputs))
        for expected in self.fields:
            if arrays[expected.name].shape[1:] != tuple(expected.shape):
                raise UsageError(
                    f"the model of {self.plan.model} gives {expected.name} of shape "
                    f"{list(arrays[expected.name].shape[1:])}, and of {list(expected.shape)} for the first batch; only "
                    "outputs of one shape can be written"
                )
        return arrays

    def batches(self, split: Split, firsts: Sequence[int]) -> Generator[Any]:
        """Yield the inputs of the batches of `split` that begin with the samples `firsts`, in ascending order."""
        batches = evaluation_batches(self.dataset, split, batch_size=self.plan.batch_size, firsts=firsts)
        try:
            for inputs, _ in batches:
                yield inputs
        finally:
            batches.close()

    def _named(self, made: Any) -> dict[str, Array]:
        if isinstance(made, Mapping):
            return _by_name(list(made), list(made.values()))
        if isinstance(made, list | tuple):
            return _by_name(getattr(self._model, "output_names", []), list(made))
        return _by_name([_ONLY], [made])


def _never_called(inputs: Any) -> Any:
    raise AssertionError("the first batch says what the graph takes")


def _graph_of(model: keras.Model, inputs: Any) -> Callable[[Any], Any]:
    """Return the model as a graph for any number of samples, so that the shorter last batch needs no second graph."""
    spec = tf.nest.map_structure(lambda tensor: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype), inputs)

    @tf.function(autograph=False, input_signature=[spec])
    def call(inputs: Any) -> Any:
        return model(as_model_input(inputs), training=False)

    graph: Callable[[Any], Any] = call
    return graph


def _by_name(names: Sequence[Any], tensors: Sequence[Any]) -> dict[str, Array]:
    """Return the outputs as arrays, under the model's own names if they are valid in shards, else numbered."""
    usable = len(set(names)) == len(tensors) and all(
        isinstance(name, str) and is_name(name) and name != SAMPLE for name in names
    )
    chosen = names if usable else [f"{_ONLY}_{number}" for number in range(len(tensors))]
    return {name: _as_array(name, tensor) for name, tensor in zip(chosen, tensors, strict=True)}


def _as_array(name: str, tensor: Any) -> Array:
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype == tf.bfloat16:
        tensor = tf.cast(tensor, tf.float32)  # exact conversion: HDF5 has no bfloat16
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool):
        raise UsageError(f"the model's output {name} holds {tensor.dtype.name}; only numbers can be written")
    array: Array = tensor.numpy()
    return array


def _loaded(plan: InferencePlan) -> tuple[keras.Model, list[str]]:
    if plan.trained is not None:
        return load_run(plan.model, plan.config.data.data)
    try:
        return load_saved(plan.model, LAYERS), []
    except ValueError as error:
        remedy = "; give the directory of the run that trained it" if isinstance(error, OwnCode) else ""
        raise UsageError(f"{plan.model} cannot be loaded: {error}{remedy}") from error


def _check_input(model: keras.Model, dataset: Dataset, path: Path) -> None:
    """Raise UsageError if a model with one input declares a sample shape other than the dataset's.

    Classes of the user's own declare none.
    """
    model_shape = getattr(model, "input_shape", None)
    if len(dataset.inputs) > 1 or not isinstance(model_shape, tuple):
        return
    data_shape = model_shapes(dataset)[0]
    fits = len(model_shape) == len(data_shape) + 1 and all(
        side is None or side == data_side for side, data_side in zip(model_shape[1:], data_shape, strict=True)
    )
    if not fits:
        raise UsageError(f"the model of {path} takes samples of {model_shape[1:]}, {dataset.name} has {data_shape}")


def _digest(model: keras.Model) -> str:
    """Return a digest of the model: its layers' settings, if they can be serialized, and its weights."""
    try:
        layers = model.to_json()
    except (NotImplementedError, TypeError, ValueError):  # a class of the user's own without get_config
        layers = type(model).__name__
    digest = hashlib.blake2b(layers.encode(), digest_size=8)
    for variable in model.weights:
        digest.update(digest_of(variable).encode())
    return digest.hexdigest()


def load_run(run_dir: Path, given: str | None = None) -> tuple[keras.Model, list[str]]:
    """Load the run's model: the final one, else that of its newest checkpoint. Return it with warnings.

    `given`: data that the user has named; they may be those of the run, found under another path.
    """
    path = run_dir / MODEL_FILE
    if path.is_file():
        try:
            return load_saved(path, LAYERS), [*_changed(run_dir, model=False), *_earlier_model(run_dir)]
        except OwnCode as error:
            model = _with_own_code(run_dir, path, given, error)
            return model, [*_changed(run_dir, model=True), *_earlier_model(run_dir)]
        except ValueError as error:
            raise CorruptError(f"{path} cannot be loaded: {error}") from error
    resolved, _ = rundir.read(run_dir)
    warnings = _changed(run_dir, model=True)
    step = checkpoints.newest_valid(run_dir, warnings)
    if step is None:
        raise rundir.without_model(run_dir)
    model = _built(run_dir, resolved.config, given)
    shared, _ = checkpoints.read_shared(run_dir, step)
    state.assign(model.weights, shared, "weights")
    return model, [*warnings, f"{_lack(run_dir)}: this is its checkpoint after step {step}"]


def _changed(run_dir: Path, *, model: bool) -> list[str]:
    """Return a warning for each file with preprocessing, or the `model`, that has changed since the run began."""
    with contextlib.suppress(HpcdlError):  # a damaged run.toml: a whole model needs none
        return rundir.changed_code(run_dir, rundir.read(run_dir)[0].config, model=model)
    return []


def _earlier_model(run_dir: Path) -> list[str]:
    """Return a warning if a run continues beyond the end at which its model was written."""
    with contextlib.suppress(HpcdlError):  # a damaged record: a whole model needs none
        record = read_record(run_dir)
        if record.status != FINISHED:
            return [
                f"the run is not finished ({record.status}): its {MODEL_FILE} may be that of an earlier end; "
                f"to finish it: {typed('train', '--resume', '--run-dir', run_dir)}"
            ]
    return []


def _with_own_code(run_dir: Path, path: Path, given: str | None, refused: OwnCode) -> keras.Model:
    """Return a run's final model whose layers are the user's own: only the file that made it has their code.

    Raises CorruptError if the run's model is a network of the table, or if the file makes another model now.
    """
    config = rundir.read(run_dir)[0].config
    function = parse_spec(config.model.model)
    if isinstance(function, str):
        raise CorruptError(f"{path} cannot be loaded: {refused}") from refused
    try:
        user_function(function)  # runs the file, which may register its classes
    except UsageError as error:
        raise UsageError(
            f"{path} has layers that only {function} knows; type this in the folder in which the run began: {error}"
        ) from error
    try:
        with contextlib.suppress(OwnCode):
            model = load_saved(path, LAYERS)
            if getattr(model, "inputs", None):  # a class of the user's own is made anew: it has not been called yet
                return model
        model = _built(run_dir, config, given)
        check_saved(path, code=False)
        model.load_weights(path)
    except ValueError as error:
        raise CorruptError(
            f"the weights of {path} do not fit the model that {config.model.model} makes now: {cause(error)}"
        ) from error
    return model


def _built(run_dir: Path, config: TrainConfig, given: str | None) -> keras.Model:
    """Return the run's model with fresh weights, made for the data that it was trained on."""
    return build_model(config, preprocessed(_data_of(run_dir, config, given), config.data))


def _lack(run_dir: Path) -> str:
    """Return why a checkpoint has to stand in for the final model."""
    try:
        finished = read_record(run_dir).status == FINISHED
    except HpcdlError:  # a run without a record has not finished
        finished = False
    return f"the run has finished, but has no file {MODEL_FILE}" if finished else "the run is not finished"


def _data_of(run_dir: Path, config: TrainConfig, given: str | None) -> Dataset:
    """Return the run's dataset: `given` if it is the same, else the configured one. Raises UsageError if missing."""
    if given is not None:
        dataset = open_dataset(given, seed=config.run.seed)
        if dataset.checksum == read_record(run_dir).data_checksum:
            return dataset
    learnt = data_trained_on(run_dir, config)
    if learnt is not None:
        return learnt
    try:
        return open_dataset(config.data.data, seed=config.run.seed)
    except UsageError as error:
        raise UsageError(
            f"{run_dir}: its model is made for the data that it was trained on, and they are not found; type this in "
            f"the folder in which the run began: {error}"
        ) from error


def evaluate_run(run_dir: Path, data: str, split_name: str | None) -> tuple[Evaluation, str, list[str]]:
    """Return loss and metrics of a run's model on `data`, the split that was used, and remarks."""
    resolved, _ = rundir.read(run_dir)
    dataset, numbers, remarks = read_as_trained(run_dir, resolved.config, data)
    dataset = preprocessed(dataset, resolved.config.data)
    name = split_name or next(
        (name for name in ("test", "val", "train") if name in dataset.splits), next(iter(dataset.splits))
    )
    if name not in dataset.splits:
        raise UsageError(f"--split {name}: {data} has {', '.join(dataset.splits)}")
    trained = _other_data(run_dir, resolved.config, dataset)
    remarks += _trained_on(run_dir, resolved.config, trained, dataset, name)
    model, model_warnings = load_run(run_dir, data)
    _check_input(model, dataset, run_dir)
    config = dataclasses.replace(resolved.config.objective, label_smoothing=0.0)
    check_objective(config, dataset)
    evaluate = Evaluator(model, objective_of(config, dataset.targets))
    split, batch_size = dataset.splits[name], resolved.config.data.batch_size
    try:
        if trained is not None:
            inputs = first_inputs(dataset, split, batch_size)
            model_warnings += other_ranges(trained, resolved.config, dataset, inputs)
        batches: Iterable[Any] = evaluation_batches(dataset, split, batch_size=batch_size)
        if numbers is not None:
            batches = ((inputs, tf.gather(numbers, labels)) for inputs, labels in batches)
        return evaluate(batches, alone()), name, [*remarks, *(f"warning: {text}" for text in model_warnings)]
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        raise UsageError(f"the model of {run_dir} does not take {data}: {cause(error)}") from error


def _other_data(run_dir: Path, config: TrainConfig, given: Dataset) -> Dataset | None:
    """Return the data that the run was trained on; None if they are `given`, or not known."""
    return None if given.checksum == read_record(run_dir).data_checksum else data_trained_on(run_dir, config)


def _trained_on(run_dir: Path, config: TrainConfig, trained: Dataset | None, given: Dataset, split: str) -> list[str]:
    """Return a warning if samples of a split of `given` are among those of `trained`, that the model was trained on."""
    if given.checksum == read_record(run_dir).data_checksum:
        if split != given.train_split.name:
            return []
        return [f"warning: the model was trained on {split} of {given.name}: this says nothing about new samples"]
    if trained is None:  # read_as_trained has said so
        return []
    if trained.folder is None and trained.synthetic is None:
        return [
            f"warning: the data that the run was trained on, {config.data.data}, are not there: whether samples of "
            f"{split} are among them is not known"
        ]
    count = num_trained_on(trained, given, given.splits[split])
    if not count:
        return []
    return [
        f"warning: {count} of {given.splits[split].num_samples} samples of {split} have the same inputs as samples "
        "that the model was trained on: the result is too good for new ones"
    ]


def export_run(run_dir: Path, form: str, target: Path) -> tuple[Path, list[str]]:
    """Write a run's model as `keras` (target/model.keras) or `savedmodel` (for TensorFlow Serving)."""
    _check_unused(target)
    model, model_warnings = load_run(run_dir)
    if form == "keras" and _has_own_code(run_dir / MODEL_FILE):
        source = rundir.read(run_dir)[0].config.model.model.rpartition(":")[0]
        model_warnings.append(
            f"the file names code of your own; import {source} before you load it, and give custom_objects= "
            "for classes that are not registered"
        )
    writers: dict[str, Any] = {"keras": _write_keras, "savedmodel": _write_savedmodel}
    new_folders = make_output_folder(target, "")
    try:
        with writing(target):
            _check_unused(target)  # again: another export may have ended meanwhile
            return writers[form](model, target), [f"warning: {text}" for text in model_warnings]
    except BaseException:  # half a model would block the next try
        for folder in new_folders:
            folder.remove(if_empty=folder.path != target)
        raise


def _has_own_code(path: Path) -> bool:
    """Return whether a saved model names code that is not Keras's; False if there is no such file."""
    try:
        check_saved(path, LAYERS)
    except OwnCode:
        return True
    except ValueError:  # there is none: the model is that of a checkpoint
        return False
    return False


def _check_unused(target: Path) -> None:
    if target.exists() and (not target.is_dir() or {path.name for path in target.iterdir()} - {LOCK_NAME}):
        raise UsageError(f"{target} exists; choose another folder")


def _write_keras(model: keras.Model, target: Path) -> Path:
    save_model(model, target / MODEL_FILE)
    return target / MODEL_FILE


def _write_savedmodel(model: keras.Model, target: Path) -> Path:
    try:
        model.export(target, verbose=False)
    except tf.errors.OpError as error:  # TensorFlow's own files: the system's reason stands in the text alone
        for number in NO_PLACE:
            if os.strerror(number) in error.message:
                raise OSError(number, os.strerror(number), str(target)) from error
        raise
    return target

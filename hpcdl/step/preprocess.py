"""Processing of batches on their way to the model: random augmentation, and a user-defined function."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hpcdl.config.schema import DataConfig
from hpcdl.core.errors import UsageError
from hpcdl.core.protocols import Communicator
from hpcdl.data.format.dataset import Dataset
from hpcdl.data.read.pipeline import Augmentation, batch_spec
from hpcdl.models.load import ASKED, call, kind_of, user_function
from hpcdl.models.table import UserFunction, parse_function
from hpcdl.run.trained_data import shapes_of

Shape = tuple[int, ...]


def augmentation_of(config: DataConfig) -> Augmentation:
    """Return the random augmentation in a run's settings."""
    return Augmentation(flip=config.flip, crop_padding=config.crop_padding, min_area=config.random_resized_crop)


def preprocessed(dataset: Dataset, config: DataConfig) -> Dataset:
    """Return `dataset` with the preprocessing in `config`: scaling, and the user's function, whose file is executed.

    Raises UsageError for an invalid function.

    The function gets inputs and targets, and by name also `training` and `seed`, an int64 tensor of two numbers for
    tf.random.stateless_*, unique to each worker and step. It is traced without AutoGraph, so `if` cannot test a tensor.
    """
    dataset = replace(dataset, scale=config.scale)
    if not config.preprocess:
        return dataset
    builder = parse_function(config.preprocess, "preprocess")
    function = user_function(builder)

    def apply(inputs: Any, targets: Any, *, training: bool, seed: Any) -> tuple[Any, Any]:
        arguments = {"inputs": inputs, "targets": targets, "training": training, "seed": seed}
        return _checked(builder, call(builder, function, arguments), inputs, targets)

    return replace(dataset, preprocess=apply)


def doubts(dataset: Dataset, config: DataConfig, workers: Communicator) -> list[str]:
    """Return a line if the user's function holds other numbers at each trace, each load, or on another rank.

    What NumPy draws inside it is drawn once, and then a constant of the graph. Collective.
    """
    if not config.preprocess:
        return []
    loaded, traced, loaded_again = map(_constants, (dataset, dataset, preprocessed(dataset, config)))
    rows = workers.allgather_json([loaded, traced, loaded_again])
    if any(loaded != traced for loaded, traced, _ in rows):
        return [
            f"preprocess {config.preprocess!r} draws random numbers once, and all batches get the same, as with "
            "numpy.random inside it; draw by tf.random.stateless_uniform or _normal with the argument seed"
        ]
    if len({digest for row in rows for digest in row}) > 1:
        return [
            f"preprocess {config.preprocess!r} holds other numbers each time its file is loaded: on each rank, and in "
            "hpcdl evaluate; give random generators there a seed, as numpy.random.default_rng(0)"
        ]
    return []


def _constants(dataset: Dataset) -> str:
    """Return a digest of the constants of the user's function; their names and order may differ."""
    inputs, targets = batch_spec(replace(dataset, preprocess=None, scale="0..1"))

    def apply(inputs: Any, targets: Any, seed: Any) -> Any:
        assert dataset.preprocess is not None
        return dataset.preprocess(inputs, targets, training=True, seed=seed)

    traced = tf.function(apply, autograph=False).get_concrete_function(inputs, targets, tf.TensorSpec((2,), tf.int64))
    graph = traced.graph.as_graph_def()
    nodes = itertools.chain(graph.node, *(function.node_def for function in graph.library.function))
    values = [node.attr["value"].tensor.SerializeToString(deterministic=True) for node in nodes if node.op == "Const"]
    # Large tensors of the file are inputs of the graph; variables and tables, as of Keras's layers, change by design.
    held = (value for value in traced.captured_inputs if value.dtype not in (tf.resource, tf.variant))
    values += [tf.io.serialize_tensor(value).numpy() for value in held]
    return hashlib.sha256(b"".join(sorted(hashlib.sha256(value).digest() for value in values))).hexdigest()


def _checked(builder: UserFunction, made: Any, inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Return the function's result as tensors. Raises UsageError if a model could not be trained on it."""

    def refused(text: str) -> UsageError:
        return UsageError(f"preprocess {str(builder)!r} {text}; {ASKED['preprocess']}")

    if not isinstance(made, tuple | list) or len(made) != 2:
        raise refused(f"returned {kind_of(made)}, not inputs and targets")
    try:
        new_inputs, new_targets = (tf.nest.map_structure(tf.convert_to_tensor, part) for part in made)
    except (TypeError, ValueError) as error:
        raise refused(f"returned what is not a tensor ({str(error).splitlines()[0]})") from error
    if isinstance(targets, Mapping) != isinstance(new_targets, Mapping) or (
        isinstance(targets, Mapping) and set(targets) != set(new_targets)
    ):
        raise refused("returned other targets than it was given")
    if not isinstance(targets, Mapping) and targets.dtype.is_integer:
        if not new_targets.dtype.is_integer:
            raise refused(f"returned classes as {new_targets.dtype.name}")
        new_targets = tf.cast(new_targets, targets.dtype)
    samples = tf.nest.flatten(targets)[0].shape[0]
    for tensor in tf.nest.flatten((new_inputs, new_targets)):
        if tensor.shape.rank in (None, 0) or None in tensor.shape[1:]:
            raise refused(f"returned a tensor of shape {tensor.shape}: only the number of samples may be open")
        if samples is not None and tensor.shape[0] not in (samples, None):
            raise refused(f"was given {samples} samples and returned {tensor.shape[0]}")
    return new_inputs, new_targets


def fed(dataset: Dataset) -> str:
    """Describe the model's input in a sentence; empty if the user's function makes it."""
    if dataset.preprocess is not None:
        return ""
    described = []
    for field in dataset.inputs:
        shape = "x".join(map(str, field.shape)) or "one number"
        form = "as float32"
        if field.kind == "text":
            form = "as numbers of bytes, 1 to 256"
        elif field.normalise != "none":
            form = f"as float32 by {field.normalise}"
        elif field.dtype == "uint8":
            form = "as float32 from 0 to 1" if dataset.scales(field.shape) else "as float32 from 0 to 255"
        described.append(f"{field.name} ({shape} {field.dtype}) {form}")
    bytes_there = any(
        field.dtype == "uint8" and field.kind != "text" and field.normalise == "none" for field in dataset.inputs
    )
    return f"the model is fed {', '.join(described)}" + ("; --scale chooses" if bytes_there else "")


def model_shapes(dataset: Dataset) -> tuple[Shape | Mapping[str, Shape], Mapping[str, Shape]]:
    """Return the shapes of a sample's inputs as the model gets them (one input: a plain shape), and of targets."""
    if dataset.preprocess is None:
        inputs = dataset.sample_shape if len(dataset.inputs) < 2 else shapes_of(dataset.inputs)
        return inputs, shapes_of(dataset.targets)
    inputs, targets = tf.nest.map_structure(lambda item: tuple(item.shape[1:]), batch_spec(dataset))
    return inputs, targets if isinstance(targets, Mapping) else {item.name: targets for item in dataset.targets}

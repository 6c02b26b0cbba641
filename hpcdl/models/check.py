"""Check that a model can be trained on the data with the requested loss; this module loads Keras.

Problems that would fail less clearly in the first step, or train something else, are refused before it with a remedy.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hpcdl.config.schema import AUXILIARY_WEIGHT, CROSS_ENTROPY
from hpcdl.core.errors import Refusals, UsageError, cause

FROM_PROBABILITIES = (
    "binary_crossentropy", "binary_focal_crossentropy", "categorical_crossentropy", "categorical_focal_crossentropy",
    "sparse_categorical_crossentropy", "kl_divergence", "dice", "tversky",
)  # fmt: skip
"""Keras losses that expect the output of a sigmoid or softmax."""
ONE_OUTPUT_PER_CLASS = (CROSS_ENTROPY, "sparse_categorical_crossentropy")
"""Losses that compare a label, the number of a class, with one output for each class."""
_ONE_OF_ALL = ("categorical_crossentropy", "categorical_focal_crossentropy", "kl_divergence")
"""Losses of probabilities that add up to 1."""
_NUM_PROBES = 4
_LEAST_SCALE = 1 / 16
"""A smaller scale is meant for bytes: 1/255, 1/127.5."""
_PROBES_SPREAD = 0.25
"""Standard deviation of the probes at most places."""
_MOST_LEVEL = 20.0
"""A median of more standard deviations than this is left where bytes were expected: 0 to 1 less 116."""
_PROBABILITY_TOLERANCE = 1e-2
"""Half precision sums a thousand probabilities to one within this."""
_HALF = "mixed_float16"
_BOUNDING = (
    "relu", "relu6", "leaky_relu", "elu", "celu", "selu", "gelu", "silu", "softplus", "exponential", "tanh", "softsign",
    "hard_tanh", "hard_sigmoid",
)  # fmt: skip
"""Activations whose outputs cannot have every size, or hardly: a probability of some class is then out of reach."""
_IGNORED = ("train_step", "compute_loss")
"""Methods that Keras's fit would call."""


Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


def check_model(
    model: keras.Model,
    *,
    spec: str,
    loss: str,
    classes: int | None,
    input_shape: Sequence[int] | Shapes | None,
    output_shapes: Shapes | None = None,
    scaled: bool = False,
    policy: str = "float32",
) -> None:
    """Raise UsageError for all problems of `model`; classes and shape are those of the data, None if unknown.

    With `output_shapes` the data has named targets of these shapes, and `loss` holds one for each, with commas.
    `scaled`: inputs come from 0 to 1. `policy`: Keras's before the model was made; with mixed_float16 goes a
    loss scale.
    """
    shape = input_shape if input_shape is None or isinstance(input_shape, Mapping) else tuple(input_shape)
    losses = loss.split(",") if output_shapes else [loss]
    refusals = Refusals()
    with refusals.gathered():
        _check_own_compile(model, spec)
    with refusals.gathered():
        _check_own_step(model, spec)
    if policy != _HALF:
        with refusals.gathered():
            _check_not_half(model, spec)
    with refusals.gathered():
        _check_trainable(model, spec)
    with refusals.gathered():
        _check_can_be_written(model, spec)
    with refusals.gathered():
        # Raises before the probes below, which a model of other inputs could not take.
        _check_inputs(model, spec, shape, any_type=output_shapes is not None)
        if all(name == CROSS_ENTROPY or hasattr(keras.losses, name) for name in losses):  # the objective refuses others
            with _noted_first_input(model) as received:
                outputs = _probed(model, spec, shape, output_shapes)
            if scaled:
                with refusals.gathered():
                    _check_first_input(received, spec)
            _check_outputs(model, outputs, refusals, spec=spec, losses=losses, classes=classes, shapes=output_shapes)
    refusals.raise_all()


def doubts(model: keras.Model, spec: str, losses: Sequence[str]) -> list[str]:
    """Return a line for each layer that trains, and yet is likely a mistake; call it when weights are loaded."""
    lines = []
    for layer in flat_layers(model):
        if isinstance(layer, keras.layers.Normalization) and (weights := layer.get_weights()):
            mean, variance = weights[:2]  # those that adapt() sets; with mean= and variance= there are none
            if not mean.any() and (variance == 1).all():
                lines.append(
                    f"model {spec!r}: {layer.name!r} was not adapted, so that it changes nothing; call its adapt() in "
                    "the function, or give it mean= and variance="
                )
    last = _last_activation(model)
    if last in _BOUNDING and [*losses] == [CROSS_ENTROPY]:
        lines.append(
            f"model {spec!r} ends with {last}, but --loss {CROSS_ENTROPY} takes outputs of any size (logits); leave "
            "that activation out"
        )
    # The networks of hpcdl say it in their summary.
    if len(losses) == 1 and ":" in spec and (others := _num_outputs(model) - 1) > 0:
        counts = f"adds {AUXILIARY_WEIGHT:g} of its own loss" if losses[0] == CROSS_ENTROPY else "is not trained"
        lines.append(
            f"model {spec!r} gives {others + 1} outputs for one target: the first counts, and each other {counts}"
        )
    return lines


def _num_outputs(model: keras.Model) -> int:
    """Return how many outputs a model gives; 1 if it does not say."""
    if outputs := getattr(model, "outputs", None):
        return len(outputs)
    with contextlib.suppress(Exception):  # a class of the user's: what it was built with, and its call, may be anything
        symbol = keras.KerasTensor(model.get_build_config()["input_shape"])
        return len(keras.tree.flatten(model.compute_output_spec(symbol)))
    return 1


def _check_outputs(
    model: keras.Model,
    outputs: list[np.ndarray[Any, Any]],
    refusals: Refusals,
    *,
    spec: str,
    losses: Sequence[str],
    classes: int | None,
    shapes: Shapes | None,
) -> None:
    """Collect mismatches of the outputs for a few samples with the targets' `shapes`, the classes and the losses."""
    if shapes and len(shapes) > 1:
        for output, name, shape in zip(outputs, losses, shapes.values(), strict=True):
            if name != CROSS_ENTROPY:
                with refusals.gathered():
                    _check_target(output.shape[1:], spec, name, shape)
        return
    (loss,) = losses
    shape = next(iter(shapes.values())) if shapes else ()
    for output in outputs if loss == CROSS_ENTROPY else outputs[:1]:  # other losses take only the main output
        with refusals.gathered():
            if shape and loss == CROSS_ENTROPY:
                _check_numbers(output.shape[1:], spec, shape)
                _check_target(output.shape[1:-1], spec, loss, shape)
            elif shape and loss not in ONE_OUTPUT_PER_CLASS:
                _check_target(output.shape[1:], spec, loss, shape)
            else:
                _check_units(output.shape[1:], spec, loss, classes)
        with refusals.gathered():
            _check_head(model, output, spec, loss)


def _check_trainable(model: keras.Model, spec: str) -> None:
    if not model.trainable_variables:
        raise UsageError(f"model {spec!r} has nothing to train: every layer has trainable=False, or no weights")


@contextlib.contextmanager
def _noted_first_input(model: keras.Model) -> Iterator[list[Any]]:
    """Yield a list that gets the inputs of the model's layers with weights, in the order of their calls."""
    received: list[Any] = []

    def noting(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def call(*given: Any, **named: Any) -> Any:
            received.extend([*given, *named.values()][:1])
            return plain(*given, **named)

        return call

    weighted = [
        layer for layer in flat_layers(model) if layer.weights and not isinstance(layer, keras.layers.Normalization)
    ]
    # By identity: a shared layer is listed twice, and must be wrapped and restored once.
    layers = {id(layer): layer for layer in weighted}.values()
    own_calls = [vars(layer).get("call") for layer in layers]
    for layer in layers:
        layer.call = noting(layer.call)
    try:
        yield received
    finally:
        for layer, calls in zip(layers, own_calls, strict=True):
            del layer.call  # the class's own again
            if calls is not None:
                layer.call = calls


def _check_first_input(received: Sequence[Any], spec: str) -> None:
    """Raise UsageError if the first layer with weights gets next to nothing of samples from 0 to 1.

    Functions such as keras.applications.*.preprocess_input expect bytes, and leave no layer that says so.
    """
    if not received or not keras.ops.is_tensor(received[0]) or len(received[0].shape) < 2:
        return
    values = np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(received[0], "float32")))
    # Over the probes at each place: zeros that pad a picture do not vary, and most places are no padding.
    spread, level = float(np.quantile(values.std(0), 0.9)), float(np.median(np.abs(values)))
    if spread < _LEAST_SCALE * _PROBES_SPREAD or level > _MOST_LEVEL * spread:
        raise UsageError(
            f"model {spec!r} turns its inputs into numbers from {values.min():.4g} to {values.max():.4g}, but they "
            "come scaled already, bytes from 0 to 1; leave its own scaling out, or put keras.layers.Rescaling(255) "
            "before it where a network of keras.applications holds it"
        )


def _check_numbers(shape: Shape, spec: str, wanted: Shape) -> None:
    """Raise UsageError if the output shape is the target shape: targets are then one-hot, or hold several labels."""
    if shape == wanted:
        raise UsageError(
            f"model {spec!r} gives outputs of shape {shape}, as the targets are: --loss {CROSS_ENTROPY} compares with "
            "numbers of classes. For one-hot targets give --loss categorical_crossentropy (outputs with softmax), for "
            "several labels of a sample --loss binary_crossentropy (with sigmoid)"
        )


def _check_target(shape: Shape, spec: str, loss: str, wanted: Shape) -> None:
    """Raise UsageError unless outputs have the shape of the targets, apart from axes of length 1."""
    if [side for side in shape if side != 1] != [side for side in wanted if side != 1]:
        raise UsageError(
            f"model {spec!r} gives outputs of shape {shape}, but --loss {loss} compares them with targets of {wanted}; "
            "end it with as many outputs"
        )


def _check_own_compile(model: keras.Model, spec: str) -> None:
    if not model.compiled:
        return
    optimizer = type(model.optimizer).__name__ if model.optimizer is not None else "its optimizer"
    raise UsageError(
        f"model {spec!r} was compiled in its function ({optimizer}), which training here would ignore; leave out "
        "compile() and give --optimizer, --learning-rate and --loss, or run your own script with hpcdl run"
    )


def _check_own_step(model: keras.Model, spec: str) -> None:
    own = [name for name in _IGNORED if getattr(type(model), name) is not getattr(keras.Model, name)]
    if own:
        raise UsageError(
            f"model {spec!r} has a {own[0]} of its own in its class {type(model).__name__}, which training here would "
            "ignore; leave it out, or run your own script with hpcdl run"
        )


def _check_not_half(model: keras.Model, spec: str) -> None:
    half = next((layer for layer in flat_layers(model) if getattr(layer, "compute_dtype", "") == "float16"), None)
    if half is not None:
        raise UsageError(
            f"model {spec!r}: layer {half.name!r} computes in float16 and nothing scales the loss, so that small "
            f"gradients would be zero; leave its policy out of the function and give --precision {_HALF}"
        )


def _check_can_be_written(model: keras.Model, spec: str) -> None:
    try:
        keras.saving.serialize_keras_object(model)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UsageError(
            f"model {spec!r} could not be written to model.keras at the end: its class {type(model).__name__} takes "
            "arguments that Keras cannot write down; give the class a get_config(), or build it from keras.layers alone"
        ) from error


def _check_inputs(model: keras.Model, spec: str, taken_shape: Shape | Shapes | None, *, any_type: bool) -> None:
    inputs = getattr(model, "inputs", None) or []
    if isinstance(taken_shape, Mapping):
        _check_named_inputs(inputs, spec, taken_shape)
        return
    if len(inputs) > 1 or isinstance(getattr(model, "input_shape", None), dict):
        raise UsageError(
            f"model {spec!r} has {len(inputs)} inputs, but hpcdl gives it one, a batch of images; "
            "make it take one keras.Input, or run your own script with hpcdl run"
        )
    if not inputs:
        return
    model_shape = tuple(inputs[0].shape)[1:]
    if taken_shape is not None and not _fits(taken_shape, model_shape):
        raise UsageError(
            f"model {spec!r} takes samples of {model_shape}, but the data has {taken_shape}; "
            "let its function take input_shape, or make shards with another --image-size"
        )
    if not any_type and not str(inputs[0].dtype).startswith(("float", "bfloat")):
        raise UsageError(
            f"model {spec!r} takes {inputs[0].dtype}, but images come as float32 from 0 to 1; leave out the dtype"
        )


def _check_named_inputs(inputs: Sequence[Any], spec: str, shapes: Shapes) -> None:
    model_shapes = {item.name: tuple(item.shape)[1:] for item in inputs}
    if inputs and model_shapes.keys() != shapes.keys():
        raise UsageError(
            f"model {spec!r} has the inputs {', '.join(model_shapes)}, but the data has {', '.join(shapes)}; "
            "give each keras.Input the name of a field, as name="
        )
    for name, shape in shapes.items() if inputs else ():
        if not _fits(shape, model_shapes[name]):
            raise UsageError(f"model {spec!r} takes {name} of {model_shapes[name]}, but the data has {shape}")


def _fits(sample: tuple[int, ...], taken: tuple[int | None, ...]) -> bool:
    return len(sample) == len(taken) and all(want in (None, have) for have, want in zip(sample, taken, strict=True))


def _probed(
    model: keras.Model, spec: str, input_shape: Shape | Shapes | None, output_shapes: Shapes | None
) -> list[np.ndarray[Any, Any]]:
    """Return the model's outputs for a few random samples, the main output first; empty if no shape is known."""
    shape = input_shape or tuple(getattr(model, "input_shape", (None,)))[1:]
    # The same probes each time: a refusal must not depend on chance.
    random = np.random.default_rng(0)
    if isinstance(shape, Mapping):
        samples: Any = {name: _probes(random, sides) for name, sides in shape.items()}
    elif (not shape and output_shapes is None) or None in shape:
        return []
    else:
        samples = _probes(random, shape)
    try:
        answer = model(samples, training=False)
    except (Exception, SystemExit) as error:  # the user's layers may raise anything
        raise UsageError(
            f"model {spec!r} fails on a batch of samples: {type(error).__name__}: {cause(error)}"
        ) from error
    several = output_shapes if output_shapes is not None and len(output_shapes) > 1 else {}
    if isinstance(answer, Mapping) and several and answer.keys() == several.keys():
        answer = [answer[name] for name in several]
    if isinstance(answer, Mapping):
        names = ", ".join(map(repr, answer))
        raise UsageError(
            f"model {spec!r} gives its outputs by name ({names}); "
            + (
                f"the targets are {', '.join(several)}"
                if several
                else "return one output, or a list with the main one first"
            )
        )
    outputs = [*answer] if isinstance(answer, list | tuple) else [answer]
    if not outputs:
        raise UsageError(f"model {spec!r} gives no output; return one, or a list with the main one first")
    if several and len(outputs) != len(several):
        raise UsageError(f"model {spec!r} gives {len(outputs)} outputs for the targets {', '.join(several)}")
    return [np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(output, "float32"))) for output in outputs]


def _probes(random: np.random.Generator, shape: Shape) -> np.ndarray[Any, Any]:
    """Return a few random samples of a shape, from 0 to 1, dark and bright ones: their means differ too."""
    brightness = np.linspace(0.1, 1.0, _NUM_PROBES, dtype=np.float32).reshape(-1, *[1] * len(shape))
    return brightness * random.random((_NUM_PROBES, *shape), np.float32)


def _check_units(shape: tuple[int, ...], spec: str, loss: str, classes: int | None) -> None:
    if loss in ONE_OUTPUT_PER_CLASS:
        if classes is not None and shape != (classes,):
            raise UsageError(
                f"model {spec!r} gives outputs of shape {shape}, but {classes} classes need ({classes},); "
                "end it with Dense(num_classes), which its function is given"
            )
    elif loss.startswith("categorical"):
        raise UsageError(
            f"--loss {loss} compares with one-hot labels, but labels here are numbers of classes; give "
            f"--loss {CROSS_ENTROPY} (outputs without softmax) or --loss sparse_categorical_crossentropy (with)"
        )
    elif int(np.prod(shape)) != 1:
        raise UsageError(
            f"model {spec!r} gives outputs of shape {shape}, but --loss {loss} compares one number a sample with its "
            f"label; end it with Dense(1), or give --loss {CROSS_ENTROPY}"
        )


def _check_head(model: keras.Model, output: np.ndarray[Any, Any], spec: str, loss: str) -> None:
    last = _last_activation(model)
    if loss == CROSS_ENTROPY and (_sums_to_one(output) or last in ("softmax", "sigmoid")):
        name = last if last in ("softmax", "sigmoid") else "softmax"
        raise UsageError(
            f"model {spec!r} ends with a {name}, but --loss {CROSS_ENTROPY} takes what comes before it (logits); "
            f"leave the {name} out, or give --loss sparse_categorical_crossentropy"
        )
    # The outputs of an unbounded layer for a few samples may be between 0 and 1 by chance.
    unbound = last == "linear" and not _sums_to_one(output)
    if loss in FROM_PROBABILITIES and (unbound or output.min() < 0 or output.max() > 1 + _PROBABILITY_TOLERANCE):
        remedy = f"end it with a softmax, or give --loss {CROSS_ENTROPY}" if loss in ONE_OUTPUT_PER_CLASS else ""
        raise UsageError(
            f"model {spec!r} gives outputs outside 0 to 1, but --loss {loss} takes probabilities; "
            + (remedy or f"end it with activation='{'softmax' if loss in _ONE_OF_ALL else 'sigmoid'}'")
        )


def _sums_to_one(output: np.ndarray[Any, Any]) -> bool:
    if output.ndim != 2 or output.shape[1] < 2:
        return False
    return bool(output.min() >= 0 and np.all(np.abs(output.sum(1) - 1) < _PROBABILITY_TOLERANCE))


def _last_activation(model: keras.Model) -> str:
    """Return the name of the last layer's activation; empty if there is none, or if the last layer is unknown."""
    all_layers = flat_layers(model) if getattr(model, "outputs", None) else ()
    layers = [layer for layer in all_layers if not isinstance(layer, keras.layers.InputLayer)]
    if not layers:
        return ""
    kind = type(layers[-1]).__name__.lower()
    activation: Callable[..., Any] | None = getattr(layers[-1], "activation", None)
    return kind if kind in ("softmax", "relu") else getattr(activation, "__name__", "")


def flat_layers(model: keras.Model) -> Iterator[Any]:
    """Yield the layers of a model, including those of nested models."""
    for layer in getattr(model, "layers", ()):
        if isinstance(layer, keras.Model):
            yield from flat_layers(layer)
        else:
            yield layer

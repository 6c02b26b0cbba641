"""Which operations of Keras a rank replaces by faster kernels in training, and whether the results are the same.

Keras's own function remains as the fallback for cases that the kernel does not support (another type, axis or mask). It
is used for all cases if the two differ on this machine. Models and saved files do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy
import tensorflow as tf

from hpcdl.core.errors import HpcdlError
from hpcdl.step.keras_internals import (
    VARIABLE,
    function_behind,
    is_training,
    layers_in,
    onednn_in_use,
    operations_between,
    passes_training,
    replace_function,
    replacement_of,
)
from hpcdl.step.kernels.operations import (
    attention,
    batch_normalization,
    compiled,
    layer_normalization,
    lstm,
    pointwise_convolution,
)

TOLERANCE = 1e-5
"""Largest allowed difference from Keras, relative to the largest number of its kind: outputs, gradients, statistics."""
_USED = "used"
"""Set on a function in place of Keras's once its kernel has computed something in it."""

Call = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One faster operation.

    `where` is the name of Keras's function in keras_internals. `serves` returns whether a layer may call it. `chosen`
    takes that function's arguments, and returns the faster call or None. `trials` make small test cases. With
    `while_training` the kernel is used in training only, so exported models contain Keras's function. `by_xla`: the
    kernel is compiled by XLA, which an engine of TensorFlow 1 cannot run.
    """

    name: str
    where: str
    serves: Callable[[Any], bool]
    chosen: Callable[..., Call | None]
    trials: Sequence[Callable[[], SmallCase]]
    without_onednn: bool = False
    while_training: bool = False
    by_xla: bool = False


@dataclass(frozen=True, kw_only=True)
class SmallCase:
    """Arguments of a call, the tensors and variables to differentiate by, and the variables that it changes."""

    arguments: Sequence[Any]
    named: Mapping[str, Any] = field(default_factory=dict)
    watched: Sequence[Any]
    state: Sequence[Any] = ()


@dataclass(frozen=True, kw_only=True)
class InForce:
    """The kernels in use in place of Keras's functions, and a warning for each that must not be used.

    `unsure`: those of `names` that no layer of Keras in the model needs; the user's own layers may call them, or not.
    """

    names: tuple[str, ...]
    warnings: tuple[str, ...]
    unsure: tuple[str, ...] = ()

    def line(self) -> str:
        """Return the kernels in a line for the log; empty if there are none."""
        sure = [name for name in self.names if name not in self.unsure]
        own = [f"if your own layers call them: {', '.join(self.unsure)}"] if self.unsure else []
        return f"fast kernels: {'; '.join([*([', '.join(sure)] if sure else []), *own])}" if self.names else ""


def use_fast_kernels(model: keras.Model | None = None, *, on: bool = True, xla: bool = True) -> InForce:
    """Let Keras's layers use the table's kernels in every model of this process; or, with `on` False, stop using them.

    With a `model` only the functions its layers may call are tested and replaced. Graphs that were already traced do
    not change. With a GPU nothing is replaced: Keras's operations suit the GPU libraries. Without `xla` the kernels
    compiled by XLA are excluded.
    """
    off = not on or tf.config.list_physical_devices("GPU")
    kernels = [] if off else [kernel for kernel in TABLE if _is_wanted(kernel, model, xla=xla)]
    names, warnings = [], []
    # Also those that are not wanted: an earlier call may have put them in force.
    for kernel in TABLE:
        plain = function_behind(kernel.where)
        if plain is None:
            warnings += [f"{kernel.name}: no fast kernel for Keras {keras.__version__}"] if kernel in kernels else []
            continue
        problem = _problem(kernel, plain) if kernel in kernels else ""
        if problem:
            warnings.append(f"{kernel.name}: the fast kernel {problem}; Keras's is used")
        elif kernel in kernels:
            names.append(kernel.name)
        replace_function(kernel.where, _replaced(kernel, plain) if kernel.name in names else plain)
    called = _called_in(model) if model is not None else []
    unsure = [
        kernel.name for kernel in TABLE if kernel.name in names and called and not any(map(kernel.serves, called))
    ]
    return InForce(names=tuple(names), warnings=tuple(warnings), unsure=tuple(unsure))


def use_chosen_kernels(model: keras.Model | None, choice: str, *, xla: bool = True) -> InForce:
    """Apply `--fast-kernels`: `auto` (kernels that pass their test), `on` (HpcdlError unless all pass), or `off`.

    `xla`: whether the engine can run operations compiled by XLA.
    """
    in_force = use_fast_kernels(model, on=choice != "off", xla=xla)
    problems = list(in_force.warnings)
    if tf.config.list_physical_devices("GPU"):
        problems.append("there is a GPU, for which Keras's own are best")
    if choice == "on" and problems:
        raise HpcdlError(f"--fast-kernels on: {'; '.join(problems)}; use --fast-kernels auto")
    return in_force


def names_used() -> tuple[str, ...]:
    """Return the names of the kernels in force that a layer has called: they are known only after a step."""
    return tuple(kernel.name for kernel in TABLE if hasattr(replacement_of(kernel.where), _USED))


def _is_wanted(kernel: Kernel, model: keras.Model | None, *, xla: bool) -> bool:
    if (kernel.without_onednn and onednn_in_use()) or (kernel.by_xla and not xla):
        return False
    if model is None:
        return True
    return any(kernel.serves(layer) or _is_own(layer) for layer in _called_in(model))


def _called_in(model: keras.Model) -> list[Any]:
    layers = layers_in(model)
    return [*layers, *operations_between(layers)]


def _is_own(layer: Any) -> bool:
    """Whether a layer's class, or a model's, is the user's own and so may call anything."""
    return not type(layer).__module__.startswith("keras.")


def _problem(kernel: Kernel, plain: Call) -> str:
    """Return why the kernel must not replace `plain` here; empty if it may."""
    if kernel.while_training and not passes_training():
        return f"cannot see in Keras {keras.__version__} whether a layer trains"
    try:
        apart = difference(kernel, plain)
    except tf.errors.OpError as error:  # a build of TensorFlow without this kernel
        return f"fails ({str(error).splitlines()[0]})"
    return "" if apart <= TOLERANCE else f"differs from Keras's by {apart:.1e}"


def difference(kernel: Kernel, plain: Call) -> float:
    """Return the largest relative difference between kernel and Keras's function `plain` on the small test cases."""
    # numpy's maximum propagates NaN; Python's does not.
    return float(numpy.max([_difference(kernel, plain, make()) for make in kernel.trials]))


def _difference(kernel: Kernel, plain: Call, trial: SmallCase) -> float:
    fast = kernel.chosen(*trial.arguments, **trial.named)
    if fast is None:
        return float("inf")
    usual, faster = (_outcome(call, trial) for call in (lambda: plain(*trial.arguments, **trial.named), fast))
    # Outputs that are all zero have no scale of their own.
    scales = [float(numpy.abs(array).max(initial=0.0)) or 1.0 for array in usual]
    apart = [float(numpy.abs(a - b).max(initial=0.0)) for a, b in zip(usual, faster, strict=True)]
    return float(numpy.max(numpy.divide(apart, scales)))


def _replaced(kernel: Kernel, plain: Call) -> Call:
    @functools.wraps(plain)
    def function(*args: Any, **kwargs: Any) -> Any:
        fast = kernel.chosen(*args, **kwargs) if is_training() or not kernel.while_training else None
        if fast is None:
            return plain(*args, **kwargs)
        vars(function)[_USED] = True
        return fast()

    return function


def _outcome(call: Call, trial: SmallCase) -> list[Any]:
    """Return outputs, gradients and changed state of one call, as float64; restores the state."""
    before = [variable.numpy() for variable in trial.state]
    sources = [tensor.value if isinstance(tensor, VARIABLE) else tensor for tensor in trial.watched]
    with tf.GradientTape() as tape:
        tape.watch([tensor for tensor in sources if tf.is_tensor(tensor)])
        outputs = call()
    outputs = tf.nest.flatten(outputs)
    # Neither ones nor the inputs: a normalised layer's gradient of those is pure rounding error.
    upstream = [_made_up(*tensor.shape, seed=1) for tensor in outputs]
    gradients = tape.gradient(outputs, sources, output_gradients=upstream)
    arrays = [*outputs, *gradients, *(variable.numpy() for variable in trial.state)]
    for variable, value in zip(trial.state, before, strict=True):
        variable.assign(value)
    return [numpy.asarray(tensor, numpy.float64) for tensor in arrays]


def _of_a_type(inputs: Any, *types: Any) -> bool:
    return isinstance(inputs, tf.Tensor) and inputs.dtype in types


def _back(result: Any, layer: Any) -> Any:
    return tf.cast(result, layer.compute_dtype)


def _batch_normalization(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Call | None:
    unusual = mask is not None or layer.synchronized or getattr(layer, "renorm", False)
    if training is not True or not layer.trainable or unusual:
        return None  # frozen, or over the moving statistics, over several ranks, or over part of the samples
    if layer.axis not in (-1, len(inputs.shape) - 1) or not _of_a_type(inputs, tf.float32, tf.bfloat16, tf.float16):
        return None
    return lambda: _back(batch_normalization(layer, tf.cast(inputs, tf.float32)), layer)


def _layer_normalization(layer: Any, inputs: Any) -> Call | None:
    axes = layer.axis if isinstance(layer.axis, list | tuple) else [layer.axis]
    if getattr(layer, "rms_scaling", False) or list(axes) not in ([-1], [len(inputs.shape) - 1]):
        return None
    if layer.gamma is None or layer.beta is None or not _of_a_type(inputs, tf.float32, tf.bfloat16, tf.float16):
        return None
    return lambda: _back(layer_normalization(layer, tf.cast(inputs, tf.float32)), layer)


_EXACT_GELU = compiled(lambda x: tf.nn.gelu(x, approximate=False))
_APPROXIMATE_GELU = compiled(lambda x: tf.nn.gelu(x, approximate=True))
_SILU = compiled(lambda x: x * tf.sigmoid(x))
_HARD_SILU = compiled(lambda x: x * tf.nn.relu6(x + 3) / 6)


def _gelu(x: Any, approximate: bool = True) -> Call | None:
    return _activation(_APPROXIMATE_GELU if approximate else _EXACT_GELU, x)


def _activation(kernel: Call, x: Any) -> Call | None:
    if not _of_a_type(x, tf.float32) or x.shape.rank is None or None in x.shape[1:]:
        return None  # compiled per number of elements: images in batches have few, texts of any length many
    return lambda: kernel(x)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    **others: Any,
) -> Call | None:
    if (
        bias is not None
        or any(others.values())
        or not all(_of_a_type(part, tf.float32) for part in (query, key, value))
    ):
        return None
    if len(query.shape) != 4 or query.shape[2:] != key.shape[2:] or None in query.shape[2:]:
        return None  # tensors of another rank, or one key head for several query heads
    factor = query.shape[3] ** -0.5 if scale is None else scale
    return lambda: attention(query, key, value, mask, factor, is_causal=is_causal)


def _pointwise_convolution(layer: Any, inputs: Any, kernel: Any) -> Call | None:
    if not _is_one_by_one(layer) or not _of_a_type(inputs, tf.float32):
        return None
    return lambda: pointwise_convolution(inputs, tf.cast(kernel, tf.float32))


def _recurrent(layer: Any, sequences: Any, initial_state: Any, mask: Any = None, training: Any = False) -> Call | None:
    if training is not True or mask is not None or not _is_plain_lstm(layer):
        return None
    if sequences.shape[1] is None or not _of_a_type(sequences, tf.float32) or layer.compute_dtype != "float32":
        return None
    return lambda: lstm(layer, sequences, initial_state)


def _is_plain_lstm(layer: Any) -> bool:
    if not isinstance(layer, keras.layers.LSTM) or layer.unroll or layer.dropout or layer.recurrent_dropout:
        return False
    functions = (layer.activation, layer.recurrent_activation)
    usual = functions == (keras.activations.tanh, keras.activations.sigmoid)
    return usual and bool(layer.use_bias) and layer.use_cudnn is not True


def _is_one_by_one(layer: Any) -> bool:
    # With a stride of two it would first select every other pixel, which costs more than it gains.
    single = tuple(layer.kernel_size) == tuple(layer.strides) == tuple(layer.dilation_rate) == (1, 1)
    return single and layer.groups == 1 and bool(layer.data_format == "channels_last")


def _is_attention(layer: Any) -> bool:
    kinds = keras.layers.MultiHeadAttention | keras.layers.GroupQueryAttention
    return isinstance(layer, kinds) or _is_operation(layer, "dot product attention")


def _is_operation(layer: Any, name: str) -> bool:
    """Whether `layer` is that function of keras.ops, as a model of symbolic inputs stores it."""
    return type(layer).__name__ == name.title().replace(" ", "")


def _made_up(*shape: int, seed: int = 0) -> Any:
    return tf.constant(numpy.random.default_rng(seed).standard_normal(shape, numpy.float32) * 2 + 1)


def _normalization_trial(kind: Any) -> SmallCase:
    # An explicit name, so that the layer numbers of models built later do not change.
    layer = kind(dtype="float32", name="trial_of_a_fast_kernel")
    inputs = _made_up(4, 5, 5, 6)
    layer.build(inputs.shape)
    named = {"training": True} if layer.non_trainable_variables else {}
    watched = [inputs, *layer.trainable_variables]
    return SmallCase(arguments=(layer, inputs), named=named, watched=watched, state=layer.non_trainable_variables)


def _convolution_trial() -> SmallCase:
    # No random initializer: it would consume seeds of the next model.
    layer = keras.layers.Conv2D(7, 1, kernel_initializer="zeros", dtype="float32", name="trial_of_a_fast_kernel")
    inputs, kernel = _made_up(4, 5, 5, 6), _made_up(1, 1, 6, 7)
    return SmallCase(arguments=(layer, inputs, kernel), watched=[inputs, kernel])


def _recurrent_trial() -> SmallCase:
    # A seed of its own, so that the layer draws none of those that the next model gets.
    plain = {"kernel_initializer": "zeros", "recurrent_initializer": "zeros", "dtype": "float32", "seed": 0}
    layer = keras.layers.LSTM(3, return_sequences=True, name="trial_of_a_fast_kernel", **plain)
    inputs, state = _made_up(4, 5, 6), [_made_up(4, 3, seed=2), _made_up(4, 3, seed=3)]
    layer.build(inputs.shape)
    for seed, variable in enumerate(layer.trainable_variables):
        variable.assign(_made_up(*variable.shape, seed=seed) / 8)
    watched = [inputs, *state, *layer.trainable_variables]
    return SmallCase(arguments=(layer, inputs, state, None), named={"training": True}, watched=watched)


def _activation_trial(**named: Any) -> SmallCase:
    inputs = _made_up(4, 25)
    return SmallCase(arguments=(inputs,), named=named, watched=[inputs])


def _attention_trial(**named: Any) -> SmallCase:
    query, key, value = _made_up(2, 5, 3, 4), _made_up(2, 6, 3, 4, seed=2), _made_up(2, 6, 3, 7, seed=3)
    mask = tf.constant(numpy.arange(60).reshape(2, 1, 5, 6) % 4 > 0)
    return SmallCase(arguments=(query, key, value), named={"mask": mask, **named}, watched=[query, key, value])


def _of_activation(
    name: str, activation: Call, chosen: Callable[..., Call | None], ways: Sequence[Mapping[str, Any]] = ({},)
) -> Kernel:
    """Return the kernel compiled by XLA for one of Keras's activations, tested with each set of arguments in `ways`."""
    return Kernel(
        name=name,
        where=f"the activation {name}",
        serves=lambda layer: getattr(layer, "activation", None) is activation or _is_operation(layer, name),
        chosen=chosen,
        trials=[functools.partial(_activation_trial, **way) for way in ways],
        while_training=True,
        by_xla=True,
    )


TABLE: tuple[Kernel, ...] = (
    Kernel(
        name="batch normalization",
        where="batch normalisation of a layer's inputs",
        serves=lambda layer: isinstance(layer, keras.layers.BatchNormalization),
        chosen=_batch_normalization,
        trials=[lambda: _normalization_trial(keras.layers.BatchNormalization)],
    ),
    Kernel(
        name="layer normalization",
        where="layer normalisation of a layer's inputs",
        serves=lambda layer: isinstance(layer, keras.layers.LayerNormalization),
        chosen=_layer_normalization,
        trials=[lambda: _normalization_trial(keras.layers.LayerNormalization)],
    ),
    Kernel(
        name="1x1 convolution",
        where="the convolution of a layer",
        serves=lambda layer: isinstance(layer, keras.layers.Conv2D) and _is_one_by_one(layer),
        chosen=_pointwise_convolution,
        trials=[_convolution_trial],
        without_onednn=True,
    ),
    _of_activation("gelu", keras.activations.gelu, _gelu, [{"approximate": False}, {"approximate": True}]),
    _of_activation("silu", keras.activations.silu, lambda x: _activation(_SILU, x)),
    _of_activation("hard silu", keras.activations.hard_silu, lambda x: _activation(_HARD_SILU, x)),
    Kernel(
        name="attention",
        where="scaled dot-product attention",
        serves=_is_attention,
        chosen=_attention,
        trials=[_attention_trial, functools.partial(_attention_trial, is_causal=True)],
        while_training=True,
    ),
    Kernel(
        name="lstm",
        where="the steps of an LSTM",
        serves=_is_plain_lstm,
        chosen=_recurrent,
        trials=[_recurrent_trial],
    ),
)
"""Kernels that save at least 3 % of the operation's time, as measured by benchmarks/fast_kernels.py."""

"""The faster operations: attention, convolutions, normalisation, activations and LSTM.

Attention: Keras's layout has heads after steps, so TensorFlow transposes before and after each product, also for
gradients. Here queries, keys, values and outputs are each transposed once.

Normalisation: Keras computes moments, differences, products and their gradients one operation at a time. Batch
normalisation (Ioffe and Szegedy 2015, algorithm 1) is one kernel of TensorFlow. Layer normalisation (Ba, Kiros and
Hinton 2016, equation 4) has none, so its gradient is written out here.

LSTM: differentiated step by step, each step makes gradients of all weights and adds them to those of earlier steps.
Here the backward pass keeps the gate inputs' gradients, and one product at its end covers all steps. XLA cannot compile
that operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

HIDDEN = -0.7 * 3.38953e38
"""The value that Keras puts in place of a masked score, float32."""


def attention(query: Any, key: Any, value: Any, mask: Any, scale: Any, *, is_causal: bool) -> Any:
    """Return outputs (B, T, N, V) for queries (B, T, N, H), keys (B, S, N, H) and values (B, S, N, V), all float32.

    `mask`, None or broadcastable to (B, N, T, S), selects the scores that count; `is_causal` hides later steps S.
    """
    query, value = (tf.transpose(tensor, [0, 2, 1, 3]) for tensor in (query * scale, value))
    scores = tf.matmul(query, tf.transpose(key, [0, 2, 3, 1]))
    if is_causal:
        earlier = tf.linalg.band_part(tf.ones(tf.shape(scores)[2:], tf.bool), -1, 0)
        mask = earlier if mask is None else tf.logical_and(mask, earlier)
    if mask is not None:
        scores = tf.where(mask, scores, HIDDEN)  # minus infinity would give NaN for a row that is hidden as a whole
    return tf.transpose(tf.matmul(tf.nn.softmax(scores), value), [0, 2, 1, 3])


def pointwise_convolution(inputs: Any, kernel: Any) -> Any:
    """Convolve `inputs` (B, H, W, C) with `kernel` (1, 1, C, F) by one matrix product; returns (B, H, W, F)."""
    channels, filters = kernel.shape[2:]
    product = tf.matmul(tf.reshape(inputs, (-1, channels)), tf.reshape(kernel, (channels, filters)))
    return tf.reshape(product, tf.concat([tf.shape(inputs)[:-1], [filters]], 0))


def batch_normalization(layer: Any, inputs: Any) -> Any:
    """Return the training output of `layer` for float32 `inputs` (B, ..., C), normalised over all but the last axis.

    Also updates the layer's moving mean and variance, with the biased variance of the batch, as in Keras.
    """
    channels = inputs.shape[-1]
    # One row per position: over (rows, 1, 1, C) oneDNN's kernel is up to twice as fast as over (B, H, W, C).
    rows = tf.reshape(inputs, (-1, 1, 1, channels))
    result = tf.raw_ops.FusedBatchNormV3(
        x=rows,
        scale=_float32(layer.gamma) if layer.scale else tf.ones([channels]),
        offset=_float32(layer.beta) if layer.center else tf.zeros([channels]),
        mean=[],  # empty in training, where they have no use
        variance=[],
        epsilon=layer.epsilon,
        exponential_avg_factor=1.0,  # 1: the kernel returns the batch's own moments
        data_format="NHWC",
        is_training=True,
    )
    count = tf.cast(tf.shape(rows)[0], tf.float32)
    # The kernel divides by count - 1 (Bessel), and by 1 for a single row; Keras divides by count.
    variance = result.batch_variance * (tf.maximum(count - 1, 1) / count)
    for moving, batch_value in ((layer.moving_mean, result.batch_mean), (layer.moving_variance, variance)):
        moving.assign(_float32(moving) * layer.momentum + batch_value * (1 - layer.momentum))
    return tf.reshape(result.y, tf.shape(inputs))


def _float32(variable: Any) -> Any:
    """Cast to float32, in which Keras computes; a pure half precision policy keeps half precision weights."""
    return tf.cast(tf.convert_to_tensor(variable), tf.float32)


def layer_normalization(layer: Any, inputs: Any) -> Any:
    """Return the output of `layer` for float32 `inputs` (..., C): normalised over the last axis, scaled and shifted."""

    @tf.custom_gradient
    def normalized(values: Any, scale: Any, offset: Any) -> Any:
        mean = tf.reduce_mean(values, -1, keepdims=True)
        apart = values - mean
        inverse = tf.math.rsqrt(tf.reduce_mean(tf.square(apart), -1, keepdims=True) + layer.epsilon)
        unit = apart * inverse

        def gradient(upstream: Any) -> tuple[Any, Any, Any]:
            product = upstream * unit
            rows, product_rows = (tf.reshape(tensor, (-1, values.shape[-1])) for tensor in (upstream, product))
            # dx = inverse (g - mean(g) - unit mean(g unit)), where g = upstream scale and means are over the last axis.
            share = scale / values.shape[-1]
            # The product with `share` is mean(g): no tensor of g is stored.
            along = tf.reshape(tf.linalg.matvec(rows, share), tf.shape(mean))
            along_unit = tf.reshape(tf.linalg.matvec(product_rows, share), tf.shape(mean))
            moved = inverse * (upstream * scale - along - unit * along_unit)
            return moved, tf.reduce_sum(product_rows, 0), tf.reduce_sum(rows, 0)

        return unit * scale + offset, gradient

    return normalized(inputs, _float32(layer.gamma), _float32(layer.beta))


Activation = Callable[[Any], Any]


def compiled(activation: Activation) -> Activation:
    """Return `activation` and its gradient, each compiled as one operation; for float32 of any shape.

    The backward pass recomputes from the inputs: this is faster than loading saved intermediate results.
    """
    flat = tf.TensorSpec([None], tf.float32)  # one trace for all shapes; XLA compiles it for each number of elements

    @tf.function(input_signature=[flat], jit_compile=True, autograph=False)
    def forward(values: Any) -> Any:
        return activation(values)

    @tf.function(input_signature=[flat, flat], jit_compile=True, autograph=False)
    def backward(values: Any, upstream: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            outputs = activation(values)
        return tape.gradient(outputs, values, output_gradients=upstream)

    @tf.custom_gradient
    def shaped(values: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            return _as(values, backward(_flat(values), _flat(upstream)))

        return _as(values, forward(_flat(values))), gradient

    activated: Activation = shaped
    return activated


def _flat(values: Any) -> Any:
    return tf.reshape(values, [-1])


def _as(like: Any, values: Any) -> Any:
    return tf.ensure_shape(tf.reshape(values, tf.shape(like)), like.shape)


def lstm(layer: Any, inputs: Any, state: Any) -> tuple[Any, Any, list[Any]]:
    """Return the output of `layer` for float32 `inputs` (B, T, D), T known, from `state`, two tensors (B, units).

    Returns the last output (B, units), all outputs (B, T, units), and the final state.
    """
    if layer.go_backwards:
        inputs = tf.reverse(inputs, [1])
    cell = layer.cell
    weights = [tf.convert_to_tensor(array) for array in (cell.kernel, cell.recurrent_kernel, cell.bias)]
    outputs, last, carry = _lstm(tf.transpose(inputs, [1, 0, 2]), *state, *weights)
    return last, tf.transpose(outputs, [1, 0, 2]), [last, carry]


@tf.custom_gradient
def _lstm(inputs: Any, output: Any, carry: Any, kernel: Any, recurrent: Any, bias: Any) -> Any:
    """Return outputs (T, B, units), the last output and the last carry, for inputs (T, B, D)."""
    # The operation takes peephole weights even where it does not use them.
    length, no_peephole = inputs.shape[0], tf.zeros([recurrent.shape[0]])
    # BlockLSTMV2 has its gates in Keras's order (i, f, c, o); BlockLSTM has not.
    entry, carries, forget, exit_, candidate, squashed, outputs = tf.raw_ops.BlockLSTMV2(
        seq_len_max=tf.constant(length, tf.int64), x=inputs, cs_prev=carry, h_prev=output,
        w=tf.concat([kernel, recurrent], 0), b=bias, wci=no_peephole, wcf=no_peephole, wco=no_peephole,
    )  # fmt: skip

    def gradient(to_outputs: Any, to_last: Any, to_carry: Any) -> tuple[Any, ...]:
        before = tf.concat([output[None], outputs[:-1]], 0)
        carries_before = tf.concat([carry[None], carries[:-1]], 0)
        # Derivatives of carry and output by each gate's input, for all steps at once, to keep the loop short.
        by_entry = candidate * entry * (1 - entry)
        by_forget = carries_before * forget * (1 - forget)
        by_candidate = entry * (1 - candidate * candidate)
        by_exit = squashed * exit_ * (1 - exit_)
        by_carry = exit_ * (1 - squashed * squashed)
        back_through = tf.transpose(recurrent)  # once: a product with few rows transposes it slowly

        def back(step: Any, to_output: Any, to_carry: Any, into_gates: Any) -> tuple[Any, ...]:
            to_output += to_outputs[step]
            to_carry += to_output * by_carry[step]
            into_three = [to_carry * factor[step] for factor in (by_entry, by_forget, by_candidate)]
            into = tf.concat([*into_three, to_output * by_exit[step]], 1)
            return step - 1, tf.matmul(into, back_through), to_carry * forget[step], into_gates.write(step, into)

        array = tf.TensorArray(tf.float32, length, element_shape=[None, bias.shape[0]])
        start = (length - 1, to_last, to_carry, array)
        _, to_output, to_carry, into_gates = tf.while_loop(lambda step, *_: step >= 0, back, start)
        into = into_gates.stack()
        products = [tf.matmul(_rows(factors), _rows(into), transpose_a=True) for factors in (inputs, before)]
        to_inputs = tf.reshape(tf.matmul(_rows(into), kernel, transpose_b=True), tf.shape(inputs))
        return to_inputs, to_output, to_carry, *products, tf.reduce_sum(_rows(into), 0)

    return (outputs, outputs[-1], carries[-1]), gradient


def _rows(values: Any) -> Any:
    """Reshape (T, B, n) to (T B, n)."""
    return tf.reshape(values, [-1, values.shape[-1]])

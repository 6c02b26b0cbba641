"""LSTM (Hochreiter and Schmidhuber 1997; Gers et al. 2000): TensorFlow's one operation forward, another way back.

Differentiated step by step, each step makes gradients of all weights and adds them to those of the steps before it.
Here the way back keeps what goes into the gates, and one product with the inputs and outputs of all steps ends it.
XLA cannot compile that operation.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def lstm(layer: Any, inputs: Any, state: Any) -> tuple[Any, Any, list[Any]]:
    """What `layer` gives for float32 `inputs` (B, T, D), T known, from `state`, two of (B, units).

    The last output (B, units), all of them (B, T, units), and the state after them.
    """
    if layer.go_backwards:
        inputs = tf.reverse(inputs, [1])
    cell = layer.cell
    weights = [tf.convert_to_tensor(one) for one in (cell.kernel, cell.recurrent_kernel, cell.bias)]
    outputs, last, carry = _lstm(tf.transpose(inputs, [1, 0, 2]), *state, *weights)
    return last, tf.transpose(outputs, [1, 0, 2]), [last, carry]


@tf.custom_gradient
def _lstm(inputs: Any, output: Any, carry: Any, kernel: Any, recurrent: Any, bias: Any) -> Any:
    """Outputs (T, B, units), the last one and the last carry, for inputs (T, B, D)."""
    length, no_peephole = inputs.shape[0], tf.zeros([recurrent.shape[0]])
    entry, carries, forget, exit_, candidate, squashed, outputs = tf.raw_ops.BlockLSTMV2(
        seq_len_max=tf.constant(length, tf.int64), x=inputs, cs_prev=carry, h_prev=output,
        w=tf.concat([kernel, recurrent], 0), b=bias, wci=no_peephole, wcf=no_peephole, wco=no_peephole,
    )  # fmt: skip

    def gradient(to_outputs: Any, to_last: Any, to_carry: Any) -> tuple[Any, ...]:
        before = tf.concat([output[None], outputs[:-1]], 0)
        carries_before = tf.concat([carry[None], carries[:-1]], 0)
        # How each gate's input moves the carry or the output, of all steps at once: what is left for a step is short.
        by_entry = candidate * entry * (1 - entry)
        by_forget = carries_before * forget * (1 - forget)
        by_candidate = entry * (1 - candidate * candidate)
        by_exit = squashed * exit_ * (1 - exit_)
        by_carry = exit_ * (1 - squashed * squashed)
        back_through = tf.transpose(recurrent)  # once: a product with few rows turns it round slowly

        def back(step: Any, to_output: Any, to_carry: Any, into_gates: Any) -> tuple[Any, ...]:
            to_output += to_outputs[step]
            to_carry += to_output * by_carry[step]
            own = [to_carry * factor[step] for factor in (by_entry, by_forget, by_candidate)]
            into = tf.concat([*own, to_output * by_exit[step]], 1)
            return step - 1, tf.matmul(into, back_through), to_carry * forget[step], into_gates.write(step, into)

        array = tf.TensorArray(tf.float32, length, element_shape=[None, bias.shape[0]])
        start = (length - 1, to_last, to_carry, array)
        _, to_output, to_carry, into_gates = tf.while_loop(lambda step, *_: step >= 0, back, start)
        into = into_gates.stack()
        products = [tf.matmul(_rows(one), _rows(into), transpose_a=True) for one in (inputs, before)]
        to_inputs = tf.reshape(tf.matmul(_rows(into), kernel, transpose_b=True), tf.shape(inputs))
        return to_inputs, to_output, to_carry, *products, tf.reduce_sum(_rows(into), 0)

    return (outputs, outputs[-1], carries[-1]), gradient


def _rows(values: Any) -> Any:
    """(T, B, n) as (T B, n)."""
    return tf.reshape(values, [-1, values.shape[-1]])

"""LSTM (Hochreiter and Schmidhuber 1997; Gers et al. 2000) whose weights have one product over all steps as gradient.

Differentiated step by step, each step makes gradients of all weights and adds them to those of the steps before it.
Here the way back keeps what goes into the gates, and one product with the inputs and outputs of all steps ends it.
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
    length = inputs.shape[0]
    gates, carries, outputs = _forward(_times(inputs, kernel) + bias, output, carry, recurrent)

    def gradient(to_outputs: Any, to_last: Any, to_carry: Any) -> tuple[Any, ...]:
        before = tf.concat([output[None], outputs[:-1]], 0)
        carries_before = tf.concat([carry[None], carries[:-1]], 0)

        def back(step: Any, to_output: Any, to_carry: Any, into_gates: Any) -> tuple[Any, ...]:
            entry, forget, candidate, exit_ = tf.split(gates[step], 4, 1)
            squashed, to_output = tf.tanh(carries[step]), to_output + to_outputs[step]
            to_carry += to_output * exit_ * (1 - squashed * squashed)
            own = [
                to_carry * candidate * entry * (1 - entry),
                to_carry * carries_before[step] * forget * (1 - forget),
                to_carry * entry * (1 - candidate * candidate),
                to_output * squashed * exit_ * (1 - exit_),
            ]
            into = tf.concat(own, 1)
            to_output = tf.matmul(into, recurrent, transpose_b=True)
            return step - 1, to_output, to_carry * forget, into_gates.write(step, into)

        start = (length - 1, to_last, to_carry, _array(length, bias.shape))
        _, to_output, to_carry, into_gates = tf.while_loop(lambda step, *_: step >= 0, back, start)
        into = into_gates.stack()
        products = [tf.matmul(_rows(one), _rows(into), transpose_a=True) for one in (inputs, before)]
        to_inputs = _times(into, tf.transpose(kernel))
        return to_inputs, to_output, to_carry, *products, tf.reduce_sum(_rows(into), 0)

    return (outputs, outputs[-1], carries[-1]), gradient


def _forward(into_gates: Any, output: Any, carry: Any, recurrent: Any) -> tuple[Any, Any, Any]:
    """Gates (T, B, 4 units) in Keras's order, carries and outputs (T, B, units), for what inputs bring to the gates."""
    length, units = into_gates.shape[0], recurrent.shape[0]

    def forth(step: Any, output: Any, carry: Any, *kept: Any) -> tuple[Any, ...]:
        entry, forget, candidate, exit_ = tf.split(into_gates[step] + tf.matmul(output, recurrent), 4, 1)
        entry, forget, exit_ = tf.sigmoid(entry), tf.sigmoid(forget), tf.sigmoid(exit_)
        candidate = tf.tanh(candidate)
        carry = forget * carry + entry * candidate
        output = exit_ * tf.tanh(carry)
        values = (tf.concat([entry, forget, candidate, exit_], 1), carry, output)
        return step + 1, output, carry, *(array.write(step, value) for array, value in zip(kept, values, strict=True))

    arrays = [_array(length, [size]) for size in (4 * units, units, units)]
    ended = tf.while_loop(lambda step, *_: step < length, forth, (0, output, carry, *arrays))
    gates, carries, outputs = (array.stack() for array in ended[3:])
    return gates, carries, outputs


def _array(length: int, width: Any) -> Any:
    return tf.TensorArray(tf.float32, length, element_shape=[None, *width])


def _rows(values: Any) -> Any:
    """(T, B, n) as (T B, n)."""
    return tf.reshape(values, [-1, values.shape[-1]])


def _times(values: Any, matrix: Any) -> Any:
    """(T, B, n) times (n, m), as one product."""
    return tf.reshape(tf.matmul(_rows(values), matrix), [values.shape[0], -1, matrix.shape[-1]])

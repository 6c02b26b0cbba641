"""Scaled dot-product attention (Vaswani et al. 2017, section 3.2.1) with heads in front: plain products of matrices.

With heads behind the steps, as Keras has them, TensorFlow moves the numbers before and after each product, gradients
included; here each of queries, keys, values and outputs is moved once.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

HIDDEN = -0.7 * 3.38953e38
"""What Keras puts in place of a masked score, float32."""


def attention(query: Any, key: Any, value: Any, mask: Any, scale: Any, *, is_causal: bool) -> Any:
    """Outputs (B, T, N, V) for queries (B, T, N, H), keys (B, S, N, H) and values (B, S, N, V), all float32.

    `mask`, None or what broadcasts to (B, N, T, S), says which scores count; `is_causal` hides steps S that come later.
    """
    query, value = (tf.transpose(one, [0, 2, 1, 3]) for one in (query * scale, value))
    scores = tf.matmul(query, tf.transpose(key, [0, 2, 3, 1]))
    if is_causal:
        earlier = tf.linalg.band_part(tf.ones(tf.shape(scores)[2:], tf.bool), -1, 0)
        mask = earlier if mask is None else tf.logical_and(mask, earlier)
    if mask is not None:
        scores = tf.where(mask, scores, HIDDEN)
    return tf.transpose(tf.matmul(tf.nn.softmax(scores), value), [0, 2, 1, 3])

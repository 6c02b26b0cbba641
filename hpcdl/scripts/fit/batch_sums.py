"""Warn of losses that add up a batch's samples, given to `add_loss` or computed by a train_step of the script's own.

Each rank adds up its own share, and the mean over the ranks is a part of the sum of one process. The graph of the step
shows such a sum. A constant that divides it may be the number of samples: the first batch tells.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from hpcdl.scripts.fit.batch_mixes import (
    ADDING,
    MOST_TENSORS,
    PASSING,
    ROUNDING,
    SCALING,
    FirstBatch,
    has_rows,
    is_exact,
    look_for_mixes,
    takes_rows,
)
from hpcdl.scripts.process.session import warn_once

if TYPE_CHECKING:
    from hpcdl.scripts.process.group import ScriptGroup


@contextlib.contextmanager
def batch_sums_checked(group: ScriptGroup, rows: Callable[[], Sequence[Any]], own: str = "") -> Iterator[None]:
    """Trace a training step inside this context: its sums over a batch are looked at in its first batch.

    `rows`: the tensors of the batch. `own`: the script's own method whose loss tapes derive; without one look at what
    layers add to the loss.
    """
    owner, name = (tf.GradientTape, "gradient") if own else (keras.layers.Layer, "add_loss")
    plain, losses = getattr(owner, name), list[Any]()

    @functools.wraps(plain)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if not own or has_variables(given[1:2]):
            losses.extend(tf.nest.flatten(given[:1]))
        return plain(self, *args, **kwargs)

    vars(noting)["autograph_info__"] = {}  # TensorFlow's mark of functions that AutoGraph does not convert
    setattr(owner, name, noting)
    try:
        yield
    finally:
        setattr(owner, name, plain)
    batch = rows()
    if tf.executing_eagerly() or not batch:
        return
    look_at(group, f"a loss in {own}" if own else "a loss given to add_loss", losses, batch[0])


def look_at(group: ScriptGroup, what: str, losses: Sequence[Any], rows: Any) -> None:
    """Look at the losses of the graph that is being traced when its first batch, of which `rows` is a tensor, comes."""
    graph, number = tf.compat.v1.get_default_graph(), rows.shape[0]
    for loss in [loss for loss in losses if getattr(loss, "graph", None) is graph]:
        look_for_mixes(group, what, loss, rows)
        if found := divisors_of_sum(loss, number):
            judge = functools.partial(_warn_if_summed, group, what, found)
            group.keep(f"{what} {found}", functools.partial(FirstBatch, judge)).trace(rows)


def has_variables(sources: Any) -> bool:
    """Return whether a tape derives by variables: the gradient by a batch, as in a penalty, is each sample's own."""
    return any(hasattr(source, "assign") for source in tf.nest.flatten(sources))


def divisors_of_sum(loss: Any, number: int | None) -> list[float]:
    """Return the constants, 1 among them, that divide a sum over a batch in a loss; [] if the graph shows no such sum.

    `number`: how many samples the batch has, None if that is unknown while the step is traced.
    """
    if loss.shape.rank:  # a tape adds up what it derives
        return [1.0] if has_rows(loss, number) else []
    waiting, seen = [(loss, [1.0])], set[int]()
    while waiting and len(seen) < MOST_TENSORS:
        current, divisors = waiting.pop()
        if id(current) in seen or is_exact(current):
            continue
        seen.add(id(current))
        operation = current.op
        inputs, kind = list(operation.inputs), operation.type
        if kind == "Sum" and takes_rows(operation) and has_rows(inputs[0], number):
            return divisors
        # The mean of one number is that number.
        if kind in PASSING or (kind == "Mean" and inputs[0].shape.rank == 0):
            waiting.append((inputs[0], divisors))
        elif kind in ADDING:
            waiting += [(one, divisors) for one in inputs]
        elif kind in SCALING:
            first, second = map(_constant, inputs)
            if second:
                waiting.append((inputs[0], [*divisors, 1 / second if kind == "Mul" else second]))
            elif first and kind == "Mul":
                waiting.append((inputs[1], [*divisors, 1 / first]))
    return []


def divides(divisors: Sequence[float], number: int, num_ranks: int) -> bool:
    """Return whether `number`, that of a rank's samples, seems to be among what divides a sum.

    A multiple may count values too, but that by the ranks is the number of all ranks' samples.
    """
    known = [abs(divisor) for divisor in (*divisors, math.prod(divisors))]
    if any(math.isclose(one, number, rel_tol=ROUNDING) for one in known):
        return True
    if any(math.isclose(one, number * num_ranks, rel_tol=ROUNDING) for one in known[:-1]):
        return False
    times = [one / number for one in known]
    return any(round(one) > 0 and math.isclose(one, round(one), rel_tol=ROUNDING) for one in times)


def _constant(tensor: Any) -> float | None:
    """Return the number that a tensor always is, or None."""
    value = tf.get_static_value(tensor)
    return None if value is None or value.ndim else float(value)


def _warn_if_summed(group: ScriptGroup, what: str, divisors: Sequence[float], number: int) -> None:
    """Warn if a batch of `number` samples shows that the sum is not divided by them."""
    if not divides(divisors, number, group.size):
        warn_of_sum(group, what)


def warn_of_sum(group: ScriptGroup, what: str) -> None:
    """Print once that the loss named `what` is a sum over the samples of a batch."""
    warn_once(
        group,
        what,
        f"{what} adds up the samples of a batch: the mean over the ranks is a part of the sum that one process has; "
        "divide it by the number of the rank's samples, or if all losses are sums, give hpcdl.DistributedOptimizer "
        "op='sum'",
    )

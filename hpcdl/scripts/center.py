"""Strategies with a center in scripts: each rank moves weights of its own, and what users see and keep is the center.

The equations are strategies/elastic's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy
import tensorflow as tf

from hpcdl.comm.arithmetic import all_finite
from hpcdl.comm.observed import for_exchange
from hpcdl.config.schema import ElasticConfig, ExchangeConfig, OptimizerConfig
from hpcdl.core.errors import NotFiniteError, UsageError
from hpcdl.scripts.collectives.tensors import check_traceable, turn_begins, turn_ends
from hpcdl.scripts.exchange import (
    ExchangeSettings,
    compares_after,
    held,
    key_of,
    note_updates,
    with_shape_of,
)
from hpcdl.scripts.fit.files import save_once
from hpcdl.scripts.fit.model import scales
from hpcdl.scripts.own_weights import OwnWeights
from hpcdl.scripts.process.session import note_strategy
from hpcdl.step.keras_internals import trained_by
from hpcdl.strategies.base.graph import call_python
from hpcdl.strategies.base.strategy import Context, StrategyInfo
from hpcdl.strategies.elastic.equations import moving_rate
from hpcdl.strategies.elastic.flat import assign_pieces, one_buffer
from hpcdl.strategies.refusals import unstable_rate
from hpcdl.strategies.table import load_strategy

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array
    from hpcdl.scripts.process.group import ScriptGroup


class CenterExchange(OwnWeights):
    """Moves what one optimizer trains by a strategy's own equations. Making one is collective over the group.

    `update` is the optimizer's update. The layout of all flat buffers is that of the variables it was built with.
    """

    SHARED = "the center of"

    def __init__(self, group: ScriptGroup, settings: ExchangeSettings, optimizer: Any) -> None:
        info = settings.checked()
        super().__init__(group, info, optimizer)
        elastic = ElasticConfig(
            elasticity=settings.elasticity,
            moving_rate=settings.moving_rate,
            period=settings.period or info.features.default_period,
        )
        _check(info, elastic, optimizer, group.size)
        group.agree("an exchange with a center that begins", [repr(settings)])
        context = Context(
            info=info,
            communicator=for_exchange(group.messages),
            num_workers=group.size,
            num_servers=0,
            exchange=ExchangeConfig(strategy=info.name, compress=settings.compress),
            optimizer=OptimizerConfig(optimizer="sgd"),
            elastic=elastic,
        )
        self._replica: Any = load_strategy(info).replica(context)  # type: ignore[attr-defined]
        note_strategy(info.name)
        save_once()

    def update(self, gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> None:
        """Equations (1) and (2) on all variables; traced into the graph. Those without a gradient have one of zeros."""
        check_traceable()
        known = {
            key_of(one): with_shape_of(one, tf.convert_to_tensor(gradient))
            for one, gradient in zip(variables, gradients, strict=True)
        }
        moved = [held(one) for one in trained_by(self._optimizer)]
        self._check_types(moved)
        # The gradient that comes first: a step whose data has ended must not begin what it cannot take part in.
        first = next(reversed(known.values()))
        mine = [known.get(key_of(one), tf.zeros(one.shape, one.dtype)) for one in moved]
        with tf.control_dependencies([*turn_begins(), first]):
            begun = call_python(self._begin, [one_buffer([one.read_value() for one in moved])], tf.bool)
        with tf.control_dependencies([begun]):
            weights = call_python(self._move, [one_buffer(mine), tf.cast(learning_rate, tf.float64)], tf.float32)
        assign_pieces(moved, weights)
        turn_ends([weights])

    def _begin(self, weights: Array) -> bool:
        """Begin this update's exchange, where it has one; at the first one the center is rank 0's weights."""
        if self._own is not None:  # a loop of its own goes on from the center that `fit` has left
            self._own, self._began = None, False
        if not self._began or self._replica.exchanges_at(self._num_updates):
            new = float(not self._began)
            anew = self.group.agree("an exchange with the center", self._forms, names=["", *self._names], weight=new)
            self.group.when_joined(self._follow)
            if anew:
                first = weights.copy()
                self.group.messages.broadcast(first, 0)
                self._replica.start(first, self._lengths)
                self._began, self._num_updates = True, 0
            elif compares_after(self._num_updates, self.group):
                self._compare()
        self._replica.weights[:] = weights
        self._replica.before_step(self._num_updates)
        return True

    def _move(self, gradient: Array, learning_rate: Array) -> Array:
        self._replica.learning_rate = float(learning_rate)
        try:
            weights, _ = self._replica.step(gradient)
        except NotFiniteError as error:
            parts = self._parts(gradient)
            bad = [name for name, part in zip(self._names, parts, strict=True) if not all_finite(part)]
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise NotFiniteError(
                f"the gradient of {bad[0]}{more} is not finite on rank {self.group.rank}, {self._after()}"
            ) from error
        self._num_updates += 1
        note_updates(self._num_updates, self._name)
        moved: Array = weights
        return moved

    def _follow(self) -> None:
        """An exchange of the others after this rank has joined: its weights take part, without a gradient."""
        self._replica.weights[:] = self._flat()
        self._replica.before_step(0)
        rate = numpy.array(self._replica.learning_rate)
        self._assign(self._move(numpy.zeros_like(self._replica.weights), rate))

    def shared(self) -> Array:
        """The center."""
        center: Array = self._replica.center()
        return center

    def state(self) -> dict[str, Array]:
        """What a checkpoint keeps of this rank beside the center."""
        if not self._began:
            return {}
        own = self._flat() if self._own is None else self._own
        return {"weights": own.copy(), "updates": numpy.array(self._num_updates)}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Take back what `state` gave; the variables hold the center, and afterwards this rank's weights."""
        self._own, self._began = None, bool("weights" in arrays and self._variables)
        if self._began:
            center = self._flat()
            self._replica.restore({"replica/weights": arrays["weights"]})
            self._replica.start(center, self._lengths)
            self._replica.restore({})
            self._num_updates = int(arrays["updates"])
            self._assign(self._replica.weights)
            self.group.started.update(map(key_of, self._variables))  # not to be made alike again


def _check(info: StrategyInfo, elastic: ElasticConfig, optimizer: Any, num_ranks: int) -> None:
    """UsageError for an optimizer whose rule is not the strategy's own, and for a moving rate that diverges."""
    equations = f"strategy={info.name!r} moves weights by its own equations"
    if type(optimizer) is not keras.optimizers.SGD or optimizer.momentum or scales(optimizer):
        raise UsageError(f"{equations} (sgd), not by {type(optimizer).__name__}'s: give it keras.optimizers.SGD(rate) "
                         "without momentum")  # fmt: skip
    refused = {
        "weight_decay": optimizer.weight_decay,
        "use_ema": optimizer.use_ema,
        "loss_scale_factor": optimizer.loss_scale_factor,
    }
    names = [name for name, given in refused.items() if given]
    if names:
        raise UsageError(f"{equations}, without {' and '.join(names)}; leave it out")
    if keras.mixed_precision.global_policy().name == "mixed_float16":
        raise UsageError(f"{equations}, without loss scaling; use the policy mixed_bfloat16")
    rate = float(tf.convert_to_tensor(optimizer.learning_rate))
    alpha = moving_rate(elastic, num_ranks)(rate)
    problem = unstable_rate(info, alpha, num_ranks) if num_ranks > 1 else ""
    if problem:
        source = "moving_rate" if elastic.elasticity is None else f"elasticity={elastic.elasticity:g} x {rate:g}"
        raise UsageError(f"{source} = {alpha:g}: {problem}")

"""Exchanges for strategies in which each rank of a script moves its own weights beside the shared ones or a center.

In `fit` the variables hold this rank's weights during the steps of an epoch, and the shared weights after them.
Validation, callbacks, files and the weights after `fit` are therefore the shared ones.

The equations are those of strategies/elastic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import keras
import numpy
import tensorflow as tf

from hpcdl.comm.arithmetic import all_finite
from hpcdl.comm.observed import for_exchange
from hpcdl.config.schema import ElasticConfig, ExchangeConfig, OptimizerConfig
from hpcdl.core.errors import NotFiniteError, UsageError
from hpcdl.scripts.collectives.tensors import check_traceable, turn_begins, turn_ends
from hpcdl.scripts.exchange import (
    OWN_CHANGES,
    ExchangeSettings,
    compares_after,
    held,
    key_of,
    look_for_same_samples,
    name_in,
    name_of,
    note_updates,
    with_shape_of,
)
from hpcdl.scripts.fit.files import save_once
from hpcdl.scripts.fit.model import scales
from hpcdl.scripts.process.exit import after_updates
from hpcdl.scripts.process.session import note_strategy, warn_once
from hpcdl.step.keras_internals import trained_by
from hpcdl.strategies.allreduce.worker import broadcast_variables
from hpcdl.strategies.base.graph import call_python
from hpcdl.strategies.base.strategy import Context, StrategyInfo
from hpcdl.strategies.elastic.flat import assign_pieces, one_buffer
from hpcdl.strategies.elastic.replica import hardly_moves, moving_rate
from hpcdl.strategies.refusals import unstable_rate
from hpcdl.strategies.table import load_strategy
from hpcdl.supervision.control import check_same_weights

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator
    from hpcdl.scripts.process.group import ScriptGroup


class OwnWeights(ABC):
    """The own and shared weights of one optimizer. All flat buffers have the layout of its variables."""

    SHARED: ClassVar[str]
    """Term for the shared value of a variable in messages, before its name."""

    def __init__(self, group: ScriptGroup, info: StrategyInfo, optimizer: Any) -> None:
        self.group = group
        self._info = info
        self._optimizer = optimizer
        self._name = name_in(group)
        self._began = False
        self._own: Array | None = None
        """This rank's weights while the variables hold the shared ones."""
        self._num_updates = 0

    @abstractmethod
    def shared(self) -> Array:
        """Return the weights that all ranks share, as a flat array."""

    def own_variables(self) -> list[Any]:
        """Return the optimizer's variables that differ between ranks."""
        return []

    def to_center(self) -> bool:
        """Put the shared weights into the variables and set this rank's aside. Return whether that was necessary."""
        if not self._began or self._own is not None:
            return False
        self._own = self._flat()
        self._assign(self.shared())
        return True

    def to_own(self) -> None:
        """Put this rank's weights back into the variables."""
        if self._own is not None:
            weights, self._own = self._own, None
            self._assign(weights)

    def begin_epoch(self, communicator: Communicator) -> None:
        """Continue with each rank's weights. If a rank has changed the variables, rank 0's count. Collective."""
        # The script, or a callback, has set the variables since: it means the model of all ranks.
        changed = self._own is not None and not numpy.array_equal(self._flat(), self.shared())
        by_rank = communicator.allgather_json([changed, self._num_updates])
        # Which update exchanges depends on its number: all ranks must count alike.
        self._num_updates = max(number for _, number in by_rank)
        if any(new for new, _ in by_rank):
            self._own, self._began = None, False
            broadcast_variables(communicator, self._variables)
        self.to_own()

    def end_steps(self, last: int, *, unequal: bool, over: bool) -> None:
        """End the steps of an epoch on all ranks: from here on the variables hold the shared weights. Collective.

        `last`: a rank that took the most steps, if they are `unequal`. `over`: the fit ends with this epoch.
        """
        self.to_center()

    @abstractmethod
    def report_period(self, steps: int | None, epochs: int | None) -> None:
        """Warn of a period that is long for a fit of `epochs` with this many `steps` each; None if unknown."""

    def _check_types(self, variables: Sequence[Any]) -> None:
        """Raise UsageError for a type that flat float32 buffers do not hold."""
        other_types = sorted({variable.dtype.name for variable in variables} - {"float32"})
        if other_types:
            raise UsageError(
                f"strategy={self._info.name!r} keeps its weights in float32, the model has {', '.join(other_types)} "
                "ones; use strategy='ring'"
            )

    def _look(self, weights: Array) -> None:
        """Check once whether all ranks have moved their weights alike, away from the shared ones. Collective."""
        look_for_same_samples(self.group, weights, moved=not numpy.array_equal(weights, self.shared()))

    def _compare(self) -> None:
        """Check that all ranks hold the same shared weights. Collective."""
        parts = zip(self._names, self._parts(self.shared()), strict=True)
        named = {f"{index}: {self.SHARED} {name}": part for index, (name, part) in enumerate(parts)}
        check_same_weights(named, self.group.messages, self._after(), OWN_CHANGES)

    @property
    def _names(self) -> list[str]:
        return [name_of(variable) for variable in self._variables]

    @property
    def _forms(self) -> list[str]:
        """What must agree on all ranks. The names beside it are an empty one and `_names`."""
        return [self._name, *(str(tuple(variable.shape)) for variable in self._variables)]

    def _after(self) -> str:
        return after_updates(self._num_updates)

    @property
    def _variables(self) -> list[Any]:
        return trained_by(self._optimizer)

    @property
    def _lengths(self) -> list[int]:
        return [int(numpy.prod(variable.shape)) for variable in self._variables]

    def _flat(self) -> Array:
        return numpy.concatenate([numpy.asarray(variable.numpy()).reshape(-1) for variable in self._variables])

    def _parts(self, flat: Array) -> list[Array]:
        return list(numpy.split(flat, numpy.cumsum(self._lengths)[:-1]))

    def _assign(self, flat: Array) -> None:
        for variable, part in zip(self._variables, self._parts(flat), strict=True):
            variable.assign(part.reshape(variable.shape))


class CenterExchange(OwnWeights):
    """Moves one optimizer's weights by the equations of a strategy with a center. Creating one is collective.

    `update` replaces the optimizer's update. All flat buffers have the layout of the variables that it was built with.
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
        # With another period a rank would be in other exchanges, and the rest would wait for it.
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
        """Apply equations (1) and (2) to all variables, traced into the graph. A missing gradient counts as zeros."""
        check_traceable()
        by_key = {
            key_of(variable): with_shape_of(variable, tf.convert_to_tensor(gradient))
            for variable, gradient in zip(variables, gradients, strict=True)
        }
        moved = [held(variable) for variable in trained_by(self._optimizer)]
        self._check_types(moved)
        # Wait for the first gradient: a step whose data has ended must not begin what it cannot take part in.
        first = next(reversed(by_key.values()))  # back-propagation begins at the last variable
        own_gradients = [by_key.get(key_of(variable), tf.zeros(variable.shape, variable.dtype)) for variable in moved]
        with tf.control_dependencies([*turn_begins(), first]):
            begun = call_python(self._begin, [one_buffer([variable.read_value() for variable in moved])], tf.bool)
        with tf.control_dependencies([begun]):
            weights = call_python(
                self._move, [one_buffer(own_gradients), tf.cast(learning_rate, tf.float64)], tf.float32
            )
        assign_pieces(moved, weights)
        turn_ends([weights])

    def _begin(self, weights: Array) -> bool:
        """Begin the exchange of this update, if it has one. At the first one the center becomes rank 0's weights."""
        if self._own is not None:  # a custom loop continues from the center that `fit` has left
            self._own, self._began = None, False
        if not self._began or self._replica.exchanges_at(self._num_updates):
            new = float(not self._began)
            again = self.group.agree("an exchange with the center", self._forms, names=["", *self._names], weight=new)
            self.group.when_joined(self._follow)
            if again:
                first = weights.copy()
                self.group.messages.broadcast(first, 0)
                self._replica.start(first, self._lengths)
                self._began, self._num_updates = True, 0
            elif not self.group.num_joined:
                self.group.keep("looked for the same samples", lambda: self._look(weights))
                if compares_after(self._num_updates, self.group):
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
            and_more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise NotFiniteError(
                f"the gradient of {bad[0]}{and_more} is not finite on rank {self.group.rank}, {self._after()}"
            ) from error
        self._num_updates += 1
        note_updates(self._num_updates, self._name)
        moved: Array = weights
        return moved

    def _follow(self) -> None:
        """Take part in an exchange of the others after this rank has joined: with its weights, without a gradient."""
        self._replica.weights[:] = self._flat()
        self._replica.before_step(0)
        rate = numpy.array(self._replica.learning_rate)
        self._assign(self._move(numpy.zeros_like(self._replica.weights), rate))

    def shared(self) -> Array:
        """Return the center."""
        center: Array = self._replica.center()
        return center

    def report_period(self, steps: int | None, epochs: int | None) -> None:
        """Warn once if the center, which is the model after the fit, hardly moves."""
        num_steps = self._num_updates + (steps or 0) * (epochs or 1)
        if steps and hardly_moves(self._replica.elastic.period_steps, num_steps):
            warn_once(
                self.group,
                f"the period of {self._name}",
                f"period={self._replica.elastic.period_steps} is long for {num_steps} steps: the center, which is the "
                "model after fit, hardly moves; give a shorter period",
            )

    def state(self) -> dict[str, Array]:
        """Return this rank's state for a checkpoint, beyond the center."""
        if not self._began:
            return {}
        weights = self._flat() if self._own is None else self._own
        return {"weights": weights.copy(), "updates": numpy.array(self._num_updates)}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore what `state` returned. The variables hold the center before, and this rank's weights after."""
        self._own, self._began = None, bool("weights" in arrays and self._variables)
        if self._began:
            center = self._flat()
            self._replica.restore({"replica/weights": arrays["weights"]})
            self._replica.start(center, self._lengths)
            # Forgotten, because a later start would take these weights again.
            self._replica.restore({})
            self._num_updates = int(arrays["updates"])
            self._assign(self._replica.weights)
            self.group.started.update(map(key_of, self._variables))  # not to be overwritten with rank 0's values


def _check(info: StrategyInfo, elastic: ElasticConfig, optimizer: Any, num_ranks: int) -> None:
    """Raise UsageError if the optimizer's rule is not the strategy's own, or if the moving rate diverges."""
    equations = f"strategy={info.name!r} moves weights by its own equations"
    # Exactly this class: one derived from it may update otherwise.
    if type(optimizer) is not keras.optimizers.SGD or optimizer.momentum or scales(optimizer):
        raise UsageError(f"{equations} (sgd), not by {type(optimizer).__name__}'s: give it keras.optimizers.SGD(rate) "
                         "without momentum")  # fmt: skip
    refused = {
        "weight_decay": optimizer.weight_decay,
        "use_ema": optimizer.use_ema,
        "loss_scale_factor": optimizer.loss_scale_factor,
    }
    names = [name for name, value in refused.items() if value]
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

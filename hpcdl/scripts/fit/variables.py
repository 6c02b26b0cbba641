"""How a model's variables are combined over the ranks, by their kind: compared, averaged, or a rank's own.

Weights that gradients move are compared, also in frozen layers. Moving statistics of normalization layers are averaged.
Other variables that no gradient moves (queues, counters, memories) are a rank's own unless `combine` changes that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, get_args

import keras
import numpy

from hpcdl.core.errors import UsageError
from hpcdl.core.units import listed
from hpcdl.scripts.fit.model import center_of, leaves_of, optimizers_of, set_own
from hpcdl.scripts.process.undistributed import CHOSEN
from hpcdl.step.keras_internals import accumulators_of, declared_fixed
from hpcdl.strategies.allreduce.worker import broadcast_variables
from hpcdl.supervision.control import digest_of

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator

Combination = Literal["mean", "sum", "rank 0", "own", "same"]
_STATISTICS = ("moving_", "running_")
"""Prefixes of the names of statistics that a script's normalization layers keep."""


def combine(variables: Any, how: Combination) -> None:
    """Choose how a fit combines `variables` (one, a list, or a layer's) at the end of an epoch and before evaluations.

    "mean": their mean over the ranks. "sum": what all ranks have added since the last time. "rank 0": rank 0's value.
    "own": each rank's own. "same": compared, and a difference ends the script. Moving statistics of normalization
    layers are "mean", other variables that no gradient moves "own". Call it on every rank, before the fit.
    """
    if how not in get_args(Combination):
        raise UsageError(f"hpcdl.combine(..., {how!r}): choose one of {', '.join(map(repr, get_args(Combination)))}")
    single = hasattr(variables, "assign") or not isinstance(variables, Iterable)  # a tf.Variable iterates over rows
    for variable in [variables] if single else variables:
        if not hasattr(variable, "assign"):
            raise UsageError(
                f"hpcdl.combine takes Keras variables, not {type(variable).__name__}; give layer.variables"
            )
        if how == "mean" and not _is_float(variable):
            raise UsageError(
                f"{variable.path} holds {variable.dtype} numbers, which have no mean; use 'sum', 'rank 0' or 'own'"
            )
        set_own(variable, CHOSEN, how)


def chosen_for(variable: Any) -> str | None:
    """Return what `combine` was given for a variable, or None if the script has not chosen."""
    return getattr(variable, CHOSEN, None)


def _is_float(variable: Any) -> bool:
    return bool(keras.backend.is_float_dtype(keras.backend.standardize_dtype(variable.dtype)))


def fixed_variables(model: Any) -> list[tuple[Any, str, bool]]:
    """Return the weights that no gradient moves, each with its combination and whether the script has chosen it."""
    fixed: dict[int, tuple[Any, str, bool]] = {}
    # By identity, because == of variables compares their values.
    weight_ids = {id(weight) for weight in model.weights}
    for layer, variable in declared_fixed(model):
        if id(variable) in weight_ids:
            chosen = getattr(variable, CHOSEN, None)
            normal = isinstance(layer, keras.layers.BatchNormalization) or variable.name.startswith(_STATISTICS)
            usual = "mean" if normal and _is_float(variable) else "own"
            fixed[id(variable)] = variable, chosen or usual, chosen is not None
    for variable in model.weights:  # the script may also have chosen one that gradients move
        chosen = getattr(variable, CHOSEN, None)
        if chosen is not None:
            fixed[id(variable)] = variable, chosen, True
    return list(fixed.values())


def own_variables(model: Any, optimizers: Iterable[Any] | None = None) -> list[Any]:
    """Return what each rank keeps for itself: the model's own variables, and gradients accumulated by its optimizers.

    `optimizers`: those of the model, if they are known already.
    """
    return [*fixed_and_own(model), *kept_by_optimizers(optimizers_of(model) if optimizers is None else optimizers)]


def fixed_and_own(model: Any) -> list[Any]:
    """Return the variables of the model that each rank moves by itself."""
    return [variable for variable, how, _ in fixed_variables(model) if how in ("own", "sum")]


def kept_by_optimizers(optimizers: Iterable[Any]) -> list[Any]:
    """Return what optimizers keep for this rank: accumulated gradients, and momenta of the rank's own weights."""
    all_optimizers = list(optimizers)
    sums = [
        variable for optimizer in all_optimizers for leaf in leaves_of(optimizer) for variable in accumulators_of(leaf)
    ]
    moved = [center for center in map(center_of, all_optimizers) if center is not None]
    return [*sums, *(variable for center in moved for variable in center.own_variables())]


def shared_variables_of(model: Any) -> list[Any]:
    """Return the weights and optimizer variables, each once, that must be the same on all ranks."""
    optimizers = optimizers_of(model)
    own_ids = {id(one) for one in own_variables(model, optimizers)}
    by_id = {id(one): one for group in [model.weights, *(one.variables for one in optimizers)] for one in group}
    return [one for one in by_id.values() if id(one) not in own_ids]


class CombinedVariables:
    """Combines a model's variables that no gradient moves. Call `begin` once all ranks have their initial values."""

    def __init__(self, model: Any, communicator: Communicator) -> None:
        self._model, self._communicator = model, communicator
        self._bases: dict[int, Array] = {}

    def begin(self) -> None:
        """Remember the values that sums start from."""
        self._bases = {
            id(variable): numpy.array(variable.numpy())
            for variable, how, _ in fixed_variables(self._model)
            if how == "sum"
        }

    def combine(self) -> None:
        """Put the combined values into the variables. Collective."""
        if self._communicator.size == 1:
            return
        kinds = fixed_variables(self._model)
        means = [one for one, how, _ in kinds if how == "mean"]
        # In float64 the mean of equal float32 values is that value, on any number of ranks.
        values = [numpy.asarray(one.numpy(), numpy.float64) for one in means]
        for variable, value in zip(means, self._summed(values), strict=True):
            variable.assign((value / self._communicator.size).astype(_dtype(variable)))
        for variable, how, _ in kinds:
            if how == "sum":
                self._add_up(variable)
        broadcast_variables(self._communicator, [one for one, how, _ in kinds if how == "rank 0"])

    def _summed(self, values: list[Array]) -> list[Array]:
        """Return the sums over the ranks, in one message."""
        if not values:
            return []
        total = numpy.concatenate([value.reshape(-1) for value in values])
        self._communicator.allreduce(total)
        parts = numpy.split(total, numpy.cumsum([value.size for value in values])[:-1])
        return [part.reshape(value.shape) for part, value in zip(parts, values, strict=True)]

    def _add_up(self, variable: Any) -> None:
        value = numpy.asarray(variable.numpy())
        base = self._bases.get(id(variable), numpy.zeros_like(value))
        if _is_float(variable):
            (change,) = self._summed([value.astype(numpy.float64) - base])
            total = base + change
        else:  # sum integers exactly; floating point is inexact above 2**53
            rows = self._communicator.allgather_json([value.reshape(-1).tolist(), base.reshape(-1).tolist()])
            bases = base.reshape(-1).tolist()
            changes = [[current - start for current, start in zip(*row, strict=True)] for row in rows]
            exact = [start + sum(column) for start, *column in zip(bases, *changes, strict=True)]
            total = numpy.array(exact, value.dtype)
        total = total.astype(value.dtype).reshape(value.shape)
        variable.assign(total)
        self._bases[id(variable)] = total

    def differing_own(self) -> list[str]:
        """Return the paths of variables that differ between ranks without the script's choice. Collective."""
        unasked = [variable for variable, how, chosen in fixed_variables(self._model) if how == "own" and not chosen]
        rows = self._communicator.allgather_json([digest_of(variable) for variable in unasked])
        return [variable.path for variable, *digests in zip(unasked, *rows, strict=False) if len(set(digests)) > 1]


def warn_of_local_variables(paths: list[str]) -> bool:
    """Print the line about variables that ranks keep for themselves."""
    sys.stderr.write(
        f"hpcdl: {listed(paths)}: no gradient moves them, and each rank keeps its own values; "
        "hpcdl.combine(variable, 'mean' | 'sum' | 'rank 0' | 'own' | 'same') chooses\n"
    )
    return True


def _dtype(variable: Any) -> Any:
    return numpy.asarray(variable.numpy()).dtype

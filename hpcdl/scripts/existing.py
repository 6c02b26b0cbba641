"""Make weights that exist when training begins equal on all ranks, even if no optimizer moves them yet.

Examples are a target network copied before the first update, or a discriminator that is trained later. No gradient
refers to them yet, so every rank would begin with its own values.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from hpcdl.core.units import listed
from hpcdl.scripts.fit.adapted import report_adapted
from hpcdl.scripts.fit.variables import chosen_for
from hpcdl.scripts.process.session import session
from hpcdl.step.keras_internals import VARIABLE, trained_by
from hpcdl.strategies.allreduce.worker import broadcast_variables
from hpcdl.strategies.base.graph import outside_graphs
from hpcdl.supervision.control import digest_of

if TYPE_CHECKING:
    from hpcdl.scripts.process.group import ScriptGroup


_SWEEPS_S = (0.0, 0.05, 0.2)
"""Seconds to wait before each garbage collection, if ranks seem to have made different weights."""


def existing_alike(group: ScriptGroup, trained: Collection[str] | None = None, *, too_late: bool = False) -> None:
    """Give every rank rank 0's values of all existing weights that no optimizer has moved yet. Collective.

    Weights do not change if the script keeps them per rank (`hpcdl.combine(variable, "own")`) or a plain optimizer has
    moved them. `trained`: names of the weights that training begins with. If others differ, print a line; those that no
    model holds stay, because a loop may accumulate gradients in them. `too_late`: a forward pass has used the weights.
    For a process set do nothing: its ranks start equal only in the weights that its exchange names.
    """
    if group.size == 1 or group is not session().group:
        return
    with outside_graphs():
        if trained is not None:
            report_adapted(_living(keras.layers.Layer)[0], group)
        weights = _listed(group)
        rows = _forms(group, weights)
        for wait_s in _SWEEPS_S:
            if all(row == rows[0] for row in rows):
                break
            # One rank may hold garbage that another has collected. TensorFlow's threads release it only after a moment.
            time.sleep(wait_s)
            weights.clear()  # else the list would keep the garbage alive, and it would be listed again
            gc.collect()
            weights = _listed(group)
            rows = _forms(group, weights)
        if any(row != rows[0] for row in rows):
            group.keep("said that weights differ in number", lambda: _refuse_different(group))
            return
        # Digests travel, not weights: only those that differ are sent.
        digests = group.messages.allgather_json([digest_of(weight) for weight in weights])
        values = dict(zip(map(unique, weights), zip(*digests, strict=True), strict=True))
        differing = [weight for weight in weights if len(set(values[unique(weight)])) > 1]
        if not differing:
            return
        if trained is None:
            broadcast_variables(group.messages, differing)
            return
        held = _held_by_models() | set(trained)
        copied = {values[name] for name in held & set(values)}  # a running mean of weights begins as a copy of them
        stays_here = [unique(weight) not in held and values[unique(weight)] not in copied for weight in differing]
        stays = group.messages.allgather_json(stays_here)[0]
        staying = [weight for weight, stay in zip(differing, stays, strict=True) if stay]
        common = [weight for weight, stay in zip(differing, stays, strict=True) if not stay]
        unexpected = [weight for weight in common if unique(weight) not in trained]
        # Ranks may set a target network at steps of their own, and differ again at each fit.
        said = group.keep(f"weights said to have differed{' too late' if too_late else ''}", set[str])
        new = [weight for weight in unexpected if unique(weight) not in said]
        said.update(map(unique, new))
        if group.rank == 0 and new:
            _refuse_different_values(new, too_late=too_late)
        if group.rank == 0 and staying:
            group.keep("said which variables no model holds", lambda: _report_unchanged(staying))
        broadcast_variables(group.messages, common)


def _held_by_models() -> set[str]:
    """Return the keys of all variables that Keras layers or tf.Modules hold."""
    of_keras, modules = _living(VARIABLE, tf.Module)
    variables = [variable for module in modules for variable in module.variables]
    return {unique(variable) for variable in [*(variable.value for variable in of_keras), *variables]}


def unique(variable: Any) -> str:
    """Return a key that identifies a TensorFlow variable within the process."""
    return str(getattr(variable, "_unique_id", id(variable)))


def _listed(group: ScriptGroup) -> list[Any]:
    """Return the weights that have not been made equal yet, in the order of their creation."""
    optimizers, of_keras, variables = _living(keras.optimizers.Optimizer, VARIABLE, tf.Variable)
    trained_alone = {unique(variable.value) for optimizer in optimizers for variable in _trained_alone(optimizer)}
    chosen = {unique(variable.value) for variable in of_keras if chosen_for(variable) is not None}
    weights = {
        unique(variable): variable for variable in variables if _is_weight(variable) and chosen_for(variable) is None
    }
    excluded = trained_alone | chosen | group.started
    names = [name for name in weights if name not in excluded]
    return [weights[name] for name in sorted(names, key=_number)]


def _living(*classes: type) -> list[list[Any]]:
    """Return all objects of each class. A look-up of each object's type is faster than `isinstance`."""
    kinds = [_with_subclasses(one) for one in classes]
    wanted = set.union(*kinds)
    objects = [one for one in gc.get_objects() if type(one) in wanted]
    return [[one for one in objects if type(one) in each] for each in kinds]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, type.__subclasses__(kind)))


def _trained_alone(optimizer: Any) -> Iterator[Any]:
    """Yield the weights that a plain (not distributed) optimizer has moved on this rank."""
    if not hasattr(optimizer, "exchanges") and optimizer.built and int(optimizer.iterations) > 0:
        yield from trained_by(optimizer)


def _is_weight(variable: Any) -> bool:
    fixed = variable.shape.is_fully_defined() and variable.dtype.is_floating
    return bool(variable.trainable and fixed and variable.is_initialized())


def _number(name: str) -> int:
    """Return the number in a variable's key. TensorFlow numbers objects in creation order, the same on all ranks."""
    digits = name.rpartition("_")[2]
    return int(digits) if digits.isdigit() else 0


def _forms(group: ScriptGroup, objects: list[Any]) -> list[Any]:
    group.agree("the weights that exist")
    rows: list[Any] = group.messages.allgather_json(
        [f"{weight.dtype.name} {tuple(weight.shape)}" for weight in objects]
    )
    return rows


def _refuse_different(group: ScriptGroup) -> bool:
    if group.rank == 0:
        sys.stderr.write(
            "hpcdl: warning: the ranks have made different weights, so only those that are trained begin alike; make "
            "the same models on every rank, or call hpcdl.broadcast_variables(model.variables)\n"
        )
    return True


def _report_unchanged(objects: list[Any]) -> bool:
    sys.stderr.write(
        f"hpcdl: {_named(objects)} differ between the ranks and stay each rank's own, since no "
        "layer and no tf.Module holds them; where they are weights call hpcdl.broadcast_variables(variables)\n"
    )
    return True


def _named(variables: list[Any]) -> str:
    return listed([variable.name.removesuffix(":0") for variable in variables], 1)


def _refuse_different_values(odd: list[Any], *, too_late: bool) -> None:
    if too_late:
        text = (
            f"warning: the first forward pass used each rank's own {_named(odd)}, and its gradient is not one of "
            "any model; call hpcdl.broadcast_variables(model.variables) before the loop"
        )
    else:
        text = (
            f"{_named(odd)} differed between the ranks and begin as rank 0's; hpcdl.combine(variable, 'own') "
            "before the first update keeps each rank's own"
        )
    sys.stderr.write(f"hpcdl: {text}\n")

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
from hpcdl.scripts.fit.adapted import tell_of_adapted
from hpcdl.scripts.fit.variables import chosen_for
from hpcdl.scripts.process.session import session
from hpcdl.step.keras_internals import trained_by
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
            tell_of_adapted(_living(keras.layers.Layer)[0], group)
        found = _listed(group)
        rows = _forms(group, found)
        for wait_s in _SWEEPS_S:
            if all(row == rows[0] for row in rows):
                break
            # One rank may hold garbage that another has collected. TensorFlow's threads release it only after a moment.
            time.sleep(wait_s)
            found.clear()  # else the list would keep the garbage alive, and it would be listed again
            gc.collect()
            found = _listed(group)
            rows = _forms(group, found)
        if any(row != rows[0] for row in rows):
            group.keep("said that weights differ in number", lambda: _say_different(group))
            return
        digests = group.messages.allgather_json([digest_of(one) for one in found])
        values = dict(zip(map(unique, found), zip(*digests, strict=True), strict=True))
        odd = [one for one in found if len(set(values[unique(one)])) > 1]
        if not odd:
            return
        if trained is None:
            broadcast_variables(group.messages, odd)
            return
        held = _held_by_models() | set(trained)
        copied = {values[name] for name in held & set(values)}  # a running mean of weights begins as a copy of them
        mine = [unique(one) not in held and values[unique(one)] not in copied for one in odd]
        stays = group.messages.allgather_json(mine)[0]
        own = [one for one, stay in zip(odd, stays, strict=True) if stay]
        common = [one for one, stay in zip(odd, stays, strict=True) if not stay]
        unexpected = [one for one in common if unique(one) not in trained]
        if group.rank == 0 and unexpected:
            _say_different_values(unexpected, too_late=too_late)
        if group.rank == 0 and own:
            group.keep("said which variables no model holds", lambda: _say_what_stays(own))
        broadcast_variables(group.messages, common)


def _held_by_models() -> set[str]:
    """Return the keys of all variables that Keras layers or tf.Modules hold."""
    of_keras, modules = _living(keras.Variable, tf.Module)
    variables = [one for module in modules for one in module.variables]
    return {unique(one) for one in [*(one.value for one in of_keras), *variables]}


def unique(variable: Any) -> str:
    """Return a key that identifies a TensorFlow variable within the process."""
    return str(getattr(variable, "_unique_id", id(variable)))


def _listed(group: ScriptGroup) -> list[Any]:
    """Return the weights that have not been made equal yet, in the order of their creation."""
    optimizers, of_keras, variables = _living(keras.optimizers.Optimizer, keras.Variable, tf.Variable)
    kept = {unique(one.value) for optimizer in optimizers for one in _trained_alone(optimizer)}
    chosen = {unique(one.value) for one in of_keras if chosen_for(one) is not None}
    found = {unique(one): one for one in variables if _is_weight(one) and chosen_for(one) is None}
    others = kept | chosen | group.started
    names = [name for name in found if name not in others]
    return [found[name] for name in sorted(names, key=_number)]


def _living(*classes: type) -> list[list[Any]]:
    """Return all objects of each class. Checking the types first is faster than an isinstance per object."""
    objects = gc.get_objects()
    types = {type(one) for one in objects}
    wanted = [{kind for kind in types if issubclass(kind, one)} for one in classes]
    return [[one for one in objects if type(one) in kinds] for kinds in wanted]


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


def _forms(group: ScriptGroup, found: list[Any]) -> list[Any]:
    group.agree("the weights that exist")
    rows: list[Any] = group.messages.allgather_json([f"{one.dtype.name} {tuple(one.shape)}" for one in found])
    return rows


def _say_different(group: ScriptGroup) -> bool:
    if group.rank == 0:
        sys.stderr.write(
            "hpcdl: warning: the ranks have made different weights, so only those that are trained begin alike; make "
            "the same models on every rank, or call hpcdl.broadcast_variables(model.variables)\n"
        )
    return True


def _say_what_stays(own: list[Any]) -> bool:
    sys.stderr.write(
        f"hpcdl: {_named(own)} differ between the ranks and stay each rank's own, since no "
        "layer and no tf.Module holds them; where they are weights call hpcdl.broadcast_variables(variables)\n"
    )
    return True


def _named(variables: list[Any]) -> str:
    return listed([one.name.removesuffix(":0") for one in variables], 1)


def _say_different_values(odd: list[Any], *, too_late: bool) -> None:
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

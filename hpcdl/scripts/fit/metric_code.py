"""Whether a metric of the script's own adds to its state or sets it, as its code says: only sums may be added up."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

_SETS = ("scatter_update", "scatter_nd_update", "scatter_max", "scatter_min", "scatter_nd_max", "scatter_nd_min")
_OF_FORM = ("dtype", "shape", "ndim", "name", "zeros_like", "ones_like")
"""What depends on the form of a variable, not on its value."""


def sets_state(metric: Any) -> bool:
    """Return whether `update_state` of a metric, or a method that it calls, does anything but add to the state.

    What it adds must not depend on the state, as in a running mean: `mean.assign_add((value - mean) / count)`.
    """
    try:
        return any(_sets(function, metric) for function in _functions(metric))
    except (OSError, TypeError, SyntaxError):  # the source is unknown
        return True


def _functions(metric: Any) -> Iterator[ast.AST]:
    """Yield the code of `update_state` and of the metric's methods that it calls, with those that these replace."""
    names = ["update_state"]
    for name in names:
        for kind in type(metric).__mro__:
            method = vars(kind).get(name)
            if kind.__module__.partition(".")[0] == "keras":
                break
            if not inspect.isfunction(method):
                continue
            tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
            yield tree
            called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
            attributes = {one.attr for one in called if isinstance(one, ast.Attribute)}
            names += attributes.difference(names)
            if name not in attributes:  # it does not call the method that it replaces
                break


def _sets(function: ast.AST, metric: Any) -> bool:
    derived: set[str] = set()
    """Local names whose values depend on the state."""
    while found := {name for name in _derived(function, metric, derived) if name not in derived}:
        derived |= found
    for node in ast.walk(function):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr in _SETS:
            return True
        if node.func.attr in ("assign", "assign_add", "assign_sub") and node.args:
            terms = [node.args[0]]
            if node.func.attr == "assign":
                terms = _terms(node.args[0])
                own = [term for term in terms if ast.unparse(term) == ast.unparse(node.func.value)]
                if not own:
                    return True
                terms.remove(own[0])
            if any(_depends(term, metric, derived) for term in terms):
                return True
    return False


def _terms(value: ast.expr) -> list[ast.expr]:
    """Return what `value` adds up, by + or by a function `add`."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return _terms(value.left) + _terms(value.right)
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "add":
        return [term for one in value.args for term in _terms(one)]
    return [value]


def _derived(function: ast.AST, metric: Any, derived: set[str]) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and _depends(node.value, metric, derived):
            yield from (one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name))


def _depends(node: ast.AST, metric: Any, derived: set[str]) -> bool:
    """Return whether a value depends on a variable of the metric."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _OF_FORM:
        return False
    if isinstance(node, ast.Attribute):
        if node.attr in _OF_FORM:
            return False
        if isinstance(node.value, ast.Name) and _is_state(getattr(metric, node.attr, None)):  # self.total
            return True
    if isinstance(node, ast.Name):
        return node.id in derived
    return any(_depends(one, metric, derived) for one in ast.iter_child_nodes(node))


def _is_state(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(one, (keras.Variable, tf.Variable)) for one in parts)

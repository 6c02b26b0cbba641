"""Least squares for laws log u(n) = log u0 + sign log D(n), D(n) = 1 + own . columns(n), by Gauss-Newton."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, Any]

_ITERATIONS = 50


@dataclass(frozen=True, kw_only=True)
class Solution:
    """`point` is (u0, own parameters); `jacobian` that of log u in (log u0, own parameters)."""

    point: tuple[float, ...]
    jacobian: Array
    residual: Array


def solve(sign: int, columns: Array, log_u: Array) -> Solution | None:
    """Fit `log_u` (one value for each run) with `columns` (runs, parameters); None where no finite u0 comes out."""
    import numpy

    start = _linear_start(sign, columns, log_u)
    own = start if (1 + columns @ start).min() > 0 else numpy.zeros(columns.shape[1])
    for _ in range(_ITERATIONS):
        jacobian, residual = _linearise(sign, columns, log_u, own)
        step = numpy.linalg.lstsq(jacobian, residual, rcond=None)[0][1:]
        size = 1.0
        while size > 1e-6 and not _improves(sign, columns, log_u, own + size * step, residual):
            size /= 2
        if size <= 1e-6:
            break
        own = own + size * step
        if numpy.abs(size * step).max() <= 1e-12 * (1 + numpy.abs(own).max()):
            break
    jacobian, residual = _linearise(sign, columns, log_u, own)
    u0 = float(numpy.exp((log_u - sign * numpy.log(1 + columns @ own)).mean()))
    return Solution(point=(u0, *map(float, own)), jacobian=jacobian, residual=residual) if math.isfinite(u0) else None


def _linear_start(sign: int, columns: Array, log_u: Array) -> Array:
    """u^sign is linear in the parameters; weights make relative errors equal."""
    import numpy

    weights = numpy.exp(-sign * log_u)
    design = numpy.column_stack([numpy.ones(len(log_u)), columns]) * weights[:, None]
    linear = numpy.linalg.lstsq(design, numpy.ones(len(log_u)), rcond=None)[0]
    own: Array = linear[1:] / linear[0] if linear[0] > 0 else numpy.zeros(columns.shape[1])
    return own


def _linearise(sign: int, columns: Array, log_u: Array, own: Array) -> tuple[Array, Array]:
    """Jacobian of log u, and the residual with log u0 at its best."""
    import numpy

    denominator = 1 + columns @ own
    jacobian = numpy.column_stack([numpy.ones(len(log_u)), sign * columns / denominator[:, None]])
    rest = log_u - sign * numpy.log(denominator)
    return jacobian, rest - rest.mean()


def _improves(sign: int, columns: Array, log_u: Array, own: Array, residual: Array) -> bool:
    if (1 + columns @ own).min() <= 0:
        return False
    _, new = _linearise(sign, columns, log_u, own)
    return bool(new @ new <= residual @ residual)

"""Scaling laws, linear models and the alpha-beta model, fitted with intervals, by relative errors.

A fit of a law takes single runs, never their means.

With u(n) = X(n)/n, the throughput per worker, each law reads u(n) = X(1) D(n)^sign, D(n) = 1 + sum_i own_i column_i(n):

    amdahl      sign -1   column n - 1                     Amdahl, AFIPS 1967
    usl         sign -1   columns n - 1 and n (n - 1)      Gunther, Guerrilla Capacity Planning, 2007
    gustafson   sign +1   column -(n - 1)/n                Gustafson, Communications of the ACM 31, 1988

Noise of throughput is relative, so log u is fitted by least squares: Gauss-Newton from the weighted linear solution.

Also fits the laws to curves, finds the size at which efficiency falls below 80 %, and fits alpha and beta.

Exposed communication: seconds = alpha x rounds + beta x bytes + constant, none below 0, as comm/observed counted them
on the busiest rank, for any variant, period, packing or number of ranks of a run. The seconds exclude communication
that computing hides, so alpha and beta are those that training experiences, at most those of the network itself.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcdl.core.statistics import t_quantile, variance
from hpcdl.core.units import listed
from hpcdl.report.analysis.scaling import Curve
from hpcdl.report.runs.run import Run, positive

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, Any]


MOST_WORKERS = 2**24
"""Upper limit of the search for a crossing: beyond any machine."""
_LARGEST_LOG = 700.0  # math.exp overflows at 709.8
_ITERATIONS = 50
SERIAL = "serial_fraction"
"""A parameter that is at most 1, unless throughput falls as n grows."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A fitted value with its 95 % Student-t interval. The bounds are None without spare runs to estimate them."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Law:
    """One law. `columns(n)` and `own` (the names of its parameters other than X(1)) correspond."""

    name: str
    own: tuple[str, ...]
    sign: int
    columns: Callable[[float], tuple[float, ...]]

    def denominator(self, parameters: Sequence[float], n: float) -> float:
        """Return D(n), which is not positive outside the law's domain."""
        return 1 + sum([value * column for value, column in zip(parameters, self.columns(n), strict=True)])


LAWS: Mapping[str, Law] = {
    law.name: law
    for law in (
        Law(name="amdahl", own=(SERIAL,), sign=-1, columns=lambda n: (n - 1,)),
        Law(name="gustafson", own=(SERIAL,), sign=1, columns=lambda n: ((1 - n) / n,)),
        Law(name="usl", own=("sigma", "kappa"), sign=-1, columns=lambda n: (n - 1, n * (n - 1))),
    )
}


@dataclass(frozen=True, kw_only=True)
class ScalingFit:
    """Throughput against n by one law.

    `parameters` are `x1` (X at n = 1) and the law's own. `r2` is on log u: on X itself it would be near 1 for every
    law. `spread` is the relative residual standard deviation. `covariance` is that of (log X(1), own parameters).
    `saturated`: there are as many parameters as different n, so the runs cannot contradict the law.
    """

    law: Law
    parameters: Mapping[str, Parameter]
    covariance: tuple[tuple[float, ...], ...] | None
    r2: float | None
    spread: float | None
    num_runs: int
    largest: float
    saturated: bool

    def throughput(self, n: float) -> float:
        """Return X(n) by the law; 0 outside its domain."""
        denominator = self.law.denominator(self._own, n)
        return n * self.parameters["x1"].value * denominator**self.law.sign if denominator > 0 else 0.0

    def efficiency(self, n: float, base: float) -> Parameter:
        """Return (X(n)/n)/(X(base)/base) with its pointwise interval, by the delta method on logarithms."""
        value, low, high = self.efficiency_from(base)(n)
        return Parameter(value=value, low=low, high=high)

    def efficiency_from(self, base: float) -> Callable[[float], tuple[float, float | None, float | None]]:
        """Return `efficiency` as a function of n (value and bounds). Terms without n are computed once."""
        coefficients, law = self._own, self.law
        at_base, columns_at_base = law.denominator(coefficients, base), law.columns(base)
        quantile = 0.0 if self.covariance is None else t_quantile(0.975, self.num_runs - len(coefficients) - 1)
        inner = () if self.covariance is None else tuple(row[1:] for row in self.covariance[1:])

        def efficiency(n: float) -> tuple[float, float | None, float | None]:
            columns = law.columns(n)
            denominator = 1 + sum([value * column for value, column in zip(coefficients, columns, strict=True)])
            if min(denominator, at_base) <= 0:
                return 0.0, None, None
            log_value = law.sign * math.log(denominator / at_base)
            if not inner:
                return math.exp(log_value), None, None
            pairs = zip(columns, columns_at_base, strict=True)
            slopes = [here / denominator - there / at_base for here, there in pairs]
            variance = sum([a * c * b for a, row in zip(slopes, inner, strict=True)
                            for c, b in zip(row, slopes, strict=True)])  # fmt: skip
            reach = quantile * math.sqrt(max(variance, 0.0))
            low, high = math.exp(max(log_value - reach, -_LARGEST_LOG)), math.exp(min(log_value + reach, _LARGEST_LOG))
            return math.exp(log_value), low, high

        return efficiency

    @property
    def _own(self) -> list[float]:
        return [self.parameters[name].value for name in self.law.own]


def fit_scaling(law: Law, n: Sequence[float], throughput: Sequence[float]) -> ScalingFit | None:
    """Fit `law` to single runs (`throughput[i]` > 0 at `n[i]` >= 1).

    Returns None if there are fewer different n than parameters, or if no parameters of the law fit the runs.
    """
    import numpy

    if len(set(n)) < len(law.own) + 1:
        return None
    try:
        # By default numpy only warns, and continues with infinities.
        with numpy.errstate(over="raise", divide="raise", invalid="raise"):
            return _fit(law, n, throughput)
    except FloatingPointError:  # numbers at the limits of floating point
        return None


def _fit(law: Law, n: Sequence[float], throughput: Sequence[float]) -> ScalingFit | None:
    import numpy

    columns = numpy.array([law.columns(size) for size in n])
    log_u = numpy.log(numpy.asarray(throughput, dtype=float) / numpy.asarray(n, dtype=float))
    free = solution = _solve(law.sign, columns, log_u)
    if free is None or solution is None:
        return None
    at_bound = numpy.zeros(len(law.own), dtype=bool)
    # A parameter without a column returns as 0 or a rounding error of either sign, so it is not checked again.
    while (below := (numpy.array(solution.point[1:]) < 0) & ~at_bound).any():
        # No law has negative contention: fit without it, and keep how much of it the runs leave possible.
        at_bound |= below
        columns = numpy.where(at_bound, 0.0, columns)
        solution = _solve(law.sign, columns, log_u)
        if solution is None:
            return None
    residual, spare = solution.residual, len(n) - len(solution.point)
    total = float(((log_u - log_u.mean()) ** 2).sum())
    covariance = solution.covariance(spare)
    reach = solution.reach(covariance, spare)
    # A parameter held at its bound has no variance of its own: its interval comes from the free fit.
    free_reach = reach if free is solution else free.reach(free.covariance(spare), spare)
    x1, *coefficients = solution.point
    parameters = {"x1": _parameter(x1, reach[0], on_logarithm=True)}
    for index, (name, bound) in enumerate(zip(law.own, at_bound, strict=True), start=1):
        value, half = (0.0, free_reach[index]) if bound else (coefficients[index - 1], reach[index])
        parameters[name] = _not_negative(value, half, most=1.0 if name == SERIAL else math.inf)
    return ScalingFit(
        law=law,
        parameters=parameters,
        covariance=None if covariance is None else tuple(tuple(map(float, row)) for row in covariance),
        r2=1 - float(residual @ residual) / total if total > 0 else None,
        spread=math.sqrt(float(residual @ residual) / spare) if spare > 0 else None,
        num_runs=len(n),
        largest=float(max(n)),
        saturated=len(set(n)) == len(law.own) + 1,
    )


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """The number of workers at which efficiency falls below `target`, a real number; None if never up to MOST_WORKERS.

    The interval is where the 95 % band crosses; `high` None means that the runs set no upper bound.
    """

    target: float
    n: float | None
    low: float | None
    high: float | None
    extrapolated: bool


def crossing(fit: ScalingFit, base: float, target: float = 0.8) -> Crossing:
    """Return the number of workers at which the fitted efficiency relative to `base` falls below `target`."""
    efficiency = functools.cache(fit.efficiency_from(base))  # the three searches start with the same n
    middle = _first(lambda n: efficiency(n)[0] < target, base)
    low = high = None
    if fit.covariance is not None:
        # Outside the law's domain there is no interval: that counts as below the target.
        low = _first(lambda n: (efficiency(n)[1] or 0.0) < target, base)
        high = _first(lambda n: (efficiency(n)[2] or 0.0) < target, base)
    return Crossing(target=target, n=middle, low=low, high=high, extrapolated=middle is None or middle > fit.largest)


def _first(below: Callable[[float], bool], base: float) -> float | None:
    """Return the smallest n >= base with `below(n)`, to 1e-6 relative: doubling, then bisection."""
    low = high = float(base)
    while not below(high):
        if high >= MOST_WORKERS:
            return None
        low, high = high, high * 2
    # Invariant: `below(high)` holds, and `below(low)` does not unless the base itself is below.
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if below(middle) else (middle, high)
    return high


def _parameter(value: float, half: float, on_logarithm: bool = False) -> Parameter:
    if math.isnan(half):
        return Parameter(value=value)
    if on_logarithm:
        reach = min(half, _LARGEST_LOG)
        return Parameter(value=value, low=value * math.exp(-reach), high=value * math.exp(reach))
    return Parameter(value=value, low=value - half, high=value + half)


@dataclass(frozen=True, kw_only=True)
class _Solution:
    """`point` is (u0, own parameters); `jacobian` is that of log u in (log u0, own parameters)."""

    point: tuple[float, ...]
    jacobian: Array
    residual: Array

    def covariance(self, spare: int) -> Array | None:
        """Return the covariance of (log u0, own parameters); None without a spare run."""
        import numpy

        if spare <= 0:
            return None
        # A parameter at its bound has a column of zeros, so the matrix may be singular.
        inverse: Array = numpy.linalg.pinv(self.jacobian.T @ self.jacobian)
        return inverse * float(self.residual @ self.residual) / spare

    def reach(self, covariance: Array | None, spare: int) -> list[float]:
        """Return the half widths of their 95 % intervals; NaN without a spare run."""
        if covariance is None:
            return [math.nan] * len(self.point)
        quantile = t_quantile(0.975, spare)
        return [quantile * math.sqrt(max(float(covariance[index, index]), 0.0)) for index in range(len(self.point))]


def _solve(sign: int, columns: Array, log_u: Array) -> _Solution | None:
    """Fit log u = log u0 + sign log D to `log_u` (one value per run) by Gauss-Newton; None without a finite u0.

    `columns` is (runs, parameters).
    """
    import numpy

    start = _linear_start(sign, columns, log_u)
    # The logarithm needs D > 0 at every run; with all own parameters 0 it is 1.
    coefficients = start if (1 + columns @ start).min() > 0 else numpy.zeros(columns.shape[1])
    denominator = 1 + columns @ coefficients
    residual = _residual(sign, log_u, denominator)
    for _ in range(_ITERATIONS):
        # The first unknown, log u0, is dropped: `_residual` takes its best value for any parameters.
        step = numpy.linalg.lstsq(_jacobian(sign, columns, denominator), residual, rcond=None)[0][1:]
        # Steps are halved while they leave the domain or raise the squares, because Gauss-Newton alone may diverge.
        size = 1.0
        while size > 1e-6:
            candidate = 1 + columns @ (coefficients + size * step)
            if candidate.min() > 0:
                new = _residual(sign, log_u, candidate)
                if new @ new <= residual @ residual:
                    break
            size /= 2
        else:
            break
        coefficients, denominator, residual = coefficients + size * step, candidate, new
        if numpy.abs(size * step).max() <= 1e-12 * (1 + numpy.abs(coefficients).max()):
            break
    u0 = float(numpy.exp((log_u - sign * numpy.log(denominator)).mean()))
    if not math.isfinite(u0):
        return None
    return _Solution(
        point=(u0, *map(float, coefficients)), jacobian=_jacobian(sign, columns, denominator), residual=residual
    )


def _linear_start(sign: int, columns: Array, log_u: Array) -> Array:
    """Return the linear solution as a start: u^sign is linear in the parameters; weights make errors relative."""
    import numpy

    weights = numpy.exp(-sign * log_u)
    design = numpy.column_stack([numpy.ones(len(log_u)), columns]) * weights[:, None]
    try:
        linear = numpy.linalg.lstsq(design, numpy.ones(len(log_u)), rcond=None)[0]
    except numpy.linalg.LinAlgError:  # numbers at the limits of floating point
        linear = numpy.zeros(1 + columns.shape[1])
    coefficients: Array = linear[1:] / linear[0] if linear[0] > 0 else numpy.zeros(columns.shape[1])
    return coefficients


def _jacobian(sign: int, columns: Array, denominator: Array) -> Array:
    """Return the Jacobian of log u in (log u0, own parameters)."""
    import numpy

    jacobian = numpy.empty((len(columns), 1 + columns.shape[1]))
    jacobian[:, 0] = 1.0
    jacobian[:, 1:] = sign * columns / denominator[:, None]
    return jacobian


def _residual(sign: int, log_u: Array, denominator: Array) -> Array:
    """Return the residual of log u at the best log u0."""
    import numpy

    errors = log_u - sign * numpy.log(denominator)
    result: Array = errors - numpy.add.reduce(errors) / len(errors)  # `mean` itself takes longer for so few values
    return result


@dataclass(frozen=True, kw_only=True)
class LinearFit:
    """Coefficients with 95 % Student-t intervals. `r2` and `spread` are for relative residuals."""

    coefficients: tuple[Parameter, ...]
    r2: float | None
    spread: float | None
    num_runs: int


MOST_CONDITION = 30.0
"""Largest condition number of a design with unit columns. Above it (Belsley 1980) coefficients cannot be separated."""


def fit_relative(design: Sequence[Sequence[float]], measured: Sequence[float]) -> LinearFit | None:
    """Fit measured = design . coefficients >= 0, with errors proportional to the model (iteratively reweighted).

    `design` is (runs, coefficients). Returns None if the runs cannot separate the coefficients, or if the model is not
    positive at a run. The weights follow the model, not the measurement, which would bias the fit downwards.
    """
    import numpy
    from scipy.optimize import nnls

    matrix, values = numpy.asarray(design, dtype=float), numpy.asarray(measured, dtype=float)
    scale = numpy.linalg.norm(matrix / values[:, None], axis=0)
    if (scale == 0).any() or len(values) < matrix.shape[1]:
        return None
    scaled = matrix / scale
    # Not `>=`: a condition number may be NaN, and must be refused too.
    if not numpy.linalg.cond(scaled / values[:, None]) < MOST_CONDITION:
        return None
    model = values
    for _ in range(_ITERATIONS):
        solution, _ = nnls(scaled / model[:, None], values / model)
        previous, model = model, scaled @ solution
        if model.min() <= 0:
            return None
        if numpy.abs(model / previous - 1).max() < 1e-12:
            break
    return _with_intervals(scaled, values, scale, solution)


def _with_intervals(scaled: Array, values: Array, scale: Array, solution: Array) -> LinearFit:
    """Add intervals. A coefficient at its bound of 0 gets what unbounded least squares leaves above 0."""
    import numpy

    model = scaled @ solution
    weighted, residual = scaled / model[:, None], values / model - 1
    spare = len(values) - len(solution)
    squares = float(residual @ residual)
    spread = math.sqrt(squares / spare) if spare > 0 else None
    # The weighted mean is the best constant under these weights, with which R² compares the fit.
    centred = values / model - numpy.average(values, weights=1 / model**2) / model
    total = float(centred @ centred)
    reach = numpy.full(len(solution), numpy.nan)
    if spread is not None:
        covariance = numpy.linalg.inv(weighted.T @ weighted) * spread**2
        reach = t_quantile(0.975, spare) * numpy.sqrt(numpy.diag(covariance))
    return LinearFit(
        coefficients=tuple(
            _not_negative(float(value), float(half))
            for value, half in zip(solution / scale, reach / scale, strict=True)
        ),
        r2=1 - squares / total if total > 0 else None,
        spread=spread,
        num_runs=len(values),
    )


def _not_negative(value: float, half: float, most: float = math.inf) -> Parameter:
    """Return a parameter whose interval at its bound reaches as far up as one that was found there.

    The best unbounded fit is below 0: counted from there, an interval could end at 0, as if that were certain. A value
    above `most` belongs to a curve that the law cannot describe, so its interval does not end at the value either.
    """
    if math.isnan(half):
        return Parameter(value=value)
    bound = most if value <= most else math.inf
    return Parameter(value=value, low=max(0.0, value - half), high=min(value + half, bound))


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """A message of n bytes takes latency + n seconds_per_byte (Hockney 1994). Neither is negative."""

    latency_s: float
    seconds_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        """Return the model's seconds for `num_bytes`."""
        return self.latency_s + self.seconds_per_byte * num_bytes

    @property
    def bytes_per_second(self) -> float | None:
        """The bandwidth of long messages; None if time does not grow with size."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte > 0 else None


def alpha_beta(num_bytes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta | None:
    """Return the least-squares fit of relative errors, so that short messages count as much as long ones.

    Returns None with fewer than two different sizes: one point fits any latency.
    """
    if len(set(num_bytes)) < 2:
        return None
    # Minimize sum((alpha x + beta y - 1)^2) with x = 1/t, y = n/t, over alpha, beta >= 0.
    columns = [(1 / t, n / t) for n, t in zip(num_bytes, seconds, strict=True)]
    xx = sum(x * x for x, _ in columns)
    xy = sum(x * y for x, y in columns)
    yy = sum(y * y for _, y in columns)
    x1 = sum(x for x, _ in columns)
    y1 = sum(y for _, y in columns)
    # It is positive for two different sizes (Cauchy-Schwarz).
    determinant = xx * yy - xy * xy
    alpha = (x1 * yy - y1 * xy) / determinant
    beta = (y1 * xx - x1 * xy) / determinant
    # The bounded minimum is on the violated bound. Both cannot be violated, because all times are positive.
    if alpha < 0:
        alpha, beta = 0.0, y1 / yy
    elif beta < 0:
        alpha, beta = x1 / xx, 0.0
    return AlphaBeta(latency_s=alpha, seconds_per_byte=beta)


_LAWS_OF_MODE: Mapping[str, tuple[str, ...]] = {
    "weak": ("gustafson", "usl"),
    "strong": ("amdahl", "usl"),
    "scale-up": ("amdahl", "usl"),
}
TARGET = 0.8
_WORTH_TELLING = 0.05
"""The largest deviation of a law from the points it is fitted to that is not reported."""


@dataclass(frozen=True, kw_only=True)
class CurveFit:
    """One law fitted to the single runs of one curve."""

    curve: Curve
    fit: ScalingFit
    below: Crossing

    @property
    def nodes_per_n(self) -> float | None:
        """Nodes per worker if that is the same along the curve, else None."""
        shares = {point.first.nodes / point.n for point in self.curve.points}
        return shares.pop() if len(shares) == 1 and self.curve.axis == "workers" else None

    @property
    def missed(self) -> float | None:
        """The law's deviation from the points' means, if noise does not explain it; None if the law may describe them.

        The F test of lack of fit against the scatter of repeats, at 1 %. No law is exact: small misses do not count.
        """
        logs = [[math.log(run.images_per_second or 1.0) for run in point.runs] for point in self.curve.points]
        spare = self.fit.num_runs - len(self.fit.parameters)
        free, repeats = len(logs) - len(self.fit.parameters), self.fit.num_runs - len(logs)
        if self.fit.spread is None or free < 1 or repeats < 1:
            return None
        # Residual squares split into those of repeats about their means (noise) and the law's own misses.
        noise = sum(variance(values) * (len(values) - 1) for values in logs if len(values) > 1)
        beyond = max(0.0, self.fit.spread**2 * spare - noise)
        off = math.sqrt(beyond / self.fit.num_runs)
        from scipy.special import fdtrc

        # Equal repeats leave no noise, which could explain any miss.
        chance = float(fdtrc(free, repeats, beyond / free / (noise / repeats))) if noise else 0.0
        return off if off > _WORTH_TELLING and chance < 0.01 else None

    def as_json(self) -> dict[str, Any]:
        """Return one entry of `fits` in report.json."""
        run = self.curve.first
        return {
            "law": self.fit.law.name,
            "mode": self.curve.mode,
            "strategy": run.strategy,
            "model": run.model,
            "machine": run.machine,
            "version": run.version,
            "batch_per_rank": None if self.curve.mode == "strong" else run.batch_per_rank,
            "global_batch": run.global_batch if self.curve.mode == "strong" else None,
            "variant": self.curve.variant,
            "split": dict(self.curve.split),
            "axis": self.curve.axis,
            "base": self.curve.points[0].n,
            "parameters": {name: dataclasses.asdict(value) for name, value in self.fit.parameters.items()},
            "r2": self.fit.r2,
            "spread": self.fit.spread,
            "runs": self.fit.num_runs,
            "saturated": self.fit.saturated,
            "below_80_percent": {**dataclasses.asdict(self.below), "nodes": self.nodes_at(self.below.n)},
        }

    def nodes_at(self, n: float | None) -> float | None:
        """Return the nodes of `n` workers if each worker takes the same share of a node everywhere, else None."""
        share = self.nodes_per_n
        return None if n is None or share is None else n * share


def fit_curves(curves: Sequence[Curve]) -> list[CurveFit]:
    """Fit every law of a curve's mode that has runs at enough different n."""
    fits = []
    for curve in curves:
        n = [float(point.n) for point in curve.points for _ in point.runs]
        throughput = [run.images_per_second or 0.0 for point in curve.points for run in point.runs]
        for name in _LAWS_OF_MODE[curve.mode]:
            fit = fit_scaling(LAWS[name], n, throughput)
            if fit is not None:
                fits.append(CurveFit(curve=curve, fit=fit, below=crossing(fit, float(curve.points[0].n), TARGET)))
    return fits


def misses(fits: Sequence[CurveFit]) -> list[str]:
    """Return one line for all laws that do not describe the curves they were fitted to."""
    missed = [
        f"{fitted.fit.law.name} of {fitted.curve.mode} {fitted.curve.first.strategy} {fitted.curve.first.model} "
        f"({100 * off:.0f} %)"
        for fitted in fits
        if (off := fitted.missed) is not None
    ]
    if not missed:
        return []
    words = "fitted law misses its runs' means" if len(missed) == 1 else "fitted laws miss their runs' means"
    return [
        f"{len(missed)} {words} by more than repeats scatter; do not trust parameters, intervals and the n below 80 %: "
        f"{listed(missed)}"
    ]


CANNOT_KNOW = (
    "rounds and bytes rise together in these runs, so that α and β cannot be separated; runs with another"
    " --bucket-size, --variant or model change one without the other"
)

EXPLAINS_NOTHING = "seconds do not follow rounds and bytes in these runs: the fit is worse than their mean"


@dataclass(frozen=True, kw_only=True)
class CommunicationFit:
    """Alpha (seconds per round), beta (seconds per byte) and a constant of one strategy on one machine.

    The constant is None if the runs are too few for one. If `fit` is None, `left_out` says why.
    """

    strategy: str
    machine: str
    fit: LinearFit | None
    left_out: str = ""

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """The coefficients by name."""
        return {} if self.fit is None else dict(zip(_COEFFICIENTS, self.fit.coefficients, strict=False))

    def as_json(self) -> dict[str, Any]:
        """Return one entry of `fits` in report.json."""
        assert self.fit is not None
        return {
            "law": "alpha-beta",
            "strategy": self.strategy,
            "machine": self.machine,
            "parameters": {name: dataclasses.asdict(value) for name, value in self.parameters.items()},
            "r2": self.fit.r2,
            "spread": self.fit.spread,
            "runs": self.fit.num_runs,
        }


_COEFFICIENTS = ("alpha_seconds", "beta_seconds_per_byte", "constant_seconds")
_ENOUGH_FOR_A_CONSTANT = 4  # three coefficients, and one exchange more that could contradict them


def fit_communication(runs: Sequence[Run]) -> list[CommunicationFit]:
    """Fit each strategy and machine whose runs differ in rounds or bytes, or say why alpha and beta cannot be found.

    No coefficient is negative. Four or more different exchanges also give a constant, the cost of every exchange.
    """
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        if _measured(run):
            groups.setdefault((run.strategy, run.machine, run.processor), []).append(run)
    fits = []
    for (strategy, machine, processor), members in sorted(groups.items()):
        design = [(run.rounds_per_step or 0.0, run.round_bytes_per_step or 0.0) for run in members]
        # One kind of exchange fits any pair of alpha and beta.
        if len(set(design)) < 2:
            continue
        seconds = [run.parts["exposed_communication"] for run in members]
        fit = None
        if len(set(design)) >= _ENOUGH_FOR_A_CONSTANT:
            fit = fit_relative([(*row, 1.0) for row in design], seconds)
        # The runs may not separate the constant from alpha, but still alpha from beta.
        fit = fit or fit_relative(design, seconds)
        left_out = "" if fit else CANNOT_KNOW
        if fit is not None and (fit.r2 or 0.0) < 0:
            fit, left_out = None, EXPLAINS_NOTHING
        fits.append(CommunicationFit(strategy=strategy, machine=machine or processor, fit=fit, left_out=left_out))
    return fits


def _measured(run: Run) -> bool:
    counted = positive(run.rounds_per_step) and positive(run.round_bytes_per_step)
    return run.usable and counted and positive(run.parts.get("exposed_communication"))

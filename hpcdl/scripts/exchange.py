"""Combine the gradients of a script's step over the ranks: dense ones in buckets, sparse ones gathered and kept sparse.

The exchange itself is the strategy's (strategies/allreduce). This module adds what scripts need: ranks first agree on
the step's gradients, None stays None, and weights are made equal before the first step and compared from then on.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy
import tensorflow as tf

from hpcdl.collectives.slices import gather_pieces
from hpcdl.comm.arithmetic import all_finite
from hpcdl.comm.observed import for_exchange, recorder_of
from hpcdl.config.forms import parse_compression
from hpcdl.config.schema import ExchangeConfig, OptimizerConfig
from hpcdl.config.settings import AUTO
from hpcdl.core.errors import UsageError
from hpcdl.core.units import parse_bytes
from hpcdl.scripts.collectives.tensors import check_traceable, turn_begins, turn_ends
from hpcdl.scripts.existing import existing_alike, unique
from hpcdl.scripts.fit.files import save_once
from hpcdl.scripts.fit.loop_sums import LoopSums
from hpcdl.scripts.fit.metrics import note_results
from hpcdl.scripts.fit.model import batch_of_loop, note_calls, rows_of_batch, rows_of_call
from hpcdl.scripts.fit.pipelines import note_iterated
from hpcdl.scripts.fit.samples import SamplesOfLoop
from hpcdl.scripts.process.exit import after_updates
from hpcdl.scripts.process.session import DIFFERENT_SAMPLES, SAME_SAMPLES, note_strategy, session, warn_once
from hpcdl.scripts.process.undistributed import note_exchange
from hpcdl.step.layers import layers_of
from hpcdl.strategies.allreduce.compression import Wire
from hpcdl.strategies.allreduce.rest import BucketPart
from hpcdl.strategies.allreduce.worker import AllReduceWorker, broadcast_variables
from hpcdl.strategies.base.graph import behind, call_python, outside_graphs
from hpcdl.strategies.base.strategy import Context, StrategyInfo
from hpcdl.strategies.parameter_server.among_workers import ServersAmongWorkers
from hpcdl.strategies.refusals import unfit_form
from hpcdl.strategies.table import find_strategy
from hpcdl.supervision.control import check_same_weights, digest_of

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array
    from hpcdl.scripts.process.group import ScriptGroup

_ROWS_LOOKED_AT = 64
"""Of a batch, to see whether all ranks have the same one."""
_VALUES_LOOKED_AT = 10_000
"""Of a gradient, for the same reason."""
_TOGETHER = 1 << 62
"""Size in bytes of a bucket without a limit."""
OWN_CHANGES = (
    "use hpcdl.DistributedOptimizer or hpcdl.DistributedGradientTape for every update, one learning rate on all ranks, "
    "and hpcdl.broadcast_variables for what the script sets itself"
)
"""Advice to print if a script's weights differ between ranks."""
Choices = Literal["mean", "sum"], Literal["ranks", "samples"]


@dataclass(frozen=True, kw_only=True)
class ExchangeSettings:
    """How to combine gradients: the settings of DistributedOptimizer and DistributedGradientTape.

    `average_over="samples"` weights each rank's gradient by the samples in its batch, which is exact for unequal
    batches. `gradient_predivide_factor` f: gradients are divided by f before the sum, and by size / f after it.
    `groups`: the number of messages, or lists of variables that travel together. `servers`: how many ranks, the highest
    ones, also are parameter servers (`ps`). `elasticity` and `moving_rate` belong to `sync-easgd`, `outer_rate` and
    `outer_momentum` to `slowmo` and DiLoCo (ElasticConfig). `period`: updates from one exchange of weights to the next,
    by default the strategy's own.
    """

    strategy: str = "ring"
    op: str = "mean"
    compress: str = "none"
    bucket_size: int | str = "25MiB"
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    average_over: str = "ranks"
    groups: int | Sequence[Sequence[Any]] | None = None
    servers: int | None = None
    elasticity: float | None = None
    moving_rate: float | None = None
    period: int | None = None
    outer_rate: float | None = None
    outer_momentum: float | None = None

    def checked(self) -> StrategyInfo:
        """Return the strategy's entry. Raises UsageError for an invalid value or settings that exclude each other."""
        keeps_rest(self.compress)  # refuses an unknown form of compression
        chosen = {"op": self.op, "average_over": self.average_over}
        for (name, value), kind in zip(chosen.items(), Choices, strict=True):
            if value not in get_args(kind):
                raise UsageError(f"{name}={value!r}: choose one of {', '.join(get_args(kind))}")
        if self.op == "sum" and (self.average_over == "samples" or self.gradient_predivide_factor != 1.0):
            raise UsageError("op='sum' is no mean: leave average_over and gradient_predivide_factor out, or use 'mean'")
        if not self.gradient_predivide_factor > 0 or (isinstance(self.groups, int) and self.groups < 1):
            raise UsageError("gradient_predivide_factor and groups are larger than 0")
        info = check_scriptable(self.strategy)
        if self.compress != "none" and not info.features.compression:
            raise UsageError(f"compress={self.compress!r}: strategy {info.name!r} does not have it; leave it out")
        if problem := unfit_form(info, self.compress):
            raise UsageError(f"compress={self.compress!r}: strategy {info.name!r} {problem}")
        if self.servers is not None and not info.features.servers:
            raise UsageError(f"servers={self.servers}: strategy {info.name!r} has none; leave it out, or use 'ps'")
        if self.bucket_size == AUTO:
            raise UsageError(
                "bucket_size='auto': it is found by steps on trial, which a script's own are not; give a size: "
                f"`hpcdl bench step --model FILE.py:build --strategy {info.name} --bucket-size auto` measures some"
            )
        self._check_weights(info)
        return info

    def _check_weights(self, info: StrategyInfo) -> None:
        """Raise UsageError for a setting that does not fit the strategy's kind of exchange (weights or gradients)."""
        features = info.features
        gradients = ("op", "average_over", "groups", "bucket_size", "gradient_predivide_factor", "sparse_as_dense")
        odd = self._given(gradients) if moves_own_weights(info) else []
        if odd:
            raise UsageError(f"{', '.join(odd)}: strategy {info.name!r} exchanges weights, not gradients; leave it out")
        owners = {
            "elasticity": (features.elastic, "sync-easgd"),
            "moving_rate": (features.elastic, "sync-easgd"),
            "period": (moves_own_weights(info), "local-sgd, slowmo, diloco, streaming-diloco or sync-easgd"),
            "outer_rate": ("outer-rate" in features.periodic, "slowmo, diloco or streaming-diloco"),
            "outer_momentum": ("outer-momentum" in features.periodic, "slowmo, diloco or streaming-diloco"),
        }
        for name, (has, who) in owners.items():
            if not has and (odd := self._given([name])):
                raise UsageError(f"{odd[0]}: strategy {info.name!r} does not have it; leave it out, or use {who}")
        if self.elasticity is not None and self.moving_rate is not None:
            raise UsageError("elasticity and moving_rate exclude each other: alpha is rate x elasticity, or constant")
        if self.period is not None and (type(self.period) is not int or self.period < 1):
            raise UsageError(f"period={self.period!r}: give the updates from one exchange to the next, 1 or more")
        if (self.elasticity is not None and self.elasticity <= 0) or (self.moving_rate or 0) < 0:
            raise UsageError("elasticity is larger than 0, moving_rate is not below 0")
        if self.outer_rate is not None and not self.outer_rate > 0:
            raise UsageError(f"outer_rate={self.outer_rate!r}: give a number larger than 0")
        if self.outer_momentum is not None and not 0 <= self.outer_momentum < 1:
            raise UsageError(f"outer_momentum={self.outer_momentum!r}: give a number from 0 to below 1")

    def _given(self, names: Iterable[str]) -> list[str]:
        """Return those of the settings that differ from their defaults, written as in a script."""
        return [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) != getattr(_PLAIN, name)]

    @property
    def averages_ranks(self) -> bool:
        """Whether gradients become the mean of those of the ranks, each of its own batch."""
        return self.op == "mean" and self.average_over == "ranks"

    def num_servers(self, num_ranks: int) -> int:
        """Return the number of servers among the ranks. Raises UsageError unless it is from 1 to `num_ranks`."""
        if not check_scriptable(self.strategy).features.servers:
            return 0
        servers = 1 if self.servers is None else self.servers
        if not 1 <= servers <= num_ranks:
            raise UsageError(
                f"servers={servers}: give 1 to {num_ranks}, the number of ranks, all of which work as well"
            )
        return servers


_PLAIN = ExchangeSettings()


def keeps_rest(compress: str) -> bool:
    """Return whether a form of compression keeps a residual for the next gradient. Raises UsageError if unknown."""
    try:
        return parse_compression(compress).keeps_rest
    except ValueError as error:
        raise UsageError(f"compress={compress!r}: {error}") from None


def check_scriptable(strategy: str) -> StrategyInfo:
    """Return the entry of a strategy that scripts may use. Raises UsageError with the reason if they may not."""
    info = find_strategy(strategy)
    features = info.features
    if features.keras_fit:
        return info
    reasons = {
        "is one process without an exchange; a script on one rank needs no strategy": info.family == "sequential",
        "runs on TensorFlow's own servers, which must be started before the script": features.open_servers,
        "has its center on servers, ranks that do not run the script": features.servers,
        "lets every rank change the center at any time, so that no two end with the same model": features.lock_free,
    }
    reason = next(text for text, holds in reasons.items() if holds)
    raise UsageError(
        f"strategy={strategy!r} is not for scripts: it {reason}; use sync-easgd, diloco, ps or an all-reduce (ring, "
        "auto, ...: `hpcdl strategies`), or `hpcdl train`"
    )


def moves_own_weights(info: StrategyInfo) -> bool:
    """Return whether each rank has its own weights, which are exchanged instead of gradients."""
    return info.features.elastic or bool(info.features.periodic)


class ScriptWorker(AllReduceWorker):
    """The worker of an all-reduce in whose sums ranks that have joined take part. It also gathers rows.

    `numbers` identifies the variables whose gradients are summed next; compression keeps its residuals by these.
    """

    def __init__(self, context: Context, group: ScriptGroup) -> None:
        super().__init__(context)
        self._group = group
        self._asked = f"compress={self._compress!r}"
        self.numbers: Sequence[int] = ()

    def _collective_of(self, context: Context) -> Any:
        servers = context.num_servers
        return ServersAmongWorkers(servers) if servers else super()._collective_of(context)

    def gather(self, slices: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """Return all ranks' rows of sparse gradients, in rank order, as sparse gradients."""
        if self._group.size == 1:
            values = self.sum_up([sparse.values for sparse in slices], names)
            return [
                tf.IndexedSlices(own_rows, sparse.indices, sparse.dense_shape)
                for own_rows, sparse in zip(values, slices, strict=True)
            ]
        flat = [part for sparse in slices for part in (sparse.values, sparse.indices)]
        types = [*(part.dtype for part in flat), tf.bool]
        *gathered, suspicious = call_python(self._group.summing(self._gather, empty=True), flat, types)
        values = gathered[::2]
        if self.checks_finite:
            values = behind([self._guard.verdict(suspicious, flat[::2], names)], values)
        for own_rows, all_ in zip(flat[::2], values, strict=True):
            all_.set_shape([None, *own_rows.shape[1:]])
        return [
            tf.IndexedSlices(all_, tf.ensure_shape(rows, [None]), sparse.dense_shape)
            for all_, rows, sparse in zip(values, gathered[1::2], slices, strict=True)
        ]

    def _gather(self, *arrays: Array) -> list[Any]:
        everything = [numpy.concatenate(pieces) for pieces in gather_pieces(self._communicator, arrays)]
        return [*everything, not all(all_finite(values.reshape(-1)) for values in everything[::2])]

    def _reducer(
        self, number: int, wire: Wire, first: bool, alone: str = "", pieces: Sequence[BucketPart] = ()
    ) -> Callable[[Array], tuple[Array, bool]]:
        if wire.feedback is not None:
            pieces = [replace(piece, variable=self.numbers[piece.variable]) for piece in pieces]
        reducer = super()._reducer(number, wire, first, alone, pieces)
        exchange: Callable[[Array], tuple[Array, bool]] = self._group.summing(reducer)
        return exchange


class GradientExchange:
    """Combines the gradients of one optimizer or tape over a group. `compared` returns the variables to keep equal.

    Creating one is collective in the group.
    """

    def __init__(
        self, group: ScriptGroup, settings: ExchangeSettings, compared: Callable[[], Iterable[Any]] | None = None
    ) -> None:
        self.group, self.settings = group, settings
        info = settings.checked()
        if moves_own_weights(info):
            raise UsageError(
                f"strategy={info.name!r} is not for tapes: it exchanges weights, not gradients; use "
                "hpcdl.DistributedOptimizer"
            )
        bucket_bytes = settings.bucket_size
        bucket_bytes = parse_bytes(bucket_bytes) if isinstance(bucket_bytes, str) else int(bucket_bytes)
        config = ExchangeConfig(strategy=info.name, bucket_size=bucket_bytes, compress=settings.compress)
        group.agree("an exchange of gradients that begins", [repr(replace(settings, groups=None))])
        context = Context(
            info=info,
            communicator=for_exchange(group.messages),
            num_workers=group.size,
            num_servers=settings.num_servers(group.size),
            exchange=config,
            optimizer=OptimizerConfig(),
        )
        self._compared = compared
        self._num_exchanges = 0
        self._name = name_in(group)
        # The residual that compression keeps belongs to the gradients of one optimizer.
        self._keeps_rest = keeps_rest(settings.compress)
        shared_by = (config, context.num_servers, self._name if self._keeps_rest else "")
        self._worker = group.keep(shared_by, lambda: ScriptWorker(context, group))
        if group.rank == 0:
            sys.stderr.writelines(f"hpcdl: warning: {_in_python(text)}\n" for text in self._worker.warnings)
        note_strategy(info.name)
        save_once()
        if group.size > 1:
            note_results()
        with outside_graphs():  # a function that is traced again refuses new variables
            self._samples = SamplesOfLoop()
        self._sums = note_sums(group, settings)

    def state(self) -> dict[str, Array]:
        """Return this rank's state for a checkpoint: the residual of its compressed gradients."""
        return self._worker.state()

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore what `state` returned. The residual is zero if `arrays` has none."""
        self._worker.restore(arrays)

    @property
    def loss_share(self) -> float | None:
        """Factor for a loss that makes the sum of the gradients the requested mean, or None if there is none."""
        settings, size = self.settings, self.group.size
        return 1 / size if settings.averages_ranks and settings.gradient_predivide_factor == 1.0 and size > 1 else None

    def combine(
        self, gradients: Sequence[Any], variables: Sequence[Any], num_samples: Any = None, *, shared: bool = False
    ) -> list[Any]:
        """Return the combined gradients in the given order: tensors, IndexedSlices or None. Traced into the graph.

        `num_samples`: number of samples in this rank's batch, a number or scalar tensor, for `average_over="samples"`.
        `shared`: the loss has already been multiplied by `loss_share`.
        """
        if self.settings.average_over == "samples" and num_samples is None:
            raise UsageError(
                "average_over='samples' needs to know this rank's number of samples, which fit counts; in a loop of "
                "your own call optimizer.count_samples(n) before apply, or give tape.gradient(..., num_samples=n)"
            )
        check_traceable()
        note_exchange(variables)
        names = [name_of(variable) for variable in variables]
        converted = [tf.convert_to_tensor(gradient) if self._is_dense(gradient) else gradient for gradient in gradients]
        converted = [with_shape_of(variable, gradient) for variable, gradient in zip(variables, converted, strict=True)]
        details = [_form_of(gradient, variable) for gradient, variable in zip(converted, variables, strict=True)]
        weight = tf.cast(0 if num_samples is None else num_samples, tf.float64)
        # Wait for the first gradient: a step whose data has ended must not begin what it cannot take part in.
        first, *second = [
            *(getattr(gradient, "values", gradient) for gradient in reversed(converted) if gradient is not None),
            weight,
        ][:2]
        alone = self.group.size == 1  # no other rank that could use another order
        if not alone and self._sums.looks:
            self._sums.look(batch_of_loop() if self.settings.averages_ranks and not shared else None)
        if not alone and self._compared is not None:
            self._samples.trace_new(rows_of_call)
        # Stage 1: all ranks are in this step with the same gradients, or all end with one error.
        with tf.control_dependencies([*([] if alone else turn_begins()), first]):
            total, begun = self._begin(details, names, weight, [first, *second])
        # Stage 2: the sums, dense gradients first. They are scaled before: a sum may overflow where the mean does not.
        before, after = (None, None) if shared else self._factors(weight, total)
        with tf.control_dependencies([begun]):
            dense = {index: gradient for index, gradient in enumerate(converted) if isinstance(gradient, tf.Tensor)}
            dense = self._sum_up(
                {index: scaled_by(before, gradient) for index, gradient in dense.items()}, names, variables
            )
        # After the dense ones, because messages need one order on all ranks.
        with tf.control_dependencies([begun, *dense.values()]):
            sparse = {
                index: gradient for index, gradient in enumerate(converted) if isinstance(gradient, tf.IndexedSlices)
            }
            sparse = self._gather({index: scaled_by(before, gradient) for index, gradient in sparse.items()}, names)
        combined_by_index: Mapping[int, Any] = dense | sparse
        exchanged = [getattr(gradient, "values", gradient) for gradient in combined_by_index.values()]
        if not alone:
            turn_ends([begun, *exchanged])
        by_name = {
            names[index]: getattr(gradient, "values", gradient)
            for index, gradient in enumerate(converted)
            if gradient is not None
        }
        layers_of(recorder_of(self.group.messages), [*by_name]).gradients_recorded(
            [*by_name.values()], [begun, *exchanged]
        )
        combined = [combined_by_index.get(index) for index in range(len(converted))]
        return [_as_dtype(scaled_by(after, gradient), like) for gradient, like in zip(combined, converted, strict=True)]

    def _is_dense(self, gradient: Any) -> bool:
        return gradient is not None and (self.settings.sparse_as_dense or not isinstance(gradient, tf.IndexedSlices))

    def _begin(
        self, details: Sequence[str], names: Sequence[str], weight: Any, first: Sequence[Any]
    ) -> tuple[Any, Any]:
        """Agree on the step's gradients. Return the number of samples of all ranks, and a tensor to wait for.

        `first`: the first two gradients, which are checked when variables are compared.
        """
        if self.group.size == 1:
            return weight, weight

        count = self.group.summing(self._count)  # a rank that has joined counts with the others

        def begin(num_samples: Array) -> Any:
            forms = [*details, self._name]
            total = self.group.agree("an exchange of gradients", forms, names=names, weight=float(num_samples))
            count()
            return numpy.float64(total), self._is_due()

        total, due = call_python(begin, [weight], [tf.float64, tf.bool])
        # call_python loses shapes, and tf.cond takes a scalar.
        total, due = tf.ensure_shape(total, []), tf.ensure_shape(due, [])
        if self._compared is None:
            return total, total
        with tf.control_dependencies([total]):
            # In a graph, only reads are ordered before the writes of this step.
            return total, tf.cond(due, lambda: self._compare(first), lambda: tf.constant(True))

    def _count(self) -> None:
        self._num_exchanges += 1
        note_updates(self._num_exchanges, self._name)

    def _is_due(self) -> bool:
        return compares_after(self._num_exchanges - 1, self.group)

    def _compare(self, first: Sequence[Any]) -> Any:
        variables = [] if self._compared is None else list(self._compared())
        names = [f"{index}: {name_of(variable)}" for index, variable in enumerate(variables)]
        rows = rows_of_batch(_ROWS_LOOKED_AT)

        def compare(*given: Array) -> bool:
            num_done = self._num_exchanges - 1
            gradients, given = given[: len(first)], given[len(first) :]
            batch, values = given[: len(rows)], given[len(rows) :]
            if num_done == 1:
                # Two: that of the last bias may come from an equation's boundary alone, which all ranks have.
                flat = [gradient.reshape(-1)[:: gradient.size // _VALUES_LOOKED_AT + 1] for gradient in gradients]
                looked_at = numpy.concatenate(flat)
                look_for_same_samples(self.group, looked_at, moved=bool(looked_at.any()), batch=batch)
            self._samples.compare_after(num_done, self.group)
            check_same_weights(
                dict(zip(names, values, strict=True)), self.group.messages, after_updates(num_done), OWN_CHANGES
            )
            return True

        inputs = [*first, *rows, *(held(one).read_value() for one in variables)]
        return tf.ensure_shape(call_python(compare, inputs, tf.bool), [])

    def _factors(self, weight: Any, total: Any) -> tuple[Any, Any]:
        """Return the factors for gradients before and after the sum; None means 1."""
        size, settings = self.group.size, self.settings
        if size == 1 or settings.op == "sum":
            return None, None
        # The batches of all ranks may be empty.
        share = tf.math.divide_no_nan(weight, total) if settings.average_over == "samples" else 1 / size
        factor = settings.gradient_predivide_factor
        return (share, None) if factor == 1.0 else (share * size / factor, factor / size)

    def _sum_up(self, dense: Mapping[int, Any], names: Sequence[str], variables: Sequence[Any]) -> dict[int, Any]:
        """Return the sums over the ranks, with one message per group of gradients."""
        # Half precision would round at every addition, and may overflow where the mean does not.
        wide = {
            index: tf.cast(gradient, tf.float32) if gradient.dtype.size < 4 else gradient
            for index, gradient in dense.items()
        }
        summed: dict[int, Any] = {}
        # One group after another: the order of messages must be the same on all ranks.
        for indices, bucket_bytes in self._groups(wide, variables):
            with tf.control_dependencies(list(summed.values())):
                # Control dependencies hold for operations that are made inside alone, hence the identity.
                to_sum = [tf.identity(wide[index]) if summed else wide[index] for index in indices]
                # A call sums some of the variables: what compression leaves over is kept by their place among all.
                if self._keeps_rest:
                    self._worker.numbers = [self._number(variables[index]) for index in indices]
                sums = self._worker.sum_up(to_sum, [names[index] for index in indices], bucket_bytes)
            summed |= dict(zip(indices, sums, strict=True))
        return summed

    def _number(self, variable: Any) -> int:
        """Return a variable's index among those of the optimizer, the same in every step and after every restart."""
        indices = {key_of(compared): index for index, compared in enumerate(self._compared() if self._compared else ())}
        return indices[key_of(variable)]

    def _groups(self, dense: Mapping[int, Any], variables: Sequence[Any]) -> Iterable[tuple[Sequence[int], int | None]]:
        """Return the indices to sum one group after another, each with its bucket size in bytes."""
        if not dense:
            return []
        groups = self.settings.groups
        if groups is None:
            return [(list(dense), None)]
        if isinstance(groups, int):
            num_bytes = sum(gradient.dtype.size * (gradient.shape.num_elements() or 1) for gradient in dense.values())
            return [(list(dense), -(-num_bytes // groups))]
        group_numbers = {key_of(variable): number for number, group in enumerate(groups) for variable in group}
        # Variables that no list names travel each by themselves.
        alone = itertools.count(len(groups))
        numbers = {index: group_numbers.get(key_of(variables[index]), next(alone)) for index in dense}
        return [
            ([index for index in dense if numbers[index] == number], _TOGETHER)
            for number in dict.fromkeys(numbers.values())
        ]

    def _gather(self, sparse: Mapping[int, Any], names: Sequence[str]) -> dict[int, Any]:
        if not sparse:
            return {}
        gathered = self._worker.gather(list(sparse.values()), [names[index] for index in sparse])
        return dict(zip(sparse, gathered, strict=True))


def _in_python(text: str) -> str:
    """Return a warning with the setting as scripts write it."""
    return re.sub(r"--compress (\S+)", lambda match: f"compress={match[1]!r}", text)


def note_sums(group: ScriptGroup, settings: ExchangeSettings) -> LoopSums:
    """Return what looks at the losses of loops; have them noted if `settings` divide their sum over the ranks."""
    sums = group.keep("sums in loops", lambda: LoopSums(group))
    note_calls()
    note_iterated()
    if group.size > 1 and settings.averages_ranks:
        sums.begin()
    return sums


def look_for_same_samples(group: ScriptGroup, values: Array, *, moved: bool, batch: Sequence[Array] = ()) -> None:
    """Warn once if all ranks computed the same `values`: each then takes the steps that a single rank would take.

    Collective. `values` of a rank that has not `moved` (a zero gradient, unchanged weights) show nothing. If ranks draw
    random numbers of their own (dropout), `values` differ, but the rows of the step's `batch` are the same. Rows of
    one repeated number do not count as samples.
    """
    varied = any((one != one.reshape(-1)[:1]).any() for one in batch)
    digests = [digest_of(values) if moved else "", " ".join(map(digest_of, batch)) if varied else ""]
    gradients, batches = (set(column) for column in zip(*group.messages.allgather_json(digests), strict=True))
    for found, what in ((gradients, "computed the same gradient"), (batches, "were given the same batch")):
        if len(found) == 1 and found != {""}:
            warn_once(
                group,
                SAME_SAMPLES,
                f"all ranks {what}, as if each had the same samples: give them different ones, with "
                f"{DIFFERENT_SAMPLES}",
            )


def make_alike(group: ScriptGroup, variables: Iterable[Any]) -> None:
    """Give every rank rank 0's values of variables that have not been made equal yet, when a graph is traced.

    Variables created in the first trace of a function get a value only before its second one, which precedes any step.
    """
    if group.size == 1:
        return
    by_key = {key_of(variable): variable for variable in variables}
    too_late = tf.executing_eagerly()  # the gradient has been computed; while a graph is traced, it has not
    with outside_graphs():
        new = {key: weight for key, weight in by_key.items() if key not in group.started and _has_value(weight)}
        if new:
            forms = [f"{weight.dtype} {tuple(weight.shape)}" for weight in new.values()]
            names = [name_of(weight) for weight in new.values()]
            group.agree("a start with rank 0's weights", forms, names=names)
            if too_late:
                _report_own_weights(group, names, list(new.values()))
            existing_alike(group, new.keys(), too_late=too_late)
            group.started.update(new)
            broadcast_variables(group.messages, list(new.values()))


def _report_own_weights(group: ScriptGroup, names: Sequence[str], variables: Sequence[Any]) -> None:
    """Warn if the first forward pass has used each rank's own weights: its gradient belongs to no single model."""
    rows = group.messages.allgather_json([digest_of(variable) for variable in variables])
    differing = [name for name, *digests in zip(names, *rows, strict=True) if len(set(digests)) > 1]
    if differing and group.rank == 0:
        and_more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        sys.stderr.write(
            f"hpcdl: warning: the first forward pass used each rank's own {differing[0]}{and_more}, and its gradient "
            "is not one of any model; call hpcdl.broadcast_variables(model.variables) before the loop\n"
        )


def name_in(group: ScriptGroup) -> str:
    """Return the name that identifies an optimizer's or tape's exchange in the group.

    It separates exchanges with equal shapes: a rank that has joined takes part in the one that the others are in.
    """
    return f"optimizer or tape {next(group.keep('exchanges', lambda: itertools.count(1)))}"


def note_updates(number: int, name: str) -> None:
    """Record that this rank has done `number` updates of the optimizer or tape `name`, for status and messages."""
    monitor = session().communicator.monitor
    monitor.num_updates = max(monitor.num_updates, number)
    monitor.script_steps.exchange(name)


def compares_after(done: int, group: ScriptGroup) -> bool:
    """Return whether to compare the variables: after 1, 2, 4, 8, ... updates, but not if a rank has joined."""
    return not group.num_joined and done > 0 and done & (done - 1) == 0


def held(variable: Any) -> Any:
    """Return the TensorFlow variable that a Keras variable holds."""
    inner = getattr(variable, "value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def key_of(variable: Any) -> str:
    """Return a key that identifies a variable in the process, the same for Keras's and TensorFlow's object of it."""
    return unique(held(variable))


def _has_value(variable: Any) -> bool:
    return bool(held(variable).is_initialized())


def name_of(variable: Any) -> str:
    """Return a variable's path in its model."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", "a tensor"))


def _form_of(gradient: Any, variable: Any) -> str:
    """Describe a gradient's form for comparison between ranks."""
    if gradient is None:
        return "no gradient"
    kind = "sparse" if isinstance(gradient, tf.IndexedSlices) else "dense"
    return f"a {kind} {gradient.dtype.name} gradient of shape {tuple(variable.shape)}"


def with_shape_of(variable: Any, gradient: Any) -> Any:
    """Return `gradient` with the static shape of its variable, which back-propagation loses for an unknown batch size.

    Raises UsageError if neither has one: buckets are planned when the step is traced.
    """
    shape = tf.TensorShape(variable.shape)
    if not shape.is_fully_defined():
        # The gradient of a tensor instead of a variable, or of a variable whose shape may change.
        raise UsageError(
            f"{name_of(variable)} has the open shape {shape}: gradients over the ranks are those of variables of a "
            "fixed shape; take this one with a plain tf.GradientTape"
        )
    if isinstance(gradient, tf.IndexedSlices):
        gradient.values.set_shape([None, *shape[1:]])
        gradient.indices.set_shape([None])
    elif gradient is not None and not gradient.shape.is_fully_defined():
        gradient = tf.ensure_shape(gradient, shape)
    return gradient


def scaled_by(factor: Any, gradient: Any) -> Any:
    """Return a dense, sparse or missing gradient times a number or scalar tensor. Factors None and 1 change nothing."""
    if gradient is None or factor is None or (isinstance(factor, float) and factor == 1.0):
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(scaled_by(factor, gradient.values), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def _as_dtype(gradient: Any, like: Any) -> Any:
    return gradient if gradient is None or gradient.dtype == like.dtype else tf.cast(gradient, like.dtype)

"""Find evaluations and predictions outside `fit` that gave each rank the numbers of its own samples."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    from hpcdl.comm.observed import Observed

_MOST = 100
"""Calls of a script whose results are compared at its end."""
EVALUATE, PREDICT, RESULT = "model.evaluate", "model.predict", "a metric's result()"
BATCH, TRAINED = "model.test_on_batch", "model.train_on_batch"
_ALIKE = {EVALUATE: 1e-3, BATCH: 1e-3, TRAINED: 1e-3, PREDICT: 1e-4, RESULT: 1e-3}
"""Relative difference of two ranks' results on the same samples."""
_REMEDIES = {
    EVALUATE: "callbacks=[hpcdl.callbacks()] on every rank makes it cover those of all ranks",
    BATCH: "hpcdl.allreduce(numbers) on every rank gives the mean over them",
    TRAINED: "hpcdl.allreduce(numbers) on every rank gives the mean over them",
    PREDICT: "hpcdl.allgather(outputs) on every rank gives the outputs of all",
    RESULT: "hpcdl.allreduce(result) on every rank gives the mean over them",
}


class Evaluations:
    """What a script's own evaluations and predictions returned, until it combines numbers over the ranks.

    `num_written` returns the number of files that this rank's script has written. Without it predictions are not noted:
    a rank may keep those of its own samples.
    """

    def __init__(self, num_written: Callable[[], int] | None = None) -> None:
        self._num_written = num_written
        self._results: dict[str, list[Any]] = {}
        self._of_metrics: dict[int, Any] = {}
        self._metrics: dict[int, tuple[Any, Callable[[], float | None]]] = {}
        """Metrics of a loop of the script's own, by `id`, with what computes their results."""
        self._last: dict[int, float] = {}
        """Results that these metrics had before they began again."""
        self._since = 0, 0
        """Steps before the last predictions, and files written before the last one."""

    def add(self, numbers: list[float], *, split: bool) -> None:
        """Note the results of an evaluation of this rank's samples alone. `split`: the ranks divide a data set."""
        self._add(EVALUATE, numbers, split)

    def add_batch(self, numbers: list[float]) -> None:
        """Note the results of an evaluation of one batch."""
        self._add(BATCH, numbers, split=False)

    def add_trained(self, numbers: list[float]) -> None:
        """Note the last results of a model's metrics in a loop of training steps."""
        self._results[TRAINED] = [[False, numbers]]

    def add_predictions(self, numbers: list[float], num_steps: int, *, split: bool) -> None:
        """Note what describes the outputs of a prediction, after `num_steps` steps.

        Later steps forget them: they may have been targets, as in reinforcement learning.
        """
        if self._num_written is None:
            return
        if num_steps != self._since[0]:
            self._results.pop(PREDICT, None)
        self._since = num_steps, self._num_written()
        self._add(PREDICT, numbers, split)

    def add_result(self, metric: Any, value: Any) -> None:
        """Note the last result of a metric in a loop of the script's own, an array."""
        if id(metric) in self._of_metrics or len(self._of_metrics) < _MOST:
            self._of_metrics[id(metric)] = value

    def add_metric(self, metric: Any, result: Callable[[], float | None]) -> None:
        """Note a metric that a loop of the script's own updates. `result` returns None if it has seen no samples."""
        if len(self._metrics) < _MOST:
            self._metrics.setdefault(id(metric), (metric, result))

    def before_reset(self, metric: Any) -> None:
        """Note what a metric has measured, if it has been noted."""
        if id(metric) in self._metrics and (value := self._metrics[id(metric)][1]()) is not None:
            self._last[id(metric)] = value

    def _measured(self) -> dict[str, list[Any]]:
        """Return the last result of each metric by its name, and whether the script has read it."""
        measured = {}
        for key, (metric, result) in self._metrics.items():
            value = result()
            measured[str(metric.name)] = [self._last.get(key) if value is None else value, key in self._of_metrics]
        return measured

    @contextlib.contextmanager
    def without_metrics(self) -> Iterator[None]:
        """Note no results of metrics that are read inside this context."""
        before = dict(self._of_metrics)
        try:
            yield
        finally:
            self._of_metrics = before

    def _add(self, function: str, numbers: list[float], split: bool) -> None:
        results = self._results.setdefault(function, [])
        if len(results) < _MOST:
            results.append([split, numbers])

    def clear(self) -> None:
        """Forget the results so far."""
        self._results.clear()
        self._of_metrics.clear()

    def warnings(self, communicator: Observed) -> list[str]:
        """Return the warnings that the ranks' results deserve. Collective."""
        num_steps, num_written = self._since
        if num_steps != communicator.monitor.script_steps.done:
            self._results.pop(PREDICT, None)
        self._results[RESULT] = [[False, [float(numpy.sum(value))]] for value in self._of_metrics.values()]
        kept = self._num_written is not None and self._num_written() > num_written
        rows = communicator.allgather_json([self._results, kept, self._measured()])
        functions = [EVALUATE, BATCH, TRAINED, RESULT]
        if not all(kept for _, kept, _ in rows):
            functions.append(PREDICT)
        texts = [_verdict(function, [row.get(function, []) for row, *_ in rows]) for function in functions]
        texts.append(_of_rank_0([measured for *_, measured in rows]))
        return [text for text in texts if text]


def _verdict(function: str, by_rank: Sequence[Sequence[Any]]) -> str:
    """Return the warning about a function's results on the ranks, or nothing."""
    if len({len(row) for row in by_rank}) > 1:  # one rank alone has called it, and may have all samples
        parted = [rank for rank, row in enumerate(by_rank) if any(split for split, _ in row)]
        return (
            f"{function} on rank {parted[0]} used its part of a data set that the ranks divide, so numbers from it are "
            f"of that part alone; {_REMEDIES[function]}"
            if parted
            else ""
        )
    for (_, first), *others in zip(*by_rank, strict=True):
        for rank, (_, other) in enumerate(others, 1):
            for one, two in zip(first, other, strict=False):
                if not _alike(one, two, _ALIKE[function]):
                    gave = (
                        f"gave {one:.4g} on rank 0 and {two:.4g} on rank {rank}: each is of that rank's samples alone"
                    )
                    if function == PREDICT:
                        gave = f"gave rank {rank} other outputs than rank 0: numbers from them are of its samples alone"
                    return f"{function} {gave}; {_REMEDIES[function]}"
    return ""


def _of_rank_0(by_rank: Sequence[Mapping[str, Sequence[Any]]]) -> str:
    """Return the warning about a metric whose result rank 0 alone has read, while others measured something else."""
    first, *others = by_rank
    for name, (value, is_read) in first.items():
        for rank, other in enumerate(others, 1):
            # Other metrics on a rank: names that Keras has numbered say nothing.
            other_value, is_read_too = other[name] if other.keys() == first.keys() else (None, True)
            if not is_read or is_read_too or value is None or other_value is None:
                continue
            if not _alike(value, other_value, _ALIKE[RESULT]):
                return (
                    f"the result() of {name} is {value:.4g} on rank 0, which reads it, and {other_value:.4g} on rank "
                    f"{rank}: each is of that rank's samples alone; {_REMEDIES[RESULT]}"
                )
    return ""


def _alike(one: float, two: float, tolerance: float) -> bool:
    unknown = math.isnan(one) or math.isnan(two)
    return unknown or math.isclose(one, two, rel_tol=tolerance, abs_tol=tolerance**2)

"""Gradients in few bits, or few values, or thin matrices: what a rank sends of them, by the bytes that runs counted.

What packing and unpacking takes is an unknown of the timeline, for each form, which only runs with it tell.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from hpcdl.config.compression import parse_compression
from hpcdl.predict.jobs import ITEM_BYTES, StepJob, is_coded, kind_of, layers_known, lengths_of
from hpcdl.predict.messages import NOTHING, Messages, allreduce_messages, cost_of
from hpcdl.predict.network import Network
from hpcdl.report.runs.run import Run, positive
from hpcdl.strategies.allreduce.blocks import BLOCK
from hpcdl.strategies.table import ALIASES

_ROUNDS = 2
"""To all others at once, and back; of topk first how many values come."""
_UNIT = 1 << 30
"""Bytes of an all-reduce that are large enough for its cost to be in proportion to them."""
_SCALE_BYTES = 4


def coded_messages(job: StepJob, share: float, network: Network) -> Messages:
    """The messages of a `share` of all gradients of a job whose form is coded.

    Powersgd sums two thin matrices by the strategy's own all-reduce. The others send each rank its part directly.
    """
    kind = parse_compression(job.compress).kind
    if job.workers == 1:
        return NOTHING
    if kind == "powersgd":
        once = allreduce_messages(job.strategy, job, round(job.coded_bytes * share / 2), network)
        return Messages(**{name: 2 * value for name, value in vars(once).items()})
    sent = job.coded_bytes * share * _directly_sent(kind, job.workers)
    if job.local:
        return Messages(memory_rounds=_ROUNDS, memory_bytes=sent)
    per_node = min(job.workers_per_node, job.workers)
    abroad = (job.workers - per_node) / (job.workers - 1)
    return Messages(
        rounds=_ROUNDS,
        bytes=sent * abroad * per_node * network.oversubscription(job.nodes),
        memory_bytes=sent * (1 - abroad),
    )


def _directly_sent(kind: str, workers: int) -> float:
    """Of each coded byte, how many a rank sends: all of them to each other one, or a part there and a sum back."""
    return workers - 1.0 if kind == "topk" else (workers - 1) / workers


def coded_bytes_of(runs: Sequence[Run]) -> dict[str, float]:
    """What stands for the bytes of each form that `runs` of one network have: `StepJob.coded_bytes`.

    By the median of what those of several workers counted. Where none has counted, or workers do not exchange in each
    step, by the form's own size. Forms of which neither is known are not in it.
    """
    counted: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        form = run.config.get("compress", "")
        if not is_coded(form or "none") or run.workers < 2 or not run.usable:
            continue
        counted[form] += _counted(run, form)
    found: dict[str, float] = {}
    for form, values in counted.items():
        size = statistics.median(values) if values else _own_size(form, _num_values(runs))
        if size is not None:
            found[form] = size
    return found


def _counted(run: Run, form: str) -> list[float]:
    strategy = ALIASES.get(run.strategy, run.strategy)
    if not positive(run.bytes_per_step) or run.bytes_per_step is None or kind_of(strategy) != "all-reduce":
        return []
    kind = _kind(form)
    if kind == "":
        return []
    if kind == "powersgd":
        name = "ring" if strategy in ("auto", "mpi") else strategy
        sent = cost_of(name, run.workers, _UNIT, run.nodes).bytes
        return [run.bytes_per_step * _UNIT / sent] if sent else []
    return [run.bytes_per_step / _directly_sent(kind, run.workers)]


def _kind(form: str) -> str:
    try:
        return parse_compression(form).kind
    except ValueError:  # a later version's, or a damaged record's
        return ""


def _num_values(runs: Sequence[Run]) -> int:
    """Of all gradients; 0 where nothing tells."""
    recorded = (sum(run.gradient_elements) or (run.gradient_bytes or 0) // ITEM_BYTES for run in runs)
    known = next(filter(None, recorded), 0)
    return known or (sum(lengths_of(runs[0].model, None)) if layers_known(runs[0].model) else 0)


def _own_size(form: str, num_values: int) -> float | None:
    """By what the form is, of so many values; None for thin matrices, whose sides are not known."""
    kind = _kind(form)
    if not num_values:
        return None
    if kind == "topk":
        return 2 * ITEM_BYTES * num_values * parse_compression(form).percent / 100
    bytes_a_value = {"int8": 1.0, "fp4": 0.5}.get(kind)
    return None if bytes_a_value is None else 2 * num_values * (bytes_a_value + _SCALE_BYTES / BLOCK)

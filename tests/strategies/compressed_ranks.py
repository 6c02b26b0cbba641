"""Ranks of the test of compression with error feedback: an all-reduce worker on MPI ranks against a plain program.

`python compressed_ranks.py CASES.json OUT.jsonl` under mpiexec. The plain program follows the papers, in numpy, for all
workers in turn; it shares no code with hpcdl. Every rank runs it and compares.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from hpcdl.supervision import runtime

runtime.silence()
runtime.import_tensorflow()

import numpy  # noqa: E402  TensorFlow must find its environment set
import tensorflow as tf  # noqa: E402

from hpcdl.comm.mpi.communicator import world  # noqa: E402
from hpcdl.comm.observed import EXCHANGE, observe  # noqa: E402
from hpcdl.config.schema import ExchangeConfig, OptimizerConfig  # noqa: E402
from hpcdl.strategies.allreduce.worker import AllReduceWorker  # noqa: E402
from hpcdl.strategies.base.strategy import Context  # noqa: E402
from hpcdl.strategies.table import find_strategy  # noqa: E402

STEPS = 6


def gradients(worker: int, step: int, case: dict[str, Any]) -> list[Any]:
    """Return a worker's gradients at a step, divided by the number of workers as a step divides them."""
    generator, shapes = numpy.random.default_rng(100 * worker + step), case["shapes"]
    sizes = [case.get("size", 1.0) * 10.0**number for number in range(-2, len(shapes) - 2)]
    made = [size * generator.standard_normal(shape) for size, shape in zip(sizes, shapes, strict=True)]
    if case.get("low_rank"):  # of a rank so low that the factors that are sent describe them exactly
        made = [
            generator.standard_normal((*shape[:-1], 1)) * numpy.linspace(-1, 2, shape[-1]) if len(shape) > 1 else one
            for one, shape in zip(made, shapes, strict=True)
        ]
    return [(one / case["workers"]).astype(numpy.float32) for one in made]


def rounded(values: Any) -> Any:
    """Round blocks of 256 to integers of their largest magnitude over 127."""
    found = numpy.zeros_like(values)
    for start in range(0, len(values), 256):
        block = values[start : start + 256]
        scale = numpy.float32(abs(block).max() / numpy.float32(127))
        if scale > 0:
            found[start : start + 256] = numpy.rint(block / scale) * scale
    return found


def plain_int8(mine: list[Any], rests: list[Any], kept: dict[str, Any]) -> Any:
    """Two passes (Tang and others 2019): each worker sums one part of the rounded values, and rounds the sum again."""
    moved = [gradient + rest for gradient, rest in zip(mine, rests, strict=True)]
    bounds = numpy.cumsum([0, *(len(part) for part in numpy.array_split(moved[0], len(mine)))])
    result = numpy.zeros_like(moved[0])
    for owner, (start, end) in enumerate(itertools.pairwise(bounds)):
        total = numpy.zeros(end - start, numpy.float32)
        for values, rest in zip(moved, rests, strict=True):
            sent = rounded(values[start:end])
            rest[start:end] = values[start:end] - sent
            total = total + sent
        result[start:end] = rounded(total)
        rests[owner][start:end] += total - result[start:end]
    return result


def of_matrices(flat: Any, kept: dict[str, Any]) -> Any:
    """Yield the part of a flat array that belongs to each matrix, as a view, and the matrix' shape."""
    start = 0
    for number in kept["matrices"]:
        *rows, columns = kept["case"]["shapes"][number]
        size = int(numpy.prod(rows)) * columns
        yield number, flat[start : start + size].reshape(-1, columns)
        start += size


def plain_topk(mine: list[Any], rests: list[Any], kept: dict[str, Any]) -> Any:
    """Top-k with memory (Stich and others 2018): send the largest values of each matrix, keep the others."""
    share = float(kept["case"]["compress"].partition(":")[2].rstrip("%")) / 100
    result = numpy.zeros_like(mine[0])
    for gradient, rest in zip(mine, rests, strict=True):
        rest += gradient
        for (_, whole), (_, part) in zip(of_matrices(result, kept), of_matrices(rest, kept), strict=True):
            count = max(1, round(share * part.size))
            for place in sorted(numpy.ndindex(part.shape), key=lambda place: -abs(part[place]))[:count]:
                whole[place] += part[place]
                part[place] = 0
    return result


def plain_powersgd(mine: list[Any], rests: list[Any], kept: dict[str, Any]) -> Any:
    """Algorithms 1 and 2 of Vogels and others 2019, in double precision, with the basis by numpy's QR decomposition."""
    rank = int(kept["case"]["compress"].partition(":")[2])
    for gradient, rest in zip(mine, rests, strict=True):
        rest += gradient
    result = numpy.zeros_like(mine[0])
    for number, whole in of_matrices(result, kept):
        parts = [dict(of_matrices(rest, kept))[number] for rest in rests]
        rows, columns = whole.shape
        if (rows + columns) * rank >= rows * columns:
            whole += sum(parts)
            for part in parts:
                part[:] = 0
            continue
        start = numpy.random.default_rng(number).standard_normal((columns, rank), numpy.float32)
        right = kept.get(("right", number), start).astype(float)
        left, triangle = numpy.linalg.qr(sum(part.astype(float) @ right for part in parts))
        left = left * numpy.sign(numpy.diag(triangle))  # as Gram-Schmidt orthogonalization leaves it
        rights = [part.astype(float).T @ left for part in parts]
        for part, own in zip(parts, rights, strict=True):
            part -= (left @ own.T).astype(numpy.float32)
        kept[("right", number)] = sum(rights)
        whole += (left @ sum(rights).T).astype(numpy.float32)
    return result


PLAIN = {"int8": plain_int8, "topk": plain_topk, "powersgd": plain_powersgd}


def plain(case: dict[str, Any]) -> tuple[list[list[Any]], float]:
    """Return the sums of each step, and how far all sums and rests together are from the sum of all gradients."""
    shapes = case["shapes"]
    matrices = [number for number, shape in enumerate(shapes) if len(shape) > 1][::-1]  # the last layer's first
    rests = [numpy.zeros(sum(numpy.prod(shapes[number]) for number in matrices), numpy.float32)] * case["workers"]
    rests, kept = [rest.copy() for rest in rests], {"case": case, "matrices": matrices}
    found, applied, everything = [], 0.0, 0.0
    for step in range(STEPS):
        made = [gradients(worker, step, case) for worker in range(case["workers"])]
        flat = [numpy.concatenate([one[number].reshape(-1) for number in matrices]) for one in made]
        total = PLAIN[case["compress"].partition(":")[0]](flat, rests, kept)
        applied, everything = applied + total.astype(float), everything + numpy.sum(flat, axis=0, dtype=float)
        sums = [numpy.sum([one[number] for one in made], axis=0) for number in range(len(shapes))]
        start = 0
        for number in matrices:
            sums[number] = total[start : start + sums[number].size].reshape(shapes[number])
            start += sums[number].size
        found.append(sums)
    lost = applied + numpy.sum(rests, axis=0, dtype=float) - everything
    return found, float(abs(lost).max() / abs(everything).max())


def traced(worker: AllReduceWorker, case: dict[str, Any]) -> Any:
    """Trace a step that only sums up."""
    names = [f"variable-{number}" for number in range(len(case["shapes"]))]
    return tf.function(lambda *mine: worker.sum_up(list(mine), names), autograph=False)


def run_case(case: dict[str, Any], everybody: Any) -> dict[str, Any]:
    """Run one case; the result holds all ranks' findings, and is meaningful on rank 0."""
    takes_part = everybody.rank < case["workers"]
    group = everybody.split(0 if takes_part else 1)
    if not takes_part:
        return {}
    observed = observe(group).for_purpose(EXCHANGE)
    exchange = ExchangeConfig(compress=case["compress"], bucket_size=case.get("bucket", 1 << 20))
    context = Context(
        info=find_strategy(case["strategy"]), communicator=observed, num_workers=group.size, num_servers=0,
        exchange=exchange, optimizer=OptimizerConfig(), deterministic=True, in_place=case.get("in_place", False),
    )  # fmt: skip
    worker, ours = AllReduceWorker(context), list[list[Any]]()
    step = traced(worker, case)
    before = observed.monitor.traffic()
    for number in range(STEPS):
        if number == case.get("cut"):  # all that a checkpoint keeps is handed to a new worker
            kept = worker.state()
            worker = AllReduceWorker(context)
            worker.restore(kept)
            step = traced(worker, case)
        sums = step(*map(tf.constant, gradients(group.rank, number, case)))
        worker.after_step(number)
        ours.append([one.numpy() for one in sums])
    sent = (observed.monitor.traffic() - before).bytes_sent
    theirs, lost = plain(case)
    pairs = [pair for our, their in zip(ours, theirs, strict=True) for pair in zip(our, their, strict=True)]
    matrices = [(a, b) for a, b in pairs if a.ndim > 1]
    everybody_sent = [gradients(one, STEPS - 1, case) for one in range(case["workers"])]
    whole = [numpy.sum(parts, axis=0, dtype=float) for parts in zip(*everybody_sent, strict=True)]
    own = {
        "to_uncompressed": max(float(abs(a - b).max() / abs(b).max()) for a, b in zip(ours[-1], whole, strict=True)),
        "bits": [one.tobytes().hex() for one in ours[-1]],
        "equal": all(numpy.array_equal(a, b) for a, b in matrices),
        "error": max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs),
        "sent": sent / STEPS,
    }
    found = group.allgather_json(own)
    return {
        "alike": len({tuple(one["bits"]) for one in found}) == 1,
        "equal": all(one["equal"] for one in found),
        "error": max(one["error"] for one in found),
        "sent": [one["sent"] for one in found],
        "to_uncompressed": max(one["to_uncompressed"] for one in found),
        "lost": lost,
        "last": own["bits"],
    }


def main() -> None:
    """Run the cases of a file; rank 0 writes the result of each as a line of another file."""
    runtime.configure(deterministic=True, seed=7)
    everybody = world()
    for case in json.loads(Path(sys.argv[1]).read_text()):
        result = run_case(case, everybody)
        if everybody.rank == 0:
            with Path(sys.argv[2]).open("a") as file:
                file.write(json.dumps(result) + "\n")
        everybody.barrier()


if __name__ == "__main__":
    main()

"""Runs on every rank: each `case_*` checks one primitive against numpy; results go to FOLDER/<rank>.json."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hpcdl
from hpcdl.supervision import runtime

runtime.import_tensorflow()

import numpy  # noqa: E402
import tensorflow as tf  # noqa: E402

KINDS = ("float32", "float64", "float16", "int32", "int64", "uint8", "complex64")


def of(rank: int, shape: tuple[int, ...] = (3, 2), dtype: str = "float32") -> Any:
    """Return rank `rank`'s values: small integers other than zero, so that every type holds the result exactly."""
    return (numpy.arange(1, 1 + numpy.prod(shape, dtype=int)).reshape(shape) % 3 + 1 + rank % 2).astype(dtype)


def everybody(dtype: str = "float32", shape: tuple[int, ...] = (3, 2)) -> Any:
    return numpy.stack([of(rank, shape, dtype) for rank in range(hpcdl.size())])


def mine(dtype: str = "float32", shape: tuple[int, ...] = (3, 2)) -> Any:
    return of(hpcdl.rank(), shape, dtype)


def same(got: Any, expected: Any) -> None:
    numpy.testing.assert_allclose(numpy.asarray(got), expected, rtol=1e-6)
    assert numpy.asarray(got).shape == numpy.shape(expected), (numpy.shape(got), numpy.shape(expected))


REDUCED: dict[Any, Callable[..., Any]] = {
    hpcdl.Sum: numpy.sum, hpcdl.Min: numpy.min, hpcdl.Max: numpy.max, hpcdl.Product: numpy.prod,
}  # fmt: skip


def case_allreduce_of_arrays() -> None:
    for dtype in KINDS:
        for op, function in REDUCED.items():
            got = hpcdl.allreduce(mine(dtype), op)
            same(got, function(everybody(dtype), 0))
            assert got.dtype == dtype
    same(hpcdl.allreduce(mine()), everybody().mean(0))
    same(hpcdl.allreduce(mine("float64")[:, ::2], hpcdl.Average), everybody("float64").mean(0)[:, ::2])
    assert hpcdl.allreduce(float(hpcdl.rank())) == (hpcdl.size() - 1) / 2
    same(hpcdl.allreduce(mine(), hpcdl.Sum, prescale_factor=0.5, postscale_factor=4.0), 2 * everybody().sum(0))
    same(hpcdl.allreduce(numpy.zeros((0, 3)), hpcdl.Sum), numpy.zeros((0, 3)))


def case_means_of_whole_numbers_are_refused() -> None:
    for wrong in (numpy.ones(2, int), numpy.ones(2, bool), numpy.array(["a"])):
        try:
            hpcdl.allreduce(wrong)
        except hpcdl_error() as error:
            assert "cast them first" in str(error)
        else:
            raise AssertionError(wrong.dtype)


def refused(call: Callable[[], Any], reported: str) -> None:
    try:
        call()
    except hpcdl_error() as error:
        assert reported in str(error), error
    else:
        raise AssertionError(reported)


def case_factors_leave_whole_numbers_whole() -> None:
    for given in (mine("int32"), tf.constant(mine("int32"))):
        same(hpcdl.allreduce(given, hpcdl.Sum, prescale_factor=3, postscale_factor=2.0), 6 * everybody("int32").sum(0))
        for factor in ({"prescale_factor": 0.5}, {"postscale_factor": 0.5}, {"prescale_factor": 1e12}):
            refused(lambda given=given, factor=factor: hpcdl.allreduce(given, hpcdl.Sum, **factor), "cast them")


def case_tensors_in_parts_are_refused() -> None:
    for value in (tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.sparse.from_dense([[0.0, 1.0]])):
        for exchange in (hpcdl.allreduce, hpcdl.allgather, hpcdl.broadcast):
            refused(lambda exchange=exchange, value=value: exchange(value), "exchange their parts")


def case_means_of_half_precision_do_not_overflow() -> None:
    for make in (numpy.asarray, tf.constant):
        got = hpcdl.allreduce(make(numpy.full(2, 40000, "float16")))
        same(got, numpy.full(2, 40000, "float16"))
        assert got.dtype == "float16"


def case_keys_of_objects_stay_what_they_are() -> None:
    given = {"classes": [{0: "cat"}], "best": float("inf")}
    assert hpcdl.broadcast_object(given if hpcdl.rank() == 0 else None) == given
    assert hpcdl.allgather_object({hpcdl.rank(): 1}) == [{rank: 1} for rank in range(hpcdl.size())]


def hpcdl_error() -> type[Exception]:
    from hpcdl.core.errors import UsageError

    return UsageError


def case_allreduce_of_tensors() -> None:
    @tf.function
    def in_graph(tensor: Any) -> Any:
        return [hpcdl.allreduce(tensor, op) for op in (*REDUCED, hpcdl.Mean)]

    expected = [function(everybody(), 0) for function in (*REDUCED.values(), numpy.mean)]
    for results in (in_graph(mine()), [hpcdl.allreduce(tf.constant(mine()), op) for op in (*REDUCED, hpcdl.Mean)]):
        for got, wanted in zip(results, expected, strict=True):
            assert isinstance(got, tf.Tensor) and got.shape == (3, 2)
            same(got, wanted)
    same(hpcdl.allreduce(tf.Variable(mine())), everybody().mean(0))
    half = hpcdl.allreduce(tf.cast(mine(), tf.bfloat16), hpcdl.Sum)
    assert half.dtype == tf.bfloat16
    same(tf.cast(half, tf.float32), everybody().sum(0))
    same(hpcdl.allreduce(tf.constant(mine()), hpcdl.Sum, prescale_factor=0.5), everybody().sum(0) / 2)


def case_gradients_of_allreduce() -> None:
    size, rank = hpcdl.size(), hpcdl.rank()
    for op in (*REDUCED, hpcdl.Mean):
        own = tf.constant(mine())
        with tf.GradientTape() as tape:
            tape.watch(own)
            loss = tf.reduce_sum((1.0 + rank) * hpcdl.allreduce(own, op))
        got = tape.gradient(loss, own)
        upstream, values = sum(range(1, size + 1)), everybody()  # the sum of the ranks' losses
        if op == hpcdl.Product:
            expected = upstream * numpy.prod(numpy.delete(values, rank, 0), 0)
        elif op in (hpcdl.Min, hpcdl.Max):
            hit = values == REDUCED[op](values, 0)
            expected = upstream * hit[rank] / hit.sum(0)
        else:
            expected = numpy.full((3, 2), upstream / (size if op == hpcdl.Mean else 1))
        same(got, expected)


def case_grouped_allreduce() -> None:
    values = [mine(), mine("float64", (4,)), mine("float32", ()), mine("float64", (1, 2, 2))]
    for given in (values, [tf.constant(value) for value in values]):
        for got, value in zip(hpcdl.grouped_allreduce(given, hpcdl.Sum), values, strict=True):
            same(got, everybody(str(value.dtype), value.shape).sum(0))


def rows_of(rank: int) -> Any:
    return of(rank, (rank + 1, 2))


def case_allgather() -> None:
    expected = numpy.concatenate([rows_of(rank) for rank in range(hpcdl.size())])
    same(hpcdl.allgather(rows_of(hpcdl.rank())), expected)
    same(hpcdl.allgather(tf.constant(rows_of(hpcdl.rank()))), expected)
    same(tf.function(hpcdl.allgather)(tf.constant(rows_of(hpcdl.rank()))), expected)
    same(hpcdl.allgather(hpcdl.rank()), numpy.arange(hpcdl.size()))
    same(hpcdl.allgather(tf.constant(hpcdl.rank())), numpy.arange(hpcdl.size()))
    same(hpcdl.allgather(numpy.array([hpcdl.rank() == 0])), numpy.arange(hpcdl.size()) == 0)
    own = tf.constant(rows_of(hpcdl.rank()))
    with tf.GradientTape() as tape:
        tape.watch(own)
        loss = tf.reduce_sum(hpcdl.allgather(own) * expected)
    same(tape.gradient(loss, own), hpcdl.size() * rows_of(hpcdl.rank()))


def case_broadcast() -> None:
    root = hpcdl.size() - 1
    for dtype in (*KINDS, "bool"):
        same(hpcdl.broadcast(mine(dtype), root), of(root, dtype=dtype))
    own = tf.constant(mine())
    same(tf.function(lambda x: hpcdl.broadcast(x, 0))(own), of(0))
    with tf.GradientTape() as tape:
        tape.watch(own)
        loss = tf.reduce_sum(hpcdl.broadcast(own, root))
    same(tape.gradient(loss, own), numpy.full((3, 2), float(hpcdl.size() if hpcdl.rank() == root else 0)))


def case_alltoall() -> None:
    rank, size = hpcdl.rank(), hpcdl.size()
    own = numpy.arange(size) + 10 * rank
    same(hpcdl.alltoall(own), rank + 10 * numpy.arange(size))
    same(tf.function(hpcdl.alltoall)(tf.constant(own)), rank + 10 * numpy.arange(size))
    rows, splits = mine("float32", (size * (size + 1) // 2, 2)), numpy.arange(1, size + 1)
    got, counts = hpcdl.alltoall(tf.constant(rows), splits)
    same(counts, numpy.full(size, rank + 1))
    start = rank * (rank + 1) // 2
    same(got, numpy.concatenate([of(r, rows.shape)[start : start + rank + 1] for r in range(size)]))
    given = tf.constant(rows)
    with tf.GradientTape() as tape:
        tape.watch(given)
        sent, _ = hpcdl.alltoall(given, splits)
        loss = tf.reduce_sum(sent) * (1.0 + rank)
    same(tape.gradient(loss, given)[:, 0], numpy.repeat(numpy.arange(1.0, size + 1), splits))


def case_reducescatter() -> None:
    rank, size = hpcdl.rank(), hpcdl.size()
    total = everybody("float32", (2 * size + 1, 2)).sum(0)
    expected = numpy.array_split(total, size)[rank]
    same(hpcdl.reducescatter(mine("float32", (2 * size + 1, 2)), hpcdl.Sum), expected)
    same(hpcdl.reducescatter(tf.constant(mine("float32", (2 * size + 1, 2))), hpcdl.Sum), expected)


def case_objects() -> None:
    given = {"epoch": 3, "names": ["a", "ü"], "best": None}
    assert hpcdl.broadcast_object(given if hpcdl.rank() == 0 else None) == given
    assert hpcdl.allgather_object({"rank": hpcdl.rank(), "more": "x" * hpcdl.rank()})[-1]["rank"] == hpcdl.size() - 1


def case_broadcast_variables() -> None:
    import keras

    def made() -> list[Any]:
        return [
            tf.Variable(mine()),
            keras.Variable(mine("float32", (4,)), dtype="float64"),
            tf.Variable(hpcdl.rank() + 7),
            keras.Variable(hpcdl.rank() == 1, dtype="bool"),
        ]

    eager, in_graph = made(), made()
    hpcdl.broadcast_variables(eager, root_rank=1)
    tf.function(lambda: hpcdl.broadcast_variables(in_graph, 1))()
    for variables in (eager, in_graph):
        same(variables[0], of(1))
        same(variables[1], of(1, (4,)))
        assert int(variables[2]) == 8 and bool(variables[3].numpy())


def case_order_within_a_function() -> None:
    """Operations that do not depend on each other run in the same order on all ranks."""

    @tf.function
    def many(start: Any) -> Any:
        results = [hpcdl.allreduce(start + float(i), hpcdl.Sum) for i in range(20)]
        more = tf.while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, hpcdl.allreduce(x, hpcdl.Mean) + 1.0), [0, start])
        return results, more[1]

    results, looped = many(tf.constant(0.0))
    same(tf.stack(results), hpcdl.size() * numpy.arange(20.0))
    assert float(looped) == 5.0


def case_process_sets() -> None:
    first, rest = hpcdl.ProcessSet([0]), hpcdl.ProcessSet(range(1, hpcdl.size()))
    own = first if first.included() else rest
    assert (own.size(), own.rank()) == ((1, 0) if hpcdl.rank() == 0 else (hpcdl.size() - 1, hpcdl.rank() - 1))
    ranks = [0] if hpcdl.rank() == 0 else list(range(1, hpcdl.size()))
    same(hpcdl.allreduce(float(hpcdl.rank()), hpcdl.Sum, process_set=own), float(sum(ranks)))
    same(hpcdl.allgather(tf.constant([hpcdl.rank()]), process_set=own), ranks)
    try:
        hpcdl.barrier(process_set=rest if first.included() else first)
    except hpcdl_error() as error:
        assert "is not in ProcessSet" in str(error)
    else:
        raise AssertionError("a rank computes with a set that it is not in")


def case_ranks_in_different_collectives_are_told() -> None:
    wrong: list[Callable[[], Any]] = [
        lambda: hpcdl.allreduce(numpy.zeros(2 + hpcdl.rank())),
        lambda: hpcdl.barrier() if hpcdl.rank() else hpcdl.allreduce(1.0),
        lambda: hpcdl.broadcast(1.0, 0) if hpcdl.rank() else hpcdl.broadcast(1, 0),
        lambda: hpcdl.join() if hpcdl.rank() else hpcdl.allgather(1.0),
    ]
    for call in wrong:
        try:
            call()
        except hpcdl_error() as error:
            assert "the ranks are not in the same collective" in str(error), error
            assert "rank 0 has" in str(error) and "rank 1 has" in str(error), error
        else:
            raise AssertionError("nobody noticed")
    hpcdl.barrier()


def case_join() -> None:
    """Each rank has as many values as its number; ranks without further values count as zero."""
    size, rank = hpcdl.size(), hpcdl.rank()
    hpcdl.allreduce(numpy.ones(3), hpcdl.Sum)  # a sum that all ranks have seen before
    for step in range(rank):
        got = hpcdl.allreduce(numpy.full(3, 10.0 + rank), hpcdl.Sum)
        same(got, numpy.full(3, sum(10.0 + other for other in range(size) if other > step)))
    assert hpcdl.join() == size - 1
    same(hpcdl.allreduce(1.0, hpcdl.Sum), float(size))


def main() -> None:
    hpcdl.init()
    results = {}
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            try:
                case()
                results[name] = ""
            except Exception:  # noqa: BLE001  the test says which case it was
                results[name] = traceback.format_exc()
    (Path(sys.argv[1]) / f"{hpcdl.rank()}.json").write_text(json.dumps(results))
    hpcdl.shutdown()


if __name__ == "__main__":
    main()

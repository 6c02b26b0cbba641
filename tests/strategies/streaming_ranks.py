"""Ranks of the bitwise test of streaming-diloco: numpy alone, against a plain program of the paper on every rank.

`python streaming_ranks.py CASES.json OUT.jsonl` under mpiexec. Each worker descends towards a target of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy

from hpcdl.comm.mpi.communicator import world
from hpcdl.comm.observed import observe
from hpcdl.config.schema import ElasticConfig, ExchangeConfig, OptimizerConfig
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.periodic.shared import SharedWeights
from hpcdl.strategies.periodic.streaming import StreamedWeights
from hpcdl.strategies.table import find_strategy

RATE = numpy.float32(0.05)
LAYERS = [("a/kernel", 701), ("a/bias", 20), ("b/kernel", 1100), ("c/kernel", 512), ("c/bias", 30), ("d/kernel", 900)]
STATISTICS = [("b/mean", 40), ("d/mean", 20)]
WEIGHTS = sum(size for _, size in LAYERS)
SIZE = WEIGHTS + sum(size for _, size in STATISTICS)


def target(worker: int) -> numpy.ndarray:
    """Return the weights towards which a worker's own steps lead."""
    return numpy.random.default_rng(worker).standard_normal(SIZE).astype(numpy.float32)


def own_step(own: numpy.ndarray, worker: int) -> None:
    """Take a step of gradient descent, in place."""
    own -= RATE * (own - target(worker))


def mean(values: list[numpy.ndarray]) -> numpy.ndarray:
    """Return the mean in the order of recursive doubling: neighbours first."""
    while len(values) > 1:
        values = [values[place] + values[place + 1] for place in range(0, len(values), 2)]
    return values[0]


def rounded(values: numpy.ndarray, compress: str) -> numpy.ndarray:
    """Round blocks of 256 with a scale each: to integers up to 127, or to the nearest of 0 and 1, 1/2, ..., 1/64."""
    found = numpy.zeros_like(values)
    levels = numpy.array([0, *(2.0**-place for place in range(6, -1, -1))], numpy.float32)
    for start in range(0, len(values), 256):
        block = values[start : start + 256]
        if not block.any():  # a fragment that has just come back, without mixing
            continue
        if compress == "int8":
            scale = numpy.float32(abs(block).max() / numpy.float32(127))
            found[start : start + 256] = numpy.rint(block / scale) * scale
        else:
            scale = abs(block).max()
            nearest = numpy.searchsorted((levels[1:] + levels[:-1]) / 2, abs(block) / scale, side="right")
            found[start : start + 256] = numpy.copysign(levels[nearest], block) * scale
    return found


def compressed_mean(deltas: list[numpy.ndarray], compress: str) -> numpy.ndarray:
    """Sum each part of the rounded changes on one worker, and round the sum again; no rounding error is kept."""
    parts = [numpy.array_split(delta, len(deltas)) for delta in deltas]
    sums = []
    for owner in range(len(deltas)):
        total = numpy.zeros_like(parts[0][owner])
        for part in parts:
            total = total + rounded(part[owner], compress)
        sums.append(rounded(total, compress))
    return numpy.concatenate(sums) / numpy.float32(len(deltas))


def by_the_paper(case: dict[str, Any]) -> tuple[numpy.ndarray, list[numpy.ndarray]]:
    """Algorithm 2 for one worker after the other: return the final shared weights and each worker's own, in float32."""
    num, period, count, tau = case["workers"], case["period"], case["fragments"], case["overlap"]
    share, rate, momentum = case["mixing"], 0.7, 0.9
    layers = "abcd"
    fragment = [layers.index(name[0]) % count for name, size in [*LAYERS, *STATISTICS] for _ in range(size)]
    offsets = [(number + 1) * period // count % period for number in range(count)]
    x = numpy.ones(SIZE, numpy.float32)
    v = numpy.zeros(SIZE, numpy.float32)
    own = [x.copy() for _ in range(num)]
    under_way: list[tuple[int, int, numpy.ndarray]] = []
    for t in range(1, case["steps"] + 1):
        for worker in range(num):
            own_step(own[worker], worker)
        last = t == case["steps"]
        events = [(number, t, None) for number in range(count) if last or t % period == offsets[number]]
        for number, _, _ in [*[(-1, 0, None)], *events]:
            if number >= 0:  # lines 7 and 8
                mine = numpy.array([one == number for one in fragment])
                weight = numpy.arange(SIZE) < WEIGHTS
                deltas = [numpy.where(weight, x - one, one)[mine] for one in own]
                change = mean(deltas) / numpy.float32(num)
                if case.get("compress") in ("int8", "fp4"):
                    many = numpy.count_nonzero(mine & weight)
                    change[:many] = compressed_mean([delta[:many] for delta in deltas], case["compress"])
                under_way.append((number, t + tau, change))
            while under_way and (last or under_way[0][1] <= t):  # lines 11 to 13
                place, _, delta = under_way.pop(0)
                mine = numpy.array([one == place for one in fragment])
                new, (kept, velocity) = delta.copy(), (x[mine], v[mine])
                weight = numpy.flatnonzero(mine) < WEIGHTS
                velocity = numpy.float32(momentum) * velocity + delta
                new[weight] = (kept - numpy.float32(rate) * (delta + numpy.float32(momentum) * velocity))[weight]
                v[mine], x[mine] = velocity, new
                for one in own:
                    one[mine] = new if share == 1 else one[mine] * numpy.float32(1 - share) + numpy.float32(share) * new
    return x[:WEIGHTS], own


def context_of(case: dict[str, Any], group: Any, name: str = "streaming-diloco") -> Context:
    """Return the context of the strategy."""
    streaming = {key: case[key] for key in ("fragments", "overlap", "mixing") if name == "streaming-diloco"}
    return Context(
        info=find_strategy(name), communicator=group, num_workers=group.size, num_servers=0,
        exchange=ExchangeConfig(compress=case.get("compress", "none")), optimizer=OptimizerConfig(),
        elastic=ElasticConfig(period=case["period"], **streaming), num_steps=case["steps"],
    )  # fmt: skip


def train(case: dict[str, Any], shared: SharedWeights, own: numpy.ndarray, steps: range) -> numpy.ndarray:
    """Return a worker's `own` weights after `steps`."""
    for step in steps:
        exchanges = shared.before_step(step, float(RATE))
        own_step(own, shared.group.rank)
        if exchanges:
            own = shared.exchange(own.copy())
    return own


def begun(shared: SharedWeights, weights: numpy.ndarray) -> SharedWeights:
    """Start `shared` with `weights`."""
    shared.variables = LAYERS
    shared.start(weights)
    shared.lay_out(STATISTICS)
    return shared


def bytes_of(shared: SharedWeights) -> int:
    """Return the bytes that this worker has sent of `shared`."""
    return shared.group.lane.bytes_sent  # type: ignore[attr-defined]


def counted_bytes(case: dict[str, Any], rank: int) -> int:
    """Return a worker's bytes in a run by the formulas of the docs: of packed weights, and of unpacked statistics."""
    num, count, period = case["workers"], case["fragments"], case["period"]
    sent = 0
    for number in range(count):
        sizes = [sum(size for name, size in group if "abcd".index(name[0]) % count == number)
                 for group in (LAYERS, STATISTICS)]  # fmt: skip
        times = sum(
            1 for t in range(1, case["steps"]) if t % period == (number + 1) * period // count % period
        ) + 1  # fmt: skip
        parts = [len(part) for part in numpy.array_split(numpy.arange(sizes[0]), num)]
        value_bytes = [part if case["compress"] == "int8" else -(-part // 2) for part in parts]
        packed = [values + 4 * -(-part // 256) for values, part in zip(value_bytes, parts, strict=True)]
        to_owners, back = sum(packed) - packed[rank], (num - 1) * packed[rank]
        sent += times * (to_owners + back + 4 * sizes[1] * (num.bit_length() - 1))
    return sent


def run_case(case: dict[str, Any], group: Any) -> dict[str, Any]:
    """Return this worker's findings."""
    ones = numpy.ones(SIZE, numpy.float32)
    shared = begun(StreamedWeights(context_of(case, group)), ones[:WEIGHTS])
    own = train(case, shared, ones.copy(), range(case["steps"]))
    shared.close()
    x, all_own = by_the_paper(case)
    found = {
        "shared": shared.weights.tobytes() == x.tobytes(),
        "own": own.tobytes() == all_own[group.rank].tobytes(),
        "moved": float(abs(x - 1).max()),
        "error": float(abs(shared.weights - x).max()),
    }
    if "compress" in case:
        plain = begun(StreamedWeights(context_of({**case, "compress": "none"}, group)), ones[:WEIGHTS])
        train(case, plain, ones.copy(), range(case["steps"]))
        plain.close()
        found["bytes"] = bytes_of(shared) / bytes_of(plain)
        found["to_plain"] = float(abs(shared.weights - plain.weights).max())
        found["counted"] = bytes_of(shared) - counted_bytes(case, group.rank)
    if case["overlap"] == 0 and case["fragments"] == 1 and case["mixing"] == 1:
        diloco = begun(SharedWeights(context_of(case, group, "diloco")), ones[:WEIGHTS])
        theirs = train(case, diloco, ones.copy(), range(case["steps"]))
        found["diloco"] = theirs.tobytes() == own.tobytes() and diloco.weights.tobytes() == x.tobytes()
    for cut in case.get("cuts", []):
        before = begun(StreamedWeights(context_of(case, group)), ones[:WEIGHTS])
        half = train(case, before, ones.copy(), range(cut))
        state = before.state()
        after = StreamedWeights(context_of(case, group))
        after.restore(state)
        resumed = train(case, begun(after, before.weights), half, range(cut, case["steps"]))
        found[f"cut {cut}"] = resumed.tobytes() == own.tobytes() and after.weights.tobytes() == x.tobytes()
        found[f"under way {cut}"] = "periodic/flight" in state
        before.close()
        after.close()
    return found


def main() -> None:
    """Run the cases of a file; rank 0 writes all workers' findings as a line of another file."""
    everybody = observe(world())
    for case in json.loads(Path(sys.argv[1]).read_text()):
        takes_part = everybody.rank < case["workers"]
        group = everybody.split(0 if takes_part else 1)
        found = run_case(case, group) if takes_part else None
        everyone = everybody.allgather_json(found)
        if everybody.rank == 0:
            with Path(sys.argv[2]).open("a") as file:
                file.write(json.dumps([one for one in everyone if one is not None]) + "\n")


if __name__ == "__main__":
    main()

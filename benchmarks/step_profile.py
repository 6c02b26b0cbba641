"""Where a training step's time goes on one core, by TensorFlow's own profiler: shares of a step by kind of operation.

    python -m benchmarks.step_profile [--networks resnet50,lstm] [--batch-size 8] [--cores 1] [--steps 5]
        [--onednn on|off] [--fast-kernels on|off] [--operations 10]

Whole steps (forward, backward, update with momentum) of one worker without an exchange. An operation's time excludes
operations that run inside it. "between" is the step's time in no operation: the executor, and what the graph
waits for. Of --steps profiled steps the table shows the one of median length; `--operations` lists its operations
that take most time. The median step without the profiler is printed beside it.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fast_kernels import batches, engine_on, step_of_network

NETWORKS = ("resnet50", "googlenet", "alexnet", "vgg19", "hepcnn", "lenet", "lstm", "transformer", "unet")
KINDS: dict[str, tuple[str, ...]] = {
    "convolution, product": ("Conv", "MatMul", "Einsum", "Depthwise", "LSTM"),
    "normalization": ("BatchNorm",),
    "pooling": ("MaxPool", "AvgPool"),
    "update": ("ResourceApply", "Assign"),
    "AddN": ("AddN",),
    "sums": ("Sum", "Mean", "BiasAddGrad", "Max", "L2Loss", "Prod", "Min", "ArgMax"),
    "moving, casts": (
        "Transpose", "Concat", "Slice", "StridedSlice", "Pad", "Tile", "Cast", "Split", "Pack", "Unpack", "Gather",
        "Reshape", "Identity", "TensorList", "Broadcast", "Fill", "ZerosLike", "OnesLike", "Read", "Resize", "Reverse",
    ),
}  # fmt: skip
"""Beginnings of an operation's type, or for the first two kinds any part of it; the first kind that matches counts."""
ELSE, BETWEEN = "element-wise, rest", "between"
OPERATION = re.compile(r"[^\s:]+:([A-Za-z_]\w*)|(CpuExecutable)::\w+")
"""The executor's name of an operation, or what XLA compiled."""
Events = Sequence[tuple[int, int, str]]
"""Events of one thread: begin and end in picoseconds, and the operation's type."""


def kind_of(operation: str) -> str:
    """Return the kind (of KINDS) of TensorFlow's type of an operation; types of oneDNN begin with _Mkl."""
    bare = operation.removeprefix("_").removeprefix("Mkl").removeprefix("Native").removeprefix("Fused")
    for kind, names in KINDS.items():
        inside = kind in {"convolution, product", "normalization"}
        if any(name in bare if inside else bare.startswith(name) for name in names):
            return kind
    return ELSE


def own_times(events: Events) -> Counter[str]:
    """Return the picoseconds of each type of operation in one thread, without those of operations inside it."""
    times: Counter[str] = Counter()
    open_ones: list[tuple[int, str]] = []
    for begin, end, operation in sorted(events, key=lambda event: (event[0], -event[1])):
        while open_ones and open_ones[-1][0] <= begin:
            open_ones.pop()
        if open_ones:
            times[open_ones[-1][1]] -= end - begin
        times[operation] += end - begin
        open_ones.append((end, operation))
    return times


def profiled(step: Callable[[], Any]) -> tuple[float, Counter[str]]:
    """Return the wall seconds of one step, and the seconds of each type of operation."""
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        seconds = timed(step)
        tf.profiler.experimental.stop()
        space = xplane_pb2.XSpace()
        for path in Path(folder).rglob("*.xplane.pb"):
            space.MergeFromString(path.read_bytes())
    times: Counter[str] = Counter()
    for events in operations_of(space):
        times.update(own_times(events))
    return seconds, Counter({name: value / 1e12 for name, value in times.items()})


def operations_of(space: Any) -> Iterable[Events]:
    """Yield each thread's operations; the executor calls them `name:Type`."""
    for plane in space.planes:
        found = {number: OPERATION.fullmatch(metadata.name) for number, metadata in plane.event_metadata.items()}
        kinds = {number: match[1] or match[2] for number, match in found.items() if match}
        for line in plane.lines:
            yield [
                (event.offset_ps, event.offset_ps + event.duration_ps, kinds[event.metadata_id])
                for event in line.events
                if event.metadata_id in kinds
            ]


def main() -> None:
    """Print a row for each network, and its operations on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--onednn", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--fast-kernels", choices=("on", "off"), default="on")
    parser.add_argument("--operations", type=int, default=0)
    options = parser.parse_args()
    unknown = sorted(set(options.networks.split(",")) - set(NETWORKS))
    if unknown:
        parser.error(f"unknown network {unknown[0]}; there are {', '.join(NETWORKS)}")
    engine = engine_on(options.cores, options.onednn)
    print(f"{engine}, {options.cores} core(s), batch {options.batch_size}, fast kernels {options.fast_kernels}")
    kinds = [*KINDS, ELSE, BETWEEN]
    print("| network | step, ms | profiled, ms | " + " | ".join(kinds) + " |")
    print("|---" * (3 + len(kinds)) + "|")
    for network in options.networks.split(","):
        step = step_of(network, options.batch_size, fast=options.fast_kernels == "on")
        plain = statistics.median(timed(step) for _ in range(options.steps))
        found = sorted((profiled(step) for _ in range(options.steps)), key=lambda one: one[0])
        seconds, times = found[len(found) // 2]
        shares = shares_of(times, seconds)
        cells = [f"{shares[kind]:.1%}" for kind in kinds]
        print(f"| {network} | {plain * 1e3:.1f} | {seconds * 1e3:.1f} | " + " | ".join(cells) + " |", flush=True)
        for name, spent in times.most_common(options.operations):
            print(f"    {name:40s}{spent * 1e3:10.2f} ms{spent / seconds:8.1%}")


def shares_of(times: Counter[str], seconds: float) -> dict[str, float]:
    """Return shares of a step's `seconds`, by kind; with several cores their sum may exceed 1."""
    shares = dict.fromkeys([*KINDS, ELSE], 0.0)
    for name, spent in times.items():
        shares[kind_of(name)] += spent / seconds
    return {**shares, BETWEEN: max(0.0, 1 - sum(shares.values()))}


def timed(step: Callable[[], Any]) -> float:
    """Return the seconds of one step."""
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def step_of(network: str, batch_size: int, *, fast: bool) -> Callable[[], Any]:
    """Return a step of the network, traced and run once, on a constant batch."""
    compiled, _ = step_of_network(network, fast=fast)
    samples, labels = next(batches(network, batch_size))

    def step() -> float:
        return float(compiled(samples, labels)[0])

    step()
    return step


if __name__ == "__main__":
    main()

"""How fast a rank copies, sums and casts gradients with one core and with several, by threads over slices.

    python benchmarks/memory_rates.py [--mib 25,238] [--threads 1,2] [--repeats 15]

One process on this node; gigabytes of float32 gradient per second, medians, all operations and numbers of threads in
turn. Then estimates for links of 100 and 400 Gbit/s: how much of the link a ring over many nodes uses, and the time of
summing, one copy and casting with one core and with `--model-cores`, by Amdahl's law from the serial part measured
here. The slower of link and cores is the limit. Memory bandwidth shared by the cores is not modelled.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy

from hpcdl.comm.arithmetic import add_bfloat16, from_bfloat16, plain_add, to_bfloat16
from hpcdl.strategies.allreduce.compression import add_float16, cast

SLICE = 1 << 18
"""Elements that a thread takes at a time: 1 MiB of float32, which fits the cache."""
LINKS = (100, 400)
RING_BYTES = 2.0
"""A ring of many nodes sends twice the gradient's bytes through each link, and sums them once."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", default="25,238")
    parser.add_argument("--threads", default=f"1,{len(os.sched_getaffinity(0))}")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--model-cores", type=int, default=32)
    options = parser.parse_args()
    threads = [int(part) for part in options.threads.split(",")]
    for mib in map(float, options.mib.split(",")):
        rates = measured(round(mib * 2**18), threads, options.repeats)
        print(f"{mib:g} MiB, GB/s of gradient " + "".join(f"{f'{number} threads':>12}" for number in threads))
        for name, found in rates.items():
            print(f"  {name:<24}" + "".join(f"{found[number]:12.2f}" for number in threads))
    for link in LINKS:
        print("\n".join(on_paper(rates, threads, link, options.model_cores)))


def measured(num_elements: int, threads: list[int], repeats: int) -> dict[str, dict[int, float]]:
    """Return bytes of float32 gradient per nanosecond, by operation and number of threads."""
    operations = operations_on(num_elements)
    seconds: dict[tuple[str, int], list[float]] = {}
    with concurrent.futures.ThreadPoolExecutor(max(threads)) as pool:
        for repeat in range(repeats + 1):
            for name, run in operations.items():
                for number in threads:
                    began = time.perf_counter()
                    over_slices(run, num_elements, number, pool)
                    if repeat:
                        seconds.setdefault((name, number), []).append(time.perf_counter() - began)
    return {
        name: {number: 4e-9 * num_elements / statistics.median(seconds[name, number]) for number in threads}
        for name in operations
    }


def operations_on(num_elements: int) -> dict[str, Callable[[slice], Any]]:
    source, target = numpy.ones(num_elements, numpy.float32), numpy.ones(num_elements, numpy.float32)
    halves, other_halves = source.astype(numpy.float16), source.astype(numpy.float16)
    brains, other_brains = to_bfloat16(source), to_bfloat16(source)
    half_source = source * numpy.float32(0.5)
    return {
        "copy": lambda part: numpy.copyto(target[part], half_source[part]),
        "sum": lambda part: plain_add(target[part], source[part]),
        "cast to float16": lambda part: cast(source[part], halves[part]),
        "cast from float16": lambda part: cast(halves[part], target[part]),
        "sum in float16": lambda part: add_float16(other_halves[part], halves[part]),
        "numpy's cast to float16": lambda part: numpy.copyto(halves[part], source[part], casting="same_kind"),
        "numpy's sum in float16": lambda part: plain_add(other_halves[part], halves[part]),
        "cast to bfloat16": lambda part: numpy.copyto(brains[part], to_bfloat16(source[part])),
        "sum in bfloat16": lambda part: add_bfloat16(other_brains[part], brains[part]),
        "cast from bfloat16": lambda part: numpy.copyto(target[part], from_bfloat16(brains[part])),
    }


def over_slices(run: Callable[[slice], Any], length: int, number: int, pool: concurrent.futures.Executor) -> None:
    """Call `run` on every slice with `number` threads, each on a block of neighbouring slices."""
    starts = range(0, length, SLICE)
    share = -(-len(starts) // number)

    def some(mine: range) -> None:
        for start in mine:
            run(slice(start, min(start + SLICE, length)))

    if number == 1:
        some(starts)
        return
    list(pool.map(some, [starts[first : first + share] for first in range(0, len(starts), share)]))


def on_paper(rates: dict[str, dict[int, float]], threads: list[int], link: int, cores: int) -> list[str]:
    """Return lines with the seconds per gigabyte of float32 gradient on the link, and with one core and all."""
    most = max(threads)
    lines = [
        f"{link} Gbit/s, ms for each GB of float32 gradient:  link   1 core   {cores} cores   limit with 1, {cores}"
    ]
    for name in ("float32", "float16", "bfloat16"):
        width = 4 if name == "float32" else 2
        halves = [f"sum in {name}", f"cast to {name}", f"cast from {name}"]
        work = ["copy", *(["sum"] if width == 4 else halves)]
        wire_s = RING_BYTES * (width / 4) * 8 / link
        alone_s = sum(1 / rates[one][1] for one in work)
        gain = {one: rates[one][most] / rates[one][1] for one in work}
        every_s = sum(1 / rates[one][1] / scaled(gain[one], most, cores) for one in work)
        limits = ["link" if wire_s > taken else "summing and casting" for taken in (alone_s, every_s)]
        lines.append(
            f"  {name:<10} {1e3 * wire_s:40.0f} {1e3 * alone_s:8.0f} {1e3 * every_s:9.0f}      {limits[0]}; {limits[1]}"
        )
    return lines


def scaled(gain: float, measured_with: int, cores: int) -> float:
    """Return the gain by Amdahl's law, with the serial part that `measured_with` threads showed."""
    if measured_with < 2:
        return 1.0
    in_turn = min(max((measured_with / gain - 1) / (measured_with - 1), 0.0), 1.0)
    return 1 / (in_turn + (1 - in_turn) / cores)


if __name__ == "__main__":
    main()

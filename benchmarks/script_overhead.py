"""Cost of hpcdl in a script's step on one rank: an MLP with and without it, in turn in one process.

Wall time says little on a busy machine; processor time shows the added work.

python benchmarks/script_overhead.py [--rounds 15] [--layers 3] [--width 128]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import hpcdl

hpcdl.init()

import keras  # noqa: E402
import numpy  # noqa: E402

BATCH, STEPS = 64, 200


def made(num_layers: int, width: int, *, distributed: bool) -> tuple[Any, list[Any]]:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(num_layers)]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])
    optimizer = keras.optimizers.SGD(0.001, momentum=0.9)
    model.compile(
        optimizer=hpcdl.DistributedOptimizer(optimizer) if distributed else optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model, [hpcdl.callbacks()] if distributed else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    chosen = parser.parse_args()
    rounds = chosen.rounds
    generator = numpy.random.default_rng(0)
    inputs = generator.normal(size=(BATCH * STEPS, 64)).astype("float32")
    labels = generator.integers(0, 10, BATCH * STEPS)
    models = {name: made(chosen.layers, chosen.width, distributed=name == "hpcdl") for name in ("plain", "hpcdl")}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for round_number in range(rounds + 1):
        pairs = list(models.items())
        for name, (model, callbacks) in pairs if round_number % 2 else reversed(pairs):  # so that the order alternates
            began, worked = time.perf_counter(), time.process_time()
            model.fit(inputs, labels, batch_size=BATCH, verbose=0, shuffle=False, callbacks=callbacks)
            if round_number:  # the first one traces
                spent = (time.perf_counter() - began, time.process_time() - worked)
                taken[name].append((spent[0] / STEPS * 1e3, spent[1] / STEPS * 1e3))
    for index, what in enumerate(("by the clock", "of processor time")):
        plain, ours = ([both[index] for both in taken[name]] for name in ("plain", "hpcdl"))
        paired = statistics.median(mine / other - 1 for mine, other in zip(ours, plain, strict=True))
        least = min(ours) / min(plain) - 1
        print(
            f"milliseconds a step {what}, least and median of {rounds}: plain {min(plain):.3f} and "
            f"{statistics.median(plain):.3f}, hpcdl {min(ours):.3f} and {statistics.median(ours):.3f}; "
            f"hpcdl costs {100 * least:+.1f} % of the least, {100 * paired:+.1f} % in the median of pairs"
        )


if __name__ == "__main__":
    main()

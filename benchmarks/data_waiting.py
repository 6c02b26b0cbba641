"""Share of a training step that waits for input: LeNet on the digits, HEP-CNN on its synthetic images.

    python benchmarks/data_waiting.py [--steps 300] [--hep-steps 12] [--folder DIR]

A real step (forward, backward, SGD) runs after each batch; the time of `next(batches)` is compared with the total.
Utilisation is 1 - waiting / total. Both the digits and the HEP images are read from shards.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from hpcdl.config.load import Layer, load
from hpcdl.core.statistics import quantiles
from hpcdl.data.format.dataset import open_dataset
from hpcdl.data.write.request import ShardConfig, ShardRequest
from hpcdl.data.write.writing import shard

DIGITS = Path(__file__).resolve().parents[1] / "share" / "hpcdl" / "examples" / "digits"


def sharded(source: str, target: Path, **options: object) -> Any:
    config = load(ShardConfig, [Layer(origin="benchmark", values=options)]).config
    shard(ShardRequest(source=source, target=target, config=config, resume=True), bar=False)
    return open_dataset(str(target))


def measure(model: Any, dataset: Any, batch_size: int, steps: int) -> dict[str, float]:
    import keras
    import tensorflow as tf

    from hpcdl.data.read.pipeline import training_batches

    optimizer = keras.optimizers.SGD(0.01)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images: Any, labels: Any) -> Any:
        scaled = tf.cast(images, tf.float32) / (255.0 if dataset.dtype == "uint8" else 1.0)
        with tf.GradientTape() as tape:
            value = loss(labels, model(scaled, training=True))
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        return value

    batches = training_batches(dataset, batch_size=batch_size)
    for _ in range(5):
        step(*next(batches)).numpy()
    waits = []
    started = time.perf_counter()
    for _ in range(steps):
        began = time.perf_counter()
        images, labels = next(batches)
        waits.append(time.perf_counter() - began)
        step(images, labels).numpy()
    total = time.perf_counter() - started
    batches.close()
    return {
        "step_ms": round(total / steps * 1e3, 3),
        "wait_ms_p50": round(quantiles(waits, [0.5])[0] * 1e3, 4),
        "wait_ms_p99": round(quantiles(waits, [0.99])[0] * 1e3, 4),
        "waiting": round(sum(waits) / total, 4),
        "accelerator_utilisation": round(1 - sum(waits) / total, 4),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--hep-steps", type=int, default=12)
    arguments.add_argument("--batch-size", type=int, default=64)
    arguments.add_argument("--folder", type=Path)
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.folder or Path(scratch)
        digits = sharded(str(DIGITS), folder / "digits", **{"image-size": "28", "split": "train=0.8,val=0.2"})
        hep = sharded("synthetic:hep", folder / "hep", samples=400)
        from hpcdl.models.load import load_model

        print(json.dumps({
            "lenet, digits": measure(load_model("lenet"), digits, chosen.batch_size, chosen.steps),
            "hepcnn, synthetic": measure(load_model("hepcnn"), hep, 8, chosen.hep_steps),
        }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()

"""One worker of a Hogwild run between hosts, without TensorFlow: prints the results, as JSON, on rank 0.

`python -m tests.lab.hogwild_ranks` under mpiexec, one rank per host. No update of the center may be lost.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from hpcdl.comm.mpi.communicator import world
from hpcdl.comm.observed import EXCHANGE, observe
from hpcdl.config.schema import ElasticConfig, ExchangeConfig, OptimizerConfig
from hpcdl.core.protocols import Communicator
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.table import find_strategy, load_strategy

LENGTH, STEPS, ETA, ALPHA = 50_000, 20, 0.01, 0.2


def train(name: str, everybody: Communicator) -> dict[str, Any]:
    """Run workers without turns; hogwild-sgd with a constant gradient, hogwild-easgd with one kick at the start."""
    communicator = everybody.duplicate()
    info = find_strategy(name)
    observed = observe(communicator).for_purpose(EXCHANGE)
    context = Context(
        info=info,
        communicator=observed,
        num_workers=communicator.size,
        num_servers=0,
        exchange=ExchangeConfig(),
        optimizer=OptimizerConfig(learning_rate=ETA),
        elastic=ElasticConfig(moving_rate=ALPHA),
    )
    strategy: Any = load_strategy(info)
    replica = strategy.replica(context)
    start = np.linspace(-1, 1, LENGTH).astype(np.float32)
    gradient = np.full(LENGTH, communicator.rank + 1, np.float32)
    replica.start(start, [LENGTH])
    before = observed.monitor.traffic()
    for step in range(STEPS):
        replica.before_step(step)
        replica.step(gradient if step == 0 or name == "hogwild-sgd" else np.zeros_like(gradient))
    sent = (observed.monitor.traffic() - before).bytes_sent
    replica.leave()
    center, weights = replica.center().copy(), replica.weights.copy()
    replica.finish()
    communicator.allreduce(weights)
    gradients = sum(range(1, communicator.size + 1)) * ETA
    expected = (
        start - STEPS * gradients - center
        if name == "hogwild-sgd"
        else (communicator.size + 1) * start - gradients - weights - center
    )
    return {
        "lost": float(np.abs(expected).max()),
        "moved": float(np.abs(center - start).max()),
        "way": type(replica._link).__name__,
        "warnings": list(replica.warnings),
        "updates": replica.count,
        "megabytes_sent": sent / 1e6,
    }


def main() -> None:
    """Run both methods."""
    everybody = world()
    found = {name: train(name, everybody) for name in ("hogwild-sgd", "hogwild-easgd")}
    if everybody.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()

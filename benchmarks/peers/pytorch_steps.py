"""A network's steps under DistributedDataParallel, with and without exchange, on every rank of PyTorch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as ranks
from steps import LEARNING_RATE, measured
from torch.nn.parallel import DistributedDataParallel


def print_steps(module: torch.nn.Module, loss_of: Callable[[Any], torch.Tensor], num_steps: int) -> None:
    """Print the times as JSON on rank 0; `loss_of` is given the network. Ends the initialised process group."""
    # Each rank keeps its own statistics of batch normalisation, as with the other engines.
    model = DistributedDataParallel(module, gradient_as_bucket_view=True, forward_sync_buffers=False)
    trained = [one for one in module.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trained, LEARNING_RATE, fused=True)

    def step(within: Callable[[], Any]) -> None:
        with within():
            loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = measured(
        {"step_seconds": lambda: step(contextlib.nullcontext), "compute_seconds": lambda: step(model.no_sync)},
        num_steps,
        barrier=ranks.barrier,
        slowest=slowest,
    )
    if ranks.get_rank() == 0:
        parameters = sum(one.numel() for one in trained)
        print(json.dumps({**found, "parameters": parameters, "ranks": ranks.get_world_size()}))
    ranks.destroy_process_group()


def slowest(seconds: float) -> float:
    """Return the maximum over all ranks."""
    found = torch.tensor([seconds], dtype=torch.float64)
    ranks.all_reduce(found, ranks.ReduceOp.MAX)
    return float(found[0])

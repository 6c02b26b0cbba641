"""One rank of DistributedDataParallel over gloo whose computing is a wait, with DDP's own buckets; rank 0 prints JSON.

    mpiexec ... PYTHON benchmarks/peers/pytorch_waits.py PLAN STEPS

benchmarks/peers_hosts.py writes PLAN; MASTER_ADDR and MASTER_PORT say where ranks meet, mpiexec gives their numbers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as ranks
from pytorch_steps import print_steps
from waits import Waits

torch.set_num_threads(1)


class Wait(torch.autograd.Function):
    """Return the input; gradients of the weights are zeros, available after `wait`."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, wait: Callable[[], None], *weights: torch.Tensor) -> torch.Tensor:
        context.wait, context.shapes = wait, [one.shape for one in weights]
        return x.clone()

    @staticmethod
    def backward(context: Any, upstream: torch.Tensor) -> Any:
        context.wait()
        return upstream, None, *(torch.zeros(shape) for shape in context.shapes)


class Piece(torch.nn.Module):
    """A layer with the weights whose gradients are ready together."""

    def __init__(self, waits: Waits, place: int) -> None:
        super().__init__()
        shapes = reversed(waits.pieces[place])
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for shape in shapes)
        self.wait = lambda: waits.backward(place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Wait.apply(x, self.wait, *self.weights)


class Network(torch.nn.Module):
    """The forward pass's wait, then all pieces; the last piece of the backward pass comes first."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.wait = waits.forward
        self.pieces = torch.nn.Sequential(*(Piece(waits, place) for place in reversed(range(len(waits.pieces)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.wait()
        return self.pieces(x)


def main() -> None:
    waits, num_steps = Waits(Path(sys.argv[1])), int(sys.argv[2])
    ranks.init_process_group("gloo", rank=int(os.environ["PMI_RANK"]), world_size=int(os.environ["PMI_SIZE"]))
    image = torch.zeros(1)
    print_steps(Network(waits), lambda model: model(image).sum(), num_steps)


if __name__ == "__main__":
    main()

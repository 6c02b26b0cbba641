"""One rank of PyTorch's DistributedDataParallel over gloo: steps with and without exchange; rank 0 prints JSON.

    PYTHON -m torch.distributed.run --standalone --nproc-per-node RANKS pytorch_rank.py NETWORK BATCH STEPS RANKS

Images are stored channels first or last, whichever is faster for the network by three steps of each.
"""

from __future__ import annotations

import statistics
import sys
import time

from steps import take_own_cores

NUM_CORES = take_own_cores(int(sys.argv[4]))

import torch  # noqa: E402  the cores are chosen before threads start
import torch.distributed as ranks  # noqa: E402
from pytorch_networks import NETWORKS  # noqa: E402
from pytorch_steps import print_steps, slowest  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

torch.set_num_threads(NUM_CORES)
TRIALS = 3


def main() -> None:
    network, batch, num_steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    ranks.init_process_group("gloo")
    torch.manual_seed(1)
    build, shape, classes = NETWORKS[network]
    module, images = build(), torch.rand(batch, *shape)
    labels = torch.randint(classes, (batch,))
    layout = faster_layout(module, images, labels)
    module, images = module.to(memory_format=layout), laid(images, layout)
    print_steps(module, lambda model: cross_entropy(model(images), labels), num_steps)


def faster_layout(module: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.memory_format:
    """Return the same layout on all ranks: channels first, or last if that is faster."""
    if images.dim() != 4:
        return torch.contiguous_format
    seconds = {}
    for layout in (torch.contiguous_format, torch.channels_last):
        module.to(memory_format=layout)
        placed, taken = laid(images, layout), []
        for _ in range(1 + TRIALS):
            began = time.perf_counter()
            cross_entropy(module(placed), labels).backward()
            taken.append(time.perf_counter() - began)
        module.zero_grad()
        seconds[layout] = slowest(statistics.median(taken[1:]))
    return min(seconds, key=lambda layout: seconds[layout])


def laid(images: torch.Tensor, layout: torch.memory_format) -> torch.Tensor:
    """Return the same images in that layout."""
    return images.contiguous(memory_format=layout)


if __name__ == "__main__":
    main()

"""How often a node reads its data from storage if several of its ranks train on them; the rest comes from memory.

    python -m benchmarks.node_reads [--ranks 1,2,4] [--mib 256] [--folder DIR]

Ranks in step, each in its own process, read an epoch of the training stream, with samples of 3 kB and 150 kB. Before
that, the shards are dropped from the page cache. Prints the bytes that all ranks together read from the device
(`read_bytes` of /proc/self/io) relative to the size of the shards: 1 if the node reads each byte once, whatever its
ranks. DIR must be on a device, not in memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from multiprocessing.synchronize import Barrier
from pathlib import Path

from hpcdl.data.format.dataset import open_dataset
from hpcdl.data.read.windows import open_stream
from tests.data.sharding import make

SOURCES = {"synthetic:cifar10": 3072, "synthetic:imagenet": 224 * 224 * 3}
GLOBAL_BATCH = 64


def drop(folder: Path) -> None:
    """Drop the shards from the page cache; they are on the device already."""
    for path in folder.rglob("*.h5"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def from_device() -> int:
    """Return the bytes that this process made the device read."""
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])


def read_epoch(data: str, rank: int, ranks: int, together: Barrier, found: dict[int, int]) -> None:
    """Run as one of the ranks."""
    stream = open_stream(open_dataset(data), batch_size=GLOBAL_BATCH // ranks, worker=rank, num_workers=ranks, seed=1)
    together.wait()
    before = from_device()
    for step in range(stream.steps_per_epoch):
        stream.batch(step)
        together.wait()
    found[rank] = from_device() - before
    stream.close()


def measure(folder: Path, ranks: int) -> float:
    """Return the bytes from the device relative to the bytes of the shards."""
    drop(folder)
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(ranks)
    with context.Manager() as manager:
        found = manager.dict()
        arguments = [(str(folder), rank, ranks, together, found) for rank in range(ranks)]
        processes = [context.Process(target=read_epoch, args=each) for each in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                raise SystemExit("a rank failed")
        size = sum(path.stat().st_size for path in folder.rglob("*.h5"))
        return float(sum(found.values()) / size)


def main() -> None:
    """Measure each source with each number of ranks, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="hpcdl-node-reads-") as scratch:
        for source, sample_bytes in SOURCES.items():
            folder = Path(scratch) / source.split(":")[1]
            samples = max(2 * GLOBAL_BATCH, chosen.mib * 1024**2 // sample_bytes)
            make(source, folder, samples=samples, shards=4, max_ranks=64)
            for ranks in map(int, chosen.ranks.split(",")):
                share = round(measure(folder, ranks), 3)
                print(json.dumps({"source": source, "ranks": ranks, "read_from_device": share}), flush=True)


if __name__ == "__main__":
    main()

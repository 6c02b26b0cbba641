"""What a shard is made of and where its parts lie, in words that need no HDF5 (docs/shard-format.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class ShardFrame:
    """What a shard is made with: everything but the samples. `data_shape` is that of /images, or (bytes,) of /bytes."""

    num_samples: int
    data_name: str
    data_shape: tuple[int, ...]
    dtype: str
    block_samples: int
    attributes: Mapping[str, Any]
    class_names: tuple[str, ...]
    alignment: int = 4096
    filters: Mapping[str, Any] | None = None
    sample_checksums: bool = True
    """Whether each sample has a checksum of its own; compressed samples have none."""


@dataclass(frozen=True, kw_only=True)
class ShardMap:
    """Where things lie in a shard, in bytes from the start of the file; `offsets` (within /bytes): encoded data."""

    path: Path
    num_samples: int
    block_samples: int
    data_name: str
    data_shape: tuple[int, ...]
    dtype: str
    compressed: bool
    block_offsets: npt.NDArray[np.int64]
    block_bytes: npt.NDArray[np.int64]
    labels_offset: int
    checksums: npt.NDArray[np.uint64]
    sample_checksums_offset: int | None
    offsets: npt.NDArray[np.int64] | None
    attributes: Mapping[str, Any]

    @property
    def num_blocks(self) -> int:
        """Blocks in the shard."""
        return len(self.block_offsets)

    def block_range(self, block: int) -> tuple[int, int]:
        """First sample of a block, and the one behind its last."""
        return block * self.block_samples, min((block + 1) * self.block_samples, self.num_samples)


@dataclass(frozen=True, kw_only=True)
class NewShardPlaces:
    """Where the parts of a shard just made are to be written, in bytes; `data` is None where HDF5 itself writes."""

    labels: int
    checksums: int
    sample_checksums: int | None
    offsets: int | None
    data: int | None

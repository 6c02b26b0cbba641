"""LMDB (lmdb 3.0.0) with an .npz in each value."""

import io

import lmdb
import numpy as np


class Records:
    """Arrays by key."""

    def __init__(self, source):
        self.file = lmdb.open(str(source), readonly=True, lock=False, subdir=source.is_dir()).begin()

    def items(self):
        """What `read` is called with."""
        return [key.decode() for key, _ in self.file.cursor()]

    def read(self, key):
        """One sample."""
        record = np.load(io.BytesIO(self.file.get(key.encode())), allow_pickle=False)  # .npz in each value
        return {"x": record["x"], "y": record["y"][()]}

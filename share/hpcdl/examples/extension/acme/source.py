"""A source format: files that end in .acme."""

import numpy as np

from hpcdl.data.sources.base.placed import ArrayGroup, FoundArray
from hpcdl.data.sources.layouts.arrays import FieldSource


class NumbersSource(FieldSource):
    """A file of numbers in rows; the last one of a row is the class."""

    @staticmethod
    def recognises(location):
        """Whether `--format auto` takes it."""
        return location.suffix == ".acme"

    def scan(self, index):
        """List the samples."""
        table = np.loadtxt(self._location, ndmin=2)
        columns = {"x": table[:, :-1].astype(np.float32), "y": table[:, -1].astype(np.int64)}
        arrays = {name: FoundArray(str(own.dtype), lambda own=own: self.placed(own)) for name, own in columns.items()}
        return self.list_parts([ArrayGroup(split="all", arrays=arrays)], index)

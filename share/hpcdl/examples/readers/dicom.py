"""DICOM slices (pydicom 3.0.2), a folder per class."""

import numpy as np
import pydicom


class Slices:
    """A slice in Hounsfield units, and the class of its folder."""

    def __init__(self, source):
        self.source = source

    def items(self):
        """What `read` is called with."""
        return sorted(self.source.glob("*/*.dcm"))

    def read(self, path):
        """One sample."""
        file = pydicom.dcmread(path)
        values = pydicom.pixels.apply_rescale(file.pixel_array, file)  # Hounsfield units of CT
        return {"x": values.astype(np.float32), "label": path.parent.name}

"""NIfTI volumes (nibabel 5.4.2), a mask beside each: imagesTr/*.nii.gz and labelsTr/."""

import nibabel
import numpy as np


class Volumes:
    """A volume and its mask."""

    def __init__(self, source):
        self.source = source

    def items(self):
        """What `read` is called with."""
        return sorted(self.source.glob("imagesTr/*.nii.gz"))

    def read(self, path):
        """One sample."""
        volume = nibabel.load(path).get_fdata(dtype=np.float32)  # slope and intercept are applied
        mask = nibabel.load(self.source / "labelsTr" / path.name).dataobj
        return {"x": volume[..., np.newaxis], "mask": np.asarray(mask, np.uint8)}

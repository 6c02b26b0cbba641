"""ROOT trees (uproot 5.7.7), read in parts of 100 MB."""

import numpy as np
import uproot


def events(source):
    """Give the samples of the file, one after the other."""
    columns = ["pt", "eta", "phi"]
    tree = uproot.open(source)["events"]
    for batch in tree.iterate([*columns, "is_signal"], library="np", step_size="100 MB"):
        inputs = np.stack([batch[name] for name in columns], axis=1)
        for x, y in zip(inputs, batch["is_signal"], strict=True):
            yield {"x": x, "y": y}

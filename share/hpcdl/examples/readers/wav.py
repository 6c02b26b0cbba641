"""WAV files of 16 bits (Python's own library), a folder per class."""

import wave

import numpy as np


class Sounds:
    """A sound and the class of its folder."""

    def __init__(self, source):
        self.source = source

    def items(self):
        """What `read` is called with."""
        return sorted(self.source.glob("*/*.wav"))

    def read(self, path):
        """One sample."""
        with wave.open(str(path)) as file:
            assert file.getsampwidth() == 2, "16 bits a value are read here"
            values = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
        return {"x": values.astype(np.float32) / 32768, "label": path.parent.name}

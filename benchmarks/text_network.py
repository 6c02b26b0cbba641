"""A small language model and its text: predict the character after 32 others, in hpcdl's own pages."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy
from keras import layers

ALPHABET = "abcdefghijklmnopqrstuvwxyz .,`"
"""All other characters count as one more."""
WINDOW, SAMPLES = 32, 20_000


def build() -> keras.Model:
    """Build the network: indices (N, 32) of characters in, a logit for each possible next character out."""
    text = keras.Input((WINDOW,), name="text")
    x = layers.Embedding(len(ALPHABET) + 1, 32)(text)
    x = layers.LSTM(96)(x)
    return keras.Model(text, layers.Dense(len(ALPHABET) + 1, name="next")(x))


def write_samples(pages: Path, path: Path) -> None:
    """Cut windows from the Markdown files below `pages`, without a random seed, and write them as a .npz file."""
    text = " ".join(" ".join(page.read_text("utf-8").lower().split()) for page in sorted(pages.rglob("*.md")))
    positions = {character: index for index, character in enumerate(ALPHABET)}
    indices = numpy.array([positions.get(character, len(ALPHABET)) for character in text], numpy.uint8)
    starts = numpy.linspace(0, len(indices) - WINDOW - 1, SAMPLES).astype(int)
    windows = indices[starts[:, None] + numpy.arange(WINDOW)]
    numpy.savez(path, text=windows, next=indices[starts + WINDOW].astype(numpy.int64))

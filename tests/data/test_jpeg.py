"""libjpeg-turbo (if installed) and Pillow decode JPEG files to the same pixels and refuse the same ones."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpcdl.data.sources.base.source import UnreadableSample
from hpcdl.data.sources.layouts import images
from tests.conftest import DIGITS

LIBRARY = images.simplejpeg
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "4:4:4": ("RGB", {"subsampling": 0}),
    "4:2:2": ("RGB", {"subsampling": 1}),
    "4:2:0": ("RGB", {"subsampling": 2, "quality": 30}),
    "progressive": ("RGB", {"progressive": True}),
    "grey": ("L", {}),
    "cmyk": ("CMYK", {}),
    "rgb": ("RGB", {"keep_rgb": True}),
    "restarts": ("RGB", {"restart_marker_blocks": 3}),
}


def file_of(kind: str, height: int, width: int) -> bytes:
    mode, options = KINDS[kind]
    rng = np.random.default_rng(height * width)
    small = Image.fromarray(rng.integers(0, 256, (9, 11, 3), dtype=np.uint8)).resize((width, height))
    out = io.BytesIO()
    small.convert(mode).save(out, "JPEG", **options)
    return out.getvalue()


def both(monkeypatch: pytest.MonkeyPatch, content: bytes, **wanted: Any) -> list[Any]:
    """Return the pixels or the error, with and without simplejpeg; `make` installs it for the tests."""
    assert LIBRARY is not None
    found: list[Any] = []
    for library in (LIBRARY, None):
        monkeypatch.setattr(images, "simplejpeg", library)
        try:
            found.append(images.decode(content, **wanted))
        except UnreadableSample as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [None, (28, 28), (60, 50), (31, 77)])
@pytest.mark.parametrize("kind", KINDS)
def test_both_give_the_same_pixels(
    monkeypatch: pytest.MonkeyPatch, kind: str, size: tuple[int, int] | None, channels: int
) -> None:
    for height, width in ((1, 1), (17, 33), (61, 50), (130, 97)):
        quick, plain = both(monkeypatch, file_of(kind, height, width), size=size, channels=channels)
        np.testing.assert_array_equal(quick, plain)
        assert quick.shape == (*(size or (height, width)), channels)


def test_both_say_the_same_of_damaged_files(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = file_of("4:2:0", 61, 50)
    rng = np.random.default_rng(0)
    damaged = [whole[:length] for length in (3, 20, 200, len(whole) // 2, len(whole) - 2)] + [whole + b"trailing"]
    for _ in range(60):
        broken = bytearray(whole)
        broken[rng.integers(3, len(whole))] = rng.integers(0, 256)
        damaged.append(bytes(broken))
    refused = 0
    for content in damaged:
        quick, plain = both(monkeypatch, content, size=None, channels=3)
        np.testing.assert_array_equal(quick, plain)
        refused += isinstance(plain, str)
    assert 0 < refused < len(damaged)


def test_most_jpegs_are_decoded_quickly() -> None:
    """libjpeg-turbo decodes most JPEGs; otherwise the other tests would compare Pillow with itself."""
    content = file_of("4:2:0", 61, 50)
    for size in (None, (61, 50), (40, 40)):
        assert images._plain_jpeg(content, size, 3) is not None
    for size, channels in (((20, 20), 3), (None, 1)):
        assert images._plain_jpeg(content, size, channels) is None
    digits = next(DIGITS.glob("**/*.png"))
    assert images._plain_jpeg(digits.read_bytes(), None, 1) is None

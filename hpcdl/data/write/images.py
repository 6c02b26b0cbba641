"""Image files to pixels, when sharding: decoded, converted to the wanted channels, scaled and centre-cropped."""

from __future__ import annotations

import contextlib
import io
import struct
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from hpcdl.data.sources.base import Content, UnreadableSample

_MODES = {1: "L", 3: "RGB"}
_DAMAGED = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, OverflowError, MemoryError, ZeroDivisionError,
    AttributeError, RuntimeError, struct.error, Image.DecompressionBombError,
)  # fmt: skip
"""What Pillow raises for files that are not as they should be."""
_GREY = frozenset({"1", "L", "LA", "I", "I;16", "I;16B", "F"})


def image_header(content: Content) -> tuple[int, int, int]:
    """Height, width and channels (1 for greyscale, else 3) of an image file; UnreadableSample where it is none."""
    with _opened(content) as image:
        return image.height, image.width, 1 if image.mode in _GREY else 3


def decode(content: Content, *, size: tuple[int, int] | None, channels: int) -> npt.NDArray[np.uint8]:
    """Pixels (H, W, channels) of an image file, scaled to cover `size` (height, width) and cut at the centre."""
    with _opened(content) as image:
        if size is not None:
            image.draft(_MODES[channels], (size[1], size[0]))
        pixels = _converted(image, channels)
        if size is not None and (pixels.height, pixels.width) != size:
            pixels = ImageOps.fit(pixels, (size[1], size[0]), method=Image.Resampling.BILINEAR)
        array = np.asarray(pixels, np.uint8)
    return array.reshape(array.shape[0], array.shape[1], channels)


def check_encoded(content: Content) -> None:
    """UnreadableSample where a JPEG or PNG file is damaged or cut short, or is of another kind.

    The marks at both ends are looked at; a file without its end mark is decoded to be sure.
    """
    head, tail = bytes(content[:8]), bytes(content[-64:]).rstrip(b"\0")
    jpeg = head.startswith(b"\xff\xd8\xff")
    if not jpeg and not head.startswith(b"\x89PNG\r\n\x1a\n"):
        raise UnreadableSample("neither JPEG nor PNG; encoded shards take no other files, use --encoding raw")
    if not (tail.endswith(b"\xff\xd9") if jpeg else b"IEND" in tail):
        decode(content, size=None, channels=3)


@contextlib.contextmanager
def _opened(content: Content) -> Iterator[Any]:
    """The image in `content`; UnreadableSample for whatever is wrong with it, also while it is worked with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of odd metadata; the pixels are what counts here
        try:
            with Image.open(io.BytesIO(content)) as image:
                yield image
        except _DAMAGED as error:
            told = " ".join(str(error).split())[:200]
            raise UnreadableSample(f"damaged image, or none that Pillow can read ({told})") from error


def _converted(image: Any, channels: int) -> Any:
    """`image` in the mode of `channels`; 16-bit greyscale keeps its upper eight bits."""
    if image.mode in ("I;16", "I;16B", "I"):
        wide = np.asarray(image)
        image = Image.fromarray((wide >> 8 if wide.max(initial=0) > 255 else wide).astype(np.uint8))
    elif image.mode == "P":
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    return image if image.mode == _MODES[channels] else image.convert(_MODES[channels])

"""Image files to pixels, when sharding: decoded, converted to the wanted channels, scaled and centre-cropped."""

from __future__ import annotations

import contextlib
import io
import math
import re
import struct
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

try:
    import simplejpeg
except ImportError:  # without hpcdl[jpeg] Pillow decodes everything: the same pixels, more slowly
    simplejpeg = None

from hpcdl.data.sources.base import Content, UnreadableSample

_MODES = {1: "L", 3: "RGB"}
_PLAIN = {("YCbCr", 3): "RGB", ("Gray", 1): "GRAY"}
"""What a JPEG file holds, and the channels wanted, for which Pillow converts nothing afterwards."""
_DAMAGED = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, OverflowError, MemoryError, ZeroDivisionError,
    AttributeError, RuntimeError, struct.error, Image.DecompressionBombError,
)  # fmt: skip
"""What Pillow raises for files that are not as they should be."""
_ADDRESS = re.compile(r" <_io\.BytesIO object at \w+>")
"""What Pillow calls a file that it was handed the bytes of."""
_GREY = frozenset({"1", "L", "LA", "I", "I;16", "I;16B", "F"})


def image_header(content: Content) -> tuple[int, int, int]:
    """Height, width and channels (1 for greyscale, else 3) of an image file; UnreadableSample where it is none."""
    with _opened(content) as image:
        return image.height, image.width, 1 if image.mode in _GREY else 3


def decode(content: Content, *, size: tuple[int, int] | None, channels: int) -> npt.NDArray[np.uint8]:
    """Pixels (H, W, channels) of an image file, scaled to cover `size` (height, width) and cut at the centre."""
    array = _plain_jpeg(content, size, channels)
    if array is None or (size is not None and array.shape[:2] != size):
        with _opened(content, array) as image:
            if size is not None:
                image.draft(_MODES[channels], (size[1], size[0]))
            pixels = _converted(image, channels)
            if size is not None and (pixels.height, pixels.width) != size:
                pixels = ImageOps.fit(pixels, (size[1], size[0]), method=Image.Resampling.BILINEAR)
            array = np.asarray(pixels, np.uint8)
    return array.reshape(array.shape[0], array.shape[1], channels)


def _plain_jpeg(content: Content, size: tuple[int, int] | None, channels: int) -> npt.NDArray[np.uint8] | None:
    """Pixels (H, W, channels) of a JPEG file by libjpeg-turbo itself, where Pillow would decode it whole, unconverted.

    That is the transform and the upsampling that Pillow has chosen, without its copies. None for all other files, and
    where anything is wrong: Pillow knows what can be read all the same.
    """
    if simplejpeg is None or bytes(content[:3]) != b"\xff\xd8\xff":
        return None
    try:
        height, width, color, _ = simplejpeg.decode_jpeg_header(content)
        halved = size is not None and height >= 2 * size[0] and width >= 2 * size[1]
        if (color, channels) not in _PLAIN or halved or height * width > (Image.MAX_IMAGE_PIXELS or math.inf):
            return None
        found: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(content, _PLAIN[color, channels])
    except (ValueError, TypeError, MemoryError):
        return None
    return found


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
def _opened(content: Content, pixels: npt.NDArray[np.uint8] | None = None) -> Iterator[Any]:
    """The image in `content`, or of its `pixels` where they are known.

    UnreadableSample for whatever is wrong with it, also while it is worked with.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of odd metadata; the pixels are what counts here
        try:
            with Image.open(io.BytesIO(content)) if pixels is None else _image(pixels) as image:
                yield image
        except _DAMAGED as error:
            told = " ".join(_ADDRESS.sub("", str(error)).split())[:200]
            raise UnreadableSample(f"damaged image, or none that Pillow can read ({told})") from error


def _image(pixels: npt.NDArray[np.uint8]) -> Any:
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def _converted(image: Any, channels: int) -> Any:
    """`image` in the mode of `channels`; 16-bit greyscale keeps its upper eight bits."""
    if image.mode in ("I;16", "I;16B", "I"):
        wide = np.asarray(image)
        image = Image.fromarray((wide >> 8 if wide.max(initial=0) > 255 else wide).astype(np.uint8))
    elif image.mode == "P":
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    return image if image.mode == _MODES[channels] else image.convert(_MODES[channels])

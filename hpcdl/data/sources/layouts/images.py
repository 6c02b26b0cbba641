"""Turn image files into pixels for sharding: decode, convert to the requested channels, scale and centre-crop.

Also makes images a field of a sample, beside a quantity or a mask: one shape and type for all.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import re
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from hpcdl.core.errors import SourceError, UsageError, shown
from hpcdl.data.format.manifest import Field
from hpcdl.data.sources.base.chosen import field_name
from hpcdl.data.sources.base.source import Array, Content, SourceSpec, UnreadableSample

try:
    import simplejpeg
except ImportError:  # without hpcdl[jpeg] Pillow decodes everything: the same pixels, more slowly
    simplejpeg = None


_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_PNG = b"\x89PNG\r\n\x1a\n"
_PAGED = ("TIFF", "GIF", "WEBP", "PNG")
"""Formats whose files may hold several images; a stereo JPEG (MPO) counts as its first image."""
_DEEP = frozenset({"I", "I;16", "I;16B", "I;16L", "I;16N", "F"})
"""Modes with more than 8 bits per pixel."""
_PLAIN = {("YCbCr", 3): "RGB", ("Gray", 1): "GRAY"}
"""JPEG colour spaces with the requested channels for which Pillow needs no conversion."""
_DAMAGED = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, OverflowError, MemoryError, ZeroDivisionError,
    AttributeError, RuntimeError, struct.error, Image.DecompressionBombError,
)  # fmt: skip
"""What Pillow raises for damaged files."""
_ORIENTATION = 0x0112
"""EXIF's orientation tag; 1 means upright."""
_ADDRESS = re.compile(r" <_io\.BytesIO object at \w+>")
"""Pillow's name for a file that it got as bytes."""
_FEWEST_OF_CLASS = 5
"""Images of a class that are looked at before it is said what tells it from others."""
_Look = tuple[str, str, str]
"""Format, colour and size of an image, in words."""
_GREY = _DEEP | {"1", "L", "LA"}


@dataclass(frozen=True, kw_only=True)
class ImageHead:
    """The content of an image file's header; `dtype` is the type for its pixels, `bands` those of the file."""

    height: int
    width: int
    bands: int
    grey: bool
    dtype: str
    odd: str = ""
    """Why its values cannot be stored; empty if they can."""
    turned: bool = False
    """Whether EXIF tells viewers to rotate or mirror the image."""
    kind: str = ""
    """The format of the file."""


def image_head(content: Content) -> ImageHead:
    """Return the header of an image file; UnreadableSample if it is not an image."""
    with _opened(content) as image:
        return _head(image)


def _head(image: Any) -> ImageHead:
    pages = getattr(image, "n_frames", 1) if image.format in _PAGED else 1
    problem = ""
    if pages > 1:
        problem = f"has {pages} pages; one image a file is taken: save each page as a file, or all as an array (.npy)"
    elif image.mode not in _DEEP and any("16" in _raw_mode(part) for part in getattr(image, "tile", [])):
        problem = "has 16 bits in each of several bands, of which Pillow reads 8; save it as an array (.npy or HDF5)"
    return ImageHead(
        height=image.height,
        width=image.width,
        bands=_bands(image),
        grey=image.mode in _GREY,
        dtype="float32" if image.mode in _DEEP else "uint8",
        odd=problem,
        turned=_is_turned(image),
        kind=image.format or "",
    )


def _raw_mode(tile: Any) -> str:
    """Return how a part of a file stores its pixels, such as RGB;16B; Pillow puts it first, offsets may follow."""
    arguments = tile[3][:1] if isinstance(tile[3], tuple) else [tile[3]]
    return next((mode for mode in arguments if isinstance(mode, str)), "")


def _bands(image: Any) -> int:
    """Count the bands of an image, including transparency stored as one colour, of the palette or of all colours."""
    if "transparency" not in image.info or image.mode not in ("1", "L", "P", "RGB"):
        return len(image.getbands())
    return 2 if image.mode in ("1", "L") else 4


def _is_turned(image: Any) -> bool:
    if image.format == "PNG" and "exif" not in image.info:  # Pillow would decode all pixels to look for it after them
        return False
    with contextlib.suppress(*_DAMAGED):  # broken EXIF beside intact pixels
        return image.getexif().get(_ORIENTATION, 1) not in (0, 1)
    return False


class ImageKinds:
    """Collects size, bands and depth of a source's images, one by one; SourceError if they are ambiguous."""

    def __init__(self, *, size: tuple[int, int] | None, channels: int | None, mask: bool = False) -> None:
        self._size, self._channels, self._mask = size, channels, mask
        self._sizes: dict[tuple[int, int], str] = {}
        self._depths: dict[str, str] = {}
        self._masks: dict[tuple[tuple[int, ...], str], str] = {}
        self._grey = True
        self._turned = ""
        self._of_classes: dict[int, list[_Look]] = {}
        self._of_splits: dict[str, list[_Look]] = {}

    def add(self, content: Content, name: str, label: int = 0, split: str = "") -> None:
        """Add the header of an image of class `label` in `split`; UnreadableSample if it is not an image."""
        head = image_head(content)
        if head.odd:
            raise SourceError(f"{name} {head.odd}")
        if self._mask:
            pixels = decode_mask(content, size=self._size)
            self._masks.setdefault((pixels.shape, pixels.dtype.name), name)
        # The four bands of CMYK are colours alone.
        elif head.bands in (2, 4) and not self._channels and not _is_cmyk(content):
            less = head.bands - 1
            alternative = ", --channels 4 keeps it" if less == 3 else ""
            raise SourceError(
                f"{name} has {head.bands} bands, the last is transparency or a band of its own: --channels {less} "
                f"leaves it out{alternative}"
            )
        self._grey = self._grey and head.grey
        self._depths.setdefault(head.dtype, name)
        self._turned = self._turned or (name if head.turned else "")
        look = head.kind, "grey" if head.grey else "in colour", f"of {head.height}x{head.width} pixels"
        self._of_classes.setdefault(label, []).append(look)
        self._of_splits.setdefault(split, []).append(look)
        if not self._size:
            self._sizes.setdefault((head.height, head.width), name)
        # At once, so that a question does not wait for thousands of files.
        self._check()

    def _check(self) -> None:
        if len(self._depths) > 1 and not self._mask:
            (kind, first_name), (_, second_name) = self._depths.items()
            deep, plain = (first_name, second_name) if kind == "float32" else (second_name, first_name)
            raise SourceError(
                f"{deep} has more than 8 bits a pixel, {plain} has 8: one scale for both is not known; save all alike"
            )
        if len(self._sizes) > 1:
            (first, first_name), (second, second_name) = self._sizes.items()
            raise UsageError(
                f"images differ in size ({first_name}: {first[0]}x{first[1]}, {second_name}: {second[0]}x{second[1]}); "
                "give --image-size, for example --image-size 224"
            )
        if len(self._masks) > 1:
            (first_kind, first_name), (second_kind, second_name) = list(self._masks.items())[:2]
            raise SourceError(
                f"masks differ: {first_name} is {_shape_text(*first_kind)}, {second_name} is "
                f"{_shape_text(*second_kind)}; save all alike"
            )

    def settled(self) -> tuple[tuple[int, ...], str]:
        """Return the shape and type that all images get."""
        if self._masks:
            return next(iter(self._masks))
        size = self._size or next(iter(self._sizes), None)
        if size is None or not self._depths:
            raise SourceError("not one image of the source can be read; check the files")
        return (*size, self._channels or (1 if self._grey else 3)), next(iter(self._depths))

    def lines(self, class_names: Sequence[str] = ()) -> list[str]:
        """Return remarks on the values, and on what tells classes apart beside the content of their images."""
        called = list(map(shown, class_names)) or [*map(str, range(max(self._of_classes, default=0) + 1))]
        by_class = {called[label]: looks for label, looks in sorted(self._of_classes.items())}
        remarks = _giveaways(by_class, "a model may learn this instead of what they show")
        # What tells classes apart as well is said already.
        remarks += [] if remarks else _giveaways(self._of_splits, "a model of the one may fail on the other")
        if "float32" in self._depths:
            remarks.append(
                "images of more than 8 bits are kept as float32 with the values of the files; training does not scale "
                "them"
            )
        if self._turned:
            turned = f"{self._turned} has one: its pixels stay as they are stored"
            remarks.append(f"EXIF rotation is not applied, and {turned}")
        return remarks


def _giveaways(groups: Mapping[str, Sequence[_Look]], meaning: str) -> list[str]:
    """Return a remark for each property that all images of a group share, and not those of another group."""
    remarks = []
    for at in range(3):
        values = {name: {look[at] for look in looks} for name, looks in groups.items()}
        few = any(len(looks) < _FEWEST_OF_CLASS for looks in groups.values())
        if few or any(len(found) > 1 for found in values.values()):
            continue
        (first, one), *others = [(name, min(found)) for name, found in values.items()]
        second, other = next((pair for pair in others if pair[1] != one), (first, one))
        if other != one:
            remarks.append(f"all images seen of {first} are {one}, those of {second} {other}: {meaning}")
    return remarks


def _shape_text(shape: tuple[int, ...], dtype: str) -> str:
    return f"{'x'.join(map(str, shape))} {dtype}"


def check_end(content: Content) -> None:
    """Raise UnreadableSample if a JPEG or PNG file has not its end and does not decode: it is cut short."""
    head, tail = bytes(content[:8]), bytes(content[-64:])
    jpeg, png = head.startswith(b"\xff\xd8\xff"), head.startswith(b"\x89PNG")
    if (jpeg and b"\xff\xd9" not in tail) or (png and b"IEND" not in tail):
        picture(content, mask=False)


def _is_cmyk(content: Content) -> bool:
    with _opened(content) as image:
        return bool(image.mode == "CMYK")


def decode(
    content: Content, *, size: tuple[int, int] | None, channels: int, dtype: str = "uint8", asked: bool = True
) -> npt.NDArray[Any]:
    """Return the pixels (H, W, channels) of an image file, scaled to cover `size` (height, width), cut at the centre.

    Raises UnreadableSample if values would be lost: pages, more bits than `dtype` has, a band dropped without `asked`.
    """
    array: npt.NDArray[Any] | None = _plain_jpeg(content, size, channels) if dtype == "uint8" else None
    if array is None or (size is not None and array.shape[:2] != size):
        _check_pixels(content)
        with _opened(content, array) as image:
            _check_kept(_head(image), dtype, asked or image.mode == "CMYK")
            if size is not None and dtype == "uint8":
                # libjpeg then decodes at 1/2, 1/4 or 1/8, which still covers the size and takes less time.
                image.draft(_MODES[channels], (size[1], size[0]))
            pixels = _converted(image, channels) if dtype == "uint8" else _wide(image)
            if size is not None and (pixels.height, pixels.width) != size:
                pixels = ImageOps.fit(pixels, (size[1], size[0]), method=Image.Resampling.BILINEAR)
            array = np.asarray(pixels, dtype)
    if array.ndim == 2 and dtype != "uint8":
        array = np.repeat(array[:, :, np.newaxis], channels, 2)
    return array.reshape(array.shape[0], array.shape[1], channels)


def decode_mask(content: Content, *, size: tuple[int, int] | None) -> npt.NDArray[Any]:
    """Return a mask's numbers as in the file: palette indices, grey values or colours; scaling never mixes them."""
    _check_pixels(content)
    with _opened(content) as image:
        head = _head(image)
        if head.odd:
            raise UnreadableSample(f"it {head.odd}")
        fitted = image
        if size is not None and (image.height, image.width) != size:
            fitted = ImageOps.fit(image, (size[1], size[0]), method=Image.Resampling.NEAREST)
        array = np.asarray(fitted)
    return array.astype(np.uint8) if array.dtype == np.bool_ else array.astype(array.dtype.newbyteorder("="))


def colours_used(content: Content) -> dict[int, tuple[int, ...]]:
    """Return the colour that the palette of an image file has for each number that is in it; empty without palette."""
    with _opened(content) as image:
        if image.mode != "P":
            return {}
        palette = np.array(image.getpalette("RGB"), np.uint8).reshape(-1, 3)
        numbers = np.unique(np.asarray(image)).tolist()
    return {number: tuple(palette[number].tolist()) for number in numbers if number < len(palette)}


def picture(content: Content, *, mask: bool) -> npt.NDArray[Any]:
    """Return the pixels of an image file that is a field beside others: colours, or with `mask` the file's numbers."""
    if mask:
        return decode_mask(content, size=None)
    _check_pixels(content)
    with _opened(content) as image:
        head = _head(image)
        if head.odd:
            raise UnreadableSample(f"it {head.odd}")
        plain = {"1": "L", "P": "RGBA" if "transparency" in image.info else "RGB", "CMYK": "RGB", "YCbCr": "RGB"}
        array = np.asarray(image.convert(plain[image.mode]) if image.mode in plain else image)
    return array.astype(array.dtype.newbyteorder("="))


def _check_kept(head: ImageHead, dtype: str, asked: bool) -> None:
    if head.odd:
        raise UnreadableSample(head.odd)
    if head.dtype != dtype:
        raise UnreadableSample(f"its depth is that of {head.dtype}, the others' that of {dtype}; save all alike")
    if head.bands in (2, 4) and not asked:
        raise UnreadableSample(
            f"it has {head.bands} bands: --channels {head.bands - 1} leaves the last one (transparency) out"
        )


def _wide(image: Any) -> Any:
    """Return a deep image as float32, value by value; UnreadableSample if float32 would round its integers."""
    values = np.asarray(image)
    if values.dtype.kind in "iu" and max(abs(int(values.max(initial=0))), abs(int(values.min(initial=0)))) > 1 << 24:
        raise UnreadableSample(
            "it holds whole numbers over 2^24, which float32 rounds; save the images as arrays (.npy)"
        )
    return Image.fromarray(values.astype(np.float32))


def _plain_jpeg(content: Content, size: tuple[int, int] | None, channels: int) -> npt.NDArray[np.uint8] | None:
    """Return the pixels (H, W, channels) of a JPEG file by libjpeg-turbo, if Pillow would decode all of it unconverted.

    It uses the same transform and upsampling as Pillow, without its copies. Returns None for other files and on any
    error: Pillow may still be able to read them.
    """
    if simplejpeg is None or bytes(content[:3]) != b"\xff\xd8\xff":
        return None
    try:
        height, width, color, _ = simplejpeg.decode_jpeg_header(content)
        # Pillow decodes these at a fraction of their size (draft), which gives other pixels.
        halved = size is not None and height >= 2 * size[0] and width >= 2 * size[1]
        # Very large ones are left to Pillow, which guards against decompression bombs.
        if (color, channels) not in _PLAIN or halved or height * width > (Image.MAX_IMAGE_PIXELS or math.inf):
            return None
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(content, _PLAIN[color, channels])
    except (ValueError, TypeError, MemoryError):
        return None
    return pixels


def check_encoded(content: Content, *, decodes: bool = False) -> None:
    """Raise UnreadableSample if a JPEG or PNG file is damaged, cut short, of another format, or has over 8 bits.

    All checksums of a PNG are checked; for a JPEG the marks at both ends. A JPEG without its end mark is decoded.
    `decodes` decodes every file: it takes milliseconds each, but nothing else reveals damage inside a JPEG.
    """
    # Zeros may follow the end mark, as padding.
    head, tail = bytes(content[:8]), bytes(content[-64:]).rstrip(b"\0")
    jpeg = head.startswith(b"\xff\xd8\xff")
    if not jpeg and head != _PNG:
        raise UnreadableSample("neither JPEG nor PNG; encoded shards take no other files, use --encoding raw")
    if not jpeg:
        _check_png(memoryview(content))
    if decodes or (jpeg and not tail.endswith(b"\xff\xd9")):
        decode(content, size=None, channels=3)


def _check_png(content: memoryview) -> None:
    """Raise UnreadableSample unless every chunk up to the end has its CRC (PNG specification, section 5.3)."""
    for kind, data in _parts_of_png(content):
        # Bit depth follows width and height (section 11.2.2).
        if kind == b"IHDR" and len(data) == 13 and data[8] == 16:
            raise UnreadableSample("it has 16 bits a pixel, of which training would read 8; use --encoding raw")
        if kind == b"IEND":
            return
    raise UnreadableSample("damaged image: it is cut short")


def _parts_of_png(content: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield type and data of each whole chunk of a PNG; UnreadableSample for a wrong CRC."""
    chunk_start = 8
    # Length, type and CRC of a chunk have 4 bytes each; the data are between type and CRC.
    while chunk_start + 12 <= len(content):
        length = int.from_bytes(content[chunk_start : chunk_start + 4])
        kind, end = bytes(content[chunk_start + 4 : chunk_start + 8]), chunk_start + 8 + length
        if end + 4 > len(content):
            return
        if zlib.crc32(content[chunk_start + 4 : end]) != int.from_bytes(content[end : end + 4]):
            raise UnreadableSample(f"damaged image: the checksum of its part {kind.decode('latin-1')} is wrong")
        yield kind, content[chunk_start + 8 : end]
        chunk_start = end + 4


def _check_pixels(content: Content) -> None:
    """Raise UnreadableSample if a PNG's checksums say that its pixels are damaged, which Pillow does not look at."""
    if bytes(content[:8]) == _PNG:
        for kind, _ in _parts_of_png(memoryview(content)):
            if kind == b"IEND":
                return


@contextlib.contextmanager
def _opened(content: Content, pixels: npt.NDArray[np.uint8] | None = None) -> Iterator[Any]:
    """Open the image in `content`, or made of its `pixels` if they are known.

    Every error raises UnreadableSample, also while the image is in use.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of odd metadata; only the pixels matter here
        try:
            with Image.open(io.BytesIO(content)) if pixels is None else _image(pixels) as image:
                yield image
        except _DAMAGED as error:
            reason = " ".join(_ADDRESS.sub("", str(error)).split())[:200]
            raise UnreadableSample(f"damaged image, or none that Pillow can read ({reason})") from error


def _image(pixels: npt.NDArray[np.uint8]) -> Any:
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def _converted(image: Any, channels: int) -> Any:
    """Return `image` of 8 bits in the mode of `channels`."""
    if image.mode == "P":
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    # Pillow has no conversion from CMYK to RGBA.
    elif image.mode == "CMYK" and channels == 4:
        image = image.convert("RGB")
    return image if image.mode == _MODES[channels] else image.convert(_MODES[channels])


_HEADERS = 1000


class PictureField:
    """One field of image files; with `mask`, values stay unchanged, and scaling never mixes them."""

    def __init__(self, spec: SourceSpec, *, mask: bool = False) -> None:
        self._size = (spec.image_size[0], spec.image_size[1]) if spec.image_size else None
        self._channels, self._mask = spec.channels, mask

    def field(self, name: str, files: Iterable[tuple[str, bytes]]) -> Field:
        """Return the field of these files: size and channels come from the headers of the first thousand."""

        kinds = ImageKinds(size=self._size, channels=None if self._mask else self._channels, mask=self._mask)
        for path, content in itertools.islice(files, _HEADERS):
            try:
                kinds.add(content, path)
            except UnreadableSample:
                continue  # the writing finds it again and follows --on-error
        shape, dtype = kinds.settled()
        role = "target" if self._mask else "input"
        return Field(name=name, role=role, dtype=dtype, shape=shape)

    def read(self, content: Content, field: Field) -> Array:
        """Return the pixels of a file."""

        if self._mask:
            pixels = decode_mask(content, size=self._size)
        else:
            pixels = decode(content, size=self._size, channels=field.shape[-1], dtype=field.dtype)
        if pixels.shape != tuple(field.shape):
            raise UnreadableSample(
                f"its size is {pixels.shape[0]}x{pixels.shape[1]}, the first one's {field.shape[0]}x{field.shape[1]}; "
                f"give --image-size {field.shape[0]}x{field.shape[1]}"
            )
        return np.asarray(pixels)


def quantity_field(name: str) -> Field:
    """Return the field of one measured number per sample."""
    return Field(name=field_name(name), role="target", dtype="float32")

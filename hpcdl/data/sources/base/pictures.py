"""Image files as a field of a sample, beside a quantity or a mask: one shape and type for all, decoded when sharded."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from hpcdl.data.format.fields import Field
from hpcdl.data.sources.base.arrays import field_name
from hpcdl.data.sources.base.source import Array, Content, SourceSpec, UnreadableSample

_HEADERS = 1000


class PictureField:
    """One field of image files; `mask`: values are kept as they are, and never mixed when scaled."""

    def __init__(self, spec: SourceSpec, *, mask: bool = False) -> None:
        self._size = (spec.image_size[0], spec.image_size[1]) if spec.image_size else None
        self._channels, self._mask = spec.channels, mask

    def field(self, name: str, files: Iterable[tuple[str, bytes]]) -> Field:
        """The field that these files make: their size and channels, by the headers of the first thousand."""
        from hpcdl.data.sources.base.images import ImageKinds

        kinds = ImageKinds(size=self._size, channels=None if self._mask else self._channels, mask=self._mask)
        for path, content in itertools.islice(files, _HEADERS):
            try:
                kinds.add(content, path)
            except UnreadableSample:
                continue  # the writing meets it again and does what --on-error says
        shape, dtype = kinds.settled()
        role = "target" if self._mask else "input"
        return Field(name=name, role=role, dtype=dtype, shape=shape)

    def read(self, content: Content, item: Field) -> Array:
        """The pixels of a file."""
        from hpcdl.data.sources.base.images import decode, decode_mask

        if self._mask:
            found = decode_mask(content, size=self._size)
        else:
            found = decode(content, size=self._size, channels=item.shape[-1], dtype=item.dtype)
        if found.shape != tuple(item.shape):
            raise UnreadableSample(
                f"its size is {found.shape[0]}x{found.shape[1]}, the first one's {item.shape[0]}x{item.shape[1]}; give "
                f"--image-size {item.shape[0]}x{item.shape[1]}"
            )
        return np.asarray(found)


def quantity_field(name: str) -> Field:
    """The field of one measured number a sample."""
    return Field(name=field_name(name), role="target", dtype="float32")

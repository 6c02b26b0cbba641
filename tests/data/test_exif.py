"""The EXIF orientation of pictures is reported, and finding it decodes no pixels."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from hpcdl.data.sources.layouts.images import ImageKinds

TURNED = 6


def picture(form: str, *, orientation: int = 0) -> bytes:
    made, exif = io.BytesIO(), Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(made, form, exif=exif)
    return made.getvalue()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_a_turned_picture_is_reported(form: str) -> None:
    kinds = ImageKinds(size=None, channels=None)
    kinds.add(picture(form), "upright")
    assert not kinds.lines()
    kinds.add(picture(form, orientation=TURNED), "turned")
    kinds.add(picture(form, orientation=TURNED), "another")
    (line,) = kinds.lines()
    assert "EXIF rotation is not applied, and turned has one" in line


def test_the_header_of_a_png_is_read_without_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(image: object) -> None:
        raise AssertionError("all pixels are decoded for a header")

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", decoded)
    ImageKinds(size=None, channels=None).add(picture("PNG"), "plain")

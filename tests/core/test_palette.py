"""Every reader can tell the colours of pages and figures apart, and they stand out from the background.

How a reader without red cones (protanopia) or green cones (deuteranopia) sees a colour: F. Vienot, H. Brettel and
J. D. Mollon, "Digital video colourmaps for checking the legibility of displays by dichromats", Color Research and
Application 24(4), 1999, pages 243 to 252: RGB to LMS, and the projection of each. Differences are CIE76: Euclidean in
CIELAB (D65), sRGB by IEC 61966-2-1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest

from hpcdl.core.pages.page import CURVES, GROUND, PARTS, Color, channels, patterns, variables
from hpcdl.core.records.run_record import PARTS as RECORD_PARTS

Array = npt.NDArray[np.float64]

LMS = np.array([[17.8824, 43.5161, 4.11935], [3.45565, 27.1554, 3.86714], [0.0299566, 0.184309, 1.46709]])
PROTAN = np.array([[0, 2.02344, -2.52581], [0, 1, 0], [0, 0, 1]])
DEUTAN = np.array([[1, 0, 0], [0.494207, 0, 1.24827], [0, 0, 1]])
READERS = {name: np.linalg.inv(LMS) @ cones @ LMS for name, cones in (("protan", PROTAN), ("deutan", DEUTAN))}
READERS["normal"] = np.eye(3)
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]])
WHITE = np.array([0.95047, 1.0, 1.08883])
LEAST = 20.0
"""The required difference."""
FIGURES = {"curves": (*CURVES, GROUND["ink"]), "parts": tuple(PARTS.values())}


def linear(color: str) -> Array:
    value = np.array(channels(color)) / 255
    return np.asarray(np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4), np.float64)


def lab(light: Array) -> Array:
    x, y, z = XYZ @ np.clip(light, 0, 1) / WHITE
    fx, fy, fz = (np.cbrt(t) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in (x, y, z))
    return np.array([116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)])


def difference(one: str, other: str, reader: str) -> float:
    return float(np.linalg.norm(lab(READERS[reader] @ linear(one)) - lab(READERS[reader] @ linear(other))))


def contrast(color: str, ground: str) -> float:
    """Return the contrast of two colours by WCAG 2.2."""
    low, high = sorted(float(XYZ[1] @ linear(item)) for item in (color, ground))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("paper", ["light", "dark"])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("figure", FIGURES)
def test_every_reader_can_distinguish_the_colours_of_a_figure(figure: str, reader: str, paper: str) -> None:
    shown = [getattr(color, paper) for color in FIGURES[figure]]
    close = {
        pair: difference(*pair, reader)
        for pair in itertools.combinations(shown, 2)
        if difference(*pair, reader) < LEAST
    }
    assert not close


@pytest.mark.parametrize("reader", READERS)
def test_classes_of_a_mask_are_distinguished_on_a_grey_picture(reader: str) -> None:
    mixed = [[round(0.4 * 128 + 0.6 * value) for value in channels(color.dark)] for color in CURVES[:6]]
    shown = [f"#{bytes(color).hex()}" for color in mixed]
    assert min(difference(*pair, reader) for pair in itertools.combinations(shown, 2)) > LEAST / 2


def test_the_simulation_is_the_published_one() -> None:
    """The simulation is the published one: it merges red and green of equal lightness, distinct to most readers."""
    assert difference("#b84f00", "#5f7a00", "normal") > 40
    assert difference("#b84f00", "#5f7a00", "deutan") < LEAST
    for reader in READERS.values():
        assert reader @ np.ones(3) == pytest.approx(np.ones(3), abs=0.02), "grey stays grey"


def grounds(paper: str, names: Iterable[str]) -> list[str]:
    return [getattr(GROUND[name], paper) for name in names]


@pytest.mark.parametrize("paper", ["light", "dark"])
def test_words_curves_and_areas_stand_out(paper: str) -> None:
    """Contrast by WCAG is at least 4.5 for text and 3 for areas."""

    def least(colors: Iterable[Color], names: Iterable[str]) -> float:
        pairs = itertools.product([getattr(color, paper) for color in colors], grounds(paper, names))
        return min(contrast(*pair) for pair in pairs)

    words = [color for name, color in GROUND.items() if name not in ("paper", "panel", "line")]
    assert least(words, ("paper", "panel")) >= 4.5
    assert least(CURVES, ("paper",)) >= 4.5
    assert least(PARTS.values(), ("paper",)) >= 3


def test_parts_of_a_step_have_a_colour_and_a_pattern_each() -> None:
    assert set(RECORD_PARTS) < PARTS.keys()
    stacked = [PARTS[name].hatch for name in (*RECORD_PARTS, "late start")]
    assert len(set(stacked)) == len(stacked)
    assert patterns().count("<pattern") == len(PARTS)


def test_a_page_has_every_colour_once_for_each_paper() -> None:
    style = variables()
    for color in (*GROUND.values(), *CURVES, *PARTS.values()):
        assert style.count(f":{color.light}") and style.count(f":{color.dark}")
    named = [color.light for color in (*CURVES, *PARTS.values())]
    assert len(set(named)) == len(named), "a figure's colours become names of the page by their value"

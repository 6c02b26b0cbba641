"""The colours of all pages and figures: one thing has one colour, in a report, a trace, a card and a figure.

Any two colours of one table differ by at least 20 in CIE76, for readers with normal colours and for those without red
or green cones, on light paper and on dark (tests/core/test_palette.py has the matrices and their source). Markers,
dashes and patterns tell them apart as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Color:
    """A colour on light and on dark paper as `#rrggbb`; `hatch` is matplotlib's letter for the pattern of an area."""

    light: str
    dark: str
    hatch: str = ""


GROUND: Mapping[str, Color] = {
    "ink": Color("#1c2228", "#e4e8ec"),
    "soft": Color("#57616b", "#a3adb7"),
    "paper": Color("#ffffff", "#14181c"),
    "panel": Color("#f4f6f8", "#1e242a"),
    "line": Color("#d5dbe1", "#36404a"),
    "warn": Color("#8a5300", "#f0b45c"),
    "accent": Color("#0b62a4", "#7cc0f5"),
}
"""What a page consists of. Its words have a contrast of 4.5 on paper and panel."""
CURVES: Sequence[Color] = (
    Color("#057ac7", "#4ea4fe"),
    Color("#bd5a00", "#d66511"),
    Color("#257643", "#23985a"),
    Color("#792762", "#c68da6"),
    Color("#663d00", "#f1b73b"),
    Color("#337ca0", "#3e91c2"),
    Color("#573486", "#e2bff5"),
    Color("#797577", "#c7b59b"),
)
"""Curves of one figure beside the ideal one, which has the ink; and classes of a mask.

The contrast is 4.5, because a curve's name has its colour."""
PARTS: Mapping[str, Color] = {
    "input": Color("#a684d4", "#6c61b1", "\\"),
    "compute": Color("#0657ad", "#54b0ff"),
    "wait": Color("#91949a", "#6d6d75", "|"),
    "exposed_communication": Color("#d3741c", "#da863c", "/"),
    "update": Color("#49a260", "#87f3c3", "x"),
    "other": Color("#3e464e", "#6c93ba", "-"),
    "bucket": Color("#8a3a10", "#f2c380"),
    "forward": Color("#367758", "#8de3e1"),
    "backward": Color("#002a57", "#8cd5ff"),
    "late start": Color("#a1488e", "#e67e77", "+"),
}
"""Parts of a step, and what a timeline shows below them. The contrast of areas is 3."""


def channels(color: str) -> tuple[int, int, int]:
    """Red, green and blue of `#rrggbb`, 0 to 255."""
    red, green, blue = bytes.fromhex(color.removeprefix("#"))
    return red, green, blue

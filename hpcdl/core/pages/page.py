"""The shell of every page that hpcdl writes, and its colours: one file, style inside, no script, light or dark.

A thing has the same colour in a report, a trace, a card and a figure. Any two colours of one table differ by at least
20 in CIE76, on light paper and on dark. This holds for readers with normal colours and for those without red or green
cones (tests/core/test_palette.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from hpcdl import __version__
from hpcdl.core.errors import printable


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
"""Colours of the page itself. Its text has a contrast of 4.5 on paper and panel."""
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
"""Curves of one figure, beside the ideal one in ink; also the classes of a mask.

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
    """Return red, green and blue of `#rrggbb`, 0 to 255."""
    red, green, blue = bytes.fromhex(color.removeprefix("#"))
    return red, green, blue


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""A policy that browsers enforce: no script, and nothing from elsewhere."""
_BEFORE_A_UNIT = re.compile(r"(?<=\d) (?=(?:%|±|[kMGT]?i?B|[µmn]?s|images/s|samples/s)(?!\w))|(?<=±) (?=\d)")
"""A blank at which a line must not break."""
_COMMAND = re.compile(r"`([^`]+)`")
_FLAG = re.compile(r"--[a-z][a-z-]*")
_HATCHES = {
    "": "",
    "/": "M0 8L8 0M-2 2L2 -2M6 10L10 6",
    "\\": "M0 0L8 8M-2 6L2 10M6 -2L10 2",
    "|": "M4 0V8",
    "-": "M0 4H8",
    "x": "M0 0L8 8M0 8L8 0",
    "+": "M4 0V8M0 4H8",
}
"""The lines of a pattern in a square of 8 by 8."""


def page(title: str, body: Iterable[str], *, style: str = "", see: str = "") -> str:
    """Return a whole page: `body` below the title unchanged, `style` after the common style, `see` in the footer."""
    return "\n".join(_page(title, body, style, see)) + "\n"


def escaped(text: str) -> str:
    """Return `text` for a page: no markup, no control codes."""
    return escape(printable(text), quote=True)


def sentence(text: str) -> str:
    """Return the same for text of several lines: none breaks between a number and its unit, or inside a flag.

    Text between backticks is a command.
    """
    return _COMMAND.sub(_as_code, _BEFORE_A_UNIT.sub("&nbsp;", escaped(text)))


def _as_code(command: re.Match[str]) -> str:
    return f"<code>{_FLAG.sub(lambda flag: f'<span>{flag[0]}</span>', command[1])}</code>"


def _page(title: str, body: Iterable[str], style: str, see: str) -> Iterator[str]:
    common = resources.files("hpcdl.core.pages").joinpath("page.css").read_text("utf-8")
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">'
    yield f"<title>{escaped(title)}</title>\n<style>\n{variables()}{common}{style}</style>\n</head>\n<body>"
    yield f"<header>\n<h1>{escaped(title)}</h1>\n</header>"
    yield from body
    yield f"<footer>\n<p>{escaped(f'hpcdl {__version__}; {see}'.rstrip('; '))}</p>\n</footer>\n</body>\n</html>"


def variables() -> str:
    """Return the palette as CSS; paper is light."""
    colors = {**GROUND, **{f"curve-{index}": color for index, color in enumerate(CURVES)}}
    colors |= {name.replace("_", "-").replace(" ", "-"): color for name, color in PARTS.items()}
    light = ";".join(f"--{name}:{color.light}" for name, color in colors.items())
    dark = ";".join(f"--{name}:{color.dark}" for name, color in colors.items())
    return (
        f":root{{color-scheme:light dark;{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
    )


def patterns() -> str:
    """Return an SVG without a size that defines `fill-NAME` for each part: its colour, and its hatching if any."""
    elements = []
    for name, color in PARTS.items():
        key = name.replace("_", "-").replace(" ", "-")
        lines = f'<path d="{_HATCHES[color.hatch]}" style="stroke:var(--paper);stroke-width:1.3"/>'
        elements.append(
            f'<pattern id="fill-{key}" width="8" height="8" patternUnits="userSpaceOnUse">'
            f'<rect width="8" height="8" style="fill:var(--{key})"/>{lines if color.hatch else ""}</pattern>'
        )
    return (
        f'<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>{"".join(elements)}</defs></svg>'
    )

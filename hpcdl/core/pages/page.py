"""The shell of every page that hpcdl writes: one file, style inside, no script, light or dark as its reader has it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape
from importlib import resources

from hpcdl import __version__
from hpcdl.core.errors import printable
from hpcdl.core.pages.palette import CURVES, GROUND, PARTS

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""No script and nothing from elsewhere: a browser enforces it."""
_BEFORE_A_UNIT = re.compile(r"(?<=\d) (?=(?:%|±|[kMGT]?i?B|[µmn]?s|images/s|samples/s)(?!\w))|(?<=±) (?=\d)")
"""A blank at which no line may end."""
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
    """A whole page: `body` stands below the title as it is, `style` beside the style of all, `see` in the footer."""
    return "\n".join(_page(title, body, style, see)) + "\n"


def escaped(text: str) -> str:
    """`text` as a page shows it: no markup, no control codes."""
    return escape(printable(text), quote=True)


def sentence(text: str) -> str:
    """The same of a text that runs over several lines: none ends between a number and its unit, or inside a flag.

    What stands between backticks is a command.
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
    """The palette as CSS; paper is light."""
    colors = {**GROUND, **{f"curve-{place}": color for place, color in enumerate(CURVES)}}
    colors |= {name.replace("_", "-").replace(" ", "-"): color for name, color in PARTS.items()}
    light = ";".join(f"--{name}:{color.light}" for name, color in colors.items())
    dark = ";".join(f"--{name}:{color.dark}" for name, color in colors.items())
    return (
        f":root{{color-scheme:light dark;{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
    )


def patterns() -> str:
    """An SVG without a size that defines `fill-NAME` for each part: its colour, with its lines where it has some."""
    found = []
    for name, color in PARTS.items():
        key = name.replace("_", "-").replace(" ", "-")
        lines = f'<path d="{_HATCHES[color.hatch]}" style="stroke:var(--paper);stroke-width:1.3"/>'
        found.append(
            f'<pattern id="fill-{key}" width="8" height="8" patternUnits="userSpaceOnUse">'
            f'<rect width="8" height="8" style="fill:var(--{key})"/>{lines if color.hatch else ""}</pattern>'
        )
    return f'<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>{"".join(found)}</defs></svg>'

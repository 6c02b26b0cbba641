"""`hpcdl docs` and `hpcdl explain`: the pages that come with hpcdl."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdl.cli.options import JsonFlag
from hpcdl.cli.output import print_json, put, say
from hpcdl.core.units import counted

if TYPE_CHECKING:
    from hpcdl.core.pages.manual import FoundPage

LONGEST_LINE = 110
"""Characters printed of a line with the search words; pages have tables."""


def register(app: typer.Typer) -> None:
    """Add both commands."""
    app.command(epilog="Example: hpcdl docs checkpoint")(docs)
    app.command(epilog="Example: hpcdl explain \"unknown strategy 'rign'\"")(explain)


def docs(
    words: Annotated[list[str] | None, typer.Argument(metavar="[WORDS]", help="What to look for in the pages.")] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open them in a browser.")] = False,
    json: JsonFlag = False,
) -> None:
    """Find, search or open the documentation."""
    from hpcdl.core.pages.manual import find_words, manual_folder, start_page

    folder = manual_folder()
    start = start_page()
    if words:
        _show_found(folder, find_words(" ".join(words)), json=json)
        return
    if json:
        print_json({"folder": str(folder), "start": str(start)})
        return
    put(str(start))
    if open_:
        _open(start)


def _show_found(folder: Path, pages: Sequence[FoundPage], *, json: bool) -> None:
    """Print the best line of each page, and the number of its other lines."""
    if json:
        rows = [(page.path, number, text) for page in pages for number, text in page.lines]
        print_json({"found": [{"page": str(path), "line": number, "text": text} for path, number, text in rows]})
        return
    for page in pages:
        number, text = page.best
        more = f"  (and {len(page.lines) - 1} more)" if len(page.lines) > 1 else ""
        put(f"{os.path.relpath(page.path, folder)}:{number}: {text[:LONGEST_LINE]}{more}")
    say(f"{counted(len(pages), 'page')} in {folder}")


def _open(page: Path) -> None:
    import webbrowser

    if not webbrowser.open(page.as_uri()):
        say("no browser answers here; open that file with one, or read it with a pager")


def explain(
    error: Annotated[list[str], typer.Argument(metavar="ERROR", help="A message, a class, or an exit code.")],
    json: JsonFlag = False,
) -> None:
    """Explain an error, and what to do about it."""
    from hpcdl.core.pages.manual import ERRORS_PAGE
    from hpcdl.core.pages.manual import explain as find

    paragraph = find(" ".join(error))
    if json:
        print_json(
            {"title": paragraph.title, "anchor": paragraph.anchor, "text": paragraph.text, "says": list(paragraph.says)}
        )
        return
    put(f"{paragraph.title}\n\n{paragraph.text}")
    say(f"more: hpcdl docs, {ERRORS_PAGE.as_posix()}#{paragraph.anchor}")

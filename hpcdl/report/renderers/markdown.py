"""report.md for a wiki: the same sections, with figures as files beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpcdl.core.storage.files import write_output
from hpcdl.report.document import Document, Figure, Listing, Section, Table, cell_text, is_numeric, plain

MOST_ROWS = 500
"""Maximum number of rows of one table. scaling.csv holds all."""
# `$` begins mathematics on GitHub; a parenthesis is markup only behind a bracket.
_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~$&]|(?<=\])\()")
_START = re.compile(r"^(\s*\d+)(?=\.(\s|$))|^(\s*)(?=[-=+])")
"""Text that would begin a list, a heading or a rule. A backslash before a digit would be visible."""


def render(document: Document, folder: Path, drawings: Mapping[str, str]) -> list[Path]:
    """Write report.md into `folder`. It refers to figures/NAME.svg."""
    path = folder / "report.md"
    write_output(path, text_of(document))
    return [path]


def text_of(document: Document) -> str:
    """Return a document as Markdown. It refers to figures/NAME.svg."""
    return "\n".join(_lines(document)) + "\n"


def escaped(text: str) -> str:
    """Return `text` for Markdown: no markup, no HTML, no link, one line."""
    # GitHub and GitLab make links of bare addresses: a zero-width space prevents that.
    quoted = _SPECIAL.sub(r"\\\1", plain(text)).replace("://", ":\u200b//").replace("www.", "www\u200b.")
    return _START.sub(lambda match: f"{match[0]}\\", quoted)


def _lines(document: Document) -> Iterator[str]:
    yield f"# {escaped(document.title)}"
    yield ""
    yield from (f"- {escaped(line)}" for line in document.summary)
    if document.warnings:
        yield from ("", "**Caveats**", "")
        yield from (f"- {escaped(line)}" for line in document.warnings)
    for section in document.sections:
        yield from _section(section)


def _section(section: Section) -> Iterator[str]:
    yield from ("", f"## {escaped(section.title)}", "")
    yield from (escaped(line) for line in section.lines)
    for item in section.items:
        yield ""
        if isinstance(item, Figure):
            yield from _figure(item)
        else:
            yield from _listing(item) if isinstance(item, Listing) else _table(item)


def _figure(figure: Figure) -> Iterator[str]:
    yield f"![{escaped(figure.alt)}](figures/{figure.name}.svg)"
    yield ""
    yield f"*{escaped(figure.title)}*"


def _listing(listing: Listing) -> Iterator[str]:
    """Yield an indented block, in which nothing is markup."""
    yield from (f"**{escaped(listing.title)}**", "")
    yield from (f"    {plain(line)}" for line in listing.lines)


def _table(table: Table) -> Iterator[str]:
    yield f"**{escaped(table.title)}**"
    yield ""
    yield "| " + " | ".join(escaped(column.name) for column in table.columns) + " |"
    yield "|" + "|".join("---:" if is_numeric(column) else "---" for column in table.columns) + "|"
    for row in table.rows[:MOST_ROWS]:
        cells = (escaped(cell_text(column, cell)) for column, cell in zip(table.columns, row, strict=True))
        yield "| " + " | ".join(cells) + " |"
    num_more = len(table.rows) - MOST_ROWS
    note = f"and {num_more:,} more rows in scaling.csv. " if num_more > 0 else ""
    if table.note or note:
        yield ""
        yield escaped(note + table.note)

"""report.html: one file that needs no network, with style and figures inside and no script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from hpcdl.core.pages.page import escaped, page, sentence
from hpcdl.core.storage.files import write_output
from hpcdl.report.document import (
    Cell,
    Column,
    Document,
    Figure,
    Listing,
    Section,
    Table,
    cell_text,
    is_numeric,
)

MOST_ROWS = 500
"""Maximum number of rows of one table. scaling.csv and report.json hold all."""
_SHORT = 64
"""Text up to this length stays on one line of its cell."""
_STYLE = """figure svg{width:100%;height:auto;max-width:32rem;display:block}
@media (min-width:44rem){figure{display:inline-block;vertical-align:top;width:calc(50% - .9rem);margin-right:.5rem}}
@media (min-width:80rem){figure{width:calc(33.3% - .9rem)}}
td:not(.number){min-width:6rem;max-width:30rem}
"""


def render(document: Document, folder: Path, drawings: Mapping[str, str]) -> list[Path]:
    """Write report.html into `folder`."""
    path = folder / "report.html"
    write_output(path, page_of(document, drawings))
    return [path]


def page_of(document: Document, drawings: Mapping[str, str], style: str = "") -> str:
    """Return the page of a document. `drawings` holds the SVG text of its figures by name, `style` more CSS."""
    return page(document.title, _body(document, drawings), style=_STYLE + style, see="definitions: docs/metrics.md.")


def _body(document: Document, drawings: Mapping[str, str]) -> Iterator[str]:
    yield '<a class="skip" href="#summary">Skip to the summary</a>\n<nav aria-label="Sections"><ul>'
    yield from (f'<li><a href="#{section.name}">{escaped(section.title)}</a></li>' for section in document.sections)
    yield '</ul></nav>\n<main>\n<ol class="summary" id="summary">'
    yield from (f"<li>{sentence(line)}</li>" for line in document.summary)
    yield "</ol>"
    if document.warnings:
        yield '<section class="caveats" aria-labelledby="caveats">'
        yield '<h2 id="caveats">Before you believe the numbers</h2>\n<ul>'
        yield from (f"<li>{sentence(line)}</li>" for line in document.warnings)
        yield "</ul>\n</section>"
    for section in document.sections:
        yield from _section(section, drawings)
    yield "</main>"


def _section(section: Section, drawings: Mapping[str, str]) -> Iterator[str]:
    yield f'<section aria-labelledby="{section.name}">\n<h2 id="{section.name}">{escaped(section.title)}</h2>'
    yield from (f"<p>{sentence(line)}</p>" for line in section.lines)
    tables = {id(item) for item in section.items if isinstance(item, Table)}
    for item in section.items:
        if isinstance(item, Figure):
            yield from _figure(item, drawings[item.name], id(item.table) in tables)
        elif isinstance(item, Listing):
            yield from _listing(item)
        else:
            yield from _table(item)
    yield "</section>"


def _figure(figure: Figure, drawing: str, table_follows: bool) -> Iterator[str]:
    drawing = drawing.replace("<svg ", f'<svg role="img" aria-label="{escaped(figure.alt)}" ', 1)
    yield f'<figure id="figure-{figure.name}">\n<figcaption>{escaped(figure.title)}</figcaption>'
    yield drawing
    if table_follows:
        yield '<p class="note">The numbers of this figure are in the table of this section.</p>'
    else:
        yield "<details><summary>The numbers of this figure</summary>"
        yield from _table(figure.table)
        yield "</details>"
    yield "</figure>"


def _listing(listing: Listing) -> Iterator[str]:
    label = escaped(listing.alt)
    yield f"<figure>\n<figcaption>{escaped(listing.title)}</figcaption>"
    yield f'<div class="wide" tabindex="0" role="region" aria-label="{escaped(listing.title)}">'
    yield f'<pre role="img" aria-label="{label}">'
    yield from map(escaped, listing.lines)
    yield f'</pre>\n</div>\n<p class="note">{label}</p>\n</figure>'


def _table(table: Table) -> Iterator[str]:
    label = escaped(table.title)
    # A box that scrolls needs a tabindex to be reached by keyboard (WCAG 2.1.1).
    yield f'<div class="wide" tabindex="0" role="region" aria-label="{label}">\n<table>\n<caption>{label}</caption>'
    kinds = [' class="number"' if is_numeric(column) else "" for column in table.columns]
    heads = (
        f'<th scope="col"{kind}>{escaped(column.name)}</th>' for column, kind in zip(table.columns, kinds, strict=True)
    )
    yield f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>"
    for row in table.rows[:MOST_ROWS]:
        yield f"<tr>{''.join(map(_cell, table.columns, row))}</tr>"
    yield "</tbody>\n</table>\n</div>"
    num_more = len(table.rows) - MOST_ROWS
    note = f"And {num_more:,} more rows in scaling.csv and report.json. " if num_more > 0 else ""
    if note or table.note:
        yield f'<p class="note">{escaped(note + table.note)}</p>'


def _cell(column: Column, cell: Cell) -> str:
    text = cell_text(column, cell)
    kind = "number" if is_numeric(column) else "short" if len(text) <= _SHORT else ""
    return f"<td{f' class={kind!r}' if kind else ''}>{escaped(text)}</td>"

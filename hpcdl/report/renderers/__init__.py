"""The formats of a report. Each `render(document, folder, drawings)` writes or prints one and returns the files.

`drawings` holds the SVG text of each figure by its name.
"""

from __future__ import annotations

from hpcdl.core.registry import Entry, Registry

RENDERERS = Registry(
    "format",
    {
        "terminal": Entry(target="hpcdl.report.renderers.terminal:render", summary="Summary and tables, printed."),
        "html": Entry(target="hpcdl.report.renderers.html:render", summary="One self-contained page: report.html."),
        "md": Entry(target="hpcdl.report.renderers.markdown:render", summary="report.md for a wiki, with figures/."),
        "csv": Entry(
            target="hpcdl.report.renderers.data:render_csv", summary="scaling.csv, and each table in tables/."
        ),
        "latex": Entry(
            target="hpcdl.report.renderers.data:render_latex", summary="Each table for a paper: tables/NAME.tex."
        ),
        "json": Entry(
            target="hpcdl.report.renderers.data:render_json", summary="report.json: everything, for programs."
        ),
    },
)

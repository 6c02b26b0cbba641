"""tables/NAME.tex: each table of the report as LaTeX with booktabs, to be read by `\\input` within a float or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from hpcdl.core.storage.files import write_output
from hpcdl.report.document.document import Document, Table, cell_text, is_numeric, plain

_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--", "†": r"$\dagger$",
    "‡": r"$\ddagger$", "²": r"$^2$", "×": r"$\times$", "<": r"$<$", ">": r"$>$", "|": r"$|$", "…": r"\ldots{}",
}  # fmt: skip


def render(document: Document, folder: Path, drawings: Mapping[str, str]) -> list[Path]:
    """Write tables/NAME.tex into `folder`."""
    paths = []
    for name, table in document.tables().items():
        path = folder / "tables" / f"{name}.tex"
        write_output(path, "\n".join(_lines(table)) + "\n")
        paths.append(path)
    return paths


def escaped(text: str) -> str:
    """`text` as LaTeX prints it: no command, no mathematics, one line; other letters are the engine's."""
    return "".join(_SPECIAL.get(letter, letter) for letter in plain(text))


def _lines(table: Table) -> Iterator[str]:
    yield f"% {escaped(table.title)}. It needs \\usepackage{{booktabs}}."
    yield rf"\begin{{tabular}}{{{''.join('r' if is_numeric(column) else 'l' for column in table.columns)}}}"
    yield r"\toprule"
    yield " & ".join(escaped(column.name) for column in table.columns) + r" \\"
    yield r"\midrule"
    for row in table.rows:
        yield " & ".join(escaped(cell_text(own, cell)) for own, cell in zip(table.columns, row, strict=True)) + r" \\"
    yield r"\bottomrule"
    yield r"\end{tabular}"
    if table.note:
        yield f"% {escaped(table.note)}"

"""scaling.csv: one row for each point, in columns that report.json's rows have."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcdl.core.files import write_output
from hpcdl.report.analysis.scaling import COLUMNS, flat_row
from hpcdl.report.document.cells import plain
from hpcdl.report.document.document import Document

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def render(document: Document, folder: Path, drawings: Mapping[str, str]) -> list[Path]:
    """Write scaling.csv into `folder`; without points it has its header alone."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in document.rows:
        writer.writerow({name: neutral(value) for name, value in flat_row(row).items()})
    path = folder / "scaling.csv"
    write_output(path, text.getvalue())
    return [path]


def neutral(value: Any) -> Any:
    """`value` such that no spreadsheet takes it for a formula: text that starts like one gets a quote in front."""
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text

"""report.json: the report for programs (docs/reference/report-json.md)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpcdl.core.storage.files import json_text, write_output
from hpcdl.report.document.document import Document


def render(document: Document, folder: Path, drawings: Mapping[str, str]) -> list[Path]:
    """Write report.json into `folder`."""
    path = folder / "report.json"
    write_output(path, json_text(document.data))
    return [path]

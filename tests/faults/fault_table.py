"""Print the table of faults in docs/safety.md, from the results of tests/faults/test_faults.py.

HPCDL_FAULT_TABLE=faults.jsonl make soak PYTEST_ARGS="tests/faults/test_faults.py"
python -m tests.faults.fault_table faults.jsonl
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table, strategies down, faults across: exit codes, and the median seconds from fault to end."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        cells[row["strategy"], f"{row['fault']}, {row['role']}"].append(row)
    columns = list(dict.fromkeys(column for _, column in cells))
    lines = [" | ".join(["", "strategy", *columns, ""]).strip(), "|" + "---|" * (len(columns) + 1)]
    for strategy in dict.fromkeys(name for name, _ in cells):
        texts = [cell(cells.get((strategy, column), [])) for column in columns]
        lines.append(f"| `{strategy}` | {' | '.join(texts)} |")
    counts = [len(found) for found in cells.values()]
    tries = "/".join(map(str, sorted(set(counts))))
    return "\n".join([*lines, "", f"Tries of each: {tries}."])


def cell(rows: list[dict[str, Any]]) -> str:
    """Return `1, 7 s`, with several codes if tries differ."""
    if not rows:
        return ""
    codes = "/".join(map(str, dict.fromkeys(row["code"] for row in rows)))
    return f"{codes}, {statistics.median(row['seconds'] for row in rows):.0f} s"


if __name__ == "__main__":
    print(table([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]))

"""Write the tables of docs/reference/certify.md, from the cards beside it made by `python -m tests.lab.certify`.

`python -m tests.bench.card_page` writes them into the page.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from hpcdl.bench.certify import FAULTS, lines_left_out
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "reference" / "certify.md"
CARDS = ("mpich-5", "open-mpi-5", "open-mpi-4")
"""Names of the files in docs/reference/certify/, in the order of the columns."""
BEGIN, END = "<!-- cards -->\n", "<!-- end of cards -->\n"


def cards() -> list[dict[str, Any]]:
    """Return the documents that `hpcdl certify` wrote."""
    return [json.loads((PAGE.with_suffix("") / f"{name}.json").read_text()) for name in CARDS]


def tables(found: list[dict[str, Any]]) -> str:
    """Return one table of the losses under each MPI for all strategies, then the facts of each card."""
    cells: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for column, card in enumerate(found):
        for row in card["faults"]:
            survived = row["survived"] == row["tries"]
            lost = str(row["steps_lost"] or 0)
            cells[row["fault"], row["strategy"]][column] = lost if survived else f"{row['survived']} of {row['tries']}"
    strategies = list(dict.fromkeys(strategy for _, strategy in cells))
    lines = ["", f"| fault | {' | '.join(f'`{name}`' for name in strategies)} |", "|---" * (len(strategies) + 1) + "|"]
    for fault in FAULTS:
        rows = [cells.get((fault, strategy)) for strategy in strategies]
        reported = ["/".join(row.get(column, "-") for column in range(len(found))) if row else "" for row in rows]
        if any(reported):
            lines.append(f"| {fault} | {' | '.join(reported)} |")
    lines += ["", "## The three cards", ""]
    for name, card in zip(CARDS, found, strict=True):
        facts = card["facts"]
        lines.append(f"- [{name}](certify/{name}.json): {facts['software']}; load {facts['load']}")
    left_out = dict.fromkeys(line for card in found for line in lines_left_out(card))
    reasons = dict.fromkeys(line.rpartition(": ")[2] for line in left_out)
    lines += ["", f"Not tried: {'; '.join(reasons)}."] if reasons else []
    return "\n".join(lines[1:]) + "\n"


def page(text: str) -> str:
    """Return the page's text with the tables of the cards."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + tables(cards()) + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

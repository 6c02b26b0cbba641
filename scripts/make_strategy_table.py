"""Write the table of features in docs/reference/strategies.md: make_strategy_table.py [PAGE]."""

from __future__ import annotations

import sys
from pathlib import Path

from hpcdl.core.files import write_text
from hpcdl.strategies.base import Features
from hpcdl.strategies.table import ALIASES, STRATEGIES

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "strategies.md"
BEGIN, END = "<!-- features: written by scripts/make_strategy_table.py -->", "<!-- end of features -->"
COLUMNS = {
    "equals_single": "equals `single`",
    "deterministic": "deterministic",
    "exact_resume": "exact resume",
    "servers": "`--servers`",
    "backup_workers": "`--backup-workers`",
    "compression": "`--compress`",
    "accumulation": "`--accumulate`",
    "lars": "LARS",
    "groups": "`--groups`",
    "keras_fit": "Keras `fit`",
    "mpi": "over MPI",
}


def row(name: str, features: Features) -> str:
    """One strategy; an empty cell is a no."""
    cells = ["yes" if getattr(features, field) else "" for field in COLUMNS]
    rule = ", ".join(features.optimizers) or "any"
    return f"| `{name}` | {' | '.join(cells)} | {rule} |"


def table() -> str:
    """All strategies in the order of `hpcdl strategies`."""
    titles = ["strategy", *COLUMNS.values(), "optimizer"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    lines += [row(name, info.features) for name, info in STRATEGIES.items()]
    aliases = [f"`{alias}` is another name for `{name}`." for alias, name in ALIASES.items()]
    return "\n".join([*lines, "", *aliases])


def filled(page: str) -> str:
    """`page` with the table of now between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> None:
    """Write the page."""
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    write_text(page, filled(page.read_text()))


if __name__ == "__main__":
    main()

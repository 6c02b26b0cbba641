"""Write the declared features of strategies into docs/reference: make_strategy_table.py [PAGE].

This is the table of features in strategies.md (or PAGE), and the facts at the top of strategies/NAME.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hpcdl.core.storage.files import write_text
from hpcdl.strategies.base.strategy import Features, StrategyInfo
from hpcdl.strategies.table import ALIASES, STRATEGIES

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "strategies.md"
PAGES = PAGE.with_suffix("")
BEGIN, END = "<!-- features: written by scripts/make_strategy_table.py -->", "<!-- end of features -->"
COLUMNS = {
    "equals_single": "equals `single`",
    "deterministic": "deterministic",
    "exact_resume": "exact resume",
    "servers": "`--servers`",
    "backup_workers": "`--backup-workers`",
    "compression": "`--compress`",
    "error_feedback": "error feedback",
    "accumulation": "`--accumulate`",
    "lars": "LARS",
    "several_steps": "`--steps-per-call`",
    "measured_buckets": "`--bucket-size auto`",
    "in_place": "continues in place",
    "groups": "`--groups`",
    "keras_fit": "Keras `fit`",
    "mpi": "over MPI",
}


def row(names: Sequence[str], features: Features) -> str:
    """Return a row of strategies with the same features; an empty cell means no."""
    cells = ["yes" if getattr(features, field) else "" for field in COLUMNS]
    rule = ", ".join(features.optimizers) or "any"
    linked = ", ".join(f"[`{name}`](strategies/{name}.md)" for name in names)
    return f"| {linked} | {' | '.join(cells)} | {rule} |"


def table() -> str:
    """Return the table of all strategies in the order of `hpcdl strategies`; those with equal features share a row."""
    titles = ["strategy", *COLUMNS.values(), "optimizer"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    alike: dict[Sequence[object], list[str]] = {}
    for name, info in STRATEGIES.items():
        shown = (*(bool(getattr(info.features, field)) for field in COLUMNS), *info.features.optimizers)
        alike.setdefault(shown, []).append(name)
    lines += [row(names, STRATEGIES[names[0]].features) for names in alike.values()]
    aliases = [f"`{alias}` is another name for `{name}`." for alias, name in ALIASES.items()]
    return "\n".join([*lines, "", *aliases])


def facts(info: StrategyInfo) -> str:
    """Return the facts at the top of a strategy's own page."""
    has = [title for field, title in COLUMNS.items() if getattr(info.features, field)]
    servers = " --servers 1" if info.features.servers else ""
    ranks = 1 if info.name == "single" else 4
    return "\n".join([
        info.summary,
        "",
        f"    hpcdl train --model lenet --data shards --strategy {info.name} --ranks {ranks}{servers}",
        "",
        f"- Family: {info.family}",
        f"- Source: {info.source}",
        f"- Has: {', '.join(has) or 'none of the [features](../strategies.md)'}",
        f"- Optimizer: {', '.join(info.features.optimizers) or 'any'}",
    ])  # fmt: skip


def filled(page: str, content: str) -> str:
    """Return `page` with `content` between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"


def main() -> None:
    """Write the pages."""
    if len(sys.argv) > 1:
        page = Path(sys.argv[1])
        write_text(page, filled(page.read_text(), table()))
        return
    write_text(PAGE, filled(PAGE.read_text(), table()))
    for name, info in STRATEGIES.items():
        own = PAGES / f"{name}.md"
        write_text(own, filled(own.read_text(), facts(info)))


if __name__ == "__main__":
    main()

"""Scripts of many families on 2 and 3 ranks, and the table of docs/reference/scripts.md.

`python -m tests.scripts.families` runs all of them, which takes some minutes, and rewrites the table if every script
ended as expected.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec, launch_flags
from tests.conftest import ROOT
from tests.scripts.scripts import HERE

SCRIPT = HERE / "families_script.py"
PAGE = ROOT / "docs" / "reference" / "scripts.md"
BEGIN, END = "<!-- begin: families -->", "<!-- end: families -->"
RANKS = (2, 3)
EQUAL, ALIKE = "equal", "alike"


def _table(name: str) -> ast.Dict:
    """Return a dict at the top level of the script, which imports TensorFlow and is not imported itself."""
    for node in ast.parse(SCRIPT.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if ast.unparse(target) == name:
                return node.value
    raise AssertionError(f"{SCRIPT.name} has no table {name}")


def families() -> dict[str, list[str]]:
    """Return the variations of each family."""
    table = _table("FAMILIES")
    return {
        ast.literal_eval(key): [ast.literal_eval(one) for one in value.keys if one is not None]
        for key, value in zip(table.keys, table.values, strict=True)
        if key is not None and isinstance(value, ast.Dict)
    }


def reasons() -> dict[str, str]:
    """Return why a script does not equal one process, by `family: variation`."""
    known: dict[str, str] = {}
    for node in ast.parse(SCRIPT.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            known[ast.unparse(node.targets[0])] = node.value.value
    table = _table("NOT_EXACT")
    return {
        ast.literal_eval(key): known[value.id] if isinstance(value, ast.Name) else ast.literal_eval(value)
        for key, value in zip(table.keys, table.values, strict=True)
        if key is not None
    }


def names() -> list[str]:
    """Return all scripts, as `family: variation`."""
    return [f"{family}: {one}" for family, variations in families().items() for one in variations]


def as_promised(name: str, reported: str) -> bool:
    """Return whether a script ended as the table says: equal to one process, or alike on all ranks with a reason."""
    return reported in ((EQUAL, ALIKE) if name in reasons() else (EQUAL,))


def rows() -> list[str]:
    """Return the table: per family the variations equal to one process, and those alike on all ranks with reasons."""
    lines = ["| Family | Equal to one process | Alike on all ranks, not exact |", "|---|---|---|"]
    why = reasons()
    for family, variations in families().items():
        exact = [one for one in variations if f"{family}: {one}" not in why]
        others: dict[str, list[str]] = {}
        for one in variations:
            if one not in exact:
                others.setdefault(why[f"{family}: {one}"], []).append(one)
        alike = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in others.items())
        lines.append(f"| {family} | {', '.join(exact)} | {alike} |")
    return lines


def counted(results: Mapping[int, Mapping[str, str]]) -> str:
    """Return how many scripts ended in which way, by number of ranks."""
    parts = []
    for ranks, reported in results.items():
        equal = list(reported.values()).count(EQUAL)
        parts.append(f"on {ranks} ranks {equal} ended where one process does, {len(reported) - equal} alike")
    return f"{len(names())} scripts: {'; '.join(parts)}."


def with_table(page: str, lines: Sequence[str]) -> str:
    """Return the page with these lines between its marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return "\n".join([f"{head}{BEGIN}", *lines, f"{END}{tail}"])


def run(ranks: int, folder: Path) -> dict[str, str]:
    """Run all scripts on `ranks` ranks; return rank 0's verdict on each."""
    mpiexec = find_mpiexec()
    launcher = [str(mpiexec.path), *launch_flags(mpiexec.flavour), "-n", str(ranks)]
    environment = {
        **os.environ,
        **environment_for(mpiexec.flavour),
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    subprocess.run([*launcher, sys.executable, str(SCRIPT), str(folder)], env=environment, check=True, cwd=folder)
    results: dict[str, str] = json.loads((folder / "0.json").read_text())
    return results


def main() -> None:
    """Run all scripts, report failures, and write the table if there are none."""
    results = {}
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            results[ranks] = run(ranks, Path(folder))
    write(results)


def write(results: Mapping[int, Mapping[str, str]]) -> None:
    """Write the table; raises SystemExit if a script did not end as expected."""
    wrong = [
        f"{name}: {reported[name]}"
        for reported in results.values()
        for name in names()
        if not as_promised(name, reported[name])
    ]
    if wrong:
        sys.exit("\n".join(wrong))
    PAGE.write_text(with_table(PAGE.read_text(), [counted(results), "", *rows()]))


if __name__ == "__main__":
    main()

"""Quoted words reach a command unchanged through bash itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hpcdl.core.errors import printable
from hpcdl.core.paths import quoted, typed

NAMES = [
    "plain", "a b;$(x)", "it's", "-x", "~", "*", "a\nb", "\x1b[2J'\\", "\u00e4 \u202e",
    b"\xff".decode(errors="surrogateescape"),
]  # fmt: skip


def test_bash_takes_every_word_as_it_was() -> None:
    line = f"printf '%s\\0' {' '.join(map(quoted, NAMES))}"
    assert printable(line) == line
    out = subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout
    assert out.decode(errors="surrogateescape").split("\0")[:-1] == NAMES


def test_a_path_is_no_flag() -> None:
    assert typed("report", Path("-x"), "--out", Path("a b")) == "hpcdl report ./-x --out 'a b'"

"""The pages that people read, and what a test looks up in them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
_LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.+?)(?: *\{#([\w-]+)\})?$", re.MULTILINE)
_ANCHOR = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")


def pages() -> list[Path]:
    """Every Markdown page of the repository."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found = [ROOT / line for line in listed.splitlines()] or [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    return sorted(path for path in found if path.is_file())


def relative(path: Path) -> str:
    """How a test names a page."""
    return str(path.relative_to(ROOT))


def links(page: Path) -> list[str]:
    """The targets of a page's links, examples in fences left out."""
    return [first or second for first, second in _LINK.findall(_FENCE.sub("", page.read_text()))]


def anchors(page: Path) -> set[str]:
    """What stands behind # in a link to a heading of `page`, as GitHub and Python-Markdown name it."""
    text = _FENCE.sub("", page.read_text())
    named = {name for _, name in _HEADING.findall(text) if name} | set(_ANCHOR.findall(text))
    return named | {slug(title) for title, _ in _HEADING.findall(text)}


def slug(title: str) -> str:
    """The anchor of a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
    return re.sub(r"[\s]", "-", re.sub(r"[^\w\s-]", "", plain.lower()).strip())

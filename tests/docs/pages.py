"""The pages of the documentation, and helpers to read them."""

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
    """Return every Markdown page of the repository."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found = [ROOT / line for line in listed.splitlines()] or [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    return sorted(path for path in found if path.is_file())


def relative(path: Path) -> str:
    """Return a page's path as tests name it."""
    return str(path.relative_to(ROOT))


def links(page: Path) -> list[str]:
    """Return the targets of a page's links, without examples in fences."""
    return [first or second for first, second in _LINK.findall(_FENCE.sub("", page.read_text()))]


def anchors(page: Path) -> set[str]:
    """Return the anchors of `page`, named as GitHub and Python-Markdown name headings."""
    text = _FENCE.sub("", page.read_text())
    named = {name for _, name in _HEADING.findall(text) if name} | set(_ANCHOR.findall(text))
    return named | {slug(title) for title, _ in _HEADING.findall(text)}


def slug(title: str) -> str:
    """Return the anchor of a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
    return re.sub(r"[\s]", "-", re.sub(r"[^\w\s-]", "", plain.lower()).strip())

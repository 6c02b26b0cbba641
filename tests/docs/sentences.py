"""Sentence lengths of README and the how-tos: `python -m tests.docs.sentences [WORDS]` prints them by page.

With WORDS it prints each sentence that is longer. The last line counts the words of all pages below docs, as `wc -w`.
"""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path

from tests.docs.pages import DOCS, ROOT, relative

PAGES = (ROOT / "README.md", *sorted((DOCS / "how-to").glob("*.md")))
_BLOCKS = re.compile(r"^(```|~~~).*?^\1|<!--.*?-->", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) ")
_END = re.compile(r"(?<=[.!?])\s+(?=[\w(\"'`*])")
LEAST_WORDS = 3
"""Shorter pieces are labels."""


def sentences(page: Path) -> list[str]:
    """Return the sentences of a page's paragraphs and lists, without code, tables and headings.

    Code within a sentence counts as one word, a link as its text.
    """
    paragraphs = [""]
    for line in _BLOCKS.sub("", page.read_text()).splitlines():
        if not line.strip() or line.startswith(("    ", "|", "#", "<")) or _ITEM.match(line):
            paragraphs.append("")
        if line.strip() and not line.startswith(("    ", "|", "#", "<")):
            paragraphs[-1] += f" {_ITEM.sub('', line, count=1).strip()}"
    plain = (re.sub(r"`[^`]*`", "X", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)) for text in paragraphs)
    found = [sentence.strip() for text in plain for sentence in _END.split(text)]
    return [sentence for sentence in found if num_words(sentence) >= LEAST_WORDS]


def num_words(text: str) -> int:
    """Count the words between blanks."""
    return len(text.split())


def words_of_docs() -> dict[Path, int]:
    """Count the words of each page below docs, including tables, code and headings."""
    return {page: num_words(page.read_text()) for page in sorted(DOCS.rglob("*.md"))}


def main() -> None:
    """Print the mean and longest sentence of each page and of all, then the words of docs."""
    every = []
    for page in PAGES:
        found = sentences(page)
        lengths = [num_words(sentence) for sentence in found]
        every += lengths
        print(f"{relative(page)}: mean {statistics.fmean(lengths):.1f} words, longest {max(lengths)}")
        for sentence in found:
            if len(sys.argv) > 1 and num_words(sentence) > int(sys.argv[1]):
                print(f"    {num_words(sentence)}: {sentence}")
    print(f"all {len(every)} sentences: mean {statistics.fmean(every):.1f} words, longest {max(every)}")
    docs = words_of_docs()
    print(f"docs: {sum(docs.values()):,} words on {len(docs)} pages")


if __name__ == "__main__":
    main()

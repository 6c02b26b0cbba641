"""README and how-tos are easy to read: short sentences and standard terms."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, relative
from tests.docs.sentences import PAGES, num_words, sentences, words_of_docs

LONGEST, LONGEST_MEAN = 35, 17
LONGEST_README, LONGEST_HOW_TO = 120, 60
WORDS_OF_DOCS = 60_000
LONGEST_SITE_GUIDE = 1500
_FOREIGN = re.compile(r"\b(told|tells|goes on|go on|belief|anew|likewise)\b", re.IGNORECASE)
"""Words to avoid in favour of the field's: warned, says, continues, again."""


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_no_sentence_is_long(page: Path) -> None:
    assert not [sentence for sentence in sentences(page) if num_words(sentence) > LONGEST]


def test_sentences_are_short_on_the_mean() -> None:
    lengths = [num_words(sentence) for page in PAGES for sentence in sentences(page)]
    assert len(lengths) > 400 and statistics.fmean(lengths) <= LONGEST_MEAN


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_words_are_the_fields(page: Path) -> None:
    assert not [sentence for sentence in sentences(page) if _FOREIGN.search(sentence)]


def test_the_readme_is_a_page() -> None:
    assert len(PAGES[0].read_text().splitlines()) <= LONGEST_README


def test_the_docs_are_read_in_a_day() -> None:
    words = words_of_docs()
    longest = ", ".join(
        f"{relative(page)} {words[page]:,}" for page in sorted(words, key=lambda page: -words[page])[:5]
    )
    assert 40_000 < sum(words.values()) <= WORDS_OF_DOCS, f"{sum(words.values()):,} words; longest: {longest}"


@pytest.mark.parametrize("page", sorted((DOCS / "how-to").glob("*.md")), ids=relative)
def test_a_how_to_is_a_screen(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= LONGEST_HOW_TO


def test_the_site_guide_is_read_before_an_install() -> None:
    """The site guide is short, commands included; options are in reference/site.md."""
    assert len((DOCS / "site-guide.md").read_text().split()) <= LONGEST_SITE_GUIDE


def test_code_tables_and_headings_are_no_sentences(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading of four words\n\nOne two `three four five` six. Seven eight\nnine [ten](x.md).\n\n"
        "| a table | of words |\n\n    code of four words\n\n- item one here\n- item two here\n\n"
        "```\nmore code here\n```\n"
    )
    assert [num_words(sentence) for sentence in sentences(page)] == [4, 4, 3, 3]

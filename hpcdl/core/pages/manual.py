"""The manual and the examples that come with hpcdl: where they are, what they hold, and copies."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcdl.core.errors import NOT_ALLOWED, HpcdlError, UnknownNameError, UsageError
from hpcdl.core.paths import docs_folder, share_folder
from hpcdl.core.storage import disk

ERRORS_PAGE = Path("reference") / "errors.md"
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_SAYS = re.compile(r"^Says: (.*?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)
_SECTION = re.compile(r"\]\(#([\w-]+)\)")
"""A link to another section of the same page."""
_LEAST_LETTERS = 8
"""Fewest letters with which a part of a message is looked up."""
_PATTERN = re.compile(r"`([^`]+)`")
_EXIT_CODE = re.compile(r"(?:(?:exit(?:ed|s)? )?(?:with )?(?:code|status)?[ :]*)?(\d+)", re.IGNORECASE)
"""Ways to write an exit code: `75`, `exit code 75`, `exited with 75`."""


@dataclass(frozen=True, kw_only=True)
class Paragraph:
    """A section of the page of errors; `says` holds beginnings of messages, in which `...` stands for anything."""

    title: str
    says: tuple[str, ...]
    text: str

    @property
    def anchor(self) -> str:
        """The part after # in a link to it."""
        return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", self.title.lower()).strip())

    def fit(self, message: str) -> int:
        """Return the number of letters in the longest pattern that fits `message`; 0 if none fits."""
        fitting = [len(pattern.replace("...", "")) for pattern in self.says if _expression(pattern).search(message)]
        return max(fitting, default=0)


def _expression(pattern: str) -> re.Pattern[str]:
    """Return the expression that finds `pattern` anywhere in a message, with any text at its dots."""
    return re.compile(".*".join(re.escape(part) for part in pattern.strip(".").split("...")), re.DOTALL)


def manual_folder() -> Path:
    """Return the folder of the pages. Raises HpcdlError if this installation has none."""
    folder = docs_folder()
    if not (folder / "index.md").is_file():
        raise HpcdlError(f"the pages are not installed in {folder}; read docs/ in hpcdl's sources")
    return folder


def start_page() -> Path:
    """Return the first page to open: that of the site built by `make docs` if it exists, else docs/index.md."""
    folder = manual_folder()
    built = (folder / "html" / "index.html", folder.parent / "build" / "site" / "index.html")
    return next((page for page in built if page.is_file()), folder / "index.md")


def error_paragraphs() -> list[Paragraph]:
    """Return the sections of the page of errors, in its order."""
    text = (manual_folder() / ERRORS_PAGE).read_text(encoding="utf-8")
    titles = list(_HEADING.finditer(text))
    ends = [*(title.start() for title in titles[1:]), len(text)]
    sections = []
    for title, end in zip(titles, ends, strict=True):
        body = text[title.end() : end].strip()
        patterns_line = _SAYS.search(body)
        patterns = tuple(_PATTERN.findall(patterns_line[1])) if patterns_line else ()
        sections.append(Paragraph(title=title[1], says=patterns, text=_SAYS.sub("", body).strip()))
    return sections


def explain(error: str) -> Paragraph:
    """Return the paragraph for a message or a part of one, a class, an anchor or an exit code.

    A class comes with the sections that its paragraph refers to. Raises UsageError if nothing fits.
    """
    message = error.strip().removeprefix("hpcdl: ")
    paragraphs = error_paragraphs()
    if code := _EXIT_CODE.fullmatch(message):
        return _of_exit_code(code[1], paragraphs)
    plain = message.lower().lstrip("#")
    for paragraph in paragraphs:
        if plain in (paragraph.anchor, paragraph.title.lower()):
            return _with_sections(paragraph, paragraphs)
    best = max(paragraphs, key=lambda paragraph: paragraph.fit(message))
    if best.fit(message):
        return best
    for paragraph in paragraphs:
        if len(plain) >= _LEAST_LETTERS and any(plain in says.lower() for says in paragraph.says):
            return paragraph
    names = ", ".join(paragraph.anchor for paragraph in paragraphs)
    raise UsageError(
        f"no paragraph explains {message[:80]!r}; give the whole message, an exit code, or one of: {names}"
    )


def _with_sections(paragraph: Paragraph, paragraphs: list[Paragraph]) -> Paragraph:
    by_anchor = {section.anchor: section for section in paragraphs}
    linked = [by_anchor[name] for name in _SECTION.findall(paragraph.text) if name in by_anchor]
    texts = [paragraph.text, *(f"{target.title}\n\n{target.text}" for target in linked)]
    return Paragraph(title=paragraph.title, says=paragraph.says, text="\n\n".join(texts))


def _of_exit_code(code: str, paragraphs: list[Paragraph]) -> Paragraph:
    codes = next(paragraph for paragraph in paragraphs if paragraph.anchor == "exit-codes")
    row = next((line for line in codes.text.splitlines() if line.startswith(f"| {code} |")), None)
    if row is None:
        raise UsageError(f"hpcdl never exits with {code}; its codes are 0, 1, 2, 3, 75 and 130")
    means, classes = (cell.strip() for cell in row.strip("|").split("|")[1:3])
    parts = [means + (f": {classes}" if classes else "")]
    names = re.findall(r"\w+", classes)
    class_texts = [_with_sections(paragraph, paragraphs).text for paragraph in paragraphs if paragraph.title in names]
    parts += class_texts if len(class_texts) == 1 else [f"`hpcdl explain {name}` says what to do." for name in names]
    return Paragraph(title=f"Exit code {code}", says=(), text="\n\n".join(parts))


KINDS = ("how-to", "tutorials", "reference", "", "explanation", "example-report", "example-evidence", "decisions")
"""Folders of pages, those with instructions first; the empty name is for pages in no folder. Others come last."""


@dataclass(frozen=True, kw_only=True)
class FoundPage:
    """A page that holds the search words, with number and text of each such line."""

    path: Path
    lines: tuple[tuple[int, str], ...]

    @property
    def best(self) -> tuple[int, str]:
        """The most telling line: a heading if one holds the words."""
        return next((line for line in self.lines if line[1].startswith("#")), self.lines[0])


def find_words(words: str) -> list[FoundPage]:
    """Return the pages that hold `words`, in any case: sorted by kind, then those with the words in headings first.

    A page whose file has the name `words` comes first: messages name pages so. Its best line is its title.
    """
    folder = manual_folder()
    pages = []
    for path in sorted(folder.rglob("*.md")):
        numbered = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        wanted = (1,) if path.stem == words.lower() else ()  # the title of the page itself
        lines = tuple((n, line.strip()) for n, line in numbered if n in wanted or words.lower() in line.lower())
        if lines:
            pages.append(FoundPage(path=path, lines=lines))

    def rank(page: FoundPage) -> tuple[bool, int, bool, bool, int]:
        kind = page.path.relative_to(folder).parts[0] if page.path.parent != folder else ""
        titled = words.lower() in page.path.stem.replace("-", " ").lower() or page.best[1].startswith("# ")
        kind_rank = KINDS.index(kind) if kind in KINDS else len(KINDS)
        named, headed = page.path.stem == words.lower(), page.best[1].startswith("#")
        return not named, kind_rank, not titled, not headed, -len(page.lines)

    return sorted(pages, key=rank)


_COMPILED = "__pycache__"
"""The folder that Python leaves beside an example that was run in place."""
_LOOKS = 20


@dataclass(frozen=True, kw_only=True)
class Example:
    """A file, or a folder of files, with one line on what it is."""

    name: str
    summary: str


def list_examples() -> list[Example]:
    """Return the examples by name; NAME.md describes the folder NAME and is no example itself."""
    paths = sorted(path for path in _folder().iterdir() if path.suffix != ".md" and path.name != _COMPILED)
    return [Example(name=path.name, summary=_summary(path)) for path in paths]


def copy_examples(names: Sequence[str], folder: Path) -> list[Path]:
    """Copy examples into `folder` and return their paths; existing files with the same content stay.

    Raises UnknownNameError for an unknown name, UsageError if a file exists with other content: then none is copied.
    """
    example_names = [example.name for example in list_examples()]
    for name in names:
        if name not in example_names:
            raise UnknownNameError("example", name, example_names)
    pairs = [pair for name in names for pair in _pairs(_folder() / name, folder)]
    for path, target in pairs:
        is_free = not (target.is_symlink() or target.exists())
        if not is_free and not _holds(target, path.read_bytes()):
            raise _taken(target)
    for path, target in pairs:
        try:
            _copy(path, target)
        except OSError as error:
            if isinstance(error, UsageError) or error.errno not in NOT_ALLOWED:
                raise
            raise UsageError(f"cannot write {target}: {error.strerror}; choose another folder with --to DIR") from error
    return [folder / name for name in names]


def _copy(path: Path, target: Path) -> None:
    try:
        disk.make_folder(target.parent)
    except FileExistsError as error:
        raise UsageError(f"{error.filename} is no folder; choose another one with --to DIR") from error
    if target.exists():
        return
    try:
        disk.create(target, path.read_bytes())
    except FileExistsError as error:  # another call was faster
        if not _holds(target, path.read_bytes()):
            raise _taken(target) from error


def _holds(target: Path, content: bytes) -> bool:
    """Return whether the file `target` has this `content`, or has it in a second: another call may be writing it."""
    for _ in range(_LOOKS):
        there = target.read_bytes() if target.is_file() else None
        if there is None or len(there) >= len(content) or not content.startswith(there):
            break
        time.sleep(1 / _LOOKS)
    return there == content


def _taken(target: Path) -> UsageError:
    return UsageError(f"{target} exists and differs from the example; choose another folder with --to DIR")


def _pairs(source: Path, folder: Path) -> list[tuple[Path, Path]]:
    """Return each file of an example with the target of its copy."""
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    files = [path for path in files if path.parent.name != _COMPILED]
    return [(path, folder / path.relative_to(source.parent)) for path in files]


def _folder() -> Path:
    return share_folder() / "examples"


def _summary(path: Path) -> str:
    """Return the first sentence of a file's docstring, comment or page."""
    text = (path.with_suffix(".md") if path.is_dir() else path).read_text().splitlines()[0]
    return text.strip('#" ').split(". ")[0].split(": hpcdl")[0].rstrip(".").replace("`", "")

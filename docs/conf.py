"""The site that `make docs` builds: these pages, searchable, with what the docstrings of the public names say."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import hpcdl  # noqa: E402  the checkout is put on the path first
from hpcdl.core.pages.page import GROUND  # noqa: E402

project, author, copyright = "hpcdl", "the hpcdl developers", "the hpcdl developers"
version = release = hpcdl.__version__
extensions = ["myst_parser"]
exclude_patterns = [
    f"example-{name}" for name in ("report/study", "report/report", "evidence/study", "evidence/document")
]
html_theme = "furo"
_BRAND = {"color-brand-primary": "accent", "color-brand-content": "accent", "color-brand-visited": "accent"}
html_theme_options = {
    "light_css_variables": {name: GROUND[ground].light for name, ground in _BRAND.items()},
    "dark_css_variables": {name: GROUND[ground].dark for name, ground in _BRAND.items()},
}
STYLE = """<style>
@media (min-width: 46em) { code.literal .pre { white-space: nowrap; } }
.highlight-bash pre, .highlight-sh pre { white-space: pre-wrap; overflow-wrap: break-word; }
@media (max-width: 30em) { article h1 { font-size: 1.8rem; } }
</style>"""
"""A command is shown whole: it wraps in its box, and a flag is not cut behind its dashes. Phones: small headings."""
html_title = f"hpcdl {release}"
html_extra_path = ["example-report/report", "example-evidence/document"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.xref_missing", "toc.not_included", "myst.header", "misc.highlighting_failure"]
"""Links to files outside the pages (README, share/) are checked by tests/docs, which know the whole checkout."""
MARK = "<!-- api -->"


def signatures() -> str:
    """Each public name with its signature and docstring, read from the source: TensorFlow is not imported."""
    parts = []
    for module in hpcdl._MODULES:
        file = ROOT.joinpath("hpcdl", "scripts", *module.split(".")).with_suffix(".py")
        tree = ast.parse(file.read_text())
        for node in tree.body:
            if getattr(node, "name", None) not in hpcdl._PUBLIC:
                continue
            if isinstance(node, ast.FunctionDef) and not _is_overload(node):
                returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
                parts.append(_section(node, f"{node.name}({ast.unparse(node.args)}){returns}"))
            elif isinstance(node, ast.ClassDef):
                parts.append(_section(node, node.name))
    return "\n\n".join(parts)


def _section(node: Any, signature: str) -> str:
    return f"## {node.name}\n\n```python\nhpcdl.{signature}\n```\n\n{ast.get_docstring(node) or ''}"


def _is_overload(node: ast.FunctionDef) -> bool:
    return any(getattr(item, "id", "") == "overload" for item in node.decorator_list)


def setup(app: Any) -> None:
    """Fill the page of the Python interface, and give each page its place in the side bar."""

    def fill(_: Any, name: str, source: list[str]) -> None:
        source[0] = source[0].replace(MARK, signatures())
        if name == "index":
            source[0] += _contents()

    def level(_: Any, name: str, template: str, context: dict[str, Any], tree: Any) -> None:
        # Sphinx calls the side bar's captions headings, and does not say of which level: screen readers need it.
        bar = context.get("furo_navigation_tree", "")
        context["metatags"] = context.get("metatags", "") + STYLE
        context["furo_navigation_tree"] = bar.replace('role="heading"', 'role="heading" aria-level="2"')
        # What is wider than a phone is scrolled in a box of its own, which a keyboard has to reach.
        for box in ("<pre", '<div class="table-wrapper'):
            tag = box.partition(" ")[0]
            context["body"] = context.get("body", "").replace(box, box.replace(tag, f'{tag} tabindex="0"'))

    app.connect("source-read", fill)
    app.connect("html-page-context", level, priority=900)


def _contents() -> str:
    """The side bar: a list of pages for each kind, in the order in which index.md names them; then the others."""
    named = re.findall(r"\]\(([\w/-]+\.md)", (ROOT / "docs" / "index.md").read_text())

    def place(page: Path) -> tuple[int, Path]:
        name = page.relative_to(ROOT / "docs").as_posix()
        return (named.index(name) if name in named else len(named), page)

    kinds = {"Tutorials": "tutorials", "How-to": "how-to", "Reference": "reference", "Explanation": "explanation"}
    folders = [(title, sorted((ROOT / "docs" / folder).glob("*.md"), key=place)) for title, folder in kinds.items()]
    folders += [("Each strategy", sorted((ROOT / "docs" / "reference" / "strategies").glob("*.md")))]
    folders += [("Also", [path for path in sorted((ROOT / "docs").glob("*.md"), key=place) if path.stem != "index"])]
    folders += [("Decisions", sorted((ROOT / "docs" / "decisions").glob("*.md")))]
    lists = ""
    for title, pages in folders:
        names = "\n".join(str(page.relative_to(ROOT / "docs").with_suffix("")) for page in pages)
        lists += f"\n\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{names}\n```"
    return lists

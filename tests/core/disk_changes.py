"""Find code that changes a disk: calls of core/storage/disk.py, and calls that should use it.

`python -m tests.core.disk_changes` writes the table in docs/security.md again, and prints the places of each call.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcdl.core.storage import disk

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "security.md"
BEGIN, END = "<!-- places -->\n", "<!-- end of places -->\n"
HOME = "hpcdl/core/storage/disk.py"
GUARDS = (
    "remove_file", "remove_folder", "remove_content", "remove_private", "sweep", "move", "move_over", "cut",
    "rewrite", "creating", "replacing", "writing_output", "touch", "write_bytes", "write_text", "write_json",
    "write_toml", "write_output", "private_folder", "remove_marked", "sweep_marked", "remove_empty", "keep_others",
    "remove_output",
)  # fmt: skip
"""Functions of core/storage/disk.py that remove or replace, and those of core/storage/files.py that use them."""
_OS = {"remove", "unlink", "rename", "renames", "replace", "rmdir", "removedirs", "truncate", "ftruncate", "link",
       "symlink", "mkfifo"}  # fmt: skip
_SHUTIL = {"rmtree", "move", "copy", "copy2", "copyfile", "copytree"}
_METHODS = {"unlink", "rename", "rmdir", "write_text", "write_bytes", "touch", "truncate", "symlink_to", "hardlink_to",
            "tofile", "savez", "memmap"}  # fmt: skip
_OPENS = {"open", "File", "ZipFile"}
_WRITES = re.compile(r"[wax+]|r\+")


@dataclass(frozen=True, order=True)
class Place:
    """A call that changes a disk."""

    file: str
    function: str
    call: str

    def __str__(self) -> str:
        return f"{self.file}: {self.function}: {self.call}"


def sources() -> list[Path]:
    """Return the Python files that are installed, and those that install them."""
    return sorted([*(REPOSITORY / "hpcdl").rglob("*.py"), *(REPOSITORY / "scripts").rglob("*.py")])


def unguarded(path: Path) -> Iterator[Place]:
    """Yield the calls in `path` that change a disk directly."""
    yield from _calls(path, _changes)


def guarded(path: Path) -> Iterator[Place]:
    """Yield the calls in `path` that remove or replace through core/storage/disk.py."""
    yield from _calls(path, _guard)


def _calls(path: Path, kind: Callable[[ast.Call, set[str]], str]) -> Iterator[Place]:
    name = str(path.relative_to(REPOSITORY))
    tree = ast.parse(path.read_text())
    own = {*_names_of_new_files(tree)} if kind is _changes else _imported(tree)

    def walk(node: ast.AST, function: str) -> Iterator[Place]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            inner = child.name if named else function
            if isinstance(child, ast.Call):
                found = kind(child, own)
                if found:
                    yield Place(name, function, found)
            yield from walk(child, inner)

    yield from walk(tree, "module")


def _names_of_new_files(tree: ast.AST) -> set[str]:
    """Names bound by `with replacing(...) as NAME` and similar: such files are new and belong to hpcdl."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                call, target = item.context_expr, item.optional_vars
                makes = isinstance(call, ast.Call) and _name(call) in ("replacing", "writing_output", "private_folder")
                if makes and isinstance(target, ast.Name):
                    found.add(target.id)
    return found


def _imported(tree: ast.AST) -> set[str]:
    """Return the names that a module imports from core/storage/disk.py and core/storage/files.py."""
    homes = ("hpcdl.core.storage.disk", "hpcdl.core.storage.files")
    found = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module in homes)
    return {alias.name for node in found for alias in node.names}


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _owner(call: ast.Call) -> str:
    value = call.func.value if isinstance(call.func, ast.Attribute) else None
    return value.id if isinstance(value, ast.Name) else ""


def _changes(call: ast.Call, own: set[str]) -> str:
    name, owner = _name(call), _owner(call)
    method = isinstance(call.func, ast.Attribute)
    if owner in own or any(isinstance(item, ast.Name) and item.id in own for item in call.args):
        return ""
    if owner == "os" and (name in _OS or (name == "open" and _makes(call))):
        return f"os.{name}"
    if owner == "shutil" and name in _SHUTIL:
        return f"shutil.{name}"
    if method and name in _METHODS and owner not in ("os", "shutil", "np", "numpy"):
        return f".{name}"
    if method and name == "replace" and len(call.args) == 1 and not call.keywords:
        return ".replace"
    if name in _OPENS and owner not in ("os", "Image") and _opens_to_write(call, method=method and owner != "h5py"):
        return f"{owner or ''}.{name}({_mode(call, method=method)})"
    return ""


def _makes(call: ast.Call) -> bool:
    return bool(re.search(r"O_(CREAT|TRUNC|WRONLY|RDWR|APPEND)", ast.unparse(call)))


def _mode(call: ast.Call, *, method: bool) -> str:
    given = [*call.args, *(item.value for item in call.keywords if item.arg == "mode")]
    texts = [item.value for item in given if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    return next((text for text in texts if len(text) < 4 and set(text) <= set("rwaxbt+")), "r")


def _opens_to_write(call: ast.Call, *, method: bool) -> bool:
    return bool(_WRITES.search(_mode(call, method=method)))


def _guard(call: ast.Call, imported: set[str]) -> str:
    name = _name(call)
    if isinstance(call.func, ast.Attribute):
        return "Made.remove" if name == "remove" and re.search(r"\b(made|folder)\b", ast.unparse(call.func)) else ""
    return name if name in GUARDS and name in imported else ""


def places() -> dict[str, list[str]]:
    """Return the places of each call, as FILE FUNCTION."""
    found: dict[str, set[str]] = {}
    for path in sources():
        if str(path.relative_to(REPOSITORY)) not in (HOME, "hpcdl/core/storage/files.py"):
            for place in guarded(path):
                found.setdefault(place.call, set()).add(f"{place.file} {place.function}")
    return {call: sorted(where) for call, where in sorted(found.items())}


def table() -> str:
    """Return the table of calls and their guard, in the words of its docstring; one row per guard."""
    calls: dict[str, list[str]] = {}
    for call in places():
        calls.setdefault(GUARD_WORDS[call], []).append(f"`{call}`")
    lines = ["| by | what guards it |", "|---|---|"]
    lines += [f"| {', '.join(names)} | {words} |" for words, names in calls.items()]
    return "\n".join(lines) + "\n"


_CREATING = "a new file beside it (O_EXCL, random name), renamed over the one that hpcdl keeps under this name"
_OUTPUT = "only where nothing is, or what hpcdl wrote there and nobody has changed (by digest)"
GUARD_WORDS = {
    "Made.remove": "the folder is the one that this process has made, by device and inode",
    "creating": _CREATING,
    "cut": "a file that this process holds open and hpcdl keeps; what goes is a part that is not whole",
    "keep_others": "what others have put there is moved, links as links, to a new folder; nothing is removed",
    "move": "hpcdl's own, in a folder that is locked, to a name that is free",
    "move_over": "a file of this process over the one that hpcdl keeps under this name",
    "private_folder": "the folder is the one that this process has made, by device and inode",
    "remove_content": "every path in it fits what hpcdl writes there; else all stays",
    "remove_empty": "only where it is empty",
    "remove_file": "a plain file of this user's under a name of hpcdl's, never a link",
    "remove_folder": "every path in it fits what hpcdl writes there, none is a link; else all stays",
    "remove_marked": "a folder with the installer's install.json or .hpcdl-unfinished in it, or empty; never a link",
    "remove_output": "only as hpcdl wrote it there and nobody has changed it (by digest), named by an earlier report",
    "remove_private": "a folder that only this user can enter, under hpcdl's prefix, whose process is over",
    "replacing": "a new file in a private folder, renamed over the one that hpcdl keeps under this name",
    "rewrite": "a plain file that hpcdl keeps under this name, opened without following a link",
    "sweep": "under a temporary name of hpcdl's (name, 16 random digits, .tmp), this user's, the folder locked",
    "sweep_marked": "as remove_marked, under a temporary name of hpcdl's (name, 16 random digits, .tmp)",
    "touch": _CREATING,
    "write_bytes": _CREATING, "write_json": _CREATING, "write_text": _CREATING, "write_toml": _CREATING,
    "write_output": _OUTPUT,
    "writing_output": _OUTPUT,
}  # fmt: skip


def page() -> str:
    """Return docs/security.md with the table that follows from the code."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    return head + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    assert all(hasattr(disk, name.partition(".")[0]) or name.startswith("write_") for name in GUARD_WORDS)
    PAGE.write_text(page())
    for call, where in places().items():
        sys.stdout.write("".join(f"{call}: {place}\n" for place in where))

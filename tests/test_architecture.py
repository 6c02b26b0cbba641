"""The rules of the architecture, checked in the source: who may import whom, and what the code must not contain."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpcdl

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hpcdl"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))

_FOUNDATION = {"core"}
_SIDE = {"config", "core"}
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "config": _FOUNDATION,
    "comm": _SIDE,
    "collectives": _SIDE | {"comm"},
    "strategies": _SIDE | {"comm", "collectives"},
    "models": _SIDE,
    "data": _SIDE,
    "node": _SIDE,
    "cluster": _SIDE,
    "report": _SIDE,
    "trace": _SIDE | {"comm"},
}
MAY_IMPORT["checkpoint"] = _SIDE | {"comm", "cluster", "models", "strategies"}
MAY_IMPORT["run"] = MAY_IMPORT["checkpoint"] | {"checkpoint", "data", "node"}
MAY_IMPORT["step"] = MAY_IMPORT["run"] | {"run", "collectives"}
MAY_IMPORT["faults"] = MAY_IMPORT["supervision"] = MAY_IMPORT["run"] | {"run", "trace"}
MAY_IMPORT["rank"] = MAY_IMPORT["step"] | {"step", "faults", "supervision", "trace"}
MAY_IMPORT["scripts"] = MAY_IMPORT["rank"] | {"rank"}
MAY_IMPORT["launch"] = MAY_IMPORT["scripts"] | {"scripts", "report"}
MAY_IMPORT["tuning"] = MAY_IMPORT["bench"] = MAY_IMPORT["doctor"] = MAY_IMPORT["launch"] | {"launch"}
MAY_IMPORT["predict"] = MAY_IMPORT["tuning"]
MAY_IMPORT["study"] = MAY_IMPORT["tuning"] | {"tuning", "predict"}
MAY_IMPORT["cli"] = MAY_IMPORT["study"] | {"study", "bench", "doctor"}
"""Top-level folder -> the other folders that it may import. A new folder needs a line here first."""

_TENSORFLOW = (
    *("models/*", "strategies/*", "strategies/*/*", "data/read/pipeline.py"),
    *("checkpoint/*", "step/*", "step/*/*", "rank/*", "supervision/*", "scripts/*", "scripts/*/*"),
)
HEAVY: dict[str, tuple[str, ...]] = {
    "mpi4py": ("comm/mpi/*",),
    "h5py": ("data/format/hdf5*.py", "models/saved.py"),
    "optuna": ("study/proposals.py",),
    "pyarrow": ("data/sources/parquet.py",),
    "rich": ("core/progress.py", "report/terminal.py", "report/*/terminal.py"),
    "tensorflow": _TENSORFLOW,
    "keras": _TENSORFLOW,
}
"""Heavy library -> the only files that may import it."""
WITHOUT_TENSORFLOW = (
    "models/table.py",
    "models/__init__.py",
    "strategies/base/strategy.py",
    "strategies/table.py",
    "strategies/parameter_server/[!w]*",
    "strategies/elastic/center/*",
    "strategies/elastic/links/*",
)
FORBIDDEN_IMPORTS = {"click", "pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
FORBIDDEN_NAMES = re.compile(r"utils?|helpers?|managers?|factory|factories|misc|common", re.IGNORECASE)


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def imported(path: Path) -> list[tuple[str, int]]:
    """Yield every module that `path` imports anywhere, with its line; `from a import b` counts as a.b."""
    return list(imports_in(path))


def imports_in(path: Path) -> Iterator[tuple[str, int]]:
    package = ["hpcdl", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            yield from ((str(name.value), node.lineno) for name in node.args[:1] if isinstance(name, ast.Constant))


def at_import_time(path: Path) -> Iterator[ast.stmt]:
    """Yield the statements that run when `path` is imported: not those in functions or under TYPE_CHECKING."""
    waiting: list[ast.stmt] = list(tree(path).body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If):
            for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            waiting += node.orelse if for_types else [*node.body, *node.orelse]
        elif isinstance(node, ast.Try):
            waiting += [
                *node.body,
                *node.orelse,
                *node.finalbody,
                *(line for case in node.handlers for line in case.body),
            ]
        elif isinstance(node, ast.With | ast.ClassDef):
            waiting += node.body


def test_there_is_a_house() -> None:
    assert len(MODULES) > 20


def test_every_room_has_its_place() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert rooms <= set(MAY_IMPORT), f"say in MAY_IMPORT what the new room may import: {rooms - set(MAY_IMPORT)}"


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_imports_point_one_way(room: str) -> None:
    wrong = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        for name, line in imported(path):
            parts = name.split(".")
            if parts[0] != "hpcdl" or len(parts) < 2 or not (PACKAGE / parts[1]).is_dir():
                continue
            if parts[1] != room and parts[1] not in MAY_IMPORT[room]:
                wrong.append(f"{relative(path)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_files(path: Path, names: dict[str, Path]) -> set[Path]:
    """Return hpcdl's own files that `path` imports, including late imports and imports for types."""
    wanted = (name if name in names else name.rpartition(".")[0] for name, _ in imported(path))
    return {names[name] for name in wanted if name in names} - {path}


@pytest.mark.long
def test_every_name_that_tests_import_is_there() -> None:
    """Every name that tests import exists, also in programs that a test starts as ranks, where errors show late."""
    missing = []
    for path in (*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("hpcdl", "tests"):
                known, place = _names_of(str(node.module)), path.relative_to(ROOT)
                missing += [f"{place}: {node.module}.{one.name}" for one in node.names if one.name not in known]
    assert not missing


@functools.cache
def _names_of(module: str) -> set[str]:
    """Return what can be imported from a module or folder: what it assigns, defines and imports, and its files."""
    folder = ROOT.joinpath(*module.split("."))
    source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    names = {path.stem for path in folder.iterdir()} if folder.is_dir() else set()
    for node in ast.walk(ast.parse(source.read_text())) if source.exists() else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(one.asname or one.name).split(".")[0] for one in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    if module == "hpcdl":
        names |= set(hpcdl.__all__)
    return names


def test_no_two_files_import_each_other() -> None:
    """No files import each other in a circle: it shows a wrong division, which a late import only hides."""
    names = {module_name(path): path for path in MODULES}
    imports = {path: imported_files(path, names) for path in MODULES}

    def reached_from(path: Path) -> set[Path]:
        found, waiting = set[Path](), [path]
        while waiting:
            fresh = imports[waiting.pop()] - found
            found |= fresh
            waiting += fresh
        return found

    reached = {path: reached_from(path) for path in MODULES}
    circles = [
        f"{relative(path)} -> {relative(other)}"
        for path in MODULES
        for other in sorted(imports[path])
        if path in reached[other]
    ]
    assert not circles, "these imports lead back to where they come from:\n" + "\n".join(circles)


def test_no_two_folders_import_each_other() -> None:
    """No folders import each other in a circle, late and type imports included; a folder's `__init__` holds strings
    only."""
    names = {module_name(path): path for path in MODULES if path.name != "__init__.py" and path.parent != PACKAGE}
    imports: dict[Path, dict[Path, str]] = {path.parent: {} for path in names.values()}
    for path in names.values():
        for other in imported_files(path, names):
            if other.parent != path.parent:
                imports[path.parent].setdefault(other.parent, f"{relative(path)} imports {relative(other)}")

    def reached_from(folder: Path) -> set[Path]:
        found, waiting = set[Path](), [folder]
        while waiting:
            fresh = imports[waiting.pop()].keys() - found
            found |= fresh
            waiting += fresh
        return found

    reached = {folder: reached_from(folder) for folder in imports}
    knots = [why for folder, others in imports.items() for other, why in others.items() if folder in reached[other]]
    assert not knots, "these imports tie folders together:\n" + "\n".join(sorted(knots))


def test_no_class_name_twice() -> None:
    """No public class name is defined twice, so that a search finds one class; names with an underscore are private."""
    where: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(f"{relative(path)}:{node.lineno}")
    twice = [f"{name}: {', '.join(places)}" for name, places in where.items() if len(places) > 1]
    assert not twice, "one of them needs a word of its own:\n" + "\n".join(twice)


def test_the_public_package_loads_nothing_heavy() -> None:
    for name in ("__init__.py", "core/__init__.py", "config/__init__.py", "cli/__init__.py"):
        names = {alias for alias, _ in imported(PACKAGE / name)}
        assert not {alias.split(".")[0] for alias in names} & {*HEAVY, "numpy", "scipy", "matplotlib"}, name


@pytest.mark.parametrize("library", sorted(HEAVY))
def test_one_place_for_each_heavy_library(library: str) -> None:
    wrong = []
    for path in MODULES:
        place = path.relative_to(PACKAGE)
        allowed = any(place.match(pattern) for pattern in HEAVY[library])
        if library in ("tensorflow", "keras") and any(place.match(pattern) for pattern in WITHOUT_TENSORFLOW):
            allowed = False
        wrong += [
            f"{place}:{line} imports {name}"
            for name, line in imported(path)
            if name.split(".")[0] == library and not allowed
        ]
    assert not wrong, "\n".join(wrong)


def test_the_command_line_imports_heavy_libraries_late() -> None:
    heavy = {*HEAVY, "numpy", "scipy", "matplotlib", "PIL"}
    wrong = []
    for room in ("cli", "config", "core"):
        for path in sorted((PACKAGE / room).rglob("*.py")):
            for node in at_import_time(path):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                wrong += [f"{relative(path)}:{node.lineno} {name}" for name in names if name.split(".")[0] in heavy]
    assert not wrong, "import these inside the function that needs them:\n" + "\n".join(wrong)


TARGET = re.compile(r"(hpcdl(?:\.\w+)+):(\w+)")


@functools.cache
def targets() -> list[tuple[str, str, str]]:
    """Return every string "hpcdl.module:attribute" in the code: its position, module, attribute."""
    found = []
    for path in MODULES:
        for node in ast.walk(tree(path)):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if match := TARGET.fullmatch(text):
                found.append((f"{relative(path)}:{getattr(node, 'lineno', 0)}", match[1], match[2]))
    return found


def defined_in(path: Path) -> set[str]:
    """Return the names that the top level of `path` defines or imports."""
    names: set[str] = set()
    for node in at_import_time(path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
    return names


def test_registry_strings_lead_somewhere() -> None:
    assert len(targets()) > 10
    for where, module, attribute in targets():
        file = ROOT / (module.replace(".", "/") + ".py")
        file = file if file.is_file() else file.with_suffix("") / "__init__.py"
        assert file.is_file(), f"{where} names {module}, which is no module"
        assert attribute in defined_in(file), f"{where} names {attribute}, which {module} does not define"


def test_tables_import_no_member() -> None:
    """A table does not import the members that it names; the table's own parts may be in files beside it."""
    members = {module for _, module, _ in targets()}
    tables = {PACKAGE / where.split(":")[0] for where, _, _ in targets()}
    tables |= {path.parent / "__init__.py" for path in tables}
    assert len(tables) > 5
    for path in sorted(tables):
        if path.name not in ("table.py", "__init__.py"):
            continue
        known = {name for name, _ in imported(path)} | {name.rpartition(".")[0] for name, _ in imported(path)}
        assert not known & members, f"{relative(path)} imports {known & members}"


def test_nothing_forbidden_is_imported() -> None:
    wrong = [
        f"{relative(path)}:{line} imports {name}"
        for path in MODULES
        for name, line in imported(path)
        if name.split(".")[0] in FORBIDDEN_IMPORTS
        and not (relative(path).startswith("data/sources/") and name.startswith("pickle"))
    ]
    assert not wrong, "\n".join(wrong)


def test_pickled_sources_go_through_a_restricted_unpickler() -> None:
    for path in MODULES:
        if not any(name.split(".")[0] == "pickle" for name, _ in imported(path)):
            continue
        calls = {
            node.func.attr
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        }
        classes = [node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
        guarded = [node for node in classes if any(getattr(item, "name", "") == "find_class" for item in node.body)]
        assert guarded, f"{relative(path)} uses pickle without a find_class of its own"
        assert "loads" not in calls, f"{relative(path)} calls loads, which admits any class"


def test_every_library_is_a_declared_dependency() -> None:
    """Every imported library is a declared dependency: a cluster has only those, unlike a developer's environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(line for extra in ("compression", "jpeg", "otf2", "parquet", "search") for line in extras[extra]),
    ]
    declared = {re.match(r"[\w-]+", line)[0].lower() for line in wanted}  # type: ignore[index]
    distribution = {"PIL": "pillow", "keras": "tensorflow", "google": "protobuf", "google_crc32c": "google-crc32c"}
    used: dict[str, str] = {}
    for path in MODULES:
        for name, line in imported(path):
            used.setdefault(name.split(".")[0], f"{relative(path)}:{line}")
    foreign = used.keys() - sys.stdlib_module_names - {"hpcdl"}
    missing = {name: used[name] for name in foreign if distribution.get(name, name) not in declared}
    assert not missing, f"add to pyproject.toml: {missing}"


def test_no_allow_pickle() -> None:
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant) and node.value.value is False, (
                    f"{relative(path)}:{node.value.lineno}"
                )


def test_no_bare_except() -> None:
    bare = [
        f"{relative(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not bare, "\n".join(bare)


def test_no_global_statements() -> None:
    wrong = [
        f"{relative(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Global)
    ]
    assert not wrong, "\n".join(wrong)


def test_files_are_named_for_what_they_hold() -> None:
    files = [*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    wrong = [
        str(path.relative_to(ROOT))
        for path in files
        if any(FORBIDDEN_NAMES.fullmatch(word) for word in path.stem.split("_"))
    ]
    assert not wrong, "\n".join(wrong)


NAMED_FILE = re.compile(r"(?<![\w/.-])(?:[a-z_0-9]+/)*[a-z_0-9]+\.py\b")
EXAMPLE_FILES = {"path/to/file.py", "mnist.py", "script.py", "json.py", "random.py"}
"""Names of a user's files in messages and reasons."""


def test_files_that_lines_name_are_there() -> None:
    """Every file that a comment or docstring names, such as "(shrink.py)", exists in this folder or another."""
    folders = (PACKAGE, *(ROOT / name for name in ("tests", "benchmarks", "scripts", "share")))
    there = {path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*.py")}
    ends = {"/".join(parts[at:]) for parts in (name.split("/") for name in there) for at in range(len(parts))}
    gone = [
        f"{relative(path)}:{number} names {name}"
        for path in MODULES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for name in NAMED_FILE.findall(line)
        if name not in ends | EXAMPLE_FILES
    ]
    assert not gone, "\n".join(gone)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_functions_stay_readable(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 60, f"{node.name} has {length} lines; split it"


FOREIGN_WORDS = {"told", "tells", "untold", "belief", "meeting", "wish", "wishes", "ending", "endings"}


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_names_are_in_the_terms_of_the_field(path: Path) -> None:
    names = {node.id for node in ast.walk(tree(path)) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    names |= {node.arg for node in ast.walk(tree(path)) if isinstance(node, ast.arg)}
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names |= {node.name for node in ast.walk(tree(path)) if isinstance(node, definitions)}
    foreign = sorted(name for name in names if FOREIGN_WORDS & set(name.lower().split("_")))
    assert not foreign, "say it as the field does: report, suffix, flags, rendezvous"


def texts() -> Iterator[Path]:
    for folder in ("hpcdl", "docs", "etc", "scripts", "share", "benchmarks", "tests", ".ci"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in {
                ".py",
                ".md",
                ".toml",
                ".lua",
                ".json",
                ".sh",
                ".txt",
                ".template",
                "",
            }:
                yield path
    yield from (ROOT / name for name in ("Makefile", "pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"))


def test_no_text_speaks_of_one_machine() -> None:
    place = re.compile(
        r"(?<![\w.])/"
        + "work/|/opt/"
        + r"(?:wheels|pypi)|pypi\."
        + r"org|files\.python"
        + "hosted|deb\\.deb"
        + "ian|registry\\.np"
        + "mjs"
    )
    wrong = []
    for path in texts():
        if not path.is_file() or path == Path(__file__):
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        wrong += [f"{path.relative_to(ROOT)}: {match.group()}" for match in place.finditer(text)]
    assert not wrong, "\n".join(wrong)

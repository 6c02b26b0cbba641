"""What hpcdl removes of a run directory: only its own files."""

from __future__ import annotations

import functools
import re
import sys
import time
from pathlib import Path

import pytest

from hpcdl.config.load import Layer, load
from hpcdl.config.schema import InterruptionConfig, ScriptConfig, TrainConfig
from hpcdl.core.errors import StoppedEarly, UsageError
from hpcdl.run.code import digests
from hpcdl.run.rundir import (
    begun,
    changed_code,
    changed_script,
    check_place,
    create,
    default_run_dir,
    discard,
    facts_of,
)

OWN = (
    "run.toml", ".hpcdl-data", "record.json", "ranks/all.json", "trace/rank-0.trace",
    "trace/.rank-1.place.0123456789abcdef.tmp",
)  # fmt: skip


@pytest.mark.parametrize("user_s", ["", "notes.txt", "trace/timeline.html", "trace/rank-0.trace.html"])
def test_a_run_that_is_repeated_is_removed_unless_a_user_has_put_something_there(tmp_path: Path, user_s: str) -> None:
    run_dir, aside = tmp_path / "run", tmp_path / "failed" / "run.1"
    for name in filter(None, (*OWN, user_s)):
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text("x")
    discard(run_dir, aside)
    assert not run_dir.exists()
    assert aside.exists() == bool(user_s)
    assert not user_s or (aside / user_s).is_file()


@pytest.mark.parametrize("source", ["file", "nets.small", "nets"])
def test_a_resumed_run_warns_of_a_model_file_that_has_changed_since_its_beginning(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of the first model would silently continue in another one, with another activation for example."""
    monkeypatch.syspath_prepend(tmp_path)
    model = tmp_path / "nets" / ("__init__.py" if source == "nets" else "small.py")
    run_dir = tmp_path / "run"
    model.parent.mkdir()
    model.write_text("def build(): ...")
    values = {"model": f"{model if source == 'file' else source}:build", "data": "synthetic:mnist", "resume": True}
    resolved = load(TrainConfig, [Layer(origin="flag", values=values)])
    for text, changed in (("def build(): ...", 0), ("def build(): pass", 1), ("def build(): pass", 1)):
        model.write_text(text)
        create(run_dir, resolved, facts_of(resolved.config, "abc", run_dir))
        assert len(changed_code(run_dir, resolved.config)) == changed
    text = (run_dir / "run.toml").read_text().replace("\ncode =", "\nolder =").replace("facts.code", "facts.older")
    (run_dir / "run.toml").write_text(text)
    assert "nets" not in sys.modules, "the user's code is not run to find it"
    assert changed_code(run_dir, resolved.config) == [], "a run of an earlier version has no digests"


@pytest.mark.parametrize(
    ("line", "helper"),
    [
        ("import helper", "helper.py"),
        ("def build():\n    from lib.blocks import block", "lib/blocks.py"),
        ("import lib.blocks as blocks", "lib/__init__.py"),
        ("from . import blocks", "blocks.py"),
        ("from .lib import blocks", "lib/blocks.py"),
        ("import again", "lib/deep.py"),
        ("import elsewhere", "../shared/elsewhere.py"),
    ],
)
def test_code_includes_the_users_files_that_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, helper: str
) -> None:
    """A change of a helper beside the model would be as silent as one of the model itself."""
    folder = tmp_path / "own"
    monkeypatch.syspath_prepend(tmp_path / "shared")
    for name in ("lib/__init__.py", "lib/blocks.py", "lib/deep.py", "helper.py", "blocks.py", "../shared/elsewhere.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("width = 8")
    (folder / "again.py").write_text("import again, lib.deep, numpy, json, missing")
    model = folder / "model.py"
    model.write_text(f"{line}\nimport keras, os, hpcdl")
    before = digests([str(model)])
    assert not any("keras" in path or "hpcdl" in path.removeprefix(str(tmp_path)) for path in before)
    (folder / helper).write_text("width = 9")
    after = digests([str(model)])
    changed = [path for path, digest in after.items() if before[path] != digest]
    assert [Path(path).resolve() for path in changed] == [(folder / helper).resolve()]
    model.write_text("def :")
    assert [*digests([str(model)])] == [str(model)], "what is no Python imports nothing"


def test_a_folder_of_packages_is_no_code_of_the_user_and_a_large_program_costs_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules of a site put such folders on PYTHONPATH; all files of TensorFlow would take minutes at every start."""
    monkeypatch.syspath_prepend(tmp_path / "packages")
    (tmp_path / "packages" / "tool-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "packages" / "tool.py").write_text("")
    model = tmp_path / "own" / "model.py"
    model.parent.mkdir()
    model.write_text("import tool, part0")
    for number in range(400):
        (model.parent / f"part{number}.py").write_text(f"import part{number + 1}, model")
    found = [*digests([str(model)])]
    assert found[0] == str(model) and Path(found[1]).name == "part0.py" and len(found) == 300
    assert not any("tool" in Path(path).name for path in found)


def test_a_script_is_known_where_it_has_moved_and_its_helpers_too(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "train.py").write_text("import helper")
        (folder / "helper.py").write_text("rate = 1")
    resolved = load(ScriptConfig, [Layer(origin="flag", values={})])
    create(tmp_path, resolved, {"script": "train.py", "code": digests([str(old / "train.py")])})
    assert changed_script(tmp_path, str(new / "train.py")) == []
    (new / "helper.py").write_text("rate = 2")
    (warning,) = changed_script(tmp_path, str(new / "train.py"))
    assert warning.startswith(f"{new / 'helper.py'} has changed since this run began")


def test_a_new_run_inside_another_runs_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hpcdl runs` and reports would leave it out without a word."""
    (tmp_path / "run.toml").write_text("model = 'lenet'")  # a settings file of the user's own
    new, first = InterruptionConfig(), tmp_path / "runs" / "a"
    check_place(first, new)
    first.mkdir(parents=True)
    for name in ("run.toml", "record.json"):
        (first / name).write_text("{}")
    check_place(tmp_path / "runs" / "b", new)
    for inside in (first / "checkpoints" / "x", first / "second"):
        with pytest.raises(UsageError, match=r"inside the run .*/runs/a,.* choose a --run-dir outside"):
            check_place(inside, new)
    monkeypatch.chdir(first)
    with pytest.raises(UsageError, match="inside the run"):
        check_place(Path("runs") / "c", new)
    inside = first / "second"
    inside.mkdir()
    (inside / "run.toml").write_text("{}")
    check_place(inside, InterruptionConfig(resume=True, from_scratch=True))  # one of an earlier version continues


def test_runs_that_begin_in_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a loop of `hpcdl train ... &`: the others were refused, with the advice to remove a lock."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "localtime", lambda now: time.gmtime(0))
    chosen = default_run_dir("lenet", "ring")
    another = functools.partial(default_run_dir, "lenet", "ring")
    with begun(chosen, another, InterruptionConfig()) as first:
        with begun(chosen, another, InterruptionConfig()) as second:
            assert (first.run_dir, second.run_dir) == (chosen, Path(f"{chosen}-2"))
        with (
            pytest.raises(UsageError, match="another hpcdl writes"),
            begun(chosen, None, InterruptionConfig()),
        ):
            pass


def test_a_stop_names_the_folder_that_the_user_has_not_named(tmp_path: Path) -> None:
    other = tmp_path / "b c"
    for another, expected in (
        (None, "with --resume"),
        (lambda: other, f"with --resume --run-dir '{tmp_path / 'a b'}'"),
    ):
        with (
            pytest.raises(StoppedEarly, match=re.escape(expected) + "$"),
            begun(tmp_path / "a b", another, InterruptionConfig()),
        ):
            raise StoppedEarly("stopped by a signal; continue with --resume")

"""Modules that a run loads first, with a fake `module` command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import CommandLine

TRAIN = ("train", "--model", "lenet", "--data", "synthetic:mnist", "--module")
MODULES = "extra/1,tool/2"


@pytest.fixture
def with_modules(run_hpcdl: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """tool/2 brings its own hpcdl; other modules are unknown."""
    tool = tmp_path / "tool" / "hpcdl"
    tool.parent.mkdir()
    tool.write_text('#!/bin/bash\necho "of the tool, $EXTRA: $*"\n')
    tool.chmod(0o755)
    load = f"case $2 in extra/1) export EXTRA=1;; tool/2) PATH={tool.parent}:$PATH;; *) echo no $2 >&2; return 1; esac"
    run_hpcdl.environment["BASH_FUNC_module%%"] = f"() {{ {load}\n}}"
    return run_hpcdl


INFER = ("infer", "model.keras", "--data", "shards", "--out", "outputs", "--module", MODULES)


@pytest.mark.parametrize("words", [(*TRAIN, MODULES), INFER, ("run", "--module", MODULES, "script.py", "--own", "a b")])
def test_who_a_module_brings_continues_with_all_of_them(with_modules: CommandLine, words: tuple[str, ...]) -> None:
    done = with_modules(words)
    assert done.code == 0, done.err
    assert done.out == f"of the tool, 1: {' '.join(words)}\n"


def test_a_module_that_is_not_there_is_named(with_modules: CommandLine) -> None:
    done = with_modules([*TRAIN, "tool/3"])
    assert (done.code, done.err) == (2, "hpcdl: --module tool/3 cannot be loaded: no tool/3; see module avail\n")


def test_without_modules_at_all(run_hpcdl: CommandLine) -> None:
    nowhere = {"LMOD_DIR": "/none/x", "MODULESHOME": "/none"}
    run_hpcdl.environment.update(nowhere)
    done = run_hpcdl([*TRAIN, "tool/2"])
    assert (done.code, done.err) == (2, "hpcdl: --module tool/2: there is no command module here\n")


def test_module_versions_are_an_axis(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    study = tmp_path / "s.toml"
    study.write_text(
        '[matrix]\nmodel = ["lenet"]\ndata = ["synthetic:mnist"]\nmodule = ["hpcdl/1", "hpcdl/2", "none"]\n'
    )
    done = ask_hpcdl(["sweep", study, "--dry-run", "--out", tmp_path / "out"])
    assert done.code == 0, done.err
    assert all(f"module {name}" in done.out for name in ("hpcdl/1", "hpcdl/2", "None")), done.out

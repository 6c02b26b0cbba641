"""`--install-completion` writes its own file and leaves the shell's start-up file to the user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdl.cli.completion import install
from hpcdl.core.errors import UsageError

MINE = b'export NAME="Jos\xe9"\n'
ASK = "COMP_WORDS=(hpcdl tra); COMP_CWORD=1; _hpcdl_completion hpcdl; echo ${COMPREPLY[@]}"


def test_the_start_up_file_is_unchanged_and_the_printed_line_loads_completion(tmp_path: Path) -> None:
    start = tmp_path / ".bashrc"
    start.write_bytes(MINE)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": path, "SHELL": "/bin/bash"}

    def bash(text: str) -> subprocess.CompletedProcess[str]:
        line = ["bash", "--norc", "-c", f"{text}\n:"]  # a shell that keeps running and is found
        return subprocess.run(line, env=environment, capture_output=True, text=True, check=True, timeout=300)

    reported = bash("hpcdl --install-completion").stderr
    assert start.read_bytes() == MINE
    assert reported.startswith("next: echo ")
    bash(reported.removeprefix("next: "))
    assert start.read_bytes().startswith(MINE)
    asked = bash(f". ~/.bashrc; {ASK}")
    assert asked.stdout == "train trace\n", asked.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_file_of_somebody_elses_stays(shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = install(shell)
    assert install(shell) == path
    path.write_text("mine\n")
    with pytest.raises(UsageError, match="move it away"):
        install(shell)
    assert path.read_text() == "mine\n"


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("/bin/tcsh", "this is for bash, in which you typed it; SHELL is tcsh: tcsh has no completion\n"),
        ("/usr/bin/zsh", "this is for bash, in which you typed it; SHELL is zsh: type this in zsh for the other\n"),
        ("/bin/bash", ""),
        ("", ""),
    ],
)
def test_a_shell_besides_the_users_own_is_named(
    own: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", own)
    monkeypatch.setattr("hpcdl.cli.completion._get_shell_name", lambda: "bash")
    install()
    assert capsys.readouterr().err.partition("next: ")[0] == said


def test_another_shell_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match="tcsh is no shell with completion: bash, zsh, fish"):
        install("tcsh")
    assert not [*tmp_path.iterdir()]

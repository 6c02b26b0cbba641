"""Settings of a machine in one file: who selects it, what is refused, and how commands use it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpcdl.cluster.batch.script import render
from hpcdl.cluster.batch.systems import JobRequest
from hpcdl.config.commands import load_submit
from hpcdl.config.load import machine_in_force, read_machine_settings, standard_layers, take_environment
from hpcdl.core.errors import ConfigError, UsageError
from hpcdl.doctor.installation import check_machine
from hpcdl.doctor.table import Subject
from tests.conftest import ROOT, CommandLine

FILE = """
summary = "ours"
modules = ["craype", "rocm/6.2"]
[environment]
UCX_TLS = "self,sm"
FI_X = "1"
[submit]
qos = "large"
account = "of-the-machine"
[train]
batch-size = 48
"""


@pytest.fixture
def centre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site with one machine, which no setting selects yet."""
    folder = tmp_path / "site"
    (folder / "machines").mkdir(parents=True)
    (folder / "machines" / "big.toml").write_text(FILE)
    (folder / "site.toml").write_text('[submit]\nqos = "normal"\npartition = "work"\n')
    monkeypatch.setenv("HPCDL_SITE_CONFIG", str(folder / "site.toml"))
    for name in ("HPCDL_MACHINE", "FI_X", "UCX_TLS", "LOADEDMODULES"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_who_names_the_machine(centre: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_in_force() is None
    monkeypatch.setenv("HPCDL_MACHINE", "two cores of mine")  # only a name for records
    assert machine_in_force() is None
    monkeypatch.setenv("HPCDL_MACHINE", "small")  # a name without a file
    assert machine_in_force() is None
    monkeypatch.setenv("HPCDL_MACHINE", "big")
    found = machine_in_force()
    assert found is not None and found.name == "big" and found.modules == ("craype", "rocm/6.2")
    monkeypatch.delenv("HPCDL_MACHINE")
    (centre / "site.toml").write_text('[site]\nmachine = "big"\n')
    assert machine_in_force() == found
    (centre / "site.toml").write_text('[site]\nmachine = "small"\n')
    with pytest.raises(UsageError, match="machine = 'small', but there is no"):
        machine_in_force()


def test_a_machine_is_between_site_and_user(centre: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCDL_MACHINE", "big")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    (tmp_path / "own" / "hpcdl").mkdir(parents=True)
    (tmp_path / "own" / "hpcdl" / "config.toml").write_text('[submit]\naccount = "mine"\n')
    found = load_submit({})
    batch = found.config.batch
    assert (batch.qos, batch.partition, batch.account) == ("large", "work", "mine")
    assert found.origins["qos"] == f"machine ({centre / 'machines' / 'big.toml'})"
    assert load_submit({"qos": "debug"}).config.batch.qos == "debug"
    assert [layer.origin.partition(" ")[0] for layer in standard_layers("submit")] == ["site", "machine", "user"]


def test_a_variable_that_is_set_stays_and_is_reported(centre: Path) -> None:
    machine = read_machine_settings(centre / "machines" / "big.toml")
    environment = {"FI_X": "2", "HOME": "/"}
    assert take_environment(machine, environment) == ["FI_X=2 was set before and stays; the machine big asks for '1'"]
    assert environment == {"FI_X": "2", "HOME": "/", "UCX_TLS": "self,sm", "HPCDL_MACHINE": "big"}
    assert take_environment(machine, {"FI_X": "1"}) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('module = ["a"]', "unknown key 'module'; did you mean 'modules'"),
        ('modules = "a"', "modules must be a list of names"),
        ('modules = ["a; rm -r x"]', "modules must be a list of names"),
        ('[environment]\nLD_PRELOAD = "x"', "not a variable that a machine may set"),
        ('[environment]\nPATH = "x"', "not a variable that a machine may set"),
        ('[environment]\n"A B" = "x"', "not a variable that a machine may set"),
        ("[environment]\nFI_X = 1", "must be a text of one line"),
        ("submit = 3", "write [submit], and its keys below"),
    ],
)
def test_a_file_says_what_is_wrong_with_it(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "m.toml").write_text(text + "\n")
    with pytest.raises(ConfigError) as caught:
        read_machine_settings(tmp_path / "m.toml")
    assert words in str(caught.value)


EXAMPLES = sorted((ROOT / "share" / "hpcdl" / "machines" / "settings").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_whole_and_name_their_source(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "machines").mkdir()
    (tmp_path / "machines" / path.name).write_text(path.read_text())
    monkeypatch.setenv("HPCDL_SITE_CONFIG", str(tmp_path / "site.toml"))
    monkeypatch.setenv("HPCDL_MACHINE", path.stem)
    machine = machine_in_force()
    assert machine is not None and machine.environment
    assert load_submit({}).config.job.nodes == 1, "its table [submit] is one"
    assert "https://" in path.read_text() and "read on 2026-" in path.read_text()


def test_job_scripts_load_the_modules(centre: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    request = JobRequest(
        name="x", command=["doctor"], folder=tmp_path, nodes=1, ranks_per_node=1, time_s=600.0, warning_s=60.0,
        launcher="slurm",
    )  # fmt: skip
    assert "module load" not in render(request)
    monkeypatch.setenv("HPCDL_MACHINE", "big")
    script = render(request)
    assert script.index("export HPCDL_MACHINE=big") < script.index("module load craype ||")
    assert script.index("module load craype") < script.index("module load rocm/6.2") < script.index("hpcdl doctor")
    # Run the lines in a shell: the second module does not exist.
    lines = script[script.index("if ! type module") : script.index("export HPCDL_STOP_AT")]
    shell = 'module() { [ "$2" = craype ]; }\n' + lines + "echo continued"
    ran = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr == "hpcdl: module rocm/6.2 of the machine big does not load\n"
    shell = "module() { :; }\n" + lines + "echo continued"
    ran = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert ran.stdout == "continued\n"


def test_doctor_sees_what_differs(centre: Path) -> None:
    assert [item.level for item in check_machine(Subject(environment={}))] == ["ok"]
    reported = check_machine(Subject(environment={"HPCDL_MACHINE": "big", "FI_X": "2", "LOADEDMODULES": "craype/2.7"}))
    assert [item.level for item in reported] == ["warning", "warning"]
    assert "FI_X=2 is set here" in reported[0].text and "not loaded here: rocm/6.2" in reported[1].text
    well = {"HPCDL_MACHINE": "big", "LOADEDMODULES": "craype/2.7:rocm/6.2"}
    assert [item.text for item in check_machine(Subject(environment=well))] == [
        f"machine big ({centre / 'machines' / 'big.toml'}): 2 variables, 2 modules"
    ]
    (centre / "machines" / "big.toml").write_text("modules = 3\n")
    assert [item.level for item in check_machine(Subject(environment=well))] == ["failure"]


def test_config_show_says_where_each_comes_from(centre: Path, ask_hpcdl: CommandLine) -> None:
    environment = {"HPCDL_SITE_CONFIG": str(centre / "site.toml"), "HPCDL_MACHINE": "big", "FI_X": "2"}
    shown = ask_hpcdl(["config", "show", "--json"], env=environment).json()
    origin = f"machine ({centre / 'machines' / 'big.toml'})"
    assert {"key": "batch-size", "value": "48", "origin": origin} in shown["settings"]
    assert shown["machine"]["settings"] == [
        {"key": "environment UCX_TLS", "value": "self,sm", "origin": origin},
        {"key": "environment FI_X", "value": "2", "origin": "your environment"},
        {"key": "modules of job scripts", "value": "craype, rocm/6.2", "origin": origin},
    ]


@pytest.mark.mpi
def test_ranks_of_a_script_have_the_variables(centre: Path, run_hpcdl: CommandLine, tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text("import os\nprint('rank has', os.environ['FI_X'], os.environ['HPCDL_MACHINE'])\n")
    environment = {"HPCDL_SITE_CONFIG": str(centre / "site.toml"), "HPCDL_MACHINE": "big", "FI_X": "2"}
    (centre / "machines" / "big.toml").write_text('[environment]\nFI_X = "1"\n')
    finished = run_hpcdl(["run", "--ranks", "1", script], env=environment)
    assert finished.code == 0, finished.err
    assert "rank has 2 big" in finished.out + finished.err and "FI_X=2 was set before and stays" in finished.err
    del environment["FI_X"]
    finished = run_hpcdl(["run", "--ranks", "1", script], env=environment)
    assert "rank has 1 big" in finished.out + finished.err

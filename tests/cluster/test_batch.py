"""Job scripts quote any content, are accepted by the shell, and are submitted to a fake batch system."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdl.cluster.batch import jobs
from hpcdl.cluster.batch.script import render
from hpcdl.cluster.batch.submission import Wanted, plan_job, submit_job
from hpcdl.cluster.batch.systems import JobRequest, NodeWishes, find_system, has_own_nodes
from hpcdl.cluster.launchers import LAUNCHERS
from hpcdl.core.errors import HpcdlError, UnknownNameError, UsageError
from tests.conftest import CommandLine

NASTY = "a b;$(touch /tmp/hpcdl-was-here)'\"`x`#%j\\"
TRAIN = ("train", "--model", "lenet", "--data", "synthetic:mnist@400")


def request(**changes: object) -> JobRequest:
    values: dict[str, object] = {
        "name": "job", "command": ["train"], "folder": Path("/shared/run.job"), "nodes": 2, "ranks_per_node": 3,
        "time_s": 600.0, "warning_s": 60.0, "launcher": "slurm",
    }  # fmt: skip
    return JobRequest(**{**values, **changes})  # type: ignore[arg-type]


def command_in(script: str) -> list[str]:
    return shlex.split(next(line for line in script.splitlines() if " -m hpcdl " in line))


def program(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


@settings(max_examples=50)
@given(
    st.text(
        st.characters(blacklist_categories=["Cs"], blacklist_characters="\n\r\0\x85\u2028\u2029\x0b\x0c\x1c\x1d\x1e")
    )
)
def test_any_word_reaches_the_command_as_it_is(word: str) -> None:
    script = render(request(command=["train", "--data", word], name=word or "x"), {})
    assert command_in(script)[-1] == word
    directive = next(line for line in script.splitlines() if line.startswith("#SBATCH --job-name="))
    assert shlex.split(directive.removeprefix("#SBATCH "))[0] == f"--job-name={word or 'x'}"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_bash_accepts_every_script_and_runs_nothing_in_it(launcher: str, tmp_path: Path) -> None:
    folder = tmp_path / NASTY.replace("/", "_")
    script = render(
        request(command=["train", "--data", NASTY], folder=folder, launcher=launcher), {"HPCDL_ADDRESS": NASTY}
    )
    (tmp_path / "job.sh").write_text(script)
    assert subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=False).returncode == 0
    assert "@" not in script.replace("USR1@60", "")
    assert command_in(script)[-1].startswith("a b;$(touch") or launcher in ("pbs", "lsf")
    exported = f"export HPCDL_ADDRESS={shlex.quote(NASTY)}"
    assert exported in script.splitlines()
    assert not Path("/tmp/hpcdl-was-here").exists()


def test_slurm_is_asked_for_what_the_user_asked_for() -> None:
    script = render(request(partition="normal", account="TG-1", until_done=True, time_s=3601.0), {})
    wanted = ("--nodes=2", "--ntasks-per-node=3", "--time=61", "--signal=USR1@60", "--requeue", "--partition=normal")
    assert {f"#SBATCH {option}" for option in (*wanted, "--account=TG-1")} <= set(script.splitlines())
    assert "#SBATCH --no-requeue" in render(request(), {}) and "--no-kill" not in render(request(), {})
    made, _ = plan_job(Wanted(command=[*TRAIN, "--elastic", "--min-workers", "2"], nodes=4))
    assert made.outlives_nodes and "#SBATCH --no-kill" in render(request(outlives_nodes=True), {})


def test_a_line_break_is_refused() -> None:
    with pytest.raises(UsageError, match="line break"):
        render(request(name="a\nrm -rf"), {})


def test_pbs_has_its_own_directives() -> None:
    script = render(request(launcher="pbs", name="my job", time_s=3725.0, partition="debug"), {})
    assert {"#PBS -N my_job", "#PBS -l select=2:mpiprocs=3", "#PBS -l walltime=01:02:05", "#PBS -q debug"} <= set(
        script.splitlines()
    )
    with pytest.raises(UsageError, match="cannot requeue itself"):
        render(request(launcher="pbs", until_done=True), {})
    with pytest.raises(UsageError, match="--account"):
        render(request(launcher="pbs", account="x; rm"), {})


WISHES = NodeWishes(cpus_per_task=4, exclusive=True, mem="8G", options=("--nice=3", "-W group_list=x"))


def test_nodes_are_asked_for_in_each_systems_words() -> None:
    slurm = render(request(nodes_wanted=dataclasses.replace(WISHES, qos="long", gres="gpu:2", exclude="n1,n2")), {})
    for option in ("--cpus-per-task=4", "--exclusive", "--mem=8G", "--qos=long", "--gres=gpu:2", "--exclude=n1,n2"):
        assert f"#SBATCH {option}\n" in slurm
    assert "#SBATCH --nice=3\n" in slurm
    of_pbs = dataclasses.replace(WISHES, gres="ngpus=4", constraint="cpu_type=rome")
    options = read_pbs(render(request(launcher="pbs", nodes_wanted=of_pbs), {}))
    assert options["-l"]["select"] == (
        2, {"ncpus": "12", "mpiprocs": "3", "mem": "8G", "ngpus": "4", "cpu_type": "rome"}
    )  # fmt: skip
    assert options["-l"]["place"] == "scatter:excl" and options["-W"] == "group_list=x"
    assert read_pbs(render(request(launcher="pbs"), {}))["-l"]["place"] == "scatter"


def read_pbs(script: str) -> dict[str, Any]:
    """Return the directives of a PBS script as qsub reads them: `-l` by resource, select as number and chunk."""
    found: dict[str, Any] = {"-l": {}}
    for line in script.splitlines():
        if not line.startswith("#PBS "):
            continue
        name, _, value = line.removeprefix("#PBS ").partition(" ")
        assert re.fullmatch(r"-[a-zA-Z]|--\w+(=\S+)?", name), line
        if name != "-l":
            assert name not in found, f"{name} is said twice"
            found[name] = value
            continue
        resource, equals, wanted = value.partition("=")
        assert equals and resource not in found["-l"], line
        if resource == "select":
            number, *parts = wanted.split(":")
            wanted = (int(number), dict(part.split("=") for part in parts))
        found["-l"][resource] = wanted
    return found


@pytest.mark.parametrize(
    ("launcher", "wishes", "reported"),
    [
        ("slurm", NodeWishes(options=("nice",)), "--batch-option 'nice'"),
        ("slurm", NodeWishes(options=("--nice\n#SBATCH --exclusive",)), "--batch-option"),
        ("slurm", NodeWishes(qos="a\nb"), "line break"),
        ("slurm", NodeWishes(options=("--time=2h",)), "type --time"),
        ("slurm", NodeWishes(options=("--part normal",)), "type --partition"),
        ("slurm", NodeWishes(options=("-pnormal",)), "type --partition"),
        ("slurm", NodeWishes(options=("--signal=USR2",)), "submit sets it itself"),
        ("slurm", NodeWishes(options=("--array=1-4",)), "sweep STUDY.toml --jobs"),
        ("pbs", NodeWishes(options=("-l mem=8gb,walltime=10",)), "type --time"),
        ("pbs", NodeWishes(options=("-lselect=2",)), "type --nodes"),
        ("pbs", NodeWishes(options=("-J 1-4",)), "sweep STUDY.toml --jobs"),
        ("pbs", NodeWishes(gres="gpu:4"), "such as ngpus=4"),
        ("pbs", NodeWishes(qos="long"), "--qos is Slurm's"),
        ("pbs", NodeWishes(mem="8 G:x"), "--mem '8 G:x'"),
        ("pbs", NodeWishes(mem="64"), "--mem '64': PBS takes a number with a unit"),
        ("slurm", NodeWishes(mem="64"), "--mem 64: Slurm takes it as 64 MB; write 64G or 64M"),
    ],
)
def test_wishes_that_a_system_cannot_take_are_refused(launcher: str, wishes: NodeWishes, reported: str) -> None:
    with pytest.raises(UsageError, match=reported):
        render(request(launcher=launcher, nodes_wanted=wishes), {})


def test_ranks_get_all_cpus_of_the_smallest_node(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    program(tools, "sbatch", "exit 1")
    program(tools, "sinfo", 'case "$*" in *--partition=big*) echo "big 64";; *) printf "big 64\\nmain* 12+\\n";; esac')
    env = {"PATH": f"{tools}:{os.environ['PATH']}"}
    for flags, cpus in (([], 12), (["--ranks-per-node", "4"], 3), (["--partition", "big"], 64)):
        made = ask_hpcdl(["submit", "--dry-run", *flags, "--", *TRAIN], env=env)
        assert f"#SBATCH --cpus-per-task={cpus}\n" in made.out, made.err
    assert "--cpus-per-task=12\n" in ask_hpcdl(["submit", "--dry-run", "--", "doctor", "--nodes", "all"], env=env).out
    assert "--cpus-per-task" not in ask_hpcdl(["submit", "--dry-run", "--", "report", "runs"], env=env).out


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("sweep", "none.toml"), "the job would be refused: no such config file: none.toml"),
        (("evaluate", "none", "--data", "synthetic:mnist"), "none is not there: the job starts in"),
        (("infer", "/", "--data", "none"), "none is not there: the job starts in"),
        (("report", "/", "none", "runs"), "none, runs are not there: the job starts in"),
        (("shard", "none", "out"), "none is not there: the job starts in"),
        (("shard", "synthetic:mnist", "out"), ""),
        (("evaluate", "/", "--data", "/"), ""),
        (("tune-threads", "--model", "lenet", "--data", "synthetic:mnist", "--batch-size", "8"), ""),
    ],
)
def test_inputs_that_are_not_there_are_said_before_the_job_waits(
    command: Sequence[str], said: str, ask_hpcdl: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = ask_hpcdl(["submit", "--dry-run", "--", *command], env={"HPCDL_LAUNCHER": "slurm"})
    assert shown.code == 0 and said in shown.err and ("warning" in shown.err) == bool(said), shown.err


SITE = """[submit]
partition = "normal"
account = "TG-1"
exclusive = true
time = "2h"
batch-option = ["--licenses=a,b"]
"""


@pytest.mark.parametrize("typed", ["90", " 120 ", "0.5"])
def test_a_time_without_a_unit_is_asked_about(typed: str, ask_hpcdl: CommandLine) -> None:
    """`--time 90`, an hour and a half for sbatch, became a job of 90 seconds."""
    made = ask_hpcdl(["submit", "--dry-run", "--time", typed, "--", *TRAIN], env={"HPCDL_LAUNCHER": "slurm"})
    assert made.code == 2 and f"write {typed.strip()}m or {typed.strip()}s" in made.err and not made.out


def test_a_site_has_defaults_that_flags_overrule(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(SITE)
    env = {"HPCDL_SITE_CONFIG": str(tmp_path / "site.toml"), "HPCDL_LAUNCHER": "slurm"}
    made = ask_hpcdl(["submit", "--dry-run", "--", *TRAIN], env=env)
    for option in ("--partition=normal", "--account=TG-1", "--exclusive", "--time=120", "--licenses=a,b"):
        assert f"#SBATCH {option}\n" in made.out, made.out
    assert f"--partition normal: site ({tmp_path}/site.toml)" in made.err.splitlines()
    flags = ["--partition", "big", "--no-exclusive", "--batch-option=--nice=3", "--batch-option=--comment=a"]
    made = ask_hpcdl(["submit", "--dry-run", *flags, "--", *TRAIN], env=env)
    assert "--partition=big\n" in made.out and "--partition" not in made.err and "--exclusive" not in made.out
    assert "#SBATCH --licenses=a,b\n#SBATCH --nice=3\n#SBATCH --comment=a\n" in made.out
    reported = ask_hpcdl(["submit", "--dry-run", "--json", "--", *TRAIN], env=env).json()["defaults"]
    assert {"key": "account", "value": "TG-1", "origin": f"site ({tmp_path}/site.toml)"} in reported
    (tmp_path / "site.toml").write_text('[submit]\nqeue = "normal"\nnodes = 0\n')
    refused = ask_hpcdl(["submit", "--dry-run", "--", *TRAIN], env=env)
    assert refused.code == 2 and "'qeue'" in refused.err and "nodes: 0 is out of range" in refused.err


@pytest.mark.parametrize(
    ("line", "advised"),
    [
        (["train", "--model", "lenet", "--nodes", "2"], "submit --nodes 2 -- train --model lenet"),
        (["--nodes=2", "report", "runs", "--dry-run"], "submit --nodes=2 --dry-run -- report runs"),
    ],
)
def test_who_forgets_the_dashes_is_shown_where_they_belong(
    ask_hpcdl: CommandLine, line: list[str], advised: str
) -> None:
    refused = ask_hpcdl(["submit", *line])
    assert refused.code == 2 and refused.err.endswith(f"before it: hpcdl {advised}\n"), refused.err


@pytest.mark.parametrize(
    ("command", "reported"),
    [
        ([*TRAIN, "--strategy", "rong"], "unknown strategy 'rong'"),
        ([*TRAIN[:4], "shards"], "shards"),
        ([*TRAIN, "--learning-rate", "-1"], "learning-rate"),
        ([*TRAIN, "--strategy", "grpc-ring"], "add --exclusive"),
        (["run", "gone.py"], "the script gone.py is not there"),
        (["report", "runs", "--fromat", "html"], "No such option: --fromat"),
        (["bench", "allredcue"], "No such command 'allredcue'"),
        (["shard", "images"], "Missing argument 'DIR'; see `hpcdl shard --help`"),
    ],
)
def test_what_would_end_at_once_is_not_queued(
    ask_hpcdl: CommandLine, tmp_path: Path, command: list[str], reported: str
) -> None:
    tools = tmp_path / "bin"
    program(tools, "sbatch", f"touch {tmp_path}/queued; echo 4711")
    env = {"PATH": f"{tools}:{os.environ['PATH']}"}
    refused = ask_hpcdl(["submit", "--", *command], env=env)
    assert refused.code == 2 and reported in refused.err and not (tmp_path / "queued").exists()
    assert len(refused.err.splitlines()) == 1
    shown = ask_hpcdl(["submit", "--dry-run", "--", *command], env=env)
    assert shown.code == 0 and reported in shown.err and "warning: the job would be refused" in shown.err


@pytest.mark.parametrize("program_name", ["hpcdl", "/opt/bin/hpcdl"])
def test_a_second_hpcdl_is_answered_with_what_to_type(ask_hpcdl: CommandLine, program_name: str) -> None:
    refused = ask_hpcdl(["submit", "--dry-run", "--", program_name, "train", "--model", "a b"])
    assert refused.code == 2 and refused.err.endswith("type hpcdl submit ... -- train --model 'a b'\n"), refused.err


@pytest.mark.parametrize("command", [TRAIN, ["run", "script.py"]])
def test_a_job_for_a_run_directory_that_is_taken_is_not_queued(
    ask_hpcdl: CommandLine, tmp_path: Path, command: list[str]
) -> None:
    program(tmp_path / "bin", "sbatch", f"touch {tmp_path}/queued; echo 4711")
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    (ask_hpcdl.home / "script.py").touch()
    (ask_hpcdl.home / "taken").mkdir()
    (ask_hpcdl.home / "taken" / "record.json").write_text("{}")
    refused = ask_hpcdl(["submit", "--", command[0], "--run-dir", "taken", *command[1:]], env=env)
    assert refused.code == 2 and "run directory taken exists" in refused.err, refused.err
    assert not (tmp_path / "queued").exists()


def test_a_second_job_for_a_run_directory_that_a_queued_job_has_is_refused(
    ask_hpcdl: CommandLine, tmp_path: Path
) -> None:
    """The run does not exist yet, but the second job would fail when it starts, hours later."""
    program(tmp_path / "bin", "sbatch", f"echo x >> {tmp_path}/queued; wc -l < {tmp_path}/queued")
    program(tmp_path / "bin", "squeue", f"cat {tmp_path}/state")
    state = tmp_path / "state"
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    line = ["submit", "--until-done", "--", *TRAIN, "--run-dir", "mine"]
    state.write_text("PENDING Priority\n")
    assert ask_hpcdl(line, env=env).code == 0
    refused = ask_hpcdl(line, env=env)
    assert (refused.code, "--run-dir mine: job 1 (pending) has it too" in refused.err) == (2, True), refused.err
    assert ask_hpcdl([*line[:-1], "other"], env=env).code == 0
    chained = ask_hpcdl([*line, "--resume"], env=env)
    assert chained.code == 0 and "let it wait: --batch-option=--dependency=afterany:1" in chained.err, chained.err
    state.write_text("TIMEOUT TimeLimit\n")
    ended = ask_hpcdl(line, env=env)
    assert ended.code == 0 and "warning" not in ended.err, ended.err


def test_each_reason_against_a_job_has_its_line(ask_hpcdl: CommandLine) -> None:
    refused = ask_hpcdl(["submit", "--", *TRAIN[:4], "shards", "--strategy", "rong"])
    lines = refused.err.splitlines()
    assert refused.code == 2 and [line.partition(":")[0] for line in lines] == ["hpcdl", "hpcdl"], lines
    assert "unknown strategy 'rong'" in lines[0] and "no such data folder: shards" in lines[1]


def test_faults_of_hosts_are_left_to_the_job(ask_hpcdl: CommandLine) -> None:
    command = [*TRAIN, "--inject", "partition:host=1@step=20+2s", "--steps", "40"]
    shown = ask_hpcdl(["submit", "--nodes", "2", "--dry-run", "--", *command], env={"HPCDL_LAUNCHER": "slurm"})
    assert shown.code == 0 and "warning" not in shown.err
    assert "partition:host=1@step=20+2s" in shown.out


def test_a_site_has_templates_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCDL_SITE_CONFIG", str(tmp_path / "site.toml"))
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "slurm.sh").write_text("#!/bin/bash\n@DIRECTIVES@\nmodule load hpcdl\n@COMMAND@\n")
    assert "module load hpcdl" in render(request(), {})
    (tmp_path / "jobs" / "slurm.sh").write_text("@COMAND@")
    with pytest.raises(UsageError, match=r"unknown place @COMAND@.*COMMAND"):
        render(request(), {})


def test_train_gets_ranks_run_folder_and_resume() -> None:
    made, run_dir = plan_job(Wanted(command=TRAIN, nodes=4, ranks_per_node=2, until_done=True, stage_env=True), now=0.0)
    assert run_dir is not None and made.folder == run_dir.with_name(run_dir.name + ".job").absolute()
    assert made.command[-6:] == ["--ranks", "8", "--run-dir", str(run_dir), "--stage-env", "--resume"]
    named, run_dir = plan_job(Wanted(command=[*TRAIN, "--run-dir=mine", "--ranks", "1"]))
    assert str(run_dir) == "mine" and named.command == [*TRAIN, "--run-dir=mine", "--ranks", "1"]


def test_a_config_file_with_other_ranks_than_the_job_is_warned_of(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('ranks = 8\nrun_dir = "mine"\n')
    for words, warned in ((["--nodes", "4"], True), (["--nodes", "4", "--ranks-per-node", "2"], False)):
        command = ["submit", "--dry-run", *words, "--", *TRAIN, "--config", "c.toml"]
        shown = ask_hpcdl(command, cwd=tmp_path, env={"HPCDL_LAUNCHER": "slurm"})
        said = "warning: file (c.toml) has ranks = 8, but --nodes 4 x --ranks-per-node 1 = 4, which counts"
        assert shown.code == 0 and (said in shown.err) == warned == ("warning" in shown.err), shown.err
        assert "--run-dir mine" in shown.out
    words = ["--config", "c.toml", "--set", "ranks=2", "--set=run-dir=b", "--set", "epochs=1"]
    shown = ask_hpcdl(["submit", "--dry-run", "--nodes", "8", "--", *TRAIN, *words], cwd=tmp_path)
    assert "warning: --set has ranks = 2, but --nodes 8" in shown.err and "--run-dir b" in shown.out


def test_a_script_for_this_node_says_which_flags_it_leaves_out(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    words = ["submit", "--dry-run", "--nodes", "2", "--partition", "gpu", "--mem=64G", "--", *TRAIN]
    for launcher, warned in (("local", True), ("slurm", False)):
        shown = ask_hpcdl(words, cwd=tmp_path, env={"HPCDL_LAUNCHER": launcher})
        said = "no batch system: the script runs here, without --partition, --mem, --nodes 2;"
        assert shown.code == 0 and (said in shown.err) == warned == ("warning" in shown.err), shown.err


def test_infer_gets_ranks_and_continues() -> None:
    words = ["infer", "runs/a", "--data", "shards", "--out", "outputs"]
    made, run_dir = plan_job(Wanted(command=words, nodes=4, ranks_per_node=2, until_done=True, stage_env=True))
    assert run_dir is None and made.command == [*words, "--ranks", "8", "--stage-env", "--resume"]


@pytest.mark.parametrize(
    ("wanted", "reported"),
    [
        (Wanted(command=["infer", "a", "-n", "3"], nodes=2), "--ranks 3, but --nodes 2 x --ranks-per-node 1 = 2"),
        (Wanted(command=[*TRAIN, "--ranks", "3"], nodes=2), "--ranks 3, but --nodes 2 x --ranks-per-node 1 = 2"),
        (Wanted(command=["bench", "allreduce"], until_done=True), "goes with `train`, `run`, `infer` and `sweep`"),
        (Wanted(command=["doctor"], stage_env=True), "goes with `train`, `run` and `infer`"),
        (Wanted(command=TRAIN, time_s=30), "count in minutes"),
        (Wanted(command=TRAIN, time_s=60, warning_s=60), "less than --time"),
    ],
)
def test_what_does_not_fit_is_refused(wanted: Wanted, reported: str) -> None:
    with pytest.raises(UsageError, match=reported):
        plan_job(wanted)


def test_a_job_that_cannot_be_remembered_is_queued_all_the_same(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    """A job that cannot be recorded is still queued without an error: a user who sees a failure would resubmit."""
    program(tmp_path / "bin", "sbatch", "echo 4711")
    (tmp_path / "cache").touch()
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    finished = ask_hpcdl(["submit", "--", *TRAIN], env=env)
    assert (finished.code, finished.out) == (0, "4711\n"), finished.err
    assert "warning: job 4711 is queued, but cannot write to" in finished.err and "next:" not in finished.err


@pytest.mark.parametrize("words", [TRAIN, ["bench", "allreduce"]])
def test_jobs_submitted_in_one_second_have_folders_of_their_own(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a loop over learning rates: each job's run would else be refused when it starts, hours later."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(time, "localtime", lambda now: time.gmtime(0))
    program(tmp_path / "bin", "sbatch", "echo 4711")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    with ThreadPoolExecutor(4) as pool:
        made = [job for job, _ in pool.map(lambda _: submit_job(Wanted(command=words)), range(4))]
    assert len({job.folder for job in made}) == 4
    assert all(f"{job.run_dir}.job" == job.folder for job in made if job.run_dir)
    assert all(Path(job.folder, "job.sh").is_file() for job in made)


def test_a_file_that_asks_for_requeues_is_remembered(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    """Without it `hpcdl jobs` would call a job that Slurm has forgotten ended, though it may come back."""
    program(tmp_path / "bin", "sbatch", "echo 4711")
    site = tmp_path / "site.toml"
    site.write_text("[submit]\nuntil-done = true\n")
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HPCDL_SITE_CONFIG": str(site)}
    for number, flags in enumerate(([], ["--until-done"], ["--no-until-done"])):
        made = ask_hpcdl(["submit", "--json", *flags, "--", *TRAIN, "--run-dir", f"run-{number}"], env=env)
        assert made.json()["flags"] == (flags or ["--until-done"]), made.err


def test_submit_jobs_and_cancel_with_a_played_slurm(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    program(tools, "sbatch", f'cp "${{@: -1}}" {tmp_path}/taken.sh; echo "4711;cluster"')
    program(tools, "squeue", f"cat {tmp_path}/state")
    (tmp_path / "state").write_text("RUNNING None\n")
    program(tools, "scancel", f"echo $* > {tmp_path}/cancelled")
    env = {"PATH": f"{tools}:{os.environ['PATH']}"}
    asked = ["--time=20m", "--until-done", "--max-requeues=3", "--partition=long", "--batch-option=--nice=100"]
    line = ["submit", "--nodes", "2", *asked, "--", *TRAIN, "--run-dir", "my run"]
    dry = ask_hpcdl([*line[:1], "--dry-run", *line[1:]], env=env)
    assert dry.code == 0 and not (ask_hpcdl.home / "my run.job").exists() and not (tmp_path / "taken.sh").exists()
    finished = ask_hpcdl(line, env=env)
    assert (finished.code, finished.out) == (0, "4711\n"), finished.err
    assert (tmp_path / "taken.sh").read_text() == dry.out == (ask_hpcdl.home / "my run.job" / "job.sh").read_text()
    assert ask_hpcdl(["jobs", "--json"], env=env).json()["jobs"][0]["log_tail"] == ""
    (tmp_path / "state").write_text("FAILED NonZeroExitCode\n")
    tail = ask_hpcdl(["jobs", "--json"], env=env).json()["jobs"][0]["log_tail"]
    assert tail == f"no log: do its nodes see {ask_hpcdl.home / 'my run.job'}?"
    (tmp_path / "state").write_text("RUNNING None\n")
    run = ask_hpcdl.home / "my run"
    run.mkdir()
    events = '{"kind":"start","steps":9}\n{"kind":"step","step":3,"images_per_second":12.5,"loss":1.25}\n{"kin'
    (run / "metrics.jsonl").write_text(events)
    (ask_hpcdl.home / "my run.job" / "log-4711.txt").write_text("first\nlast word\n\n")
    view = ask_hpcdl(["jobs", "--json"], env=env).json()["jobs"][0]
    assert (view["state"], view["step"], view["steps"], view["loss"]) == ("running", 3, 9, 1.25)
    assert view["log_tail"] == "last word"
    shown = ask_hpcdl(["jobs", "4711"], env=env).out
    assert "3/9" in shown and "12.5 images/s" in shown
    counted = events.replace('"steps":9', '"steps":9,"counted":"samples"')
    (run / "metrics.jsonl").write_text(f'{counted[:-5]}{{"kind":"epoch","step":9,"loss":0.5}}\n')
    assert "12.5 samples/s" in ask_hpcdl(["jobs", "4711"], env=env).out
    view = ask_hpcdl(["jobs", "4711", "--json"], env=env).json()["jobs"][0]
    assert (view["step"], view["loss"], view["images_per_second"]) == (9, 0.5, 12.5)
    (tmp_path / "state").write_text("PENDING QOSMaxNodePerUserLimit\n")
    shown = ask_hpcdl(["jobs"], env=env)
    assert "pending: QOSMaxNodePerUserLimit" in shown.out and "cannot start" not in shown.err
    (tmp_path / "state").write_text("PENDING PartitionTimeLimit\n")
    doubt = "warning: job 4711 cannot start as asked (PartitionTimeLimit): cancel it"
    assert doubt in ask_hpcdl(["jobs"], env=env).err
    (tmp_path / "state").write_text("TIMEOUT TimeLimit\n")
    ended = ask_hpcdl(["cancel", "4711"], env=env)
    assert (ended.code, ended.out) == (0, "job 4711 had ended before: timeout\n") and not (
        tmp_path / "cancelled"
    ).exists()
    (tmp_path / "state").write_text("RUNNING None\n")
    cancelled = ask_hpcdl(["cancel", "4711"], env=env)
    assert cancelled.out == "cancelled job 4711\n"
    words = shlex.split(cancelled.err.partition("to continue: hpcdl ")[2])
    again = ask_hpcdl([*words[:1], "--dry-run", *words[1:]], env=env)
    assert (again.code, again.out) == (0, dry.out), again.err
    assert f"{shlex.join(TRAIN)} --run-dir 'my run' --ranks 2 --resume\n" in again.out
    elsewhere = ask_hpcdl(["cancel", "4711"], env=env, cwd=tmp_path)
    assert f"to continue: cd {shlex.quote(str(ask_hpcdl.home))} && hpcdl submit" in elsewhere.err
    assert (tmp_path / "cancelled").read_text() == "4711\n"
    # The job is not requeued, but the next one of its run is.
    mark = next(text for text in again.out.splitlines() if text.startswith("cancelled="))
    for number, code in (("4711", 0), ("4712", 1)):
        shell = ["bash", "-c", f'SLURM_JOB_ID={number}; {mark}; test -e "$cancelled"']
        assert subprocess.run(shell, check=False).returncode == code
    record = {"schema": "hpcdl.run/1", "status": "finished", "environment": {"SLURM_JOB_ID": "4711"}}
    (run / "record.json").write_text(json.dumps(record))
    (tmp_path / "state").write_text("COMPLETED None\n")
    assert ask_hpcdl(["cancel", "4711"], env=env).err == f"next: hpcdl report {shlex.quote(str(run))}\n"
    (run / "record.json").unlink()
    unknown = ask_hpcdl(["cancel", "1"], env=env)
    assert unknown.code == 2 and "4711" in unknown.err
    (tmp_path / "state").write_text("PENDING PartitionTimeLimit\n")
    assert doubt in ask_hpcdl([*line[:-1], "another run"], env=env).err


def test_a_job_shows_its_own_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "squeue", "echo COMPLETED None")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    run = tmp_path / "run"
    run.mkdir()
    first, second = (
        jobs.Job(
            number=number, system="slurm", name="n", folder=str(tmp_path), command=("train",), nodes=1, ranks=1,
            run_dir=str(run), submitted_at=at,
        )
        for number, at in (("1", 100.0), ("2", 200.0))
    )  # fmt: skip
    record = {"schema": "hpcdl.run/1", "status": "finished", "environment": {"SLURM_JOB_ID": "2"}}
    (run / "record.json").write_text(json.dumps(record))
    early = [{"kind": "start", "steps": 44, "at": 110.0, "job": "1"}, {"kind": "step", "step": 3}]
    late = [{"kind": "start", "steps": 44, "at": 210.0, "job": "2"}, {"kind": "epoch", "step": 44}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in early + late))
    assert [(view.step, view.run_state) for view in map(jobs.look, (first, second))] == [(3, ""), (44, "finished")]
    for event in early + late:
        event.pop("job", None)
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in early + late))
    assert jobs.look(second).step == 44
    (run / "metrics.jsonl").write_text(json.dumps({"kind": "start", "steps": 44, "job": "2"}) + "\n")
    job = {"strategy": "ring", "model": "lenet", "data": "d", "batch_per_rank": 1, "global_batch": 1}
    numbers = {"ranks": 1, "workers": 1, "servers": 0, "nodes": 1, "ranks_per_node": 1}
    (run / "record.json").write_text(json.dumps({**record, **job, **numbers, "status": "stopped", "steps": 21}))
    assert jobs.look(second).step == 21, "the journal notes steps twice a second"


@pytest.mark.parametrize(
    ("status", "flags", "state"),
    [
        ("finished", (), "ended"), ("failed", ("--until-done",), "ended"), ("stopped", ("--time=1h",), "ended"),
        ("stopped", ("--until-done",), "unknown"), ("running", (), "unknown"),
    ],
)  # fmt: skip
def test_a_job_that_slurm_has_forgotten_ended_if_its_run_did(
    status: str, flags: tuple[str, ...], state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("squeue", "sacct"):  # a cluster without accounting
        program(tmp_path / "bin", name, "echo Invalid job id specified >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    job = jobs.Job(
        number="1", system="slurm", name="n", folder=str(tmp_path), command=("train",), nodes=1, ranks=1,
        run_dir=str(tmp_path), flags=flags,
    )  # fmt: skip
    record = {"schema": "hpcdl.run/1", "status": status, "environment": {"SLURM_JOB_ID": "1"}}
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert jobs.look(job).state == state
    (tmp_path / "record.json").write_text(json.dumps({**record, "environment": {"SLURM_JOB_ID": "2"}}))
    assert jobs.look(job).state == "unknown", "the record is of another job"


PENDING_PBS = """Job Id: 7.pbs
    job_state = Q
    comment = Not Running: Insufficient amount of resource: ncpus (R: 64 A: 12
\t T: 128)
    Variable_List = A=b
"""


@pytest.mark.parametrize(
    ("answer", "state", "reason"),
    [
        (PENDING_PBS, "pending", "Not Running: Insufficient amount of resource: ncpus (R: 64 A: 12 T: 128)"),
        ("    job_state = R\n    comment = Job run at Mon\n", "running", ""),
        ("    job_state = F\n", "completed", ""),
    ],
)
def test_pbs_says_why_a_job_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, state: str, reason: str
) -> None:
    (tmp_path / "answer").write_text(answer)
    program(tmp_path / "bin", "qstat", f"cat {tmp_path}/answer")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    found = find_system("pbs").look("7.pbs")
    assert (found.state, found.reason) == (state, reason)


def test_a_batch_system_that_says_no(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    program(tmp_path / "bin", "sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    finished = ask_hpcdl(["submit", "--partition", "x", "--", *TRAIN], env=env)
    assert finished.code == 1 and "invalid partition" in finished.err
    finished = ask_hpcdl(["submit", "--", "trian"], env=env)
    assert finished.code == 2 and "did you mean 'train'" in finished.err
    assert ask_hpcdl(["jobs"]).code == 0


def test_jobs_that_are_damaged_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    job = jobs.Job(number="12.server", system="pbs", name="n", folder="f", command=("x",), nodes=1, ranks=1)
    jobs.remember(job)
    (jobs.folder() / "slurm-1.json").write_text("{")
    assert jobs.known_jobs() == [job] and jobs.find_job("12") == job
    with pytest.raises(UnknownNameError):
        find_system("cobalt")
    with pytest.raises((UsageError, HpcdlError), match="job 13"):
        jobs.find_job("13")


@pytest.mark.parametrize(
    ("command", "variable", "answer", "own"),
    [
        ("scontrol", "SLURM_JOB_ID", "JobId=77 OverSubscribe=NO Contiguous=0", True),
        ("scontrol", "SLURM_JOB_ID", "JobId=77 OverSubscribe=USER Contiguous=0", True),
        ("scontrol", "SLURM_JOB_ID", "JobId=77 OverSubscribe=OK Contiguous=0", False),
        ("scontrol", "SLURM_JOB_ID", "JobId=77 OverSubscribe=YES Contiguous=0", False),
        ("qstat", "PBS_JOBID", "    Resource_List.place = scatter:excl", True),
        ("qstat", "PBS_JOBID", "    Resource_List.place = exclhost", True),
        ("qstat", "PBS_JOBID", "    Resource_List.place = scatter:shared", False),
        ("qstat", "PBS_JOBID", "    Variable_List = place=excl", False),
    ],
)
def test_whose_nodes_a_job_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, variable: str, answer: str, own: bool
) -> None:
    (tmp_path / command).write_text(f"#!/bin/sh\necho '{answer}'\n")
    (tmp_path / command).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert has_own_nodes({variable: "77"}) is own
    assert not has_own_nodes({})

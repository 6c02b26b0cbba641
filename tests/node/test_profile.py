from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcdl.core.errors import ConfigError, UsageError
from hpcdl.node.engine import installed
from hpcdl.node.profile import Profile, Settings, TrialSummary, file_name, find_profile, read_profile, write_profile
from hpcdl.node.topology import Topology

Machine = Callable[[str], Topology]


def profile_for(topology: Topology, model: str = "resnet50", created_at: str = "2026-01-01T00:00:00Z") -> Profile:
    return Profile(
        settings=Settings(ranks_per_node=2, intra_op_threads=14, binding="numa", onednn=False),
        machine="c101", processor=topology.processor, fingerprint=topology.fingerprint, num_cores=len(topology.cores),
        model=model, batch_size=32, images_per_second=120.5, ci95=1.25, n=5, created_at=created_at,
        software={"tensorflow": "2.21.0"},
        trials=(TrialSummary(settings={"ranks_per_node": 2}, status="ok", n=5, images_per_second=120.5, ci95=1.25),
                TrialSummary(settings={"ranks_per_node": 4}, status="failed", message='exit code 1: "a\\b"\n')),
    )  # fmt: skip


def test_profiles_round_trip(machine: Machine, tmp_path: Path) -> None:
    profile = profile_for(machine("generic"))
    path = tmp_path / "deep" / file_name(profile)
    write_profile(profile, path)
    assert dataclasses.replace(read_profile(path), path=None) == profile
    assert tomllib.loads(path.read_text())["schema"] == "hpcdl.profile/1"


def test_file_names_are_plain(machine: Machine) -> None:
    profile = profile_for(machine("generic"), model="../a b;$(x).py:build")
    assert file_name(profile).endswith("-a-b-x-.py-build.toml")
    assert "/" not in file_name(profile)


def test_none_means_none(machine: Machine, tmp_path: Path) -> None:
    write_profile(profile_for(machine("generic")), tmp_path / "p.toml")
    assert find_profile("none", "resnet50", machine("generic"), [tmp_path]) is None


def test_auto_prefers_this_node_and_model_then_the_newest(machine: Machine, tmp_path: Path) -> None:
    topology = machine("generic")
    write_profile(profile_for(topology, "lenet", "2026-03-01T00:00:00Z"), tmp_path / "a.toml")
    write_profile(profile_for(topology, "resnet50", "2026-01-01T00:00:00Z"), tmp_path / "b.toml")
    write_profile(profile_for(topology, "resnet50", "2026-02-01T00:00:00Z"), tmp_path / "c.toml")
    (tmp_path / "broken.toml").write_text("this is no TOML")
    found = find_profile("auto", "resnet50", topology, [tmp_path])
    assert found is not None
    assert found.path == tmp_path / "c.toml"
    other = find_profile("auto", "hepcnn", topology, [tmp_path])
    assert other is not None
    assert other.model == "lenet"
    assert "there is none for hepcnn" in other.sentence


def test_what_makes_a_profile_less_than_sure_is_reported(machine: Machine, tmp_path: Path) -> None:
    """The report names doubts about a profile: its search stopped early, or TensorFlow has changed."""
    topology = machine("generic")
    package, version = installed()
    settled = dataclasses.replace(profile_for(topology), verdict="settled; ...", engine=f"{package} {version} (own)")
    changes = {
        "a": {"verdict": "stopped before it settled; best with probability 0.02"},
        "b": {"engine": f"{package} 2.1.0 (own)"},
        "c": {},
    }
    for name, own in changes.items():
        write_profile(dataclasses.replace(settled, **own), tmp_path / f"{name}.toml")  # type: ignore[arg-type]
    reported = [find_profile(str(tmp_path / f"{name}.toml"), "resnet50", topology).sentence for name in "abc"]  # type: ignore[union-attr]
    assert "; its search stopped before it settled; best with probability 0.02; " in reported[0]
    assert f"; tuned under {package} 2.1.0, here is {version}: tune again; " in reported[1]
    assert "tuned" not in reported[2] and "search" not in reported[2]


def test_no_network_is_none_that_a_profile_could_lack(machine: Machine, tmp_path: Path) -> None:
    write_profile(profile_for(machine("generic")), tmp_path / "p.toml")
    found = find_profile("auto", "", machine("generic"), [tmp_path])
    assert found is not None and "there is none" not in found.sentence


def test_auto_takes_the_nearest_and_says_so_but_no_other_machine(machine: Machine, tmp_path: Path) -> None:
    write_profile(profile_for(machine("stampede2-knl-quadrant-cache")), tmp_path / "p.toml")
    near = find_profile("auto", "resnet50", machine("stampede2-knl-quadrant-flat"), [tmp_path])
    assert near is not None
    assert "nearest" in near.sentence
    assert find_profile("auto", "resnet50", machine("theta-knl"), [tmp_path]) is None


def test_a_named_profile_of_another_machine_is_used_and_reported(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    write_profile(profile_for(machine("theta-knl")), path)
    found = find_profile(str(path), "resnet50", machine("generic"))
    assert found is not None
    assert "tuned on another node type" in found.sentence


def test_auto_takes_what_was_tuned_with_the_gpus_that_the_node_shows(
    machine: Machine, gpu_node: Topology, tmp_path: Path
) -> None:
    bare, one = machine("stampede2-skx"), dataclasses.replace(gpu_node, devices={"NVIDIA H200": 1})
    tuned = dataclasses.replace(profile_for(gpu_node), devices=gpu_node.devices)
    path = tmp_path / file_name(tuned)
    write_profile(tuned, path)
    assert dataclasses.replace(read_profile(path), path=None) == tuned
    found = find_profile("auto", "resnet50", gpu_node, [tmp_path])
    assert found is not None and "on this node type with 4 x NVIDIA H200 for resnet50" in found.sentence
    for other, here in ((bare, "here is no GPU"), (one, "here are 1 x NVIDIA H200")):
        assert find_profile("auto", "resnet50", other, [tmp_path]) is None
        named = find_profile(str(path), "resnet50", other)
        assert named is not None and f"named by you, though tuned with 4 x NVIDIA H200 ({here})" in named.sentence


def test_what_was_tuned_on_the_cpus_of_a_node_with_gpus_is_the_second_choice(
    machine: Machine, gpu_node: Topology, tmp_path: Path
) -> None:
    """On a node with GPUs, a profile tuned on its CPUs is the second choice: TensorFlow may not see the GPUs."""
    on_cpus = profile_for(machine("stampede2-skx"), created_at="2026-09-01T00:00:00Z")
    write_profile(on_cpus, tmp_path / file_name(on_cpus))
    found = find_profile("auto", "resnet50", gpu_node, [tmp_path])
    assert found is not None and "on this node type on its CPUs alone (here are 4 x NVIDIA H200)" in found.sentence
    with_gpus = dataclasses.replace(profile_for(gpu_node, "lenet"), devices=gpu_node.devices)
    write_profile(with_gpus, tmp_path / file_name(with_gpus))
    found = find_profile("auto", "resnet50", gpu_node, [tmp_path])
    assert found is not None and found.devices == gpu_node.devices and "there is none for resnet50" in found.sentence


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema = 1", "has schema 1"),
        ('schema = "hpcdl.profile/1"', "no table [settings]"),
        ("= broken", "not valid TOML"),
        ('schema = "hpcdl.profile/1"\nmachine = "m"\n[settings]\nbinding = "none"', "is missing"),
    ],
)
def test_damaged_profiles_say_what_is_wrong(text: str, words: str, tmp_path: Path, machine: Machine) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        find_profile(str(path), "m", machine("generic"))
    assert words in str(caught.value)


def test_wrong_types_are_damage(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    write_profile(profile_for(machine("generic")), path)
    path.write_text(path.read_text().replace("num_cores = 32", 'num_cores = "many"'))
    with pytest.raises(UsageError, match="num_cores is 'many'"):
        read_profile(path)


def test_raw_environment_is_refused(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    write_profile(profile_for(machine("generic")), path)
    path.write_text(path.read_text().replace("[settings]", '[settings]\nLD_PRELOAD = "/tmp/evil.so"'))
    with pytest.raises(ConfigError, match="unknown setting 'LD_PRELOAD'"):
        read_profile(path)


def test_an_absent_file(machine: Machine) -> None:
    with pytest.raises(UsageError, match="no such config file"):
        find_profile("absent.toml", "m", machine("generic"))


def test_no_space_left_names_the_file(machine: Machine) -> None:
    """The error names the file if writing fails, as on /dev/full or below a device."""
    with pytest.raises(UsageError, match=r"cannot write profile .*choose another with --out"):
        write_profile(profile_for(machine("generic")), Path("/dev/full/p.toml"))


def test_a_failed_write_leaves_nothing(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write_profile(profile_for(machine("generic")), tmp_path / "p.toml")
    assert list(tmp_path.iterdir()) == []

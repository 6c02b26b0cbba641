import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.config.load import (
    Layer,
    all_settings,
    as_toml_values,
    file_layer,
    flag_layer,
    load,
    replace,
    set_layer,
    standard_layers,
)
from hpcdl.config.schema import TrainConfig
from hpcdl.config.settings import Setting
from hpcdl.core.errors import ConfigError, UsageError
from hpcdl.core.storage.files import toml_text
from tests.conftest import CommandLine

NEEDED = {"model": "lenet", "data": "shards"}


def test_defaults_site_user_file_flags_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, home, file = tmp_path / "site.toml", tmp_path / "home", tmp_path / "run.toml"
    site.write_text("[train]\nseed = 1\nbatch-size = 1\nepochs = 1\nlearning-rate = 0.1\n")
    (home / "hpcdl").mkdir(parents=True)
    (home / "hpcdl" / "config.toml").write_text("[train]\nbatch_size = 2\nepochs = 2\nlearning-rate = 0.2\n")
    file.write_text("epochs = 3\nlearning-rate = 0.3\n")
    monkeypatch.setenv("HPCDL_SITE_CONFIG", str(site))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    layers = [*standard_layers("train"), file_layer(file), flag_layer({**NEEDED, "learning-rate": "0.4"})]
    found = load(TrainConfig, layers)
    config = found.config
    assert (config.run.seed, config.data.batch_size, config.run.epochs) == (1, 2, 3)
    assert config.optimizer.learning_rate == 0.4
    assert found.origins["seed"] == f"site ({site})"
    assert found.origins["batch-size"].startswith("user (")
    assert found.origins["epochs"] == f"file ({file})"
    assert found.origins["learning-rate"] == "flag"
    assert found.origins["strategy"] == "default"


def test_all_mistakes_at_once_each_with_its_remedy() -> None:
    flags = flag_layer({"ranks": "0", "batch-size": "many", "optimizer": "adamw"})
    with pytest.raises(ConfigError) as caught:
        load(TrainConfig, [Layer(origin="file (x)", values={"epoch": 3}), flags])
    text = "\n".join(caught.value.problems)
    assert "file (x): unknown key 'epoch'; here it is epochs" in text
    assert "--ranks: 0 is out of range; it must be at least 1" in text
    assert "--batch-size: 'many' is not a whole number" in text
    assert "--optimizer: 'adamw' is not one of sgd, momentum, nesterov, adam, lars" in text
    assert "--model is needed" in text
    assert "--data is needed" in text
    assert len(caught.value.problems) == 6


@pytest.mark.parametrize("given", ["98%", "98 %", "0.98", 0.98])
def test_an_accuracy_is_a_percentage_or_a_share(given: object) -> None:
    config = load(TrainConfig, [Layer(origin="file (x)", values={**NEEDED, "target-accuracy": given})]).config
    assert config.objective.target_accuracy == 0.98


@pytest.mark.parametrize("given", ["98", 98, "0.98%", "0", "-1%", "101%", "nan%", "%", "high", True])
def test_what_may_be_another_accuracy_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=r"98% or 0\.98|not a number|not a finite number"):
        load(TrainConfig, [Layer(origin="file (x)", values={**NEEDED, "target-accuracy": given})])


def test_an_unknown_key_names_the_nearest_of_many_and_a_table_is_no_key() -> None:
    with pytest.raises(ConfigError) as caught:
        load(TrainConfig, [Layer(origin="file (x)", values={**NEEDED, "lerning-rate": 1, "train": {"epochs": 3}})])
    unknown, table = caught.value.problems
    assert unknown.startswith(
        "file (x): unknown key 'lerning-rate'; did you mean 'learning-rate'? known: learning-rate,"
    )
    assert re.search(r"and \d\d more$", unknown) and len(unknown) < 150
    assert table == "file (x): [train] is a table, but this file has none; write keys alone, such as epochs = 5"
    with pytest.raises(ConfigError) as caught:
        load(TrainConfig, [Layer(origin="s.toml", values={**NEEDED, "trian": {}}, tables=("matrix", "train"))])
    assert [*caught.value.problems] == ["s.toml: unknown table [trian]; did you mean 'train'? known: matrix, train"]
    with pytest.raises(ConfigError) as caught:
        load(TrainConfig, [Layer(origin="s.toml", values={**NEEDED, "run": {"epochs": 5}}, tables=("matrix", "train"))])
    assert [*caught.value.problems] == [
        "s.toml: [run] is no table of this file; write epochs above all tables, without [run]"
    ]


@pytest.mark.parametrize("number", ["nan", "inf", "-1", "0", "x"])
def test_a_learning_rate_is_a_positive_number(number: str) -> None:
    with pytest.raises(ConfigError, match="learning-rate"):
        load(TrainConfig, [flag_layer({**NEEDED, "learning-rate": number})])


def test_a_mistake_in_toml_is_given_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("epochs = 3\nbatch-size =\n")
    with pytest.raises(UsageError, match=r"line 2, column 13"):
        file_layer(path)
    with pytest.raises(UsageError, match="no such config file"):
        file_layer(tmp_path / "missing.toml")


def test_set_takes_key_equals_value() -> None:
    assert load(TrainConfig, [flag_layer(NEEDED), set_layer(["seed=7"])]).config.run.seed == 7
    with pytest.raises(UsageError, match="write --set key=value"):
        set_layer(["seed"])


def test_a_setting_is_replaced_whatever_its_group() -> None:
    config = load(TrainConfig, [flag_layer(NEEDED)]).config
    changed = replace(config, ranks=4, learning_rate=0.5)
    assert (changed.run.ranks, changed.optimizer.learning_rate) == (4, 0.5)
    with pytest.raises(TypeError, match="no such settings: rank"):
        replace(config, rank=4)


def test_every_setting_has_a_sentence_and_a_key_of_its_own() -> None:
    settings = all_settings(TrainConfig)
    keys = [item.key for item in settings]
    assert len(keys) == len(set(keys))
    assert all(item.help.endswith(".") and item.help[0].isupper() for item in settings)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(0, 2**31),
            "learning-rate": st.floats(1e-6, 10.0),
            "bucket-size": st.integers(1, 2**40) | st.just("auto"),
            "time-limit": st.floats(0.5, 1e6),
            "deterministic": st.booleans(),
            "compress": st.sampled_from(["none", "fp16", "bf16", "int8", "topk:0.5%", "powersgd:4"]),
            "run-dir": st.text("abc/ $(x);'\"é", min_size=1, max_size=12),
        },
    )
)
def test_a_config_survives_toml(values: dict[str, object]) -> None:
    config = load(TrainConfig, [Layer(origin="test", values={**NEEDED, **values})]).config
    text = toml_text(as_toml_values(config))
    again = load(TrainConfig, [Layer(origin="test", values=tomllib.loads(text))]).config
    assert again == config


@pytest.mark.parametrize("item", all_settings(TrainConfig), ids=lambda item: item.key)
def test_every_setting_of_a_run_says_what_it_changes(item: Setting) -> None:
    assert item.matters is not None, f"declare matters=RESULT, EXTENT, TIME or NOTHING for {item.name} in schema.py"


def test_a_list_is_given_by_commas_or_by_repeating(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    words = ["train", "--model", "lenet", "--data", "synthetic:mnist", "--run-dir", tmp_path / "run", "--resume"]
    for allowed in (["--allow", "seed,dtaa"], ["--allow", "seed", "--allow", "dtaa"]):
        refused = ask_hpcdl([*words, *allowed])
        assert refused.code == 2 and "unknown setting of --allow 'dtaa'; did you mean 'data'?" in refused.err


def test_a_key_spelt_in_both_ways_is_one_setting_given_twice(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("learning_rate = 0.1\nlearning-rate = 3\n")
    with pytest.raises(UsageError, match="learning_rate and learning-rate are one setting, given twice"):
        file_layer(config)

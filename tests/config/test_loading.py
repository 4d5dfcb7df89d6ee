"""From a file and overrides to a Config: what is taken, and the exact sentence for what is not."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dflash_cache.config.loading import dump_config, load_config, validate_config
from dflash_cache.config.settings import Config
from dflash_cache.config.sweep import load_sweep
from dflash_cache.errors import ConfigError

LEAST = """
cache_dir: cache
run_dir: run
target: {model: some/model}
data: {paths: [a.jsonl]}
"""


def least(**sections: dict[str, Any]) -> dict[str, Any]:
    """The least configuration as plain values, with `sections` laid over its own."""
    tree = yaml.safe_load(LEAST)
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return tree


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(LEAST)
    return path


def refusal(file: Path, *overrides: str) -> str:
    """The message without its common opening."""
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return str(caught.value).removeprefix(f"The configuration {file} is wrong: ")


def test_a_file_gives_its_values_and_the_defaults_for_the_rest(file: Path) -> None:
    config = load_config(file)
    assert (config.cache_dir, config.run_dir) == ("cache", "run")
    assert (config.target.model, config.data.paths) == ("some/model", ("a.jsonl",))
    assert config == Config(
        cache_dir="cache", run_dir="run", target={"model": "some/model"}, data={"paths": ["a.jsonl"]}
    )
    assert config.train == type(config.train)()


def test_an_override_outranks_the_file_and_the_last_one_the_others(file: Path) -> None:
    file.write_text(LEAST + "train: {seed: 1, epochs: 2}\n")
    train = load_config(file, ["train.seed=3", "train.seed=4"]).train
    assert (train.seed, train.epochs) == (4, 2)


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("train.learning_rate=1e-3", "train", "learning_rate", 0.001),
        ("train.max_steps=7", "train", "max_steps", 7),
        ("train.verify_checksums=false", "train", "verify_checksums", False),
        ("train.betas=[0.8, 0.99]", "train", "betas", (0.8, 0.99)),
        ("target.layer_ids=[0, 2, 4]", "target", "layer_ids", (0, 2, 4)),
        ("target.revision=null", "target", "revision", None),
        ("target.model=/folder/with=sign", "target", "model", "/folder/with=sign"),
        ("data.paths=[b.jsonl, c.jsonl]", "data", "paths", ("b.jsonl", "c.jsonl")),
        ("wandb.name='2024-01-01'", "wandb", "name", "2024-01-01"),
        (" wandb.name = two words ", "wandb", "name", "two words"),
        ("respond.enabled=yes", "respond", "enabled", True),
    ],
)
def test_an_overrides_value_has_the_type_that_yaml_gives_it(
    file: Path, override: str, section: str, name: str, value: object
) -> None:
    found = getattr(getattr(load_config(file, [override]), section), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("devices", ["0", "0,1", "cpu:2", "all"])
def test_devices_are_taken_as_they_are_written_though_yaml_reads_a_lone_one_as_a_number(
    file: Path, devices: str
) -> None:
    assert load_config(file, [f"generate.devices={devices}"]).generate.devices == devices


def test_an_override_reaches_the_top_a_section_of_the_file_and_one_the_file_lacks(file: Path) -> None:
    config = load_config(file, ["cache_dir=elsewhere", "data.max_length=64", "eval.max_prompts=3", "eval.device=cpu"])
    assert (config.cache_dir, config.data.max_length, config.data.paths) == ("elsewhere", 64, ("a.jsonl",))
    assert (config.eval.max_prompts, config.eval.device) == (3, "cpu")


def test_a_whole_section_can_be_set_at_once_and_replaces_what_the_file_said(file: Path) -> None:
    file.write_text(LEAST + "train: {seed: 1, epochs: 2}\n")
    train = load_config(file, ["train={seed: 5}"]).train
    assert (train.seed, train.epochs) == (5, 6)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.lerning_rate=1", "there is no setting train.lerning_rate; did you mean train.learning_rate?"),
        ("tran.seed=1", "there is no setting tran; did you mean train?"),
        ("drafter.epochs=3", "there is no setting drafter.epochs; did you mean train.epochs?"),
        ("learning_rate=3", "there is no setting learning_rate; did you mean train.learning_rate?"),
        ("wandb.zzz=1", "there is no setting wandb.zzz; known here: mode, project, name, group"),
        ("objective.zzz.deep=1", "there is no setting objective.zzz; known here: weights, gamma, streak_alpha"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_that_exists(file: Path, override: str, sentence: str) -> None:
    assert refusal(file, override).startswith(sentence)


def test_an_unknown_key_in_the_file_is_refused_like_one_of_an_override(file: Path) -> None:
    file.write_text(LEAST + "generate: {shard_byte: 3}\n")
    assert refusal(file).startswith("there is no setting generate.shard_byte; did you mean generate.shard_bytes?")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "train.epochs=many",
            "train.epochs: input should be a valid integer, unable to parse string as an integer (found 'many').",
        ),
        ("train.epochs=true", "train.epochs: must not be true or false (found True)."),
        ("train.epochs=0", "train.epochs: input should be greater than 0 (found 0)."),
        (
            "train.epochs=2.5",
            "train.epochs: input should be a valid integer, got a number with a fractional part (found 2.5).",
        ),
        ("train.learning_rate=.nan", "train.learning_rate: input should be a finite number (found nan)."),
        ("train.validation_share=1", "train.validation_share: input should be less than 1 (found 1)."),
        ("train.betas=[0.9]", "train.betas.1 is missing."),
        ("drafter.block_size=1", "drafter.block_size: input should be greater than or equal to 2 (found 1)."),
        ("target.dtype=float64", "target.dtype: input should be 'float32', 'bfloat16' or 'float16' (found 'float64')."),
        ("target.layer_ids=[3, 1]", "target.layer_ids: must be ascending, without repeats (found [3, 1])."),
        ("target.layer_ids=[1, 1]", "target.layer_ids: must be ascending, without repeats (found [1, 1])."),
        ("data.paths=a.jsonl", "data.paths: must be a list (found 'a.jsonl')."),
        ("cache_dir=7", "cache_dir: input should be a valid string (found 7)."),
    ],
)
def test_a_wrong_value_is_told_with_its_key_the_rule_and_what_was_found(
    file: Path, override: str, sentence: str
) -> None:
    assert refusal(file, override) == sentence


@pytest.mark.parametrize("override", ["target.layer_ids=[]", "target.layer_ids=[-1, 2]", "train=3", "eval=null"])
def test_other_impossible_values_are_config_errors_that_name_their_key(file: Path, override: str) -> None:
    assert refusal(file, override).startswith(override.partition("=")[0])


def test_all_mistakes_are_told_at_once(file: Path) -> None:
    file.write_text("cache_dir: cache\ntrain: {seed: -1}\n")
    told = refusal(file)
    for part in ("run_dir is missing", "target is missing", "data is missing", "train.seed: input should be greater"):
        assert part in told


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.seed", "--set 'train.seed' is not of the form section.key=value."),
        ("=3", "--set '=3' is not of the form section.key=value."),
        ("train..seed=3", "--set 'train..seed=3' is not of the form section.key=value."),
        ("train.seed=[1", "--set 'train.seed=[1': the value is not valid YAML; quote it."),
        ("cache_dir.x=3", "--set 'cache_dir.x=3': cache_dir holds a text, not a section."),
        ("data.paths.0=b", "--set 'data.paths.0=b': paths holds a list, not a section."),
    ],
)
def test_a_malformed_override_is_told_whole(file: Path, override: str, sentence: str) -> None:
    assert refusal(file, override) == sentence


@pytest.mark.parametrize(
    ("content", "ending"),
    [
        (b"", "must hold keys and values at its top, not nothing."),
        (b"- a", "must hold keys and values at its top, not a list."),
        (b"words", "must hold keys and values at its top, not a text."),
        (b"3.5", "must hold keys and values at its top, not a number."),
        (b"true", "must hold keys and values at its top, not a truth value."),
        (b"cache_dir: \xff", "is not UTF-8 text (invalid start byte); save it as UTF-8."),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(file: Path, content: bytes, ending: str) -> None:
    file.write_bytes(content)
    assert refusal(file) == f"The configuration {file} {ending}"


def test_malformed_yaml_is_told_on_one_line_with_its_place(file: Path) -> None:
    file.write_text("train: [1,\nrun_dir: x")
    told = refusal(file)
    assert told.startswith(f"The configuration {file} is not valid YAML: ")
    assert "line 2" in told
    assert "\n" not in told


def test_a_missing_file_and_a_folder_are_told(tmp_path: Path) -> None:
    missing = tmp_path / "no.yaml"
    assert refusal(missing) == f"There is no configuration file {missing}; name an existing YAML file."
    assert refusal(tmp_path) == f"The configuration {tmp_path} cannot be read: Is a directory."


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"target": {"layer_ids": [1, 5], "revision": "main"}, "data": {"bucket_bounds": [7, 2048]}},
        {"train": {"learning_rate": 1e-5, "betas": [0.1, 0.2], "max_steps": 3}, "wandb": {"name": "Größe: 2024-01-01"}},
        {"objective": {"weights": "streak", "gamma": 3.25}, "eval": {"prompts": ["a: b.jsonl", "null"]}},
    ],
)
def test_a_dumped_config_loads_to_an_equal_one(tmp_path: Path, sections: dict[str, Any]) -> None:
    config = validate_config(least(**sections), "test")
    path = tmp_path / "dumped.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config


def test_a_dump_names_every_setting_in_the_order_of_the_settings() -> None:
    tree = yaml.safe_load(dump_config(validate_config(least(), "test")))
    assert list(tree) == list(Config.model_fields)
    for name, section in tree.items():
        if isinstance(section, dict):
            assert list(section) == list(Config.model_fields[name].annotation.model_fields)


def test_settings_cannot_be_changed() -> None:
    config = validate_config(least(), "test")
    with pytest.raises(ValidationError, match="frozen"):
        config.cache_dir = "other"
    with pytest.raises(ValidationError, match="frozen"):
        config.train.seed = 1
    with pytest.raises(ValidationError, match="frozen"):
        del config.train.seed


@given(bounds=st.lists(st.integers(-2, 40), max_size=5), max_length=st.integers(1, 40))
def test_bucket_bounds_are_taken_exactly_if_positive_ascending_and_ending_with_max_length(
    bounds: list[int], max_length: int
) -> None:
    tree = least(data={"bucket_bounds": bounds, "max_length": max_length})
    allowed = bounds[-1:] == [max_length] and bounds[0] > 0 and all(a < b for a, b in pairwise(bounds))
    if allowed:
        assert validate_config(tree, "test").data.bucket_bounds == tuple(bounds)
    else:
        with pytest.raises(ConfigError, match="bucket_bounds"):
            validate_config(tree, "test")


@given(st.lists(st.integers(-1, 9), max_size=5))
def test_layer_ids_are_taken_exactly_if_there_are_some_and_they_ascend_from_zero(layer_ids: list[int]) -> None:
    tree = least(target={"layer_ids": layer_ids})
    if layer_ids and layer_ids[0] >= 0 and all(a < b for a, b in pairwise(layer_ids)):
        assert validate_config(tree, "test").target.layer_ids == tuple(layer_ids)
    else:
        with pytest.raises(ConfigError, match=r"target\.layer_ids"):
            validate_config(tree, "test")


def test_the_sentence_on_bucket_bounds_says_where_they_must_end(file: Path) -> None:
    told = refusal(file, "data.bucket_bounds=[100, 200]")
    assert "bucket_bounds must end with max_length (2048)" in told
    assert "bucket_bounds must be ascending, without repeats" in refusal(file, "data.bucket_bounds=[3, 2]")


CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
NUM_RUNS = {"sweep": 4, "objectives": 36}  # of the files that are sweeps


@pytest.mark.parametrize("path", [path for path in CONFIGS if path.stem not in NUM_RUNS], ids=lambda path: path.stem)
def test_every_configuration_that_ships_is_valid_and_names_its_target_and_folders(path: Path) -> None:
    config = load_config(path)
    given = yaml.safe_load(path.read_text())
    assert (config.target.model, config.cache_dir, config.run_dir) == (
        given["target"]["model"],
        given["cache_dir"],
        given["run_dir"],
    )


@pytest.mark.parametrize("path", [path for path in CONFIGS if path.stem in NUM_RUNS], ids=lambda path: path.stem)
def test_every_sweep_that_ships_is_valid(path: Path) -> None:
    sweep = load_sweep(path)
    assert len({run.config.run_dir for run in sweep.runs}) == len(sweep.runs) == NUM_RUNS[path.stem]

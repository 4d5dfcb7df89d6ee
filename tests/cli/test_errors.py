"""A user's mistake ends in one sentence that says what, where and what to do; exit code 2, no traceback."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from rich.console import Console


def check(outcome, *parts: str) -> None:
    """Exit code 2 and one line on stderr that holds all parts."""
    assert outcome.code == 2, outcome
    assert outcome.err.startswith("Error: ")
    assert outcome.err.count("\n") == 1
    assert "Traceback" not in outcome.err
    for part in parts:
        assert part in outcome.err, outcome.err


def edit(project: Path, **changes: object) -> None:
    tree = yaml.safe_load(project.read_text())
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            tree[section][name] = value
        else:
            tree[section] = value
    project.write_text(yaml.safe_dump(tree))


def test_a_missing_configuration(dflash, tmp_path) -> None:
    check(dflash("train", tmp_path / "no.yaml"), f"There is no configuration file {tmp_path / 'no.yaml'}")


def test_a_misspelt_setting_names_the_nearest_one(dflash, project) -> None:
    check(
        dflash("train", project, "--set", "train.learning_rte=1"),
        "there is no setting train.learning_rte; did you mean train.learning_rate?",
    )


def test_an_impossible_value_is_named_with_what_was_found(dflash, project) -> None:
    check(dflash("train", project, "--set", "train.epochs=0"), "train.epochs:", "greater than 0", "found 0")


def test_broken_yaml(dflash, tmp_path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("a: [1, 2\n")
    check(dflash("generate", path), f"{path} is not valid YAML")


def test_a_missing_data_file(dflash, project) -> None:
    check(dflash("generate", project, "--set", "data.paths=[nowhere.jsonl]"), "nowhere.jsonl")


@pytest.mark.parametrize(
    ("line", "reason"),
    [("", "empty line"), ('{"messages": [', "invalid json"), ('{"chat": "w1"}', "missing keys"), ("[1]", "object")],
)
def test_a_malformed_line_is_counted_or_with_strict_an_error_with_its_number(dflash, project, line, reason) -> None:
    data = project.parent / "data.jsonl"
    lines = data.read_text().splitlines()
    data.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    strict = dflash("generate", project, "--strict")
    check(strict, "data.jsonl:3")
    lenient = dflash("generate", project)
    assert lenient.code == 0, lenient.err
    shown = " ".join(lenient.out.split())
    assert "Left out 1 (first: " in shown
    assert "data.jsonl:3" in shown
    assert reason in shown.lower() + strict.err.lower()
    assert "60 samples" in shown


def test_a_conversation_that_is_too_long_is_counted_or_with_strict_an_error(dflash, project) -> None:
    strict = dflash("generate", project, "--strict", "--set", "data.max_length=30")
    check(strict, "data.jsonl:", "30")
    lenient = dflash("generate", project, "--set", "data.max_length=30")
    assert lenient.code == 0, lenient.err
    assert "longer than data.max_length" in " ".join(lenient.out.split())


def test_a_target_without_a_chat_template(dflash, project, llama_folder, tmp_path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(llama_folder, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    check(dflash("generate", project, "--set", f"target.model={folder}"), str(folder), "chat template")


def test_a_missing_target(dflash, project, tmp_path) -> None:
    folder = tmp_path / "no-target"
    folder.mkdir()
    check(dflash("generate", project, "--set", f"target.model={folder}"), f"There is no target at {folder}")


def test_a_missing_or_unfinished_cache(dflash, project) -> None:
    check(dflash("train", project), "There is no cache at", "run `dflash generate` first")
    check(dflash("inspect-buckets", project.parent / "cache"), "There is no cache at")
    assert dflash("generate", project).code == 0
    index = project.parent / "cache" / "index" / "index.parquet"
    index.unlink()
    check(dflash("train", project), "holds no samples yet")


def test_a_cache_of_another_target(dflash, project, save_family) -> None:
    assert dflash("generate", project).code == 0
    other = save_family("qwen3")
    check(dflash("train", project, "--set", f"target.model={other}"), "was made from another target", str(other))
    check(
        dflash("generate", project, "--set", f"target.model={other}"),
        "was made with another configuration",
        "target_fingerprint: was",
    )


def test_a_cache_with_other_layers_or_settings(dflash, project) -> None:
    assert dflash("generate", project).code == 0
    check(dflash("train", project, "--set", "target.layer_ids=[1, 2]"), "holds layers [0, 2, 4]", "[1, 2]")
    check(dflash("generate", project, "--set", "target.layer_ids=[1, 2]"), "layer_ids: was 0, 2, 4, is 1, 2")


def test_a_run_folder_of_another_run(dflash, project) -> None:
    assert dflash("generate", project).code == 0
    assert dflash("train", project).code == 0
    check(dflash("train", project, "--set", "train.seed=9"), "was made with other settings", "train.seed: was 0, is 9")


def test_a_damaged_cache_names_shard_and_sample(dflash, project) -> None:
    assert dflash("generate", project).code == 0
    shard = sorted((project.parent / "cache").glob("bucket-*/*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[5000] ^= 1
    shard.write_bytes(data)
    check(dflash("train", project), "cannot be read from shard", shard.name, "checksum")


def test_nothing_to_evaluate(dflash, project) -> None:
    check(dflash("eval", project), "run `dflash train` first")


def test_an_exported_drafter_that_is_broken(dflash, project, tmp_path) -> None:
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text('{"dflash_config": ')
    shown = dflash("export", project, tmp_path / "out", "--checkpoint", tmp_path / "drafter")
    check(shown, "holds no exported drafter that can be read (JSONDecodeError", "export it again")


def test_brackets_in_a_message_are_shown_as_they_are_on_a_terminal_too(dflash, tmp_path, monkeypatch) -> None:
    terminal = Console(stderr=True, highlight=False, soft_wrap=True, force_terminal=True)
    monkeypatch.setattr("dflash_cli.__main__.errors", terminal)
    shown = dflash("train", tmp_path / "[bold]a[/x].yaml")
    assert shown.code == 2
    assert "[bold]a[/x].yaml" in shown.err


def test_a_device_that_is_not_there(dflash, project) -> None:
    check(dflash("generate", project, "--set", "target.device=cuda:7"), "The device cuda:7 is not here")


def test_shapes_that_do_not_allow_target_layers(dflash, project) -> None:
    assert dflash("generate", project).code == 0
    check(dflash("train", project, "--set", "drafter.intermediate_size=50"), "drafter.init: target-layers cannot copy")

"""A drafter is measured, and exported by its target's name, on the target that it was trained for, or by request."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from cli.test_errors import check
from safetensors.torch import load_file, save_file

from dflash_cache.config.settings import TargetSettings
from dflash_cache.data.templates import tokenizer_fingerprint
from dflash_cache.drafter.trained_for import TrainedFor
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.target.load import load_tokenizer
from dflash_cache.train.checkpoint import best_path, load_checkpoint, load_drafter


def copy_with_other_weights(target: Path, folder: Path) -> Path:
    shutil.copytree(target, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def copy_with_two_words_exchanged(target: Path, folder: Path) -> Path:
    shutil.copytree(target, folder)
    rules = json.loads((folder / "tokenizer.json").read_text())
    words = rules["model"]["vocab"]
    words["w3"], words["w4"] = words["w4"], words["w3"]
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    return folder


@pytest.fixture
def run_dir(dflash, project: Path) -> Path:
    for command in ("generate", "train"):
        assert dflash(command, project).code == 0
    return project.parent / "run"


def test_a_checkpoint_and_its_export_name_the_target_by_the_fingerprints_of_its_files(
    dflash, project, run_dir, llama_folder, tmp_path
) -> None:
    settings = TargetSettings(model=str(llama_folder))
    expected = TrainedFor(
        str(llama_folder), None, TargetFiles(settings).fingerprint(), tokenizer_fingerprint(load_tokenizer(settings))
    )
    assert dflash("export", project, tmp_path / "drafter").code == 0
    assert load_drafter(run_dir).trained_for == expected
    assert load_drafter(tmp_path / "drafter").trained_for == expected


def test_eval_refuses_another_target_of_the_same_sizes_unless_it_is_asked_for(
    dflash, project, run_dir, llama_folder, tmp_path
) -> None:
    weights = copy_with_other_weights(llama_folder, tmp_path / "weights")
    words = copy_with_two_words_exchanged(llama_folder, tmp_path / "words")
    moved = shutil.copytree(llama_folder, tmp_path / "moved")
    assert dflash("export", project, tmp_path / "drafter", "--dtype", "float32").code == 0
    own = json.loads(dflash("eval", project, "--json").out)
    for drafter in (run_dir, tmp_path / "drafter"):
        given = ("eval", project, "--json", "--checkpoint", drafter)
        for other, what in ((weights, "another config or weights"), (words, "another tokenizer")):
            refused = dflash(*given, "--set", f"target.model={other}")
            assert refused.out == ""
            check(refused, f"trained for another target ({llama_folder}) than {other}", what, "give --other-target")
        result = json.loads(dflash(*given, "--set", f"target.model={weights}", "--other-target").out)
        assert result["lossless"]
        result = json.loads(dflash(*given, "--set", f"target.model={moved}").out)  # the same files elsewhere
        assert result["histogram"] == own["histogram"]


def test_other_sizes_are_refused_whatever_is_asked_for(dflash, project, run_dir, save_family) -> None:
    other = f"target.model={save_family('gpt_neox')}"
    of_its_sizes = dflash("eval", project, "--set", other)
    check(of_its_sizes, "another config or weights", "give --other-target")
    config = json.loads((save_family("gpt_neox") / "config.json").read_text())
    smaller = project.parent / "smaller"
    shutil.copytree(save_family("gpt_neox"), smaller)
    (smaller / "config.json").write_text(json.dumps(config | {"vocab_size": 96}))
    refused = dflash("eval", project, "--set", f"target.model={smaller}", "--other-target")
    check(refused, "trained for another target (vocabulary 128, not 96): set target.model to its target")


def test_a_drafter_without_a_record_is_taken(dflash, project, run_dir, llama_folder, tmp_path) -> None:
    path = best_path(run_dir)
    fields = vars(load_checkpoint(path))
    del fields["trained_for"]  # as before there were records
    torch.save(fields, path)
    weights = copy_with_other_weights(llama_folder, tmp_path / "weights")
    assert load_drafter(path).trained_for is None
    assert json.loads(dflash("eval", project, "--json", "--set", f"target.model={weights}").out)["lossless"]
    assert dflash("export", project, tmp_path / "drafter").code == 0
    assert "trained_for" not in (tmp_path / "drafter" / "config.json").read_text()


def test_speculators_format_names_another_target_only_if_it_is_asked_for(
    dflash, project, run_dir, llama_folder, tmp_path
) -> None:
    weights = copy_with_other_weights(llama_folder, tmp_path / "weights")
    given = ("export", project, tmp_path / "out", "--format", "speculators", "--set", f"target.model={weights}")
    check(dflash(*given), f"trained for another target ({llama_folder})", "give --other-target")
    assert not (tmp_path / "out").exists()
    assert dflash(*given, "--other-target").code == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(weights)


def test_a_drafter_whose_export_names_another_vocabulary_is_measured_on_its_own_target(dflash, project) -> None:
    assert dflash("generate", project).code == 0
    assert dflash("train", project, "--set", "drafter.vocab_size=256").code == 0
    outcome = dflash("eval", project, "--json")
    assert outcome.code == 0, outcome.err

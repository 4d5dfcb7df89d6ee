"""What we export is what z-lab's own package loads: same draft logits, same decoding (`make` installs the package)."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflash_cache.config.settings import DrafterSettings, TargetSettings
from dflash_cache.decode.choice import Greedy
from dflash_cache.decode.speculate import Limits, decode_speculatively
from dflash_cache.drafter.export import expected_tensors, export_zlab, read_export
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.shape import shape_from_target
from dflash_cache.drafter.start import start_drafter
from dflash_cache.drafter.trained_for import TrainedFor
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.target.capture import capture_states
from dflash_cache.target.load import Target, load_target

PACKAGES = Path(sys.prefix) / "clients" / "zlab"
CLIENT = Path(__file__).with_name("zlab_client.py")
PROMPTS = [[5, 9, 11, 40], [7, 7, 8, 30, 41, 9, 10]]


def make_drafter(target: Target, folder: Path, **settings: object) -> Drafter:
    """As training would begin, with weights moved a little so that no norm is all ones."""
    init = "target-layers" if target.config.model_type in ("llama", "qwen3") else "random"
    wanted = DrafterSettings.model_validate({"num_layers": 2, "block_size": 5, "init": init, **settings})
    drafter = Drafter(shape_from_target(target.config, wanted, target.layer_ids, 127))
    start_drafter(drafter, wanted, TargetFiles(TargetSettings(model=str(folder))), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    drafter.trained_for = TrainedFor(str(folder), None, target.fingerprint, "")  # must not disturb other readers
    return drafter.eval()


def run_client(target_dir: Path, drafter_dir: Path, inputs: dict, tmp_path: Path) -> dict:
    torch.save(inputs, tmp_path / "inputs.pt")
    paths = [PACKAGES, target_dir, drafter_dir, tmp_path / "inputs.pt", tmp_path / "outputs.pt"]
    done = subprocess.run([sys.executable, CLIENT, *map(str, paths)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(tmp_path / "outputs.pt")


WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


@pytest.mark.parametrize(("family", "settings"), [("llama", {}), ("qwen3", {}), ("gemma3", {}), ("llama", WINDOWED)])
def test_zlabs_package_gives_our_draft_logits_and_our_acceptance_lengths(
    save_family, family, settings, tmp_path
) -> None:
    folder = save_family(family)
    target = load_target(TargetSettings(model=str(folder), dtype="float32", device="cpu", layer_ids=(0, 2, 4)))
    drafter = make_drafter(target, folder, **settings)
    export_zlab(drafter, tmp_path / "drafter", "float32")
    ids = torch.tensor([[5, 9, 11, 40, 17, 23, 4, 8, 90]])
    states = capture_states(target, ids, torch.tensor([9]))
    inputs = {"states": states, "anchor": 33, "prompts": PROMPTS, "max_new_tokens": 20, "stop_ids": [2]}
    outputs = run_client(folder, tmp_path / "drafter", inputs, tmp_path)

    slots = torch.full((1, 1, 5), 127)
    slots[..., 0] = 33
    embedded = target.model.get_input_embeddings()(slots)
    with torch.inference_mode():
        normed = drafter(embedded, drafter.read_context(states), torch.tensor([[9]]))
        logits = target.model.get_output_embeddings()(normed)[0]
    torch.testing.assert_close(outputs["logits"], logits, rtol=1e-4, atol=1e-4)
    for prompt, (tokens, accepted) in zip(PROMPTS, outputs["answers"], strict=True):
        ours = decode_speculatively(target, [prompt], Limits(20, frozenset([2])), Greedy(), drafter)[0]
        assert (ours.tokens, ours.accepted) == (tokens, accepted)


def test_an_export_has_exactly_the_published_tensors_and_reads_back_to_the_bit(llama, llama_folder, tmp_path) -> None:
    drafter = make_drafter(llama, llama_folder)
    export_zlab(drafter, tmp_path / "drafter", "float32")
    shape, tensors = read_export(tmp_path / "drafter")
    assert shape == drafter.shape
    assert {name: tuple(t.shape) for name, t in tensors.items()} == expected_tensors(shape)
    assert len(tensors) == 3 + 11 * 2  # 58 for the published five layers
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in tensors.items())

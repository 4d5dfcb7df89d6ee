"""Targets with four words, so few that every continuation's probability can be computed, and drafters often wrong."""

from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import save_tokenizer
from transformers import AutoModelForCausalLM, PretrainedConfig

from dflash_cache.config.settings import DrafterSettings, TargetSettings
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.shape import shape_from_target
from dflash_cache.target.load import Target, load_target

VOCAB, TEMPERATURE, NUM_TOKENS = 4, 1.5, 4
SIZES = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "initializer_range": 0.4,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def make_pair(config: PretrainedConfig, folder: Path, gain: float = 1) -> tuple[Target, Drafter]:
    """A target of this config, its layers' matrices multiplied by `gain`, and a drafter with blocks of three slots."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.get_decoder().layers.parameters():
            parameter.mul_(gain if parameter.dim() > 1 else 1)
        model.save_pretrained(folder)
    save_tokenizer(folder)
    target = load_target(TargetSettings(model=str(folder), dtype="float32", device="cpu", layer_ids=(0,)))
    settings = DrafterSettings(num_layers=1, block_size=3)
    drafter = Drafter(shape_from_target(target.config, settings, target.layer_ids, 3))
    generator = torch.Generator().manual_seed(1)
    drafter.initialize(generator)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(10 if parameter.dim() > 1 else 1)
    return target, drafter.eval()


@torch.no_grad()
def exact_distribution(target: Target, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of four tokens, each in a forward of its own."""
    every = {}
    for tokens in product(range(VOCAB), repeat=NUM_TOKENS):
        logits = target.model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        shares = torch.softmax(logits.double() / TEMPERATURE, dim=-1)
        every[tokens] = float(shares[torch.arange(NUM_TOKENS), torch.tensor(tokens)].prod())
    assert sum(every.values()) == pytest.approx(1)
    return every


def chi_square_p(counts: Counter[tuple[int, ...]], shares: dict[tuple[int, ...], float]) -> float:
    """Pearson's test; cells that expect fewer than ten are one cell."""
    assert set(counts) <= set(shares)
    cells: list[tuple[float, float]] = []
    rest = [0.0, 0.0]
    for tokens, share in shares.items():
        expected = share * counts.total()
        if expected < 10:
            rest = [rest[0] + counts[tokens], rest[1] + expected]
        else:
            cells.append((counts[tokens], expected))
    cells += [(rest[0], rest[1])] if rest[1] > 0 else []
    statistic = sum((found - expected) ** 2 / expected for found, expected in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))

"""Every family's target as decoding is tested with it, and a drafter that is right as often as it is told.

Random weights are enlarged, and drawn until each answer has many different tokens and no near-ties: a state that is
not taken back then changes what is answered, and rounding does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from conftest import VOCAB_SIZE, save_tokenizer
from target.architectures import EXPORTED
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from dflash_cache.config.settings import DrafterSettings, TargetSettings
from dflash_cache.decode.choice import Choice
from dflash_cache.decode.speculate import Drafting
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.shape import shape_from_target
from dflash_cache.target.load import Target, load_target

RECURRENT = frozenset({"qwen3-next", "qwen3.5", "falcon-h1", "bamba"})  # what they read again is counted
SLIDING = frozenset(
    {"gemma2", "gemma3-text", "gemma3", "gemma4", "vaultgemma", "mistral", "gpt-oss", "olmo3", "cohere2", "exaone4"}
    | {"afmoe", "cohere2-moe"}
)
ALONE = RECURRENT | {"lfm2"}  # one prompt at a time; of all other families several rows are decoded at once

WINDOW = 8  # of the sliding families: shorter than most of these prompts, and than every answer
PROMPTS = [[5, 9, 11, 40, 17, 23, 4, 8, 90, 31, 77], [99], [*range(20, 57)], [64, 12]]
NUM_TOKENS, BLOCK_SIZE = 32, 5
# Tokens that a prompt's passes yield, in turn: every number behind every other, at first, at last, and over and over.
SCRIPTS = [[1, 5, 2, 4, 3], [3, 1, 1, 4, 2, 5, 5, 3], [1, 1, 1, 1, 2], [4, 5, 3, 3, 2, 1, 2]]


@dataclass(frozen=True)
class Family:
    """A target, what `generate` answers to PROMPTS, a drafter of its sizes, and where the target is saved."""

    name: str
    target: Target
    answers: list[list[int]]
    drafter: Drafter
    folder: Path


def build_family(name: str, folder: Path) -> Family:
    """Saved, and loaded as `dflash eval` does."""
    model, answers = draw_model(name)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    target = load_target(TargetSettings(model=str(folder), dtype="float32", device="cpu", layer_ids=(0, 2, 4)))
    settings = DrafterSettings(num_layers=1, block_size=BLOCK_SIZE)
    drafter = Drafter(shape_from_target(target.config, settings, target.layer_ids, VOCAB_SIZE - 1))
    drafter.initialize(torch.Generator().manual_seed(0))
    return Family(name, target, answers, drafter.eval(), folder)


def draw_model(name: str) -> tuple[PreTrainedModel, list[list[int]]]:
    """The first random model whose answers say something, and the answers."""
    begin = {"gemma3-text": 9}.get(name, 0)  # it has no better one before, and to look takes seconds
    for seed in range(begin, begin + 20):
        model = make_model(name, seed)
        found = [generate(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
        if all(len(set(tokens)) >= 8 and lead > 5e-4 for tokens, lead in found):
            return model, [tokens for tokens, _ in found]
    raise AssertionError(f"no seed gives {name} answers worth comparing")


def make_model(name: str, seed: int) -> PreTrainedModel:
    """Larger in its layers than in its embedding, or it would say what it has just read."""
    config = EXPORTED[name]()
    known = type(config) in AutoModelForCausalLM._model_mapping
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        auto_class = AutoModelForCausalLM if known else AutoModelForImageTextToText
        model = auto_class.from_config(config, dtype=torch.float32).eval()
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter is not embedding and parameter is not head:
                parameter.mul_(3)
        if embedding is head:
            embedding.mul_(0.2)
    return model


def generate(model: PreTrainedModel, prompt: list[int], count: int, stop: int | None = None) -> tuple[list[int], float]:
    """transformers' own greedy answer, and its smallest lead of the best over the second best logit, in deviations."""
    model.generation_config.eos_token_id = stop
    output = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        use_cache=True,
        max_new_tokens=count,
        pad_token_id=3,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits_TV = torch.cat(output.logits)
    best_T2 = logits_TV.topk(2, dim=-1).values
    return output.sequences[0, len(prompt) :].tolist(), float((best_T2[:, 0] - best_T2[:, 1]).min() / logits_TV.std())


class Scripted(Drafting):
    """Reads the target's states as any drafter does, and drafts so many right tokens that each pass yields what its
    prompt's script says, then wrong ones."""

    def __init__(self, family: Family, prompts: Sequence[int], scripts: list[list[int]]) -> None:
        super().__init__(family.target, family.drafter, len(prompts), BLOCK_SIZE)
        self._answers = [family.answers[prompt] for prompt in prompts]
        self._lengths = [len(PROMPTS[prompt]) for prompt in prompts]
        self._scripts = scripts
        self._passes = [0] * len(prompts)

    @property
    def context(self):
        """What the drafter would read."""
        return self._context

    def propose(self, choice: Choice, anchors: list[int], rooms: list[int], prompts: list[int]) -> list[list[int]]:
        drafts = []
        for room, prompt, length in zip(rooms, prompts, self._context.lengths, strict=True):
            answer, script = self._answers[prompt], self._scripts[prompt]
            begin, num_drafts = length - self._lengths[prompt] + 1, min(BLOCK_SIZE - 1, room)
            num_right = script[self._passes[prompt] % len(script)] - 1
            right = answer[begin : begin + num_drafts]
            drafts.append([token if k < num_right else (token + 7) % VOCAB_SIZE for k, token in enumerate(right)])
            self._passes[prompt] += 1
        return drafts


def expect_accepted(script: list[int], count: int) -> list[int]:
    """Tokens of each pass for an answer of `count` tokens, whose first is the prefill's."""
    accepted = []
    while (room := count - 1 - sum(accepted)) > 0:
        accepted.append(min(script[len(accepted) % len(script)], room))
    return accepted

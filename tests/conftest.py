"""Tiny random targets of four families, saved as folders: 6 layers, hidden 32, vocabulary 128, float32."""

from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from dflash_cache.config.settings import TargetSettings
from dflash_cache.target.load import Target, load_target

# A busy machine may stall for seconds: a test's time says nothing about its subject.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

VOCAB_SIZE = 128
NUM_LAYERS = 6
SPECIAL_TOKENS = ("<|unknown|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|> ' + message['role'] + ' ' + message['content'] + ' <|im_end|> ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "initializer_range": 0.2,
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**COMMON, num_key_value_heads=2),
    "qwen3": lambda: Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
    "gemma3": lambda: Gemma3TextConfig(
        **COMMON,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**COMMON),
}
MORE_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {  # for single tests
    "cohere2": lambda: Cohere2Config(**COMMON, num_key_value_heads=2, sliding_window=8),
    "mistral": lambda: MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=6),
    "mixtral": lambda: MixtralConfig(**COMMON, num_key_value_heads=2, num_local_experts=4),
}


def save_tokenizer(folder: Path) -> None:
    """Words w0, w1, …, the roles, and ChatML marks, split at blanks."""
    words = [*SPECIAL_TOKENS, "system", "user", "assistant"]
    words += [f"w{i}" for i in range(VOCAB_SIZE - len(words))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=SPECIAL_TOKENS[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=SPECIAL_TOKENS[0],
        bos_token=SPECIAL_TOKENS[1],
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[3],
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


@pytest.fixture(scope="session")
def save_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Saves a target of a family once, and gives its folder."""
    saved: dict[str, Path] = {}

    def save(family: str) -> Path:
        if family not in saved:
            folder = tmp_path_factory.mktemp(family)
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config((CONFIGS | MORE_CONFIGS)[family](), dtype=torch.float32)
            model.save_pretrained(folder)
            save_tokenizer(folder)
            saved[family] = folder
        return saved[family]

    return save


@pytest.fixture(params=list(CONFIGS))
def family_folder(request: pytest.FixtureRequest, save_family: Callable[[str], Path]) -> Path:
    """Each family's folder in turn."""
    return save_family(request.param)


@pytest.fixture(scope="session")
def llama_folder(save_family: Callable[[str], Path]) -> Path:
    return save_family("llama")


@pytest.fixture(scope="session")
def llama(llama_folder: Path) -> Target:
    return load_target(TargetSettings(model=str(llama_folder), dtype="float32", device="cpu", layer_ids=(0, 2, 4)))

"""A tiny random Gemma 3 as a GGUF file, written as llama.cpp's converter does: norms with their offset of 1 added."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<end_of_turn>"]
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # token types
NUM_LAYERS = 6


def make_gemma(head_dim: int = 256) -> Gemma3ForCausalLM:
    """Random weights, norms too; its config says what a file of these sizes must become."""
    config = Gemma3TextConfig(
        vocab_size=len(list_tokens()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        sliding_window=8,
        max_position_embeddings=128,
        query_pre_attn_scalar=256,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Gemma3ForCausalLM(config)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.2)
    return model.eval()


def list_tokens() -> list[str]:
    """Special tokens, all bytes, the blank, letters, and some pairs of them."""
    letters = ["\u2581", *"abcdefgh"]
    return [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), "  ", "ab", "cd", "\u2581a", *letters]


def write_gguf(
    model: Gemma3ForCausalLM, path: Path, changes: dict[str, Any] | None = None, without: str = "", added: str = ""
) -> Path:
    """`changes`: more strings and numbers of the header; a tensor called `without` is left out, `added` put in."""
    config = model.config
    writer = GGUFWriter(path, "gemma3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    _add_tokens(writer)
    for key, value in (changes or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    names = get_tensor_name_map(MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        gguf_name = f"{names.get_name(name.removesuffix('.weight'))}.weight"
        if gguf_name != without:
            writer.add_tensor(gguf_name, parameter.detach().numpy() + np.float32("norm" in name))
    if added:
        writer.add_tensor(added, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokens(writer: GGUFWriter) -> None:
    tokens = list_tokens()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    kinds = dict.fromkeys(SPECIAL, CONTROL) | {"<unk>": UNKNOWN}
    writer.add_token_types([BYTE if token.startswith("<0x") else kinds.get(token, NORMAL) for token in tokens])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)

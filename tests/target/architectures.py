"""Tiny random targets of many families: their configs, by name."""

from collections.abc import Callable

import transformers as t
from conftest import COMMON
from transformers import PretrainedConfig

GROUPED = {**COMMON, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ALTERNATING = ["sliding_attention", "full_attention"] * 3
HYBRID = ["linear_attention", "linear_attention", "full_attention"] * 2
LINEAR = {
    "layer_types": HYBRID,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
QWEN_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
PLACES = {"image_token_id": 124, "video_token_id": 125, "vision_start_token_id": 126, "vision_end_token_id": 127}

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: t.LlamaConfig(**GROUPED),
    "llama-3.1": lambda: t.LlamaConfig(
        **GROUPED,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": lambda: t.Qwen2Config(**GROUPED),
    "qwen3": lambda: t.Qwen3Config(**HEADS, tie_word_embeddings=True),
    "qwen3-moe": lambda: t.Qwen3MoeConfig(**HEADS, **EXPERTS, decoder_sparse_step=1),
    "qwen3-next": lambda: t.Qwen3NextConfig(**HEADS, **EXPERTS, **LINEAR, shared_expert_intermediate_size=24),
    "qwen3.5": lambda: t.Qwen3_5TextConfig(**HEADS, **LINEAR),
    "gemma": lambda: t.GemmaConfig(**HEADS),
    "gemma2": lambda: t.Gemma2Config(**HEADS, sliding_window=8, layer_types=ALTERNATING, final_logit_softcapping=3.0),
    "gemma3-text": lambda: t.Gemma3TextConfig(**HEADS, sliding_window=8, layer_types=ALTERNATING),
    "gemma3": lambda: t.Gemma3Config(
        text_config=t.Gemma3TextConfig(**HEADS, sliding_window=8),
        vision_config=t.SiglipVisionConfig(**VISION, image_size=32, patch_size=16),
        mm_tokens_per_image=4,
        image_token_id=127,
    ),
    "mistral": lambda: t.MistralConfig(**GROUPED, sliding_window=8),
    "mixtral": lambda: t.MixtralConfig(**GROUPED, num_local_experts=4),
    "phi": lambda: t.PhiConfig(**COMMON),  # a head with a bias
    "phi3": lambda: t.Phi3Config(**GROUPED),
    "phimoe": lambda: t.PhimoeConfig(**GROUPED, num_local_experts=4, lm_head_bias=True),
    "gpt-neox": lambda: t.GPTNeoXConfig(**COMMON),
    "gpt-oss": lambda: t.GptOssConfig(
        **HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, layer_types=ALTERNATING
    ),
    "glm4": lambda: t.Glm4Config(**HEADS),
    "glm4-moe": lambda: t.Glm4MoeConfig(
        **HEADS, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_group=1, topk_group=1
    ),
    "deepseek-v3": lambda: t.DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4},
        **LATENT,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "olmo2": lambda: t.Olmo2Config(**GROUPED),
    "olmo3": lambda: t.Olmo3Config(**GROUPED, sliding_window=8, layer_types=ALTERNATING),
    "granite": lambda: t.GraniteConfig(**GROUPED, embedding_multiplier=12.3, logits_scaling=8.0),
    "granite-moe": lambda: t.GraniteMoeConfig(
        **GROUPED, num_local_experts=4, embedding_multiplier=12.0, logits_scaling=6.0
    ),
    "falcon": lambda: t.FalconConfig(
        **{key: value for key, value in COMMON.items() if key != "intermediate_size"}, new_decoder_architecture=False
    ),
    "falcon-h1": lambda: t.FalconH1Config(
        **HEADS,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        embedding_multiplier=5.6,
        lm_head_multiplier=0.3,
    ),
    "stablelm": lambda: t.StableLmConfig(**GROUPED),
    "cohere": lambda: t.CohereConfig(**GROUPED, logit_scale=0.0625),
    "cohere2": lambda: t.Cohere2Config(**GROUPED, sliding_window=8, layer_types=ALTERNATING, logit_scale=0.25),
    "smollm3": lambda: t.SmolLM3Config(**GROUPED),
    "exaone4": lambda: t.Exaone4Config(**GROUPED, sliding_window=8, layer_types=ALTERNATING),
    "ernie4.5": lambda: t.Ernie4_5Config(**HEADS),
    "seed-oss": lambda: t.SeedOssConfig(**HEADS),
    "starcoder2": lambda: t.Starcoder2Config(**GROUPED),
    "minimax-m2": lambda: t.MiniMaxM2Config(**HEADS, num_local_experts=4, num_experts_per_tok=2),
    "lfm2": lambda: t.Lfm2Config(**GROUPED, layer_types=["conv", "conv", "full_attention"] * 2),
    "qwen2-vl": lambda: t.Qwen2VLConfig(
        text_config={**GROUPED, "rope_parameters": {**MROPE, "mrope_section": [1, 1, 2]}},
        vision_config={"depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 32},
        **PLACES,
    ),
    "qwen2.5-vl": lambda: t.Qwen2_5_VLConfig(
        text_config={**GROUPED, "rope_parameters": {**MROPE, "mrope_section": [1, 1, 2]}},
        vision_config=QWEN_VISION,
        **PLACES,
    ),
    "qwen3-vl": lambda: t.Qwen3VLConfig(
        text_config={**HEADS, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        vision_config={**QWEN_VISION, "deepstack_visual_indexes": [0]},
        **PLACES,
    ),
    "llava": lambda: t.LlavaConfig(
        text_config=t.LlamaConfig(**GROUPED),
        vision_config=t.CLIPVisionConfig(**VISION, image_size=32, patch_size=16),
        image_token_index=127,
    ),
}
# What stands before their layers and behind their heads is combined in other ways: a factor and a cap, states divided
# before the head, a factor where Granite has a divisor, embeddings that the target norms and its drafter does not.
MORE_FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "muse-glimmer": lambda: t.MuseGlimmerConfig(text_config=HEADS, vision_config=dict(VISION)),
    "gemma4": lambda: t.Gemma4TextConfig(
        **HEADS,
        global_head_dim=32,
        sliding_window=8,
        vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=8,
        final_logit_softcapping=5.0,
    ),
    "vaultgemma": lambda: t.VaultGemmaConfig(
        **HEADS, sliding_window=8, layer_types=ALTERNATING, final_logit_softcapping=4.0
    ),
    "minicpm3": lambda: t.MiniCPM3Config(**COMMON, **LATENT, num_key_value_heads=4, scale_emb=3.3, dim_model_base=8),
    "hyperclovax": lambda: t.HyperCLOVAXConfig(**GROUPED, embedding_multiplier=2.0, logits_scaling=0.125),
    "afmoe": lambda: t.AfmoeConfig(**HEADS, mup_enabled=True, sliding_window=8),
    "cohere2-moe": lambda: t.Cohere2MoeConfig(**HEADS, logit_scale=0.0625, sliding_window=8),
    "bamba": lambda: t.BambaConfig(  # counts positions from 0 in every pass unless it is told them
        **GROUPED, attn_layer_indices=[1, 4], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=16
    ),
}
# Whose exports are compared with z-lab's package (`test_exported_families`), and what it must be told to apply.
EXPORTED = FAMILIES | MORE_FAMILIES
EMBEDDING_SCALE, LOGIT_SCALE, SOFTCAP = "input_embedding_scale", "output_multiplier", "final_logit_softcapping"
APPLIED: dict[str, set[str]] = {
    "gemma": {EMBEDDING_SCALE},
    "gemma2": {EMBEDDING_SCALE, SOFTCAP},
    "gemma3-text": {EMBEDDING_SCALE},
    "gemma3": {EMBEDDING_SCALE},
    "granite": {EMBEDDING_SCALE, LOGIT_SCALE},
    "granite-moe": {EMBEDDING_SCALE, LOGIT_SCALE},
    "falcon-h1": {EMBEDDING_SCALE, LOGIT_SCALE},
    "cohere": {LOGIT_SCALE},
    "cohere2": {LOGIT_SCALE},
    "muse-glimmer": {LOGIT_SCALE, SOFTCAP},
    "gemma4": {EMBEDDING_SCALE, SOFTCAP},
    "vaultgemma": {EMBEDDING_SCALE, SOFTCAP},
    "minicpm3": {EMBEDDING_SCALE, LOGIT_SCALE},
    "hyperclovax": {EMBEDDING_SCALE, LOGIT_SCALE},
    "afmoe": {EMBEDDING_SCALE},
    "cohere2-moe": {LOGIT_SCALE},
}
# Whom speculators' format refuses, by what its sentence says; it takes all others.
REFUSED_BY_SPECULATORS: dict[str, str] = {
    "gemma": "this drafter's target does (by 5.65685)",
    "gemma2": "this drafter's target does (by 5.65685)",
    "gemma3-text": "this drafter's target does (by 5.65685)",
    "gemma3": "this drafter's target does (by 5.65685)",
    "granite": "this drafter's target does (by 12.3)",
    "granite-moe": "this drafter's target does (by 12)",
    "falcon-h1": "this drafter's target does (by 5.6)",
    "cohere": "the head of this drafter's target multiplies by 0.0625",
    "cohere2": "the head of this drafter's target multiplies by 0.25",
    "phi": "the head of this drafter's target adds a bias",
    "phimoe": "the head of this drafter's target adds a bias",
    "gpt-neox": "has them as gpt_neox.embed_in.weight and ",
    "falcon": "has them as transformer.word_embeddings.weight and ",
    "muse-glimmer": "the head of this drafter's target multiplies by 0.196116 and caps at 20",
    "gemma4": "this drafter's target does (by 5.65685)",
    "vaultgemma": "this drafter's target does (by 5.65685)",
    "minicpm3": "this drafter's target does (by 3.3)",
    "hyperclovax": "this drafter's target does (by 2)",
    "afmoe": "this drafter's target does (by 5.65685)",
    "cohere2-moe": "the head of this drafter's target multiplies by 0.0625",
}
# Not one forward, so not one cache: learned or no positions, states beside the tokens', an encoder.
REFUSED: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    "gpt2": (lambda: t.GPT2Config(vocab_size=128, n_embd=32, n_layer=6, n_head=4), "has no rope_theta in its config"),
    "opt": (lambda: t.OPTConfig(**{**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32}), "has no rope_theta"),
    "t5": (lambda: t.T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=48, num_heads=4), "is an encoder-decoder"),
    "bart": (lambda: t.BartConfig(vocab_size=128, d_model=32), "is an encoder-decoder"),
    "gemma3n": (lambda: t.Gemma3nTextConfig(**HEADS), "carries 4 states a token from layer to layer"),
    "modernbert": (lambda: t.ModernBertConfig(**COMMON), "has no causal language model in transformers"),
}

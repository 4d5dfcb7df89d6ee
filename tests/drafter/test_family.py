"""What a family does around its layers, by its config; `test_architectures` compares with the models."""

import pytest
import torch
from drafter.tiny_drafter import SIZES
from transformers import (
    AfmoeConfig,
    Cohere2Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    T5Config,
)

from dflash_cache.drafter.family import (
    check_family,
    embedding_factor,
    embedding_scale_of,
    logit_scale_of,
    norm_eps_of,
    rope_theta_of,
    softcap_of,
)
from dflash_cache.errors import TargetError


@pytest.mark.parametrize(
    ("target", "theta"),
    [
        (LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 123_456.0}), 123_456.0),
        (LlamaConfig(**SIZES, rope_theta=777.0), 777.0),
        (GPTNeoXConfig(**SIZES, rotary_emb_base=4321), 4321.0),
        (
            Gemma3TextConfig(
                **SIZES,
                rope_parameters={
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                    "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
                },
            ),
            1_000_000.0,
        ),
    ],
)
def test_ropes_base_is_the_targets_and_gemmas_that_of_full_attention(target: PretrainedConfig, theta: float) -> None:
    assert rope_theta_of(target) == theta


def test_a_target_without_rope_is_refused() -> None:
    with pytest.raises(TargetError) as caught:
        rope_theta_of(GPT2Config())
    assert str(caught.value) == (
        "The target (gpt2) has no rope_theta in its config, and a DFlash drafter needs rotary positions; use another "
        "target."
    )


def test_the_norms_epsilon_is_found_under_the_familys_name() -> None:
    assert norm_eps_of(LlamaConfig(**SIZES, rms_norm_eps=1e-3)) == 1e-3
    assert norm_eps_of(GPTNeoXConfig(**SIZES, layer_norm_eps=2e-3)) == 2e-3
    assert norm_eps_of(GPT2Config(layer_norm_epsilon=4e-3)) == 4e-3


@pytest.mark.parametrize(
    ("target", "scale"),
    [
        (Gemma3TextConfig(**SIZES), 48**0.5),
        (AfmoeConfig(**SIZES, mup_enabled=True), 48**0.5),
        (AfmoeConfig(**SIZES, mup_enabled=False), 1.0),
        (GraniteConfig(**SIZES, embedding_multiplier=12.0), 12.0),
        (Qwen3Config(**SIZES), 1.0),
    ],
)
def test_embeddings_are_scaled_by_the_familys_factor(target: PretrainedConfig, scale: float) -> None:
    assert embedding_scale_of(target) == scale


def test_gemma_rounds_its_factor_to_the_dtype_and_granite_does_not() -> None:
    gemma, granite = Gemma3TextConfig(**SIZES), GraniteConfig(**SIZES, embedding_multiplier=12.3)
    assert embedding_factor(gemma, 48**0.5, torch.bfloat16) == 6.9375  # 6.9282 in steps of 1/32
    assert embedding_factor(granite, 12.3, torch.bfloat16) == 12.3


@pytest.mark.parametrize(
    ("target", "scale"),
    [
        (Cohere2Config(**SIZES, logit_scale=0.0625), 0.0625),
        (GraniteConfig(**SIZES, logits_scaling=8.0), 0.125),
        (HyperCLOVAXConfig(**SIZES, logits_scaling=8.0), 8.0),  # Granite's name, and the other way round
        (FalconH1Config(**SIZES, lm_head_multiplier=0.25), 0.25),
        (LlamaConfig(**SIZES), 1.0),
    ],
)
def test_logits_are_scaled_by_the_familys_factor(target: PretrainedConfig, scale: float) -> None:
    assert logit_scale_of(target) == scale


def test_a_factor_of_the_logits_that_is_not_positive_is_refused() -> None:
    with pytest.raises(TargetError) as caught:
        logit_scale_of(Cohere2Config(**SIZES, logit_scale=-1.0))
    assert str(caught.value) == (
        "The target (cohere2) has logit_scale = -1.0, and a drafter's logits need a positive number there: use another "
        "target."
    )


def test_a_cap_of_the_logits_is_read_and_none_where_there_is_none() -> None:
    assert softcap_of(Gemma2Config(**SIZES, final_logit_softcapping=30.0)) == 30.0
    assert softcap_of(Gemma2Config(**SIZES, final_logit_softcapping=None)) is None
    assert softcap_of(LlamaConfig(**SIZES)) is None


def test_a_cap_that_is_not_positive_is_refused() -> None:
    with pytest.raises(TargetError) as caught:
        softcap_of(Gemma2Config(**SIZES, final_logit_softcapping=0.0))
    assert str(caught.value) == (
        "The target (gemma2) has final_logit_softcapping = 0.0, and a drafter's logits need a positive number there: "
        "use another target."
    )


def test_an_encoder_decoder_and_several_states_a_token_are_refused() -> None:
    with pytest.raises(TargetError) as caught:
        check_family(T5Config())
    assert str(caught.value) == (
        "The target (t5) is an encoder-decoder, and a DFlash drafter drafts for causal language models: use a "
        "decoder-only target."
    )
    with pytest.raises(TargetError) as caught:
        check_family(Gemma3nTextConfig(altup_num_inputs=4))
    assert str(caught.value) == (
        "The target (gemma3n_text) carries 4 states a token from layer to layer (altup_num_inputs), and a DFlash "
        "drafter reads one: use another target."
    )

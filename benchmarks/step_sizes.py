"""Sizes at which the step is measured: drafters of real targets, and micro-batches as a plan would make them."""

from dataclasses import dataclass, replace

from dflash_cache.drafter.shape import DrafterShape


@dataclass(frozen=True)
class Size:
    """A drafter, the samples' lengths of each micro-batch of a step, and how many anchors each sample has."""

    shape: DrafterShape
    micro_batches: tuple[tuple[int, ...], ...]
    anchors: int

    @property
    def num_tokens(self) -> int:
        """Of the whole step, padding not counted."""
        return sum(map(sum, self.micro_batches))


SMOLLM2 = DrafterShape(
    hidden_size=576, num_layers=3, num_attention_heads=9, num_key_value_heads=3, head_dim=64, intermediate_size=1536,
    rms_norm_eps=1e-5, rope_theta=100000.0, vocab_size=49152, max_position_embeddings=8192, block_size=8,
    mask_token_id=16, target_layer_ids=(1, 8, 14, 20, 27), target_num_layers=30,
)  # fmt: skip

# Layers, block and captured layers as z-lab's published drafter has them (FIELD.md, "The drafter").
QWEN3_8B = DrafterShape(
    hidden_size=4096, num_layers=5, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    intermediate_size=12288, rms_norm_eps=1e-6, rope_theta=1000000.0, vocab_size=151936,
    max_position_embeddings=40960, block_size=16, mask_token_id=151669, target_layer_ids=(1, 9, 17, 25, 33),
    target_num_layers=36,
)  # fmt: skip

QWEN3_06B = replace(
    QWEN3_8B, hidden_size=1024, num_attention_heads=16, intermediate_size=3072, target_layer_ids=(1, 7, 13, 19, 25),
    target_num_layers=28,
)  # fmt: skip

SIZES = {
    "smollm2": Size(SMOLLM2, ((150, 170, 190, 210, 220, 230, 240, 250), (430, 460, 480, 500), (900, 1000)), 40),
    "qwen3-0.6b": Size(QWEN3_06B, ((220, 250), (480,)), 16),
    "qwen3-8b": Size(QWEN3_8B, ((4096,),), 512),
}

"""One training step of the drafter (forward and backward), ours against one written plainly, side by side.

SmolLM2's sizes; micro-batches of the lengths that a plan would put together, 150 to 1,000 tokens, 40 anchors a sample.
The plain step does what peers do: a dense mask over [context | all blocks], logits of every slot kept until the
backward pass. Both see the same micro-batches, alternately in one process, so that the ratio survives a machine whose
speed drifts, in the dtype that training would choose (`--dtype auto`).

    python benchmarks/step.py [--dtype auto --rounds 5 --peak --json]

*over_plain*: blocks a second over the plain step's. *roofline*: the share of our step's time that its counted
operations would take at the rate of this machine's matrix products, as measured for the head's shape. With `--peak`,
the memory that a step adds, for two vocabularies, each way in a new process. What a GPU gives is not measured yet:
the same command runs there (`--device cuda`).
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the command line does, for both ways

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from dflash_cache.config.dtypes import fastest_dtype
from dflash_cache.config.settings import ObjectiveSettings
from dflash_cache.drafter.anchors import Blocks, draw_anchors, make_blocks, pad_anchors
from dflash_cache.drafter.frozen import FrozenTarget
from dflash_cache.drafter.head import Head
from dflash_cache.drafter.loss import block_loss
from dflash_cache.drafter.model import Drafter, DraftLayer
from dflash_cache.drafter.objective import weigh_slots
from dflash_cache.drafter.rope import rotary_table, rotate
from dflash_cache.drafter.shape import DrafterShape

SMOLLM2 = DrafterShape(
    hidden_size=576, num_layers=3, num_attention_heads=9, num_key_value_heads=3, head_dim=64, intermediate_size=1536,
    rms_norm_eps=1e-5, rope_theta=100000.0, vocab_size=49152, max_position_embeddings=8192, block_size=8,
    mask_token_id=16, target_layer_ids=(1, 8, 14, 20, 27), target_num_layers=30,
)  # fmt: skip


LENGTHS = ([150, 170, 190, 210, 220, 230, 240, 250], [430, 460, 480, 500], [900, 1000])
ANCHORS = 40


@dataclass(frozen=True)
class Input:
    """One padded micro-batch: captured states (S, T, L, H) and blocks."""

    states: torch.Tensor
    blocks: Blocks


def our_step(drafter: Drafter, frozen: FrozenTarget, states: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The step as training runs it."""
    slots = frozen.embed_blocks(blocks.tokens_SA, drafter.shape)
    out = drafter(slots, drafter.read_context(states, anchors_SA=blocks.anchors_SA), blocks.anchors_SA)
    loss = block_loss(out, blocks, frozen.head, partial(weigh_slots, settings=ObjectiveSettings()))
    return loss.loss_sum / loss.weight_sum


def plain_step(drafter: Drafter, frozen: FrozenTarget, states: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The same loss with a dense mask and full logits."""
    S, T = states.shape[:2]
    A, B = blocks.anchors_SA.shape[1], drafter.shape.block_size
    context = drafter.hidden_norm(drafter.fc(states.flatten(-2)))
    slots = frozen.embed_blocks(blocks.tokens_SA, drafter.shape).flatten(1, 2)
    before = torch.arange(T, device=states.device) < blocks.anchors_SA[..., None]
    own = (
        torch.eye(A, dtype=torch.bool, device=states.device)
        .repeat_interleave(B, 0)
        .repeat_interleave(B, 1)
        .expand(S, -1, -1)
    )
    mask = torch.cat([before.repeat_interleave(B, 1), own], dim=2)[:, None]
    slot_positions = (blocks.anchors_SA[..., None] + torch.arange(B, device=states.device)).flatten(1)
    positions = torch.cat([torch.arange(T, device=states.device).expand(S, -1), slot_positions], dim=1)
    for layer in drafter.layers:
        slots = _plain_layer(layer, slots, context, mask, positions, drafter.shape)
    # Flat: with more axes a bfloat16 product on a CPU copies the head once a row, 300 times slower.
    logits = (drafter.norm(slots).view(S, A, B, -1)[:, :, 1:].flatten(0, 2) @ frozen.head_VH.T).float()
    ce = F.cross_entropy(logits, blocks.labels_SAK.flatten(), reduction="none").view_as(blocks.mask_SAK)
    weights = weigh_slots(ce.detach().flatten(0, 1), blocks.mask_SAK.flatten(0, 1), ObjectiveSettings())
    return (weights * ce.flatten(0, 1)).sum() / weights.sum()


def _plain_layer(
    layer: DraftLayer,
    slots: torch.Tensor,
    context: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    shape: DrafterShape,
) -> torch.Tensor:
    attention, D = layer.self_attn, shape.head_dim
    normed = layer.input_layernorm(slots)
    both = torch.cat([context, normed], dim=1)
    Q = slots.shape[1]
    table = rotary_table(positions, D, shape.rope_theta)
    query = rotate(attention.q_norm(attention.q_proj(normed).unflatten(-1, (-1, D))), tuple(t[:, -Q:] for t in table))
    key = rotate(attention.k_norm(attention.k_proj(both).unflatten(-1, (-1, D))), table)
    value = attention.v_proj(both).unflatten(-1, (-1, D))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    slots = slots + attention.o_proj(mixed.transpose(1, 2).flatten(2))
    return slots + layer.mlp(layer.post_attention_layernorm(slots))


Step = Callable[[Drafter, FrozenTarget, torch.Tensor, Blocks], torch.Tensor]
WAYS: dict[str, Step] = {"ours": our_step, "plain": plain_step}


def make_inputs(shape: DrafterShape, dtype: torch.dtype, device: torch.device) -> list[Input]:
    """Random micro-batches of LENGTHS, the second half of each sample supervised."""
    inputs = []
    for lengths in LENGTHS:
        S, T = len(lengths), max(lengths)
        length_S = torch.tensor(lengths)[:, None]
        positions = torch.arange(T).expand(S, -1)
        mask = (positions >= length_S // 2) & (positions < length_S)
        ids = torch.randint(0, shape.vocab_size, (S, T))
        anchors = [draw_anchors(row.numpy(), ANCHORS, (0, 0, s)) for s, row in enumerate(mask)]
        padded = pad_anchors(anchors).to(device)
        states = torch.randn(S, T, len(shape.target_layer_ids), shape.hidden_size).to(device, dtype)
        inputs.append(Input(states, make_blocks(ids.to(device), mask.to(device), padded, shape.block_size)))
    return inputs


def make_models(shape: DrafterShape, dtype: torch.dtype, device: torch.device) -> tuple[Drafter, FrozenTarget]:
    """A drafter with float32 weights and a frozen embedding and head in `dtype`, all random."""
    drafter = Drafter(shape)
    drafter.initialize(torch.Generator().manual_seed(0))
    table = (torch.randn(shape.vocab_size, shape.hidden_size) * 0.1).to(device, dtype)
    return drafter.to(device), FrozenTarget(table, Head(table), 1.0)


def run_step(way: str, drafter: Drafter, frozen: FrozenTarget, micro_batch: Input) -> float:
    """Seconds of one forward and backward; the gradients stay on the drafter."""
    device, dtype = micro_batch.states.device, micro_batch.states.dtype
    drafter.zero_grad(set_to_none=True)
    started = time.perf_counter()
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        loss = WAYS[way](drafter, frozen, micro_batch.states, micro_batch.blocks)
    loss.backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def product_rate(shape: DrafterShape, dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of the product with the head, 1,024 rows: the best of many."""
    rows = torch.randn(1024, shape.hidden_size).to(device, dtype)
    head = torch.randn(shape.vocab_size, shape.hidden_size).to(device, dtype)
    out = torch.empty(1024, shape.vocab_size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        torch.mm(rows, head.T, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2.0 * rows.numel() * shape.vocab_size / best


def count_operations(drafter: Drafter, frozen: FrozenTarget, micro_batch: Input) -> int:
    """Multiplications and additions of our step's matrix products, as torch counts them while it runs."""
    with FlopCounterMode(display=False) as counter:
        run_step("ours", drafter, frozen, micro_batch)
    return counter.get_total_flops()


def compare(dtype: torch.dtype, device: torch.device, rounds: int) -> dict[str, float]:
    """Both ways' rates and the named figures; fails if their gradients differ."""
    drafter, frozen = make_models(SMOLLM2, dtype, device)
    inputs = make_inputs(SMOLLM2, dtype, device)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds + 1):  # the first round warms up
        for way in WAYS:
            seconds[way].append(sum(run_step(way, drafter, frozen, micro_batch) for micro_batch in inputs))
    gradients = {}
    for way in WAYS:
        run_step(way, drafter, frozen, inputs[0])
        gradients[way] = torch.cat([parameter.grad.flatten() for parameter in drafter.parameters()])  # type: ignore[union-attr]
    difference = (gradients["ours"] - gradients["plain"]).norm() / gradients["plain"].norm()
    assert difference < (1e-4 if dtype == torch.float32 else 0.05), f"the gradients differ by {difference:.2g}"
    num_blocks = sum(int(micro_batch.blocks.mask_SAK[..., 0].sum()) for micro_batch in inputs)
    operations = sum(count_operations(drafter, frozen, micro_batch) for micro_batch in inputs)
    typical = {way: statistics.median(times[1:]) for way, times in seconds.items()}
    ratio = statistics.median(plain / ours for ours, plain in zip(*(seconds[way][1:] for way in WAYS), strict=True))
    return {
        "over_plain": ratio,
        "roofline": operations / product_rate(SMOLLM2, dtype, device) / typical["ours"],
        "blocks_per_second": num_blocks / typical["ours"],
        "plain_blocks_per_second": num_blocks / typical["plain"],
        "tokens_per_second": sum(map(sum, LENGTHS)) / typical["ours"],
        "tera_operations": operations / 1e12,
    }


def measure_peak(way: str, vocab_size: int, dtype: torch.dtype, queue: "multiprocessing.Queue[int]") -> None:
    """Bytes by which a step raises the process's peak over what models and inputs take."""
    shape, device = replace(SMOLLM2, vocab_size=vocab_size), torch.device("cpu")
    drafter, frozen = make_models(shape, dtype, device)
    micro_batch = make_inputs(shape, dtype, device)[0]
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = peak_bytes()
    run_step(way, drafter, frozen, micro_batch)
    queue.put(peak_bytes() - before)


def peak_bytes() -> int:
    """The most memory that this process held since its peak was last forgotten (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def peaks(dtype: torch.dtype) -> dict[str, float]:
    """GiB that a step of the first micro-batch adds, by way and vocabulary."""
    context = multiprocessing.get_context("spawn")
    found = {}
    for way in WAYS:
        for vocab_size in (49_152, 152_064):
            queue = context.Queue()
            process = context.Process(target=measure_peak, args=(way, vocab_size, dtype, queue))
            process.start()
            found[f"peak_gib_{way}_{vocab_size}"] = queue.get() / 2**30
            process.join()
    return found


def main() -> None:
    """Print a table, and with --json one object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    name = fastest_dtype() if arguments.dtype == "auto" else arguments.dtype
    dtype = getattr(torch, name)
    figures = compare(dtype, torch.device(arguments.device), arguments.rounds)
    if arguments.peak:
        figures |= peaks(dtype)
    table = Table("figure", f"{name}, {arguments.device}", box=None)
    for key, value in figures.items():
        table.add_row(key, f"{value:,.2f}")
    Console().print(table)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()

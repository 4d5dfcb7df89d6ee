"""Whether a target's decoding survives rejected drafts: checked on the target itself, before anything is promised.

A prompt and blocks behind it are read as decoding reads them, and of each block all but some tokens are taken back. The
logits of the tokens that stay are compared with those of one pass over the whole text without a cache; and so are
those of the same text read in the same pieces with nothing to take back, which differ by rounding alone. Differences
are in lengths of the logits' vectors, less their mean, and their median over the positions counts: an expert chosen
otherwise by rounding moves a few positions far, a wrong state all of them. Cost: some twenty short passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor

from dflash_cache.decode.prompts import Question
from dflash_cache.decode.rows import open_rows
from dflash_cache.errors import TargetError
from dflash_cache.target.load import Target

BLOCK = 8
KEPT = (1, 5, 8, 3, 1, 6, 2)  # of each block: whole, in part, and in part again before anything has been read anew
# Medians by rounding, of 46 families' random targets: up to 1.3e-5, 0.018 and 0.002. States that are not taken back
# gave 0.9 and more, but for Falcon-H1's, whose random state-space layers say little: 8e-4.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
LARGEST = 0.2  # more is no rounding


@dataclass(frozen=True)
class Probe:
    """Median differences of logits from a pass over the whole text: `difference` behind drafts taken back, `rounding`
    without any; over `num_positions`."""

    difference: float
    rounding: float
    num_positions: int


@torch.inference_mode()
def probe_target(target: Target, questions: Sequence[Question], batch_size: int) -> Probe:
    """Read the longest questions, as many as are decoded at once but at most two.

    Raises TargetError if the logits differ by more than rounding, or as `open_rows`; synchronises the device.
    """
    prompts = sorted((question.ids for question in questions), key=len)[-min(batch_size, 2) :]
    texts = [_continue(prompt) for prompt in prompts]
    whole = [_read_whole(target, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    taken_back = _read_blocks(target, prompts, texts)
    in_pieces = [_read_blocks(target, [prompt], [text], 0)[0] for prompt, text in zip(prompts, texts, strict=True)]
    probe = Probe(_compare(taken_back, whole), _compare(in_pieces, whole), sum(map(len, whole)))
    check_probe(probe, target)
    return probe


def check_probe(probe: Probe, target: Target) -> None:
    """Raise TargetError if rounding does not explain what was found."""
    if probe.rounding > LARGEST:
        fault = f"other logits with a cache than without ({probe.rounding:.2g} of their size apart, in the median)"
    elif probe.difference > max(ROUNDING[target.dtype], 4 * probe.rounding):
        fault = (
            f"other logits behind rejected drafts than without any ({probe.difference:.2g} of their size from one pass "
            f"over the text, in the median, not {probe.rounding:.2g})"
        )
    else:
        return
    raise TargetError(
        f"The target ({target.config.model_type}) gives {fault}: drafts would change its answers, and more than "
        f"rounding in {str(target.dtype).removeprefix('torch.')} does; use another target or version of transformers."
    )


def _kept_by(row: int) -> tuple[int, ...]:
    """Of each block, another number in the second row: there a hole stays."""
    return KEPT[row:] + KEPT[:row]


def _continue(prompt: list[int]) -> list[int]:
    """The text that stays behind a prompt: its own tokens over again, for any others may mean something else."""
    return [*islice(cycle(prompt), sum(KEPT))]


def _read_whole(target: Target, prompt: list[int], text: list[int]) -> Tensor:
    """Logits (T, V) of the text's positions."""
    ids_1T = torch.tensor([prompt + text], device=target.device)
    logits_TV: Tensor = target.model(input_ids=ids_1T, use_cache=False, logits_to_keep=len(text)).logits[0]
    return logits_TV.float()


def _read_blocks(
    target: Target, prompts: list[list[int]], texts: list[list[int]], num_wrong: int = BLOCK
) -> list[Tensor]:
    """Each row's logits (T, V) of its text's positions, read in blocks; behind the right tokens up to `num_wrong`."""
    rows = open_rows(target, prompts, takes_back=num_wrong > 0)
    rows.read_prompts()
    found: list[list[Tensor]] = [[] for _ in prompts]
    begins = [0] * len(prompts)
    for counts in zip(*(_kept_by(row) for row in range(len(prompts))), strict=True):
        blocks = []
        for text, begin, count in zip(texts, begins, counts, strict=True):
            right = text[begin : begin + count]
            wrong = [*islice(cycle(reversed(text)), min(num_wrong, BLOCK - count))]
            blocks.append(right + wrong)
        logits_STV = rows.read_blocks(blocks)
        rows.keep(counts)
        for parts, logits_TV, count in zip(found, logits_STV, counts, strict=True):
            parts.append(logits_TV[:count].float())
        begins = [begin + count for begin, count in zip(begins, counts, strict=True)]
    return [torch.cat(parts) for parts in found]


def _compare(found: list[Tensor], expected: list[Tensor]) -> float:
    """The median over all positions but those before anything was rejected."""
    shares = []
    for row, (one_TV, other_TV) in enumerate(zip(found, expected, strict=True)):
        first = _kept_by(row)[0]
        centred_TV = other_TV - other_TV.mean(dim=-1, keepdim=True)
        shares.append(((one_TV - other_TV).norm(dim=-1) / centred_TV.norm(dim=-1))[first:])
    return float(torch.cat(shares).median())

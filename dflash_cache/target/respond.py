"""The target answers prompts itself: a drafter must learn the target's own words.

Prompts are sorted by length and answered in batches, padded on the left; whoever has ended is taken out of the batch
and of its key-value cache, so that late rows do not pay for early ones. Batches and their seeds follow from the
prompts and the settings alone, so a batch redone on the same machine gives the same answers. Each finished batch is
one immutable parquet file beside a `plan.json` that says what the answers belong to; a killed run loses the batch it
was in. Memory: one key-value cache of a batch, and its logits, (S, V) in float32.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from transformers import DynamicCache
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from dflash_cache.cache.files import write_atomically, write_table
from dflash_cache.cache.seal import BLANK_SEAL, read_sealed_table, seal_bytes
from dflash_cache.config.settings import RespondSettings
from dflash_cache.errors import CacheError
from dflash_cache.target.kv_cache import make_cache
from dflash_cache.target.load import Target, cache_argument, stop_tokens

Progress = Callable[[int, int, int], None]

SCHEMA = pa.schema(
    [
        pa.field("prompt", pa.int64(), nullable=False),  # its place in the caller's list
        pa.field("answer", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
    ]
)


def respond(
    target: Target, prompts: list[list[int]], settings: RespondSettings, folder: Path, progress: Progress
) -> list[list[int]]:
    """Each prompt's answer as token ids, the stop token included where one was generated; the prompts' order is kept.

    `progress` gets the prompts answered so far, their number, and the new tokens of this call: at the start and
    after each batch.
    Raises CacheError if `folder` holds answers to other prompts, or by another target or other settings.
    """
    claim_answers(target, prompts, settings, folder)
    done = new_tokens = 0
    progress(done, len(prompts), new_tokens)
    for batch in list_batches(prompts, settings):
        if is_pending(batch, folder):
            new_tokens += batch.make(target, settings, folder)
        done += len(batch.members)
        progress(done, len(prompts), new_tokens)
    return read_answers(prompts, settings, folder)


def claim_answers(target: Target, prompts: list[list[int]], settings: RespondSettings, folder: Path) -> None:
    """Make `folder` that of these answers. Raises CacheError if it holds others; several may claim it at once."""
    _claim_folder(folder, _describe_plan(target, prompts, settings))


@dataclass(frozen=True)
class AnswerBatch:
    """A batch's number, the places of its prompts among all, and the prompts."""

    number: int
    members: list[int]
    prompts: list[list[int]]

    def make(self, target: Target, settings: RespondSettings, folder: Path) -> int:
        """Answer it and write the answers; returns how many tokens they have."""
        generator = _seed_batch(target.device, settings.seed, self.number)
        replies = answer_batch(target, self.prompts, settings, generator)
        _write_batch(_batch_path(folder, self.number), self.members, replies)
        return sum(map(len, replies))


def list_batches(prompts: list[list[int]], settings: RespondSettings) -> list[AnswerBatch]:
    """All batches in their order."""
    return [
        AnswerBatch(number, members, [prompts[place] for place in members])
        for number, members in enumerate(plan_batches(prompts, settings.batch_size))
    ]


def is_pending(batch: AnswerBatch, folder: Path) -> bool:
    """Whether it has no answers yet."""
    return not _batch_path(folder, batch.number).exists()


def read_answers(prompts: list[list[int]], settings: RespondSettings, folder: Path) -> list[list[int]]:
    """All answers in the order of their prompts, each batch having been made. Raises CacheError."""
    answers: list[list[int]] = [[] for _ in prompts]
    for batch, members in enumerate(plan_batches(prompts, settings.batch_size)):
        replies = _read_batch(_batch_path(folder, batch), members)
        for place, reply in zip(members, replies, strict=True):
            answers[place] = reply
    return answers


def plan_batches(prompts: list[list[int]], batch_size: int) -> list[list[int]]:
    """The prompts' places, shortest first, cut into batches: equal lengths side by side need little padding."""
    order = sorted(range(len(prompts)), key=lambda place: (len(prompts[place]), place))
    return [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]


@torch.inference_mode()
def answer_batch(
    target: Target, prompts: list[list[int]], settings: RespondSettings, generator: torch.Generator
) -> list[list[int]]:
    """Decode all prompts at once, a token a pass, until each has stopped or is at `max_new_tokens`.

    Synchronises the device once a token.
    """
    stops = torch.tensor(sorted(stop_tokens(target)), device=target.device)
    answers: list[list[int]] = [[] for _ in prompts]
    rows = _Rows.begin(target, prompts)
    while True:
        tokens_S = choose_tokens(rows.forward(target), settings, generator)
        for place, token in zip(rows.places, tokens_S.tolist(), strict=True):
            answers[place].append(token)
        if len(answers[rows.places[0]]) == settings.max_new_tokens:
            return answers
        going = (~torch.isin(tokens_S, stops)).nonzero()[:, 0]
        if len(going) == 0:
            return answers
        rows.advance(tokens_S, going)


def choose_tokens(logits_SV: Tensor, settings: RespondSettings, generator: torch.Generator) -> Tensor:
    """Next tokens (S,) from float32 logits: the likeliest at temperature 0, else drawn from softmax(logits / T).

    With top_p < 1 only the smallest set of likeliest tokens that together reach top_p is drawn from.
    """
    if settings.temperature == 0:
        return logits_SV.argmax(dim=-1)
    probabilities_SV = (logits_SV / settings.temperature).softmax(dim=-1)
    if settings.top_p == 1:
        return torch.multinomial(probabilities_SV, 1, generator=generator)[:, 0]
    sorted_SV, ids_SV = probabilities_SV.sort(dim=-1, descending=True)
    before_SV = sorted_SV.cumsum(dim=-1) - sorted_SV
    sorted_SV[before_SV >= settings.top_p] = 0.0
    drawn_S1 = torch.multinomial(sorted_SV, 1, generator=generator)
    return ids_SV.gather(1, drawn_S1)[:, 0]


@dataclass
class _Rows:
    """The rows that still go on: ids (S, T) not forwarded yet, which of all positions are valid, and their cache.

    `places` are the rows' places in the batch as it began.
    """

    ids_ST: Tensor
    mask_ST: Tensor
    cache: DynamicCache
    places: list[int]

    @classmethod
    def begin(cls, target: Target, prompts: list[list[int]]) -> "_Rows":
        longest = max(map(len, prompts))
        ids = np.zeros((len(prompts), longest), np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        return cls(
            ids_ST=torch.from_numpy(ids).to(target.device),
            mask_ST=torch.from_numpy(mask).to(target.device),
            cache=make_cache(target.model.config),
            places=list(range(len(prompts))),
        )

    def forward(self, target: Target) -> Tensor:
        """Float32 logits (S, V) of each row's next token."""
        num_new = self.ids_ST.shape[1]
        positions_ST = (self.mask_ST.cumsum(dim=-1) - 1).clamp(min=0)[:, -num_new:]
        output = target.model(
            input_ids=self.ids_ST,
            attention_mask=self.mask_ST,
            position_ids=positions_ST,
            use_cache=True,
            logits_to_keep=1,
            **{cache_argument(target.model): self.cache},
        )
        logits_SV: Tensor = output.logits[:, -1].float()
        return logits_SV

    def advance(self, tokens_S: Tensor, going: Tensor) -> None:
        """Append a token to each row of `going` (ascending), and drop the other rows."""
        if len(going) < len(self.places):
            # Not `batch_select_indices`, which leaves recurrent and convolution states out.
            self.cache.reorder_cache(going)  # type: ignore[arg-type]  # asks for a LongTensor, which it is
            self.mask_ST = self.mask_ST[going]
            self.places = [self.places[row] for row in going.tolist()]
        self.ids_ST = tokens_S[going, None]
        self.mask_ST = torch.cat([self.mask_ST, self.mask_ST.new_ones(len(going), 1)], dim=1)


def _batch_path(folder: Path, batch: int) -> Path:
    return folder / f"batch-{batch:06d}.parquet"


def _seed_batch(device: torch.device, seed: int, batch: int) -> torch.Generator:
    """A generator of its own for each batch, so that one redone alone draws what it drew before."""
    return torch.Generator(device).manual_seed(xxh3_64_intdigest(f"{seed}/{batch}".encode()) >> 1)


def _describe_plan(target: Target, prompts: list[list[int]], settings: RespondSettings) -> dict[str, Any]:
    """All that the answers depend on, in values that JSON gives back equal."""
    ids = np.array([id for prompt in prompts for id in prompt], np.int64)
    lengths = np.array([len(prompt) for prompt in prompts], np.int64)
    return {
        "prompts": xxh3_64_hexdigest(lengths.tobytes() + ids.tobytes()),
        "num_prompts": len(prompts),
        "target": target.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "stop_tokens": sorted(stop_tokens(target)),
        **settings.model_dump(exclude={"enabled"}),
    }


def _claim_folder(folder: Path, plan: dict[str, Any]) -> None:
    """Write the plan into a new folder, or see that an old one's is the same."""
    path = folder / "plan.json"
    try:
        was = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(was, dict):
            raise ValueError("no JSON object")
    except FileNotFoundError:
        write_atomically(path, seal_bytes(f"{json.dumps({**plan, 'seal': BLANK_SEAL}, indent=2)}\n".encode()))
        return
    except (OSError, ValueError) as error:
        raise CacheError(
            f"The answers' plan {path} cannot be read ({error}): delete the folder {folder} to make the answers anew."
        ) from None
    was.pop("seal", None)
    names = [name for name in {**plan, **was} if was.get(name) != plan.get(name)]
    if names:
        changes = "; ".join(f"{name}: was {was.get(name)}, is {plan.get(name)}" for name in names)
        raise CacheError(
            f"The answers in {folder} belong to something else ({changes}): undo the change, name another cache_dir, "
            "or delete that folder to make the answers anew."
        )


def _write_batch(path: Path, members: list[int], replies: list[list[int]]) -> None:
    table = pa.table({"prompt": members, "answer": replies}, schema=SCHEMA)
    write_table(path, table)


def _read_batch(path: Path, members: list[int]) -> list[list[int]]:
    try:
        table = read_sealed_table(path)
        if not table.schema.equals(SCHEMA) or table["prompt"].to_pylist() != members:
            raise pa.ArrowInvalid("unexpected columns or prompts")
    except (pa.ArrowException, OSError) as error:
        raise CacheError(
            f"The answers {path} are damaged ({str(error).splitlines()[0].rstrip('.')}): delete that file and run the "
            "same command again, which makes them anew."
        ) from None
    replies: list[list[int]] = table["answer"].to_pylist()
    return replies

"""What a cache will take and give, before anything runs: bytes, shards, hours, rates, and when it pays.

Lengths are the real ones: conversations are tokenized as `generate` does. Only answers that the target has yet to
write are unknown; they count with `respond.max_new_tokens`, so the figures are then upper bounds. No weights are
loaded and nothing is written.
"""

import math
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np

from dflash_cache.cache.layout import is_remote
from dflash_cache.cache.shards import DATA_BEGIN, ID_BYTES, MASK_BYTES
from dflash_cache.cache.state_format import StateFormat, check_codec, is_codable
from dflash_cache.config.dtypes import Codec
from dflash_cache.config.settings import Config
from dflash_cache.data.buckets import assign_buckets, quantile_bounds
from dflash_cache.data.conversations import ReadResult, RecordError, read_conversations
from dflash_cache.data.plan import JobList, plan_jobs
from dflash_cache.data.templates import check_template, tokenize_prompt
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.errors import DataError
from dflash_cache.target.load import load_tokenizer, resolve_layer_ids
from dflash_cache.target.observer import Observer
from dflash_cache.target.prepare import build


@dataclass(frozen=True)
class Forecast:
    """The cache's size; `num_open` of the samples wait for an answer whose length is a bound.

    `free_bytes`: where it will lie, None if that is a store. `state_bytes_by_codec`: of the states alone, with each
    codec that can hold them.
    """

    num_samples: int
    num_open: int
    num_tokens: int
    token_bytes: int
    num_bytes: int
    num_shards: int
    free_bytes: int | None
    state_bytes_by_codec: dict[Codec, int]


@dataclass(frozen=True)
class Rates:
    """What the user knows of the machine: tokens a second of the target and of training, bytes a second of the disk."""

    target_tokens: float | None = None
    train_tokens: float | None = None
    storage_bytes: float | None = None


def forecast(config: Config, observer: Observer) -> Forecast:
    """Size of the cache of `config`. Raises ConfigError, DataError or TargetError as `generate` would."""
    files = TargetFiles(config.target)
    target_config = files.load_config()
    num_layers = len(resolve_layer_ids(config.target, target_config))
    read = read_conversations(config.data.paths, config.data.strict, config.data.drop_duplicates)
    observer.skipped(read.skipped, read.first_skipped)
    answered_N = _measure_answered(config, read, observer)
    open_N = _bound_open(config, read, observer)
    lengths = np.concatenate([answered_N, open_N])
    if not len(lengths):
        raise DataError("No sample is left: every conversation waits for an answer, and respond.enabled is off.")
    check_codec(config.generate.codec, target_config.hidden_size)
    states = StateFormat(num_layers, target_config.hidden_size, config.target.dtype, config.generate.codec)
    token_bytes = states.token_bytes + ID_BYTES + MASK_BYTES
    bounds = config.data.bucket_bounds or quantile_bounds(lengths, config.data.num_buckets, config.data.max_length)
    jobs = plan_jobs(lengths, assign_buckets(lengths, bounds), config.generate.token_budget, config.generate.order_seed)
    num_shards = count_shards(jobs, lengths, token_bytes, config.generate.shard_bytes)
    return Forecast(
        num_samples=len(lengths),
        num_open=len(open_N),
        num_tokens=int(lengths.sum()),
        token_bytes=token_bytes,
        num_bytes=int(lengths.sum()) * token_bytes + num_shards * DATA_BEGIN,
        num_shards=num_shards,
        free_bytes=_count_free(config.cache_dir),
        state_bytes_by_codec=_size_by_codec(states, int(lengths.sum())),
    )


def _count_free(cache_dir: str) -> int | None:
    return None if is_remote(cache_dir) else shutil.disk_usage(_nearest_folder(Path(cache_dir))).free


def _size_by_codec(states: StateFormat, num_tokens: int) -> dict[Codec, int]:
    return {
        codec: num_tokens * replace(states, codec=codec).token_bytes
        for codec in get_args(Codec)
        if is_codable(codec, states.hidden_size)
    }


def count_shards(jobs: JobList, lengths_N: np.ndarray, token_bytes: int, shard_bytes: int) -> int:
    """Shards of one worker without interruptions and time limit: each is closed by the job that fills it."""
    count, held_by_bucket = 0, dict.fromkeys(jobs.bucket.tolist(), DATA_BEGIN)
    tokens_J = np.add.reduceat(lengths_N[jobs.samples], jobs.begin[:-1])
    for bucket, tokens in zip(jobs.bucket.tolist(), tokens_J.tolist(), strict=True):
        held = held_by_bucket[bucket] + tokens * token_bytes
        count += held >= shard_bytes
        held_by_bucket[bucket] = DATA_BEGIN if held >= shard_bytes else held
    return count + sum(held > DATA_BEGIN for held in held_by_bucket.values())


def generate_seconds(cache: Forecast, rates: Rates) -> float | None:
    """How long `generate` takes: the target's forwards or the writing, whichever is slower; None without a rate."""
    if rates.target_tokens is None:
        return None
    writing = cache.num_bytes / rates.storage_bytes if rates.storage_bytes else 0.0
    return max(cache.num_tokens / rates.target_tokens, writing)


def needed_bytes_per_second(cache: Forecast, rates: Rates) -> float | None:
    """What training must be able to read so that it never waits; None without a rate."""
    return rates.train_tokens * cache.token_bytes if rates.train_tokens is not None else None


def passes_until_it_pays(cache: Forecast, rates: Rates) -> float | None:
    """From how many passes over the data on (epochs × drafters) a cache costs less time than the target each time.

    n passes cost n forwards without a cache; with one, a first run and n reads, none of it overlapped with training.
    So n is the least whole number above first / (forward − read), infinite if reading is no faster than the target.
    None without both rates.
    """
    first = generate_seconds(cache, rates)
    if first is None or rates.target_tokens is None or rates.storage_bytes is None:
        return None
    saved = cache.num_tokens / rates.target_tokens - cache.num_bytes / rates.storage_bytes
    return math.floor(first / saved) + 1 if saved > 0 else math.inf


def _measure_answered(config: Config, read: ReadResult, observer: Observer) -> np.ndarray:
    """Lengths (N,) of the samples whose text is all there."""
    answered = [conversation for conversation in read.conversations if not conversation.needs_answer]
    if not answered:
        return np.zeros(0, np.int64)
    closed = config.model_copy(update={"respond": config.respond.model_copy(update={"enabled": False})})
    samples, _ = build(closed, replace(read, conversations=answered), {}, observer)
    lengths: np.ndarray = samples["length"].to_numpy().astype(np.int64)
    return lengths


def _bound_open(config: Config, read: ReadResult, observer: Observer) -> np.ndarray:
    """The greatest lengths (N,) that prompts without an answer may get; none if they are left out.

    A prompt that the template refuses is counted, as `generate` does. Raises RecordError at it with data.strict.
    """
    waiting = [conversation for conversation in read.conversations if conversation.needs_answer]
    if not waiting or not config.respond.enabled:
        return np.zeros(0, np.int64)
    tokenizer = load_tokenizer(config.target)
    check_template(tokenizer, config.target.model)
    prompts: list[int] = []
    reasons: Counter[str] = Counter()
    first: dict[str, str] = {}
    for each in waiting:
        try:
            prompts.append(len(tokenize_prompt(tokenizer, each.messages, each.source, each.tools)))
        except RecordError as error:
            if config.data.strict:
                raise
            reasons[error.reason] += 1
            first.setdefault(error.reason, each.source)
    observer.skipped(dict(reasons), first)
    return np.minimum(np.array(prompts, np.int64) + config.respond.max_new_tokens, config.data.max_length)


def _nearest_folder(path: Path) -> Path:
    """The folder itself or its nearest parent that exists."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path

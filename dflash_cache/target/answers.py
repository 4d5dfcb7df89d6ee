"""The target's own answers by one worker or several: whoever is free takes the next batch that nobody has.

What a batch answers depends on neither its worker nor their number, so that the answers are those of one worker. The
workers, who share nothing but the storage and the counters, find the prompts in a file beside the answers.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # re-exported silently

from dflash_cache.cache.files import write_table
from dflash_cache.cache.layout import responses_dir
from dflash_cache.cache.seal import read_sealed_table
from dflash_cache.config.settings import Config
from dflash_cache.target.dealer import Dealer
from dflash_cache.target.load import Target
from dflash_cache.target.respond import AnswerBatch, Progress, claim_answers, list_batches

ANNOUNCED = "answering/folder"  # set when there are batches to take
_PROMPTS = "prompts.parquet"
_SCHEMA = pa.schema([pa.field("prompt", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False)])


def deal_batches(
    config: Config, store: Store, prompts: list[list[int]], folder: Path, pending: list[AnswerBatch]
) -> Dealer:
    """Lay out the batches to be answered, and tell the workers where their prompts are. Raises WriteError."""
    write_table(folder / _PROMPTS, pa.table({"prompt": prompts}, schema=_SCHEMA))
    dealer = _dealer_of(store)
    dealer.begin(np.array([batch.number for batch in pending]), [], num_tokens=0, num_bad=0)
    store.set(ANNOUNCED, folder.relative_to(responses_dir(Path(config.cache_dir))).as_posix())
    return dealer


def answer_batches(
    config: Config, load: Callable[[], Target], store: Store, tell: Callable[[], object] = lambda: None
) -> None:
    """Answer batches until none is left to take, and `tell` after each.

    Raises CacheError if the folder holds others' answers.
    """
    folder = responses_dir(Path(config.cache_dir)) / store.get(ANNOUNCED).decode()
    prompts: list[list[int]] = read_sealed_table(folder / _PROMPTS)["prompt"].to_pylist()
    target, dealer, settings = load(), _dealer_of(store), config.respond
    batches = list_batches(prompts, settings)
    claim_answers(target, prompts, settings, folder)
    while (number := dealer.next_job()) is not None:
        dealer.add_tokens(batches[number].make(target, settings, folder))
        dealer.add_answers(len(batches[number].members))
        tell()


class AnswersTold:
    """Tells of the prompts that all workers have answered, when their number has changed; `num_done`: before."""

    def __init__(self, dealer: Dealer, num_done: int, num_prompts: int, progress: Progress) -> None:
        self._dealer, self._num_done, self._num_prompts, self._progress = dealer, num_done, num_prompts, progress
        self._told = -1

    def __call__(self) -> bool:
        """Whether all are answered."""
        done = self._num_done + self._dealer.add_answers(0)
        if done != self._told:
            self._progress(done, self._num_prompts, self._dealer.add_tokens(0))
            self._told = done
        return done == self._num_prompts


def _dealer_of(store: Store) -> Dealer:
    return Dealer(PrefixStore("answering", store))

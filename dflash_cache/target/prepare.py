"""All that is known before the first forward: samples, buckets, the job list, and the manifest that names them.

It is the same on every run with the same configuration, so a stopped run goes on by doing what is missing.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from xxhash import xxh3_64

from dflash_cache.cache.files import write_table
from dflash_cache.cache.layout import Manifest, jobs_path, manifest_path, read_manifest, responses_dir, samples_path
from dflash_cache.cache.state_format import check_codec
from dflash_cache.config.settings import Config
from dflash_cache.data.buckets import assign_buckets, quantile_bounds
from dflash_cache.data.conversations import ReadResult, RecordError, read_conversations
from dflash_cache.data.cutting import tokenize_to_fit
from dflash_cache.data.plan import JobList, plan_jobs
from dflash_cache.data.report import DataReport, make_report
from dflash_cache.data.samples import build_samples
from dflash_cache.data.templates import (
    MASK_RULE,
    Tokens,
    answer_sample,
    check_template,
    template_fingerprint,
    tokenize_prompt,
    tokenizer_fingerprint,
)
from dflash_cache.drafter.mask_token import list_candidates
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.errors import CacheError
from dflash_cache.target.data_report import write_report
from dflash_cache.target.load import (
    Target,
    drafter_layer_ids,
    load_target,
    load_tokenizer,
    resolve_layer_ids,
    stop_ids_of,
)
from dflash_cache.target.observer import Observer

# From prompts, and the folder where answers are kept, to each prompt's answer; both as token ids.
Answerer = Callable[[list[list[int]], Path], list[list[int]]]


@dataclass(frozen=True)
class Preparation:
    """samples: the table of `data.samples`; bucket_N: each one's bucket; jobs: the list; report: if just made."""

    samples: pa.Table
    bucket_N: np.ndarray
    jobs: JobList
    manifest: Manifest
    report: DataReport | None = None

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample (N,) int64."""
        lengths: np.ndarray = self.samples["length"].to_numpy().astype(np.int64)
        return lengths


class Loader:
    """The target, loaded when first needed: a finished cache is seen to be finished without it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._target: Target | None = None

    def load(self) -> Target:
        """The target, loaded once."""
        if self._target is None:
            self._target = load_target(self._config.target)
        return self._target

    def drop(self) -> None:
        """Give its memory back: others load it too."""
        self._target = None


def prepare(config: Config, answerer: Answerer, observer: Observer, append: bool = False) -> Preparation:
    """Read, have `answerer` answer, tokenize, bucket and list, to begin a cache or to `append` to one.

    Raises ConfigError, DataError or TargetError.
    """
    files = TargetFiles(config.target)
    target_config = files.load_config()
    layer_ids = resolve_layer_ids(config.target, target_config)
    tokenizer = load_tokenizer(config.target)
    check_template(tokenizer, config.target.model)
    read = read_conversations(config.data.paths, config.data.strict, config.data.drop_duplicates)
    observer.skipped(read.skipped, read.first_skipped)
    fingerprint = files.fingerprint()

    samples, report = build(config, read, answer(config, read, answerer, append), observer)
    observer.reported(report)
    lengths = samples["length"].to_numpy()
    bounds = config.data.bucket_bounds or quantile_bounds(lengths, config.data.num_buckets, config.data.max_length)
    bucket_N = assign_buckets(lengths, bounds)
    jobs = plan_jobs(lengths, bucket_N, config.generate.token_budget, config.generate.order_seed)
    used_ids = pc.unique(pc.list_flatten(samples["input_ids"])).to_numpy()
    manifest = Manifest(
        tool_version=version("dflash-cache"),
        target_model=config.target.model,
        target_revision=config.target.revision,
        target_fingerprint=fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        template_fingerprint=template_fingerprint(tokenizer),
        mask_rule=MASK_RULE,
        layer_ids=layer_ids,
        last_hidden=layer_ids != drafter_layer_ids(config.target, target_config),
        target_num_layers=target_config.num_hidden_layers,
        hidden_size=target_config.hidden_size,
        vocab_size=target_config.vocab_size,
        dtype=config.target.dtype,
        codec=check_codec(config.generate.codec, target_config.hidden_size),
        bucket_bounds=tuple(bounds),
        max_length=config.data.max_length,
        data_fingerprint=samples_fingerprint(samples),
        num_samples=samples.num_rows,
        order_seed=config.generate.order_seed,
        mask_token_candidates=tuple(
            list_candidates(target_config.vocab_size, len(tokenizer), tokenizer.all_special_ids, used_ids)
        ),
        settings=config.model_dump(mode="json"),
    )
    return Preparation(samples, bucket_N, jobs, manifest, report)


def read_preparation(config: Config) -> Preparation:
    """The same, as another worker left it in the cache. Raises CacheError."""
    cache_dir = Path(config.cache_dir)
    manifest = read_manifest(cache_dir)
    samples = pa.concat_tables(read_samples(cache_dir, part) for part in range(max(1, len(manifest.parts))))
    jobs = _read_table(jobs_path(cache_dir))
    sizes = pc.list_value_length(jobs["samples"]).to_numpy()
    begin = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
    listed = JobList(pc.list_flatten(jobs["samples"]).to_numpy(), begin, jobs["bucket"].to_numpy())
    return Preparation(samples, samples["bucket"].to_numpy(), listed, manifest)


def read_samples(cache_dir: Path, part: int) -> pa.Table:
    """A part's samples: the table of `data.samples`, and the column bucket. Raises CacheError."""
    return _read_table(samples_path(cache_dir, part))


def _read_table(path: Path) -> pa.Table:
    try:
        return pq.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise CacheError(
            f"{path} cannot be read ({str(error).splitlines()[0].rstrip('.')}): restore it from a copy, or delete it "
            "and run `dflash generate` again with the data that it was made from."
        ) from None


def write_preparation(cache_dir: Path, preparation: Preparation) -> None:
    """Write samples, their report and job list into the cache, where they are not there already.

    Raises WriteError, or CacheError if a report that is there is damaged.
    """
    path = samples_path(cache_dir)
    if not path.exists():  # they follow from the manifest
        bucketed = preparation.samples.append_column("bucket", pa.array(preparation.bucket_N, pa.int16()))
        write_table(path, bucketed)
    if preparation.report is not None:
        write_report(cache_dir, 0, preparation.report)
    write_table(jobs_path(cache_dir), job_table(preparation.jobs))  # the token budget may be another than it was


def job_table(jobs: JobList) -> pa.Table:
    """One row a job: job, bucket, samples."""
    samples = pa.ListArray.from_arrays(pa.array(jobs.begin, pa.int32()), pa.array(jobs.samples, pa.int64()))
    numbers = pa.array(np.arange(jobs.num_jobs), pa.int32())
    return pa.table({"job": numbers, "bucket": pa.array(jobs.bucket, pa.int16()), "samples": samples})


def samples_fingerprint(samples: pa.Table) -> str:
    """16 hex digits over the ids and masks of all samples, in their order: what the states are computed from."""
    hasher = xxh3_64(samples["length"].to_numpy().tobytes())
    for name in ("input_ids", "loss_mask"):
        for chunk in samples[name].chunks:
            hasher.update(chunk.flatten().to_numpy(zero_copy_only=False).tobytes())
    return hasher.hexdigest()


def build(
    config: Config, read: ReadResult, answered: dict[str, Tokens], observer: Observer
) -> tuple[pa.Table, DataReport]:
    """The table of samples, those in `answered` with their answers from there; and what became of all records."""
    tokenizer = load_tokenizer(config.target)
    stop_ids = stop_ids_of(config.target, tokenizer)
    reasons: Counter[str] = Counter()
    first: dict[str, str] = {}

    def tokenized() -> Iterator[tuple[str, Tokens]]:
        for conversation in read.conversations:
            source = conversation.source
            if source in answered:
                yield source, answered[source]
                continue
            try:
                if conversation.needs_answer:
                    if config.respond.enabled:  # raises: else it were answered
                        tokenize_prompt(tokenizer, conversation.messages, source, conversation.tools)
                    raise RecordError(source, "no answer, and respond.enabled is off")
                yield source, tokenize_to_fit(tokenizer, conversation, config.data, stop_ids)
            except RecordError as error:
                if config.data.strict:
                    raise
                reasons[error.reason] += 1
                first.setdefault(error.reason, source)

    table, counts = build_samples(tokenized(), config.data)
    observer.skipped(dict(reasons) | counts.skipped, first | counts.first_skipped)
    report = make_report(read, reasons, first, counts)
    for sentence in report.describe_samples():
        observer.noted(sentence)
    return table, report


def answer(config: Config, read: ReadResult, answerer: Answerer, append: bool) -> dict[str, Tokens]:
    """The target's own answers by source, of conversations that end with the user's message, if `respond` is on.

    What is appended to a cache has a folder for its answers of its own, told by its prompts.
    """
    tokenizer = load_tokenizer(config.target)
    waiting = [conversation for conversation in read.conversations if conversation.needs_answer]
    if not waiting or not config.respond.enabled:
        return {}
    prompts: dict[str, list[int]] = {}
    for conversation in waiting:
        try:
            source = conversation.source
            prompts[source] = tokenize_prompt(tokenizer, conversation.messages, source, conversation.tools)
        except RecordError:  # `build` meets it again, and counts it
            if config.data.strict:
                raise
    folder = responses_dir(Path(config.cache_dir))
    if append and manifest_path(Path(config.cache_dir)).exists():
        folder /= f"appended-{xxh3_64(repr([*prompts.values()]).encode()).hexdigest()}"
    replies = answerer([*prompts.values()], folder)
    return {
        source: answer_sample(prompt, reply) for (source, prompt), reply in zip(prompts.items(), replies, strict=True)
    }

"""The first look at a dump: every sample's tokens, mask and shapes, but none of its states.

It makes the table of samples, from which buckets and shards are planned, and finds nearly all that can be wrong with
a dump before a byte is written: it stops as soon as more than the allowed share is bad, so a wrong list of layers
costs the opening of one file in a hundred. It costs one opening of every file (for `.ckpt.gz`, its whole inflation).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
import torch
from xxhash import xxh3_64

from dflash_cache.cache.adopt.dump import Dump, Expected, SampleError, check_sample, load_states, name_dtype
from dflash_cache.cache.codec import as_bytes
from dflash_cache.config.dtypes import Dtype
from dflash_cache.config.settings import DataSettings
from dflash_cache.data.conversations import list_reasons
from dflash_cache.data.samples import Counts, build_samples
from dflash_cache.data.templates import Tokens
from dflash_cache.errors import DataError

PROBED_SAMPLES = 16


@dataclass
class BadSamples:
    """The samples that cannot be used, by name and reason; more than `max_share` of `total` is an error."""

    total: int
    max_share: float
    by_name: dict[str, SampleError] = field(default_factory=dict)

    def add(self, error: SampleError) -> None:
        """Count one more, unless it is known. Raises DataError if these are too many."""
        self.by_name.setdefault(error.source, error)
        if len(self.by_name) > self.max_share * self.total:
            raise DataError(
                f"Too many samples of the dump cannot be used ({list_reasons(self.reasons, self.first)}), and at most "
                f"{self.max_share:.2%} of {self.total:,} may be left out: mend the dump, or set --max-bad-share."
            )

    @property
    def errors(self) -> list[SampleError]:
        """All of them, in the order in which they were found."""
        return list(self.by_name.values())

    @property
    def reasons(self) -> dict[str, int]:
        """How many samples there are of each reason."""
        counts: dict[str, int] = {}
        for error in self.errors:
            counts[error.reason] = counts.get(error.reason, 0) + 1
        return counts

    @property
    def first(self) -> dict[str, str]:
        """The first sample of each reason, with its detail."""
        first: dict[str, str] = {}
        for error in self.errors:
            first.setdefault(error.reason, f"{error.source}{error.detail and ', '}{error.detail}")
        return first


@dataclass(frozen=True)
class Scan:
    """samples: the table of `data.samples`, `source` the sample's name in the dump; dtype: that of all states."""

    samples: pa.Table
    counts: Counts
    dtype: Dtype


def scan_dump(
    dump: Dump, expected: Expected, settings: DataSettings, bad: BadSamples, progress: Callable[[int, int], None]
) -> Scan:
    """Every usable sample's tokens, in the dump's order; the others are added to `bad`.

    Raises DataError if too many are bad, none is left, or the dump lacks loss masks; SampleError at the first bad one
    where `settings.strict` asks for it.
    """
    found: list[tuple[torch.dtype, tuple[int, ...]]] = []  # dtype and shape of a token's states, of the first sample

    def usable() -> Iterator[tuple[str, Tokens]]:
        for done, name in enumerate(dump.names):
            progress(done, len(dump.names))
            try:
                tokens, kind = _open_sample(dump, name, expected)
                if found and kind != found[0]:
                    raise SampleError(name, "states of another dtype or shape than the first sample's")
            except SampleError as error:
                if settings.strict:
                    raise
                bad.add(error)
                continue
            found[:] = found or [kind]
            yield name, tokens
        progress(len(dump.names), len(dump.names))

    samples, counts = build_samples(usable(), settings)
    return Scan(samples, counts, name_dtype(dump.names[0], found[0][0]))


def check_masks(samples: pa.Table) -> None:
    """Raise DataError if every mask covers all tokens: then the dumper knew of no answers."""
    if pc.all(pc.equal(samples["loss_tokens"], samples["length"])).as_py():
        raise DataError(
            "The loss mask of every sample covers all of its tokens, the prompts too (Model Optimizer writes such "
            "masks without --answer-only-loss): dump again with masks of the answers, or pass --full-masks if it is "
            "meant."
        )


def fingerprint_states(dump: Dump, expected: Expected, samples: pa.Table) -> str:
    """16 hex digits over the states of at most 16 samples, evenly spread: tells two dumps of the same tokens apart."""
    hasher = xxh3_64()
    for probe in range(min(PROBED_SAMPLES, samples.num_rows)):
        i = probe * samples.num_rows // min(PROBED_SAMPLES, samples.num_rows)
        name, length = samples["source"][i].as_py(), samples["length"][i].as_py()
        try:
            states_TLH = load_states(name, dump.open_sample(name), expected, length)
        except SampleError as error:  # it will be left out when it is copied
            hasher.update(f"{error.source}: {error.reason}".encode())
            continue
        hasher.update(as_bytes(states_TLH).data)
    return hasher.hexdigest()


def _open_sample(dump: Dump, name: str, expected: Expected) -> tuple[Tokens, tuple[torch.dtype, tuple[int, ...]]]:
    sample = dump.open_sample(name)
    tokens = check_sample(name, sample, expected)
    name_dtype(name, sample.dtype)
    return tokens, (sample.dtype, sample.shape[1:])

"""A training step's record in words: a plain line, how it was mixed, a terminal's status line and table."""

from collections.abc import Iterator
from itertools import count, takewhile
from typing import TYPE_CHECKING

from dflash_cli.console import show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from dflash_cache.train.metrics import Record

_GAP = "  "


def show_step(record: "Record") -> str:
    """What a log file gets of a step."""
    return (
        f"step {record['step']}/{record['num_steps']}  loss {record['loss']:.3f}  accuracy "
        f"{show_percentages(record['position_accuracy'])}  anchor acceptance ~{record['anchor_acceptance']:.2f}  "
        f"lr {record['learning_rate']:.1e}  norm {record['gradient_norm']:.2f}  "
        f"{record['tokens_per_second']:,.0f} tokens/s  wait {100 * record['wait_share']:.0f} %  "
        f"{show_bytes(record['memory_bytes'])}  {show_seconds(record['seconds_left'])} left"
    )


def show_status(record: "Record") -> str:
    """The live line of a terminal: what one looks for first, first, as a narrow window cuts its end off."""
    return (
        f"step {record['step']}/{record['num_steps']}  {show_seconds(record['seconds_left'])} left  loss "
        f"{record['loss']:.3f}  anchor acceptance ~{record['anchor_acceptance']:.2f}  "
        f"{show_count(record['tokens_per_second'])} tokens/s  wait {100 * record['wait_share']:.0f} %  "
        f"lr {record['learning_rate']:.1e}  {show_bytes(record['memory_bytes'])}"
    )


class StepTable:
    """Rows of one width, as many columns as `width` has room for: buckets last, and all of them are in log.jsonl."""

    def __init__(self, first: "Record", width: int) -> None:
        self._widths: list[int] = []
        room = width
        for title, text, widest in _cells(first):
            needed = max(len(title), len(text), widest) + (len(_GAP) if self._widths else 0)
            if needed > room:
                break
            room -= needed
            self._widths.append(max(len(title), len(text), widest))
        self.head = self._join(title for title, _, _ in _cells(first))

    def row(self, record: "Record") -> str:
        """The step's row."""
        return self._join(text for _, text, _ in _cells(record))

    def _join(self, texts: Iterator[str]) -> str:
        return _GAP.join(text.rjust(width) for text, width in zip(texts, self._widths, strict=False))


def _cells(record: "Record") -> Iterator[tuple[str, str, int]]:
    """Title, text, and the most characters that the text will have later in the run."""
    num_slots = len(record["position_accuracy"])
    yield "step", f"{record['step']}", len(f"{record['num_steps']}")
    yield "loss", f"{record['loss']:.3f}", 6
    yield "per anchor", f"~{record['anchor_acceptance']:.2f}", 6
    yield "lr", f"{record['learning_rate']:.1e}", 7
    yield "norm", f"{record['gradient_norm']:.2f}", 6
    yield "tokens/s", show_count(record["tokens_per_second"]), 7
    yield "samples/s", f"{record['samples_per_second']:.1f}", 6
    yield "wait", f"{100 * record['wait_share']:.0f} %", 5
    yield "left", show_seconds(record["seconds_left"]), 7
    yield "memory", show_bytes(record["memory_bytes"]), 8
    yield "noise", f"{record['noise']:.3f}", 5
    yield "right by slot", show_percentages(record["position_accuracy"]), 3 * num_slots + 2
    batch = record["batch"]
    for title, name, form, widest in (
        ("% by bucket", "pct", ".0f", 3),
        ("loss by bucket", "loss", ".2f", 5),
        ("per anchor by bucket", "anchor_acceptance", ".2f", 5),
    ):
        values = _by_bucket(batch, name)
        yield title, _join(values, form), (widest + 1) * len(values)


def show_mix(batch: "Record") -> str:
    """How the step was mixed, on one line.

    Micro-batches by bucket, of the step and of the epoch so far, and the step's distance from the whole epoch; longest
    run of one bucket; padding efficiency; lengths; the sampler's buffer; loss and accuracy by bucket.
    """
    step, running, losses, accuracies = (_by_bucket(batch, name) for name in ("pct", "running_pct", "loss", "accuracy"))
    return (
        f"mix {_join(step, '.0f')} % (so far {_join(running, '.0f')} %; KL {batch['kl']:.3f})"
        f"  run {batch['longest_run']}  {100 * batch['padding_efficiency']:.0f} % real"
        f"  length {batch['mean_length']:.0f}, {batch['max_length']} max"
        f"  buffer {batch['buffer_fill']:.0f}, {batch['ready']} ready"
        f"  by bucket: loss {_join(losses, '.2f')}, accuracy {_join(accuracies, '.0%')}"
    )


def show_percentages(shares: list[float]) -> str:
    """`51/20/3 %`."""
    return "/".join(f"{100 * share:.0f}" for share in shares) + " %"


def _by_bucket(batch: "Record", name: str) -> list[float | None]:
    return [batch[f"bucket_{bucket}_{name}"] for bucket in takewhile(lambda b: f"bucket_{b}_pct" in batch, count())]


def _join(values: list[float | None], form: str) -> str:
    """`1.50/–/2.25`, a dash where there is no value."""
    return "/".join("–" if value is None else format(value, form) for value in values)

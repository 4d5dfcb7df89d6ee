"""Whether a cache is *right*: random samples computed again by the target, the likely fault named where they differ.

A checksum proves that states are the ones that were written; only the target can say that they are the ones that
should have been. Each sample runs alone, so agreement also shows that batches and padding left no trace. Rounding
differs with batch shapes and devices: a layer agrees if the median over tokens of the relative difference stays below
what its format explains (measured in bfloat16 on a 30-layer target, other batch shapes or float32: 0.013) and, with a
codec, what coding the target's own states costs; no token points elsewhere; and neither neighbouring layer, coded too,
fits better. The figures are against the target's states before coding: they show what a codec costs. A revision whose
states differ by less than that cannot be told by its states; the manifest's fingerprint of the weights tells it. Costs
a forward a sample; on a difference one more, with all layers kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_cache.cache.codec import code_states
from dflash_cache.cache.layout import Manifest
from dflash_cache.cache.reader import CacheReader
from dflash_cache.config.dtypes import Dtype
from dflash_cache.errors import TargetError
from dflash_cache.target.capture import capture_states
from dflash_cache.target.load import Target, text_model

TOLERANCES: dict[Dtype, float] = {"float32": 0.001, "float16": 0.01, "bfloat16": 0.04}
_CODEC_MARGIN = 1.5  # states that differ a little, or are another layer's, are coded a little worse or better
_LEAST_COSINE = 0.5  # of a token whose rounding went another way, experts of a mixture included
_STRAY_SHARE = 0.01  # tokens below that cosine, at most
_EMBEDDINGS = -1  # the states before layer 0
_MAX_SHIFT = 2  # tokens
_MAX_EXPLAINED = 8  # samples whose fault is looked for


@dataclass(frozen=True)
class LayerAgreement:
    """One layer over all rechecked tokens; `relative_difference`: the median over tokens of |cached − own| / |own|."""

    layer_id: int
    mean_cosine: float
    least_cosine: float
    largest_difference: float
    relative_difference: float
    num_faulty: int  # samples


@dataclass(frozen=True)
class StateFault:
    """One sample's layer that is not the target's, and what it seems to be."""

    sample: int
    shard: str
    layer_id: int
    reason: str


@dataclass(frozen=True)
class Recheck:
    """All that was compared. `head_agreement`: share of tokens with the same argmax after norm and head, where the
    cache keeps the last layer's states, else None; `other_target`: the fingerprints differ, as a sentence.
    """

    layers: list[LayerAgreement]
    faults: list[StateFault]
    samples: list[int]
    num_tokens: int
    head_agreement: float | None
    other_target: str | None

    @property
    def is_right(self) -> bool:
        """Whether nothing speaks against the cache."""
        return not self.faults and self.other_target is None


def recheck(
    reader: CacheReader, target: Target, num_samples: int, seed: int, progress: Callable[[int, int], None]
) -> Recheck:
    """Compute `num_samples` random samples (all, if there are fewer) with a target that captures the cache's layers.

    `progress` gets samples done and all. Raises CacheError if a sample cannot be read.
    """
    manifest, index = reader.manifest, reader.index
    if target.config.hidden_size != manifest.hidden_size or len(target.layers) != manifest.target_num_layers:
        raise TargetError(
            f"The cache is of a target of {manifest.target_num_layers} layers of {manifest.hidden_size}, this one has "
            f"{len(target.layers)} of {target.config.hidden_size}: name the target that made the cache."
        )
    around = _list_around(manifest.layer_ids, len(target.layers))
    wider = replace(target, layer_ids=around)
    count = min(num_samples, len(index.sample))
    rows = np.sort(np.random.default_rng(seed).choice(len(index.sample), count, replace=False))
    comparisons: list[list[_Comparison]] = []
    faults: list[StateFault] = []
    agreeing = 0
    keeps_last = manifest.layer_ids[-1] == manifest.target_num_layers - 1
    for done, row in enumerate(rows.tolist()):
        progress(done, count)
        batch = reader.read_batch(np.array([row]))
        cached_TLH, ids_T = batch.hidden_STLH[0].to(target.device), batch.input_ids[0]
        around_TLH = capture_states(wider, ids_T[None], batch.length)[0]
        own = {layer_id: around_TLH[:, place] for place, layer_id in enumerate(around)}
        coded_TLH = code_states(replace(manifest.states, num_layers=len(around)), around_TLH)
        coded = {layer_id: coded_TLH[:, place] for place, layer_id in enumerate(around)}
        compared = [_Comparison(cached_TLH[:, i], own[layer_id]) for i, layer_id in enumerate(manifest.layer_ids)]
        comparisons.append(compared)
        tolerances = [
            TOLERANCES[manifest.dtype] + _CODEC_MARGIN * _Comparison(coded[layer_id], own[layer_id]).relative_difference
            for layer_id in manifest.layer_ids
        ]
        wrong = [
            i
            for i, layer_id in enumerate(manifest.layer_ids)
            if not compared[i].agrees(tolerances[i]) or _is_nearer_to_neighbour(cached_TLH[:, i], layer_id, coded)
        ]
        if wrong:
            passes = _AllStates(target, ids_T) if len({fault.sample for fault in faults}) < _MAX_EXPLAINED else None
            for place in wrong:
                reason = explain(cached_TLH[:, place], manifest.layer_ids[place], passes, tolerances[place])
                shard = index.shard_names[index.shard[row]]
                faults.append(StateFault(int(index.sample[row]), shard, manifest.layer_ids[place], reason))
        if keeps_last:
            agreeing += _count_same_argmax(target, ids_T, cached_TLH[:, -1], own[around[-1]])
    progress(count, count)
    num_tokens = int(index.length[rows].sum())
    return Recheck(
        layers=list(_summarise(manifest, comparisons, faults)),
        faults=faults,
        samples=index.sample[rows].tolist(),
        num_tokens=num_tokens,
        head_agreement=agreeing / num_tokens if keeps_last else None,
        other_target=_compare_fingerprints(manifest, target),
    )


def _list_around(layer_ids: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """The layers and their neighbours, ascending."""
    return tuple(sorted({k for layer_id in layer_ids for k in range(layer_id - 1, layer_id + 2) if 0 <= k < depth}))


def _is_nearer_to_neighbour(cached_TH: Tensor, layer_id: int, coded: dict[int, Tensor]) -> bool:
    """Whether the layer before or after fits better: in deep targets a layer changes less than the tolerance."""
    found = _Comparison(cached_TH, coded[layer_id]).relative_difference
    neighbours = [coded[k] for k in (layer_id - 1, layer_id + 1) if k in coded]
    return any(_Comparison(cached_TH, other).relative_difference < found for other in neighbours)


def explain(cached_TH: Tensor, layer_id: int, states: "_AllStates | None", tolerance: float) -> str:
    """What states that are not those of `layer_id` seem to be: the nearest of all that the target computes."""
    if not bool(cached_TH.any(dim=-1).all()):
        num_zero = int((~cached_TH.any(dim=-1)).sum())
        return f"{num_zero:,} of {len(cached_TH):,} tokens are zero"
    if not bool(cached_TH.isfinite().all()):
        return "they are not finite"
    if states is None:
        return "they are not the target's"
    found = {name: _Comparison(cached_TH[begin : len(other) + begin], other) for name, begin, other in
             _list_candidates(states, layer_id, len(cached_TH))}  # fmt: skip
    name, nearest = min(found.items(), key=lambda item: item[1].relative_difference)
    if nearest.agrees(tolerance):
        return name
    own = _Comparison(cached_TH, states.outputs[layer_id])
    num_stray = int(own.stray_T.sum())
    if own.relative_difference <= tolerance:
        return f"{num_stray:,} of {len(cached_TH):,} tokens are not the target's"
    return (
        "they are of another target or another revision of it (relative difference "
        f"{own.relative_difference:.3f}, cosine {float(own.cosine_T.mean()):.4f})"
    )


class _Comparison:
    """Cached states (T, H) against the target's own (T, H)."""

    def __init__(self, cached_TH: Tensor, own_TH: Tensor) -> None:
        cached, own = cached_TH.float(), own_TH.float()
        difference = cached - own
        self.cosine_T = F.cosine_similarity(cached, own, dim=-1)
        self.relative_T = difference.norm(dim=-1) / own.norm(dim=-1).clamp_min(1e-12)
        self.largest = float(difference.abs().max())
        self.stray_T = ~(self.cosine_T >= _LEAST_COSINE)  # not a number counts too

    @property
    def relative_difference(self) -> float:
        """The median over tokens; infinite where states are not finite."""
        return float(torch.nan_to_num(self.relative_T, nan=float("inf")).median())

    def agrees(self, tolerance: float) -> bool:
        """Whether rounding alone explains the difference."""
        return self.relative_difference <= tolerance and float(self.stray_T.float().mean()) <= _STRAY_SHARE


class _AllStates:
    """All that a target computes for one sample: `outputs` (T, H) by layer, −1 the embeddings; `norm` its last norm."""

    @torch.inference_mode()
    def __init__(self, target: Target, ids_T: Tensor) -> None:
        self.outputs: dict[int, Tensor] = {}
        self.norm, entered = _find_final_norm(target, ids_T)
        depth = len(target.layers)
        every = replace(target, layer_ids=tuple(range(depth)))
        states_TLH = capture_states(every, ids_T[None], torch.tensor([len(ids_T)]))[0]
        self.outputs = {_EMBEDDINGS: entered, **{k: states_TLH[:, k] for k in range(depth)}}

    @torch.inference_mode()
    def normed(self, layer_id: int) -> Tensor:
        """A layer's output after the final norm."""
        normed: Tensor = self.norm(self.outputs[layer_id])
        return normed.to(self.outputs[layer_id].device)  # a device_map may have put the norm elsewhere


def _list_candidates(states: _AllStates, layer_id: int, T: int) -> Iterator[tuple[str, int, Tensor]]:
    """What states could be instead: a name, from which token on they would agree, and those states."""
    for other, output_TH in states.outputs.items():
        if other == layer_id:
            continue
        what = "the embeddings, before layer 0" if other == _EMBEDDINGS else f"the output of layer {other}"
        shift = f"shifted by {abs(other - layer_id)} layer{'s' if abs(other - layer_id) > 1 else ''}"
        yield f"they are {what}: {shift}", 0, output_TH
    yield "they are after the final norm instead of before it", 0, states.normed(layer_id)
    own_TH = states.outputs[layer_id]
    for shift_tokens in range(1, min(_MAX_SHIFT, T - 1) + 1):
        tokens = f"{shift_tokens} token{'s' if shift_tokens > 1 else ''}"
        yield f"each token has the states of the one {tokens} before it", shift_tokens, own_TH[:-shift_tokens]
        yield f"each token has the states of the one {tokens} after it", 0, own_TH[shift_tokens:]


def _find_final_norm(target: Target, ids_T: Tensor) -> tuple[nn.Module, Tensor]:
    """The module that runs last in the text model, after all layers, and what enters layer 0 (T, H)."""
    decoder = text_model(target.model)
    last: list[nn.Module] = []
    entered: list[Tensor] = []

    def remember(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        last.append(module)

    def keep(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        entered.append((inputs[0] if inputs else named["hidden_states"]).clone())

    hooks = [child.register_forward_hook(remember) for child in decoder.children()]
    hooks.append(target.layers[0].register_forward_pre_hook(keep, with_kwargs=True))
    try:
        decoder(input_ids=ids_T[None].to(target.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return last[-1], entered[0][0].to(target.device)


@torch.inference_mode()
def _count_same_argmax(target: Target, ids_T: Tensor, cached_TH: Tensor, own_TH: Tensor) -> int:
    """Tokens whose most likely successor is the same from both last states."""
    norm, _ = _find_final_norm(target, ids_T[:1])
    head: nn.Module = target.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    pairs = zip(torch.split(cached_TH, 512), torch.split(own_TH, 512), strict=True)
    return sum(int((head(norm(a)).argmax(-1) == head(norm(b)).argmax(-1)).sum()) for a, b in pairs)


def _summarise(
    manifest: Manifest, comparisons: list[list[_Comparison]], faults: list[StateFault]
) -> Iterator[LayerAgreement]:
    for place, layer_id in enumerate(manifest.layer_ids):
        of_layer = [compared[place] for compared in comparisons]
        cosine = torch.cat([comparison.cosine_T for comparison in of_layer])
        relative = torch.cat([comparison.relative_T for comparison in of_layer])
        yield LayerAgreement(
            layer_id=layer_id,
            mean_cosine=float(cosine.mean()),
            least_cosine=float(cosine.min()),
            largest_difference=max(comparison.largest for comparison in of_layer),
            relative_difference=float(relative.median()),
            num_faulty=sum(fault.layer_id == layer_id for fault in faults),
        )


def _compare_fingerprints(manifest: Manifest, target: Target) -> str | None:
    if manifest.target_fingerprint == target.fingerprint:
        return None
    return (
        f"the manifest speaks of another target or revision (fingerprint {manifest.target_fingerprint}, "
        f"this one's is {target.fingerprint})"
    )

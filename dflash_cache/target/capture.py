"""One forward of the target, for the outputs of the captured decoder layers alone.

Hooks on just those layers copy their outputs into one preallocated tensor, and the deepest one's hook ends the forward
by an exception: no layer above it runs, no norm, no head, and no list of all layers' states is ever kept. Samples are
padded on the right, where causal attention keeps padding out of every valid position by itself; so no attention mask
is passed, and a batch of one equals a plain forward to the bit. It costs the layers up to the deepest
captured one and S × T × L × H numbers.
"""

import torch
from torch import Tensor, nn

from dflash_cache.target.load import Target, text_model


class _DeepestLayerDone(Exception):  # noqa: N818  # not an error: it ends a forward that has done its work
    """Raised by the hook of the deepest captured layer."""


class _LayerCopy:
    """A forward hook that copies its layer's output (S, T, H) into one layer's place of `states_STLH`."""

    def __init__(self, states_STLH: Tensor, place: int) -> None:
        self._states_STLH = states_STLH
        self._place = place

    def __call__(self, layer: nn.Module, inputs: tuple[object, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        output_STH = output if isinstance(output, Tensor) else output[0]
        self._states_STLH[:, :, self._place].copy_(output_STH)
        if self._place == self._states_STLH.shape[2] - 1:
            raise _DeepestLayerDone


@torch.inference_mode()
def capture_states(target: Target, input_ids_ST: Tensor, lengths_S: Tensor) -> Tensor:
    """States (S, T, L, H) after the target's captured layers, in its dtype, on its device; zero where padded.

    `input_ids_ST`: int64, padded on the right with any ids; `lengths_S`: valid tokens of each sample, 1 to T.
    Synchronises the device if `lengths_S` lies on it.
    """
    num_samples, num_tokens = input_ids_ST.shape
    states_STLH = torch.empty(
        (num_samples, num_tokens, len(target.layer_ids), target.config.hidden_size),
        dtype=target.dtype,
        device=target.device,
    )
    hooks = [
        target.layers[layer_id].register_forward_hook(_LayerCopy(states_STLH, place))
        for place, layer_id in enumerate(target.layer_ids)
    ]
    try:
        text_model(target.model)(input_ids=input_ids_ST.to(target.device, non_blocking=True), use_cache=False)
    except _DeepestLayerDone:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    for sample, length in enumerate(lengths_S.tolist()):
        states_STLH[sample, length:] = 0
    return states_STLH

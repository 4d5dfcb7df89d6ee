"""One forward of the target, for the outputs of the captured decoder layers alone.

Hooks on just those layers copy their outputs into one preallocated tensor, and the deepest one's hook ends the forward
by an exception: no layer above it runs, no norm, no head, and no list of all layers' states is ever kept. Samples are
padded on the right, where causal attention keeps padding out of every valid position by itself; so no attention mask
is passed, and a batch of one equals a plain forward to the bit. It costs the layers up to the deepest
captured one and S × T × L × H numbers.
"""

import torch
from torch import Tensor, nn

from dflash_cache.errors import TargetError
from dflash_cache.target.load import Target, text_model


class _DeepestLayerDone(Exception):  # noqa: N818  # not an error: it ends a forward that has done its work
    """Raised by the hook of the deepest captured layer."""


class _LayerCopy:
    """A forward hook that copies its layer's output (S, T, H) into one layer's place of `states_STLH`."""

    def __init__(self, states_STLH: Tensor, place: int) -> None:
        self._states_STLH = states_STLH
        self._place = place
        self.ran = False

    def __call__(self, layer: nn.Module, inputs: tuple[object, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        output_STH = output if isinstance(output, Tensor) else output[0]
        room_STH = self._states_STLH[:, :, self._place]
        if output_STH.shape != room_STH.shape:  # a copy would repeat a single token's states for all
            raise TargetError(
                f"A decoder layer of the target gave states of shape {tuple(output_STH.shape)} for "
                f"{tuple(room_STH.shape)}: this family is not supported yet."
            )
        # From the layer's own device, if a device_map has spread the target. Between two GPUs torch orders this copy
        # against both devices' streams; only GPUs can show that.
        room_STH.copy_(output_STH)
        self.ran = True
        if self._place == self._states_STLH.shape[2] - 1:
            raise _DeepestLayerDone


@torch.inference_mode()
def capture_states(target: Target, input_ids_ST: Tensor, lengths_S: Tensor, out_STLH: Tensor | None = None) -> Tensor:
    """States (S, T, L, H) after the target's captured layers, in its dtype, on its device; zero where padded.

    `input_ids_ST`: int64, padded on the right with any ids; `lengths_S`: valid tokens of each sample, 1 to T; the
    states go into `out_STLH` if it is given. Synchronises the device if `lengths_S` lies on it. Raises TargetError
    if a captured layer does not run, or gives states of another shape.
    """
    num_samples, num_tokens = input_ids_ST.shape
    shape = (num_samples, num_tokens, len(target.layer_ids), target.config.hidden_size)
    states_STLH = out_STLH
    if states_STLH is None:
        states_STLH = torch.empty(shape, dtype=target.dtype, device=target.device)
    copies = [_LayerCopy(states_STLH, place) for place in range(len(target.layer_ids))]
    hooks = [
        target.layers[layer_id].register_forward_hook(copy)
        for layer_id, copy in zip(target.layer_ids, copies, strict=True)
    ]
    try:
        text_model(target.model)(input_ids=input_ids_ST.to(target.device, non_blocking=True), use_cache=False)
    except _DeepestLayerDone:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    idle = [layer_id for layer_id, copy in zip(target.layer_ids, copies, strict=True) if not copy.ran]
    if idle:
        raise TargetError(
            f"Layers {idle} of the target did not run in its forward: leave them out of target.layer_ids."
        )
    for sample, length in enumerate(lengths_S.tolist()):
        states_STLH[sample, length:] = 0
    return states_STLH

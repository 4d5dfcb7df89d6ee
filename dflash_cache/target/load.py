"""The frozen target: its model, tokenizer, decoder layers and which of them are captured.

Everything that can be wrong with a target is found here, before the first forward, and said in one sentence: no such
folder, no safetensors, a family that transformers does not know or whose layers are not found (seen on a model without
weights, before they are read), a checkpoint that lacks tensors (which transformers would fill with random numbers after
a warning). At the end a forward of a few tokens shows that embeddings and logits are what training takes them for: an
unknown factor would be seen nowhere but in the acceptance length. Code that comes with a checkpoint is run only with
target.trust_remote_code. It costs one read of the weights.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from dflash_cache.config.settings import TargetSettings
from dflash_cache.drafter.device import resolve_device
from dflash_cache.drafter.family import embedding_factor, embedding_scale_of, logit_scale_of, softcap_of
from dflash_cache.drafter.head import transform_logits
from dflash_cache.drafter.shape import spread_layer_ids
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.errors import ConfigError, TargetError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Target:
    """A loaded target: `model` in eval mode without gradients, in `dtype` on `device`.

    `config` is the text model's, `layers` its decoder layers, `layer_ids` the captured ones, ascending from 0.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: PretrainedConfig
    layers: nn.ModuleList
    layer_ids: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    fingerprint: str

    def embed(self, token_ids: Tensor) -> Tensor:
        """What a drafter is given for ids (…): rows of the embedding (…, H), scaled as the family does.

        As training reads them from the files (`frozen`), and servers: what else a target makes of the rows before its
        first layer (Muse Glimmer norms them) is not the drafter's.
        """
        module, scale = self.model.get_input_embeddings(), embedding_scale_of(self.config)
        if type(module) is nn.Embedding or (scale != 1.0 and hasattr(module, "embed_scale")):
            return self.embed_as_target(token_ids)
        rows = F.embedding(token_ids, module.weight)  # type: ignore[arg-type]  # a kind of nn.Embedding
        factor = embedding_factor(self.config, scale, rows.dtype)
        return rows if factor == 1.0 else rows * factor

    def embed_as_target(self, token_ids: Tensor) -> Tensor:
        """What the target's own first layer is given for ids (…)."""
        module: nn.Module = self.model.get_input_embeddings()
        embedded: Tensor = module(token_ids)
        if hasattr(module, "embed_scale"):  # it has multiplied already
            return embedded
        factor = embedding_factor(self.config, embedding_scale_of(self.config), embedded.dtype)
        return embedded if factor == 1.0 else embedded * factor

    def read_logits(self, normed: Tensor) -> Tensor:
        """The target's logits (…, V) of normalised states (…, H), scaled and capped as the family does."""
        head: nn.Module = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        return transform_logits(head(normed), logit_scale_of(self.config), softcap_of(self.config))


def load_target(settings: TargetSettings) -> Target:
    """The target, ready to run. Raises TargetError or ConfigError, in one sentence, if it cannot be used."""
    files = TargetFiles(settings)
    whole = files.load_whole_config()
    config = whole.get_text_config(decoder=True)
    layer_ids = resolve_layer_ids(settings, config)
    device = resolve_device(settings.device)
    auto_class = auto_class_of(whole, settings)
    check_structure(whole, auto_class, settings)
    tokenizer = load_tokenizer(settings)
    model = _load_model(settings, auto_class)
    if settings.device_map is None:
        model = model.to(device)  # type: ignore[arg-type]  # wrapped `to`
    else:
        device = find_entry_device(model)
    target = Target(
        model=model.eval().requires_grad_(False),  # type: ignore[no-untyped-call]
        tokenizer=tokenizer,
        config=config,
        layers=find_decoder_layers(model),
        layer_ids=layer_ids,
        device=device,
        dtype=DTYPES[settings.dtype],
        fingerprint=files.fingerprint(),
    )
    check_surroundings(target)
    return target


def auto_class_of(config: PretrainedConfig, settings: TargetSettings) -> Any:
    """The class of transformers that builds a model of this (whole) config. Raises TargetError if it has none."""
    if settings.trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto_class._model_mapping:
            return auto_class
    raise TargetError(
        f"The target {settings.model} ({config.model_type}) has no causal language model in transformers: use a target "
        "that generates text."
    )


def check_structure(config: PretrainedConfig, auto_class: Any, settings: TargetSettings) -> None:
    """Build the model without memory, and raise TargetError unless its layers, embedding and head are found in it."""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto_class.from_config(config, trust_remote_code=settings.trust_remote_code)
    except Exception as error:  # whatever a foreign config makes a family's code stumble over
        raise TargetError(
            f"The target {settings.model} cannot be built from its config ({first_line(error)}): use a checkpoint of a "
            "family that transformers knows."
        ) from None
    find_decoder_layers(model)
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if type(head) is not nn.Linear or not isinstance(model.get_input_embeddings(), nn.Embedding):  # a kind of Linear
        raise TargetError(  # computes more than a product; one of Embedding may, and `check_surroundings` looks
            f"The target's head ({type(head).__name__} of {type(model).__name__}) or embedding is no plain matrix: "
            "this family is not supported yet."
        )


@torch.inference_mode()
def check_surroundings(target: Target) -> None:
    """Compare embedding and logits of a few tokens with the model's own. Raises TargetError if they are others.

    One forward of the whole target over eight tokens; synchronises the device.
    """
    ids_1T = torch.arange(8, device=target.device)[None] % target.config.vocab_size
    seen: dict[str, Tensor] = {}

    def see_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["embedded"] = (args[0] if args else kwargs["hidden_states"]).clone()

    def see_normed(module: nn.Module, args: Any, output: Any) -> None:
        seen["normed"] = output[0].clone()

    hooks = [
        target.layers[0].register_forward_pre_hook(see_input, with_kwargs=True),
        text_model(target.model).register_forward_hook(see_normed),
    ]
    try:
        own: Tensor = target.model(input_ids=ids_1T, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    pairs = {
        "what its first layer is given is not its embeddings": (target.embed_as_target(ids_1T), seen["embedded"]),
        "its logits are not its head's": (target.read_logits(seen["normed"]), own),
    }
    for what, (ours, theirs) in pairs.items():
        theirs = theirs.to(ours.device).float()  # noqa: PLW2901  # a device_map may have it elsewhere
        if ours.shape != theirs.shape or float((ours.float() - theirs).abs().max()) > 0.02 * float(theirs.abs().max()):
            raise TargetError(
                f"The target ({target.config.model_type}) computes more around its layers than a drafter is trained "
                f"with: {what}. This family is not supported yet."
            )


def find_entry_device(model: PreTrainedModel) -> torch.device:
    """Where ids go in and captured states are gathered: the first device that holds weights, the CPU if none does.

    Weights that accelerate brings from memory or disk when they are needed lie on none (`meta`).
    """
    held = (parameter.device for parameter in model.parameters() if parameter.device.type != "meta")
    return next(held, torch.device("cpu"))


def load_tokenizer(settings: TargetSettings) -> PreTrainedTokenizerBase:
    """The target's tokenizer. Raises TargetError if there is none or transformers cannot read it."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            settings.model, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise TargetError(
            f"The tokenizer of the target {settings.model} cannot be used ({first_line(error)}): "
            "put the tokenizer's files beside config.json."
        ) from None
    return tokenizer


def load_target_config(settings: TargetSettings) -> PretrainedConfig:
    """The text model's config, without loading weights. Raises TargetError if there is no such target."""
    return TargetFiles(settings).load_config()


def target_fingerprint(settings: TargetSettings) -> str:
    """16 hex digits (xxh3) over the config and each weight file's size, header and three samples of 64 KiB.

    Begin, middle and end of a file tell two trainings of one model apart at a cost that does not grow with the target,
    but a change elsewhere in a file goes unseen. Raises TargetError if there is no such target.
    """
    return TargetFiles(settings).fingerprint()


def resolve_layer_ids(settings: TargetSettings, config: PretrainedConfig) -> tuple[int, ...]:
    """The layers to cache: those of `drafter_layer_ids`, and with `store_last_hidden` the last one. ConfigError."""
    layer_ids, last = drafter_layer_ids(settings, config), config.num_hidden_layers - 1
    return (*layer_ids, last) if settings.store_last_hidden and layer_ids[-1] != last else layer_ids


def drafter_layer_ids(settings: TargetSettings, config: PretrainedConfig) -> tuple[int, ...]:
    """The layers that drafters read: the settings', else spread over the depth. ConfigError if one does not exist."""
    depth = config.num_hidden_layers
    if settings.layer_ids is None:
        return spread_layer_ids(depth, settings.num_layers)
    if settings.layer_ids[-1] >= depth:  # ascending: the last is the deepest
        raise ConfigError(
            f"target.layer_ids names layer {settings.layer_ids[-1]}, but the target {settings.model} has {depth} "
            f"layers: use ids from 0 to {depth - 1}."
        )
    return settings.layer_ids


def find_decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a plain or wrapped model: its one ModuleList as long as the text model is deep.

    Lists inside a layer (experts) and beside the text model (a vision tower) do not count. Raises TargetError if none
    or several are left.
    """
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    found: dict[str, nn.ModuleList] = {}
    for name, module in text_model(model).named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) == depth and not inside:
            found[name] = module
    if len(found) != 1:
        what = f"{len(found)} lists of {depth} layers ({', '.join(found)})" if found else f"no list of {depth} layers"
        raise TargetError(
            f"The target's model ({type(model).__name__}) has {what} where its decoder layers should be: "
            "this family is not supported yet."
        )
    return next(iter(found.values()))


def stop_tokens(target: Target) -> frozenset[int]:
    """The ids that end an answer: those of the model's generation config, and the tokenizer's end of sequence."""
    return _join_ids(target.model.generation_config.eos_token_id, target.tokenizer.eos_token_id)


def stop_ids_of(settings: TargetSettings, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The same ids without loading the model."""
    try:
        generation = GenerationConfig.from_pretrained(settings.model, revision=settings.revision or "main")
    except OSError:  # a target need not have a generation config
        return _join_ids(load_target_config(settings).eos_token_id, tokenizer.eos_token_id)
    return _join_ids(generation.eos_token_id, tokenizer.eos_token_id)


def _join_ids(named: int | list[int] | None, end: int | None) -> frozenset[int]:
    ids = named if isinstance(named, list) else [named]
    return frozenset(int(token) for token in (*ids, end) if token is not None)


def text_model(model: PreTrainedModel) -> nn.Module:
    """The part that turns token ids into hidden states: no head, and no image or sound towers."""
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    return decoder


def cache_argument(model: PreTrainedModel) -> str:
    """What the model's forward calls its key-value cache: `cache`, or `past_key_values` in older transformers."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def first_line(error: BaseException) -> str:
    """What a library's error says first, to be put in brackets."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".:") if lines else type(error).__name__


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing progress bars in the block: only the command line speaks to the user."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _load_model(settings: TargetSettings, auto_class: Any) -> PreTrainedModel:
    """The causal LM on the CPU, every tensor of it read from the checkpoint."""
    if settings.device_map is not None and find_spec("accelerate") is None:
        raise ConfigError(
            "target.device_map needs the package accelerate, which is not installed: run `pip install accelerate`, or "
            "set target.device_map to null."
        )
    memory = settings.max_memory and {
        int(place) if str(place).isdigit() else place: size for place, size in settings.max_memory.items()
    }
    model: PreTrainedModel
    try:
        with hide_progress_bars():
            model, report = auto_class.from_pretrained(
                settings.model,
                revision=settings.revision,
                dtype=DTYPES[settings.dtype],
                device_map=settings.device_map,
                max_memory=memory,
                use_safetensors=None if settings.allow_pickle else True,
                trust_remote_code=settings.trust_remote_code,
                output_loading_info=True,
            )
    except Exception as error:  # whatever a damaged or foreign checkpoint makes transformers stumble over
        raise TargetError(
            f"The target {settings.model} cannot be loaded as a causal language model ({first_line(error)}): "
            "use a complete checkpoint of a family that transformers knows."
        ) from None
    missing = sorted(report["missing_keys"])
    if missing:
        raise TargetError(
            f"The target {settings.model} lacks {len(missing)} of its tensors (the first is {missing[0]}): "
            "fetch the checkpoint again."
        )
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is not None:
        head.register_forward_pre_hook(_make_contiguous)
    return model


def _make_contiguous(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """With `logits_to_keep` the head is given a strided view of all positions, for which `matmul` would copy the whole
    head once a row of the batch: 6 s and 3.6 GB for 64 rows of SmolLM2-135M on two CPU cores.
    """
    return (args[0].contiguous(), *args[1:])

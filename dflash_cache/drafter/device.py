"""Which device a part runs on."""

import torch

from dflash_cache.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """`auto` is the first GPU, or the CPU without one. Raises ConfigError if the device does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"There is no device called {name!r}: use auto, cpu, cuda, or cuda:1.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"The device {name} is not here ({torch.cuda.device_count()} GPUs are); use auto or cpu.")
    return device


def list_devices(text: str, setting: str) -> list[str]:
    """`all` GPUs, `0,1` (these), or `cpu:2`: a name for each that `resolve_device` takes.

    Raises ConfigError, where `setting` names the text.
    """
    kind, _, number = text.partition(":")
    num_gpus = torch.cuda.device_count()
    if kind == "cpu" and (number.isdigit() or text == "cpu"):
        devices = ["cpu"] * int(number or 1)
    elif text == "all":
        devices = [f"cuda:{i}" for i in range(num_gpus)]
    else:
        places = text.split(",")
        if not all(place.isdigit() for place in places) or len(set(places)) < len(places):
            raise ConfigError(f"{setting} {text!r} is none of all, 0,1 (numbers of GPUs) and cpu:2.")
        devices = [f"cuda:{int(place)}" for place in places]
        if missing := [place for place in places if int(place) >= num_gpus]:
            raise ConfigError(f"{setting} names GPU {missing[0]}, but {num_gpus} are here: leave it out.")
    if not devices:
        raise ConfigError(f"{setting} {text!r} names no device (no GPU is here): use cpu:2, or leave it out.")
    return devices

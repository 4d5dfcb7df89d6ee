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

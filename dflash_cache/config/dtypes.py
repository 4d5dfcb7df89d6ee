"""Number formats by name, and which one this machine multiplies fastest."""

import math
import time
from functools import cache
from typing import Annotated, Literal

from pydantic import BeforeValidator

Dtype = Literal["float32", "bfloat16", "float16"]
Codec = Literal["raw", "int8", "int4"]  # of cached states: see cache/codec.py


@cache
def fastest_dtype() -> Literal["float32", "bfloat16"]:
    """bfloat16 on a GPU; on a CPU the faster of both at a small product (CPUs without bfloat16 instructions are
    several times slower with it). Measured once a process, in about 20 ms; each format's best time counts, so that
    other work on the machine does not decide, and two runs of one command agree.
    """
    import torch

    if torch.cuda.is_available():
        return "bfloat16"
    matrices = {dtype: torch.ones(384, 384, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    best = dict.fromkeys(matrices, math.inf)
    for _ in range(16):
        for dtype, matrix in matrices.items():
            started = time.perf_counter()
            matrix @ matrix
            best[dtype] = min(best[dtype], time.perf_counter() - started)
    return "bfloat16" if best[torch.bfloat16] < best[torch.float32] else "float32"


def _settle(value: object) -> object:
    return fastest_dtype() if value == "auto" else value


def _name_raw(value: object) -> object:
    return "raw" if value in ("none", None) else value


# `auto` in a configuration becomes a format when it is read, so that what a run records is what it used.
DtypeOrAuto = Annotated[Dtype, BeforeValidator(_settle)]
CodecOrNone = Annotated[Codec, BeforeValidator(_name_raw)]  # `none`: raw, states as they are
ComputeDtype = Annotated[Literal["float32", "bfloat16"], BeforeValidator(_settle)]

"""What the machine offers: device, precision, attention backend."""

from __future__ import annotations

import contextlib
import functools
import resource
import sys
from collections.abc import Callable
from typing import Any

import torch

from latentcot.errors import UserError


def choose_device(name: str = "auto") -> torch.device:
    """The device `name`; `auto` is CUDA, else MPS, else the CPU.

    Raises:
        UserError: no such device, or it is not there.
    """
    if name == "auto":
        if torch.cuda.is_available():
            name = "cuda"
        else:
            name = "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise UserError(
            f"device {name!r} is not available on this machine: use training.device=cpu"
        ) from None
    return device


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 matmuls run in hardware."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return False


def resolve_precision(precision: str, device: torch.device) -> str:
    """`auto` to bfloat16 where the hardware has it, else float32."""
    if precision != "auto":
        return precision
    return "bfloat16" if has_fast_bfloat16(device) else "float32"


def autocast(precision: str, device: torch.device) -> Callable[[], Any]:
    """Makes the context of forward passes: autocast for bfloat16, nothing otherwise."""
    if precision == "bfloat16":
        return functools.partial(torch.autocast, device.type, torch.bfloat16)
    return contextlib.nullcontext


def resolve_attention(attention: str, precision: str, device: torch.device) -> str:
    """`auto` to the faster backend: on a CPU in bfloat16 two matmuls beat SDPA's kernel."""
    if attention != "auto":
        return attention
    return "eager" if device.type == "cpu" and precision == "bfloat16" else "sdpa"


def peak_memory(device: torch.device) -> int:
    """Bytes that this process has held at most: on its GPU, else in memory (all of the process)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

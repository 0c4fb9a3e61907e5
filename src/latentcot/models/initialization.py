"""The scaled initialisation, the same for every method (docs/architecture.md, "Initialisation")."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn
from transformers import initialization as init

RESIDUAL_PROJECTIONS = ("o_proj", "down_proj", "dense", "dense_4h_to_h")
"""Names of the linear layers that write into the residual stream, over the known backbones."""


@torch.no_grad()
def scaled_init_(module: nn.Module, width: int, num_layers: int, seed: int) -> None:
    """Truncated normal, std sqrt(2 / (5 width)), cut at 3 std; residual writers / sqrt(2 layers).

    Norms and biases keep their stock values. Parameters that were loaded from a checkpoint are
    left alone. Each weight has its own seed, made of `seed` and its name, so a weight starts at
    the same values in every method that has it.
    """
    std = math.sqrt(2 / (5 * width))
    for name, child in module.named_modules():
        if not isinstance(child, nn.Linear | nn.Embedding) or child.weight.is_meta:
            continue
        residual = name.rsplit(".", 1)[-1] in RESIDUAL_PROJECTIONS
        child_std = std / math.sqrt(2 * num_layers) if residual else std
        generator = torch.Generator(child.weight.device)
        generator.manual_seed(_mix(seed, name))
        init.trunc_normal_(
            child.weight, std=child_std, a=-3 * child_std, b=3 * child_std, generator=generator
        )


def _mix(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1

"""Attention of queries over slots: the backends, and the door by which transformers reaches them.

A backend is a function `(query, key, value, mask, scaling, dropout) -> output` with shapes
query (B, H, n, D), key and value (B, H_kv, S, D) with H a multiple of H_kv, mask (B, 1, n, S)
boolean (true: visible) or None for plain causal attention with n = S, output (B, H, n, D).
To add one, register it in `BACKENDS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from latentcot.errors import UserError

if TYPE_CHECKING:
    from latentcot.core.slot_pass import SlotPass

Backend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, float], Tensor]


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, dropout: float
) -> Tensor:
    """torch's fused scaled dot-product attention, on any device."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


CPU_SCORES = 2**22
"""Scores that `eager` makes at a time on a CPU: more of them leave its cache (twice the time)."""


def eager(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, dropout: float
) -> Tensor:
    """Two matmuls and a softmax: the readable form, and the faster one in bf16 on a CPU."""
    num_scores = query.shape[1] * query.shape[2] * key.shape[2]  # of a row
    if query.device.type == "cpu" and len(query) > 1 and len(query) * num_scores > CPU_SCORES:
        starts = range(0, len(query), max(1, CPU_SCORES // num_scores))
        parts = [slice(start, start + starts.step) for start in starts]
        masks = [None if mask is None else mask[part] for part in parts]
        outs = [
            eager(query[part], key[part], value[part], own, scaling, dropout)
            for part, own in zip(parts, masks, strict=True)
        ]
        return torch.cat(outs)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    # The softmax of a low-precision type adds up in float32 by itself: autocast need not widen it.
    with torch.autocast(query.device.type, enabled=False):
        scores = (query * scaling) @ key.mT
        if mask is None:
            mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
        bias = torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, -math.inf)
        weights = scores.add_(bias).softmax(dim=-1)
        return F.dropout(weights, dropout) @ value


BACKENDS: dict[str, Backend] = {"sdpa": sdpa, "eager": eager}


UNKNOWN_SCORES = {"softcap", "s_aux", "position_bias", "head_mask"}
"""Keywords by which some models of transformers change the scores: no backend knows them."""


def slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    slots: SlotPass | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of every backbone: stores the new slots and attends to the visible.

    Registered with transformers under `ATTENTION_NAME`; the backbone hands `slots` through.

    Args:
        query: (1, H, N, D) of the N active tokens; key and value (1, H_kv, N, D).
        slots: where the new keys and values go, and what the queries see.

    Returns:
        (1, N, H, D), and None for the attention weights.
    """
    for name in UNKNOWN_SCORES & others.keys():
        if others[name] is not None:
            raise UserError(f"a backbone whose attention uses {name} is not supported")
    if slots is None:
        raise ValueError("this backbone belongs to a latentcot model: call that model instead")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Rotary embeddings leave float32 queries and keys under autocast: store what is computed with.
    # Slots live where the input was, also when `device_map` puts this layer elsewhere.
    device, home = query.device, slots.packing.index.device
    if query.dtype != value.dtype or device != home:
        query, key, value = (tensor.to(home, value.dtype) for tensor in (query, key, value))
    heads = (query[0], key[0], value[0])
    out = slots.attend(module.layer_idx, *heads, scaling, dropout, sliding_window)
    out = out[None].transpose(1, 2)
    return (out if device == home else out.to(device)), None


ATTENTION_NAME = "latentcot"
AttentionInterface.register(ATTENTION_NAME, slot_attention)

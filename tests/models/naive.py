"""Adaptive latent CoT from the paper's equations, one (t, k) at a time: slow, and easy to check.

No cache class, no packing, no mask, no batch: two nested loops over steps and positions,
dictionaries for keys and values, and a LLaMA layer written out. It shares the parameters with the
library, and transformers' RMSNorm and RoPE tables, which round to float32 whatever the dtype.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class NaiveResult:
    logits: Tensor  # (L, V)
    ce_sum: Tensor
    penalty_sum: Tensor  # sum over t and k of g * sg(p_target ** beta)
    step_sum: Tensor  # sum over t and k, but the last, of the cross-entropy of z^(k)
    passes: list[int]
    exits: list[list[Tensor]]
    gates: list[list[Tensor]]
    reach: list[list[Tensor]]
    p_targets: list[list[Tensor]]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of one head vector (D,): the pair (i, i + D/2) turns by the angle of i."""
    half = x.shape[0] // 2
    first = [x[i] * cos[i] - x[half + i] * sin[i] for i in range(half)]
    second = [x[half + i] * cos[i] + x[i] * sin[i] for i in range(half)]
    return torch.stack(first + second)


def naive_forward(model: nn.Module, ids: Tensor, labels: Tensor) -> NaiveResult:
    """One sequence (L,) of token ids through an adaptive model over a Llama backbone."""
    config, backbone = model.config, model.backbone
    llama = config.backbone_config
    num_heads, num_kv = llama.num_attention_heads, llama.num_key_value_heads
    width = llama.hidden_size // num_heads
    length, num_passes = len(ids), config.l_max + 1
    cos, sin = backbone.rotary_emb(backbone.norm.weight, torch.arange(length)[None])

    keys: dict[tuple[int, int, int], list[Tensor]] = {}  # (layer, t, k) -> one vector per kv head
    values: dict[tuple[int, int, int], list[Tensor]] = {}
    states: dict[tuple[int, int], Tensor] = {}  # z_t^(k)
    gates: dict[tuple[int, int], Tensor] = {}
    reach: dict[tuple[int, int], Tensor] = {
        (t, 1): torch.ones((), dtype=torch.float64) for t in range(length)
    }
    last = [num_passes] * length  # K*_t, known once the token stops

    def sees(t: int, k: int, other_t: int, other_k: int) -> bool:
        if other_t > t or other_k > k:
            return False
        if config.visibility == "own":
            return other_k == k
        return config.visibility == "all" or other_k == min(k, last[other_t])

    for k in range(1, num_passes + 1):
        active = [t for t in range(length) if last[t] >= k]
        hidden = {}
        for t in active:
            embedding = backbone.embed_tokens.weight[ids[t]] * config.embedding_scale
            hidden[t] = embedding if k == 1 else states[t, k - 1]
        for number, layer in enumerate(backbone.layers):
            attention = layer.self_attn
            queries = {}
            for t in active:
                normed = layer.input_layernorm(hidden[t])
                q = (attention.q_proj.weight @ normed).view(num_heads, width)
                key = (attention.k_proj.weight @ normed).view(num_kv, width)
                value = (attention.v_proj.weight @ normed).view(num_kv, width)
                queries[t] = [rotate(head, cos[0, t], sin[0, t]) for head in q]
                keys[number, t, k] = [rotate(head, cos[0, t], sin[0, t]) for head in key]
                values[number, t, k] = list(value)
            for t in active:
                slots = [
                    (s, j)
                    for s in range(length)
                    for j in range(1, k + 1)
                    if (number, s, j) in keys and sees(t, k, s, j)
                ]
                heads = []
                for head in range(num_heads):
                    kv = head // (num_heads // num_kv)
                    scores = torch.stack(
                        [queries[t][head] @ keys[number, s, j][kv] for s, j in slots]
                    ) / math.sqrt(width)
                    weights = scores.exp() / scores.exp().sum()
                    heads.append(
                        sum(
                            w * values[number, s, j][kv]
                            for w, (s, j) in zip(weights, slots, strict=True)
                        )
                    )
                hidden[t] = hidden[t] + attention.o_proj.weight @ torch.cat(heads)
            for t in active:
                normed = layer.post_attention_layernorm(hidden[t])
                gate = layer.mlp.gate_proj.weight @ normed
                up = layer.mlp.up_proj.weight @ normed
                hidden[t] = hidden[t] + layer.mlp.down_proj.weight @ (
                    gate * torch.sigmoid(gate) * up
                )
        for t in active:
            states[t, k] = backbone.norm(hidden[t])
            if k == num_passes:
                gates[t, k] = torch.zeros((), dtype=torch.float64)
                continue
            gates[t, k] = torch.sigmoid(model.router(states[t, k], k))
            reach[t, k + 1] = reach[t, k] * gates[t, k]
            if reach[t, k + 1] < config.tau:
                last[t] = k

    logits, exits, p_targets = [], [], []
    ce_sum = penalty_sum = step_sum = torch.zeros((), dtype=torch.float64)
    for t in range(length):
        exit_probs = [reach[t, k] * (1 - gates[t, k]) for k in range(1, last[t])] + [
            reach[t, last[t]]
        ]
        mixture = sum(p * states[t, k] for k, p in enumerate(exit_probs, start=1))
        logits.append(model.lm_head.weight @ mixture)
        exits.append(exit_probs)
        target = int(labels[t + 1]) if t + 1 < length else -100
        p_targets.append([])
        if target == -100:
            continue
        ce_sum = ce_sum - logits[t].log_softmax(-1)[target]
        for k in range(1, last[t] + 1):
            step_loss = -(model.lm_head.weight @ states[t, k]).log_softmax(-1)[target]
            step_sum = step_sum + (step_loss if k < num_passes else 0)
            p_target = (-step_loss).exp().detach()
            p_targets[t].append(p_target)
            penalty_sum = penalty_sum + gates[t, k] * p_target**config.beta
    return NaiveResult(
        logits=torch.stack(logits),
        ce_sum=ce_sum,
        penalty_sum=penalty_sum,
        step_sum=step_sum,
        passes=last,
        exits=exits,
        gates=[[gates[t, k] for k in range(1, last[t] + 1)] for t in range(length)],
        reach=[[reach[t, k] for k in range(1, last[t] + 1)] for t in range(length)],
        p_targets=p_targets,
    )

"""The baselines from their equations, one query at a time: slow, and easy to check.

A sequence is a Python list of vectors (d,), and a pass over it is two nested loops over layers and
queries: no cache class, no packing, no mask, no batch. What is shared with the library is what
`naive.py` shares: the parameters, and transformers' RMSNorm and RoPE tables, which round to float32
whatever the dtype.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.naive import rotate

IGNORED = -100


@dataclass
class NaiveThought:
    states: list[Tensor]  # (d,) of each token: what the LM head reads
    passes: list[int]
    penalty: Tensor | float = 0.0  # auxiliary loss, weighted, summed over target tokens


def attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One head (D,) of one query over the keys that it sees."""
    scores = torch.stack(keys) @ query / math.sqrt(len(query))
    weights = scores.exp() / scores.exp().sum()
    return weights @ torch.stack(values)


def run_layer(
    model: nn.Module, layer: nn.Module, xs: list[Tensor], places: list[int]
) -> list[Tensor]:
    """A LLaMA layer over vectors at given RoPE positions: each sees those before it and itself."""
    llama, attention, mlp = model.config.backbone_config, layer.self_attn, layer.mlp
    num_heads, num_kv = llama.num_attention_heads, llama.num_key_value_heads
    cos, sin = model.backbone.rotary_emb(model.backbone.norm.weight, torch.tensor([places]))
    keys: list[list[Tensor]] = [[] for _ in range(num_kv)]
    values: list[list[Tensor]] = [[] for _ in range(num_kv)]
    outputs = []
    for x, c, s in zip(xs, cos[0], sin[0], strict=True):
        normed = layer.input_layernorm(x)
        for kv, key in enumerate((attention.k_proj.weight @ normed).chunk(num_kv)):
            keys[kv].append(rotate(key, c, s))
        for kv, value in enumerate((attention.v_proj.weight @ normed).chunk(num_kv)):
            values[kv].append(value)
        heads = []
        for head, query in enumerate((attention.q_proj.weight @ normed).chunk(num_heads)):
            kv = head // (num_heads // num_kv)
            heads.append(attend(rotate(query, c, s), keys[kv], values[kv]))
        mid = x + attention.o_proj.weight @ torch.cat(heads)
        normed = layer.post_attention_layernorm(mid)
        gate, up = mlp.gate_proj.weight @ normed, mlp.up_proj.weight @ normed
        outputs.append(mid + mlp.down_proj.weight @ (gate * torch.sigmoid(gate) * up))
    return outputs


def run_layers(
    model: nn.Module, layers: nn.ModuleList, xs: list[Tensor], places: list[int]
) -> list[Tensor]:
    for layer in layers:
        xs = run_layer(model, layer, xs, places)
    return xs


def run(model: nn.Module, xs: list[Tensor], places: list[int]) -> list[Tensor]:
    """F: all decoder layers, then the final norm."""
    return [model.backbone.norm(x) for x in run_layers(model, model.backbone.layers, xs, places)]


def embed(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """e_t of each token."""
    return [model.config.embedding_scale * model.backbone.embed_tokens.weight[i] for i in ids]


def naive_looped(model: nn.Module, ids: Tensor, targets: list[int]) -> NaiveThought:
    """h_0 = e, h_i = layers(h_{i-1}) or, from i = 2 on, layers(h_{i-1} + e); the norm once."""
    e, places = embed(model, ids), list(range(len(ids)))
    h = e
    for i in range(1, model.config.loops + 1):
        if i > 1 and model.config.reinject:
            h = [h_t + e_t for h_t, e_t in zip(h, e, strict=True)]
        h = run_layers(model, model.backbone.layers, h, places)
    return NaiveThought([model.backbone.norm(h_t) for h_t in h], [model.config.loops] * len(ids))


def naive_paused(model: nn.Module, ids: Tensor, targets: list[int]) -> NaiveThought:
    """F over x_1, p, p, p, x_2, p, p, p, ...: the last pause of x_t predicts x_{t+1}."""
    pause = model.config.embedding_scale * model.pause.weight[0]
    sequence, places, last_pauses = [], [], []
    for t, e_t in enumerate(embed(model, ids)):
        sequence += [e_t] + [pause] * model.config.num_pauses
        places += [t] * (1 + model.config.num_pauses)
        last_pauses.append(len(sequence) - 1)
    z = run(model, sequence, places)
    return NaiveThought([z[i] for i in last_pauses], [1 + model.config.num_pauses] * len(ids))


def naive_ponderlm(model: nn.Module, ids: Tensor, targets: list[int]) -> NaiveThought:
    """p_k = softmax(U F(x_k)), w_k = scale E^T p_k, x_{k+1} = x_k + w_k or e + w_k; F(x_s) last."""
    config, places = model.config, list(range(len(ids)))
    table, head = model.backbone.embed_tokens.weight, model.lm_head.weight
    e = embed(model, ids)
    x = [config.steps * e_t for e_t in e] if config.scale_input else e
    for _ in range(config.steps):
        probs = [(head @ z_t).softmax(-1) for z_t in run(model, x, places)]
        w = [config.embedding_scale * (table.T @ p_t) for p_t in probs]
        x = [old + w_t for old, w_t in zip(x if config.cumulative else e, w, strict=True)]
    return NaiveThought(run(model, x, places), [config.steps + 1] * len(ids))


def naive_ponderlm2(model: nn.Module, ids: Tensor, targets: list[int]) -> NaiveThought:
    """Jacobi over x_1, z_1, x_2, z_2, ...: n times every thought becomes the state before it.

    n is `eval_iterations`, or in training what `min_iterations` and `max_iterations` agree on.
    """
    config, length, num_slots = model.config, len(ids), model.config.thoughts + 1
    n = config.min_iterations if model.training else config.eval_iterations
    e = embed(model, ids)
    places = [t for t in range(length) for _ in range(num_slots)]

    def run_interleaved(thoughts: list[list[Tensor]]) -> list[list[Tensor]]:
        sequence = [x for t in range(length) for x in (e[t], *thoughts[t])]
        states = run(model, sequence, places)
        return [states[t * num_slots : (t + 1) * num_slots] for t in range(length)]

    thoughts = [[z_t] * config.thoughts for z_t in run(model, e, list(range(length)))]
    for _ in range(n):
        thoughts = [states[:-1] for states in run_interleaved(thoughts)]
    final = [states[-1] for states in run_interleaved(thoughts)]
    return NaiveThought(final, [1 + (n + 1) * num_slots] * length)


def naive_ponderlm2_decode(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Token by token: a slot reads the state of the slot before it, and sees all slots so far."""
    sequence, places, final = [], [], []
    for t, e_t in enumerate(embed(model, ids)):
        state = e_t
        for _ in range(model.config.thoughts + 1):
            sequence.append(state)
            places.append(t)
            state = run(model, sequence, places)[-1]
        final.append(state)
    return final


def naive_mor(model: nn.Module, ids: Tensor, targets: list[int]) -> NaiveThought:
    """x_t += alpha * weight_t * layers(x)_t for the tokens t that recursion r keeps, r = 1 .. R."""
    config, layers, length = model.config, model.backbone.layers, len(ids)
    first, shared, last = [], layers, []
    if config.sharing == "middle_cycle":
        first, shared, last = layers[:1], layers[1:-1], layers[-1:]
    x = run_layers(model, first, embed(model, ids), list(range(length)))
    by_token = assign_depths(model, x, targets) if config.routing == "token" else None
    penalty = 0.0 if by_token is None else by_token.balance
    passes = [0] * length
    kept = list(range(length))
    for r in range(1, len(config.capacities) + 1):
        if by_token is None:
            logits = {t: model.router[r - 1].weight[0] @ x[t] for t in kept}
            candidates, kept = kept, choose(model, logits, r, length)
            weight = {t: torch.sigmoid(logits[t]) for t in kept}
            for t in candidates:
                if targets[t] != IGNORED:
                    p_kept = torch.sigmoid(logits[t])
                    penalty = penalty - (p_kept if t in kept else 1 - p_kept).log()
        else:
            kept = [t for t in range(length) if by_token.depth[t] >= r]
            weight = by_token.weight
        for t, new in zip(kept, run_layers(model, shared, [x[t] for t in kept], kept), strict=True):
            x[t] = x[t] + config.alpha * weight[t] * new
            passes[t] = r
    states = [model.backbone.norm(x_t) for x_t in run_layers(model, last, x, list(range(length)))]
    return NaiveThought(states, passes, config.aux_weight * penalty if model.training else 0.0)


def choose(model: nn.Module, logits: dict[int, Tensor], r: int, length: int) -> list[int]:
    """Expert choice of recursion r among the tokens with logits: its top int(c_r L) in training.

    The causal rule, sigmoid > 0.5, in evaluation; all if the capacity is that of r - 1.
    """
    capacities = model.config.capacities
    candidates = sorted(logits)
    if r == 1 or capacities[r - 1] == capacities[r - 2]:
        return candidates
    if not model.training:
        return [t for t in candidates if torch.sigmoid(logits[t]) > 0.5]
    best_first = sorted(candidates, key=lambda t: -logits[t].item())
    return sorted(best_first[: int(capacities[r - 1] * length)])


@dataclass
class NaiveDepths:
    depth: list[int]
    weight: list[Tensor]  # the softmax probability of that depth
    balance: Tensor


def assign_depths(model: nn.Module, x: list[Tensor], targets: list[int]) -> NaiveDepths:
    """Token choice: depth = argmax + 1; balance R sum_i f_i P_i for each target of the sequence."""
    probs = [(model.router[0].weight @ x_t).softmax(-1) for x_t in x]
    depth = [int(p.argmax()) + 1 for p in probs]
    num_targets = sum(target != IGNORED for target in targets)
    balance = 0.0
    for i in range(1, len(probs[0]) + 1):
        share = depth.count(i) / len(x)
        mean = sum(p[i - 1] for p in probs) / len(x)
        balance = balance + len(probs[0]) * share * mean
    return NaiveDepths(
        depth, [p[d - 1] for p, d in zip(probs, depth, strict=True)], num_targets * balance
    )

"""Does pruning save time? Training steps with half of the tokens pruned after step 1.

Which tokens stop is forced, so the FLOPs are known: spread evenly over the sequences of the batch,
and unevenly (from none to all tokens of a sequence). Each is compared with the unpruned step of the
same model in interleaved pairs; the ratio of times is set beside the ratio of exact FLOPs.

    python benchmarks/pruning.py --hidden-size 512 --seq-len 1024
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch import Tensor

import latentcot
from latentcot.core.halting import GivenPasses
from latentcot.training.hardware import (
    autocast,
    choose_device,
    resolve_attention,
    resolve_precision,
)


def forced_passes(spread: str, rows: int, length: int, num_passes: int) -> Tensor:
    """(B, L) passes: 1 for half of the tokens (at random places), `num_passes` for the others."""
    if spread == "none":
        return torch.full((rows, length), num_passes)
    if spread == "even":
        shares = torch.full((rows,), 0.5)
    else:
        shares = torch.linspace(0, 1, rows) if rows > 1 else torch.full((rows,), 0.5)
    passes = torch.ones(rows, length, dtype=torch.int64)
    for row, share in enumerate(shares.tolist()):
        passes[row, torch.randperm(length)[: round(share * length)]] = num_passes
    return passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--l-max", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = choose_device(args.device)
    precision = resolve_precision(args.precision, device)
    attention = resolve_attention(args.attention, precision, device)
    amp = autocast(precision, device)
    backbone = {
        "model_type": "llama",
        "vocab_size": args.vocab_size,
        "hidden_size": args.hidden_size,
        "intermediate_size": round(args.hidden_size * 8 / 3 / 32) * 32,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden_size // 64,
        "max_position_embeddings": args.seq_len,
    }
    ids = torch.randint(args.vocab_size, (args.batch_size, args.seq_len), device=device)

    def step_seconds(
        model: latentcot.LatentLM, optimizer: torch.optim.Optimizer, passes: Tensor
    ) -> float:
        started = time.perf_counter()
        with amp():
            rule = GivenPasses(passes)
            out = model(ids, labels=ids, skip_logits=True, use_cache=False, keep_rule=rule)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    rows = []
    for visibility in ("all", "latest"):
        model = latentcot.build_model(
            "adaptive", backbone, l_max=args.l_max, visibility=visibility
        ).to(device)
        model.set_attn_implementation(attention)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        spreads = {
            spread: forced_passes(spread, *ids.shape, args.l_max + 1).to(device)
            for spread in ("none", "even", "uneven")
        }
        for passes in spreads.values():
            step_seconds(model, optimizer, passes)
        full_flops = model.count_flops(spreads["none"]).training
        for spread in ("even", "uneven"):
            ratios = []
            for _ in range(args.pairs):
                pruned = step_seconds(model, optimizer, spreads[spread])
                ratios.append(pruned / step_seconds(model, optimizer, spreads["none"]))
            time_ratio = statistics.median(ratios)
            flops_ratio = model.count_flops(spreads[spread]).training / full_flops
            rows.append(
                {
                    "visibility": visibility,
                    "spread": spread,
                    "attention": attention,
                    "precision": precision,
                    "hidden_size": args.hidden_size,
                    "seq_len": args.seq_len,
                    "time_ratio": time_ratio,
                    "time_ratio_low": min(ratios),
                    "time_ratio_high": max(ratios),
                    "exact_flops_ratio": flops_ratio,
                    "time_over_flops": time_ratio / flops_ratio,
                }
            )
    if args.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(
            f"{row['visibility']:>6} {row['spread']:>6}: time {row['time_ratio']:.3f} "
            f"[{row['time_ratio_low']:.3f}, {row['time_ratio_high']:.3f}]  "
            f"exact FLOPs {row['exact_flops_ratio']:.3f}  "
            f"time / FLOPs {row['time_over_flops']:.2f}  ({attention}, {precision}, {device})"
        )


if __name__ == "__main__":
    main()

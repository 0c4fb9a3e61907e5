"""What a wavefront saves in passes, policy by policy, and how often rounding changes a text.

    python benchmarks/wavefront.py RUN --prompts 100

In float64 the tokens are those of plain decoding, always (tests/decoding/test_wavefront.py). In
narrower types a pass over several queries rounds otherwise than one over a single query, so a tie
of two tokens, or a reach probability next to tau, may fall the other way: this counts the prompts
for which that happened.
"""

import argparse
from pathlib import Path

import torch

from latentcot.bench import subject
from latentcot.decoding.policies import POLICIES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--tau", type=float)
    parser.add_argument("--dtypes", default="float64,float32,bfloat16")
    arguments = parser.parse_args()
    tau = {} if arguments.tau is None else {"tau": arguments.tau}
    for dtype in arguments.dtypes.split(","):
        model, ids = subject(
            arguments.run, getattr(torch, dtype), arguments.context + arguments.new_tokens
        )
        starts = torch.linspace(0, len(ids) - arguments.context - 1, arguments.prompts).long()
        prompts = [ids[start : start + arguments.context][None] for start in starts.tolist()]
        for sampling in ({"do_sample": False}, {"do_sample": True, "top_k": 0, "seed": 0}):
            options = sampling | tau | {"eos_token_id": None, "pad_token_id": 0}
            options |= {"return_dict_in_generate": True, "max_new_tokens": arguments.new_tokens}
            plain = [model.generate(ids, wavefront=False, **options) for ids in prompts]
            depth = torch.cat([out.past_key_values.depth[:, arguments.context :] for out in plain])
            depth = depth[:, : arguments.new_tokens - 1].double()
            for policy in POLICIES:
                waves = [model.generate(ids, wavefront=policy, **options) for ids in prompts]
                passes = sum(wave.num_passes for wave in waves) / depth.numel()
                slots = sum(wave.num_executed for wave in waves) / float(depth.sum())
                differ = sum(
                    not torch.equal(one.sequences, other.sequences)
                    for one, other in zip(plain, waves, strict=True)
                )
                kind = "sampled" if sampling["do_sample"] else "greedy"
                print(
                    f"{dtype:9} {kind:8} {policy:10} {passes:.3f} passes per token, plain "
                    f"{float(depth.mean()):.3f}; {slots:.2f} slots executed for one that stays; "
                    f"{differ} of {len(prompts)} texts differ",
                    flush=True,
                )


if __name__ == "__main__":
    main()

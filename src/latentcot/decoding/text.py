"""Text in, text out: generation from a prompt for the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

from latentcot.core.cache import SlotCache
from latentcot.core.halting import Threshold
from latentcot.errors import UserError

if TYPE_CHECKING:
    from latentcot.models.base import LatentLM

Show = Callable[[str, int | None], None]
"""Takes a piece of text and the latent steps before it; None for the prompt."""


class StepStreamer(BaseStreamer):
    """Hands on text as it is settled, with the latent steps that each piece took.

    Args:
        cache: where the passes of each token are looked up.
        show: is given the pieces; tokens that are parts of a character come together.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, cache: SlotCache, show: Show):
        self.tokenizer, self.cache, self.show = tokenizer, cache, show
        self.held: list[int] = []
        self.num_tokens = 0

    def put(self, value: torch.Tensor) -> None:
        tokens = value.flatten().tolist()
        if self.num_tokens == 0:
            self.show(self.tokenizer.decode(tokens), None)
            self.num_tokens = len(tokens)
            return
        self.held += tokens
        piece = self.tokenizer.decode(self.held)
        if not piece.endswith("\ufffd"):
            self._release(piece)
        self.num_tokens += len(tokens)

    def end(self) -> None:
        if self.held:
            self._release(self.tokenizer.decode(self.held))

    def _release(self, piece: str) -> None:
        before = self.num_tokens - 1  # the token whose chain predicted this one
        self.show(piece, int(self.cache.depth[0, before]) - 1)
        self.held = []


def generate_text(
    model: LatentLM,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    show: Show | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Go on from `prompt`.

    Args:
        show: is given the text while it is generated, see `StepStreamer`.
        options: of transformers' `generate` and of ours (`models/generation.py`).

    Returns:
        `prompt`; `text` (the continuation); `tokens`, for each its `id`, `text`, `latent_steps` and
        the `exits`, the probabilities of having exited at each step before it; `passes_per_token`;
        and `wavefront_passes_per_token`, what a wavefront executed, None without.

    Raises:
        UserError: empty prompt, or one that leaves no room in the model's context.
    """
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
    if ids.shape[1] == 0:
        raise UserError("the prompt is empty: give some text to go on from")
    room = model.config.max_position_embeddings - ids.shape[1]
    if room < 1:
        raise UserError(
            f"the prompt has {ids.shape[1]} tokens and the model's context holds "
            f"{model.config.max_position_embeddings}: shorten the prompt"
        )
    options["max_new_tokens"] = min(options["max_new_tokens"], room)
    if options.get("use_cache", True):
        cache = options["past_key_values"] = SlotCache()
        if show is not None:
            options["streamer"] = StepStreamer(tokenizer, cache, show)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        return_dict_in_generate=True,
        **options,
    )
    tokens = _tokens(model, tokenizer, out.sequences, ids.shape[1], options.get("tau"))
    if show is not None and "streamer" not in options:
        show(tokenizer.decode(out.sequences[0]), None)
    num_passes = getattr(out, "num_passes", None)
    return {
        "prompt": prompt,
        "text": tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True),
        "tokens": tokens,
        "passes_per_token": sum(token["latent_steps"] + 1 for token in tokens) / len(tokens),
        "wavefront_passes_per_token": None if num_passes is None else num_passes / len(tokens),
    }


@torch.no_grad()
def _tokens(
    model: LatentLM,
    tokenizer: PreTrainedTokenizerBase,
    sequence: torch.Tensor,
    prompt_length: int,
    tau: float | None,
) -> list[dict[str, Any]]:
    """The tokens behind the prompt of a (1, L) sequence, each with the chain that predicted it."""
    if tau is None:
        tau = getattr(model.generation_config, "tau", None)
    rule = None if tau is None else Threshold(tau)
    out = model(sequence[:, :-1], output_steps=True, keep_rule=rule, skip_logits=True)
    fixed = model.config.decoding_passes
    tokens = []
    for column in range(prompt_length, sequence.shape[1]):
        token, passes = int(sequence[0, column]), int(out.passes[0, column - 1])
        exits = [] if fixed else out.exit_probs[0, column - 1, :passes].tolist()
        tokens.append(
            {
                "id": token,
                "text": tokenizer.decode([token]),
                "latent_steps": (fixed or passes) - 1,
                "exits": exits,
            }
        )
    return tokens

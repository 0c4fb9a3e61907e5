"""Text in, text out: generation from a prompt for the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from latentcot.errors import UserError

if TYPE_CHECKING:
    from latentcot.models.base import LatentLM


def generate_text(
    model: LatentLM,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    use_cache: bool = True,
    stream: bool = False,
) -> dict[str, Any]:
    """Go on from `prompt`.

    Args:
        temperature: 0 always takes the likeliest token.
        top_k: sample among so many tokens; 0 means all.
        stream: print the text to stdout while it is generated.

    Returns:
        `prompt`, `text` (the continuation), and `tokens` (its ids).

    Raises:
        UserError: empty prompt, or one that leaves no room in the model's context.
    """
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    if ids.shape[1] == 0:
        raise UserError("the prompt is empty: give some text to go on from")
    room = model.config.max_position_embeddings - ids.shape[1]
    if room < 1:
        raise UserError(
            f"the prompt has {ids.shape[1]} tokens and the model's context holds "
            f"{model.config.max_position_embeddings}: shorten the prompt"
        )
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k}
    torch.manual_seed(seed)
    output = model.generate(
        ids.to(model.device),
        attention_mask=torch.ones_like(ids, device=model.device),
        max_new_tokens=min(max_new_tokens, room),
        use_cache=use_cache,
        streamer=TextStreamer(tokenizer) if stream else None,
        **sampling,
    )
    new = output[0, ids.shape[1] :].tolist()
    text = tokenizer.decode(new, skip_special_tokens=True)
    return {"prompt": prompt, "text": text, "tokens": new}

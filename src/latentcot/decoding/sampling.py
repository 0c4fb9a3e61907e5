"""Sampling with keyed noise: which token is drawn depends on seed, row and position alone.

The Gumbel-max trick: the argmax of scores plus Gumbel noise is a sample of their softmax. With
noise that is a pure function of (seed, row, position), a token is the same whoever draws it and
however often, so a draft and its final form share their luck.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process

_WORD = 0xFFFFFFFF

PURE = tuple(
    getattr(logits_process, name)
    for name in (
        "EncoderNoRepeatNGramLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    )
    if hasattr(logits_process, name)
)
"""Logits processors of transformers that are functions of the tokens and scores alone."""


def is_pure(processor: object) -> bool:
    """Whether a logits processor gives the same scores for the same tokens, call after call.

    One's own says so by an attribute `pure = True`.
    """
    return bool(getattr(processor, "pure", isinstance(processor, PURE)))


def _hashed(counter: Tensor, key: int) -> Tensor:
    """32 bits for each 32-bit counter, in int64: two rounds of a multiply-xorshift hash."""
    bits = counter ^ (key & _WORD)
    for multiplier in (0x7FEB352D, 0x846CA68B - (1 << 32)):
        bits = bits ^ (bits >> 16)
        bits = (bits * multiplier) & _WORD
    return bits ^ (bits >> 16)


def _mixed(*words: int) -> int:
    """One 32-bit key of several integers."""
    key = 0x9E3779B9
    for word in words:
        for part in (word & _WORD, (word >> 32) & _WORD):
            key = ((key ^ part) * 0x01000193 + 0x85EBCA6B) & _WORD
            key ^= key >> 15
            key = (key * 0x2C1B3C6D) & _WORD
            key ^= key >> 13
    return key


def gumbel(seed: int, row: int, position: int, size: int, device: torch.device) -> Tensor:
    """(size,) standard Gumbel noise, float32: the same on every device, in any order of calls."""
    counter = torch.arange(size, device=device)
    bits = _hashed(_hashed(counter, _mixed(seed, row, position)), _mixed(position, row, seed))
    uniform = (bits.double() + 0.5) / 2**32
    return -(-uniform.log()).log().float()


class KeyedGumbel(LogitsProcessor):
    """Keeps, of each row, the token with the largest score plus keyed Gumbel noise.

    As the last logits processor it decides the token, so that a multinomial draw behind it has no
    choice left.

    Args:
        seed: of the noise.
        padding: (B,) left padding of each row: the position of a token does not count it.
    """

    pure = True

    def __init__(self, seed: int, padding: list[int]):
        self.seed = seed
        self.padding = padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = [self.choose(row, input_ids.shape[1], own) for row, own in enumerate(scores)]
        index = torch.stack(chosen)[:, None]
        kept = torch.full_like(scores, -math.inf)
        return kept.scatter(1, index, 0.0)

    def choose(self, row: int, column: int, scores: Tensor) -> Tensor:
        """The token that row `row` gets in `column`, from its (V,) scores."""
        position = column - self.padding[row]
        return (scores + gumbel(self.seed, row, position, len(scores), scores.device)).argmax()

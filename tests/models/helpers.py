"""Small models for the tests, with routers that really prune."""

from typing import Any

import torch
from transformers import LlamaConfig

import latentcot
from latentcot.models import LatentLM

VOCABULARY = 61


def tiny_llama(**changes: Any) -> LlamaConfig:
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    return LlamaConfig(**(settings | changes))


def tiny_model(method: str, **options: Any) -> LatentLM:
    """A float64 model whose gates, where it has any, are spread between 0 and 1.

    A parallel pass of it equals decoding token by token, see `LatentConfig.exact_options`.
    """
    options = latentcot.METHODS[method].config_class.exact_options | options
    model = latentcot.build_model(method, options.pop("backbone", tiny_llama()), **options).double()
    spread_gates(model)
    return model


@torch.no_grad()
def spread_gates(model: LatentLM) -> None:
    """Random router weights: about half of the tokens go on at each step."""
    for name, parameter in model.named_parameters():
        if name.startswith("router") and parameter.ndim == 2:
            parameter.normal_(std=1.5 / parameter.shape[1] ** 0.5)
        elif name.startswith("router"):
            parameter.fill_(0.5)


def ids_of(*shape: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, shape)

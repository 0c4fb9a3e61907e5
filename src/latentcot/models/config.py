"""Configuration shared by all methods: a backbone of transformers, its scale and initialisation."""

from __future__ import annotations

import copy
import math
from dataclasses import fields
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PretrainedConfig

from latentcot.core.slots import Visibility
from latentcot.errors import UserError

HEAD_SCALINGS = ("logit_scale", "logits_scaling", "final_logit_softcapping")
"""Settings of causal LM heads in transformers; only the decoder below the head is reused here."""


@strict
class LatentConfig(PretrainedConfig):
    """Base of the configurations of all methods.

    Args:
        backbone_config: any decoder's configuration (or its dict with `model_type`); default Llama.
        embedding_scale: factor on the input embedding; None means sqrt(2.5 d), which gives the
            scaled initialisation unit standard deviation. 1 for a warm start.
        initialization: `scaled` (truncated normal, std sqrt(2 / (5 d)), residual projections
            divided by sqrt(2 layers)) or `stock` (the backbone's own).
    """

    sub_configs: ClassVar[dict[str, Any]] = {"backbone_config": AutoConfig}
    # What HF's Trainer leaves out of its predictions: all outputs but the logits.
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "ce_loss",
        "adaptive_loss",
        "passes",
        "last_hidden_state",
        "gates",
        "reach_probs",
        "exit_probs",
        "step_target_probs",
    ]

    exact_options: ClassVar[dict[str, Any]] = {}
    """Options with which a parallel pass equals decoding token by token, where defaults do not."""

    backbone_config: Any = None
    embedding_scale: float | int | None = None
    initialization: Literal["scaled", "stock"] = "scaled"
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.backbone_config, PretrainedConfig):
            self.backbone_config = copy.deepcopy(self.backbone_config)
        else:
            self.backbone_config = AutoConfig.for_model(
                **{"model_type": "llama", **(self.backbone_config or {})}
            )
        self.tie_word_embeddings = bool(self.backbone_config.tie_word_embeddings)
        if self.embedding_scale is None:
            self.embedding_scale = math.sqrt(2.5 * self.backbone_config.hidden_size)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(self.backbone_config, name, None))
        super().__post_init__(**kwargs)
        self.check()

    def layer_windows(self) -> list[int | None]:
        """Sliding window of each layer of the backbone, None where it sees all positions."""
        backbone = self.backbone_config
        window = getattr(backbone, "sliding_window", None)
        kinds = getattr(backbone, "layer_types", None) or ["sliding_attention"]
        if len(kinds) == 1:
            kinds = kinds * self.num_hidden_layers
        return [window if kind == "sliding_attention" else None for kind in kinds]

    def check(self) -> None:
        """Raise a UserError for values that make no sense; methods add their own."""
        if not (self.embedding_scale or 0) > 0:
            raise UserError(f"embedding_scale is {self.embedding_scale}: give a number above 0")
        for name in HEAD_SCALINGS:
            if getattr(self.backbone_config, name, None) not in (None, 1):
                raise UserError(
                    f"a {self.backbone_config.model_type} backbone with {name} is not supported: "
                    "its logits are scaled in a head that latentcot does not use"
                )

        heads = self.num_attention_heads
        groups = getattr(self.backbone_config, "num_key_value_heads", None) or heads
        if heads % groups:
            raise UserError(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}: "
                "change one of them"
            )

    @classmethod
    def option_names(cls) -> set[str]:
        """Fields that latentcot's classes declare and a user may set; not transformers' own."""
        inherited = {field.name for field in fields(PretrainedConfig)}
        fixed = {"backbone_config", "tie_word_embeddings"}
        own = {field.name for field in fields(cls)} - inherited - fixed
        return {name for name in own if not name.endswith("_token_id")}

    @property
    def visibility(self) -> Visibility:
        """Which slots a query sees; `own` unless a method says otherwise: those of its own step."""
        return "own"

    @property
    def prunes(self) -> bool:
        """Whether a router decides how many passes a token executes."""
        return False

    @property
    def is_watched(self) -> bool:
        """Whether the loop watches for a router that dies or sleeps."""
        return False

    @property
    def num_passes(self) -> int:
        """K, the passes of the backbone that a token executes at most."""
        return 1

    @property
    def training_passes(self) -> list[float]:
        """Mean passes of a trained token, in each of the equally likely kinds of update."""
        return [float(self.num_passes)]

    @property
    def decoding_passes(self) -> int | None:
        """Passes of a decoded token where decoding differs from a parallel pass, else None."""
        return None

    @property
    def vocab_size(self) -> int:
        return int(self.backbone_config.vocab_size)

    @vocab_size.setter
    def vocab_size(self, value: int) -> None:
        self.backbone_config.vocab_size = value  # transformers' `resize_token_embeddings`

    @property
    def hidden_size(self) -> int:
        return int(self.backbone_config.hidden_size)

    @property
    def num_hidden_layers(self) -> int:
        return int(self.backbone_config.num_hidden_layers)

    @property
    def num_attention_heads(self) -> int:
        return int(self.backbone_config.num_attention_heads)

    @property
    def max_position_embeddings(self) -> int:
        length = getattr(self.backbone_config, "max_position_embeddings", None)
        if length is None:
            kind = self.backbone_config.model_type
            raise UserError(f"a {kind} backbone has no positions that slots could share")
        return int(length)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing to do: the model's `save_pretrained` writes the `auto_map`."""

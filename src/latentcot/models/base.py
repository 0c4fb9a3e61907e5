"""`LatentLM`, the base of all methods: embed, run the backbone over slots, head, loss.

Shapes: B rows, L columns, N active tokens, K passes at most, d width, V vocabulary.
"""

from __future__ import annotations

import uuid
from abc import abstractmethod
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModel, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from latentcot.core.attention import ATTENTION_NAME, BACKENDS
from latentcot.core.cache import SlotCache
from latentcot.core.halting import KeepRule
from latentcot.core.objective import (
    IGNORE_INDEX,
    cross_entropy_sum,
    shift_labels,
    target_probs,
)
from latentcot.core.packing import Packing
from latentcot.core.slot_pass import SlotPass
from latentcot.errors import UserError
from latentcot.flops import Flops, Ledger, linear_flops
from latentcot.models.config import LatentConfig
from latentcot.models.export import auto_map, write_extras
from latentcot.models.generation import LatentGeneration
from latentcot.models.initialization import scaled_init_
from latentcot.models.steps import fixed_steps

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox")
"""Backbones that do nothing but embed, run their layers with rotary embeddings, and norm."""


@dataclass
class LatentLMOutput(ModelOutput):
    """What `LatentLM.forward` returns.

    Attributes:
        loss: ce_loss + adaptive_loss, each a sum over target tokens divided by their number.
        logits: (B, L, V), or the last `logits_to_keep` columns.
        passes: (B, L) passes executed, 0 at padding; latent steps are passes - 1.
        last_hidden_state: (B, L, d) the states that the LM head reads; zero at padding.
        gates, reach_probs, exit_probs: (B, L, K), zero where not executed (`output_steps`);
            exit_probs are the truncated ones and sum to 1.
        step_target_probs: (B, L, K) probability that each executed step gives to label t + 1
            (`output_steps` with labels).
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: SlotCache | None = None
    ce_loss: Tensor | None = None
    adaptive_loss: Tensor | None = None
    passes: Tensor | None = None
    last_hidden_state: Tensor | None = None
    gates: Tensor | None = None
    reach_probs: Tensor | None = None
    exit_probs: Tensor | None = None
    step_target_probs: Tensor | None = None


@dataclass
class Chunk:
    """The input of `think`: the real tokens of a (B, L) chunk.

    Attributes:
        embeds: (N, d) scaled embeddings e_t.
        packing: their places.
        cache: the slots of earlier chunks, and where new ones go.
        targets: (N,) the next token of each, IGNORE_INDEX where there is none; None without labels.
        keep_rule: overrides who goes on to the next step; None is the method's own rule.
        output_steps: whether the step-wise records of `Thought` are wanted.
    """

    embeds: Tensor
    packing: Packing
    cache: SlotCache
    targets: Tensor | None
    keep_rule: KeepRule | None
    output_steps: bool


@dataclass
class Thought:
    """What a method makes of a chunk.

    Attributes:
        hidden: (B, L, d) the states that the LM head reads; zero at padding.
        passes: (B, L) passes executed; 0 at padding.
        penalty: auxiliary loss summed over target tokens, or None.
        steps: the (B, L, K) records named in `LatentLMOutput`, if wanted; those of a method without
            gates follow from `passes`.
    """

    hidden: Tensor
    passes: Tensor
    penalty: Tensor | None = None
    steps: dict[str, Tensor] = field(default_factory=dict)


class LatentLM(PreTrainedModel, LatentGeneration, GenerationMixin):
    """A causal language model that executes one or more passes of its backbone for each token.

    A method derives from this class once, defines `think`, and is registered by
    `register_method`. The backbone is any decoder of transformers that takes `inputs_embeds`,
    `position_ids` and attention functions by name.
    """

    config: LatentConfig
    config_class = LatentConfig
    base_model_prefix = "backbone"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = False
    can_wavefront: ClassVar[bool] = False
    """Whether it halts step by step, with `gate`, as decoding/wavefront.py asks for."""
    accepts_loss_kwargs = True
    _supports_sdpa = True
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values", "slots"]

    def __init__(self, config: LatentConfig):
        super().__init__(config)
        # Drawn before any weight: the same seed gives every method the same weights.
        self._init_seed = int(torch.randint(2**62, (), device="cpu"))
        self._cache_key = uuid.uuid4().hex
        self.backbone = AutoModel.from_config(
            config.backbone_config, attn_implementation=ATTENTION_NAME
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            embedding = self.backbone.get_input_embeddings()
            (name,) = [n for n, m in self.backbone.named_modules() if m is embedding]
            self._tied_weights_keys = {"lm_head.weight": f"backbone.{name}.weight"}
        self.build()
        self.post_init()

    def build(self) -> None:
        """Make the modules that this method adds to backbone and head."""

    @abstractmethod
    def think(self, chunk: Chunk) -> Thought:
        """From embeddings to the states that the LM head reads: the method itself."""

    def draw(self) -> None:
        """Draw what is random in an update and the same for all its sequences.

        The training loop calls it once an update, after it has seeded torch.
        """

    def tally(self, ledger: Ledger, passes: Tensor) -> None:
        """Enter what `think` computed for tokens that executed `passes` (B, L), 0 at padding."""
        ledger.run(passes, self.config.visibility)

    def embed(self, input_ids: Tensor) -> Tensor:
        """(B, L) token ids to (B, L, d) scaled embeddings e_t, what pass 1 reads.

        `forward` scales its `inputs_embeds` itself: give it `get_input_embeddings()(ids)` instead.
        """
        return self._scale(self.get_input_embeddings()(input_ids))

    def _scale(self, embeds: Tensor) -> Tensor:
        scale = self.config.embedding_scale
        assert scale is not None
        return embeds * scale

    def slots(self, chunk: Chunk, step: int, packing: Packing) -> SlotPass:
        """A pass over the tokens of `packing` at `step` (from 1); `run` executes it."""
        return chunk.cache.step(step, packing, self.config.visibility, self.attention_backend)

    def run(self, states: Tensor, slots: SlotPass) -> Tensor:
        """One pass of the backbone, final norm included, over the active tokens: (N, d) each."""
        out = self.backbone(
            inputs_embeds=states[None],
            position_ids=slots.packing.position_ids[None],
            use_cache=False,
            slots=slots,
        )
        if slots.num_layers != self.config.num_hidden_layers:
            raise UserError(
                f"{slots.num_layers} of {self.config.num_hidden_layers} layers of this "
                f"{self.config.backbone_config.model_type} backbone attend through transformers' "
                "attention interface: latentcot needs a backbone in which all do"
            )
        return out.last_hidden_state[0].to(states.device)

    def run_layers(self, states: Tensor, slots: SlotPass, layers: slice = slice(None)) -> Tensor:
        """The given layers of a Llama-like backbone, without the final norm: (N, d) each.

        Raises:
            UserError: a backbone whose own forward may do more than run its layers.
        """
        backbone, position_ids = self.backbone, slots.packing.position_ids[None]
        kind = self.config.backbone_config.model_type
        if kind not in LLAMA_LIKE:
            raise UserError(
                f"{self.config.model_type.removeprefix('latentcot_')} runs the layers of its "
                f"backbone one by one, which a {kind} backbone does not allow: choose one of "
                f"{', '.join(LLAMA_LIKE)}"
            )
        hidden = states[None]
        rotary = backbone.rotary_emb(hidden, position_ids)
        for layer in backbone.layers[layers]:
            hidden = layer(
                hidden,
                attention_mask=None,
                position_ids=position_ids,
                position_embeddings=rotary,
                slots=slots,
            )
        return hidden[0].to(states.device)

    def final_norm(self, states: Tensor) -> Tensor:
        """The backbone's last normalisation, which `run` applies and `run_layers` does not."""
        norms = (getattr(self.backbone, name, None) for name in ("norm", "final_layer_norm"))
        norm = next(module for module in norms if module is not None)
        return norm(states).to(states.device)

    @property
    def attention_backend(self) -> str:
        """Name of the attention backend, transformers' `attn_implementation`."""
        return str(self.config._attn_implementation)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: SlotCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        logits_to_keep: int | Tensor = 0,
        output_steps: bool = False,
        keep_rule: KeepRule | None = None,
        skip_logits: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> LatentLMOutput | tuple[Any, ...]:
        """Predict the token after each column.

        Args:
            input_ids: (B, L) token ids; or inputs_embeds (B, L, d), before the embedding scale.
            attention_mask: (B, L) or (B, L of the cache + L), 0 at padding, on either side.
                Padding executes nothing and is seen by nobody.
            labels: (B, L) token ids, shifted inside, -100 ignored.
            past_key_values: the cache that an earlier call returned; this chunk continues it.
            num_items_in_batch: divisor of the loss sums; default the targets of this batch.
            logits_to_keep: only the last so many columns (0: all), or their indices.
            output_steps: also return the step-wise records.
            keep_rule: who goes on to the next step, instead of the method's own rule.
            skip_logits: do not compute logits (training: the loss does not need them whole).

        Raises:
            UserError: a cache of another kind or model, or attentions / hidden states asked for.
            ValueError: neither or both of input_ids and inputs_embeds; a cache of another batch.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if past_key_values is not None and not isinstance(past_key_values, SlotCache):
            raise UserError(
                f"past_key_values is a {type(past_key_values).__name__}, not the SlotCache of a "
                "latentcot model: pass what an earlier call of this model returned, or nothing"
            )
        if output_attentions or output_hidden_states:
            raise UserError(
                "output_attentions and output_hidden_states are not available: use output_steps"
            )
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        embeds = self._scale(inputs_embeds)
        batch_shape = (embeds.shape[0], embeds.shape[1])
        if attention_mask is not None:
            attention_mask = _own_columns(attention_mask, batch_shape)
        cache = SlotCache() if past_key_values is None else past_key_values
        if cache.owner not in (None, self._cache_key):
            raise UserError(
                "past_key_values was filled by another model: its slots mean nothing to this one; "
                "start without a cache"
            )
        cache.owner = self._cache_key
        packing = cache.begin(attention_mask, batch_shape, embeds.device)
        targets = None
        if labels is not None:
            targets = shift_labels(labels)
            if attention_mask is not None:
                targets = targets.masked_fill(~attention_mask.bool(), IGNORE_INDEX)

        chunk = Chunk(
            embeds=packing.gather(embeds),
            packing=packing,
            cache=cache,
            targets=None if targets is None else packing.gather(targets),
            keep_rule=keep_rule,
            output_steps=output_steps,
        )
        if len(packing):
            thought = self.think(chunk)
        else:  # nothing but padding
            no_passes = torch.zeros(batch_shape, dtype=torch.int64, device=embeds.device)
            thought = Thought(embeds * 0, no_passes)
        losses: dict[str, Tensor] = {}
        if targets is not None:
            losses = self._losses(thought, targets, num_items_in_batch)
        logits = None
        if not skip_logits:
            kept = (
                slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            )
            logits = self.lm_head(thought.hidden[:, kept])
        if use_cache is None:
            use_cache = not self.training
        keeps_cache = use_cache or past_key_values is not None
        fields: dict[str, Any] = dict(losses)
        if output_steps and len(packing):
            shape = (self.config.num_passes, thought.hidden.dtype)
            fields |= fixed_steps(thought.passes, *shape)
            if targets is not None:  # what every method knows: the last state's
                states = thought.hidden.flatten(0, 1)
                p_target = target_probs(states, self.lm_head.weight, targets.flatten())
                fields["step_target_probs"] = fields["exit_probs"] * p_target.view_as(targets)[
                    ..., None
                ].to(states)
            fields |= thought.steps
        out = LatentLMOutput(
            logits=logits,
            past_key_values=cache if keeps_cache else None,
            passes=thought.passes,
            last_hidden_state=thought.hidden,
            **fields,
        )
        return out.to_tuple() if return_dict is False else out

    def _losses(
        self, thought: Thought, targets: Tensor, num_items_in_batch: Tensor | int | None
    ) -> dict[str, Tensor]:
        if not isinstance(self.lm_head, nn.Linear):
            raise UserError(
                f"the LM head is wrapped in a {type(self.lm_head).__name__}, which the chunked "
                "loss cannot see through: adapt the backbone only, or take the loss of the logits"
            )
        if num_items_in_batch is None:
            num_items_in_batch = (targets != IGNORE_INDEX).sum()
        hidden = thought.hidden.flatten(0, 1)
        ce_sum = cross_entropy_sum(hidden, self.lm_head.weight, targets.flatten())
        ce_loss = ce_sum / num_items_in_batch
        if thought.penalty is None:
            return {"loss": ce_loss, "ce_loss": ce_loss, "adaptive_loss": torch.zeros_like(ce_loss)}
        adaptive_loss = thought.penalty.to(ce_loss.device) / num_items_in_batch
        return {
            "loss": ce_loss + adaptive_loss,
            "ce_loss": ce_loss,
            "adaptive_loss": adaptive_loss,
        }

    @torch.no_grad()
    def count_flops(self, passes: Tensor, executed: bool = False, decoding: bool = False) -> Flops:
        """FLOPs of a batch whose tokens executed `passes` (B, L), 0 at padding.

        Args:
            executed: count what a dense mask executes too, as PyTorch's counter does under eager
                attention, and recomputation; default: visible pairs only.
            decoding: the tokens came one by one over a cache (which changes `executed` only).
        """
        config = self.config.backbone_config
        heads = self.config.num_attention_heads
        head_width = getattr(config, "head_dim", None) or self.config.hidden_size // heads
        windows = self.config.layer_windows()
        ledger = Ledger(self.backbone, windows, head_width * heads, executed, decoding)
        self.tally(ledger, passes)
        ledger.add(head=int((passes > 0).sum()) * linear_flops(self.lm_head))
        return ledger.total

    def initialize_weights(self) -> None:
        super().initialize_weights()
        if self.config.initialization == "scaled":
            config = self.config
            scaled_init_(self, config.hidden_size, config.num_hidden_layers, self._init_seed)

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Choose the attention backend by name; the backbone always attends through the slots.

        Raises:
            UserError: no such backend.
        """
        if isinstance(attn_implementation, dict):
            attn_implementation = attn_implementation.get("", self.attention_backend)
        if attn_implementation not in BACKENDS:
            raise UserError(
                f"no attention backend {attn_implementation!r}: choose one of {', '.join(BACKENDS)}"
            )
        names = {"": attn_implementation, "backbone_config": ATTENTION_NAME}
        self.config._attn_implementation = names

    def save_pretrained(
        self, save_directory: str | PathLike[str], *, figures: Any = None, **kwargs: Any
    ) -> None:
        """Save as transformers does, with a model card and a stub for the Auto classes.

        Args:
            figures: name -> value, shown in the model card.
        """
        self.config.auto_map = auto_map(self)
        self._keep_generation_options()
        super().save_pretrained(save_directory, **kwargs)
        if kwargs.get("is_main_process", True):
            write_extras(Path(save_directory), self, figures)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing to do: `save_pretrained` always writes an `auto_map`, and never source files."""

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def _own_columns(attention_mask: Tensor, batch_shape: tuple[int, int]) -> Tensor:
    """(B, L) of a mask that covers this chunk, or the cache and this chunk. Raises ValueError."""
    rows, columns = batch_shape
    if attention_mask.ndim != 2 or attention_mask.shape[0] != rows:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: give one of 0s and 1s of "
            f"shape ({rows}, {columns})"
        )
    if attention_mask.shape[1] < columns:
        raise ValueError(
            f"attention_mask covers {attention_mask.shape[1]} columns and the input has {columns}"
        )
    return attention_mask[:, -columns:]

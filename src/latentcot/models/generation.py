"""What transformers' `generate` does differently here: slots, tau, keyed noise, the wavefront.

Options of the generation configuration beside transformers' own, also arguments of `generate`:

- `tau`: threshold of halting, instead of the model's; what `latentcot dial` sets.
- `wavefront`: True, False, the name of a policy (`decoding/policies.py`) or a policy. By default, a
  wavefront runs if there is one sequence and nothing stands against it.
- `seed`: of the sampling; by default drawn from torch's global generator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

from latentcot.core.cache import SlotCache
from latentcot.core.halting import Threshold
from latentcot.decoding.policies import policy_of
from latentcot.decoding.sampling import KeyedGumbel
from latentcot.decoding.wavefront import obstacle, wavefront
from latentcot.errors import UserError

OPTIONS = ("tau", "wavefront", "seed")


class LatentGeneration(GenerationMixin):
    """`generate` over the store of slots."""

    def _keep_generation_options(self) -> None:
        """A configuration that was made from the model's forgets our options when it is loaded."""
        config = self.generation_config
        if any(getattr(config, name, None) is not None for name in OPTIONS):
            config._from_model_config = False

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """transformers' hook: take in our options, and check them."""
        own = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        for name in OPTIONS:
            setattr(config, name, own.get(name, getattr(config, name, None)))
        policy_of(config.wavefront)
        if config.tau is not None:
            if not hasattr(self.config, "tau"):
                raise UserError(
                    f"tau is {config.tau}, and a {type(self).__name__} has no threshold of "
                    "halting: leave it out"
                )
            model_kwargs.setdefault("keep_rule", Threshold(config.tau))
        return config, model_kwargs

    def _prepare_model_inputs(
        self, inputs: Tensor | None, bos_token_id: Any, model_kwargs: dict[str, Any]
    ) -> tuple[Tensor, str | None, dict[str, Any]]:
        """transformers' hook: the prompt."""
        prompt, name, model_kwargs = super()._prepare_model_inputs(
            inputs, bos_token_id, model_kwargs
        )
        length, room = prompt.shape[1], self.config.max_position_embeddings
        if length == 0:
            raise UserError("the prompt is empty: give some text to go on from")
        if length > room:
            raise UserError(
                f"the prompt has {length} tokens and the model's context holds {room}: shorten the "
                "prompt"
            )
        if name == "input_ids":
            low, high = int(prompt.min()), int(prompt.max())
            if low < 0 or high >= self.config.vocab_size:
                raise UserError(
                    f"the prompt has token {low if low < 0 else high} and the vocabulary ends at "
                    f"{self.config.vocab_size - 1}: the tokenizer does not belong to this model"
                )
        return prompt, name, model_kwargs

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any
    ) -> None:
        """transformers' hook: the cache that `generate` starts with, if the user gave none."""
        if generation_config.use_cache is not False:
            model_kwargs.setdefault("past_key_values", SlotCache())

    def _get_logits_processor(
        self, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> LogitsProcessorList:
        """transformers' hook: sampling draws with keyed noise, as the last of the processors."""
        processors = super()._get_logits_processor(generation_config, *args, **kwargs)
        if not generation_config.do_sample or generation_config.num_beams > 1:
            return processors
        seed = generation_config.seed
        if seed is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
        mask = (kwargs.get("model_kwargs") or {}).get("attention_mask")
        num_rows = len(kwargs["encoder_input_ids"]) * generation_config.num_return_sequences
        padding = [0] * num_rows if mask is None else (mask == 0).sum(1).tolist()
        processors.append(KeyedGumbel(seed, padding))
        return processors

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """transformers' greedy search and sampling: by wavefront, if asked for or by default."""
        wanted = generation_config.wavefront
        if wanted is None and len(input_ids) == 1 and not synced_gpus:
            arguments = (logits_processor, generation_config, streamer, 1, model_kwargs)
            wanted = obstacle(self, *arguments) is None
        decode = wavefront if wanted else super()._sample.__func__
        return decode(
            self,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )

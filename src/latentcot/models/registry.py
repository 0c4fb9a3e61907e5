"""The methods by name: how they enter, and how a model of one is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from latentcot.errors import UserError
from latentcot.models.base import LatentLM

METHODS: dict[str, type[LatentLM]] = {}
"""Name -> class of every method; filled by `register_method`."""

M = TypeVar("M", bound=type[LatentLM])


def register_method(name: str) -> Callable[[M], M]:
    """Class decorator: enter a method into `METHODS` and into the Auto classes of transformers."""

    def register(cls: M) -> M:
        METHODS[name] = cls
        AutoConfig.register(cls.config_class.model_type, cls.config_class)
        AutoModelForCausalLM.register(cls.config_class, cls)
        return cls

    return register


def method_class(name: str) -> type[LatentLM]:
    """The class of method `name`.

    Raises:
        UserError: no such method; the message lists those there are.
    """
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}: choose one of {', '.join(sorted(METHODS))}")
    return METHODS[name]


def build_model(
    method: str, backbone: PretrainedConfig | dict[str, Any] | None = None, **options: Any
) -> LatentLM:
    """A freshly initialised model.

    Args:
        method: a key of `METHODS`.
        backbone: configuration of any decoder of transformers, or its dict; default Llama.
        options: fields of the method's configuration class.

    Raises:
        UserError: unknown method, or options that do not fit.
    """
    cls = method_class(method)
    known = cls.config_class.option_names()
    if unknown := sorted(options.keys() - known):
        raise UserError(
            f"{method} has no option {unknown[0]!r}: its options are {', '.join(sorted(known))}"
        )
    try:
        config = cls.config_class(backbone_config=backbone, **options)
        return cls(config)
    except UserError:
        raise
    except Exception as error:  # transformers refuses a configuration in many ways
        reason = str(error.__cause__ or error).strip().splitlines()[-1].strip()
        raise UserError(f"{method}: no model can be built from this: {reason}") from error

"""The methods, one file each: importing this package registers all of them."""

import importlib
import pkgutil

from latentcot.models.base import Chunk, LatentLM, LatentLMOutput, Thought
from latentcot.models.config import LatentConfig
from latentcot.models.registry import METHODS, build_model, method_class, register_method

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "METHODS",
    "Chunk",
    "LatentConfig",
    "LatentLM",
    "LatentLMOutput",
    "Thought",
    "build_model",
    "method_class",
    "register_method",
]

"""Recipes: typed configuration of a run, read from YAML with `base:` and `key.sub=value`."""

from __future__ import annotations

import difflib
import functools
import importlib
import operator
import re
import sys
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from transformers import CONFIG_MAPPING

from latentcot.data import DataConfig
from latentcot.errors import UserError
from latentcot.models import METHODS, LatentConfig, LatentLM, build_model, method_class

EVAL_BATCH_TOKENS = 2**13


class Strict(BaseModel):
    """Base of the sections: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TrainingConfig(Strict):
    """How a run is trained. Give the budget in tokens or in FLOPs."""

    budget_tokens: int | None = Field(None, gt=0, description="tokens read until the run ends")
    budget_flops: float | None = Field(
        None, gt=0, description="exact training FLOPs spent until the run ends"
    )
    max_steps: int | None = Field(None, gt=0, description="stop here, the schedule unchanged")
    block_length: int = Field(256, gt=1, description="tokens of a sequence")
    batch_size: int = Field(8, gt=0, description="sequences of an update")
    micro_batch_size: int | None = Field(
        None, gt=0, description="sequences of a forward pass (default: batch_size)"
    )
    learning_rate: float = Field(2e-3, gt=0, description="peak")
    min_learning_rate_ratio: float = Field(0.1, ge=0, le=1, description="end / peak")
    warmup_share: float = Field(0.02, ge=0, lt=1, description="share of the budget for warm-up")
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = Field(0.1, ge=0, description="on matrices, embeddings included")
    grad_clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    precision: Literal["auto", "float32", "bfloat16", "float64"] = Field(
        "auto", description="auto: bfloat16 autocast where the hardware has it, else float32"
    )
    attention: Literal["auto", "sdpa", "eager"] = Field("auto", description="attention backend")
    device: str = Field("auto", description="auto: CUDA, else MPS, else CPU")
    eval_every: int = Field(100, gt=0, description="updates between evaluations")
    eval_blocks: int = Field(64, gt=0, description="validation blocks of such an evaluation")
    checkpoint_every: int = Field(200, gt=0, description="updates between checkpoints")
    keep_checkpoints: int = Field(2, gt=0, description="checkpoints kept")

    @model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        if (self.budget_tokens is None) == (self.budget_flops is None):
            raise ValueError("give exactly one of budget_tokens and budget_flops")
        if self.batch_size % self.micro_batch:
            raise ValueError(
                f"micro_batch_size {self.micro_batch} does not divide batch_size {self.batch_size}"
            )
        return self

    @property
    def eval_batch_size(self) -> int:
        """Sequences of a forward pass in evaluations."""
        return max(1, EVAL_BATCH_TOKENS // self.block_length)

    def share_spent(self, tokens: float, exact_flops: float) -> float:
        """The spent share of the budget, from 0 to 1 (or a little more at the end)."""
        if self.budget_flops is not None:
            return exact_flops / self.budget_flops
        assert self.budget_tokens is not None
        return tokens / self.budget_tokens

    @property
    def micro_batch(self) -> int:
        return self.micro_batch_size or self.batch_size


class ModelSection(Strict):
    """What is trained: a method over a backbone; each method adds its options."""

    method: str
    backbone: dict[str, Any]

    @model_validator(mode="after")
    def _check_backbone(self) -> ModelSection:
        kind = self.backbone.get("model_type", "llama")
        if kind not in CONFIG_MAPPING:
            raise ValueError(
                f"no backbone {kind!r} in transformers{_nearest(kind, CONFIG_MAPPING)}"
            )
        known = _backbone_keys(kind)
        for key in self.backbone:
            if key not in known:
                raise ValueError(f"a {kind} backbone has no key {key!r}{_nearest(key, known)}")
        return self


class Recipe(Strict):
    """A run: what is trained (`model`), on what (`data`), how (`training`), from which seed."""

    name: str
    note: str = ""
    seed: int = 0
    plugins: list[str] = Field([], description="modules that register methods of your own")
    model: ModelSection
    data: DataConfig = DataConfig()
    training: TrainingConfig

    def build_model(self) -> LatentLM:
        """The freshly initialised model of this recipe (torch's seed decides the weights).

        Raises:
            UserError: values that the method or the backbone refuses.
        """
        section = self.model.model_dump()
        method, backbone = section.pop("method"), section.pop("backbone")
        length = self.training.block_length
        model = build_model(method, backbone, **section)
        if length > model.config.max_position_embeddings:
            raise UserError(
                f"training.block_length {length} is longer than the backbone's "
                f"max_position_embeddings {model.config.max_position_embeddings}: "
                "change one of them"
            )
        return model

    def build_on_meta(self) -> LatentLM:
        """The model without its weights: to check and count. Raises as `build_model`."""
        with torch.device("meta"):
            return self.build_model()

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe, its bases first, then apply `key.sub=value` overrides.

    Raises:
        UserError: missing file, broken YAML, unknown key (with the nearest name), bad value.
    """
    content = _read(Path(path))
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise UserError(f"override {override!r} is not of the form key.sub=value")
        content = _merge(content, _nest(key.split("."), _parse(value, f"override {override!r}")))
    content.setdefault("name", Path(path).stem)
    return make_recipe(content, str(path))


def make_recipe(content: dict[str, Any], origin: str = "recipe") -> Recipe:
    """A validated recipe from its content; imports its plugins. Raises UserError."""
    for plugin in content.get("plugins") or []:
        load_plugin(str(plugin))
    model = content.get("model")
    if not isinstance(model, dict) or "method" not in model:
        raise UserError(
            f"{origin}: model.method is missing: give one of {', '.join(sorted(METHODS))}"
        )
    method_class(str(model["method"]))
    try:
        return _recipe_type().model_validate(content)
    except ValidationError as error:
        raise UserError(f"{origin}: {first_problem(error, _recipe_type())}") from None


def load_plugin(module: str) -> None:
    """Import a module, of the working directory or installed, that registers methods.

    Raises:
        UserError: there is no such module, or it cannot be imported.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a module does when it is imported
        raise UserError(
            f"the plugin {module!r} cannot be imported ({type(error).__name__}: {error}): give the "
            "name of a Python module here or among the installed ones"
        ) from error


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """The first key in which two resolved recipes differ, with both values; None if none does."""
    flat_ours, flat_theirs = _flatten(ours), _flatten(theirs)
    for key in sorted(flat_ours.keys() | flat_theirs.keys()):
        if flat_ours.get(key) != flat_theirs.get(key):
            return f"{key} is {flat_ours.get(key)!r} here and {flat_theirs.get(key)!r} there"
    return None


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys of one YAML file, its base not yet read. Raises UserError."""
    if not path.is_file():
        raise UserError(f"no recipe at {path}: give the path of a YAML file, see recipes/")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file: give the path of a YAML recipe") from None
    content = _parse(text, str(path))
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no keys: a recipe needs model, data and training")
    return content


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path.resolve() in seen:
        raise UserError(f"{path} is its own base: remove the circle of `base:` keys")
    content = read_yaml(path)
    if "sweep" in content:
        raise UserError(
            f"{path} is a sweep, several recipes in one: give it to `latentcot compare --sweep`"
        )
    base = content.pop("base", None)
    if base is None:
        return content
    inherited = _read(path.parent / str(base), (*seen, path.resolve()))
    inherited.pop("name", None)  # two runs of one name would share a run directory
    return _merge(inherited, content)


def _parse(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{origin} is not valid YAML: {' '.join(str(error).split())}") from None


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as people expect (YAML 1.1 asks for 1.0e-3)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def _nest(keys: list[str], value: Any) -> dict[str, Any]:
    return {keys[0]: value if len(keys) == 1 else _nest(keys[1:], value)}


def _backbone_keys(model_type: str) -> set[str]:
    """Keys of a `backbone` section; none for a type that transformers does not have."""
    if model_type not in CONFIG_MAPPING:
        return set()
    return {field.name for field in fields(CONFIG_MAPPING[model_type])} | {"model_type"}


def _merge(base: dict[str, Any], difference: dict[str, Any]) -> dict[str, Any]:
    """`base` with `difference` laid over it.

    A change of method drops the other's own options, a change of backbone the keys it lacks.
    """
    merged = dict(base)
    for key, value in difference.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            if key == "backbone" and "model_type" in value:
                known = _backbone_keys(value["model_type"])
                old = {name: kept for name, kept in old.items() if name in known}
            if key == "model" and value.get("method", old.get("method")) != old.get("method"):
                common = LatentConfig.option_names() | {"backbone"}
                old = {name: kept for name, kept in old.items() if name in common}
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


def _flatten(content: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(content, dict):
        return {prefix.rstrip("."): content}
    return {
        k: v for key, sub in content.items() for k, v in _flatten(sub, f"{prefix}{key}.").items()
    }


def _model_section(method: str) -> type[BaseModel]:
    """The `model` section of a method: its configuration's own fields, typed as there."""
    config_class = METHODS[method].config_class
    names = config_class.option_names()
    hints = _option_types(config_class)
    options: dict[str, Any] = {
        "method": (Literal[method], ...),
        "backbone": (dict[str, Any], Field(default_factory=dict)),
    }
    for option in fields(config_class):
        if option.name in names:
            default = option.default if option.default is not MISSING else ...
            options[option.name] = (hints[option.name], default)
    return create_model(
        f"{method}_model",
        __base__=ModelSection,
        **options,
    )


def _option_types(config_class: type[LatentConfig]) -> dict[str, Any]:
    """Types of the fields that latentcot's configuration classes declare."""
    types: dict[str, Any] = {}
    for cls in reversed(config_class.__mro__):
        if issubclass(cls, LatentConfig):
            own = type("Own", (), {"__annotations__": vars(cls).get("__annotations__", {})})
            types |= get_type_hints(own, vars(sys.modules[cls.__module__]))
    return types


@functools.lru_cache(maxsize=8)
def _recipe_type_of(methods: tuple[str, ...]) -> type[Recipe]:
    union: Any = functools.reduce(operator.or_, (_model_section(method) for method in methods))
    model: Any = Annotated[union, Field(discriminator="method")] if len(methods) > 1 else union
    return create_model("Recipe", __base__=Recipe, model=(model, ...))


def _recipe_type() -> type[Recipe]:
    return _recipe_type_of(tuple(sorted(METHODS)))


def first_problem(error: ValidationError, recipe_type: type[BaseModel]) -> str:
    """The first problem of a recipe, or of another file with sections, as one sentence."""
    problem = error.errors()[0]
    keys = [str(part) for part in problem["loc"] if part not in METHODS]
    name = ".".join(keys)
    if problem["type"] == "extra_forbidden":
        known = _known_keys(recipe_type, list(problem["loc"][:-1]))
        return f"unknown key {name!r}{_nearest(keys[-1], known)}"
    if problem["type"] == "missing":
        return f"{name} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if problem["type"] == "value_error":
        return f"{name}: {message}"
    return f"{name} is {problem['input']!r}: {message}"


def _known_keys(section: Any, location: list[Any]) -> list[str]:
    for part in location:
        if part in METHODS:
            section = _model_section(str(part))
        elif part != "model":
            section = section.model_fields[part].annotation
    return list(section.model_fields)


def _nearest(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f": did you mean {close[0]!r}?"
    return f": the keys here are {', '.join(known)}" if len(known) < 40 else ""

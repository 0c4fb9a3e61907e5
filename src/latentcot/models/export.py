"""What stands beside the weights of a saved model: the model card and the auto_map stub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, ModelCardData

if TYPE_CHECKING:
    from latentcot.models.base import LatentLM

STUB_MODULE = "modeling_latentcot"

_STUB = '''"""Lets programs that never import latentcot load this model: `pip install latentcot`."""

from {module} import {config}, {model}

__all__ = ["{config}", "{model}"]
'''

_CARD = """---
{metadata}
---

# {title}

A causal language model of method `{method}` by
[latentcot](https://arxiv.org/abs/2602.08220): {parameters:.2f}M parameters over a
`{backbone}` backbone, up to {passes} passes for each token.

## Use

```python
import latentcot  # registers the model with transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```

Programs that do not import `latentcot` load it with `trust_remote_code=True` where the package is
installed.

## Method

{options}
{figures}"""


def auto_map(model: LatentLM) -> dict[str, str]:
    """The `auto_map` of a saved configuration: Auto class -> class in the stub."""
    return {
        "AutoConfig": f"{STUB_MODULE}.{type(model.config).__name__}",
        "AutoModelForCausalLM": f"{STUB_MODULE}.{type(model).__name__}",
    }


def write_extras(directory: Path, model: LatentLM, figures: Mapping[str, Any] | None) -> None:
    """Write the stub and the model card (README.md) into the folder of a saved model."""
    stub = _STUB.format(
        module=type(model).__module__,
        config=type(model.config).__name__,
        model=type(model).__name__,
    )
    (directory / f"{STUB_MODULE}.py").write_text(stub, encoding="utf-8")
    ModelCard(_card(model, figures)).save(directory / "README.md")


def _card(model: LatentLM, figures: Mapping[str, Any] | None) -> str:
    config = model.config
    metadata = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["latentcot"]
    )
    options = {name: getattr(config, name) for name in sorted(config.option_names())}
    table = _table("figure", figures) if figures else ""
    return _CARD.format(
        metadata=metadata.to_yaml(),
        title=(figures or {}).get("name", type(model).__name__),
        method=config.model_type.removeprefix("latentcot_"),
        parameters=model.num_parameters() / 1e6,
        backbone=config.backbone_config.model_type,
        passes=config.num_passes,
        options=_table("option", options),
        figures=f"\n## Figures of the run\n\n{table}" if table else "",
    )


def _table(kind: str, values: Mapping[str, Any]) -> str:
    rows = [f"| {kind} | value |", "|---|---|"]
    rows += [f"| {name} | {_short(value)} |" for name, value in values.items()]
    return "\n".join(rows) + "\n"


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)

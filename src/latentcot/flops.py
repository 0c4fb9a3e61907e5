"""The FLOPs ledger: what a batch cost, from what was really executed.

A multiply-add counts as two FLOPs, element-wise work counts nothing, and a backward pass costs
twice its forward pass. Three figures come from one function:

- `kaplan`: 6 N for each pass of the backbone over a token (Kaplan et al. 2020), the paper's.
- `exact`: every matmul, attention by visible (query, slot) pairs, no recomputation.
- `executed`: attention by the pairs that a dense mask computes, and what is recomputed: what
  PyTorch's own counter sees under eager attention. All columns of a batch are taken to run at
  once, as in training, or one after the other over a cache, as in decoding.

Shapes: B rows, L columns, K passes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch import Tensor, nn

from latentcot.core.slots import Visibility, attends_by_row


@dataclass(frozen=True)
class Flops:
    """Forward FLOPs of a batch, by part.

    Attributes:
        passes: passes of the whole backbone, summed over tokens; not FLOPs, but Kaplan's ledger.
        linear: linear layers of the backbone and of routers, soft embeddings.
        attention: query-key and weight-value products.
        head: the LM head on the states that are scored.
        forward_only: what training computes without a gradient: the LM head on the states of each
            step, for the adaptive loss.
        recomputed: what a backward pass computes a second time (`executed` only).
    """

    passes: float = 0.0
    linear: float = 0.0
    attention: float = 0.0
    head: float = 0.0
    forward_only: float = 0.0
    recomputed: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        theirs = asdict(other)
        return Flops(**{part: value + theirs[part] for part, value in asdict(self).items()})

    @property
    def forward(self) -> float:
        """FLOPs of inference: the states are scored once."""
        return self.linear + self.attention + self.head

    @property
    def training(self) -> float:
        """FLOPs of a forward and a backward pass."""
        return 3 * self.forward + self.forward_only + self.recomputed

    def kaplan(self, num_parameters: float) -> float:
        """Kaplan's training FLOPs, 6 N for each pass; a third of it is inference."""
        return 6.0 * num_parameters * self.passes


class Ledger:
    """Adds up a batch; a method enters in `LatentLM.tally` what it executed.

    Args:
        backbone: the decoder.
        windows: sliding window of each of its layers, None where it sees all positions.
        attention_width: width of all query heads together.
        executed: count `executed` instead of `exact`.
        decoding: the columns came one by one, over a cache.
    """

    def __init__(
        self,
        backbone: nn.Module,
        windows: list[int | None],
        attention_width: int,
        executed: bool = False,
        decoding: bool = False,
    ):
        self.backbone = backbone
        self.windows = windows
        self.attention_width = attention_width
        self.executed = executed
        self.decoding = decoding
        self.total = Flops()

    def add(self, **parts: float) -> None:
        """Add forward FLOPs by part, see `Flops`."""
        self.total = self.total + Flops(**parts)

    def run(
        self,
        passes: Tensor,
        visibility: Visibility,
        layers: slice = slice(None),
        copies: int = 1,
        together: int = 1,
        times: int = 1,
    ) -> None:
        """Passes over a batch whose columns executed `passes` (B, L).

        Args:
            layers: the layers that ran.
            copies: columns that share a place in the text (`interleave`).
            together: columns that decoding runs at once.
            times: how often all of this ran.
        """
        windows = self.windows[layers]
        if len(windows) == len(self.windows):
            linear = linear_flops(self.backbone)
        else:
            chosen = list(self.backbone.get_submodule("layers").children())[layers]
            linear = sum(linear_flops(layer) for layer in chosen)
        if self.executed and self.decoding:
            pairs = len(windows) * decoded_pairs(passes, visibility, together)
        elif self.executed:
            pairs = len(windows) * executed_pairs(passes, visibility)
        else:
            pairs = sum(
                windows.count(window) * visible_pairs(passes, visibility, window, copies)
                for window in set(windows)
            )
        num_passes = int(passes.sum())
        self.add(
            passes=times * num_passes * len(windows) / len(self.windows),
            linear=times * num_passes * linear,
            attention=times * pair_flops(pairs, self.attention_width),
        )


def linear_flops(module: nn.Module) -> int:
    """Forward FLOPs of all linear layers inside `module`, for one token."""
    layers = (child for child in module.modules() if isinstance(child, nn.Linear))
    return sum(2 * layer.in_features * layer.out_features for layer in layers)


def pair_flops(num_pairs: int, attention_width: int) -> int:
    """Forward FLOPs of attention over `num_pairs` (query, slot) pairs: two products."""
    return 4 * num_pairs * attention_width


def interleave(passes: Tensor, copies: int) -> Tensor:
    """(B, L) passes to those of the sequence in which each token has `copies` slots: 1 and 0."""
    return (passes > 0).long().repeat_interleave(copies, dim=1)


def visible_pairs(
    passes: Tensor, visibility: Visibility, window: int | None = None, copies: int = 1
) -> int:
    """Number of visible (query, slot) pairs of a batch, the slots of each row being its own.

    Args:
        passes: (B, L) passes that each column executed, 0 at padding.
        visibility: `all`: the query (t, k) sees min(k, K*_t') slots of each t' <= t; `latest`: one;
            `own`: one of each t' that executed step k.
        window: sliding window in places of the text, or None. Padding counts as places here.
        copies: columns that share a place in the text.
    """
    pairs = 0
    for step in range(1, int(passes.max()) + 1):
        seen = _slots_until(passes, step, visibility)
        if window is not None and window * copies < passes.shape[1]:
            hidden = seen[:, copies - 1 :: copies].repeat_interleave(copies, dim=1)
            seen = seen - nn.functional.pad(hidden, (window * copies, 0))[:, : passes.shape[1]]
        pairs += int((seen * (passes >= step)).sum())
    return pairs


def decoded_pairs(passes: Tensor, visibility: Visibility, together: int = 1) -> int:
    """Number of pairs that attention computes when columns come over a cache, `together` at once.

    Each query of such a group meets all slots up to the group's end, outside its window too; and
    for `latest`, all of each token: they are masked where they lie.
    """
    pairs, visibility = 0, "own" if visibility == "own" else "all"
    for step in range(1, int(passes.max()) + 1):
        seen = _slots_until(passes, step, visibility)[:, together - 1 :: together]
        pairs += int((seen.repeat_interleave(together, dim=1) * (passes >= step)).sum())
    return pairs


def _slots_until(passes: Tensor, step: int, visibility: Visibility) -> Tensor:
    """(B, L) number of slots up to each column that a query at `step` may see."""
    if visibility == "own":
        return (passes >= step).cumsum(1)
    return passes.clamp(max=step if visibility == "all" else 1).cumsum(1)


def executed_pairs(passes: Tensor, visibility: Visibility) -> int:
    """Number of pairs that attention computes for such a batch, masked ones included."""
    num_steps = int(passes.max())
    counts = [(passes >= step).sum(1) for step in range(1, num_steps + 1)]
    widths = [count.max() for count in counts]
    pairs = 0
    for step, (count, width) in enumerate(zip(counts, widths, strict=True)):
        first, last = {"all": (0, step), "latest": (0, 0), "own": (step, step)}[visibility]
        num_rows, num_tokens = len(count), int(count.sum())
        if attends_by_row(num_rows, int(width), num_tokens, passes.device.type):
            pairs += int((count * sum(counts[first : last + 1])).sum())
        else:
            pairs += num_rows * int(width * sum(widths[first : last + 1]))
    return pairs

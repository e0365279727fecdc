"""Which matrix products run in 8 bits, and how they are scaled, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fzero.errors import PlanError, known_fields
from fzero.tree import found_in, path_patterns


RECIPES = ("tensorwise", "rowwise")

# Where 8 bits cost accuracy and gain little: tables, heads and what routes tokens; whole names
# between `/` and `.`, as transformers, torchtitan and flax write them.
KEEP = (
    r"(^|[/.])(wte|wpe|embed\w*|\w+_embeddings?|shared|table)([/.]|$)",
    r"(^|[/.])((\w+_)?head|logits|classifier|score|predictions[/.]decoder)([/.]|$)",
    r"^(model[/.])?output([/.]\w+)?$",
    r"(^|[/.])(router|gate[/.](weight|kernel))([/.]|$)",
)


@dataclass(frozen=True)
class Float8:
    """Which products of `Plan(precision="fp8")` run in 8 bits, and how they are scaled.

    A product of activations with one parameter runs on 8-bit operands, forwards and back, summed in
    float32. Each operand is scaled by its own largest value just before (current scaling). All else
    is as with `precision="bf16"`: fp32 masters, activations and everything that is no such product.

    Args:
        recipe: `tensorwise`: one scale for each operand; E4M3 forwards, E5M2 for gradients.
            `rowwise`: a scale, a power of two, for each row and column along which a product sums;
            E4M3 throughout. It follows outliers better and costs more.
        keep: regular expressions; a product stays in bf16 if one is found in its parameter's path
            (layer's name, then path in it; of a tied one, its owner's too). Embeddings, heads and
            routers by default.
        min_dim: products of a parameter with a smaller dim than this stay in bf16, and always those
            whose dims are no multiples of 16, as the GPUs' kernels want them.

    Raises:
        PlanError: a value is out of range.

    Example:
        >>> Float8(recipe="rowwise", keep=("lm_head", "blocks/.*proj")).takes("blocks/up", 64, 256)
        True

    Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433, section 3;
        torchao.float8's recipes of the same names.
    """

    recipe: str = "tensorwise"
    keep: tuple[str, ...] = KEEP
    min_dim: int = 16

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise PlanError(f"plan: float8: recipe={self.recipe!r}: expected one of {RECIPES}")
        object.__setattr__(self, "keep", path_patterns("float8: keep", self.keep))
        if isinstance(self.min_dim, bool) or not isinstance(self.min_dim, int) or self.min_dim < 1:
            raise PlanError(f"plan: float8: min_dim={self.min_dim!r}: expected a positive integer")

    def takes(self, path: str | Sequence[str], contracted: int, free: int) -> bool:
        """Whether the product with a parameter runs in 8 bits.

        Args:
            path: where the parameter is: layer's name, then path in it; of one that a layer reads
                from another, both.
            contracted: how many elements each sum of the product has.
            free: how many columns the parameter gives the product.
        """
        fits = all(n % 16 == 0 and n >= self.min_dim for n in (contracted, free))
        paths = (path,) if isinstance(path, str) else path
        return fits and not any(found_in(self.keep, path) for path in paths)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Float8:
        """From the dict of its values.

        Raises:
            PlanError: a key is unknown.
        """
        return cls(**known_fields(cls, "plan: float8", values))

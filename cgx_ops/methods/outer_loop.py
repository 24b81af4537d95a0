"""The outer loop of DiLoCo for any framework: settings, fragments, and their schedule.

Ranks train independently. Every `sync_every` steps they average the change of their parameters,
and an outer optimizer applies it to the outer parameters, which are equal on all ranks (Douillard
et al.: DiLoCo, 2023). With fragments, one part of the model at a time is sent, and applied some
steps later while training continues (Douillard et al.: Streaming DiLoCo, 2025). torch/diloco/ and
jax/_src/diloco/ implement it with the arrays of their frameworks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cgx_ops.errors import InvalidArgument, is_number, require_integer


@dataclass(frozen=True)
class Schedule:
    """Which fragment is sent, and which is applied, after each step; checked on construction.

    Fragments take turns, one every sync_every / fragments steps. Steps count from 1.

    Attributes:
        sync_every: Steps between two synchronizations of a parameter, at least 1.
        fragments: Parts of the model; they must divide sync_every.
        fragment_sync_delay: Steps from sending to applying, less than sync_every / fragments.
        fragment_update_alpha: Weight of the rank's own parameters when the outer parameters are
            applied, from 0 (the outer parameters replace them) to 1.
    """

    sync_every: int
    fragments: int = 1
    fragment_sync_delay: int = 0
    fragment_update_alpha: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("sync_every", 1), ("fragments", 1), ("fragment_sync_delay", 0)):
            object.__setattr__(self, name, require_integer(name, getattr(self, name), least))
        if self.sync_every % self.fragments:
            raise InvalidArgument(
                f"sync_every is {self.sync_every}, fragments {self.fragments}; fragments must "
                "divide it, because one fragment is sent every sync_every / fragments steps"
            )
        if self.fragment_sync_delay >= self.interval:
            raise InvalidArgument(
                f"fragment_sync_delay is {self.fragment_sync_delay}; it must be less than "
                f"sync_every / fragments, {self.interval}, because a fragment is applied before "
                "the next one is sent"
            )
        alpha = self.fragment_update_alpha
        if not is_number(alpha) or not 0 <= alpha <= 1:
            raise InvalidArgument(f"fragment_update_alpha is {alpha!r}; it must be from 0 to 1")
        object.__setattr__(self, "fragment_update_alpha", float(alpha))

    @property
    def interval(self) -> int:
        """Steps between two fragments."""
        return self.sync_every // self.fragments

    def sent_after(self, step: int) -> int | None:
        """Return the fragment that is sent after this step, or None."""
        return self.applied_after(step + self.fragment_sync_delay)

    def applied_after(self, step: int) -> int | None:
        """Return the fragment that is applied after this step, or None."""
        rounds, rest = divmod(step, self.interval)
        return None if rest or not rounds else (rounds - 1) % self.fragments


def strided(names: Sequence[str], fragments: int) -> list[list[int]]:
    """Return the indices of the tensors of each fragment: every fragments-th layer, in order.

    Args:
        names: Dotted names of the tensors. A layer is the name up to its first number
            ("blocks.3.attention.weight": "blocks.3"), or all but the last word without a number.
        fragments: Number of parts, at least 1.

    Raises:
        InvalidArgument: There are fewer layers than fragments.
    """
    layers: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        layers.setdefault(_layer(name), []).append(i)
    if len(layers) < fragments:
        raise InvalidArgument(
            f"fragments is {fragments}, but there are {len(layers)} layers: {', '.join(layers)}; "
            "use fewer fragments"
        )
    found: list[list[int]] = [[] for _ in range(fragments)]
    for place, members in enumerate(layers.values()):
        found[place % fragments] += members
    return found


def _layer(name: str) -> str:
    words = name.split(".")
    numbers = [i for i, word in enumerate(words) if word.isdigit()]
    return ".".join(words[: numbers[0] + 1] if numbers else words[:-1] or words)

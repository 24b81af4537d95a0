"""What an outer loop is in any framework: its settings, which fragment is due when, its layers.

Ranks train by themselves. Every `sync_every` steps they average what their parameters have become
since, and an outer optimizer applies it to the outer parameters, which are equal on all ranks
(Douillard et al.: DiLoCo, 2023). In fragments a part of the model at a time is sent, and applied
some steps after that, while training goes on (Douillard et al.: Streaming DiLoCo, 2025).
torch/diloco/ and jax/_src/diloco/ do it, each in its framework's arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cgx_ops.errors import InvalidArgument, is_number, require_integer


@dataclass(frozen=True)
class Schedule:
    """Which fragment is sent, and which one applied, after which step; checked when it is made.

    Fragments take turns, one every sync_every / fragments steps. Steps count from 1.

    Attributes:
        sync_every: steps from one synchronisation of a parameter to the next, at least 1.
        fragments: parts of the model; they divide sync_every.
        fragment_sync_delay: steps from sending to applying, less than sync_every / fragments.
        fragment_update_alpha: how much of a parameter stays the rank's own when the outer
            parameters are applied, from 0 (nothing: they replace it) to 1.
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
                "divide it: one of them is due every sync_every / fragments steps"
            )
        if self.fragment_sync_delay >= self.interval:
            raise InvalidArgument(
                f"fragment_sync_delay is {self.fragment_sync_delay}; it must be less than "
                f"sync_every / fragments, {self.interval}: a fragment is applied before the next "
                "one is sent"
            )
        alpha = self.fragment_update_alpha
        if not is_number(alpha) or not 0 <= alpha <= 1:
            raise InvalidArgument(f"fragment_update_alpha is {alpha!r}; it must be from 0 to 1")
        object.__setattr__(self, "fragment_update_alpha", float(alpha))

    @property
    def interval(self) -> int:
        """Steps from one fragment to the next."""
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
        names: of the tensors, dotted. A layer is what agrees up to the first number in it
            ("blocks.3.attention.weight": "blocks.3"), or all but the last word where there is none.
        fragments: how many parts, at least 1.

    Raises:
        InvalidArgument: there are fewer layers than fragments.
    """
    layers: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        layers.setdefault(_layer(name), []).append(i)
    if len(layers) < fragments:
        raise InvalidArgument(
            f"fragments is {fragments}, but there are {len(layers)} layers: {', '.join(layers)}; "
            "ask for fewer fragments"
        )
    found: list[list[int]] = [[] for _ in range(fragments)]
    for place, members in enumerate(layers.values()):
        found[place % fragments] += members
    return found


def _layer(name: str) -> str:
    words = name.split(".")
    numbers = [i for i, word in enumerate(words) if word.isdigit()]
    return ".".join(words[: numbers[0] + 1] if numbers else words[:-1] or words)

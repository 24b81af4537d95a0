"""Settings that all ranks must share: compared by a digest, reported by field."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

from cgx_ops.errors import MismatchError

_LONGEST = 2000  # characters of a value in an error

Gather = Callable[[bytes], Sequence[bytes]]
"""An allgather of bytes, of any length on each rank."""


def require_same(
    caller: str,
    fields: Mapping[str, object],
    gather: Gather,
    remedy: str,
    *,
    error: Callable[[str], Exception] = MismatchError,
    members: Sequence[str] | None = None,
) -> None:
    """Require that all ranks have the same fields. Collective; raises on every rank or on none.

    Args:
        caller: opens the error's text, such as "DiLoCo".
        fields: this rank's settings by name, compared as texts, in the order of the first rank.
        gather: exchanges bytes among the ranks; called once, and again to report a difference.
        remedy: closes the error's text.
        error: makes the exception from its text.
        members: what the error calls each rank; "rank 0", "rank 1", ... by default.

    Raises:
        MismatchError: or what `error` makes. It names the first field that differs and its value on
            the first rank and on the first rank that differs.
    """
    mine = json.dumps({name: str(value) for name, value in fields.items()}).encode()
    digests = gather(hashlib.sha256(mine).digest())
    if all(digest == digests[0] for digest in digests):
        return
    first, *others = (json.loads(text) for text in gather(mine))
    members = members or [f"rank {rank}" for rank in range(len(digests))]
    for member, other in zip(members[1:], others, strict=True):
        for name in first | other:
            ours, theirs = first.get(name, "nothing"), other.get(name, "nothing")
            if ours != theirs:
                raise error(
                    f"{caller}: {members[0]} has {name} {_cut(ours)}, {member} has {_cut(theirs)}. "
                    f"{remedy}"
                )


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."

"""Compare settings that must be equal on all ranks: by a digest, and by field on a mismatch."""

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
    """Raise an error on all ranks unless all ranks have the same fields. All ranks must call it.

    Args:
        caller: Start of the error text, such as "DiLoCo".
        fields: This rank's settings by name. They are compared as texts, in the first rank's order.
        gather: Exchanges bytes among the ranks. It is called once, and once more on a mismatch.
        remedy: End of the error text.
        error: Creates the exception from its text.
        members: Names of the ranks in the error. None: "rank 0", "rank 1", ...

    Raises:
        MismatchError: Or the exception of `error`. The message has the first field that differs,
            and its value on the first rank and on the first rank that differs.
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

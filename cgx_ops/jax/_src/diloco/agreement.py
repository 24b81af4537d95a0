"""Whether the processes of an outer loop (_diloco.py) agree, before anything is sent.

Other settings would have them wait for messages that nobody sends, and another outer optimizer or
other anchors would part them without a word.
"""

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from cgx_ops._core import launchers
from cgx_ops.errors import MismatchError
from cgx_ops.jax._src.runtime import compat

_LONGEST = 2000  # characters of a setting that are told

# How often each name has been asked about, which tells keys of JAX's store apart.
_asked: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def agree(
    mesh: jax.sharding.Mesh, name: str, settings: Mapping[str, Any], contents: Mapping[str, Any]
) -> None:
    """Require that all processes of a mesh have the same settings and the same contents.

    Collective among them, if there are several.

    Args:
        mesh: whose processes they are.
        name: of the outer loop.
        settings: by name; told as texts.
        contents: by name: bytes, or trees of arrays, of which those count that are whole on every
            device; told as hashes.

    Raises:
        jax.errors.JaxRuntimeError: another process does not do this in time.
        MismatchError: in all of them; it names the first difference, and what two processes have.
    """
    processes = sorted({device.process_index for device in mesh.devices.flat})
    if len(processes) == 1:
        return
    mine = {key: str(value)[:_LONGEST] for key, value in settings.items()}
    mine |= {key: f"sha256 {_digest(value)}" for key, value in contents.items()}
    place = f"cgx_ops.jax.diloco/{name}/{','.join(map(str, processes))}"
    key, told = f"{place}/{next(_asked[place])}", json.dumps(mine).encode()
    try:
        blobs = compat.gather_from_processes(key, told, launchers.timeout(), processes)
    except jax.errors.JaxRuntimeError as error:
        raise jax.errors.JaxRuntimeError(
            f"diloco {name!r}: not all of the processes {processes} have come to compare anchors, "
            "at the first outer() or in skip(). Where one goes on without the others, start all "
            f"processes anew, from the last checkpoint: {error}"
        ) from error
    first, *others = map(json.loads, blobs)
    for process, other in zip(processes[1:], others, strict=True):
        for key, value in first.items():
            if other[key] != value:
                raise MismatchError(
                    f"diloco {name!r}: processes disagree on {key}: process {processes[0]} has "
                    f"{value}, process {process} has {other[key]}. Give all processes the same "
                    "settings, the same weights and one checkpoint"
                )


def _digest(content: Any) -> str:
    digest = hashlib.sha256()
    if isinstance(content, bytes):
        digest.update(content)
        return digest.hexdigest()
    for path, leaf in jax.tree_util.tree_leaves_with_path(content):
        digest.update(f"{jax.tree_util.keystr(path)} {np.shape(leaf)}".encode())
        if not isinstance(leaf, jax.Array):
            digest.update(np.asarray(leaf).tobytes())
        elif leaf.is_fully_replicated:
            digest.update(np.asarray(leaf.addressable_data(0)).tobytes())
    return digest.hexdigest()

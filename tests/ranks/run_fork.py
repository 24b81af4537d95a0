"""Check that forked children may exit, compute or call a communicator without harming it."""

import os
import traceback
from collections.abc import Callable

import numpy as np

import cgx_ops
from cgx_ops import Closed

world = cgx_ops.init()
x = np.ones(100_000, np.float32)
world.allreduce(x)
# In flight while children are forked: the other ranks start it later.
started = world.allreduce_async(x, name="across") if world.rank == 0 else None
encoded = cgx_ops.quantize(x, bits=4, seed=1)


def leave() -> None:
    raise SystemExit(7)  # runs atexit handlers, as a data loader's worker may


def compute() -> None:
    """Use the codec, which works in a child because it has no state."""
    assert cgx_ops.quantize(x, bits=4, seed=1) == encoded
    assert (cgx_ops.dequantize(encoded, x.size, bits=4) == 1).all()
    os._exit(7)


def wait() -> None:
    """Wait for the parent's collective, which the child cannot advance."""
    if started:
        assert started.done()
        started.wait()
    else:
        os._exit(7)


def refused(call: Callable[[], object]) -> Callable[[], None]:
    def tell() -> None:
        try:
            call()
        except Closed:
            os._exit(7)

    return tell


children = []
for in_child in (
    leave,
    compute,
    refused(lambda: world.allreduce(x)),
    refused(lambda: cgx_ops.Communicator.local(2)),
    refused(cgx_ops.stats),
    refused(wait),
):
    child = os.fork()
    if child == 0:
        try:
            in_child()
        except Exception:
            traceback.print_exc()
        os._exit(1)
    children.append(child)
for _ in range(20):
    world.allreduce(x)
statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert statuses == [7] * len(children), statuses
started = started or world.allreduce_async(x, name="across")
assert (started.wait() == world.size).all()
assert (world.allreduce(x) == world.size).all()
print("undisturbed")

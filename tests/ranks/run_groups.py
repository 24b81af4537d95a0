"""Create communicators by color and from lists of ranks, in different orders; close them."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

import cgx_ops
from cgx_ops import Communicator

world = cgx_ops.init()
rank, size = world.rank, world.size


def total(comm: Communicator) -> float:
    return float(comm.allreduce(np.full(20_000, rank, np.float32))[-1])


half = world.split(rank % 2, key=-rank, name="half")
assert half is not None and half.size == size // 2
assert half.rank == (size - 1 - rank) // 2, "ordered by key"
assert total(half) == sum(r for r in range(size) if r % 2 == rank % 2)

assert (world.split(None if rank == 0 else 1, name="without 0") is None) == (rank == 0)

# Overlapping groups, each created by its members only.
pairs = {f"pair {r}": [r, r + 1] for r in range(size - 1)}
mine = [name for name, ranks in pairs.items() if rank in ranks]
comms = {name: world.group(pairs[name], name=name) for name in mine}
for name in reversed(mine):
    assert total(comms[name]) == sum(pairs[name])
assert comms[mine[0]].id == Communicator.find(mine[0]).id

nested = half.split(0, name="nested")
assert nested is not None and total(nested) == total(half)
for comm in (nested, half, *comms.values()):
    comm.close()
# A name can be reused after its communicator is closed.
again = world.split(0, name="half")
assert again is not None and total(again) == sum(range(size))
# Threads create groups of the same ranks at the same time.
for repeat in range(10):
    names = [f"side by side {repeat} {i}" for i in range(3)]
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(lambda name: world.group(list(range(size)), name=name), names))
    for comm in made:
        assert total(comm) == sum(range(size))
        comm.close()
try:
    world.group(list(range(size)), name="x" * 10_000)
except ValueError as error:
    assert "bytes" in str(error)
else:
    raise AssertionError("a long name was accepted")
try:
    world.group([rank, rank], name="twice")
except ValueError as error:
    assert "twice" in str(error)
else:
    raise AssertionError("a rank listed twice was accepted")
print("groups are right", world.transport)

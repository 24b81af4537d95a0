"""Check the statistics of the world and of a group: they are the same on both ranks."""

import numpy as np

import cgx_ops
from cgx_ops import Config

world = cgx_ops.init()
pair = world.split(0, name="pair")
assert pair is not None
values = np.ones(51_200, np.float32)
config = Config(bits=4, bucket_size=512, algorithm="sra")
for _ in range(3):
    world.allreduce(values, config=config)
pair.allreduce(values, config=config)

everything = cgx_ops.stats()
assert list(everything) == ["world", "pair"], everything
assert everything["world"].collectives == 3
assert everything["pair"].collectives == 1
for stats, calls in ((everything["world"], 3), (everything["pair"], 1)):
    assert (stats.rank, stats.size, stats.transport) == (world.rank, 2, world.transport)
    assert stats.bytes_in == stats.bytes_plain == calls * values.nbytes
    assert 0 < stats.compute_seconds < stats.agree_seconds + stats.move_seconds
# 100 buckets of 264 bytes and a header; the world also carried the messages that set up the pair.
assert everything["pair"].bytes_sent == 100 * 264 + 208
assert everything["world"].bytes_sent > 3 * everything["pair"].bytes_sent
print(everything["world"])

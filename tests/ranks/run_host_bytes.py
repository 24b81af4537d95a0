"""Count the bytes that this rank receives over TCP in reduce_scatter and all_gather.

Ranks of one host share memory, so these bytes come from other hosts. Prints one JSON object:

    transport           the communicator's transport
    block               the size of an encoded block, in bytes
    received            bytes by verb and algorithm
"""

import itertools
import json
import os
import socket
import struct

import numpy as np

import cgx_ops
from cgx_ops import Config
from cgx_ops._core.codec import encoded_bytes
from cgx_ops.config import Algorithm

NUMEL = 2**18
BYTES_RECEIVED = 128  # offset in Linux's tcp_info
ALGORITHMS: tuple[Algorithm, ...] = ("hierarchical", "sra")


def bytes_received() -> int:
    """Return the bytes that this process has received over its open TCP connections."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptor = os.dup(int(name))
        except OSError:  # that of the listing
            continue
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:  # not a socket
            os.close(descriptor)
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, BYTES_RECEIVED)[0]
    return total


def main() -> None:
    world = cgx_ops.init()

    def wait_for_all() -> None:
        world.allreduce(np.zeros(1, np.float32), config=Config(bits=32))

    received = {}
    for verb, algorithm in itertools.product(("reduce_scatter", "all_gather"), ALGORITHMS):
        config = Config(4, rounding="nearest", algorithm=algorithm)
        x = np.ones(NUMEL * (world.size if verb == "reduce_scatter" else 1), np.float32)
        wait_for_all()
        before = bytes_received()
        wait_for_all()
        getattr(world, verb)(x, config=config)
        received[f"{verb} {algorithm}"] = bytes_received() - before
    wait_for_all()  # the connections of a rank that ends are closed, and not counted
    block = encoded_bytes(NUMEL, Config(4))
    print(json.dumps({"transport": world.transport, "block": block, "received": received}))


main()

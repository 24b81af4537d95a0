"""Run collectives on several hosts. Each rank prints one JSON object.

        transport   the communicator's transport
        host        this rank's host index, and the number of hosts
    results     digests of cases of collective_cases.HIERARCHICAL
        residuals   digests of a result and of this rank's residual

Arguments: the algorithm that `auto` selects for a large message; "all" cases, or a "sample".
"""

import json
import sys
from ctypes import byref, c_void_p
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from support import collective_cases

import cgx_ops
from cgx_ops import Communicator, Config, MismatchError
from cgx_ops._core import library, structs, tables
from cgx_ops._core.call import Call

HEADER = 208  # docs/reference/control_messages.md


def check_plan(comm: Communicator, picked: str) -> None:
    """Check that cgx_plan returns the number of bytes that a call sends, and the algorithm."""
    exact = Config(bits=32)
    for config, dtype in (
        (Config(), "float32"),
        (Config(intra_bits=8, gather_bits=8), "float32"),
        (exact, "float32"),
        (exact, "float16"),
    ):
        x = np.ones(100_003, dtype)
        before = comm.stats().bytes_sent
        comm.allreduce(x, config=config)
        call = Call("allreduce", "sum", config, "", None, 0, None).collective(
            comm.id, tables.DTYPES[dtype], x.ctypes.data, x.ctypes.data, x.size
        )
        plan = structs.Plan()
        library.call("cgx_plan", byref(call), byref(plan))
        assert plan.algorithm == tables.ALGORITHMS[picked], plan.algorithm
        sent = comm.stats().bytes_sent - before - HEADER * (comm.size - 1)
        assert sent == plan.payload_bytes, (config, sent, plan.payload_bytes)


def check_disagreement(comm: Communicator) -> None:
    """Check that ranks with different intra_bits get the same error and can continue."""
    x = np.ones(100_003, np.float32)
    try:
        comm.allreduce(x, config=Config(intra_bits=8 if comm.rank else None))
    except MismatchError as error:
        assert "intra_bits None against 8" in str(error), error
    else:
        raise AssertionError("no error for different intra_bits")
    assert (comm.allreduce(x, config=Config(bits=32)) == comm.size).all()


def residuals(comm: Communicator, op: str, intra_bits: int) -> list[str]:
    """Return digests of an average of 5,000 values and of this rank's residual."""
    x = np.random.default_rng(comm.rank).standard_normal(5000).astype(np.float32)
    result = np.empty_like(x)
    lost = np.random.default_rng(100 + comm.rank).standard_normal(5000).astype(np.float32) / 8
    config = Config(
        algorithm="hierarchical", rounding="nearest", gather_bits=8, intra_bits=intra_bits
    )
    call = Call("allreduce", op, config, "", None, 0, None).collective(  # pyright: ignore[reportArgumentType]
        comm.id, tables.DTYPES["float32"], x.ctypes.data, result.ctypes.data, x.size
    )
    call.residuals = (c_void_p * 1)(lost.ctypes.data)
    library.call("cgx_run", byref(call))
    return [collective_cases.digest(result), collective_cases.digest(lost)]


def main() -> None:
    world = cgx_ops.init()
    cases = collective_cases.HIERARCHICAL[sys.argv[2]]
    print(
        json.dumps(
            {
                "transport": world.transport,
                "host": [world.host, world.hosts],
                "results": [collective_cases.run(case, world) for case in cases],
                "residuals": [
                    residuals(world, op, bits) for op in ("sum", "avg") for bits in (4, 32)
                ],
            }
        )
    )
    check_plan(world, sys.argv[1])
    check_disagreement(world)


main()

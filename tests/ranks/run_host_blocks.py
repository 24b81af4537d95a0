"""Run collectives of blocks on several hosts. Each rank prints one JSON object.

    transport           the communicator's transport
    results             digests of cases of host_block_cases.CASES
    all_to_all          the same for all_to_all
    tcp, tcp all_to_all the same for the sample, and for all_to_all, over TCP

Argument: "all" cases, or a "sample".
"""

import json
import sys
from ctypes import byref
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from mpi4py import MPI
from support import collective_cases, host_block_cases

import cgx_ops
from cgx_ops import Communicator, Config, MismatchError
from cgx_ops._core import library, structs, tables
from cgx_ops._core.call import Call
from cgx_ops.config import Algorithm

HEADER = 208  # docs/reference/control_messages.md


def check_plans(comm: Communicator) -> None:
    """Check that cgx_plan returns the algorithm, and the number of bytes that a call sends."""
    for verb, config, dtype in (
        ("reduce_scatter", Config(), "float32"),
        ("reduce_scatter", Config(intra_bits=8), "float32"),
        ("reduce_scatter", Config(algorithm="ring"), "float32"),
        ("reduce_scatter", Config(bits=32), "float16"),
        ("all_gather", Config(), "float32"),
        ("all_gather", Config(gather_bits=8), "float32"),
        ("all_gather", Config(bits=32, algorithm="hierarchical"), "float16"),
        ("all_gather", Config(algorithm="one_shot"), "float32"),
    ):
        block = 100_003
        x = np.ones(block * (comm.size if verb == "reduce_scatter" else 1), dtype)
        y = np.empty(block * (1 if verb == "reduce_scatter" else comm.size), dtype)
        before = comm.stats().bytes_sent
        getattr(comm, verb)(x, config=config)
        call = Call(verb, "sum", config, "", None, 0, None).collective(
            comm.id, tables.DTYPES[dtype], x.ctypes.data, y.ctypes.data, block
        )
        plan = structs.Plan()
        library.call("cgx_plan", byref(call), byref(plan))
        direct = config.algorithm in ("ring", "one_shot") or not 1 < comm.hosts < comm.size
        picked = "sra" if direct else "hierarchical"
        assert plan.algorithm == tables.ALGORITHMS[picked], (config, plan.algorithm)
        sent = comm.stats().bytes_sent - before - HEADER * (comm.size - 1)
        assert sent == plan.payload_bytes, (verb, config, sent, plan.payload_bytes)


def check_disagreement(comm: Communicator) -> None:
    """Check that ranks with different configs get the same error and can continue."""
    if comm.size == 1:
        return
    x = np.ones(100_000 * comm.size, np.float32)
    odd = comm.rank == comm.size - 1
    cases = [(Config(intra_bits=8 if odd else None), "intra_bits None against 8")]
    if comm.hosts < comm.size and comm.hosts > 1:
        algorithm: Algorithm = "sra" if odd else "hierarchical"
        cases.append((Config(algorithm=algorithm), "algorithm hierarchical against sra"))
    for config, text in cases:
        try:
            comm.reduce_scatter(x, config=config)
        except MismatchError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"no error: {text}")
    assert (comm.reduce_scatter(x, config=Config(bits=32)) == comm.size).all()


def results(comm: Communicator, cases: list[Any]) -> list[str]:
    return [collective_cases.run(case, comm) for case in cases]


def main() -> None:
    world = cgx_ops.init()
    tcp = Communicator.create(
        world.rank, world.size, MPI.COMM_WORLD.allgather, "over tcp", transport="TCP"
    )
    found = {
        "transport": world.transport,
        "results": results(world, host_block_cases.CASES[sys.argv[1]]),
        "all_to_all": results(world, host_block_cases.CASES["all_to_all"]),
        "tcp": results(tcp, host_block_cases.CASES["sample"]),
        "tcp all_to_all": results(tcp, host_block_cases.CASES["all_to_all"]),
    }
    check_plans(world)
    check_disagreement(world)
    print(json.dumps(found))


main()

"""Print what cgx_plan returns for allreduces: the selected algorithm, and the bytes per rank.

Arguments: JSON lists of algorithm, values, bits. Prints a JSON list of pairs.
"""

import json
import sys
from ctypes import byref

import numpy as np

import cgx_ops
from cgx_ops import Communicator, Config
from cgx_ops._core import library, structs, tables
from cgx_ops._core.call import Call


def plan(comm: Communicator, algorithm: str, values: int, bits: int) -> structs.Plan:
    """Return the plan of an allreduce of fp32 values."""
    config = Config(bits=bits, algorithm=algorithm)  # pyright: ignore[reportArgumentType]
    some = np.empty(1).ctypes.data
    call = Call("allreduce", "sum", config, "", None, 0, None)
    native = call.collective(comm.id, tables.DTYPES["float32"], some, some, values)
    planned = structs.Plan()
    library.call("cgx_plan", byref(native), byref(planned))
    return planned


def algorithm_of(planned: structs.Plan) -> str:
    """Return the name of a plan's algorithm."""
    return next(name for name, number in tables.ALGORITHMS.items() if number == planned.algorithm)


if __name__ == "__main__":
    world = cgx_ops.init()
    plans = [plan(world, *json.loads(case)) for case in sys.argv[1:]]
    print(json.dumps([(algorithm_of(planned), planned.payload_bytes) for planned in plans]))

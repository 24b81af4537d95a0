"""Write each rank's final state after error feedback with `hierarchical`, or with a torch carrier.

    mpirun -np 4 python run_conservation.py <folder> <binding> <algorithm>

Each rank writes <folder>/<rank>.npz: the result of conservation.run() for each row of FED_BACK.
"""

import sys
from pathlib import Path

import numpy as np
from support import conservation

import cgx_ops
from cgx_ops import Config


def main(folder: str, binding: str, algorithm: str) -> None:
    if binding == "jax":
        import jax

        jax.config.update("jax_platforms", "cpu")
    comm = cgx_ops.init()
    if binding == "torch c10d":
        import torch.distributed as dist

        # Imports cgx_ops.torch, which passes torch the ranks.
        from support import torch_cases  # noqa: F401

        dist.init_process_group("gloo")
    found = {}
    for row, knobs in enumerate(conservation.FED_BACK):
        if not conservation.served(binding, knobs):
            continue
        config = Config(**{**knobs, "algorithm": algorithm})  # pyright: ignore[reportArgumentType]
        op = "avg" if row % 2 else "sum"
        reduce = conservation.BINDINGS[binding](comm, op, config)
        found[str(row)] = conservation.run(comm, op, config, reduce)
    np.savez(Path(folder, str(comm.rank)), **found)


main(*sys.argv[1:])

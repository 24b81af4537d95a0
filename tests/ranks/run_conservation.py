"""Error feedback by `hierarchical`, or by a carrier of torch: writes what each rank was left with.

    mpirun -np 4 python run_conservation.py <folder> <binding> <algorithm>

Each rank writes <folder>/<rank>.npz: by row of conservation.FED_BACK what conservation.run() gives.
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
        from support import torch_cases  # noqa: F401  cgx_ops.torch, which tells torch the ranks

        dist.init_process_group("gloo")
    found = {}
    for row, knobs in enumerate(conservation.FED_BACK):
        if not conservation.served(binding, algorithm, knobs):
            continue
        config = Config(**{**knobs, "algorithm": algorithm})  # pyright: ignore[reportArgumentType]
        op = "avg" if row % 2 else "sum"
        reduce = conservation.BINDINGS[binding](comm, op, config)
        found[str(row)] = conservation.run(comm, op, config, reduce)
    np.savez(Path(folder, str(comm.rank)), **found)


main(*sys.argv[1:])

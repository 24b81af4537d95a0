"""The loads: operations that a rank repeats. Each returns a step, a function of the call's index.

A step returns a value that is the same in every call, so that a wrong one is detected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from support.collective_cases import Case, config_of, converges, digest, of_compressors, result_of

from cgx_ops import Communicator, Config

Step = Callable[[int], Any]
WINDOWS, BATCHES = 20, 10  # number of measurements of a run, and of timings in each window

_CONFIG = Config(bits=4, rounding="nearest")


@dataclass(frozen=True)
class Load:
    """A row of the table.

    Attributes:
        make: returns the step for a communicator's rank.
        counts: steps at scale 1, by transport; "": of other transports, 0: none.
    """

    make: Callable[[Communicator], Step]
    counts: dict[str, int]


def _allreduce(numel: int) -> Callable[[Communicator], Step]:
    def make(comm: Communicator) -> Step:
        x = np.linspace(comm.rank, 1, numel, dtype=np.float32)
        out = np.empty_like(x)
        return lambda _: comm.allreduce(x, "sum", _CONFIG, out=out)[0]

    return make


def _compressors(comm: Communicator) -> Step:
    """Call every compressor in turn, with residuals if feedback converges.

    Residuals are reset after every fourth call, so that each of the four repeats its result.
    """
    cases = [Case(2000, bucket_size=100, **row) for row in of_compressors()]
    configs, found = list(map(config_of, cases)), {}
    x = np.linspace(-comm.rank, 1, 2000, dtype=np.float32)
    lost = [np.zeros_like(x) if converges(case) else None for case in cases]

    def step(number: int) -> bool:
        again, turn = divmod(number, len(cases))
        residual = lost[turn]
        if residual is not None and again % 4 == 0:
            residual[:] = 0
        result = comm.allreduce(x, "avg", configs[turn], seed=7, residual=residual)
        got = digest(result_of(result, residual))
        return found.setdefault((turn, again % 4), got) == got

    return step


def _new_names(comm: Communicator) -> Step:
    x = np.ones(100, np.float32)
    return lambda number: comm.allreduce(x, "sum", _CONFIG, name=f"call {number}")[0]


def _started(comm: Communicator) -> Step:
    """Keep eight calls in flight, and drop the result of every eighth one."""
    xs = [np.full(5000, comm.rank + 1, np.float32) for _ in range(8)]

    def step(number: int) -> Any:
        requests = [comm.allreduce_async(x, "sum", _CONFIG) for x in xs]
        if number % 8 == 0:
            requests.pop()
        return sum(request.wait()[0] for request in requests[:7])

    return step


def _groups(comm: Communicator) -> Step:
    x = np.ones(100, np.float32)

    def step(number: int) -> Any:
        with comm.group(range(comm.size), name=f"group {number}") as group:
            return group.allreduce(x, "sum", _CONFIG)[0]

    return step


def _aborted(comm: Communicator) -> Step:
    """Abort each group with a call in flight; results of the call before it reach all ranks."""
    x = np.ones(50_000, np.float32)

    def step(_: int) -> Any:
        group = comm.group(range(comm.size), name="aborted")
        result = group.allreduce(x, "sum", _CONFIG)[0]
        if comm.rank > 0:
            group.allreduce_async(x, "sum", _CONFIG)
        group.abort("soak")
        return result

    return step


def _compiled(comm: Communicator) -> Step:
    import torch

    import cgx_ops.torch  # noqa: F401

    operators: Any = torch.ops.cgx
    name = comm.name

    @torch.compile
    def function(x: torch.Tensor) -> torch.Tensor:
        y = operators.quantized_allreduce(x * 2, group_name=name, rounding="nearest")
        return y + 1

    x = torch.full((2000,), float(comm.rank))
    return lambda _: function(x)[0].item()


def _jitted(comm: Communicator) -> Step:
    import jax

    from cgx_ops.jax import allreduce_q

    function = jax.jit(lambda x: allreduce_q(x * 2, comm) + 1)
    x = jax.numpy.full((2000,), float(comm.rank))
    return lambda _: float(function(x)[0])


# With threads, torch and JAX would share one interpreter's state among ranks, so their loops run in
# processes. MPI supports 65,530 communicators: more groups show that ours do not use any.
LOADS: dict[str, Load] = {
    "small": Load(_allreduce(100), {"": 1_000_000}),
    "large": Load(_allreduce(1 << 18), {"": 10_000}),
    "compressors": Load(_compressors, {"": 100_000}),
    "in flight": Load(_started, {"": 50_000}),
    "new names": Load(_new_names, {"": 200_000}),
    "groups": Load(_groups, {"": 10_000, "mpi": 70_000}),
    "aborted": Load(_aborted, {"": 10_000}),
    "torch.compile": Load(_compiled, {"": 0, "shm": 20_000, "mpi": 20_000}),
    "jit": Load(_jitted, {"": 0, "shm": 20_000, "mpi": 20_000}),
}


def count(load: str, transport: str) -> int:
    """Return the steps of a load over a transport at scale 1."""
    counts = LOADS[load].counts
    return counts.get(transport, counts[""])

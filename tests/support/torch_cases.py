"""Helpers of the torch tests: inputs, bit comparisons, and the seeds of the operators."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import reference
import torch
import torch._functorch.config
import torch._inductor.config

import cgx_ops.torch  # noqa: F401  registers torch.ops.cgx
from cgx_ops import Config

allreduce: Any = torch.ops.cgx.quantized_allreduce
allreduce_: Any = torch.ops.cgx.quantized_allreduce_
coalesced: Any = torch.ops.cgx.quantized_allreduce_coalesced
feedback: Any = torch.ops.cgx.quantized_allreduce_with_feedback
feedback_list: Any = torch.ops.cgx.quantized_allreduce_coalesced_with_feedback


SRA = str(Config(algorithm="sra"))
FIELDS = tuple(Config().fields)


def keywords(**given: Any) -> dict[str, Any]:
    """Return keywords of an operator: fields of Config become its `config`, unchecked."""
    fields = {name: given.pop(name) for name in FIELDS if name in given}
    return {"config": " ".join(f"{name}={value!r}" for name, value in fields.items()), **given}


def packed(config: Config, op: str = "sum", depth: int = 0, name: str = "") -> str:
    """Return the packed argument of the low-level operators."""
    return f"op={op} depth={depth} {config} name={name}"


# For rank programs, which import this file too and share two cores.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}

_MASK = 2**64 - 1
_BIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def values(
    rank: int, numel: int, dtype: torch.dtype = torch.float32, call: int = 0
) -> torch.Tensor:
    """Return the input of rank `rank`: different on each rank, computable on all."""
    noise = np.random.default_rng([rank, numel, call]).standard_normal(numel)
    return torch.from_numpy(noise.astype(np.float32)).to(dtype)


def to_numpy(x: torch.Tensor) -> npt.NDArray[Any]:
    """Return the elements as a one-dimensional array, also for bfloat16."""
    x = x.detach().contiguous().flatten()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def from_numpy(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor that shares an array's memory, also for bfloat16."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal in dtype, shape and every bit."""
    bits = _BIT_DTYPES[a.element_size()]
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.detach().contiguous().view(bits), b.detach().contiguous().view(bits))
    )


def expected(
    inputs: Sequence[torch.Tensor],
    bits: int = 4,
    bucket_size: int = 512,
    algorithm: reference.AnyAlgorithm = "sra",
    **options: Any,
) -> torch.Tensor:
    """Return the oracle's result for the ranks' inputs, with their shape and dtype."""
    arrays = [to_numpy(x) for x in inputs]
    segment = reference.Segment(0, len(arrays[0]), bits, bucket_size)
    result = reference.allreduce(arrays, [segment], algorithm=algorithm, **options)
    if result.dtype == ml_dtypes.bfloat16:
        flat = torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
    else:
        flat = torch.from_numpy(result)
    return flat.reshape(inputs[0].shape)


def drawn_seeds(manual_seed: int, count: int = 1) -> list[int]:
    """Return the seeds of the first stochastic calls after torch.manual_seed(manual_seed)."""
    state = torch.get_rng_state()
    torch.manual_seed(manual_seed)
    seeds = [torch.ops.cgx.draw_seed(torch.empty(0)).item() for _ in range(count)]
    torch.set_rng_state(state)
    return seeds


def gradient_seed(seed: int, depth: int = 1) -> int:
    """Return the seed of the depth-th derivative of a call: SplitMix64 of both."""
    z = (seed + depth * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return z - 2**64 if z >> 63 else z


def named_seed(seed: int, name: str) -> int:
    """Return the initial seed of a group with this name: FNV-1a of the name added."""
    fnv = 0xCBF29CE484222325
    for byte in name.encode():
        fnv = (fnv ^ byte) * 0x100000001B3 & _MASK
    return (seed + fnv) & _MASK


def forget_compiled_graphs() -> None:
    """Make torch compile every graph again with the code under test; machine code may be reused."""
    torch._inductor.config.fx_graph_cache = False
    torch._inductor.config.fx_graph_remote_cache = False
    torch._functorch.config.enable_autograd_cache = False

"""Calls that torch.ops.cgx must reject: a thunk, the exception, and a pattern of its text."""

from collections.abc import Callable
from typing import Any

import torch

from cgx_ops import Config
from support import torch_cases as tc

X = torch.ones(40)


def _start_without_seed() -> None:
    torch.ops.cgx.quantized_all_reduce_start(X, None, tc.packed(Config()), "")


def _start(call: str) -> Callable[[], Any]:
    return lambda: torch.ops.cgx.quantized_all_reduce_start(X, None, call, "")


# Each raises before anything is sent, so ranks need not agree on the call.
BAD_CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "int64": (lambda: tc.allreduce(X.long()), TypeError, r"Long.*x\.float\(\)"),
    "bool": (lambda: tc.allreduce(X.bool()), TypeError, "Bool.*float32, float16 and bfloat16"),
    "float64": (lambda: tc.allreduce(X.double()), TypeError, r"Double.*x\.float\(\)"),
    "complex": (
        lambda: tc.allreduce(X.to(torch.complex64)),
        TypeError,
        r"ComplexFloat.*view_as_real",
    ),
    "sparse": (lambda: tc.allreduce(X.to_sparse()), TypeError, r"Sparse.*to_dense\(\)"),
    "not a tensor": (
        lambda: tc.allreduce([1.0]),
        RuntimeError,
        "Expected a value of type 'Tensor'",
    ),
    "bits 0": (lambda: tc.allreduce(X, 0), ValueError, "bits is 0; it must be .* 1 to 8, or 32"),
    "bits 9": (lambda: tc.allreduce(X, 9), ValueError, "bits is 9; it must be .* 1 to 8, or 32"),
    "bits 4.5": (lambda: tc.allreduce(X, 4.5), RuntimeError, "bits"),
    "bits 2**40": (lambda: tc.allreduce(X, 2**40), ValueError, "bits is 1099511627776"),
    "gather_bits": (
        lambda: tc.allreduce(X, config="gather_bits=16"),
        ValueError,
        "gather_bits is 16",
    ),
    "intra_bits": (lambda: tc.allreduce(X, config="intra_bits=9"), ValueError, "intra_bits is 9"),
    "bucket_size 0": (lambda: tc.allreduce(X, 4, 0), ValueError, "bucket_size is 0.*at least 1"),
    "bucket_size -1": (lambda: tc.allreduce(X, 4, -1), ValueError, "bucket_size is -1"),
    "minimal_size": (
        lambda: tc.allreduce(X, config="minimal_size=-1"),
        ValueError,
        "minimal_size is -1",
    ),
    "op": (lambda: tc.allreduce(X, op="mean"), ValueError, "op 'mean'.*'sum', 'avg'"),
    "op at 4 bits": (
        lambda: tc.allreduce(X, op="max"),
        ValueError,
        "'max' of compressed values.*bits=32",
    ),
    "rounding": (
        lambda: tc.allreduce(X, rounding="up"),
        ValueError,
        "'up'.*'nearest', 'stochastic'",
    ),
    "a word with a knob": (
        lambda: tc.allreduce(X, rounding="nearest' bits=8 name='"),
        ValueError,
        "rounding is .* one word: see cgx_ops.Config",
    ),
    "a field that is none": (
        lambda: tc.allreduce(X, config="seed=1"),
        ValueError,
        "a config has no field 'seed'; the fields are bits",
    ),
    "a keyword that does not fit": (
        lambda: tc.allreduce(X, 2, config="compressor='topk'"),
        ValueError,
        "bits is 2; compressor='topk' has a fixed width",
    ),
    "algorithm": (
        lambda: tc.allreduce(X, config="algorithm='tree'"),
        ValueError,
        "'tree'.*'auto'.*'ring'",
    ),
    "group": (lambda: tc.allreduce(X, group_name="no"), ValueError, "'no'.*existing: .*'world'"),
    "group of c10d": (
        lambda: tc.allreduce(X, group_name="no", carrier="c10d"),
        ValueError,
        r"carrier='c10d': .*no process group named 'no': call init_process_group\(\) first",
    ),
    "gradient of max": (
        lambda: tc.allreduce(X.clone().requires_grad_(), 32, op="max"),
        NotImplementedError,
        r"'max' has no gradient.*detach\(\)",
    ),
    "forward mode": (
        lambda: torch.func.jvp(lambda x: tc.allreduce(x, 32), (X,), (X,)),
        NotImplementedError,
        "forward-mode",
    ),
    "in place, leaf": (
        lambda: tc.allreduce_(X.clone().requires_grad_()),
        ValueError,
        r"leaf that requires grad.*torch\.no_grad\(\)",
    ),
    "in place, overlapping": (
        lambda: tc.allreduce_(torch.ones(1).expand(40)),
        RuntimeError,
        "single memory location",
    ),
    "in place, dtype": (lambda: tc.allreduce_(X.double()), TypeError, "Double"),
    "no packed call": (_start("bits=4"), ValueError, "'bits=4' is not a packed call"),
    "packed without name": (_start("op=sum depth=0 bits=4"), ValueError, "is not a packed call"),
    "packed without depth": (_start("op=sum depth= bits=4 name="), ValueError, "not a packed call"),
    "packed bits": (_start("op=sum depth=0 bits=9 name="), ValueError, "bits is 9"),
    "start without seed": (_start_without_seed, ValueError, "needs a seed.*draw_seed"),
}

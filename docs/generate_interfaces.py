"""Print docs/reference/interfaces.md: arguments and defaults of the APIs, side by side.

python docs/generate_interfaces.py > docs/reference/interfaces.md
"""

import inspect
from collections.abc import Callable
from typing import Any

import cgx_ops
import cgx_ops.jax
import cgx_ops.torch
from cgx_ops import Communicator
from cgx_ops.config import Keywords
from cgx_ops.torch import ddp, diloco, optim

_INTRODUCTION = """\
# The three APIs side by side

Each table shows one collective or method, its arguments and their defaults. `=` marks a required
argument, `-` an argument that the call does not have. [Options](options.md) lists the fields of
`Config`. `python docs/generate_interfaces.py > docs/reference/interfaces.md` writes this page.

The APIs differ in these points:

- **Ranks**: a communicator (numpy), `group` or `process_group` (PyTorch), `axis_name` (JAX).
- **`op`**: JAX has `psum_q` and `pmean_q`, and its `compress_grads` sums, as `jax.grad` does.
- **`key`** is JAX's source of randomness. PyTorch and numpy have seeds and counters instead.
- **`out`**, `segments`, `timeout`, a call's `seed`: numpy only. `psum_scatter_q`: no `residual`.
- **`fuse`** divides a JAX tree into messages, and **`mesh`** is that of `jax.shard_map`.
- **`carrier`** names the framework's own collectives as the transport: "c10d" or "xla".
- **State** is an argument in optax, and an object with a `process_group` in PyTorch.
"""

# A concept, and its calls in numpy, PyTorch and JAX.
_Calls = list[tuple[str, Callable[..., Any] | None, Callable[..., Any] | None, Any]]
_CALLS: _Calls = [
    ("Reduce", cgx_ops.allreduce, cgx_ops.torch.all_reduce, cgx_ops.jax.psum_q),
    (
        "Reduce and scatter",
        Communicator.reduce_scatter,
        cgx_ops.torch.reduce_scatter,
        cgx_ops.jax.psum_scatter_q,
    ),
    ("Gather", Communicator.all_gather, cgx_ops.torch.all_gather, cgx_ops.jax.all_gather_q),
    (
        "Exchange blocks",
        Communicator.all_to_all,
        cgx_ops.torch.all_to_all,
        cgx_ops.jax.all_to_all_q,
    ),
    ("Gradients in backward", None, cgx_ops.torch.compress_grads, cgx_ops.jax.compress_grads),
    (
        "Gradients with error feedback",
        None,
        ddp.QuantizedAllreduceState,
        cgx_ops.jax.average_gradients,
    ),
    ("PowerSGD", None, ddp.PowerSGDState, cgx_ops.jax.power_sgd),
    ("Deep Gradient Compression", None, ddp.DeepGradientState, cgx_ops.jax.deep_gradient),
    ("Compressed AdamW", None, optim.CompressedAdamW, cgx_ops.jax.compressed_adamw),
    ("SigNUM", None, optim.Signum, cgx_ops.jax.signum),
    ("DiLoCo", None, diloco.DiLoCo, cgx_ops.jax.diloco),
]


_KEYWORDS = "`, `".join(Keywords.__annotations__)


def arguments_of(call: Callable[..., Any] | None) -> dict[str, str]:
    """Return the defaults of a call's arguments, as text; "=" for a required one."""
    if call is None:
        return {}
    found = {}
    for name, parameter in inspect.signature(call).parameters.items():
        if name == "self" or name.startswith("_"):
            continue
        if parameter.kind is parameter.VAR_KEYWORD and "Keywords" in str(parameter.annotation):
            found[_KEYWORDS] = "None"
            continue
        if name in Keywords.__annotations__:
            assert parameter.default is None
            found[_KEYWORDS] = "None"
            continue
        default = parameter.default
        if default is parameter.empty:
            found[name] = "="
        else:
            found[name] = "Rules()" if default == cgx_ops.Rules() else repr(default)
    return found


def page() -> str:
    """Return the page."""
    parts = [_INTRODUCTION]
    for concept, *calls in _CALLS:
        present = [call for call in calls if call is not None]
        names = ["-" if call is None else f"`{_name_of(call)}`" for call in calls]
        every = [arguments_of(call) for call in calls]
        rows = [
            "| " + " | ".join([f"`{name}`", *(_cell(own.get(name)) for own in every)]) + " |"
            for name in dict.fromkeys(name for own in every for name in own)
        ]
        assert present
        head = f"| argument | numpy: {names[0]} | PyTorch: {names[1]} | JAX: {names[2]} |"
        parts.append("\n".join([f"## {concept}\n", head, "|---|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def _name_of(call: Callable[..., Any]) -> str:
    return call.__qualname__


def _cell(default: str | None) -> str:
    if default is None:
        return "-"
    return default if default == "=" else f"`{default}`"


if __name__ == "__main__":
    print(page(), end="")

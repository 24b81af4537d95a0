"""Print docs/interfaces.md: the arguments and defaults of the three APIs, side by side.

python docs/generate_interfaces.py > docs/interfaces.md
"""

import inspect
from collections.abc import Callable
from typing import Any

import cgx_ops
import cgx_ops.jax
import cgx_ops.torch
from cgx_ops import Communicator
from cgx_ops.config import Keywords
from cgx_ops.torch import averager, ddp, diloco, fsdp, optim

_INTRODUCTION = """\
# The three APIs side by side

Every public call that sends values, with its arguments and their defaults. `=` without a value is
a required argument, `-` a call that does not have it. [options.md](options.md) has the fields of
`Config`. This page is generated: `python docs/generate_interfaces.py > docs/interfaces.md`.

What differs, and why:

- **Names of the calls** are those of the framework: `psum`, `pmean` and `all_gather` in JAX,
  `all_reduce` in PyTorch, methods of a communicator in numpy.
- **Ranks** are a communicator in numpy, a process group (`group`, `process_group`) in PyTorch and
  mesh axes (`axis_name`) in JAX.
- **`key`** is JAX's source of randomness. PyTorch and numpy have seeds and counters instead.
- **`out`**, `segments` and `timeout` belong to numpy: frameworks own memory and messages.
- **`fuse`** divides a JAX tree into messages. PyTorch's buckets do that for DDP.
- **`mesh`**, `in_specs` and `argnums` are arguments of `jax.shard_map` and `jax.value_and_grad`.
- **`carrier`** names the framework's own collectives as the transport: "c10d" or "xla".
- **State** is an argument of optax transformations and an object of its own in PyTorch, so DDP
  states have `process_group`, `unsupported` and `adaptive`.
- **PowerSGD** has the argument names of torch's PowerSGDState in PyTorch.
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
    ("Gradients in backward", None, cgx_ops.torch.compress_grads, cgx_ops.jax.compress_grads),
    ("Sharded training", None, fsdp.compress, cgx_ops.jax.value_and_grad),
    (
        "Gradients with error feedback",
        None,
        ddp.QuantizedAllreduceState,
        cgx_ops.jax.average_gradients,
    ),
    ("PowerSGD", None, ddp.PowerSGDState, cgx_ops.jax.power_sgd),
    ("Deep Gradient Compression", None, ddp.DeepGradientState, cgx_ops.jax.deep_gradient),
    ("1-bit Adam", None, optim.OneBitAdam, cgx_ops.jax.one_bit_adam),
    ("SigNUM", None, optim.Signum, cgx_ops.jax.signum),
    ("DiLoCo", None, diloco.DiLoCo, cgx_ops.jax.diloco),
    ("Post-local SGD", None, averager.QuantizedModelAverager, None),
    ("Process groups", None, cgx_ops.torch.BackendOptions, None),
    ("Encoding alone", cgx_ops.quantize, None, None),
]


def arguments_of(call: Callable[..., Any] | None) -> dict[str, str]:
    """Return the defaults of a call's arguments, as text; "=" for a required one."""
    if call is None:
        return {}
    found = {}
    for name, parameter in inspect.signature(call).parameters.items():
        if name == "self" or name.startswith("_"):
            continue
        if parameter.kind is parameter.VAR_KEYWORD and "Keywords" in str(parameter.annotation):
            found |= dict.fromkeys(Keywords.__annotations__, "None")
            continue
        default = parameter.default
        if default is parameter.empty:
            found[name] = "="
        elif callable(default) or "factory" in repr(default):  # of a dataclass
            found[name] = "from the environment"
        else:
            found[name] = str(default) if isinstance(default, cgx_ops.Config) else repr(default)
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

"""The programs with which an outer loop sends and applies fragments outside of jit.

Sending is a separate program, which runs at the same time as the next steps.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax

from cgx_ops.jax._src.diloco.fragments import CALLER, Method
from cgx_ops.jax._src.diloco.state import Layout
from cgx_ops.jax._src.runtime import compat
from cgx_ops.jax._src.runtime.launching import launching_here
from cgx_ops.jax._src.transforms.base import import_optax

# The execution stream of sending programs: any number that no other stream has.
_STREAM = 0x636778
# Error codes after which a communicator is closed: DEADLINE_EXCEEDED, ABORTED and UNAVAILABLE
# (xla_ffi/core.h).
_CLOSED = (4, 10, 14)


class Programs:
    """The programs of one outer loop, compiled once for each fragment."""

    def __init__(self, method: Method, layout: Layout, *, is_delayed: bool) -> None:
        self._method, self._layout, self._is_delayed = method, layout, is_delayed

    def send(self, fragment: int, *args: Any) -> Any:
        """Launch method.send() over the mesh; the results are futures."""
        with _failing(fragment), self._beside():
            return self._send(fragment, *args)

    @functools.cached_property
    def _send(self) -> Any:
        def send(fragment: int, params: Any, outer_parameters: Any, residual: Any, n: Any) -> Any:
            layout = self._layout
            shared, lost = layout.shared(outer_parameters), layout.own(residual)
            return jax.shard_map(
                functools.partial(self._method.send, fragment), mesh=layout.mesh,
                in_specs=(layout.own(params), shared, lost, jax.P()), out_specs=(shared, lost),
            )(params, outer_parameters, residual, n)  # fmt: skip

        return jax.jit(send, static_argnums=0)

    def wait(self, fragment: int, sent: Any) -> None:
        """Wait for the result of send()."""
        with _failing(fragment):
            jax.block_until_ready(sent)

    @functools.cached_property
    def apply(self) -> Any:
        """method.apply() over the mesh. All arguments except the average are donated."""

        def apply(params: Any, outer_parameters: Any, outer: Any, average: Any) -> Any:
            layout, optax = self._layout, import_optax(CALLER)
            copies, shared = layout.own(params), layout.shared(outer_parameters)
            outers = layout.of_outer(optax, self._method.optimizer, outer, outer_parameters)
            return jax.shard_map(
                self._method.apply, mesh=layout.mesh, in_specs=(copies, shared, outers, shared),
                out_specs=(copies, shared, outers),
            )(params, outer_parameters, outer, average)  # fmt: skip

        return jax.jit(apply, donate_argnums=(0, 1, 2))

    def _beside(self) -> contextlib.AbstractContextManager[None]:
        """Run the launched program at the same time as the next steps, where XLA supports that."""
        # XLA matches its own collectives by their order.
        ours = self._method.options.carrier == "native" and self._is_delayed
        if not ours:
            return contextlib.nullcontext()
        if jax.process_count() > 1:
            launching_here()  # may set the thread's own stream, which this block restores
        return compat.execution_stream(_STREAM)


@contextlib.contextmanager
def _failing(fragment: int) -> Iterator[None]:
    """Add the state of the loop and the remedy to the error of a failed synchronization."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        remedy = "Continue with state = loop.skip(state), in all processes"
        # Devices of one process reconnect; processes do not.
        if jax.process_count() > 1 and error.error_code in _CLOSED:
            remedy = (
                "cgx's connections are closed, also between the remaining processes: restart all "
                "processes from the last checkpoint"
            )
        raise jax.errors.JaxRuntimeError(
            f"{CALLER}: fragment {fragment} was not averaged; parameters, outer parameters and "
            f"residuals are unchanged. {remedy}: {error}"
        ) from error

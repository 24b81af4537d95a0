"""The outer loop that diloco() creates: when fragments are sent and applied.

1. states: created, restarted, continued after a failure
2. steps: Python decides what is due, or a lax.switch where the step count is traced
3. helpers
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cgx_ops.jax._src.collectives.mesh_groups import axes_of
from cgx_ops.jax._src.diloco.checks import (
    check_state,
    check_values,
    require_same_processes,
    shapes_of,
)
from cgx_ops.jax._src.diloco.fragments import CALLER, Method, merged, part, values_of
from cgx_ops.jax._src.diloco.programs import Programs
from cgx_ops.jax._src.diloco.state import DiLoCoState, Flight, Layout
from cgx_ops.jax._src.runtime import compat
from cgx_ops.jax._src.transforms.base import devices_of, first_of, import_optax, zero_residuals
from cgx_ops.methods.outer_loop import Schedule


class DiLoCo:
    """An outer loop over the devices of mesh axes, created by `diloco` or `sparse_loco`.

    All mutable values are in a `DiLoCoState`. `init` and `outer` are pure functions that also work
    in `jax.jit` and inside a `shard_map`.

    Args:
        schedule: When fragments are sent and applied.
        method: How fragments are sent and applied.
        layout: How arrays are sharded.

    Attributes:
        schedule: When fragments are sent and applied.
        method: How fragments are sent and applied.
        layout: How arrays are sharded.

    Raises:
        ValueError: From methods that need a mesh, if none was passed or set.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import diloco
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> loop = diloco("data", sync_every=2, mesh=mesh)
        >>> weights = {"kernel": jax.numpy.ones((30, 40))}
        >>> params, state = loop.replicate(weights), loop.init(weights)
        >>> for _ in range(4):
        ...     params, state = loop.outer(params, state)
        >>> params["kernel"].shape, int(state.step)
        ((1, 30, 40), 4)
    """

    def __init__(self, schedule: Schedule, method: Method, layout: Layout) -> None:
        self.schedule, self.method, self.layout = schedule, method, layout
        self._programs = Programs(method, layout, is_delayed=schedule.fragment_sync_delay > 0)
        self._is_compared = False

    # ---- 1. states -------------------------------------------------------------------------------

    def init(self, weights: Any) -> DiLoCoState:
        """Create the state before the first step.

        Outside of `jax.jit`, its arrays are sharded as `state_specs` describes. Leaves that are
        empty or not floating-point are not averaged.

        Args:
            weights: The parameters of one device, without an axis over the devices, equal on all
                devices.

        Returns:
            The `DiLoCoState`.

        Raises:
            ValueError: No mesh is known; the model has fewer layers than fragments; error feedback
                would not converge.
            TypeError: A leaf is float64 or complex.
        """
        if self._is_inside() or _is_traced(weights):
            return self._new_state(weights)
        return self.layout.placed(self._new_state, self.state_specs(weights), weights)

    def replicate(self, tree: Any) -> Any:
        """Return a copy of a tree for each device, outside of `shard_map`.

        Use it for the parameters and for the first state of the inner optimizer.

        Args:
            tree: The parameters of one device, or, without `param_specs`, any other tree.

        Returns:
            A tree like `tree` with arrays `(devices, *shape)`, sharded over the axes.

        Raises:
            ValueError: No mesh is known.
        """
        devices = self._devices()

        def copies(tree: Any) -> Any:
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (devices, *jnp.shape(x))), tree)

        if _is_traced(tree):
            return copies(tree)
        return self.layout.placed(copies, self.copy_specs(tree), tree)

    def copy_specs(self, tree: Any) -> Any:
        """Return the PartitionSpecs of the result of `replicate`.

        Args:
            tree: As for `replicate`.

        Returns:
            A tree of PartitionSpecs like `tree`.
        """
        return self.layout.own(tree)

    def state_specs(self, weights: Any) -> Any:
        """Return the PartitionSpecs of the result of `init`.

        Args:
            weights: The parameters of one device, or their `jax.ShapeDtypeStruct`.

        Returns:
            A `DiLoCoState` of PartitionSpecs.

        Raises:
            ValueError: As `init`.
            TypeError: As `init`.
        """
        return self._specs_of(jax.eval_shape(self._new_state, weights))

    def _specs_of(self, state: DiLoCoState) -> DiLoCoState:
        optax, layout = import_optax(CALLER), self.layout
        shared, residual = layout.shared(state.outer_parameters), layout.own(state.residual)
        parts = [self._part(state, state.outer_parameters, i) for i in range(len(state.outer))]
        outer = tuple(
            layout.of_outer(optax, self.method.optimizer, of, part)
            for of, part in zip(state.outer, parts, strict=True)
        )
        whole: Any = jax.P()
        flight = state.flight and Flight(whole, shared, residual)
        return DiLoCoState(whole, shared, outer, residual, flight)

    def _new_state(self, weights: Any) -> DiLoCoState:
        parameters = jax.tree.map(lambda x: x.astype(jnp.float32), values_of(weights))
        self.method.options.warn_of_unmatched(parameters)
        kept = self.method.kept(parameters)
        layout, fragments = self.layout, self.schedule.fragments
        residual = zero_residuals(CALLER, kept, layout.axis_name, layout.mesh)
        parts = [part(parameters, parameters, i, fragments) for i in range(fragments)]
        flight = None
        if self.schedule.fragment_sync_delay:
            zeros = jax.tree.map(jnp.zeros_like, (parameters, residual))
            flight = Flight(jnp.int32(-1), *zeros)
        outer = tuple(map(self.method.optimizer.init, parts))
        return DiLoCoState(jnp.int32(0), parameters, outer, residual, flight)

    def restart(self, params: Any, state: DiLoCoState) -> Any:
        """Replace the parameters of all devices by the outer parameters, outside of `shard_map`.

        The result is the trained model, equal on all devices.

        Args:
            params: The parameters of all devices, `(devices, *shape)`.
            state: The state of the loop.

        Returns:
            A tree like `params`. Leaves that are not averaged get the first device's values.
        """

        def begin(params: Any, outer_parameters: Any) -> Any:
            def of(p: Any, a: Any) -> Any:
                own = first_of(p) if a is None else a.astype(p.dtype)
                return jnp.broadcast_to(own, p.shape)

            return jax.tree.map(of, params, outer_parameters)

        specs = self.copy_specs(_weights_of(params))
        return self.layout.placed(begin, specs, params, state.outer_parameters)

    def skip(self, state: DiLoCoState) -> DiLoCoState:
        """Continue after a failed synchronization: count the step without sending or applying.

        Call it in all processes, if the error of `outer` recommends it. Parameters, outer
        parameters and residuals stay unchanged. The progress is sent with the next synchronization.

        Args:
            state: The state that was passed to the failed `outer`.

        Returns:
            The state for the next step.

        Raises:
            jax.errors.JaxRuntimeError: Another process does not call it in time.
            cgx_ops.MismatchError: In all processes, if their outer parameters differ.
        """
        self._require_same({}, {}, state)
        flight = state.flight
        if flight is not None:  # a failed array makes all that is computed from it fail
            average, lost = jax.tree.map(_zeros_like, (flight.average, flight.residual))
            flight = Flight(self._number(-1), average, lost)
        return state._replace(step=self._number(_int(state.step) + 1), flight=flight)

    # ---- 2. steps --------------------------------------------------------------------------------

    def outer(self, params: Any, state: DiLoCoState) -> tuple[Any, DiLoCoState]:
        """Count a step, and send and apply due fragments. Call it after every inner step.

        Outside of `jax.jit`, most calls launch nothing. A call that sends a fragment does not wait
        for it; the result is awaited when it is applied. Then the fragment's parameters, outer
        parameters and outer optimizer state are donated.

        In `jax.jit`, or inside a `shard_map` with `copy_specs` and `state_specs`, a `lax.switch` on
        the step count selects the work.

        Args:
            params: The parameters of all devices after the inner step, `(devices, *shape)`; inside
                a `shard_map`, `(1, *shape)`.
            state: The state from `init` or from the last call.

        Returns:
            A pair `(params, state)` for the next step.

        Raises:
            ValueError: The parameters do not fit the state, or the state is from a loop with other
                settings or for another number of devices (see `consolidate`).
            cgx_ops.MismatchError: At the first call outside of `jax.jit`, in all processes: their
                settings or outer parameters differ. The error names both sides.
            jax.errors.JaxRuntimeError: A synchronization failed. Outside of `jax.jit`, `params` and
                `state` are unchanged then: see `skip`.
        """
        if self._is_inside():
            self._check(params, state, 1)
            return self._switched(params, state)
        if _is_traced((params, state)):
            self._check(params, state, self._devices())
            specs = self.copy_specs(_weights_of(params)), self._specs_of(state)
            program = jax.shard_map(
                self._switched, mesh=self.layout.mesh, in_specs=specs, out_specs=specs
            )
            return program(params, state)
        if not self._is_compared:
            self._check(params, state, self._devices())
            self._compare(params, state)
        step = _int(state.step) + 1
        state = state._replace(step=self._number(step))
        sent, applied = self.schedule.sent_after(step), self.schedule.applied_after(step)
        if sent is None and (state.flight is None or _int(state.flight.fragment) != applied):
            return params, state
        self._check(params, state, self._devices())
        return self._done(sent, applied, params, state)

    def _switched(self, params: Any, state: DiLoCoState) -> tuple[Any, DiLoCoState]:
        """Do the work that is due after this step, inside of shard_map."""
        schedule, steps = self.schedule, range(1, self.schedule.sync_every + 1)
        state = state._replace(step=state.step + 1)
        due = [(schedule.sent_after(step), schedule.applied_after(step)) for step in steps]
        kinds = list(dict.fromkeys([(None, None), *due]))
        at = (state.step - 1) % len(steps)
        which = jnp.asarray([kinds.index(kind) for kind in due])[at]
        if state.flight is not None:
            wanted = jnp.asarray([-1 if a is None else a for _, a in due])[at]
            was_skipped = (wanted >= 0) & (wanted != state.flight.fragment)
            which = jnp.where(was_skipped, 0, which)
        elif len(steps) == 1:
            return self._done(*due[0], params, state)
        branches = [functools.partial(self._done, *kind) for kind in kinds]
        return jax.lax.switch(which, branches, params, state)

    def _done(
        self, sent: int | None, applied: int | None, params: Any, state: DiLoCoState
    ) -> tuple[Any, DiLoCoState]:
        """Send a fragment, apply one, or both with the same one."""
        if sent is not None:
            average, lost = self._send(sent, params, state)
            if applied is not None:
                return self._apply(applied, params, state, average, lost)
            flight = state.flight
            assert flight is not None
            flight = Flight(
                self._number(sent), merged(flight.average, average), merged(flight.residual, lost)
            )
            return params, state._replace(flight=flight)
        if applied is not None and state.flight is not None:
            average, lost = (
                self._part(state, tree, applied)
                for tree in (state.flight.average, state.flight.residual)
            )
            none = state.flight._replace(fragment=self._number(-1))
            return self._apply(applied, params, state._replace(flight=none), average, lost)
        return params, state

    def _send(self, fragment: int, params: Any, state: DiLoCoState) -> tuple[Any, Any]:
        """Return the average of a fragment and its quantization error; futures outside of jit."""
        own, outer_parameters, residual = (
            self._part(state, tree, fragment)
            for tree in (values_of(params), state.outer_parameters, state.residual)
        )
        if self._is_inside():
            return self.method.send(fragment, own, outer_parameters, residual, state.step)
        if self.schedule.fragment_sync_delay:
            own = _copied(own)  # the next step may donate the parameters before they are sent
        step = np.int32(_int(state.step))
        return self._programs.send(fragment, own, outer_parameters, residual, step)

    def _apply(
        self, fragment: int, params: Any, state: DiLoCoState, average: Any, lost: Any
    ) -> tuple[Any, DiLoCoState]:
        """Return the parameters and the state after a fragment's average is applied."""
        apply = self.method.apply
        if not self._is_inside():
            self._programs.wait(fragment, (average, lost))
            apply = self._programs.apply
        own, stepped = (
            self._part(state, tree, fragment)
            for tree in (values_of(params), state.outer_parameters)
        )
        own, stepped, outer = apply(own, stepped, state.outer[fragment], average)
        return merged(params, own), state._replace(
            outer_parameters=merged(state.outer_parameters, stepped),
            outer=tuple(outer if i == fragment else x for i, x in enumerate(state.outer)),
            residual=merged(state.residual, lost),
        )

    # ---- 3. helpers ------------------------------------------------------------------------------

    def _part(self, state: DiLoCoState, tree: Any, fragment: int) -> Any:
        return part(state.outer_parameters, tree, fragment, self.schedule.fragments)

    def _axes(self) -> tuple[Hashable, ...]:
        return axes_of(self.layout.axis_name)

    def _devices(self) -> int:
        return devices_of(CALLER, self._axes(), self.layout.mesh)

    def _is_inside(self) -> bool:
        """Return whether this runs inside of a shard_map over the axes."""
        return any(compat.axis_size(axis) is not None for axis in self._axes())

    def _number(self, value: int) -> jax.Array:
        return jnp.int32(value) if self._is_inside() else self.layout.number(value)

    def _check(self, params: Any, state: DiLoCoState, devices: int) -> None:
        """Require that parameters and the state fit this loop and have an axis over devices."""
        values = values_of(params)
        check_values(CALLER, values, state.outer_parameters, devices)
        weights, tree = jax.tree.flatten(_weights_of(params))
        check_state(CALLER, state, self._shapes_of_new(tree, tuple(weights), devices), values)

    @functools.cached_property
    def _shapes_of_new(self) -> Callable[..., dict[str, tuple[int, ...]]]:
        """The shapes of a new state, cached: tracing one takes longer than the comparison."""

        @functools.cache
        def shapes(tree: Any, weights: tuple[Any, ...], devices: int) -> dict[str, tuple[int, ...]]:
            del devices  # only a cache key; _new_state determines the number itself
            return shapes_of(jax.eval_shape(self._new_state, tree.unflatten(weights)))

        return shapes

    def _compare(self, params: Any, state: DiLoCoState) -> None:
        """Require that all processes have the same loop and the same state."""
        own, outer = (self._part(state, x, 0) for x in (values_of(params), state.outer_parameters))
        lowered = self._programs.apply.lower(own, outer, state.outer[0], outer)
        self._require_same(
            {**asdict(self.schedule), **self.method.settings(), "the step": _int(state.step)},
            {"the outer optimizer": lowered.as_text().encode()}, state,
        )  # fmt: skip
        self._is_compared = True

    def _require_same(self, settings: Any, contents: Any, state: DiLoCoState) -> None:
        contents = {**contents, "the outer parameters": state.outer_parameters}
        mesh, name = self.layout.found_mesh(), self.method.options.name
        require_same_processes(mesh, name, settings, contents)


def _is_traced(tree: Any) -> bool:
    return any(isinstance(leaf, compat.Tracer) for leaf in jax.tree.leaves(tree))


def _int(number: Any) -> int:
    return int(np.asarray(number))


def _weights_of(params: Any) -> Any:
    """Return the shapes and dtypes of one device's parameters."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x)), params
    )


@jax.jit
def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def _zeros_like(x: jax.Array) -> jax.Array:
    """Return zeros with the shape, dtype and sharding of an array, which may have failed."""
    zeros = jax.jit(lambda: jnp.zeros(x.shape, x.dtype), out_shardings=x.sharding)
    return zeros()

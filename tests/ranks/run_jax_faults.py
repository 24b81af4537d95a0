"""Rank program: failures on a mesh of processes, and recovery from them.

    run_jax_faults.py VICTIM CHECK...

VICTIM is the process that fails, or -1. Each of the others prints its error, which names the
call site. Checks that lose no process may share a run.
"""

import faulthandler
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import checks
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from support.jax_cases import SRA, expected, mesh_of, normal, on_mesh, same_bits, spread
from support.jax_fault_cases import check_backend, error_of

import cgx_ops.jax
from cgx_ops import _xla_ffi
from cgx_ops.jax import all_to_all_q, psum_q

jax.config.update("jax_platforms", "cpu")
if "COORDINATOR" in os.environ:
    cgx_ops.jax.initialize(os.environ["COORDINATOR"], 2, int(os.environ["RANK"]))
else:
    cgx_ops.jax.initialize()
RANK, DEVICES = jax.process_index(), jax.device_count()
VICTIM = int(sys.argv[1])
MESH = mesh_of((DEVICES,), ("d",))
X = normal(1, DEVICES, 3000)


def program(body: Callable[..., Any] | None = None, **knobs: Any) -> Callable[[], Any]:
    """Return a launcher of a program that sums over all devices."""
    step = on_mesh(MESH, body or (lambda v: psum_q(v, "d", config=SRA, **knobs))).jitted
    operand = spread(MESH, X, P("d"))
    return lambda: step(operand)


def exchange(**knobs: Any) -> Callable[[], Any]:
    """Return a launcher of a program in which all devices exchange blocks."""
    return program(lambda v: all_to_all_q(v.reshape(DEVICES, -1), "d", 0, 0, config=SRA, **knobs))


def check_together() -> None:
    """Require a correct sum over all processes."""
    for shard in program(name="well")().addressable_shards:
        assert same_bits(shard.data[0], expected(X))


def fails(launch: Callable[[], Any], *words: str) -> str:
    """Require an error with these words before 40 s, when XLA aborts some waits."""
    faulthandler.dump_traceback_later(30, exit=True)
    text = error_of(launch)
    faulthandler.cancel_dump_traceback_later()
    assert text.startswith(("JaxRuntimeError: ", "ValueError: ")), text
    for word in words:
        assert word in text, (word, text)
    return text


# ---- mismatched ranks: all get an error and continue ---------------------------------------------


def mismatched_bits() -> None:
    launch = program(name="g", bits=4 + RANK)
    fails(launch, "psum_q 'g#0' on rank", "disagree on collective 'g#0'", "bits 4 against 5")
    check_together()


def mismatched_exchange() -> None:
    launch = exchange(name="x", bits=4 + RANK)
    fails(launch, "all_to_all_q 'x#0' on rank", "bits 4 against 5")
    check_together()


def dependent_programs() -> None:
    """Check the cause behind the prefixes that XLA adds, one per program (see failures.md)."""
    failed, follow = program(name="chain", bits=4 + RANK), jax.jit(lambda v: v + 1)
    text = fails(lambda: follow(follow(follow(failed()))), "psum_q 'chain#0' on rank")
    cause = text.rpartition("Error dispatching computation: ")[2]
    assert re.match(r"(\w+: )*psum_q 'chain#0' on rank", cause), text
    check_together()


def one_name_in_different_programs() -> None:
    """Check one name in two programs, of which each process launches a different one."""
    ours = [
        program(lambda v: psum_q(v * 2, "d", name="h")),
        program(lambda v: psum_q(v[:2000], "d", name="h")),
    ]
    fails(ours[RANK], "psum_q 'h#0'", "numel 3000 against 2000")
    check_together()
    # A name may be in several programs if all processes launch them in one order.
    for launch in ours:
        jax.block_until_ready(launch())


# ---- launches that fail on one process -----------------------------------------------------------


def launch_failed_on_one_process() -> None:
    """Check that later launches are not matched with a launch that failed on process 1."""
    check_together()
    failing = False

    def stumble(x: Any) -> Any:
        if failing:
            raise ArithmeticError("no such number")
        return np.asarray(x)

    def body(v: jax.Array) -> jax.Array:
        v = jax.pure_callback(stumble, v, v)
        return psum_q(v, "d", bits=32) + psum_q(v, "d", bits=32, name="in step")

    launch = program(body)
    jax.block_until_ready(launch())
    if RANK == 1:
        failing = True
        fails(launch, "no such number")
        failing = False
    for _ in range(3):
        fails(launch, "FAILED_PRECONDITION", "disagree on", "launch ", "restart all ranks")
    check_together()  # another program, whose launches match


# ---- missing ranks: an error by the deadline, CGX_TIMEOUT ----------------------------------------


def different_programs() -> None:
    """Check calls without names: each process waits for its own, and reports the other's call."""
    check_together()
    launch = program(bits=4 + RANK)
    text = fails(launch, "psum_q 'jit_on_device/0:")
    assert "DEADLINE_EXCEEDED" in text or "UNAVAILABLE" in text
    assert text.count("jit_on_device/0:") > 1  # the other process's call site is included
    check_backend()


def never_calls() -> None:
    late(program(name="lonely"), "psum_q 'lonely#0'")


def never_exchanges() -> None:
    late(exchange(name="lonely"), "all_to_all_q 'lonely#0'")


def late(launch: Callable[[], Any], call: str) -> None:
    check_together()  # creates the communicator
    if RANK == VICTIM:
        time.sleep(float(os.environ["CGX_TIMEOUT"]) + 3)
    else:
        fails(launch, "DEADLINE_EXCEEDED", call)
    check_backend()


def shaken() -> Callable[[], Any]:
    """Return a launcher whose callback raises on one device before the sum."""

    def shake(x: Any, device: Any) -> Any:
        if device == DEVICES - 1:
            raise ArithmeticError("no such number")
        return np.asarray(x)

    def body(v: jax.Array) -> jax.Array:
        v = jax.pure_callback(shake, v, v, jax.lax.axis_index("d"))
        return psum_q(v, "d", name="shaken")

    return program(body)


def only_device_fails() -> None:
    """Check a process whose only device fails. cgx detects its exit, not its launch."""
    check_together()
    told = ["UNAVAILABLE: psum_q 'shaken#0'", "rank 1 is lost"]
    fails(shaken(), *(told if RANK == 0 else ["no such number"]))
    check_backend()


def one_of_several_devices_fails() -> None:
    """Check that the remaining devices of a process report the failure, and all can continue."""
    check_together()
    here = jax.process_index() == jax.process_count() - 1
    if here:
        _xla_ffi.set_local_timeout(1.0)  # other processes keep 60 s
    text = fails(shaken())
    if here:  # XLA reports the error of one device
        assert "no such number" in text or "psum_q 'shaken#0'" in text
        _xla_ffi.set_local_timeout(60.0)
    else:
        assert "psum_q 'shaken#0'" in text
        assert "rank 1 takes no part" in text
        assert "1 of 2 devices of this process did not call it within 1 s" in text
    check_together()
    check_backend()


# ---- a process that ends: the others get an error immediately ------------------------------------


def dies(how: Callable[[], None]) -> None:
    check_together()
    launch = program(name="orphaned")
    if RANK == VICTIM:
        how()
    fails(launch, "UNAVAILABLE: psum_q 'orphaned#0'", f"rank {VICTIM} is lost")
    check_backend()


def raises() -> None:
    def fail() -> None:
        raise ArithmeticError("in mid-program")

    dies(fail)


def exits() -> None:
    dies(sys.exit)


def exits_immediately() -> None:
    dies(lambda: os._exit(0))


def killed() -> None:
    dies(lambda: os.kill(os.getpid(), signal.SIGKILL))


def killed_before_an_exchange() -> None:
    check_together()
    launch = exchange(name="orphaned")
    if RANK == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    fails(launch, "UNAVAILABLE: all_to_all_q 'orphaned#0'", f"rank {VICTIM} is lost")
    check_backend()


def backend_works() -> None:
    assert float(jnp.arange(4.0).sum()) == 6


checks.run(
    checks.named(
        mismatched_bits, one_name_in_different_programs, dependent_programs,
        launch_failed_on_one_process, different_programs, never_calls,
        only_device_fails, one_of_several_devices_fails, raises, exits, exits_immediately, killed,
        mismatched_exchange, never_exchanges, killed_before_an_exchange, check_together,
    ),
    sys.argv[2:],
    after=backend_works,
)  # fmt: skip

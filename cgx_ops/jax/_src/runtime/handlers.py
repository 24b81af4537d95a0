"""The compiled handlers: registered with XLA per platform, and compilations counted.

They are registered at the first lowering for a platform, not at import: an import must not start a
backend, and XLA:CPU refuses a state type that is registered before the backend exists.
"""

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import jax

from cgx_ops._core import launchers
from cgx_ops.jax._src.runtime import compat, processes, threads

Platform = Literal["cpu", "cuda"]  # the supported platforms, by JAX's names
Check = Callable[[str, Any], None]  # arguments: the name of a program's module, and its data

# XLA:CPU aborts a process whose own devices wait for each other for twice this time, so a later
# deadline would never be reported. Among processes XLA has no such limit.
_LOCAL_TIMEOUT_S = 20.0

_lock = threading.Lock()


def used() -> bool:
    """Return whether this process has lowered or loaded collectives."""
    return _binding.cache_info().currsize > 0


def target(name: str, platform: Platform = "cpu") -> str:
    """Return XLA's name of a target, such as "psum_q"; register all targets if needed."""
    with _lock:
        _REGISTER[platform]()
    return f"cgx_{name}"


def targets() -> tuple[str, ...]:
    """Return the names of all FFI targets; register them if needed."""
    with _lock:
        return tuple({name: None for register in _REGISTER.values() for name in register()})


@functools.cache
def _binding() -> Any:
    from cgx_ops import _xla_ffi

    threads.provide()
    _count_compilations(_xla_ffi.compilation_begins, _xla_ffi.compilation_ends)
    _xla_ffi.set_local_timeout(launchers.timeout(_LOCAL_TIMEOUT_S))
    if world := processes.connected_world():
        _xla_ffi.set_world(world.id)
    return _xla_ffi


class _Checks:
    """Comparisons among processes before they compile a program, by the name of its module.

    JAX reports only this name when a compilation begins. A program that one process only lowers
    leaves its checks here, until the process compiles a program of this name. So such a program
    needs another name if its plan differs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By program; the value is whether the check has failed.
        self._checks: dict[str, dict[tuple[Check, Hashable], bool]] = {}
        self._running: dict[str, threading.Lock] = {}

    def add(self, program: str, check: Check, of: Hashable) -> None:
        """Add a check, and remove those that have failed: this is a new program."""
        with self._lock:
            before = self._checks.get(program, {})
            left = {entry: False for entry, failed in before.items() if not failed}
            self._checks[program] = left | {(check, of): False}

    def run(self, program: str) -> None:
        """Run the checks of a program in the order in which they were added, each until it passes.

        Raises:
            Exception: That of a check. A repeated compilation runs it again.
        """
        with self._lock:
            if not self._checks.get(program):
                return
            running = self._running.setdefault(program, threading.Lock())
        with running:
            for entry in tuple(self._checks[program]):
                check, of = entry
                try:
                    check(program, of)
                except Exception:
                    with self._lock:
                        self._checks[program][entry] = True
                    raise
                with self._lock:
                    self._checks[program].pop(entry, None)


_checks = _Checks()
check_before_compilation = _checks.add

_compiling = threading.RLock()  # held by the thread that compiles, among several processes


class _OfThread(threading.local):
    """The running compilations of this thread: whether each one holds the lock."""

    def __init__(self) -> None:
        self.holds: list[bool] = []


_of_thread = _OfThread()


def _count_compilations(begins: Callable[[], None], ends: Callable[[], None]) -> None:
    """Count the calls of each compilation from 0 (xla_ffi/site.h).

    Among several processes, compilations of several threads run one after another: the counts of
    two that overlap would depend on timing, and calls of the processes would not match.

    A thread waits for the lock before XLA's compiler runs, with no lock of ours or JAX's that a
    compilation needs. The compiler may call Python (jax.custom_partitioning), on the thread that
    compiles, so a compilation in such a call takes the lock again. In some settings of JAX and XLA
    the compiler also waits for the compilation of the same program in another process, which may
    wait for its own lock: a binary or results of GPU autotuning that processes share. So the wait
    has a limit. After it, compilations overlap.
    """

    def begin(program: str) -> None:
        _checks.run(program)  # not under the lock: other processes may compile in another order
        several = jax.process_count() > 1
        _of_thread.holds.append(several and _compiling.acquire(timeout=launchers.timeout()))
        begins()

    def end() -> None:
        if not _of_thread.holds:  # it began before counting did
            return
        ends()
        if _of_thread.holds.pop():
            _compiling.release()

    compat.call_around_compile(begin, end)


def _register(handlers: dict[str, Any], platform: str) -> tuple[str, ...]:
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, handler, platform=platform)
    return tuple(handlers)


@functools.cache
def _register_cpu() -> tuple[str, ...]:
    binding = _binding()
    compat.device_ids("cpu")  # starts the backend
    jax.ffi.register_ffi_type("cgx_psum_q_site", binding.site_type(), platform="cpu")
    return _register(binding.cpu_handlers(), "cpu")


@functools.cache
def _register_cuda() -> tuple[str, ...]:
    binding = _binding()
    binding.set_cuda_devices(compat.device_ids("cuda"))
    # Programs can be lowered for GPUs on a host without one. Then JAX only stores these.
    jax.ffi.register_ffi_type("cgx_psum_q_cuda_site", binding.cuda_site_type(), platform="CUDA")
    return _register(binding.cuda_handlers(), "CUDA")


_REGISTER: dict[Platform, Callable[[], tuple[str, ...]]] = {
    "cpu": _register_cpu,
    "cuda": _register_cuda,
}


def refusal(function: str, platforms: Sequence[str]) -> str:
    """Return the error for a platform that a function does not support, with the remedy."""
    return (
        f"{function} runs on CPU and CUDA devices, not on {'/'.join(platforms)}: set "
        "JAX_PLATFORMS=cpu or JAX_PLATFORMS=cuda, or use JAX's own collective"
    )

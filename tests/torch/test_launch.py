"""Rendezvous of mpirun's and srun's ranks in `init_process_group`, and other launchers."""

import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from torch.distributed.rendezvous import _rendezvous_handlers

from cgx_ops._core import launchers
from cgx_ops.torch.backend import launch

STEP = {
    "SLURM_JOB_ID": "70001",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],login1",
}
PORT = 61440 + 70001 % 4094
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "MASTER_")) or name in launchers.TORCHRUN:
            monkeypatch.delenv(name)


def set_all(monkeypatch: pytest.MonkeyPatch, environ: Mapping[str, str]) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


# ---- the address under srun ----------------------------------------------------------------------


def test_srun() -> None:
    assert launchers.place(STEP) == launchers.Place("srun", 5, 8, "gpu07", PORT)


def test_two_ports_are_reserved() -> None:
    """Check that JAX's coordinator and the rendezvous of cgx_ops have ports."""
    jobs = [STEP | {"SLURM_JOB_ID": str(job)} for job in range(4096)]
    ports = [launchers.place(job).port for job in jobs]
    assert (min(ports), max(ports)) == (61440, 65533)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[3,5-9]", "n3"),
        ("rack1-[010-012]", "rack1-010"),
        ("gpu[07-09,12]-ib,b[1-2]", "gpu07-ib"),
        ("rack[0-1]node[2-3]", "rack0node2"),
        ("rack[3,5]-node[08-11].local,a", "rack3-node08.local"),
    ],
)
def test_first_host_of_a_list(nodes: str, first: str) -> None:
    assert launchers.place(STEP | {"SLURM_STEP_NODELIST": nodes}).host == first


# ---- launchers with the handler ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "wrapped"),
    [
        (STEP, True),
        (MPIRUN, True),
        ({}, False),
        (STEP | {"RANK": "0", "WORLD_SIZE": "2"}, False),  # torchrun's variables, under srun
        (MPIRUN | {"RANK": "1", "WORLD_SIZE": "4"}, False),
        (STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),  # a shell of salloc
    ],
)
def test_launchers_with_the_handler(
    environ: dict[str, str], wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(_rendezvous_handlers)
    monkeypatch.setitem(_rendezvous_handlers, "env", before["env"])  # is undone at the end
    set_all(monkeypatch, environ)
    everything = dict(os.environ)
    launch.register()
    changed = {
        name for name, handler in _rendezvous_handlers.items() if handler is not before[name]
    }
    assert changed == ({"env"} if wrapped else set())
    assert dict(os.environ) == everything


# ---- URLs for torch's handler --------------------------------------------------------------------


def asked(url: str = "env://") -> tuple[str, str, dict[str, str]]:
    """Return scheme, address and query of the URL that torch's handler receives."""
    urls: list[str] = []

    def torchs(url: str, **options: Any) -> Iterator[Any]:
        assert options == {"timeout": 7}
        urls.append(url)
        yield "store"

    everything = dict(os.environ)
    assert list(launch._by_launcher(torchs, torchs)(url, timeout=7)) == ["store"]
    assert dict(os.environ) == everything
    parts = urlsplit(urls[0])
    return parts.scheme, parts.netloc, dict(parse_qsl(parts.query))


@pytest.mark.parametrize(
    ("url", "query"),
    [
        ("env://", {"rank": "5", "world_size": "8"}),
        ("env://?use_libuv=0", {"rank": "5", "world_size": "8", "use_libuv": "0"}),
        ("env://?rank=1&world_size=2", {"rank": "1", "world_size": "2"}),
        ("env://?rank=5&world_size=-1", {"rank": "5", "world_size": "8"}),  # as in torch's RPC
    ],
)
def test_arguments_of_the_call_take_precedence(
    url: str, query: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, STEP)
    assert asked(url) == ("tcp", f"gpu07:{PORT}", query)


@pytest.mark.parametrize(
    ("address", "netloc"), [("elsewhere", "elsewhere:1"), ("fd00::1", "[fd00::1]:1")]
)
def test_address_of_the_user_under_srun(
    address: str, netloc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, STEP | {"MASTER_ADDR": address, "MASTER_PORT": "1"})
    assert asked() == ("tcp", netloc, {"rank": "5", "world_size": "8"})


def test_address_of_the_user_under_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that torch's handler reads it."""
    set_all(monkeypatch, MPIRUN | {"MASTER_ADDR": "elsewhere"})
    assert asked() == ("env", "", {"rank": "1", "world_size": "4"})


def test_agreed_address_under_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, MPIRUN)
    monkeypatch.setattr(launch, "_agree", lambda: ("10.0.0.1", 500))
    assert asked() == ("tcp", "10.0.0.1:500", {"rank": "1", "world_size": "4"})


@pytest.mark.parametrize("launcher", [MPIRUN, STEP])
def test_ranks_that_the_program_sets_after_the_import(
    launcher: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, launcher | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"})
    assert asked() == ("env", "", {})

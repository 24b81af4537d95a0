"""What `import cgx_ops.torch` takes from a launcher's variables, and when it leaves them alone."""

import pytest

from cgx_ops.torch import launch

STEP = {
    "SLURM_JOB_ID": "70001",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],login1",
}


def test_srun() -> None:
    environ = dict(STEP)
    launch.register(environ)
    assert {name: environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1",
    }  # fmt: skip
    assert environ["MASTER_ADDR"] == "gpu07"
    assert environ["MASTER_PORT"] == str(61440 + 70001 % 4094)


def test_the_two_ports_after_the_last_one_are_left() -> None:
    """JAX's coordinator and the rendezvous of cgx_ops take them."""
    ports = []
    for job in range(4096):
        environ = STEP | {"SLURM_JOB_ID": str(job)}
        launch.register(environ)
        ports.append(int(environ["MASTER_PORT"]))
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
    environ = STEP | {"SLURM_STEP_NODELIST": nodes}
    launch.register(environ)
    assert environ["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    "own",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},  # torchrun's, under srun
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # a shell of salloc's
    ],
)
def test_what_is_set_or_alone_is_left(own: dict[str, str]) -> None:
    environ = STEP | own
    before = dict(environ)
    launch.register(environ)
    assert environ == before


def test_address_of_the_user_stays() -> None:
    environ = STEP | {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}
    launch.register(environ)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"], environ["RANK"]) == (
        "elsewhere",
        "1",
        "5",
    )

"""Hierarchical psum_scatter_q and all_gather_q over processes, on simulated hosts."""

from support.rank_checks import Launch, RankCheck, rank_checks

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}


@rank_checks(
    Launch(3, "run_jax_host_blocks.py", env=ENVIRONMENT, hosts="a,a,b", timeout=100),
)
def test_on_hosts(check: RankCheck) -> None:
    check.passes()

"""Conservation with error feedback over 50 steps: all bindings, algorithms and compressors.

numpy/test_feedback.py tests numpy's threads, numpy/test_feedback_scatter.py reduce_scatter on one
host, and jax/test_compressors.py psum_q with its carriers.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import conservation, launch

from cgx_ops import Communicator, Config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("binding", "algorithm"),
    [
        *(("torch", algorithm) for algorithm in ("one_shot", "sra", "ring")),
        *(pytest.param("jax", algorithm, marks=EXHAUSTIVE) for algorithm in ("one_shot", "sra")),
        ("jax", "ring"),
    ],
)
@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=EXHAUSTIVE) for n in (1, 2, 4))])
def test_threads(binding: str, size: int, algorithm: Any) -> None:
    rows = [row for row in conservation.FED_BACK if conservation.served(binding, row)]
    if binding == "jax":
        from support import jax_cases

        jax_cases.use_cpu_devices(8)

    def rank_of(rank: int, comm: Communicator) -> list[Any]:
        found = []
        for number, knobs in enumerate(rows):
            config = Config(**{**knobs, "algorithm": algorithm})
            op = "avg" if number % 2 else "sum"
            reduce = conservation.BINDINGS[binding](comm, op, config)
            found.append(conservation.run(comm, op, config, reduce))
        return found

    results = launch.threads(size, rank_of, timeout=500)
    for knobs, ranks in zip(rows, zip(*results, strict=True), strict=True):
        left_over(knobs, ranks)


# Daily runs use only the most uneven hosts.
PROCESSES = [
    pytest.param(binding, algorithm, hosts, marks=[] if daily else EXHAUSTIVE)
    for binding, algorithm, layouts in (
        ("numpy", "hierarchical", ("a,a,b", "a,a,b,c", "a", "a,b", "a,b,a,b", "a,a,a,b")),
        ("numpy scatter", "hierarchical", ("a,a,b", "a,b,b,a,c", "a,b,b,b", "a,b", "a,b,a,b")),
        ("torch", "hierarchical", ("a,a,b", "a,a,b,c", "a", "a,b", "a,b,a,b", "a,a,a,b")),
        ("jax", "hierarchical", ("a,a,b", "a,a,b,c", "a", "a,b", "a,b,a,b", "a,a,a,b")),
        ("torch c10d", "one_shot", ("a,a", "a", "a,a,a", "a,a,a,a")),
        ("torch c10d", "sra", ("a,a,a", "a", "a,a", "a,a,a,a")),
    )
    for place, hosts in enumerate(layouts)
    for daily in [place < (2 if binding.startswith("numpy") else 1)]
]


@pytest.mark.parametrize(("binding", "algorithm", "hosts"), PROCESSES)
def test_processes(binding: str, algorithm: str, hosts: str, tmp_path: Path) -> None:
    """Test `hierarchical` on hosts of one and several ranks, and torch's carrier="c10d"."""
    launch.mpirun(
        hosts.count(",") + 1, "run_conservation.py", tmp_path, binding, algorithm, hosts=hosts,
        env=ENVIRONMENT, timeout=500,
    )  # fmt: skip
    files = [np.load(tmp_path / f"{rank}.npz") for rank in range(hosts.count(",") + 1)]
    assert len(files[0].files) >= 20
    for row in files[0].files:
        left_over(conservation.FED_BACK[int(row)], [file[row] for file in files])


def left_over(knobs: dict[str, Any], ranks: Any) -> None:
    """Check the final residuals: nonzero if there are several ranks."""
    try:
        conservation.check(ranks)
    except AssertionError as error:
        raise AssertionError(knobs) from error
    assert any(residual.any() for _, residual, _ in ranks) == (len(ranks) > 1), knobs

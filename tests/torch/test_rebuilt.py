"""Groups that were rebuilt from survivors and a newcomer: communicators, state of DDP hooks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from support import launch

from cgx_ops import Communicator
from cgx_ops.torch.backend.groups import communicator_of, forget

SIZE, STEPS = 3, 20
SURVIVORS, LOST, NEW = (0, 2), 1, 3


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["new", "reconfigure"])
def test_state_survives(tmp_path: Path, how: str) -> None:
    if how == "reconfigure" and not hasattr(dist, "_reconfigure"):
        pytest.skip("torch reconfigures groups from 2.14 on")
    launch.processes(4, "run_torch_rebuilt.py", tmp_path, how, timeout=100)
    for method in ("quantized", "adaptive", "randk", "power_sgd", "deep_gradient"):
        saved = [dict(np.load(tmp_path / f"{method} {i}.npz")) for i in range(4)]
        first = saved[0]
        for i in (*SURVIVORS, NEW):
            assert np.array_equal(saved[i]["average"], first["average"]), method
            assert np.array_equal(saved[i]["average"], saved[i]["fresh"]), method
        assert np.array_equal(saved[2]["applied"], first["applied"])
    check_conservation(tmp_path)


def check_conservation(folder: Path) -> None:
    """Require that all gradients equal what was applied, plus the residuals of all processes.

    The residual of the lost process is not applied anymore. The bound is that of
    support/conservation.py: in a step each rank's value passes at most 2 (size + 3) operations of
    fp32, each off by 2^-24 of at most the sum of all ranks' inputs, residuals and results.
    """
    saved = [dict(np.load(folder / f"quantized {i}.npz")) for i in range(4)]
    missing = np.sum([each["given"] for each in saved], axis=0) - saved[0]["applied"]
    missing -= np.sum([each["residual"] for each in saved], axis=0)
    assert np.abs(saved[LOST]["residual"]).max() > 0
    bound = np.sum([each["largest"] for each in saved], axis=0) + 6 * SIZE
    assert (np.abs(missing) <= 2 * STEPS * 2 * (SIZE + 3) * 2.0**-24 * bound).all()


class Group:
    """The parts of a process group that the search for its communicator uses."""

    def __init__(self) -> None:
        self.group_name = ""


def test_a_rebuilt_group_gets_its_new_communicator() -> None:
    group: Any = Group()
    for name in ("rebuilt first", "rebuilt second"):
        (communicator,) = Communicator.local(1, name)
        group.group_name = f"{name}/0"
        assert communicator_of(group).id == communicator.id
        forget(group.group_name, era=name)
        communicator.close()

"""Groups of the backend "cgx" that change their members: torch's reconfigure."""

from pathlib import Path

import pytest
import torch.distributed as dist
from support import launch

PROCESSES = 5

needs_reconfigure = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="torch reconfigures groups from 2.14 on"
)


@needs_reconfigure
@pytest.mark.timeout(300)
def test_members_change(tmp_path: Path) -> None:
    outputs = launch.processes(
        PROCESSES, "run_torch_reconfigure.py", tmp_path, timeout=280, check=False
    )
    for output in outputs[:2]:  # the others are killed in the last check
        assert "OK" in output.splitlines(), "\n".join(outputs)
    for output in outputs[2:]:
        assert "refuses_another_version: ok" in output, output


@needs_reconfigure
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("config", ["4-bits", "2-bits-feedback"])
def test_training_continues_after_losses(tmp_path: Path, config: str) -> None:
    outputs = launch.processes(
        6, "run_torch_recovery.py", tmp_path, config, timeout=280, check=False
    )
    for rank in (0, 1, 4, 5):  # the others die in backward
        assert "OK" in outputs[rank].splitlines(), "\n".join(outputs)


@needs_reconfigure
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("arguments", "processes"), [((), 4), (("hsdp",), 5)])
def test_sharded_training_continues(
    tmp_path: Path, arguments: tuple[str, ...], processes: int
) -> None:
    outputs = launch.processes(
        processes, "run_torch_reconfigure_fsdp.py", tmp_path, *arguments, timeout=280, check=False
    )
    for rank in (*range(processes - 2), processes - 1):  # the other one dies in backward
        assert "OK" in outputs[rank].splitlines(), "\n".join(outputs)


@needs_reconfigure
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_grows(tmp_path: Path) -> None:
    """A sample; docs/guides/torch/elastic.md has the result of 10,000."""
    outputs = launch.processes(3, "run_torch_reconfigure.py", tmp_path, 400, timeout=500)
    for output in outputs:
        assert "growth: none" in output, output


@needs_reconfigure
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["SHM", "TCP"])
def test_a_newcomer_is_lost_in_any_phase(tmp_path: Path, transport: str) -> None:
    """A sample; docs/guides/torch/elastic.md has the result of 600."""
    outputs = launch.processes(
        4, "run_torch_reconfigure_faults.py", tmp_path, 30,
        env={"COMMUNICATOR_TYPE": transport}, timeout=280,
    )  # fmt: skip
    for output in outputs:
        assert "OK" in output.splitlines(), output
    for output in outputs[:3]:
        assert "growth: none" in output, output

"""torchft over the backend "cgx"."""

import pytest
import torch.distributed as dist
from support import launch

pytest.importorskip("torchft")


@pytest.mark.timeout(200)
def test_process_group() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    outputs = launch.processes(3, "run_torchft_groups.py", store.port, timeout=180)
    launch.check_ok(outputs)

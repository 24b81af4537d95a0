"""torchft over the backend "cgx"."""

import pytest
from support import launch
from torch._C._distributed_c10d import TCPStore

pytest.importorskip("torchft")


@pytest.mark.timeout(200)
def test_process_group() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    outputs = launch.processes(3, "run_torchft_groups.py", store.port, timeout=180)
    launch.check_ok(outputs)

"""Rank program: a rank of the backend "cgx" leaves, and the others go on with exact messages.

torchrun --nproc-per-node 3 run_torch_p2p_leaving.py
"""

import datetime
from typing import Any

import checks
import pytest
import torch
from p2p_cases import dist, new_group
from support import torch_cases as tc

from cgx_ops.torch.backend.errors import PeerFailed


def between_0_and_2(group: Any) -> None:
    """Send in both directions between the ranks that stay."""
    rank = group.rank()
    for source, target in ((2, 0), (0, 2)):
        x, y = tc.values(source, 1000), torch.zeros(1000)
        if rank == source:
            dist.send(x, group=group, group_dst=target)
        else:
            dist.recv(y, group=group, group_src=source)
            assert tc.same_bits(y, x)


def before_its_message_is_waited_for() -> None:
    """Leave after a message that rank 0 receives from any source, and announces only later."""
    group, rank, y = new_group(range(3)), dist.get_rank(), torch.zeros(1000)
    work = dist.irecv(y, group=group) if rank == 0 else None
    if rank == 1:
        dist.send(tc.values(1, 1000), group=group, group_dst=0)
        dist.destroy_process_group(group)
    dist.barrier()  # rank 1 has left
    if work is not None:
        work.wait()
        assert tc.same_bits(y, tc.values(1, 1000))
    if rank != 1:
        between_0_and_2(group)
        dist.destroy_process_group(group)


def before_a_message_to_it() -> None:
    """Leave while rank 0 waits to send to this rank and to receive from it."""
    group, rank, x = new_group(range(3)), dist.get_rank(), torch.zeros(1000)
    works = []
    if rank == 0:
        works.append(dist.irecv(x, group=group, group_src=1, tag=9))
        works.append(dist.isend(x, group=group, group_dst=1, tag=8))
    dist.barrier()  # rank 0 has announced its messages
    if rank == 1:
        dist.destroy_process_group(group)
    dist.barrier()  # rank 1 has left
    if rank != 1:
        between_0_and_2(group)
        for work in works:
            with pytest.raises(PeerFailed, match="rank 1 is lost: it closed the communicator"):
                work.wait()
        between_0_and_2(group)
        dist.destroy_process_group(group)


def main() -> None:
    dist.init_process_group("cgx", timeout=datetime.timedelta(seconds=60))
    checks.run(
        checks.named(before_its_message_is_waited_for, before_a_message_to_it), after=dist.barrier
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

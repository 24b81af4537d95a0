"""Rank program: cgx_ops.torch.all_to_all with blocks of exact numbers of elements.

torchrun --nproc-per-node 8 run_torch_blocks.py CHECK ...
"""

import itertools

import checks
import reference
import torch
import torch.distributed as dist
from support import torch_cases as tc

from cgx_ops import Config
from cgx_ops.torch import all_to_all


def exchanged_blocks(*sizes: int) -> None:
    """Exchange one block of a size with every rank; compare those for this rank with the oracle."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    for numel, bits in itertools.product(sizes, (4, 32)):
        x = torch.cat([tc.values(rank, numel, call=peer) for peer in ranks])
        received = [tc.to_numpy(tc.values(peer, numel, call=rank)) for peer in ranks]
        only_here = [[numel if peer == rank else 0 for peer in ranks] for _ in ranks]
        segment = reference.Segment(0, 0, bits, 64)
        want = reference.all_to_all(received, only_here, segment, rounding="nearest")[rank]
        got = all_to_all(x, config=Config(bits, 64, "nearest"))
        assert tc.same_bits(got, tc.from_numpy(want)), (numel, bits)


def small_blocks() -> None:
    exchanged_blocks(511, 512)


def large_blocks() -> None:
    exchanged_blocks(2**20 + 7)


def main() -> None:
    dist.init_process_group("gloo")
    checks.run(checks.named(small_blocks, large_blocks))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

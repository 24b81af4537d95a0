"""Collectives that gloo serves under the backend: other collectives, objects, point to point."""

import datetime
from typing import Any

import torch
import torch.distributed

from .common import Case, dist


def collectives(r: int, n: int) -> None:
    x = torch.full((3,), float(r))
    dist.broadcast(x, n - 1)
    assert x.tolist() == [n - 1.0] * 3
    x = torch.full((3,), float(r + 1))
    dist.reduce(x, 0)
    assert r != 0 or x.tolist() == [n * (n + 1) / 2] * 3
    x = torch.full((2,), float(r))
    every = [torch.empty(2) for _ in range(n)]
    dist.all_gather(every, x)
    assert [each[0].item() for each in every] == list(range(n))
    flat = torch.empty(2 * n)
    dist.all_gather_into_tensor(flat, x)
    assert flat.tolist() == [float(i // 2) for i in range(2 * n)]
    dist.gather(x, every if r == 0 else None, 0)
    dist.scatter(x, every if r == 0 else None, 0)
    assert x.tolist() == [r, r]
    part = torch.empty(2)
    dist.reduce_scatter(part, [torch.full((2,), float(i)) for i in range(n)])
    assert part.tolist() == [r * n] * 2
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * n))
    assert part.tolist() == [n * 2.0 * r, n * (2.0 * r + 1)]
    out = torch.empty(n)
    dist.all_to_all_single(out, torch.arange(float(n)) + 10 * r)
    assert out.tolist() == [10.0 * i + r for i in range(n)]
    outs = [torch.empty(1) for _ in range(n)]
    try:
        dist.all_to_all(outs, [torch.tensor([100.0 * r + i]) for i in range(n)])
    except RuntimeError as error:  # the inner gloo of torch 2.11 lacks it
        assert "Backend gloo does not support alltoall" in str(error)
    else:
        assert [each.item() for each in outs] == [100.0 * i + r for i in range(n)]
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=30), wait_all_ranks=True)


def objects(r: int, n: int) -> None:
    every: list[Any] = [None] * n
    dist.all_gather_object(every, {"rank": r})
    assert every == [{"rank": i} for i in range(n)]
    said = [f"from {r}"]
    dist.broadcast_object_list(said, src=1)
    assert said == ["from 1"]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"to {i}" for i in range(n)] if r == 0 else None)
    assert mine == [f"to {r}"]
    dist.gather_object(r, every if r == 0 else None)
    assert r != 0 or every == list(range(n))


def point_to_point(r: int, n: int) -> None:
    right, left = (r + 1) % n, (r - 1) % n
    x, y = torch.full((4,), float(r)), torch.empty(4)
    sending = dist.isend(x, right)
    dist.recv(y, left)
    sending.wait()
    assert y.tolist() == [float(left)] * 4
    if r == 0:  # from any rank
        heard = {dist.recv(y): y[0].item() for _ in range(n - 1)}
        assert heard == {i: float(i) for i in range(1, n)}
    else:
        dist.send(x, 0)
    y.zero_()
    dist.barrier()
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]
    )
    for request in requests:
        request.wait()
    assert y.tolist() == [float(left)] * 4


CHECKS: tuple[Case, ...] = (
    collectives,
    objects,
    point_to_point,
)

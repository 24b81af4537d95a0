"""Groups from creation to destruction: names, sequence numbers, bad input, deadlines."""

import datetime
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed
from support import torch_cases as tc
from torch.distributed.device_mesh import init_device_mesh

import cgx_ops
from cgx_ops import Communicator, Config
from cgx_ops.torch import BackendOptions, compressed
from cgx_ops.torch.backend.process_group import options_of

from .common import NEAREST, Case, dist, inputs_of_ranks


def groups(r: int, n: int) -> None:
    known = Communicator.find("0")
    assert (known.rank, known.size) == (r, n)
    members = list(range(n - 1))
    group = dist.new_group(members)
    if r in members:
        x = torch.ones(100)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [n - 1] * 100
        assert Communicator.find(group.group_name).size == n - 1
    alone = [dist.new_group([i]) for i in range(n)]
    for dtype in (torch.float32, torch.int64):
        x = torch.full((20,), r + 1, dtype=dtype)
        dist.all_reduce(x, group=alone[r])
        assert x.tolist() == [r + 1] * 20
    swapped, _ = dist.new_subgroups_by_enumeration([list(range(n))])
    x = torch.ones(3)
    dist.all_reduce(x, group=swapped)
    assert x.tolist() == [n] * 3

    if n == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for axis, stride in (("replicate", 2), ("shard", 1)):
            mesh_group = mesh.get_group(axis)
            x = torch.tensor([float(r)])
            dist.all_reduce(x, group=mesh_group)
            assert x.item() == 2 * r + (stride if not (r // stride) % 2 else -stride)
            assert Communicator.find(mesh_group.group_name).size == 2

    world = dist.group.WORLD
    assert world is not None
    halves = [list(range(n // 2)), list(range(n // 2, n))]
    own = next(half for half in halves if r in half)
    part = world.split_group(own, group_name=f"part {own[0]}")
    x = torch.ones(40)
    part.allreduce([x]).wait()
    assert x.tolist() == [len(own)] * 40
    y = torch.ones(4, dtype=torch.int64)
    part.allreduce([y]).wait()
    assert y.tolist() == [len(own)] * 4
    part.shutdown()
    with pytest.raises(cgx_ops.NotFound):
        Communicator.find(f"part {own[0]}")
    again = world.split_group(own, group_name=f"part {own[0]}")  # the name can be reused
    again.allreduce([x]).wait()
    assert x.tolist() == [len(own) ** 2] * 40
    again.shutdown()
    own_way: Any = dist.new_group(list(range(n)), pg_options=BackendOptions(Config(bits=2)))
    part = own_way.split_group(list(range(n)), group_name="part of its own way")
    # Ranks as dist.split_group() lists them; that function accepts groups of accelerators only.
    with mock.patch.dict(dist.distributed_c10d._world.pg_backend_config, {part: "cpu:cgx"}):
        options = options_of(part)
    assert options is not None and options.config.bits == 2
    part.shutdown()
    dist.destroy_process_group(own_way)
    for each in (group, alone[r], swapped):
        if each is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(each)


def sequence_numbers(r: int, n: int) -> None:
    world = dist.group.WORLD
    assert world is not None
    backend = world._get_backend(torch.device("cpu"))
    before = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3, dtype=torch.int64))
    dist.broadcast(torch.ones(3), 0)
    assert backend._get_sequence_number_for_group() - before == 3
    every: list[Any] = [None] * n
    dist.all_gather_object(every, before)
    assert every == [before] * n


def profiler(r: int, n: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        with compressed(NEAREST):
            dist.all_reduce(torch.ones(10, 100))
        dist.broadcast(torch.ones(5), 0)
        dist.barrier()
    names = [event.name for event in seen.events() or []]
    assert any(name.startswith("cgx:all_reduce 4 bits, 4000 -> ") for name in names), names
    assert "cgx:broadcast" in names and "cgx:barrier" in names, names


def bad_input(r: int, n: int) -> None:
    with pytest.raises(ValueError, match="share memory"):
        dist.all_reduce(torch.ones(1).expand(20))
    with pytest.raises(TypeError, match=r"must be\s*cgx_ops\.torch\.BackendOptions"):
        dist.new_group(pg_options=Config())
    with pytest.raises(ValueError, match="'gradients' or 'all'"):
        BackendOptions(compress="everything")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="it must be a Config"):
        BackendOptions(4)  # pyright: ignore[reportArgumentType]
    world = dist.group.WORLD
    assert world is not None
    for wrong in ([], [torch.ones(2), torch.ones(2).half()]):
        with pytest.raises((ValueError, RuntimeError)):
            world.allreduce_coalesced(wrong).wait()
    with pytest.raises(ValueError, match="startCoalescing"):
        world._end_coalescing(torch.device("cpu"))
    # DistBackendError; with TORCH_DISTRIBUTED_DEBUG=DETAIL torch checks first.
    with pytest.raises(RuntimeError, match=r"100(.|\n)*101|101(.|\n)*100"):
        dist.all_reduce(torch.ones(100 + min(r, 1)))
    dist.barrier()
    x = torch.ones(20)
    dist.all_reduce(x)  # the group still works
    assert x.tolist() == [n] * 20


def recreated_groups(r: int, n: int) -> None:
    """Destroy and recreate the group over the launcher's store, over one store, and over files."""
    x = torch.ones(30)

    def check() -> None:
        y = x.clone()
        dist.all_reduce(y)
        assert y.tolist() == [n] * 30
        z = torch.ones(3, dtype=torch.int64)
        dist.all_reduce(z)
        assert z.tolist() == [n] * 3

    folder: list[Any] = [tempfile.mkdtemp() if r == 0 else None]
    dist.broadcast_object_list(folder)
    dist.destroy_process_group()
    for attempt in range(2):
        store = dist.FileStore(str(Path(folder[0], f"store{attempt}")), n)
        for again in range(2):
            one = dist.PrefixStore(str(again), store)
            dist.init_process_group("cgx", store=one, rank=r, world_size=n)
            check()
            dist.destroy_process_group()
            with pytest.raises(cgx_ops.NotFound):
                Communicator.find("0")
    options = BackendOptions(Config(bits=8, rounding="nearest"))
    method = f"file://{folder[0]}/last"
    dist.init_process_group("cgx", init_method=method, rank=r, world_size=n, pg_options=options)
    group = dist.new_group()  # has the options of the default group
    y = tc.values(r, 2000)
    with compressed():
        dist.all_reduce(y, group=group)
    assert tc.same_bits(y, tc.expected(inputs_of_ranks(n, 2000), 8, algorithm="auto"))
    check()


def deadlines(r: int, n: int) -> None:
    """Check that the others get an error in time that names a missing rank and the call."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1.5))
    x = torch.ones(1000)
    dist.all_reduce(x, group=group)
    begun = time.monotonic()
    if r != 1:
        with pytest.raises(dist.DistBackendError, match=r"rank 1(.|\n)*c10d|c10d(.|\n)*rank 1"):
            dist.all_reduce(x, group=group)
        assert 1 < time.monotonic() - begun < 15
    else:
        time.sleep(4)
    # The deadline of an operation, and of wait().
    world = dist.group.WORLD
    assert world is not None
    dist.barrier()
    work: Any = None
    if r != 1:
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(dist.DistBackendError, match="100 ms given to wait"):
            work.wait(datetime.timedelta(milliseconds=100))
    dist.barrier()
    if r == 1:
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    lasting = dist.new_group()
    options = dist.AllreduceOptions()
    options.timeout = datetime.timedelta(seconds=1)
    if r != 1:
        with pytest.raises(dist.DistBackendError):
            lasting.allreduce([x], options).wait()
    dist.barrier()
    dist.destroy_process_group(lasting)
    dist.destroy_process_group(group)


CHECKS: tuple[Case, ...] = (
    groups,
    sequence_numbers,
    profiler,
    bad_input,
    recreated_groups,
    deadlines,
)

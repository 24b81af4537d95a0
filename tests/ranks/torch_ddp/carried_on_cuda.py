"""CudaCarrier, with a stand-in for the GPU (support/cuda_carrier_on_cpu.py).

Results and residuals are compared bit for bit with those of CpuCarrier.
"""

import datetime
from typing import Any

import torch
import torch.distributed as dist
from support import torch_cases as tc
from support.cuda_carrier_on_cpu import CPU, cuda_carriers
from torch.nn.parallel import DistributedDataParallel

from cgx_ops import Config, Segment
from cgx_ops.torch import ddp
from cgx_ops.torch.averaging.exchange import Exchange
from cgx_ops.torch.graph.carried import Carrier
from cgx_ops.torch.graph.carried_on_cpu import CpuCarrier
from torch_ddp.common import RANK, SIZE, gradients_of, hooked, images, network, same

SIZES = (0, 1, 17, 511, 512, 513, 40_000)


def gloo(seconds: float = 60) -> Any:
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=seconds))


def averages(carrier: Carrier) -> list[torch.Tensor]:
    """Return the results and residuals of averages of several sizes, algorithms and layouts."""
    outcomes = []
    for numel in SIZES:
        for algorithm in ("sra", "one_shot"):
            config: Any = Config(bits=4, bucket_size=64, algorithm=algorithm)
            x, residual = tc.values(RANK, numel), tc.values(RANK, numel, call=1) / 8
            half = numel // 2
            segments = [Segment(0, half), Segment(half, numel - half)]
            parts = [residual[:half], residual[half:]]
            future = carrier.start(
                x, config, op="avg", segments=segments, seed=[7, 8], residuals=parts
            )
            assert future.wait() is x
            outcomes += [x, residual]
    return outcomes


def equals_the_cpus() -> None:
    group = gloo()
    want = averages(CpuCarrier(group))
    with cuda_carriers() as stand_in:
        got = averages(stand_in.carrier(group))
    assert all(map(tc.same_bits, got, want))


def order() -> None:
    """Check the order of operations, their stream, and which memory is kept for it."""
    config, x, residual = Config(algorithm="sra"), tc.values(RANK, 5000), torch.zeros(5000)
    result = torch.zeros(3)
    with cuda_carriers() as stand_in:
        carrier = stand_in.carrier(gloo())
        future = carrier.start(
            x, config, op="sum", segments=[Segment(0, 5000)], seed=[1], residuals=[residual],
            then=lambda: stand_in.log.append(f"then on {stand_in.current.name}"), result=result,
        )  # fmt: skip
    assert future.value() is result
    assert stand_in.log == [
        "side waits for caller",
        "encode on side",
        "all_to_all on side",
        "reduce on side",
        "all_gather on side",
        "decode on side",
        "then on side",
        "result on side",
    ]
    assert stand_in.recorded == {each.data_ptr() for each in (x, residual, result)}


def backward_passes(hook: Any, make: Any, group: Any) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of three steps. The noise depends on the group's name."""
    model = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=0.002)
    model.register_comm_hook(make(process_group=group, carrier="c10d"), hook)
    found = []
    for step in range(3):
        model.zero_grad()
        model(images(RANK, step), spare=True).square().sum().backward()
        found.append(gradients_of(model))
    return found


def data_parallel() -> None:
    """Check hooks with one message per bucket, and with messages that follow others."""
    cases: list[tuple[Any, Any]] = [
        (ddp.quantized_allreduce_hook, lambda **o: ddp.QuantizedAllreduceState(bits=2, **o)),
        (ddp.power_sgd_hook, lambda **o: ddp.PowerSGDState(start_powerSGD_iter=2, **o)),
        (
            ddp.power_sgd_hook,
            lambda **o: ddp.PowerSGDState(
                start_powerSGD_iter=2, warm_start=False, use_error_feedback=False, **o
            ),
        ),
        (ddp.deep_gradient_hook, lambda **o: ddp.DeepGradientState(density=0.05, **o)),
    ]
    group = gloo()
    for hook, make in cases:
        want = backward_passes(hook, make, group)
        with cuda_carriers() as stand_in:
            got = backward_passes(hook, make, group)
            assert "all_gather on side" in stand_in.log, hook
            assert not stand_in.freed(), (hook, stand_in.freed())
        for step in range(3):
            same(got[step], want[step], (hook, step))


def means_over_senders() -> None:
    x, config = tc.values(RANK, 5000), Config(compressor="topk", density=0.1)
    with cuda_carriers() as stand_in:
        exchange = Exchange("caller", gloo(), config, "c10d")
        exchange.start(["x"], [x], of_senders=True).wait()
        assert stand_in.log.count("encode on side") == 2
        assert not stand_in.freed(), stand_in.freed()


def failing_rank() -> None:
    """A rank that cannot start a message is named when the group's timeout has passed."""
    whole: dict[str, Any] = {"op": "sum", "segments": [Segment(0, 600)], "seed": [1]}
    with cuda_carriers() as stand_in:
        carrier = stand_in.carrier(gloo(3))
        if RANK == SIZE - 1:
            carrier.refuse(ValueError("no gradient"))
        future = carrier.start(torch.ones(600), Config(), **whole)
        try:
            future.wait()
        except RuntimeError as error:
            assert f"rank {SIZE - 1} failed first: ValueError: no gradient" in str(error), error
        else:
            raise AssertionError("nothing was raised")
    dist.barrier()


def invalid_calls() -> None:
    """Errors of arguments are those of the core, in the future."""
    with cuda_carriers() as stand_in:
        carrier = stand_in.carrier(gloo())
        call: dict[str, Any] = {"op": "sum", "segments": [Segment(0, 9)], "seed": [1]}
        future = carrier.start(torch.ones(9), Config(), residuals=[torch.zeros(8)], **call)
        try:
            future.wait()
        except RuntimeError as error:
            assert "a residual has 8 elements" in str(error), error
        else:
            raise AssertionError("nothing was raised")
    _, state = hooked(network(), carrier="c10d", process_group=gloo())
    assert isinstance(state.carry(CPU), CpuCarrier)


def one_carrier() -> None:
    """All GPUs have one carrier, so that a failure on one ends the messages of all."""
    # gloo is refused for CUDA tensors, but not in a group of one rank.
    groups = [dist.new_group([rank], backend="gloo") for rank in range(dist.get_world_size())]
    group = groups[RANK]
    assert isinstance(group, dist.ProcessGroup)
    state = ddp.QuantizedAllreduceState(group, carrier="c10d")
    first, second = (state.carry(torch.device("cuda", index)) for index in range(2))
    assert first is second and first is not state.carry(CPU)


CHECKS = [
    equals_the_cpus,
    order,
    data_parallel,
    means_over_senders,
    failing_rank,
    invalid_calls,
    one_carrier,
]

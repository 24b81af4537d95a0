"""Print what a user sees on stderr when training starts and ends. Usage: run_log.py HOW."""

import logging
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cgx_ops
import cgx_ops.torch
from cgx_ops import Config
from cgx_ops.torch import ddp, fsdp

HOW = sys.argv[1]
STEPS = 5
CARRIER = "c10d" if "carried" in HOW else "native"
dist.init_process_group("gloo" if CARRIER == "c10d" else "cgx")
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
call: nn.Module = model
if HOW == "decisions":
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("cgx_ops.torch.backend").setLevel(logging.DEBUG)
if HOW in ("hook", "carried hook", "decisions"):
    call = DistributedDataParallel(model)
    state = ddp.QuantizedAllreduceState(config=Config(bits=4), carrier=CARRIER)  # type: ignore[arg-type]
    call.register_comm_hook(state, ddp.quantized_allreduce_hook)  # type: ignore[arg-type]
if HOW == "power_sgd":
    call = DistributedDataParallel(model)
    ddp.CommHookType.POWER_SGD.register(call, start_powerSGD_iter=2)
if HOW == "automatic":
    call = DistributedDataParallel(model)
if "fsdp" in HOW:
    fully_shard(model[0])
    fully_shard(model)
if HOW == "fsdp":
    fsdp.compress(model, Config(bits=4))
for _ in range(STEPS):
    if "operators" in HOW:
        torch.ops.cgx.quantized_allreduce(torch.randn(60_000), op="avg", carrier=CARRIER)
    else:
        model.zero_grad()
        call(torch.randn(8, 256)).square().mean().backward()
if dist.get_rank() == 0 and HOW != "exact fsdp":
    found = cgx_ops.stats()
    row = found["carrier" if CARRIER == "c10d" else "0"]
    assert row.collectives >= STEPS, row
    assert HOW == "power_sgd" or row.ratio > 6, row
    lines = str(found).splitlines()
    assert lines[0].split()[:4] == ["name", "rank", "transport", "collectives"]
    assert len(lines) == 1 + len(found)
dist.destroy_process_group()

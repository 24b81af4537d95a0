"""Checks shared by the hooks that have their own method: PowerSGD and Deep Gradient Compression.

A `Method` describes such a hook and creates models with it.
"""

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from failing import fails
from shared_folder import folder_of_all
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.parallel import DistributedDataParallel
from torch_training import RANK, backward, batch, loss_of, network, train

from cgx_ops import Communicator, InvalidArgument
from cgx_ops.torch import ddp
from cgx_ops.torch.ddp import models as ddp_models


@dataclass(frozen=True)
class Method:
    """A communication hook with a state.

    Attributes:
        hook, state: the hook function, and the class of its state.
        hooked: hooked(module, **options) returns a model with the hook, and the hook's state.
        kept: returns a state's tensors and the other values of a checkpoint, by name.
    """

    hook: Any
    state: type
    hooked: Callable[..., Any]
    kept: Callable[[Any], dict[str, Any]]


def same(got: dict[str, Any], want: dict[str, Any], what: object = "") -> None:
    assert got.keys() == want.keys(), (what, got.keys(), want.keys())
    for name, x in want.items():
        equal = torch.equal(got[name], x) if isinstance(x, torch.Tensor) else got[name] == x
        assert equal, (what, name)


def buckets(method: Method, messages: int) -> list[Any]:
    """Check that averages do not depend on DDP's buckets.

    Covers the steps before DDP rebuilds its buckets, and the number of messages of one bucket.
    Returns one state for each bucket configuration.
    """
    want, states = None, []
    for wrapper in ({}, {"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": True}):
        model, state = method.hooked(wrapper=wrapper)
        weights = train(model, range(6))
        assert want is None or torch.equal(weights[-1], want), wrapper
        want = weights[-1]
        comm = Communicator.find(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        before = comm.collectives
        backward(model, 6)
        one = wrapper.get("bucket_cap_mb") is None
        assert (comm.collectives - before == messages) == one, (wrapper, comm.collectives - before)
        states.append(state)
    return states


def carried_by_torch(method: Method, **options: Any) -> None:
    """Check that carrier="c10d" over gloo, with many buckets, gives the same bits."""
    gloo = dist.new_group(backend="gloo")
    want = train(method.hooked(**options)[0], range(5))
    wrapper = {"bucket_cap_mb": 0.001, "process_group": gloo}
    other = method.hooked(**options, wrapper=wrapper, carrier="c10d", process_group=gloo)
    assert torch.equal(train(other[0], range(5))[-1], want[-1]), options


def resumed(method: Method, end: int, **options: Any) -> None:
    """Check that training resumes at step 4 with the same bits, for every form of checkpoint."""
    for form in ("torch", "in place", "dcp"):
        with folder_of_all() as folder:
            file = f"{folder}/{RANK}.pt"
            model, state = method.hooked(**options)
            train(model, range(4))
            weights = copy.deepcopy(model.module.state_dict())
            if form == "dcp":
                dcp_save({"cgx": state}, checkpoint_id=folder)
            else:
                torch.save(state if form == "torch" else state.state_dict(), file)
            want = train(model, range(4, end))

            module = network()
            if form == "torch":
                again, restored = DistributedDataParallel(module), torch.load(file)
                again.register_comm_hook(restored, method.hook)
            else:
                again, restored = method.hooked(module, **options)
                train(again, range(3))
                if form == "dcp":
                    dcp_load({"cgx": restored}, checkpoint_id=folder)
                else:
                    restored.load_state_dict(torch.load(file))
            module.load_state_dict(weights)
            got = train(again, range(4, end))
            assert torch.equal(got[-1], want[-1]), (options, form)
            same(method.kept(restored), method.kept(state), (options, form))


def bad_gradients(method: Method) -> None:
    model, _ = method.hooked(network(torch.float64))
    words = "'0.weight', '0.bias', '2.weight', '2.bias' are torch.float64"
    fails(Exception, words, lambda: backward(model, 0))
    model, _ = method.hooked(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2)))
    loss = model(torch.arange(8)).sum()
    fails(Exception, "make the layer with sparse=False", loss.backward)
    model, _ = method.hooked(nn.Linear(4, 4, dtype=torch.complex64))
    loss = model(torch.ones(2, 4, dtype=torch.complex64)).abs().sum()
    fails(Exception, "torch.complex64; train it in float32", loss.backward)


def bad_states(method: Method) -> None:
    """Check that another hook's state and unknown layer names are rejected."""
    model, state = method.hooked()
    train(model, range(2))
    other, name = ddp.QuantizedAllreduceState(), method.state.__name__
    fails(
        InvalidArgument, f"{name}.load_state_dict: the keys are",
        lambda: state.load_state_dict(other.state_dict()),
    )  # fmt: skip
    loss = loss_of(model, batch(RANK, 2))
    del ddp_models._known[model]
    gc.freeze()  # hides the model from the hook's search through the garbage collector
    fails(Exception, "settings and state are stored by layer", loss.backward)

    model = DistributedDataParallel(network())
    model.register_comm_hook(other, method.hook)  # type: ignore[arg-type]
    words = f"state is QuantizedAllreduceState; it must be a {name}"
    fails(Exception, words, lambda: backward(model, 0))

"""Program: Ray Train with two workers over the backend "cgx"; a second run resumes half way.

Ray starts the workers, so this program runs once.
"""

# pyright: reportMissingImports=false
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from common import BATCH, EPOCHS, digest, examples, network
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader

import cgx_ops.torch


def import_cgx() -> None:
    import cgx_ops.torch  # noqa: F401


def train(settings: dict[str, Any]) -> None:
    """Train in one worker, from the checkpoint in `settings` if there is one."""
    model = prepare_model(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    state = cgx_ops.torch.hook_state(model)
    assert state is not None  # the backend has registered its hook
    first = 0
    if settings["checkpoint"]:
        with Checkpoint(settings["checkpoint"]).as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"))
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.load_state_dict(saved["cgx"])
        first = saved["epoch"]
    loader = prepare_data_loader(DataLoader(examples(), batch_size=BATCH, shuffle=True))
    losses = []
    for epoch in range(first, EPOCHS):
        loader.sampler.set_epoch(epoch)
        total = torch.zeros(())
        for points, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(loader)
        losses.append(float(total))
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                saved |= {"cgx": state.state_dict(), "epoch": epoch + 1}
                torch.save(saved, Path(folder, "state.pt"))
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report(facts(losses, model), checkpoint=checkpoint)


def facts(losses: list[float], model: nn.Module) -> dict[str, Any]:
    """Return the values for the test's report; Ray keeps those of rank 0."""
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest(model))
    ratio = cgx_ops.stats()["0"].ratio  # "0" is torch's name of the default group
    return {"losses": losses, "ratio": ratio, "digests": digests}


def main(folder: Path) -> None:
    runtime_env = {
        "worker_process_setup_hook": import_cgx,
        "env_vars": {"CGX_COMPRESSION_QUANTIZATION_BITS": "4"},
    }
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=runtime_env)

    def fit(name: str, checkpoint: str | None = None) -> ray.train.Result:
        trainer = TorchTrainer(
            train,
            train_loop_config={"checkpoint": checkpoint},
            scaling_config=ScalingConfig(num_workers=2),
            torch_config=TorchConfig(backend="cgx"),
            run_config=RunConfig(name=name, storage_path=str(folder)),
        )
        return trainer.fit()

    first = fit("first")
    half = first.best_checkpoints[EPOCHS // 2 - 1][0]
    second = fit("second", half.path)
    print(json.dumps([first.metrics, second.metrics]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

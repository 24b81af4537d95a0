"""Rank program: Lightning's Trainer over the backend "cgx"; a second one resumes half way."""

# pyright: reportMissingImports=false
import sys
from pathlib import Path

import lightning
import torch
from common import BATCH, EPOCHS, examples, network, report
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from cgx_ops.torch.integrations.lightning import SaveHookState


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)  # an average of integers, too
        return loss

    def on_train_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss_epoch"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def fit(folder: Path, checkpoint: Path | None = None) -> Classifier:
    saved = ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="cgx"),
        callbacks=[saved, SaveHookState()],
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
    )
    model = Classifier()
    loader = DataLoader(examples(), batch_size=BATCH, shuffle=True)
    trainer.fit(model, loader, ckpt_path=checkpoint, weights_only=False)
    return model


def main(folder: Path) -> None:
    first = fit(folder)
    second = fit(folder / "second", folder / f"epoch={EPOCHS // 2 - 1}.ckpt")
    report(first.losses, first, second)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""SaveHookState: a callback by which Lightning's checkpoints hold the communication hook's state.

    trainer = lightning.Trainer(strategy=DDPStrategy(process_group_backend="cgx"),
                                callbacks=[SaveHookState()], ...)

Lightning saves no state of communication hooks. Nothing else of cgx_ops imports Lightning.
"""

# pyright: reportMissingImports=false
from typing import Any

import lightning.pytorch as pl

from cgx_ops.torch.integrations import trainer_state


class SaveHookState(pl.Callback):
    """Save and restore the state of the hook of cgx_ops, so that a resumed run has the same bits.

    The checkpoint is one for all ranks: residuals, if there are any, are made their mean over the
    ranks when it is saved, and it loads on any number of ranks. A model without a hook of cgx_ops
    has no state; nothing happens then.
    """

    def __init__(self) -> None:
        self._restored: dict[str, Any] | None = None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the state to a checkpoint: Lightning calls this on all ranks."""
        state = trainer_state.save_for_all_ranks(trainer.strategy.model)
        if state is not None:
            checkpoint["cgx_ops"] = state

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the state until the model is wrapped."""
        self._restored = checkpoint.get("cgx_ops")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore it."""
        if self._restored is not None:
            trainer_state.restore(trainer.strategy.model, self._restored)
        self._restored = None

"""SaveHookState: a callback that adds the communication hook's state to Lightning's checkpoints.

Lightning does not save it. No other module of cgx_ops imports Lightning.
"""

# pyright: reportMissingImports=false
from typing import Any

import lightning.pytorch as pl

from cgx_ops.torch.integrations import trainer_state


class SaveHookState(pl.Callback):
    """Lightning callback that saves the hook's state, so that a run resumes bit for bit.

    The checkpoint is the same for all ranks and loads on any number of ranks: on saving, residuals,
    if there are any, are replaced by their mean over the ranks. For a model without a hook of
    cgx_ops, the callback does nothing.

    Example:
        Pass the callback to the trainer. Nothing else is needed:

        >>> import lightning.pytorch as pl
        >>> from lightning.pytorch.strategies import DDPStrategy
        >>> from cgx_ops.torch.integrations.lightning import SaveHookState
        >>> trainer = pl.Trainer(
        ...     accelerator="cpu",
        ...     strategy=DDPStrategy(process_group_backend="cgx"),
        ...     callbacks=[SaveHookState()],
        ... )
    """

    def __init__(self) -> None:
        self._restored: dict[str, Any] | None = None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the state to a checkpoint. Lightning calls this on all ranks.

        Args:
            trainer: the trainer.
            pl_module: the module.
            checkpoint: the checkpoint, which gets the key "cgx_ops".
        """
        state = trainer_state.save_for_all_ranks(trainer.strategy.model)
        if state is not None:
            checkpoint["cgx_ops"] = state

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Read the state from a checkpoint, for on_train_start().

        Args:
            trainer: the trainer.
            pl_module: the module.
            checkpoint: the checkpoint.
        """
        self._restored = checkpoint.get("cgx_ops")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the state, after Lightning has wrapped the model.

        Args:
            trainer: the trainer.
            pl_module: the module.
        """
        if self._restored is not None:
            trainer_state.restore(trainer.strategy.model, self._restored)
        self._restored = None

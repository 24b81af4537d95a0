"""Rank program: transformers' Trainer over the backend "cgx"; a second one resumes half way."""

# pyright: reportMissingImports=false, reportArgumentType=false
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from common import report
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from cgx_ops.torch.integrations.transformers import SaveHookState

_WORDS, _LENGTH, _STEPS = 64, 16, 60


def sequences() -> list[dict[str, torch.Tensor]]:
    """Return texts that count up, each from a different word."""
    texts = (torch.arange(first, first + _LENGTH) % _WORDS for first in range(_WORDS))
    return [{"input_ids": text, "labels": text} for text in texts]


def train(folder: Path, resume_from: Path | None = None) -> Trainer:
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=_WORDS, n_positions=_LENGTH, n_embd=64, n_layer=2, n_head=2)
    )
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=_STEPS,
        save_steps=_STEPS // 2,
        logging_steps=5,
        learning_rate=3e-3,
        per_device_train_batch_size=8,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=sequences())
    trainer.add_callback(SaveHookState(trainer))
    trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    return trainer


def main(folder: Path) -> None:
    dist.init_process_group("cgx")
    first = train(folder)
    second = train(folder, folder / f"checkpoint-{_STEPS // 2}")
    losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    report(losses, first.model, second.model)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

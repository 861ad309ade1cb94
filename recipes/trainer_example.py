"""The same idea with transformers' Trainer, for those who prefer it: patch first, then train as always.

    python recipes/trainer_example.py --model gpt2 --data book.txt --scheme alibi --output runs/trainer

Trainer knows nothing of the patch and need not: checkpoints reload as what they are, resuming is exact. What the full
recipe has beside it: measurement before and after, recovery from the base, a report.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator
from transformers.trainer_utils import get_last_checkpoint

import hf_posenc
from hf_posenc.recipes import corpus, identity, models, program, training
from hf_posenc.recipes.corpus import Text, TextArguments, Windows
from hf_posenc.recipes.models import ModelArguments, load_named
from hf_posenc.recipes.options import UsageError, as_in, at_least, parse
from hf_posenc.recipes.results import write_json
from hf_posenc.recipes.run_folder import FolderArguments
from hf_posenc.recipes.schemes import SchemeArguments, hyperparameters


@dataclass
class Arguments(SchemeArguments, ModelArguments, TextArguments):
    """What to train on what; the rest is transformers' TrainingArguments, set below."""

    train_length: int = as_in(training.TrainingArguments, "train_length")
    steps: int = as_in(training.TrainingArguments, "steps", 100)
    learning_rate: float | None = as_in(training.TrainingArguments, "learning_rate", 2e-4)
    output: str = as_in(FolderArguments, "output", "runs/trainer")
    resume: bool = as_in(FolderArguments, "resume")


class TrainerWindows(Dataset):
    """Windows as Trainer wants them: the model itself shifts `labels`."""

    def __init__(self, windows: Windows):
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch = self.windows.batch([index])
        # Shifted back: what is not to be predicted stays so, as of chats what others than the assistant say.
        labels = torch.cat([torch.tensor([corpus.IGNORED]), batch["targets"][0, :-1]])
        return {"input_ids": batch["input_ids"][0], "labels": labels}


def main(argv: list[str] | None = None) -> Trainer:
    """Patches, trains, saves; returns the trainer."""
    arguments, parser = parse(Arguments, argv, __doc__)
    try:
        if arguments.model is None:
            raise UsageError("--model DIR_OR_ID is missing")
        at_least(arguments, 1, "steps")
        at_least(arguments, 2, "train_length")
        output = Path(arguments.output)
        there = get_last_checkpoint(output) if output.is_dir() else None
        if arguments.resume and there is None:
            raise UsageError(f"--resume: there is no checkpoint in {output} to go on from: leave it out")
        if there and not arguments.resume:
            raise UsageError(
                f"--output {output} holds checkpoints: --resume goes on from them, or choose another folder"
            )
        corpus.check(arguments, needs_data=True)
        models.check(arguments)
        tokenizer = load_named(AutoTokenizer, arguments)
        model = load_named(AutoModelForCausalLM, arguments)
        hf_posenc.patch_model(model, arguments.scheme, **hyperparameters(arguments.scheme_args))
        documents = corpus.documents(tokenizer, arguments, None, arguments.steps * arguments.train_length)
        windows = Windows(documents, arguments.train_length, "concatenate")
        if not len(windows):
            raise UsageError(f"the text has fewer than --train-length {arguments.train_length} tokens")
        of = identity.of(
            arguments,
            Text(len(documents), documents, []),
            scheme=model.config.position_encoding,
            processes=int(os.environ.get("WORLD_SIZE", "1")),
        )
        if arguments.resume:
            identity.hold(output, of, "resume with those, or choose another --output")
        else:
            write_json(output / "progress.json", {"identity": of})
    except (UsageError, hf_posenc.HfPosencError, TypeError, ValueError) as error:
        parser.error(str(error))
    trainer = Trainer(
        model,
        TrainingArguments(
            arguments.output,
            max_steps=arguments.steps,
            learning_rate=arguments.learning_rate,
            per_device_train_batch_size=1,
            lr_scheduler_type="cosine",
            logging_steps=10,
            save_steps=50,
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=TrainerWindows(windows),
        processing_class=tokenizer,
        data_collator=default_data_collator,  # the windows are of one length; the one for a tokenizer would want to pad
    )
    trainer.train(resume_from_checkpoint=arguments.resume or None)
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    program.start(main)

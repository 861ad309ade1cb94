"""Swap, calibrate and fine-tune with transformers' own Trainer.

Put your checkpoint for "gpt2" and your text for "book.txt", then run `python recipes/trainer_example.py`. Trainer sees an
ordinary model: its checkpoints load as what they are, and resuming is exact.

The recipes have a loop of their own, hf_posenc/recipes/training.py, for what Trainer does not do: phases at different lengths, the base as
a teacher, rates that are tried and taken back, and windows that stay the same on any number of processes. If you need none of these,
this file is enough.
"""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from hf_posenc import Matching, calibrate, patch_model

model = AutoModelForCausalLM.from_pretrained("gpt2")
tokenizer = AutoTokenizer.from_pretrained("gpt2")
tokens = tokenizer(Path("book.txt").read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[0]
length = min(256, model.config.max_position_embeddings)  # calibrate at a length that the base was trained at

patch_model(model, "transformer_xl", seed=0)
print(calibrate(model, tokens.unfold(0, length, length)[:400], matching=Matching(steps=50)))

windows = tokens.unfold(0, 4 * length, 4 * length)  # train on windows as long as you want to reach
settings = TrainingArguments(
    "runs/trainer", learning_rate=3e-4, per_device_train_batch_size=4, max_steps=100, save_steps=50, logging_steps=10
)
trainer = Trainer(model, settings, train_dataset=[{"input_ids": window, "labels": window} for window in windows])
trainer.train()
trainer.save_model("runs/trainer/model")
tokenizer.save_pretrained("runs/trainer/model")

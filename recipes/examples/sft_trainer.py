"""Swap, calibrate and fine-tune with TRL's SFTTrainer.

    python recipes/examples/sft_trainer.py                                             # a tiny model, made on the spot
    python recipes/examples/sft_trainer.py --model gpt2 --data lines.txt --output runs/sft

Run it in a clone, after `pip install -e '.[recipes,trl]'` there. SFTTrainer sees an ordinary transformers model, so chats
(a base with a chat template, a data set with a column `messages`) work in the same way; calibrate with their text.
"""

import argparse
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

import hf_posenc
from hf_posenc.recipes.embedded import byte_tokenizer

LINES = ["the cat sat on the mat and the dog sat on the log", "one two three four five six seven eight nine ten"]


def stock(name):
    """Return tokenizer and model of a checkpoint; without a name, an untrained byte-level LLaMA of 80 thousand weights."""
    if name is not None:
        return AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name)
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["max_position_embeddings"] = 64
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return tokenizer, LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **ids, **sizes))


def texts(path):
    """Return one example for each line of a file; without a file, a few lines many times."""
    lines = LINES * 16 if path is None else Path(path).read_text(encoding="utf-8").splitlines()
    return Dataset.from_dict({"text": [line for line in lines if line.strip()]})


def windows(model, tokenizer, data):
    """Return text to calibrate with: (N, T) token ids, T at most the length the base was trained at. Call before patching."""
    length = min(256, model.config.max_position_embeddings)
    tokens = tokenizer("\n".join(data["text"]), return_tensors="pt", verbose=False).input_ids[0]
    return tokens.unfold(0, length, length)[:400]


def settings(options):
    """Return TRL's settings. `bf16=False`, because the default rounds on processors that have bfloat16."""
    return SFTConfig(
        options.output,
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        per_device_train_batch_size=4,
        max_length=256,
        bf16=False,
        logging_steps=1,
        packing=options.packing,
        save_strategy="no",
        report_to="none",
    )


def arguments(argv, description):
    """Return the parser of the options that both examples have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", help="folder or Hub id of a stock checkpoint; a tiny one by default")
    parser.add_argument("--data", help="text file, one example in each line")
    parser.add_argument("--scheme", default="transformer_xl", help="position encoding to patch in")
    parser.add_argument("--packing", action="store_true", help="several examples in a window, each seeing only itself")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="at 1e-3 calibrated models got worse")
    parser.add_argument("--output", default="runs/sft")
    return parser


def main(argv=None):
    """Patch, calibrate, train and save; return the trainer."""
    options = arguments(argv, __doc__.split("\n")[0]).parse_args(argv)
    tokenizer, model = stock(options.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    data = texts(options.data)
    text = windows(model, tokenizer, data)
    hf_posenc.patch_model(model, options.scheme, seed=0)
    print(hf_posenc.calibrate(model, text, matching=hf_posenc.Matching(steps=50)))
    trainer = SFTTrainer(model, args=settings(options), train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    print(hf_posenc.inspect(options.output))  # hf_posenc.from_pretrained(options.output) loads it
    return trainer


if __name__ == "__main__":
    main()

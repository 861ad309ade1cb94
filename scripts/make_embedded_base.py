"""Trains the small GPT-2 that comes with the package and writes it, with its README.md, into `embedded_base/`.

    python scripts/make_embedded_base.py

It reads the sources of the Python that runs it, without the modules of `HELD_OUT`. It runs in float32 and takes minutes.
"""

import argparse
import platform
import time
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from hf_posenc.evaluation import non_overlapping_perplexity
from hf_posenc.recipes.embedded import CONTEXT, FOLDER, HELD_OUT, byte_model, byte_tokenizer, library_parts, train_base

README = """\
# The embedded base

A GPT-2 that reads bytes: {weights:,} weights, four layers of width 128, a table of {context} learned positions.
`hf-posenc extend` takes it where no `--model` is given. It is there to have its positions swapped, and good for nothing else.

`model.safetensors` holds float16; `config.json` says float32, and that is what it is loaded in.

| | |
| --- | --- |
| made by | `python scripts/make_embedded_base.py --steps {steps} --batch-size {batch_size} --seed {seed}` |
| training | {steps:,} steps of {batch_size} random windows of {context} bytes, in float32: {bytes_read:,} bytes, {passes:.1f} times the text |
| loss at the end, in nats per byte | {train_loss:.3f} on the training text (mean of the last 100 steps), {held_out_loss:.3f} on the held-out text (windows of {context}; float16 weights) |
| time | {seconds:,.0f} s of one core ({capability}) |
| versions | Python {python}, torch {torch}, transformers {transformers} |

## Its text

The training text is {training_bytes:,} bytes: the top-level modules of the standard library of Python {python} (`Lib/*.py`), each from its beginning to its end.
The [license of Python](https://docs.python.org/3/license.html) covers them (PSF License Agreement; copyright © 2001 Python
Software Foundation, all rights reserved). No text of it is in this folder; the model can write short pieces of it.

Left out, in every version of Python, are the modules that recipes measure on:
{held_out}.
Of their strings of 50 bytes, {shared:.1%} are somewhere in the training text too.
"""


def encode(files: list[Path]) -> torch.Tensor:
    """Return the tokens of files, each followed by the end of text, in a row."""
    tokenizer = byte_tokenizer()
    texts = [path.read_text(encoding="utf-8").strip("\n") for path in files]
    return torch.tensor([token for ids in tokenizer(texts).input_ids for token in [*ids, tokenizer.eos_token_id]])


def shared(training: list[Path], held_out: list[Path], length: int = 50) -> float:
    """Return the share of the held-out strings of a length, in bytes, that the training files have too."""

    def strings(path: Path) -> list[bytes]:
        text = path.read_bytes()
        return [text[start : start + length] for start in range(len(text) - length)]

    known = {string for path in training for string in strings(path)}
    found = [string in known for path in held_out for string in strings(path)]
    return sum(found) / len(found)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=FOLDER)
    options = parser.parse_args()
    training, held_out = library_parts()
    tokens = encode(training)
    torch.manual_seed(options.seed)
    model, start = byte_model(byte_tokenizer()), time.process_time()
    losses = train_base(model, tokens, steps=options.steps, batch_size=options.batch_size)
    seconds = time.process_time() - start

    model.save_pretrained(options.output)
    byte_tokenizer().save_pretrained(options.output)
    weights = options.output / "model.safetensors"
    halved = {name: weight.half() for name, weight in load_file(weights).items()}
    save_file(halved, weights, metadata={"format": "pt"})
    stored = type(model).from_pretrained(options.output, dtype=torch.float32)
    stored.loss_type = "ForCausalLM"
    read = options.steps * options.batch_size * CONTEXT
    (options.output / "README.md").write_text(
        README.format(
            weights=sum(weight.numel() for weight in model.parameters()),
            context=CONTEXT,
            **vars(options),
            bytes_read=read,
            passes=read / len(tokens),
            train_loss=sum(losses[-100:]) / len(losses[-100:]),
            held_out_loss=non_overlapping_perplexity(stored, encode(held_out), length=CONTEXT).loss,
            seconds=seconds,
            capability=torch.backends.cpu.get_cpu_capability(),
            python=platform.python_version(),
            torch=torch.__version__,
            transformers=transformers.__version__,
            training_bytes=len(tokens),
            held_out=", ".join(HELD_OUT),
            shared=shared(training, held_out),
        ),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()

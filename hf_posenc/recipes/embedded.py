"""A small trained byte-level GPT-2 and a text for it, so that a recipe needs no download.

The weights are in the package, in `embedded_base/`. The text consists of the sources of the Python standard library on
this machine. The model reads bytes and has a table of 256 learned positions. It cannot read longer texts until a recipe
gives it another scheme.
"""

import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "embedded_base"
"""The checkpoint: float16 weights, config, tokenizer. `scripts/make_embedded_base.py` writes it."""
HELD_OUT = (
    *("bisect", "calendar", "cmd", "colorsys", "csv", "filecmp", "fileinput", "fractions", "graphlib", "heapq"),
    *("netrc", "quopri", "reprlib", "sched", "shelve", "shlex", "statistics", "textwrap", "timeit", "trace"),
)
"""Modules of the standard library that the base was not trained on. Recipes measure on them under every Python version.

They share almost no code with other modules of Python 3.11 to 3.13: 0.9 % of their 50-byte strings are in the training
text.
"""
CONTEXT = 256
END_OF_TEXT = "<|endoftext|>"


def library_parts() -> tuple[list[Path], list[Path]]:
    """Return the top-level modules of this Python's standard library to train on, and those to measure on (`HELD_OUT`).

    They are sorted by name: about 170 files, 5 MB. `_sysconfigdata` is left out, because it contains paths of the
    machine that built this Python.

    Raises:
        FileNotFoundError: if the installation has no sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_sysconfigdata"))
    if not files:
        raise FileNotFoundError(
            f"no Python sources in {folder} (a zipped or stripped installation?): give --data FILE... instead"
        )
    held_out = [path for path in files if path.stem in HELD_OUT]
    return [path for path in files if path not in held_out], held_out


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 257 tokens: GPT-2's byte alphabet, one token per UTF-8 byte, and `<|endoftext|>`."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def trained_base() -> GPT2LMHeadModel:
    """Load the trained base, in float32 and eval mode."""
    model = GPT2LMHeadModel.from_pretrained(FOLDER, dtype=torch.float32)
    # transformers derives it from the class name. For GPT-2 that fails: it warns, and uses this value.
    model.loss_type = "ForCausalLM"
    return model

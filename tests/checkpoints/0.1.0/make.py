"""Made the checkpoints beside it, with version 0.1.0 of hf_posenc: they must load in every later version.

    git worktree add /tmp/v0.1.0 <the last commit of 0.1.0>
    PYTHONPATH=/tmp/v0.1.0 python tests/checkpoints/0.1.0/make.py tests/checkpoints/0.1.0

Each folder holds a model with random weights and `logits.safetensors`: tokens (1, 24) int64 and the logits (1, 24, 40)
float32 that version 0.1.0 computed for them on a CPU, with torch 2.13.0 and one thread.
"""

import sys
from pathlib import Path

import safetensors.torch
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_posenc
from hf_posenc.schemes.base import PositionModule

SIZES = {"vocab_size": 40, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {
    "nope-llama": ("nope", {}, {}),
    "sinusoidal-gpt2": ("sinusoidal", {}, {}),
    "sinusoidal-llama": ("sinusoidal", {"placement": "every_layer"}, {}),
    "sinusoidal-llama-trained": ("sinusoidal", {"trainable": True}, {}),  # in radians per token, some now negative
    "learned-gpt2": ("learned", {"num_positions": 48}, {}),
    "learned-llama": ("learned", {"num_positions": 32}, {}),
    "rope-gpt2": ("rope", {"layout": "interleaved"}, {}),
    "rope-llama": ("rope", {"rope_theta": 500.0}, {}),
    "rope-llama-yarn": ("rope", {"scaling": YARN}, {}),
    "rope-llama-was-llama3": ("rope", {}, {"rope_parameters": LLAMA3}),  # whose scaling 0.1.0 dropped
    "transformer_xl-llama": ("transformer_xl", {"share_biases": True}, {}),
    "shaw-llama": ("shaw", {"max_distance": 5}, {}),
    "shaw-gpt2": ("shaw", {"max_distance": 5, "share_layers": True}, {}),
    "alibi-llama": ("alibi", {"trainable": True}, {}),
    "alibi-gpt2": ("alibi", {}, {}),
    "da_transformer-llama": ("da_transformer", {}, {}),
}


def stock(base, settings):
    if base == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **SIZES, **settings))
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            **SIZES,
            **settings,
        )
    )


def main(folder):
    assert hf_posenc.__version__ == "0.1.0", hf_posenc.__version__
    torch.set_num_threads(1)
    for name, (scheme, hyperparameters, settings) in MODELS.items():
        torch.manual_seed(0)
        model = hf_posenc.patch_model(stock(name.split("-")[1], settings).eval(), scheme, **hyperparameters)
        tokens = torch.randint(3, 40, (1, 24))
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, PositionModule):
                    for parameter in module.parameters(recurse=False):
                        parameter.add_(0.3 * torch.randn_like(parameter))
            logits = model(tokens).logits
        model.save_pretrained(folder / name)
        safetensors.torch.save_file({"tokens": tokens, "logits": logits}, folder / name / "logits.safetensors")
        for unneeded in ("README.md", "modeling_hf_posenc.py", "generation_config.json"):
            (folder / name / unneeded).unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

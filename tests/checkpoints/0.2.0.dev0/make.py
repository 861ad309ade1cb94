"""Made the checkpoints beside it, with version 0.2.0.dev0 of hf_posenc: they must load in every later version.

    python tests/checkpoints/0.2.0.dev0/make.py tests/checkpoints/0.2.0.dev0

Each folder holds a model with random weights and `logits.safetensors`: tokens (1, 24) int64 and the logits (1, 24, 40)
float32 that were computed for them on a CPU, with torch 2.13.0, transformers 5.23.0 and one thread.
"""

import sys
from pathlib import Path

import safetensors.torch
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import hf_posenc
from hf_posenc.schemes import alibi, nope, rope, t5
from hf_posenc.schemes.base import PositionModule

SIZES = {"vocab_size": 40, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    **SIZES,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {
    "nope-llama": ("nope", {}),
    "nope-gpt2": ("nope", {}),
    "sinusoidal-gpt2": ("sinusoidal", {}),
    "sinusoidal-llama": ("sinusoidal", {"placement": "every_layer", "layout": "split"}),
    "sinusoidal-llama-trained": ("sinusoidal", {"trainable": True, "frequencies": "power"}),
    "learned-gpt2": ("learned", {"num_positions": 48, "initialization": "interpolated"}),
    "learned-llama": ("learned", {"num_positions": 32, "placement": "every_layer", "share_layers": False}),
    "rope-gpt2": ("rope", {"layout": "interleaved"}),
    "rope-llama": ("rope", {"rope_theta": 500.0}),
    "rope-llama-yarn": ("rope", {"scaling": YARN}),
    "transformer_xl-llama": ("transformer_xl", {"share_biases": True}),
    "shaw-llama": ("shaw", {"max_distance": 5, "share_heads": False}),
    "shaw-gpt2": ("shaw", {"max_distance": 5, "share_layers": True, "values": False}),
    "alibi-llama": ("alibi", {"trainable": True}),
    "alibi-gpt2": ("alibi", {"window": 7}),
    "da_transformer-llama": ("da_transformer", {"relu": False}),
    "t5-llama": ("t5", {"num_buckets": 8, "max_distance": 16}),
    "t5-gpt2": ("t5", {"num_buckets": 8, "max_distance": 16, "share_layers": False}),
    "kerple-llama": ("kerple", {}),
    "kerple-llama-power": ("kerple", {"variant": "power", "share_layers": False}),
    "cope-llama": ("cope", {"num_positions": 6}),
    "t5-mixtral": ("t5", {"num_buckets": 8, "max_distance": 16}),  # whose experts transformers renames in files
    "mixture-llama": ([alibi.Alibi(layers="1::2"), rope.Rope(layers="0::2", rope_theta=500.0)], {}),
    "mixture-gpt2": ([t5.T5(layers=[0], window=5, num_buckets=8, max_distance=16), nope.Nope(layers=[1])], {}),
}


def stock(base):
    if base == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **SIZES))
    if base == "mixtral":
        return MixtralForCausalLM(MixtralConfig(num_hidden_layers=2, num_local_experts=2, **LLAMA))
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **LLAMA))


def main(folder):
    torch.set_num_threads(1)
    for name, (scheme, hyperparameters) in MODELS.items():
        torch.manual_seed(0)
        model = hf_posenc.patch_model(stock(name.split("-")[1]).eval(), scheme, seed=0, **hyperparameters)
        tokens = torch.randint(3, 40, (1, 24))
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, PositionModule):
                    for parameter in module.parameters(recurse=False):
                        parameter.add_(0.3 * torch.randn_like(parameter))
            logits = model(tokens).logits
        model.save_pretrained(folder / name)
        safetensors.torch.save_file({"tokens": tokens, "logits": logits}, folder / name / "logits.safetensors")
        for path in (folder / name).iterdir():
            if path.name not in ("config.json", "model.safetensors", "logits.safetensors"):
                path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

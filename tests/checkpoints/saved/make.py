"""Made the checkpoints beside it: what later versions must load, or refuse on purpose.

    python tests/checkpoints/saved/make.py tests/checkpoints/saved

Each folder holds a model with random weights and `logits.safetensors`: tokens (1, 24) int64 and the logits (1, 24, 40)
float32 that were computed for them on a CPU, with torch 2.13.0, transformers 5.23.0 and one thread.
"""

import sys
from pathlib import Path

import safetensors.torch
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

import hf_posenc
from hf_posenc.schemes import alibi, rope, shaw, temperature
from hf_posenc.schemes.base import PositionModule

SIZES = {"vocab_size": 40, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
HEADS = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **SIZES))


def mixtral():
    """Its experts have other names in files."""
    return MixtralForCausalLM(
        MixtralConfig(num_hidden_layers=2, num_local_experts=2, max_position_embeddings=32, **HEADS, **SIZES)
    )


MODELS = {
    "shaw-gpt2": (gpt2, [shaw.Shaw(max_distance=5, share_heads=False)]),
    "mixture-mixtral": (
        mixtral,
        [
            alibi.Alibi(layers="1::2", trainable=True),
            rope.Rope(layers="0::2", rope_theta=500.0),
            temperature.Temperature(kind="log_n", trainable=True),
        ],
    ),
}


def main(folder):
    torch.set_num_threads(1)
    for name, (stock, schemes) in MODELS.items():
        torch.manual_seed(0)
        model = hf_posenc.patch_model(stock().eval(), schemes, seed=0)
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

#!/usr/bin/env python3
"""What a calibration costs on a model with random weights: time, and memory beyond a forward pass.

python scripts/measure_calibration_cost.py                                GPT-2 small, 49 windows of 1,024 tokens, t5
python scripts/measure_calibration_cost.py --shape smollm2 --scheme transformer_xl       SmolLM2-135M, windows of 512
python scripts/measure_calibration_cost.py --shape smollm2 --scheme transformer_xl --layers 2 --steps 3

Without --steps it measures the closed forms. With --steps also a step of the second stage, in forward passes of its
windows through the layers. Times are of the processor, added over its cores, and of the clock.
"""

import argparse
import resource
import sys
import time
from itertools import pairwise

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_posenc import Matching, calibrate, patch_model

SHAPES = {"gpt2": (12, 1024), "smollm2": (30, 512)}
"""Name of a shape -> its number of layers, and the tokens of a window, as the recipes choose it."""
SCHEMES = {"t5": {"share_layers": False}, "transformer_xl": {}, "shaw": {}, "kerple": {"share_layers": False}}


def made(shape: str, layers: int) -> PreTrainedModel:
    """A model of this shape, with random weights."""
    if shape == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_layer=layers)).eval()
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    sizes |= {"vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000.0}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, tie_word_embeddings=True, **sizes)).eval()


def peak() -> float:
    """The most memory that this process has had, in GiB."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / 2**30 if sys.platform == "darwin" else used / 2**20


@torch.no_grad()
def forward(model: PreTrainedModel, windows: torch.Tensor) -> float:
    """Seconds of the processor for one forward pass of all windows through the layers, the fastest of three."""
    found = []
    for _ in range(3):
        began = time.process_time()
        model.base_model(windows, use_cache=False)
        found.append(time.process_time() - began)
    return min(found)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    parser.add_argument("--scheme", choices=SCHEMES, default="t5")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--windows", type=int, default=49)
    parser.add_argument("--length", type=int, help="tokens of a window")
    parser.add_argument("--steps", type=int, default=0, help="of the second stage")
    options = parser.parse_args()
    layers, length = SHAPES[options.shape]
    torch.manual_seed(0)
    model = made(options.shape, options.layers or layers)
    tokens = torch.randint(model.config.vocab_size, (options.windows, options.length or length))
    one, four = forward(model, tokens[:1]), forward(model, tokens[:4]) if options.steps else 0.0
    before = peak()
    patch_model(model, options.scheme, seed=0, **SCHEMES[options.scheme])
    wall, processor, times = time.perf_counter(), time.process_time(), []
    matching = (
        Matching(steps=options.steps, on_step=lambda *_: times.append(time.process_time())) if options.steps else None
    )
    calibrate(model, tokens, matching=matching)
    spent = time.process_time() - processor
    print(f"{tokens.numel():,} tokens: {time.perf_counter() - wall:.0f} s, {spent:.0f} s of CPU; a window: {one:.2f} s")
    print(f"peak: {peak():.2f} GiB, after a forward pass {before:.2f} GiB")
    if len(times) > 1:
        step = min(b - a for a, b in pairwise(times))
        print(f"a step: {step:.1f} s of CPU, {step / four:.1f} forward passes of its 4 windows ({four:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

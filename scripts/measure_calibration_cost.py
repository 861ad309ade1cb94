#!/usr/bin/env python3
"""What the closed forms of a calibration cost: time, and memory beyond a forward pass, on a GPT-2 with random weights.

python scripts/measure_calibration_cost.py                                GPT-2 small, 49 windows of 1,024 tokens, t5
"""

import argparse
import resource
import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_posenc import calibrate, patch_model


def peak() -> float:
    """The most memory that this process has had, in GiB."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / 2**30 if sys.platform == "darwin" else used / 2**20


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--windows", type=int, default=49)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=options.layers)).eval()
    tokens = torch.randint(model.config.vocab_size, (options.windows, options.length))
    with torch.no_grad():
        model.base_model(tokens[:1], use_cache=False)
    forward = peak()
    patch_model(model, "t5", share_layers=False, seed=0)
    wall, processor = time.perf_counter(), time.process_time()
    calibrate(model, tokens, matching=None)
    print(
        f"{tokens.numel():,} tokens: {time.perf_counter() - wall:.0f} s, {time.process_time() - processor:.0f} s of CPU"
    )
    print(f"peak: {peak():.2f} GiB, after a forward pass of one window {forward:.2f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

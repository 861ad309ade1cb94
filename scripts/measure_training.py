#!/usr/bin/env python3
"""What papers say of training with a scheme: small models that differ in one thing each, trained from scratch on bytes.

    python scripts/measure_training.py BOOK.txt... --held-out BOOK.txt --json results.json

Variants of one claim stand together in `CLAIMS`. Every model has GPT-2's shape and no positions but the scheme's, reads as
many tokens as the others and is measured on the same held-out bytes. A run has a process of its own, so that its peak
memory is its own; started again, runs that are in the file already are not made again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from results import read, rounded, write
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

from hf_posenc import Scheme, patch_model, register_scheme
from hf_posenc.analysis import attention_by_distance
from hf_posenc.dims import Dims
from hf_posenc.dtypes import compute_dtype
from hf_posenc.evaluation import sliding_window_perplexity
from hf_posenc.forms import Bias
from hf_posenc.modules import ScoreModule
from hf_posenc.schemes.alibi import Alibi
from hf_posenc.schemes.base import ScoreScheme
from hf_posenc.schemes.da_transformer import DATransformer, DistanceRescaling
from hf_posenc.schemes.learned import Learned
from hf_posenc.schemes.shaw import Shaw
from hf_posenc.schemes.sinusoidal import Sinusoidal
from hf_posenc.schemes.t5 import T5
from hf_posenc.theory import negative_products
from hf_posenc.version import VERSION

SHORT, LONG = 128, 512
"""Tokens in a window of training; all are measured at both."""


@register_scheme
@dataclass(frozen=True, kw_only=True)
class AddedFactors(ScoreScheme):
    """The factors of DA-Transformer, added to the scores: the variant that its paper argues against."""

    name: ClassVar[str] = "added_factors"

    def build(self, dims: Dims) -> ScoreModule:
        """Return the module of one attention layer."""
        return _Added(dims.num_heads, relu=False)


class _Added(DistanceRescaling):
    def form(self, like: Tensor) -> Any:
        dtype = compute_dtype(like)
        return Bias(lambda distance: self.factors(distance.to(dtype)), like.device)


def table(**choices: Any) -> Learned:
    """Return a trained table of as many rows as a short window has."""
    return Learned(num_positions=SHORT, initialization="normal", **choices)


@dataclass(frozen=True)
class Claim:
    """Variants that differ in what a claim is about.

    Attributes:
        steps: of the optimizer, enough for the variants to learn positions.
        variants: name -> the scheme, and the tokens in a window of training.
    """

    steps: int
    variants: dict[str, tuple[Scheme, int]]


CLAIMS: dict[str, Claim] = {
    "train short, test long": Claim(
        1000,
        {"alibi, short": (Alibi(), SHORT), "alibi, long": (Alibi(), LONG), "sinusoidal, long": (Sinusoidal(), LONG)},
    ),
    "vectors in every layer": Claim(
        1000,
        {
            "sinusoidal, input": (Sinusoidal(), SHORT),
            "sinusoidal, every layer": (Sinusoidal(placement="every_layer"), SHORT),
            "learned, input": (table(), SHORT),
            "learned, every layer, one table": (table(placement="every_layer"), SHORT),
            "learned, every layer, a table each": (table(placement="every_layer", share_layers=False), SHORT),
        },
    ),
    "base of sinusoids": Claim(
        1000, {f"sinusoidal, base {base:g}": (Sinusoidal(base=base), SHORT) for base in (100.0, 1000.0, 1e6)}
    ),
    "factors multiply": Claim(
        400,
        {
            "multiplied, relu": (DATransformer(), SHORT),
            "multiplied, no relu": (DATransformer(relu=False), SHORT),
            "added": (AddedFactors(), SHORT),
        },
    ),
    "precise distances far away": Claim(
        400, {f"shaw, up to {distance}": (Shaw(max_distance=distance), SHORT) for distance in (0, 1, 2, 4, 16, 64)}
    ),
    "one table for all layers": Claim(
        400,
        {
            "t5, one table": (T5(), SHORT),
            "t5, a table each": (T5(share_layers=False), SHORT),
            "shaw, one table": (Shaw(share_layers=True), SHORT),
            "shaw, a table each": (Shaw(), SHORT),
        },
    ),
}
"""What is compared. Added vectors are learned later than scores with positions, so their claims take more steps."""


def bytes_of(path: Path) -> Tensor:
    """Return the bytes of a file, (N,) int64."""
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()


def run(options: argparse.Namespace, scheme: Scheme, length: int, steps: int, seed: int) -> dict[str, Any]:
    """Train one model, and return what it cost and what it can do."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=256,
        n_positions=LONG,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=4,
        initializer_range=0.02 * (768 / options.width) ** 0.5,  # 0.02 is for width 768
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = patch_model(GPT2LMHeadModel(config), scheme, seed=seed).train()
    model.loss_type = "ForCausalLM"
    text = torch.cat([bytes_of(path) for path in options.text])
    rows = options.batch // length
    # Muon on the layers' matrices: with AdamW alone so few steps teach models with added vectors no positions at all.
    layers = [p for name, p in model.named_parameters() if ".h." in name and name.endswith(".weight") and p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not each for each in layers)]
    optimizers = [
        torch.optim.Muon(layers, lr=0.02, weight_decay=0.0),
        torch.optim.AdamW(others, lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [get_cosine_schedule_with_warmup(each, max(1, steps // 20), steps) for each in optimizers]
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (rows, 1))
        batch = text[starts + torch.arange(length)]
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in (*optimizers, *schedules):
            each.step()
        model.zero_grad()
    seconds = time.process_time() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    held_out = bytes_of(options.held_out)[: options.measured]
    limited = isinstance(scheme, Learned)  # its table ends
    lengths = [SHORT] if limited else [SHORT, LONG]
    found = {
        "loss": {
            str(each): sliding_window_perplexity(model, held_out, length=each, stride=each // 4).loss
            for each in lengths
        },
        "tokens_per_cpu_second": steps * rows * length / seconds,
        "memory_of_training_mib": grown / 1024,
    }
    reach = attention_by_distance(model.eval(), held_out[: 4 * SHORT].view(4, SHORT)).mean_distance
    found["mean_distance_of_heads"] = {
        "least": reach.min().item(),
        "median": reach.median().item(),
        "most": reach.max().item(),
    }
    if isinstance(scheme, DATransformer | AddedFactors):
        rising = [module.distance_weight > 0 for module in model.modules() if isinstance(module, DistanceRescaling)]
        found["rising_factors"] = torch.cat(rising).double().mean().item()
        found["negative_products"] = negative_products(model, held_out[:LONG]).shares.mean().item()
    return found


def main() -> int:
    """Make the runs that are missing, and write each as it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="+", help="files to train on")
    parser.add_argument("--held-out", type=Path, required=True, help="file to measure on")
    parser.add_argument("--measured", type=int, default=8192, help="bytes of it (default 8192)")
    parser.add_argument("--claims", nargs="+", choices=CLAIMS, default=list(CLAIMS), metavar="CLAIM")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="of the optimizer (default: 400, and 1000 where vectors are added)")
    parser.add_argument("--batch", type=int, default=2048, help="tokens in a step (default 2048)")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak of AdamW, behind a warm-up (default 3e-3)")
    parser.add_argument("--width", type=int, default=64, help="hidden size (default 64)")
    parser.add_argument("--layers", type=int, default=4, help="(default 4)")
    parser.add_argument("--json", type=Path, required=True, help="results; runs that are there already stay")
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("measured", "steps", "batch", "rate", "width", "layers")}
    settings |= {"text": [path.name for path in options.text], "held_out": options.held_out.name}
    settings |= {"short": SHORT, "long": LONG, "hf_posenc": VERSION, "torch": torch.__version__}
    result = read(options.json, {"settings": settings, "runs": {}})
    if result["settings"] != settings:
        parser.error(f"{options.json} has runs of other settings: {result['settings']}")
    wanted = [
        (seed, options.steps or CLAIMS[claim].steps, *variant)
        for seed in options.seeds
        for claim in options.claims
        for variant in CLAIMS[claim].variants.items()
    ]
    for seed, steps, name, (scheme, length) in wanted:
        key = f"{name}, seed {seed}"
        if key in result["runs"]:
            continue
        # A child begins with this process's memory, and its peak counts from there.
        with multiprocessing.get_context("fork").Pool(1) as process:
            result["runs"][key] = rounded(process.apply(run, (options, scheme, length, steps, seed)))
        print(key, result["runs"][key], file=sys.stderr, flush=True)
        write(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Trains a small model from scratch with each scheme and tests it beyond its training length: train short, test long.

Like `hf-posenc compare`, but from scratch, as in Press et al. 2021 (arXiv:2108.12409). The model is a decoder of
GPT-2's shape that reads bytes. Its only position encoding is the scheme. Every run writes results.json under
OUTPUT/runs; the summary and the figures are made from these files. Run the same command again to make the runs that are
missing. A folder with runs of other arguments is refused.

Examples:
  hf-posenc pretrain --schemes sinusoidal alibi nope --steps 500         # bytes of the Python standard library
  hf-posenc pretrain --data book.txt --train-length 256 --lengths 256 512 1024 --seeds 0 1 2
  accelerate launch -m hf_posenc.recipes.pretrain --config pretrain.yaml            # on many GPUs
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from . import measurements, models, program, sweeps
from .embedded import byte_tokenizer, decoder
from .models import Schemes, load
from .options import Count, Length, Natural, Positive, parse
from .results import Results
from .sweeps import SweepArguments


@dataclass(kw_only=True)
class Arguments(SweepArguments):
    """Models from scratch.

    Args:
        schemes: schemes to compare: names, or JSON as of --scheme in `extend`; learned gets a table for the
            training.
        scheme_args: hyper-parameters of a scheme that is one name, e.g. max_distance=64 share_heads=false.
        tokenizer: folder or Hub id of a tokenizer; by default one that reads bytes.
        layers: decoder layers.
        width: hidden size.
        heads: attention heads.
    """

    schemes: list[str] | tuple[str, ...] = ("sinusoidal", "rope", "alibi", "nope")
    scheme_args: list[str] | tuple[str, ...] = ()
    tokenizer: str | None = None
    layers: Count = 4
    width: Count = 128
    heads: Count = 4
    train_length: Length = 256
    steps: Count = 1000
    batch_size: Count = 8
    gradient_accumulation: Count = 1
    learning_rate: Positive | None = 3e-3
    warmup_steps: Natural = 50
    output: str = "runs/pretrain"


def main(argv: list[str] | None = None, prog: str | None = None) -> Results:
    """Make the runs that are missing and return the summary."""
    arguments, parser = parse(Arguments, argv, __doc__, prog)
    with program.ending(parser, sweeps.ADVICE):
        variants = check_arguments(arguments)
        tokenizer = load(AutoTokenizer, arguments.tokenizer, "tokenizer") if arguments.tokenizer else byte_tokenizer()
        new_model = partial(
            decoder,
            tokenizer,
            positions=arguments.train_length,
            width=arguments.width,
            layers=arguments.layers,
            heads=arguments.heads,
            # GPT-2's 0.02 is for width 768. Sums of fewer terms need larger weights for the same variance.
            initializer_range=0.02 * (768 / arguments.width) ** 0.5,
        )
        sweeps.make(arguments, variants, tokenizer, new_model=new_model)
        summary = sweeps.summarize(Path(arguments.output), f"From scratch, trained at {arguments.train_length}")
    print(sweeps.markdown(summary))
    return summary


def check_arguments(arguments: Arguments) -> dict[str, tuple[Schemes, dict[str, Any]]]:
    """Check the schemes and the lengths, and set the default of `--lengths`; return scheme -> instances, own options.

    A table is as long as the training needs.
    """
    measurements.check(arguments, *(arguments.train_length * times for times in (1, 2, 4, 8)))
    longest = max(arguments.train_length, arguments.pose_length or 0)
    variants: dict[str, tuple[Schemes, dict[str, Any]]] = {}
    for name in arguments.schemes:
        given = list(arguments.scheme_args) or sweeps.table_args(name, longest)
        own = {"scheme": name, "scheme_args": given, "calibrate": "none"}
        variants[name] = models.read_schemes("schemes", name, given), own
    return variants


if __name__ == "__main__":
    program.start(main)

"""Compares schemes on one base, with the same data, seeds and budget, also with the base itself and RoPE's scalings.

Every run is one results.json under OUTPUT/runs; OUTPUT/summary.md and summary.json are made from them.
Run the same command again to make the runs that are missing and to continue an interrupted one. A folder with runs of
other arguments, another text or another base is refused.

Examples:
  hf-posenc compare --model gpt2 --data book.txt --variants unpatched alibi rope-yarn t5 --seeds 0 1 2
  hf-posenc compare --model gpt2 --data book.txt --variants t5 t5+uncalibrated --recovery-steps 50
  accelerate launch -m hf_posenc.recipes.compare_schemes --config compare.yaml      # on many GPUs
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import hf_posenc

from ..core.did_you_mean import did_you_mean
from ..core.registry import scheme_class
from . import models, one_run, program, sweeps
from .models import UNPATCHED, load
from .one_run import SharedArguments
from .options import UsageError, parse
from .results import Results, last_name
from .sweeps import SweepArguments

STRETCHED_ROPE = {kind: f"rope-{kind}" for kind in ("linear", "dynamic", "yarn")}
VARIANT_OPTIONS = ("trainable", "uncalibrated")


@dataclass(kw_only=True)
class Arguments(SweepArguments, SharedArguments):
    """The comparison.

    Args:
        variants: what to compare: a scheme, or JSON as of --scheme in `extend`; unpatched; or rope-linear,
            rope-dynamic, rope-yarn (RoPE stretched to --train-length). Append +trainable (trainable=true) or
            +uncalibrated (--calibrate none, the plain swap).
    """

    model: str = field()
    variants: list[str] | tuple[str, ...] = (UNPATCHED, "nope", "alibi", "rope-yarn")
    output: str = "runs/compare_schemes"


def main(argv: list[str] | None = None, prog: str | None = None) -> Results:
    """Make the runs that are missing and return the summary."""
    arguments, parser = parse(Arguments, argv, __doc__, prog)
    with program.ending(parser, sweeps.ADVICE):
        runs, tokenizer = check_arguments(arguments), load(AutoTokenizer, arguments.model)
        sweeps.make(arguments, runs, tokenizer, arguments.model)
        summary = sweeps.summarize(Path(arguments.output), f"Schemes on {last_name(arguments.model)}")
    print(sweeps.markdown(summary))
    return summary


def check_arguments(arguments: Arguments) -> dict[str, tuple[models.Schemes, dict[str, Any]]]:
    """Check all variants before the first run; return variant -> its schemes and its own options."""
    runs: dict[str, tuple[models.Schemes, dict[str, Any]]] = {}
    for variant in arguments.variants:
        own = options_of(arguments, variant)
        run = sweeps.arguments_of_run(arguments, Path(arguments.output), **own)
        runs[variant] = one_run.check_arguments(run), own
        arguments.lengths, arguments.eval_tokens = run.lengths, run.eval_tokens
    return runs


def split(variant: str) -> tuple[str, list[str]]:
    """Split a variant into its scheme, a name or JSON, and its options."""
    end = max(variant.rfind("}"), variant.rfind("]")) + 1 if models.is_mixture(variant) else 0
    rest, *options = variant[end:].split("+")
    return variant[:end] + rest, options


def options_of(arguments: Arguments, variant: str) -> dict[str, Any]:
    """Return the options of `extend` that a variant sets: the scheme, with a table or a scaling for the lengths.

    Raises:
        UsageError: if there is no such variant, or RoPE would be stretched to a length that the base was trained at.
    """
    name, options = split(variant)
    if strange := [word for word in options if word not in VARIANT_OPTIONS]:
        raise UsageError(
            f"--variants {variant}: +{strange[0]} is none of +{', +'.join(VARIANT_OPTIONS)}"
            f"{did_you_mean(strange[0], VARIANT_OPTIONS)}"
        )
    names = (UNPATCHED, *hf_posenc.available_schemes(), *STRETCHED_ROPE.values())
    if name not in names and not models.is_mixture(name):
        meant = did_you_mean(name, STRETCHED_ROPE | {name: name for name in names})
        raise UsageError(f"--variants {variant}: unknown {name!r}; choose from {', '.join(names)}{meant}")
    scheme, hyperparameters, length = name, [], arguments.train_length
    if name in STRETCHED_ROPE.values():
        scheme, scaling = name.split("-")
        trained = models.trained_length(arguments.model) or length
        if length <= trained:
            raise UsageError(
                f"--variants {variant} stretches RoPE to --train-length {length}, but the base was trained at {trained}"
            )
        hyperparameters = [f'scaling={{"rope_type": "{scaling}", "factor": {length / trained}}}']
    elif name != UNPATCHED and not models.is_mixture(name):
        if getattr(scheme_class(scheme), "num_positions", 0) is None:  # a table, whose length has no default
            hyperparameters = [f"num_positions={max(length, *(arguments.lengths or [2 * length]))}"]
    if "trainable" in options:
        if models.is_mixture(name):
            raise UsageError(f"--variants {variant}: write trainable into the JSON of a mixture, instead of +trainable")
        hyperparameters.append("trainable=true")
    own = {"scheme": scheme, "scheme_args": hyperparameters}
    return own | ({"calibrate": "none"} if "uncalibrated" in options else {})


if __name__ == "__main__":
    program.start(main)

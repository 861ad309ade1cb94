"""Trains a small model from scratch with each scheme and tests it beyond its training length: train short, test long.

    accelerate launch recipes/pretrain.py --config recipes/configs/pretrain_books.yaml --data BOOK.txt...

Like compare_schemes.py, but from scratch, as in Press et al. 2021 (arXiv:2108.12409). The model is a decoder of GPT-2's
shape that reads bytes. Its only position encoding is the scheme. Every run writes results.json under OUTPUT/runs; the
summary and the figures are made from these files. Run the same command again to make the runs that are missing. A
folder with runs of other arguments is refused.
"""

from dataclasses import dataclass, field
from pathlib import Path

from accelerate.utils import set_seed
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_posenc

from ..analysis import plots
from . import corpus, measurements, models, program, run_folder, sweep_report, sweep_runs, training
from . import run_identity as identity
from .corpus import Text, Windows
from .embedded import byte_tokenizer, decoder
from .measurements import HeldOutArguments, held_out_loss, measure_model
from .models import Schemes, check_vocabulary, count_weights, hyperparameters, load, save
from .options import Count, Folder, Hyperparameter, Length, Natural, Positive, UsageError, each_once, parse
from .results import Results, origin, stopwatch
from .sweep_runs import SweepArguments, add_run
from .training import Phase, TrainingArguments
from .training_positions import PLAIN, ChosenPositions, check_follows

EXAMPLES = """
  {prog} --schemes sinusoidal alibi nope --steps 500         # bytes of the Python standard library
  {prog} --data book.txt --train-length 256 --lengths 256 512 1024 --seeds 0 1 2
  accelerate launch -m hf_posenc.recipes.pretrain --config pretrain.yaml            # on many GPUs
"""


@dataclass
class Arguments(SweepArguments, HeldOutArguments, TrainingArguments):
    """This recipe.

    Args:
        schemes: schemes to compare: names, or JSON as of --scheme in `extend`; learned gets a table for the
            training.
        scheme_args: hyper-parameters of a scheme that is one name, e.g. max_distance=64 share_heads=false.
        tokenizer: folder or Hub id of a tokenizer; by default one that reads bytes.
        layers: decoder layers.
        width: hidden size.
        heads: attention heads.
    """

    schemes: list[str] = field(
        default_factory=lambda: ["sinusoidal", "rope", "alibi", "nope"], metadata={"guesses": ("variants", "scheme")}
    )
    scheme_args: list[Hyperparameter] = field(default_factory=list)
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
    output: Folder = "runs/pretrain"


def main(argv: list[str] | None = None, prog: str | None = None) -> Results:
    """Make the runs that are missing and return the summary."""
    arguments, parser = parse(Arguments, argv, __doc__, prog=prog, examples=EXAMPLES)
    with program.ending(parser, "the same command", lambda: sweep_runs.KEPT):
        named = check_arguments(arguments)
        tokenizer = load(AutoTokenizer, arguments.tokenizer, "tokenizer") if arguments.tokenizer else byte_tokenizer()

        if arguments.positions != PLAIN:
            for schemes in named.values():
                with hf_posenc.patched(untrained(arguments, tokenizer), schemes) as model:
                    check_follows(model, arguments)

        def make_run(name: str, seed: int, target: Path, text: Text, run_identity: Results) -> None:
            run(arguments, named[name], seed, target, tokenizer, text, run_identity)

        sweep_runs.make(arguments, named, tokenizer, make_run)
        summary = sweep_report.summarize(Path(arguments.output), f"From scratch, trained at {arguments.train_length}")
    print(sweep_report.markdown(summary))
    return summary


def check_arguments(arguments: Arguments) -> dict[str, Schemes]:
    """Check everything that does not need the text; return name, or label of a mixture -> schemes."""
    plots.check_installed()  # the figures are drawn at the end
    training.check(arguments, arguments.packing)
    corpus.check(arguments, needs_data=False)
    measurements.check(arguments)
    each_once(arguments, "schemes", "seeds")
    if arguments.width % arguments.heads:
        raise UsageError(f"--width {arguments.width} must be a multiple of --heads {arguments.heads}")
    if arguments.scheme_args and len(arguments.schemes) > 1:
        raise UsageError("--scheme-args needs --schemes with one scheme, not with several")
    longest = max(arguments.train_length, arguments.position_length or 0)
    defaults = {"learned": {"num_positions": longest}}
    keywords = hyperparameters(arguments.scheme_args)
    named: dict[str, Schemes] = {}
    for name in arguments.schemes:
        schemes = models.read_schemes("schemes", name, defaults.get(name, {}) | keywords)
        if any(scheme.limit is not None and scheme.limit < longest for scheme in schemes):
            raise UsageError(f"--schemes {name} ends before {longest} positions: --scheme-args num_positions={longest}")
        add_run(named, "schemes", models.label_of(schemes) if models.is_mixture(name) else name, schemes)
    return named


def run(
    arguments: Arguments,
    schemes: Schemes,
    seed: int,
    output: Path,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    run_identity: Results,
) -> None:
    """Make, train and measure one model, and write its results.json.

    Args:
        arguments: checked options.
        schemes: schemes of this model.
        seed: seed of the weights and of the order of the windows.
        output: folder of the run. If there is a state, the training goes on from it.
        tokenizer: tokenizer of the text.
        text: text to train and to measure on.
        run_identity: identity of the run.
    """
    accelerator = training.accelerator_for(arguments, output)
    set_seed(seed)
    windows = Windows(text.train, arguments.train_length, arguments.packing)
    positions = ChosenPositions.of(arguments, seed)
    plan = [Phase(windows, arguments.steps, 0, arguments.batch_size, seed, positions)]
    measurements.check_text(text.held_out, arguments, arguments.train_length if arguments.eval_every else 0)
    training.check_plan(plan, accelerator)
    model = untrained(arguments, tokenizer).to(accelerator.device)
    check_vocabulary(model, text.train, text.held_out)
    base = {"name": "from scratch", **models.describe(model, arguments.train_length)}
    report = models.patch_and_verify(model, schemes, seed)
    base["parameters"] = count_weights(model)  # including the scheme's
    seconds: dict[str, float] = {}
    results: Results = {
        **origin("pretrain", arguments, accelerator),
        "identity": run_identity,
        "seed": seed,
        "data": text.to_dict(arguments),
        "base": base,
        "scheme": models.schemes_to_json(hf_posenc.schemes_of(model)),
        "verify": report,
        "seconds": seconds,
    }
    # The sweep has checked the identity of an unfinished run. States without any identity are removed.
    start = run_folder.begin if identity.file_of(output) is None else run_folder.write_progress
    start(accelerator, output, results)
    evaluate = held_out_loss(text, arguments.train_length)
    wrapped, results["training"] = training.fine_tune(
        accelerator, model, plan, arguments, folder=output, resume=True, evaluate=evaluate
    )
    with stopwatch(seconds, "after"):
        results["after"], results["retrieval_after"] = measure_model(
            accelerator.unwrap_model(wrapped), text.held_out, arguments, accelerator
        )
    if arguments.keep_weights:
        save(accelerator, wrapped, tokenizer, output)
    if accelerator.is_main_process:
        run_folder.finish(output, results)
    accelerator.wait_for_everyone()


def untrained(arguments: Arguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return a decoder with random weights, of the size in the options."""
    return decoder(
        tokenizer,
        positions=arguments.train_length,
        width=arguments.width,
        layers=arguments.layers,
        heads=arguments.heads,
        # GPT-2's 0.02 is for width 768. Sums of fewer terms need larger weights for the same variance.
        initializer_range=0.02 * (768 / arguments.width) ** 0.5,
    )


if __name__ == "__main__":
    program.start(main)

"""Trains a small model from scratch with each scheme and tests it beyond its training length: train short, test long.

    accelerate launch recipes/pretrain.py --config recipes/configs/pretrain_books.yaml --data BOOK.txt...

The from-scratch counterpart of compare_schemes.py, as in Press et al. 2021 (arXiv:2108.12409): a decoder of GPT-2's shape
that reads bytes, without any position encoding but the one named. Every run is one results.json under OUTPUT/runs; the
summary and the figures are made from them. Started again, it makes the runs that are missing, and
refuses runs of other arguments.
"""

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import corpus
import identity
import measuring
import sweep
import training
from accelerate import PartialState
from accelerate.utils import set_seed
from corpus import DataArguments, Text, Windows, stream
from embedded import byte_tokenizer
from extend_context import (
    CURVE_TOKENS,
    check_curve,
    check_vocabulary,
    count,
    discard,
    hyper,
    name_of,
    provenance,
    read_text,
    save,
    stopwatch,
    write_json,
)
from measuring import MeasuringArguments, measure_model, retrieval
from options import UsageError, at_least, each_once, hyperparameters, load, parse
from training import Diverged, Interrupted, Phase, TrainingArguments
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import hf_posenc
from hf_posenc.evaluation import non_overlapping_perplexity
from hf_posenc.patching import parse_scheme, patch_of


@dataclass
class Arguments(DataArguments, MeasuringArguments, TrainingArguments):
    """What to train, with which schemes, and where to test it."""

    schemes: list[str] = field(
        default_factory=lambda: ["sinusoidal", "rope", "alibi", "nope"],
        metadata={"help": "schemes to compare; learned gets a table of --train-length positions, as usual"},
    )
    scheme_args: list[str] = field(
        default_factory=list, metadata={"help": "hyper-parameters as name=value, if there is one scheme only"}
    )
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "of each scheme's runs"})
    tokenizer: str | None = field(default=None, metadata={"help": "folder or Hub id; by default bytes"})
    layers: int = field(default=4, metadata={"help": "decoder layers"})
    width: int = field(default=128, metadata={"help": "hidden size"})
    heads: int = field(default=4, metadata={"help": "attention heads"})
    train_length: int = field(default=256, metadata={"help": "context length to train at, in tokens"})
    steps: int = field(default=1000, metadata={"help": "optimizer steps"})
    batch_size: int = field(default=8, metadata={"help": "sequences per forward and process"})
    gradient_accumulation: int = field(default=1, metadata={"help": "forwards per optimizer step"})
    learning_rate: float = field(default=3e-3, metadata={"help": "peak, after warm-up and before the decay"})
    warmup_steps: int = field(default=50, metadata={"help": "steps of linear warm-up"})
    keep_weights: bool = field(default=False, metadata={"help": "keep every run's checkpoint, not only its JSON"})
    output: str = field(default="runs/pretrain", metadata={"help": "folder of the sweep"})


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Runs what is missing and returns the summary."""
    arguments, parser = parse(Arguments, argv, __doc__.split("\n")[0])
    folder = Path(arguments.output)
    try:
        check_arguments(arguments)
        accelerator = training.accelerator_for(arguments, folder)
        tokenizer = load(AutoTokenizer, arguments.tokenizer) if arguments.tokenizer else byte_tokenizer()
        text = read_text(arguments, tokenizer, accelerator)
        identities = {
            (name, seed): identity.of(
                arguments,
                text,
                variant=name,
                seed=seed,
                scheme=name_of(scheme_of(arguments, name)),
                **identity.launched(accelerator),
            )
            for seed in arguments.seeds
            for name in arguments.schemes
        }
        sweep.complete(
            folder,
            identities,
            lambda name, seed, target: run(arguments, name, seed, target, tokenizer, text, identities[name, seed]),
        )
        summary = sweep.summarize(folder, f"From scratch, trained at {arguments.train_length}")
    except (UsageError, hf_posenc.HfPosencError) as error:
        parser.error(str(error))
    except Diverged as error:
        raise SystemExit(f"{error}") from None
    except Interrupted as stop:
        print(f"\n{stop}. The same command goes on.", file=sys.stderr)
        raise SystemExit(stop.status) from None
    except KeyboardInterrupt:
        print(f"\nInterrupted. {sweep.KEPT}", file=sys.stderr)
        raise SystemExit(130) from None
    print(sweep.markdown(summary))
    return summary


def check_arguments(arguments: Arguments) -> None:
    """Everything that can be known without reading the text."""
    training.check(arguments)
    corpus.check(arguments, needs_data=False)
    corpus.check_packing(arguments)
    measuring.check(arguments)
    at_least(arguments, 1, "layers", "width", "heads")
    each_once(arguments, "schemes", "seeds")
    if arguments.width % arguments.heads:
        raise UsageError(f"--width {arguments.width} must be a multiple of --heads {arguments.heads}")
    if arguments.scheme_args and len(arguments.schemes) > 1:
        raise UsageError("--scheme-args is for one scheme, --schemes names several")
    for name in arguments.schemes:
        scheme_of(arguments, name)


def scheme_of(arguments: Arguments, name: str) -> hf_posenc.Scheme:
    """The scheme of a run."""
    given = hyperparameters(arguments.scheme_args)
    if name == "learned":
        given.setdefault("num_positions", arguments.train_length)
    try:
        return parse_scheme(name, given)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--schemes {name}: {error}") from None


def run(
    arguments: Arguments, name: str, seed: int, output: Path, tokenizer: Any, text: Text, of: dict[str, Any]
) -> dict[str, Any]:
    """One model, top to bottom."""
    accelerator = training.accelerator_for(arguments, output)
    set_seed(seed)
    data = text.to_dict(arguments)
    windows = Windows(text.train, arguments.train_length, arguments.packing)
    plan = [Phase(windows, arguments.steps, 0, arguments.batch_size, seed)]
    if len(windows) < arguments.batch_size or data["held_out_tokens"] < arguments.eval_lengths[-1]:
        raise UsageError(
            f"the text has {data['training_tokens']:,} tokens to train on and {data['held_out_tokens']:,} held out, "
            "fewer than a batch or the longest of --eval-lengths need"
        )
    check_curve(text, arguments, arguments.train_length)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=arguments.train_length,
        n_embd=arguments.width,
        n_layer=arguments.layers,
        n_head=arguments.heads,
        # GPT-2's own 0.02 is for width 768; the same variance of the sums needs more where there are fewer terms.
        initializer_range=0.02 * (768 / arguments.width) ** 0.5,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = GPT2LMHeadModel(config).to(accelerator.device)
    model.loss_type = "ForCausalLM"
    check_vocabulary(model, text.train, text.held_out)
    hf_posenc.patch_model(model, scheme_of(arguments, name), seed=seed)
    if not (answers := hf_posenc.verify(model)):
        raise RuntimeError(f"the patch does not do what it should:\n{answers}")
    seconds: dict[str, float] = {}
    results: dict[str, Any] = {
        "recipe": "pretrain",
        "identity": of,
        "arguments": asdict(arguments),
        "command": sys.argv,
        "seed": seed,
        **provenance(accelerator),
        "data": data,
        "base": {
            "name": "from scratch",
            "model_type": "gpt2",
            "parameters": count(model),
            "trained_length": arguments.train_length,
        },
        "scheme": {"name": name, **hyper(model)},
        "verify": str(answers),
        "seconds": seconds,
    }
    if accelerator.is_main_process:
        if identity.file_of(output) is None:  # nobody knows what they are of
            discard(output)
        write_json(output / "progress.json", results)
    accelerator.wait_for_everyone()
    curve_text = stream(text.held_out).tokens[: max(CURVE_TOKENS, arguments.train_length)]
    wrapped, results["training"] = training.fine_tune(
        accelerator,
        model,
        plan,
        arguments,
        folder=output,
        resume=True,  # a state there is of this run: the sweep has looked at what it is of
        evaluate=lambda trained: non_overlapping_perplexity(trained, curve_text, length=arguments.train_length).loss,
    )
    model = accelerator.unwrap_model(wrapped)
    limit = patch_of(model).scheme.limit
    with stopwatch(seconds, "after"):
        results["after"] = measure_model(
            model, held_out=text.held_out, arguments=arguments, accelerator=accelerator, limit=limit
        )
        results["retrieval_after"] = retrieval(model, arguments, accelerator, limit)
    if arguments.keep_weights:
        save(accelerator, wrapped, tokenizer, output)
    if accelerator.is_main_process:
        write_json(output / "results.json", results)
        (output / "progress.json").unlink()
        discard(output, finished=True)
    accelerator.wait_for_everyone()
    return results


if __name__ == "__main__":
    main()
    # A process that leaves its group to the end of the interpreter is aborted there now and then.
    PartialState().destroy_process_group()

"""Extends the context of a causal language model by another position encoding, and measures how far it reaches.

    accelerate launch recipes/extend_context.py                        # the embedded default, minutes on a laptop
    accelerate launch recipes/extend_context.py --config recipes/configs/gpt2_alibi.yaml --output runs/gpt2-alibi

Measure, patch, fine-tune, measure again, report, save: OUTPUT/report.html, OUTPUT/results.json and OUTPUT/model (reload
with `hf_posenc.from_pretrained`). Plain `python` runs it in one process. Everything that can be wrong with the arguments
is found before anything long starts; Ctrl-C saves, and `--resume` goes on exactly where it was: it trains no base again
that was trained, measures nothing again that was measured.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import card
import corpus
import datasets
import identity
import measuring
import peft
import report
import torch
import training
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import set_seed
from corpus import DataArguments, Document, Text, stream
from embedded import CONTEXT, byte_model, byte_tokenizer, standard_library, train_base
from measuring import MeasuringArguments, measure_model, position_limit, retrieval
from options import UsageError, at_least, hyperparameters, load, parse, refuse
from recovery import check_transfer, teacher_of
from torch import nn
from training import Diverged, Interrupted, RecoveryArguments, TrainingArguments
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

import hf_posenc
from hf_posenc.evaluation import non_overlapping_perplexity
from hf_posenc.patching import parse_scheme, patch_of
from hf_posenc.registry import adapter_for

UNPATCHED = "unpatched"
CURVE_TOKENS = 8192
"""Held-out tokens that a point of the recovery curve is measured on."""


@dataclass
class SharedArguments(DataArguments, MeasuringArguments, TrainingArguments, RecoveryArguments):
    """What a run and a comparison of runs have in common."""

    model: str | None = field(
        default=None,
        metadata={"help": "checkpoint folder or Hub id; without it a small byte-level GPT-2 is trained first"},
    )
    lora_rank: int = field(
        default=0,
        metadata={"help": "train LoRA of this rank with norms, embeddings and positions; 0 trains every weight"},
    )


@dataclass
class Arguments(SharedArguments):
    """What to extend, how, and on which text."""

    scheme: str = field(
        default="alibi",
        metadata={"help": f"position encoding to patch in, or {UNPATCHED}: the base as it is, as a control"},
    )
    scheme_args: list[str] = field(
        default_factory=list,
        metadata={"help": "its hyper-parameters as name=value, e.g. max_distance=64 share_heads=false"},
    )
    transfer_steps: int = field(
        default=0,
        metadata={"help": "of the recovery steps, the first ones match the base's attention outputs layer by layer"},
    )
    seed: int = field(default=0, metadata={"help": "seed of everything that is random"})
    output: str = field(default="runs/extend_context", metadata={"help": "folder to write; must be empty or absent"})
    overwrite: bool = field(default=False, metadata={"help": "write into a folder that is not empty"})
    resume: bool = field(default=False, metadata={"help": "go on with an interrupted run of the same arguments"})
    push_to: str | None = field(default=None, metadata={"help": "repository on the Hub to push the result to"})
    private: bool = field(default=False, metadata={"help": "make that repository private, if it is new"})
    base_steps: int = field(
        default=1200, metadata={"help": "optimizer steps of the embedded base model (without --model)"}
    )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Runs the recipe and returns what it wrote to results.json."""
    arguments, parser = parse(Arguments, argv, __doc__.split("\n")[0])
    try:
        return run(arguments)
    except (UsageError, hf_posenc.HfPosencError) as error:
        parser.error(str(error))
    except Interrupted as stop:
        print(f"\n{stop}. Everything is in {stop.folder}: {again(arguments)} goes on.", file=sys.stderr)
        raise SystemExit(stop.status) from None
    except Diverged as error:
        raise SystemExit(f"{error}") from None
    except OSError as error:
        print(f"\n{error}. {kept(arguments)}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print(f"\nInterrupted. {kept(arguments)}", file=sys.stderr)
        raise SystemExit(130) from None


def again(arguments: Arguments) -> str:
    """The command that goes on, in words."""
    return "the same command with --resume" + (" instead of --overwrite" if arguments.overwrite else "")


def kept(arguments: Arguments) -> str:
    """What there is of a run that was stopped, and how to go on: no more than what is in its folder."""
    output = Path(arguments.output)
    if (output / "results.json").is_file():
        return f"The run has ended, and its results are kept in {output}."
    if not (output / "progress.json").is_file():
        return "Nothing was finished that could be kept: the same command begins again."
    if state := training.newest_state(output):
        return f"The fine-tuning is kept in {state}: {again(arguments)} goes on from there."
    if "before" in json.loads((output / "progress.json").read_text(encoding="utf-8")):
        return f"The measurements of the base are kept in {output}: {again(arguments)} goes on with the fine-tuning."
    if (output / "base" / "config.json").is_file():
        return f"The trained base is kept in {output / 'base'}: {again(arguments)} goes on by measuring it."
    return f"Nothing was finished that could be kept: {again(arguments)} begins again."


@dataclass
class Sweep:
    """What the runs of a sweep need not make again."""

    text: Text
    identity: dict[str, Any]
    before: list[dict[str, Any]] | None = None


def run(arguments: Arguments, sweep: Sweep | None = None) -> dict[str, Any]:
    """The recipe, top to bottom.

    Args:
        arguments: checked here.
        sweep: what a sweep has made already: the text, what the run is of, the base's measurements.
    """
    scheme = check_arguments(arguments)
    output = Path(arguments.output)
    accelerator = training.accelerator_for(arguments, output)
    say = accelerator.print
    set_seed(arguments.seed)
    progress = accelerator.is_main_process

    say(f"Reading {corpus.describe(arguments)}")
    tokenizer = load(AutoTokenizer, arguments.model) if arguments.model else byte_tokenizer()
    text = sweep.text if sweep else read_text(arguments, tokenizer, accelerator)
    of = (
        sweep.identity
        if sweep
        else identity.of(arguments, text, scheme=name_of(scheme), **identity.launched(accelerator))
    )
    earlier = earlier_progress(arguments, of)
    with loaded_whole(accelerator):
        model = (
            load(AutoModelForCausalLM, arguments.model, dtype=torch.float32)
            if arguments.model
            else byte_model(tokenizer)
        )
    # transformers reads it off the class name, and GPT-2's does not have it: it would warn and then take this.
    model.loss_type = "ForCausalLM"
    trained_length = position_limit(model) or model.config.max_position_embeddings
    plan = training.phases(arguments, text.train, trained_length)
    check_lengths(plan, text, arguments, accelerator)
    check_curve(text, arguments, trained_length)
    data = text.to_dict(arguments)
    say(
        f"  {data['documents']:,} documents; {data['training_tokens']:,} tokens to train on, "
        f"{data['held_out_tokens']:,} held out"
    )
    check_vocabulary(model, text.train, text.held_out)
    check_patch(model, scheme, arguments)
    model.to(accelerator.device)

    results: dict[str, Any] = {
        "recipe": "extend_context",
        "identity": of,
        "arguments": asdict(arguments),
        "command": sys.argv,
        "seed": arguments.seed,
        **provenance(accelerator),
        "data": data,
        "base": {
            "name": arguments.model or "embedded byte-level GPT-2",
            "model_type": model.config.model_type,
            "parameters": count(model),
            "trained_length": trained_length,
        },
        "seconds": {},
    }
    seconds = results["seconds"]
    if accelerator.is_main_process and not earlier:
        discard(output)
        write_json(output / "progress.json", results)
    accelerator.wait_for_everyone()
    if arguments.model is None:
        if earlier and (output / "base" / "config.json").is_file():
            model = load(AutoModelForCausalLM, str(output / "base"), dtype=torch.float32).to(accelerator.device)
            model.loss_type = "ForCausalLM"
        else:
            say(f"Training the embedded base: {count(model):,} weights, context {model.config.n_positions}")
            with stopwatch(seconds, "base"):
                train_base(model, stream(text.train).tokens, steps=arguments.base_steps, progress=progress)
            save_stock(accelerator, model, tokenizer, output / "base")

    measure = partial(measure_model, held_out=text.held_out, arguments=arguments, accelerator=accelerator)
    if earlier:
        results |= {key: earlier[key] for key in ("before", "retrieval_before", "seconds") if key in earlier}
        seconds = results["seconds"]
    elif sweep and sweep.before:
        results["before"] = sweep.before
    if "before" not in results:
        say(f"Measuring {arguments.model or 'the embedded base'} as it is")
        with stopwatch(seconds, "before"):
            results["before"] = measure(model, limit=position_limit(model))
            results["retrieval_before"] = retrieval(model, arguments, accelerator, position_limit(model))
    if accelerator.is_main_process:
        write_json(output / "progress.json", results)
    accelerator.wait_for_everyone()
    set_seed(arguments.seed)  # whatever was made before, and whatever was there already

    teacher = None
    if arguments.distill or arguments.transfer_steps:
        teacher = teacher_of(model, share_weights=bool(arguments.lora_rank))
    results["scheme"] = {"name": UNPATCHED}
    if scheme is not None:
        hf_posenc.patch_model(model, scheme, seed=arguments.seed)
        say(f"Patched\n{hf_posenc.describe(model)}")
        if not (answers := hf_posenc.verify(model)):
            raise RuntimeError(f"the patch does not do what it should:\n{answers}")
        say(answers)
        results["scheme"] = {"name": arguments.scheme, **hyper(model)}
        results["verify"] = str(answers)
    if arguments.lora_rank:
        # A copy of the config: PEFT writes into it.
        model = peft.get_peft_model(model, hf_posenc.lora_config(model, r=arguments.lora_rank))
        say(
            f"LoRA of rank {arguments.lora_rank}: {count(model, trained=True):,} of {count(model):,} weights are trained"
        )

    for phase in plan:
        per_step = training.tokens_per_step(phase, arguments, accelerator)
        say(f"Fine-tuning: {phase.steps} steps of {per_step:,} tokens at length {phase.length}")
    curve_text = stream(text.held_out).tokens[: max(CURVE_TOKENS, trained_length)]
    with stopwatch(seconds, "training"):
        wrapped, results["training"] = training.fine_tune(
            accelerator,
            model,
            plan,
            arguments,
            folder=output,
            resume=bool(earlier),
            teacher=teacher,
            trained_length=trained_length,
            evaluate=lambda trained: non_overlapping_perplexity(trained, curve_text, length=trained_length).loss,
        )
    model = accelerator.unwrap_model(wrapped)

    say("Measuring the model after fine-tuning")
    limit = position_limit(model) if scheme is None else None
    with stopwatch(seconds, "after"):
        results["after"] = measure(model, limit=limit)
        results["retrieval_after"] = retrieval(model, arguments, accelerator, limit)
    save(accelerator, wrapped, tokenizer, output)
    if accelerator.is_main_process:
        if scheme is not None:
            card.write(output / "model", results, arguments.push_to)
        report.write(output / "report.html", results)
        write_json(output / "results.json", results)
        (output / "progress.json").unlink()
        discard(output, finished=True)
    say(
        f"\n{report.table(results)}\n\ncheckpoint  {output / 'model'}\nreport      {output / 'report.html'}\n"
        f"results     {output / 'results.json'}"
    )
    if arguments.push_to and accelerator.is_main_process:
        say(hf_posenc.hub.push(output / "model", arguments.push_to, private=arguments.private or None).commit_url)
    return results


# --------------------------------------------------------------------------------------------------------------- checks


def check_arguments(arguments: Arguments) -> hf_posenc.Scheme | None:
    """Everything that can be known without reading the text or the weights. Returns the scheme, None for a control."""
    training.check(arguments)
    training.check_recovery(arguments)
    corpus.check(arguments, needs_data=arguments.model is not None)
    corpus.check_packing(arguments)
    measuring.check(arguments)
    at_least(arguments, 1, "base_steps")
    at_least(arguments, 0, "lora_rank", "transfer_steps")
    if arguments.transfer_steps > arguments.recovery_steps:
        raise UsageError(
            f"--transfer-steps {arguments.transfer_steps} are the first of --recovery-steps "
            f"{arguments.recovery_steps}, not more"
        )
    if arguments.context_parallel > 1 and (arguments.distill or arguments.transfer_steps):
        raise UsageError(
            "--context-parallel is not for --distill and --transfer-steps: the base is asked for whole windows"
        )
    if arguments.model is not None:
        refuse(arguments, "base_steps", f"is of the embedded base, and the base is --model {arguments.model}")
    if arguments.push_to is None:
        refuse(arguments, "private", "is of the repository that --push-to names, and there is none")
    elif arguments.scheme == UNPATCHED:
        refuse(arguments, "push_to", f"takes patched models, and --scheme {UNPATCHED} makes none")
    if arguments.overwrite and arguments.resume:
        raise UsageError("--resume goes on with what is there, --overwrite begins anew: choose one")
    scheme = None
    if arguments.scheme != UNPATCHED:
        try:
            scheme = parse_scheme(arguments.scheme, hyperparameters(arguments.scheme_args))
        except (TypeError, ValueError) as error:
            raise UsageError(f"--scheme {arguments.scheme}: {error}") from None
    elif arguments.scheme_args or arguments.lora_rank:
        raise UsageError(
            f"--scheme {UNPATCHED} takes neither --scheme-args nor --lora-rank; as a control with LoRA patch in the "
            "base's own scheme (rope, or learned)"
        )
    if arguments.model is not None:
        config = load(AutoConfig, arguments.model)
        if config.model_type.startswith("posenc_"):
            raise UsageError(
                f"--model {arguments.model} is patched already: give the stock checkpoint it was made from"
            )
        adapter_for(config.model_type)  # says which families there are
        if config.model_type == "opt" and arguments.packing == "documents":
            raise UsageError("--packing documents: OPT does not hand its positions to the mask, so it cannot tell")

    output = Path(arguments.output)
    if output.exists() and not output.is_dir():
        raise UsageError(f"--output {output} is a file")
    unfinished = (output / "progress.json").is_file()
    if arguments.resume and (output / "results.json").is_file():
        raise UsageError(f"--resume: the run in {output} has ended, its results are in {output / 'results.json'}")
    if arguments.resume and not unfinished:
        raise UsageError(f"--resume: there is no interrupted run in {output}; without --resume one begins")
    if output.is_dir() and any(output.iterdir()) and not (arguments.overwrite or arguments.resume):
        instead = "--resume" if unfinished else "--overwrite"
        raise UsageError(f"--output {output} is not empty: choose another folder, or {instead}")
    return scheme


def name_of(scheme: hf_posenc.Scheme | None) -> dict[str, Any]:
    """A scheme with all its hyper-parameters, given or not."""
    return {"name": UNPATCHED} if scheme is None else {"name": scheme.name, **scheme.hyperparameters()}


def earlier_progress(arguments: Arguments, of: dict[str, Any]) -> dict[str, Any] | None:
    """What an interrupted run of the same identity left, if it is to be gone on with."""
    folder = Path(arguments.output)
    if not arguments.resume:
        return None
    identity.hold(folder, of, "resume with those, or choose another --output")
    return json.loads((folder / "progress.json").read_text(encoding="utf-8"))


def discard(folder: Path, finished: bool = False) -> None:
    """States that nobody goes on with and, unless it has finished, what another run left here and this one would take."""
    for state in training.states(folder):
        shutil.rmtree(state)
    if not finished:
        (folder / "results.json").unlink(missing_ok=True)
        shutil.rmtree(folder / "base", ignore_errors=True)


def check_lengths(plan: list[training.Phase], text: Text, arguments: Arguments, accelerator: Accelerator) -> None:
    """The text must suffice for one pass of one batch, and for one window of every length."""
    measured, trained = len(stream(text.held_out).tokens), len(stream(text.train).tokens)
    if measured < arguments.eval_lengths[-1]:
        raise UsageError(
            f"the held-out text has {measured:,} tokens, the longest of --eval-lengths needs "
            f"{arguments.eval_lengths[-1]:,}: give more text or shorter lengths"
        )
    if arguments.model is None and trained <= CONTEXT:
        raise UsageError(f"the training text has {trained:,} tokens, the embedded base needs over {CONTEXT}")
    for phase in plan:
        needed = phase.rows * accelerator.num_processes
        if len(phase.windows) < needed:
            raise UsageError(
                f"the training text has {trained:,} tokens, one batch needs {needed * phase.length:,} "
                f"({accelerator.num_processes} x {phase.rows} x {phase.length}): give more text, a shorter "
                "--train-length or a smaller --batch-size"
            )


def check_curve(text: Text, arguments: TrainingArguments, length: int) -> None:
    """The recovery curve is measured in windows of this length."""
    measured = len(stream(text.held_out).tokens)
    if arguments.eval_every and measured < length:
        raise UsageError(
            f"--eval-every: a point of the curve needs {length} held-out tokens and there are {measured:,}: more "
            "--eval-tokens, or --eval-every 0"
        )


def check_vocabulary(model: nn.Module, *texts: list[Document]) -> None:
    """A tokenizer that is not the model's own would fail in the middle, on a GPU without saying why."""
    largest = max(int(stream(text).tokens.max()) for text in texts)
    rows = model.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise UsageError(
            f"the tokenizer gives ids up to {largest}, the model embeds {rows}: they do not belong together"
        )


def check_patch(model: nn.Module, scheme: hf_posenc.Scheme | None, arguments: Arguments) -> None:
    """Patches on trial: what the scheme and this model cannot do together comes out now, not after the measurement."""
    longest = max(arguments.train_length, arguments.eval_lengths[-1])
    if scheme is None:
        limit = position_limit(model)
        if limit is not None and limit < arguments.train_length:
            raise UsageError(
                f"--scheme {UNPATCHED}: the base's table ends at {limit} positions, --train-length is "
                f"{arguments.train_length}"
            )
        return
    with hf_posenc.patched(model, scheme, seed=arguments.seed):
        limit = patch_of(model).scheme.limit
        if limit is not None and limit < longest:
            raise UsageError(
                f"--scheme {arguments.scheme} ends at {limit} positions, --train-length and --eval-lengths go to "
                f"{longest}: for instance --scheme-args num_positions={longest}"
            )
        if arguments.transfer_steps:
            try:
                check_transfer(model)
            except ValueError as error:
                raise UsageError(f"--transfer-steps: {error}") from None


# ----------------------------------------------------------------------------------------------------------------- text


def read_text(arguments: Any, tokenizer: Any, accelerator: Accelerator) -> Text:
    """What is trained on and what is measured; without `--data` the standard library."""
    with accelerator.main_process_first():  # the others find its cache
        documents = corpus.documents(
            tokenizer,
            arguments,
            None if arguments.data else standard_library(),
            tokens_needed(arguments, accelerator),
        )
    return Text(len(documents), *corpus.split(documents, tokenizer, arguments))


def tokens_needed(arguments: Any, accelerator: Accelerator) -> int:
    """Tokens of a run that reads a stream: what is held out, and every training window once."""
    per_step = arguments.batch_size * arguments.train_length * arguments.gradient_accumulation
    return arguments.eval_tokens + arguments.steps * per_step * accelerator.num_processes


# -------------------------------------------------------------------------------------------------------------- results


def save(accelerator: Accelerator, wrapped: nn.Module, tokenizer: Any, output: Path) -> None:
    """Weights and tokenizer in `output/model`; of LoRA also the adapter alone, in `output/adapter`."""
    model = accelerator.unwrap_model(wrapped)
    weights = accelerator.get_state_dict(wrapped)  # gathered, where processes hold parts
    if isinstance(model, peft.PeftModel):
        if accelerator.is_main_process:
            model.save_pretrained(output / "adapter")
        model, weights = model.merge_and_unload(), None
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
        return
    if patch_of(model) is not None:
        model.save_pretrained(output / "model", state_dict=weights, tokenizer=tokenizer)
        accelerator.wait_for_everyone()
    else:
        save_stock(accelerator, model, tokenizer, output / "model")


def save_stock(accelerator: Accelerator, model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """An unpatched model, whole or not at all."""
    if accelerator.is_main_process:
        staging = folder.with_name(folder.name + ".partial")
        shutil.rmtree(staging, ignore_errors=True)
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(staging, folder)
    accelerator.wait_for_everyone()


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Whole or not at all: an interrupted write leaves what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


@contextmanager
def loaded_whole(accelerator: Accelerator) -> Iterator[None]:
    """Inside, ZeRO-3 does not spread weights while they are loaded: the base is measured and patched first."""
    config = getattr(accelerator.state.deepspeed_plugin, "dschf", None)
    if config is None:
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(config)


def hyper(model: nn.Module) -> dict[str, Any]:
    """Hyper-parameters of the scheme a model carries, as its checkpoint will say them."""
    return json.loads(json.dumps(patch_of(model).scheme.hyperparameters()))


def provenance(accelerator: Accelerator) -> dict[str, Any]:
    """What somebody needs to run the same again."""
    here = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            return subprocess.run(
                ["git", "-C", here, *words], capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    modules = (hf_posenc, torch, transformers, accelerate, datasets, peft)
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git": {
            "commit": git("rev-parse", "HEAD"),
            "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
        },
        "versions": {
            "python": platform.python_version(),
            **{module.__name__: module.__version__ for module in modules},
        },
        "hardware": {
            "device": str(accelerator.device),
            "name": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else platform.processor(),
            "processes": accelerator.num_processes,
            "threads": torch.get_num_threads(),
        },
    }


class stopwatch:
    """Context manager: `seconds[name]` is the time spent inside."""

    def __init__(self, seconds: dict[str, float], name: str):
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] = round(time.perf_counter() - self.start, 1)


def count(model: nn.Module, trained: bool = False) -> int:
    """Number of weights, tied ones once."""
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad or not trained)


if __name__ == "__main__":
    main()
    # A process that leaves its group to the end of the interpreter is aborted there now and then.
    PartialState().destroy_process_group()

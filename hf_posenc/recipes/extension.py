"""One run: a base is measured, patched, fine-tuned, measured again and saved.

extend_context.py makes one, compare_schemes.py one for each of its variants and seeds.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers import AutoConfig, AutoTokenizer

import hf_posenc

from ..analysis import plots
from ..families.base import base_model_type
from ..registry import family_for
from . import calibrating, card, corpus, identity, measuring, models, page, rates, run_folder, schemes, tables, training
from .calibrating import CalibrationArguments
from .corpus import DataArguments, Text, read_text, stream
from .embedded import CONTEXT, FOLDER, PROMPT, byte_model, byte_tokenizer, sample, train_base, trained_base
from .measuring import MeasuringArguments, held_out_loss, measure_model
from .models import ModelArguments, count, load_base, load_named, load_trained_base, position_limit
from .options import UsageError, as_in, at_least, refuse
from .rates import RateArguments
from .recovery import check_transfer, teacher_of
from .results import origin, stopwatch
from .run_folder import FolderArguments
from .schemes import UNPATCHED, SchemeArguments, hyperparameters
from .training import RecoveryArguments, TrainingArguments


@dataclass
class SharedArguments(
    ModelArguments,
    DataArguments,
    MeasuringArguments,
    CalibrationArguments,
    TrainingArguments,
    RateArguments,
    RecoveryArguments,
):
    """Adapters."""

    lora_rank: int = field(
        default=0,
        metadata={
            "help": "train LoRA of this rank with norms, positions, and embeddings where the swap needs it; 0 trains "
            "every weight"
        },
    )


@dataclass
class Arguments(FolderArguments, SchemeArguments, SharedArguments):
    """This recipe."""

    # Of all schemes the one that comes closest to its base by calibration.
    scheme: str = as_in(SchemeArguments, "scheme", "transformer_xl")
    steps: int = as_in(TrainingArguments, "steps", 60)
    transfer_steps: int = field(
        default=0,
        metadata={
            "help": "how many of --recovery-steps, the first ones, train each layer's attention to give out what the "
            "base's gives out, before training on the text begins"
        },
    )
    seed: int = field(default=0, metadata={"help": "seed of everything that is random"})
    push_to: str | None = field(default=None, metadata={"help": "repository on the Hub to push the result to"})
    private: bool = field(default=False, metadata={"help": "make that repository private, if it is new"})
    train_base: bool = field(
        default=False,
        metadata={
            "help": "without --model: train the small base on the training text, instead of taking the one that comes "
            "with the package"
        },
    )
    base_steps: int = field(default=1200, metadata={"help": "with --train-base: its optimizer steps"})
    base_seed: int = field(default=0, metadata={"help": "with --train-base: seed of its weights and batches"})


@dataclass
class Sweep:
    """What the runs of a sweep need not make again."""

    text: Text
    identity: dict[str, Any]
    before: list[dict[str, Any]] | None = None


@contextmanager
def timed(seconds: dict[str, float], name: str, accelerator: Accelerator) -> Iterator[None]:
    """Context manager: `seconds[name]` is the time spent inside, and a line says that and the memory."""
    with stopwatch(seconds, name):
        yield
    memory = training.peak_memory(accelerator) / 2**30
    accelerator.print(f"  That took {seconds[name]:.1f} s. Most memory so far: {memory:.2f} GiB.")


def run(arguments: Arguments, sweep: Sweep | None = None) -> dict[str, Any]:
    """The recipe, top to bottom.

    Args:
        arguments: checked here.
        sweep: what a sweep has made already: the text, what the run is of, the base's measurements.

    Returns:
        What it wrote to results.json.

    Raises:
        UsageError: the arguments, the text and the model cannot work together; nothing long has started then.
        Interrupted, Diverged, OSError: as `training.fine_tune`.
    """
    with ExitStack() as held:
        return steps(arguments, sweep, held)


def steps(arguments: Arguments, sweep: Sweep | None, held: ExitStack) -> dict[str, Any]:
    """Make the run; `held` keeps the folder until its end."""
    scheme = check_arguments(arguments)
    output = Path(arguments.output)
    accelerator = training.accelerator_for(arguments, output)
    say = accelerator.print
    set_seed(arguments.seed)

    say(f"Reading {corpus.describe(arguments)}")
    tokenizer = load_named(AutoTokenizer, arguments) if arguments.model else byte_tokenizer()
    text = sweep.text if sweep else read_text(arguments, tokenizer, accelerator)
    launched = identity.launched(accelerator)
    of = sweep.identity if sweep else identity.of(arguments, text, scheme=schemes.said(scheme), **launched)
    if arguments.model is None and not arguments.train_base:
        of["base"] = identity.digest_of(str(FOLDER))
    earlier = run_folder.earlier(arguments, of)
    with models.loaded_whole(accelerator):
        model = load_base(arguments) if arguments.model else trained_base()
    trained_length = position_limit(model) or model.config.max_position_embeddings
    if arguments.recovery_steps is None:
        longer = arguments.recovery_length is not None or arguments.train_length > trained_length
        arguments.recovery_steps = arguments.steps // 2 if longer else 0
    plan = training.phases(arguments, text.train, trained_length)
    measuring.check_text(text.held_out, arguments, curve_length=trained_length)
    if arguments.train_base and len(stream(text.train).tokens) <= CONTEXT:
        raise UsageError(f"the training text has no more tokens than the embedded base's context, {CONTEXT}")
    training.check_plan(plan, accelerator)
    rates.check_plan(plan[0], arguments, accelerator)
    data = text.to_dict(arguments)
    say(
        f"  {data['documents']:,} documents; {data['training_tokens']:,} tokens to train on, "
        f"{data['held_out_tokens']:,} held out"
    )
    models.check_vocabulary(model, text.train, text.held_out)
    if (answers := check_patch(model, scheme, arguments)) is not None:
        say(f"The swap, tried before anything long: {answers}")
    calibrated = scheme is not None and arguments.calibrate != "none"
    if calibrated:
        calibrating.check_base(model, arguments)
        windows = calibrating.windows(text.train, trained_length, arguments)
    model.to(accelerator.device)

    seconds: dict[str, float] = earlier["seconds"] if earlier else {}
    results: dict[str, Any] = {
        **origin("extend_context", arguments, accelerator),
        "identity": of,
        "seed": arguments.seed,
        "data": data,
        "base": {
            "name": arguments.model or "embedded byte-level GPT-2",
            "on_hub": arguments.model is not None and not Path(arguments.model).exists(),
            "model_type": model.config.model_type,
            "parameters": count(model),
            "trained_length": trained_length,
        },
        "seconds": seconds,
    }
    held.enter_context(run_folder.alone(accelerator, output))
    if accelerator.is_main_process:
        run_folder.check(arguments)  # again: another run may have begun since
    if not earlier:
        run_folder.begin(accelerator, output, results, anew=True)
    if arguments.train_base:
        if earlier and (output / "base" / "config.json").is_file():
            model = load_trained_base(output / "base").to(accelerator.device)
        else:
            say(f"Training the embedded base: {count(model):,} weights, context {model.config.n_positions}")
            set_seed(arguments.base_seed)
            model = byte_model(tokenizer).to(accelerator.device)
            with timed(seconds, "base", accelerator):
                tokens = stream(text.train).tokens
                train_base(model, tokens, steps=arguments.base_steps, progress=accelerator.is_main_process)
            models.save_stock(accelerator, model, tokenizer, output / "base")
    if arguments.model is None and not earlier:
        say(f"The base, given {PROMPT!r}, writes:\n{sample(model, tokenizer)}\n")

    if earlier:
        known = ("before", "retrieval_before", "calibration", "learning_rates")
        results |= {key: earlier[key] for key in known if key in earlier}
    elif sweep and sweep.before:
        results["before"] = sweep.before
    if "before" not in results:
        say(f"Measuring {arguments.model or 'the embedded base'} as it is")
        with timed(seconds, "before", accelerator):
            results["before"], results["retrieval_before"] = measure_model(model, text.held_out, arguments, accelerator)
    run_folder.begin(accelerator, output, results, anew=False)
    set_seed(arguments.seed)  # whatever was made before, and whatever was there already

    if calibrated:
        loss = calibrating.loss_at(text, windows.shape[1])
        base_loss = loss(model)
    teacher = None
    if arguments.distill or arguments.transfer_steps:
        teacher = teacher_of(model, share_weights=bool(arguments.lora_rank))
    if scheme is not None:
        results["verify"] = schemes.patch(model, scheme, arguments.seed)
        say(f"Patched\n{hf_posenc.describe(model)}\n{results['verify']}")
    results["scheme"] = schemes.said(*hf_posenc.schemes_of(model))
    if arguments.lora_rank:
        # A copy of the config: PEFT writes into it.
        model = peft.get_peft_model(model, hf_posenc.lora_config(model, r=arguments.lora_rank))
        trained = count(model, trained=True)
        say(f"LoRA of rank {arguments.lora_rank}: {trained:,} of {count(model):,} weights are trained")

    if not calibrated:
        why = "--calibrate none" if arguments.calibrate == "none" else "the base keeps its positions"
        results["calibration"] = calibrating.skipped(why)
    elif "calibration" in results:
        run_folder.restore_calibrated(model, output)
        calibrating.write_down(model, results["calibration"])
    else:
        say(f"Calibrating with {windows.numel():,} tokens of the training text; closed forms come first")
        with timed(seconds, "calibration", accelerator):
            results["calibration"] = calibrating.calibrate(
                accelerator,
                model,
                windows,
                arguments,
                loss=loss,
                base_loss=base_loss,
                state_file=output / run_folder.CALIBRATING,
            )
        run_folder.keep_calibrated(accelerator, model, output)
        run_folder.begin(accelerator, output, results, anew=False)
        run_folder.discard_calibration(accelerator, output)
    say(tables.calibration_line(results["calibration"]))
    if calibrated:
        set_seed(arguments.seed)  # whether it was calibrated just now or before

    def found_rate(wrapped: nn.Module, optimizer: torch.optim.Optimizer, one_step: Callable[[int], object]) -> float:
        if "learning_rates" not in results:
            say("Trying learning rates")
            results["learning_rates"] = rates.find(
                arguments.find_learning_rate, plan[0], wrapped, optimizer, one_step, say
            )
            run_folder.begin(accelerator, output, results, anew=False)
        say(f"Learning rate {results['learning_rates']['chosen']:g}")
        return results["learning_rates"]["chosen"]

    for phase in plan:
        per_step = training.tokens_per_step(phase, arguments, accelerator)
        say(f"Fine-tuning: {phase.steps} steps of {per_step:,} tokens at length {phase.length}")
    with timed(seconds, "training", accelerator):
        wrapped, results["training"] = training.fine_tune(
            accelerator,
            model,
            plan,
            arguments,
            folder=output,
            resume=bool(earlier),
            teacher=teacher,
            trained_length=trained_length,
            evaluate=held_out_loss(text, trained_length),
            find_rate=found_rate if arguments.find_learning_rate else None,
        )
    model = accelerator.unwrap_model(wrapped)

    say("Measuring the model after fine-tuning")
    with timed(seconds, "after", accelerator):
        results["after"], results["retrieval_after"] = measure_model(model, text.held_out, arguments, accelerator)
    models.save(accelerator, wrapped, tokenizer, output)
    if accelerator.is_main_process:
        if scheme is not None:
            card.write(output / "model", results, arguments.push_to)
        page.write(output / "report.html", results)
        run_folder.finish(output, results)
    say(
        f"\n{tables.as_text(results)}\n\ncheckpoint  {output / 'model'}\nreport      {output / 'report.html'}\n"
        f"results     {output / 'results.json'}\n\n{tables.verdict(results)}"
    )
    if arguments.push_to and accelerator.is_main_process:
        commit = hf_posenc.checkpoints.hub.push(output / "model", arguments.push_to, private=arguments.private or None)
        say(commit.commit_url)
    return results


def check_arguments(arguments: Arguments) -> hf_posenc.Scheme | None:
    """Everything that can be known without reading the text or the weights. Returns the scheme, None for a control."""
    plots.check_installed()  # the report and the card are drawn at the end
    rates.check(arguments)
    calibrating.check(arguments)
    training.check(arguments)
    training.check_recovery(arguments)
    corpus.check(arguments, needs_data=arguments.model is not None)
    measuring.check(arguments)
    models.check(arguments)
    at_least(arguments, 1, "base_steps")
    at_least(arguments, 0, "base_seed")
    at_least(arguments, 0, "lora_rank", "transfer_steps")
    if arguments.transfer_steps > (arguments.recovery_steps or 0):
        raise UsageError(
            f"--transfer-steps {arguments.transfer_steps} are the first of --recovery-steps "
            f"{arguments.recovery_steps or 0}, not more"
        )
    if arguments.context_parallel > 1 and (arguments.distill or arguments.transfer_steps):
        raise UsageError(
            "--context-parallel is not for --distill and --transfer-steps: the base is asked for whole windows"
        )
    if arguments.model is not None:
        refuse(arguments, "train_base", f"trains the embedded base, and the base is --model {arguments.model}")
    if not arguments.train_base:
        for name in ("base_steps", "base_seed"):
            refuse(arguments, name, "is of --train-base, and no base is trained")
    if arguments.push_to is None:
        refuse(arguments, "private", "is of the repository that --push-to names, and there is none")
    elif arguments.scheme == UNPATCHED:
        refuse(arguments, "push_to", f"takes patched models, and --scheme {UNPATCHED} makes none")
    scheme = None
    if arguments.scheme != UNPATCHED:
        scheme = schemes.named("scheme", arguments.scheme, hyperparameters(arguments.scheme_args))
    elif arguments.scheme_args or arguments.lora_rank:
        raise UsageError(
            f"--scheme {UNPATCHED} takes neither --scheme-args nor --lora-rank; as a control with LoRA patch in the "
            "base's own scheme (rope, or learned)"
        )
    if arguments.model is not None:
        config = load_named(AutoConfig, arguments)
        if config.model_type != base_model_type(config):
            raise UsageError(
                f"--model {arguments.model} is patched already: give the stock checkpoint it was made from"
            )
        family_for(config.model_type)  # says which families there are
    run_folder.check(arguments)
    return scheme


def check_patch(model: nn.Module, scheme: hf_posenc.Scheme | None, arguments: Arguments) -> str | None:
    """Patches on trial: what the scheme and this model cannot do together comes out now, not after the measurement.

    Returns:
        What `verify` says of the embedded base in one line; None of another, and of a control.
    """
    longest = max(arguments.train_length, arguments.lengths[-1])
    with hf_posenc.patched(model, scheme, seed=arguments.seed) if scheme is not None else nullcontext():
        limit = position_limit(model)
        if scheme is None and limit is not None and limit < arguments.train_length:
            raise UsageError(
                f"--scheme {UNPATCHED}: the base's table ends at {limit} positions, --train-length is "
                f"{arguments.train_length}"
            )
        if scheme is not None and limit is not None and limit < longest:
            raise UsageError(
                f"--scheme {arguments.scheme} ends at {limit} positions, --train-length and --lengths go to "
                f"{longest}: for instance --scheme-args num_positions={longest}"
            )
        if arguments.packing == "documents" and not models.keeps_documents_apart(model):
            raise UsageError(
                "--packing documents: this model does not hand its positions to the mask, so its attention crosses "
                "from document to document"
            )
        if arguments.transfer_steps:
            check_transfer(model)
        # Of a large model this takes a while on a CPU, and it is asked again when it is patched.
        return str(hf_posenc.verify(model)).splitlines()[0] if scheme and arguments.model is None else None

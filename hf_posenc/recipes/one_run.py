"""One run: measure a base, patch, calibrate, fine-tune, measure again, save.

`extend` makes one run, `compare` a run for every variant and seed.
"""

import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import peft
import torch
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_posenc
from hf_posenc import Matching

from ..analysis import plots
from ..core.registry import family_for
from ..families.base import language_config
from ..model.patch_record import keeps_positions
from . import calibration_stage, measurements, model_card, models, run_folder, run_report, training
from .calibration_stage import CalibrationArguments
from .corpus import Text, read_text, stream
from .embedded import CONTEXT, FOLDER, byte_tokenizer, trained_base
from .measurements import HeldOutArguments
from .models import UNPATCHED, ModelArguments, SchemeArguments, Schemes, load
from .options import Count, Natural, NotNegative, UsageError
from .results import Results, origin, read_json
from .training import Teacher, TrainingArguments
from .training_positions import check_follows

REUSED_RESULTS = ("seconds", "before", "measures_before", "writes_before", "calibration")
"""Results that a resumed run keeps. A run of a sweep takes the measurements of the base from an earlier run."""
CALIBRATED_RATE, PLAIN_RATE = 3e-4, 1e-3
"""Default peak learning rates of fine-tuning. At the rate that a plain swap needs, calibrated models predict worse than
at lower rates."""


@dataclass(kw_only=True)
class SharedArguments(ModelArguments, HeldOutArguments, CalibrationArguments, TrainingArguments):
    """Winning back the loss that the swap costs.

    Args:
        lora_rank: train a LoRA adapter of this rank, together with norms, positions, and, if the swap needs it,
            embeddings; 0 trains every weight.
        recovery_steps: number of steps, the first of --steps, that run at the length the base was trained at: short
            windows win the loss back more cheaply (default: half of --steps if the scheme replaces the base's positions
            and --train-length exceeds that length; else 0).
        distill: weight of the KL divergence from the predictions of the unpatched base, within the length it was
            trained at. It is added to the loss on the text; 0 turns it off.
    """

    lora_rank: Natural = 0
    recovery_steps: Natural | None = None
    distill: NotNegative = 0.0


@dataclass(kw_only=True)
class Arguments(SchemeArguments, SharedArguments):
    """The run.

    Args:
        output: folder to write; it must be empty, or not exist yet.
        resume: go on with an interrupted run of the same arguments.
        seed: seed of everything that is random.
    """

    output: str = "runs/extend_context"
    resume: bool = False
    steps: Count = 60
    seed: int = 0


class Shared(NamedTuple):
    """What a sweep gives to each of its runs: the text is read, and the base measured, only once.

    Attributes:
        text: text of all runs.
        tokenizer: tokenizer of the text.
        identity: identity of this run.
        earlier: results that need not be measured again.
    """

    text: Text
    tokenizer: PreTrainedTokenizerBase
    identity: Results
    earlier: Results


def run(arguments: Arguments, shared: Shared | None = None) -> Results:
    """Make a run.

    Args:
        arguments: options of the run, not yet checked.
        shared: what the runs of a sweep share; None for a single run.

    Returns:
        The content of results.json.

    Raises:
        UsageError: if the arguments, the text and the model cannot work together. It is raised before anything that
            takes long.
        Interrupted, Diverged, OSError: see `training.fine_tune`.
    """
    schemes = check_arguments(arguments)
    output, seed = Path(arguments.output), arguments.seed
    run_folder.check(output, arguments.resume)
    accelerator = training.accelerator_for(arguments, output)
    say = accelerator.print
    set_seed(seed)

    # The text and the base. What cannot work is found here, before anything that takes long.
    say(f"Reading {arguments.description}")
    if shared:
        text, tokenizer, identity, earlier = shared
    else:
        tokenizer = load(AutoTokenizer, arguments.model) if arguments.model else byte_tokenizer()
        text = read_text(arguments, tokenizer, accelerator, arguments.tokens_to_read)
        base, names = arguments.model or str(FOLDER), models.schemes_to_json(schemes)
        identity = run_folder.identity(arguments, text, accelerator, base, scheme=names)
        earlier = {}
    if arguments.resume:
        run_folder.require_same(output, identity, "resume with those, or choose another --output")
        earlier = read_json(output / "progress.json")
    with models.without_zero3_sharding(accelerator):
        model: PreTrainedModel = trained_base()
        if arguments.model:
            model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    trained_length = models.position_limit(model) or model.config.max_position_embeddings
    tokens = stream(text.held_out).tokens
    measurements.check_text(len(tokens), arguments.lengths[-1], trained_length if arguments.eval_every else 0)
    swapped = check_patch(model, schemes, arguments)
    if arguments.recovery_steps is None:
        recovers = swapped and arguments.train_length > trained_length
        arguments.recovery_steps = arguments.steps // 2 if recovers else 0
    plan = training.phases(
        arguments,
        text.train,
        accelerator,
        packing=arguments.packing,
        seed=seed,
        recovery_steps=arguments.recovery_steps,
        recovery_length=min(trained_length, arguments.train_length),
    )
    models.check_vocabulary(model, text.train, text.held_out)
    windows = None
    if schemes and arguments.calibrate != "none":
        windows = calibration_stage.windows(
            text.train, trained_length, arguments.calibrate_length, arguments.calibrate_windows, seed
        )
    results: Results = {
        **origin("extend_context", arguments, accelerator),
        "identity": identity,
        "seed": seed,
        "data": text.to_dict(),
        "base": {
            "name": arguments.model or "embedded byte-level GPT-2",
            "on_hub": arguments.model is not None and not Path(arguments.model).exists(),
            "model_type": model.config.model_type,
            "parameters": model.num_parameters(),
            "trained_length": trained_length,
        },
        "seconds": {},
        **{name: earlier[name] for name in REUSED_RESULTS if name in earlier},
    }
    model.to(accelerator.device)
    run_folder.write_progress(accelerator, output, results)
    texts, lengths = measurements.texts(text.held_out, arguments.packing), arguments.lengths

    def measure(when: str, what: str) -> None:
        say(f"Measuring {what}")
        with timed(results["seconds"], when):
            results[when] = measurements.perplexities(model, texts, lengths, accelerator)
            results[f"measures_{when}"] = measurements.measures(model, tokenizer, tokens, arguments, accelerator)
            if arguments.prompt:
                results[f"writes_{when}"] = measurements.written(model, tokenizer, arguments.prompt)

    # Measure the base.
    if "before" not in results:
        measure("before", f"{results['base']['name']} as it is")
        run_folder.write_progress(accelerator, output, results)
    set_seed(seed)  # the same random numbers for a resumed run, which does not measure the base again

    # Patch it. What calibration and fine-tuning compare with is taken from the base before that.
    if windows is not None and "calibration" not in results:
        length = min(windows.shape[1], len(tokens))
        calibration_loss = measurements.held_out_loss(tokens, length, progress=accelerator.is_main_process)
        base_loss = calibration_loss(model)
    teacher = None
    if arguments.distill:
        teacher = Teacher.of(model, arguments.distill, trained_length, share_weights=bool(arguments.lora_rank))
    if schemes:
        report = hf_posenc.verify(hf_posenc.patch_model(model, schemes, seed=seed))
        if not report:
            raise RuntimeError(f"the patch does not do what it should:\n{report}")
        results["verify"] = str(report)
        say(f"Patched\n{hf_posenc.describe(model)}\n{results['verify']}")
    results["scheme"] = models.schemes_to_json(hf_posenc.schemes_of(model))
    if arguments.lora_rank:
        model = peft.get_peft_model(model, hf_posenc.lora_config(model, r=arguments.lora_rank))

    # Calibrate it, or load the weights that an interrupted run calibrated.
    if windows is None:
        reason = "--calibrate none" if arguments.calibrate == "none" else "the base keeps its positions"
        results["calibration"] = {"method": "none", "why": reason}
    elif "calibration" in results:
        run_folder.restore_calibrated(model, output)
        calibration_stage.record_again(model, results["calibration"])
    else:
        say(f"Calibrating with up to {len(windows):,} windows of {windows.shape[1]:,} tokens; closed forms come first")
        matching = None
        if arguments.calibrate == "matching":
            steps, size = arguments.calibrate_steps, max(1, Matching.batch_size // accelerator.num_processes)
            state = output / run_folder.CALIBRATION_STATE
            matching = Matching(steps=steps, batch_size=size, seed=seed, state_file=state)
        with timed(results["seconds"], "calibration"):
            results["calibration"] = calibration_stage.calibrate(
                accelerator, model, windows, matching, loss=calibration_loss, base_loss=base_loss
            )
        run_folder.write_calibrated(accelerator, model, output, results)
    say(run_report.calibration_line(results["calibration"]))
    if windows is not None:
        set_seed(seed)  # as above: a resumed run may not calibrate again

    # Fine-tune it.
    for phase in plan:
        say(f"Fine-tuning: {phase.steps} steps of {phase.tokens_per_step:,} tokens at length {phase.windows.length}")
    with timed(results["seconds"], "training"):
        evaluate = measurements.held_out_loss(tokens, trained_length)
        wrapped, results["training"] = training.fine_tune(
            accelerator, model, plan, arguments, output, teacher=teacher, evaluate=evaluate
        )

    # Measure again, and save.
    model = accelerator.unwrap_model(wrapped)
    # All is trained and measured in float32, or as --mixed-precision says.
    dtype = language_config(models.stock_config(arguments.model)).dtype if arguments.model else None
    try:
        measure("after", "the model after fine-tuning")
    except UsageError:  # of a measure: the weights are kept
        models.save(accelerator, wrapped, tokenizer, output, dtype or torch.float32)
        raise
    models.save(accelerator, wrapped, tokenizer, output, dtype or torch.float32)
    if accelerator.is_main_process:
        if schemes:
            model_card.write(output / "model", results)
        print(f"\n{run_report.as_text(results)}\n\n{run_report.verdict(results)}\nAll is in {output}")
        run_folder.finish(output, results)
    accelerator.wait_for_everyone()
    return results


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Context manager that stores the time spent inside as `seconds[name]`."""
    start = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - start, 1)


def check_arguments(arguments: Arguments) -> Schemes:
    """Check everything that needs neither the text nor the weights; set defaults of learning rate and measurements.

    Returns:
        The schemes; none for a control.

    Raises:
        UsageError: if the arguments cannot work.
    """
    plots.check_installed()  # the card has a picture
    if arguments.learning_rate is None:
        arguments.learning_rate = PLAIN_RATE if arguments.calibrate == "none" else CALIBRATED_RATE
    check_training(arguments)
    if arguments.model and not arguments.data:
        raise UsageError("--model needs --data FILE..., text to fine-tune and measure on")
    trained, length = CONTEXT, arguments.train_length
    if arguments.model:
        family_for(models.stock_config(arguments.model).model_type)  # its error lists the families
        trained = models.trained_length(arguments.model) or length
    measurements.check(arguments, min(trained, length), *(length * quarters // 4 for quarters in (1, 2, 4, 8)))
    if arguments.scheme != UNPATCHED:
        return models.read_schemes("scheme", arguments.scheme, arguments.scheme_args)
    if arguments.scheme_args or arguments.lora_rank:
        raise UsageError(
            f"--scheme {UNPATCHED} takes neither --scheme-args nor --lora-rank. For a control with LoRA, patch in "
            "the base's own scheme (rope, or learned)"
        )
    return ()


def check_training(arguments: SharedArguments) -> None:
    """Raise UsageError for options that contradict each other, and for a tracker that is not installed."""
    length, steps = arguments.pose_length, arguments.steps
    if length is not None:
        if length <= arguments.train_length:
            raise UsageError(f"--pose-length {length} must be above --train-length {arguments.train_length}")
        clashes = {
            "--packing documents": arguments.packing == "documents",
            "--context-parallel": arguments.context_parallel > 1,
            "--distill": arguments.distill > 0,
            "--recovery-steps for all --steps": arguments.recovery_steps == steps,
        }
        for other in (name for name, given in clashes.items() if given):
            raise UsageError(f"--pose-length cannot be combined with {other}")
    if arguments.distill and arguments.context_parallel > 1:
        raise UsageError("--context-parallel cannot be combined with --distill: the teacher reads whole windows")
    if (arguments.recovery_steps or 0) > steps:
        raise UsageError(f"--recovery-steps {arguments.recovery_steps} are the first of all --steps {steps}, not more")
    # accelerate would go on without it
    if arguments.tracker != "none" and importlib.util.find_spec(arguments.tracker) is None:
        raise UsageError(f"--tracker {arguments.tracker}: pip install {arguments.tracker}")


def check_patch(model: PreTrainedModel, schemes: Schemes, arguments: Arguments) -> bool:
    """Patch the model on trial, so that schemes that do not fit are refused before anything is measured.

    Args:
        model: stock model.
        schemes: schemes to patch in.
        arguments: checked options.

    Returns:
        Whether the schemes replace positions of the base; False if they keep them, at most stretched.

    Raises:
        UsageError: if there are too few positions, or attention would cross from one packed document to another.
    """
    trained = max(arguments.train_length, arguments.pose_length or 0)
    with hf_posenc.patched(model, schemes, seed=arguments.seed) if schemes else nullcontext():
        limit = models.position_limit(model)
        needed = max(trained, arguments.lengths[-1]) if schemes else trained
        if limit is not None and limit < needed:
            raise UsageError(
                f"--scheme {arguments.scheme} ends at {limit} positions, --train-length, --lengths, --pose-length "
                f"go to {needed}: for instance --scheme-args num_positions={needed}"
            )
        if arguments.packing == "documents" and not models.keeps_documents_apart(model):
            raise UsageError(
                "--packing documents: the attention mask of this model does not take positions into account, so "
                "attention crosses from document to document"
            )
        if arguments.pose_length is not None:
            check_follows(model, arguments.pose_length)
        return not keeps_positions(model)

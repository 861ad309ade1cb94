"""One run: measure a base, patch, calibrate, fine-tune, measure again, save.

extend_context.py makes one run, compare_schemes.py a run for every variant and seed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import peft
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast, set_seed
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_posenc

from ..analysis import plots
from ..calibration.temperature_fit import trained_strengths
from ..registry import family_for
from . import (
    calibration_stage,
    corpus,
    measurements,
    model_card,
    models,
    run_folder,
    run_report,
    training,
    training_positions,
)
from . import (
    learning_rate_search as rates,
)
from . import (
    run_identity as identity,
)
from .calibration_stage import CalibrationArguments
from .corpus import Text, Windows, order, read_text, stream
from .distillation import Distillation, teacher_of
from .embedded import CONTEXT, FOLDER, PROMPT, byte_model, byte_tokenizer, sample, train_base, trained_base
from .measurements import HeldOutArguments, held_out_loss, measure_model
from .models import UNPATCHED, ModelArguments, SchemeArguments, Schemes
from .options import Count, Name, Natural, UsageError, refuse
from .results import Results, origin, stopwatch
from .run_folder import FolderArguments
from .training import FineTuningArguments, Phase
from .training_positions import PLAIN

FIT_WINDOWS = 10
"""Number of windows that fit the temperature; two of them only judge."""
REUSED_RESULTS = ("seconds", "before", "retrieval_before", "calibration", "learning_rates")
"""Results that a resumed run keeps. A run of a sweep takes the measurements of the base from an earlier run."""


# The first line of the docstrings of these two classes is a heading in --help.


@dataclass
class SharedArguments(ModelArguments, HeldOutArguments, CalibrationArguments, FineTuningArguments):
    """Adapters.

    Args:
        lora_rank: train a LoRA adapter of this rank, together with norms, positions, and, if the swap needs it,
            embeddings; 0 trains every weight.
    """

    lora_rank: Natural = 0


@dataclass
class Arguments(FolderArguments, SchemeArguments, SharedArguments):
    """This recipe.

    Args:
        seed: seed of everything that is random.
        push_to: repository on the Hub to push the result to.
        private: make that repository private, if it is new.
        train_base: train the small base on the training text, instead of using the trained one that comes with the
            package; only without --model.
        base_steps: optimizer steps of the base, with --train-base.
        base_seed: seed of the weights and batches of the base, with --train-base.
        fit_temperature: lengths in tokens at which a trainable temperature is fitted after the training, on its text.
    """

    # The default: the scheme that calibration brings closest to its base.
    scheme: Name = field(default="transformer_xl", metadata=models.SCHEME_METADATA)
    steps: Count = 60
    seed: int = 0
    push_to: str | None = None
    private: bool = False
    train_base: bool = False
    base_steps: Count = 1200
    base_seed: Natural = 0
    fit_temperature: list[int] = field(default_factory=list)


@dataclass
class Sweep:
    """What the runs of a sweep share, so that it is computed only once.

    Attributes:
        text: text that all runs read.
        identity: identity of this run.
        before: measurements of the base; None until a run has made them.
    """

    text: Text
    identity: Results
    before: list[Results] | None = None


def run(arguments: Arguments, sweep: Sweep | None = None) -> Results:
    """Make a run.

    Args:
        arguments: options of the run, not yet checked.
        sweep: what the runs of a sweep share; None for a single run.

    Returns:
        The content of results.json.

    Raises:
        UsageError: if the arguments, the text and the model cannot work together. It is raised before anything that
            takes long.
        Interrupted, Diverged, OSError: see `training.fine_tune`.
    """
    prepared = prepare(arguments, sweep)
    with run_folder.locked(prepared.accelerator, prepared.output):
        prepared.begin()
        prepared.train_base()
        prepared.measure_base()
        prepared.patch()
        prepared.calibrate()
        prepared.fine_tune()
        prepared.fit_temperature()
        prepared.measure_result()
        prepared.write()
    return prepared.results


def prepare(arguments: Arguments, sweep: Sweep | None) -> "Run":
    """Read the text and the base, and check that everything works together, before anything long starts."""
    schemes = check_arguments(arguments)
    accelerator = training.accelerator_for(arguments, Path(arguments.output))
    set_seed(arguments.seed)
    accelerator.print(f"Reading {corpus.describe(arguments)}")
    tokenizer = models.load_named(AutoTokenizer, arguments) if arguments.model else byte_tokenizer()
    if sweep:
        text, run_identity = sweep.text, sweep.identity
    else:
        text = read_text(arguments, tokenizer, accelerator, arguments.tokens_to_read, arguments.split_seed)
        launched = identity.launched(accelerator)
        run_identity = identity.of(arguments, text, scheme=models.schemes_to_json(schemes), **launched)
    if arguments.model is None and not arguments.train_base:
        run_identity["base"] = identity.digest_of(str(FOLDER))
    earlier = run_folder.earlier_progress(arguments, run_identity)
    with models.without_zero3_sharding(accelerator):
        model: PreTrainedModel = models.load_base(arguments) if arguments.model else trained_base()
    trained_length = models.position_limit(model) or model.config.max_position_embeddings
    plan = make_plan(arguments, text, trained_length, accelerator)
    data = text.to_dict(arguments)
    accelerator.print(
        f"  {data['documents']:,} documents; {data['training_tokens']:,} tokens to train on, "
        f"{data['held_out_tokens']:,} held out"
    )
    models.check_vocabulary(model, text.train, text.held_out)
    check_patch(model, schemes, text, arguments, accelerator)
    windows = None
    if schemes and arguments.calibrate != "none":
        windows = calibration_stage.windows(text.train, trained_length, arguments, arguments.seed)
    reused = earlier or ({"before": sweep.before} if sweep and sweep.before else {})
    results = {
        **origin("extend_context", arguments, accelerator),
        "identity": run_identity,
        "seed": arguments.seed,
        "data": data,
        "base": {
            "name": arguments.model or "embedded byte-level GPT-2",
            "on_hub": arguments.model is not None and not Path(arguments.model).exists(),
            **models.describe(model, trained_length),
        },
        "seconds": {},
        **{name: reused[name] for name in REUSED_RESULTS if name in reused},
    }
    model.to(accelerator.device)
    resumed = earlier is not None
    return Run(arguments, accelerator, tokenizer, text, schemes, trained_length, plan, windows, resumed, model, results)


def make_plan(arguments: Arguments, text: Text, trained_length: int, accelerator: Accelerator) -> list[Phase]:
    """Return the phases of the fine-tuning; set the default of `--recovery-steps`.

    Raises:
        UsageError: if the text is too short to train on or to measure on.
    """
    if arguments.recovery_steps is None:
        recovers = arguments.recovery_length is not None or arguments.train_length > trained_length
        arguments.recovery_steps = arguments.steps // 2 if recovers else 0
    plan = training.phases(arguments, text.train, trained_length, packing=arguments.packing, seed=arguments.seed)
    measurements.check_text(text.held_out, arguments, trained_length if arguments.eval_every else 0)
    if arguments.train_base and len(stream(text.train).tokens) <= CONTEXT:
        raise UsageError(f"the training text has no more tokens than the embedded base's context, {CONTEXT}")
    training.check_plan(plan, accelerator)
    rates.check_plan(plan[0], arguments, accelerator)
    return plan


@dataclass
class Run:
    """A run. `run` calls its steps in order, from `begin` to `write`.

    Attributes:
        arguments: checked options.
        accelerator: accelerator of the processes that make the run.
        tokenizer: tokenizer of the base.
        text: text to train and to measure on.
        schemes: schemes to patch in; none for a control.
        trained_length: context length that the base was trained at.
        plan: phases of the fine-tuning.
        windows: windows to calibrate with, `(N, T)`; None for no calibration.
        resumed: whether the run continues an interrupted one.
        model: first the base, then the patched model, on the device.
        results: the content of results.json so far.
        calibration_loss: function that measures held-out loss in windows as long as those of the calibration.
        base_loss: the base's `calibration_loss`; None if this run does not calibrate, or calibrated before it was
            interrupted.
        teacher: copy of the base; None without `--distill`.
        wrapped: the model as accelerate wrapped it; None before the fine-tuning.
    """

    arguments: Arguments
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    text: Text
    schemes: Schemes
    trained_length: int
    plan: list[Phase]
    windows: Tensor | None
    resumed: bool
    model: PreTrainedModel
    results: Results
    calibration_loss: Callable[[nn.Module], float] | None = None
    base_loss: float | None = None
    teacher: nn.Module | None = None
    wrapped: nn.Module | None = None

    @property
    def output(self) -> Path:
        """The folder of the run."""
        return Path(self.arguments.output)

    def say(self, text: str) -> None:
        """Print on the main process."""
        self.accelerator.print(text)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Context manager that stores the time spent inside as `seconds[name]`, and prints it and the peak memory."""
        seconds: dict[str, float] = self.results["seconds"]
        with stopwatch(seconds, name):
            yield
        memory = training.peak_memory(self.accelerator) / 2**30
        self.say(f"  That took {seconds[name]:.1f} s. Most memory so far: {memory:.2f} GiB.")

    def write_progress(self) -> None:
        """Write the results so far, which `--resume` reads."""
        run_folder.write_progress(self.accelerator, self.output, self.results)

    def begin(self) -> None:
        """Write the first progress into the folder, unless the run is resumed."""
        if self.accelerator.is_main_process:
            run_folder.check(self.arguments)  # a second time: another run may have begun meanwhile
        if not self.resumed:
            run_folder.begin(self.accelerator, self.output, self.results)

    def train_base(self) -> None:
        """With `--train-base`, train the embedded base, or load the base that an interrupted run trained."""
        arguments, folder = self.arguments, self.output / "base"
        if arguments.train_base and self.resumed and (folder / "config.json").is_file():
            self.model = trained_base(folder).to(self.accelerator.device)
        elif arguments.train_base:
            context = self.model.config.n_positions
            self.say(f"Training the embedded base: {models.count_weights(self.model):,} weights, context {context}")
            set_seed(arguments.base_seed)
            self.model = byte_model(self.tokenizer).to(self.accelerator.device)
            with self.timed("base"):
                tokens = stream(self.text.train).tokens
                progress = self.accelerator.is_main_process
                train_base(self.model, tokens, steps=arguments.base_steps, progress=progress)
            models.save_stock(self.accelerator, self.model, self.tokenizer, folder)
        if arguments.model is None and not self.resumed:
            self.say(f"The base, given {PROMPT!r}, writes:\n{sample(self.model, self.tokenizer)}\n")

    def measure_base(self) -> None:
        """Measure the base, if its measurements are not there yet."""
        if "before" not in self.results:
            self.say(f"Measuring {self.arguments.model or 'the embedded base'} as it is")
            with self.timed("before"):
                self.results["before"], self.results["retrieval_before"] = self.measure()
        self.write_progress()
        # A resumed run may neither train nor measure the base again. This gives it the same random numbers.
        set_seed(self.arguments.seed)

    def measure(self) -> tuple[list[Results], list[Results]]:
        """Measure perplexities and retrieval of the model."""
        return measure_model(self.model, self.text.held_out, self.arguments, self.accelerator)

    def patch(self) -> None:
        """Patch the model, after keeping a copy of the base if it is the teacher. Then add the LoRA adapter."""
        arguments = self.arguments
        if self.windows is not None:
            self.calibration_loss = calibration_stage.loss_at(self.text, self.windows.shape[1])
            if "calibration" not in self.results:
                self.base_loss = self.calibration_loss(self.model)
        if arguments.distill:
            self.teacher = teacher_of(self.model, share_weights=bool(arguments.lora_rank))
        if self.schemes:
            self.results["verify"] = models.patch_and_verify(self.model, self.schemes, arguments.seed)
            self.say(f"Patched\n{hf_posenc.describe(self.model)}\n{self.results['verify']}")
        self.results["scheme"] = models.schemes_to_json(hf_posenc.schemes_of(self.model))
        if arguments.lora_rank:
            self.model = peft.get_peft_model(self.model, hf_posenc.lora_config(self.model, r=arguments.lora_rank))
            trained, total = models.count_weights(self.model, trained=True), models.count_weights(self.model)
            self.say(f"LoRA of rank {arguments.lora_rank}: {trained:,} of {total:,} weights are trained")

    def calibrate(self) -> None:
        """Calibrate the model, or load the weights that an interrupted run calibrated."""
        if self.windows is None:
            reason = "--calibrate none" if self.arguments.calibrate == "none" else "the base keeps its positions"
            self.results["calibration"] = calibration_stage.skipped(reason)
        elif "calibration" in self.results:
            run_folder.restore_calibrated(self.model, self.output)
            calibration_stage.record_in_config(self.model, self.results["calibration"])
        else:
            assert self.base_loss is not None
            assert self.calibration_loss is not None
            tokens = self.windows.numel()
            self.say(f"Calibrating with {tokens:,} tokens of the training text; closed forms come first")
            with self.timed("calibration"):
                self.results["calibration"] = calibration_stage.calibrate(
                    self.accelerator,
                    self.model,
                    self.windows,
                    self.arguments,
                    seed=self.arguments.seed,
                    loss=self.calibration_loss,
                    base_loss=self.base_loss,
                    state_file=self.output / run_folder.CALIBRATION_STATE,
                )
            run_folder.write_calibrated(self.accelerator, self.model, self.output, self.results)
        self.say(run_report.calibration_line(self.results["calibration"]))
        if self.windows is not None:
            # A resumed run may not calibrate again. This gives it the same random numbers.
            set_seed(self.arguments.seed)

    def fine_tune(self) -> None:
        """Fine-tune the model; with `--distill` the base is its teacher."""
        arguments = self.arguments
        for phase in self.plan:
            per_step = training.tokens_per_step(phase, arguments, self.accelerator)
            self.say(f"Fine-tuning: {phase.steps} steps of {per_step:,} tokens at length {phase.length}")
        distillation = None
        if self.teacher is not None:
            distillation = Distillation(self.teacher, arguments.distill, self.trained_length)
        with self.timed("training"):
            wrapped, self.results["training"] = training.fine_tune(
                self.accelerator,
                self.model,
                self.plan,
                arguments,
                folder=self.output,
                resume=self.resumed,
                distillation=distillation,
                evaluate=held_out_loss(self.text, self.trained_length),
                find_rate=self.find_rate if arguments.find_learning_rate else None,
            )
        self.wrapped, self.model = wrapped, self.accelerator.unwrap_model(wrapped)

    def find_rate(self, wrapped: nn.Module, optimizer: AcceleratedOptimizer, one_step: Callable[[int], float]) -> float:
        """Return the learning rate that `--find-learning-rate` chooses, or chose before an interruption."""
        if "learning_rates" not in self.results:
            self.say("Trying learning rates")
            self.results["learning_rates"] = rates.find(
                self.arguments.find_learning_rate, self.plan[0], wrapped, optimizer, one_step, self.say
            )
            self.write_progress()
        rate: float = self.results["learning_rates"]["chosen"]
        self.say(f"Learning rate {rate:g}")
        return rate

    def fit_temperature(self) -> None:
        """With `--fit-temperature`, fit the strengths of the temperature, and no other weight."""
        lengths = self.arguments.fit_temperature
        if lengths:
            self.say(f"Fitting the temperature at {', '.join(map(str, lengths))} tokens")
            with self.timed("temperature"):
                windows = fit_windows(self.text, self.arguments)
                progress = self.accelerator.is_main_process
                fit = hf_posenc.fit_temperature(self.model, windows, lengths, progress=progress)
                for strength in trained_strengths(self.model).values():  # processes may round differently
                    broadcast(strength.data)
            self.say(str(fit))
            self.results["temperature"] = fit.to_dict()

    def measure_result(self) -> None:
        """Measure the fine-tuned model."""
        self.say("Measuring the model after fine-tuning")
        with self.timed("after"):
            self.results["after"], self.results["retrieval_after"] = self.measure()

    def write(self) -> None:
        """Save the model, its card, the report and the results. With `--push-to`, upload the model."""
        folder, repository = self.output / "model", self.arguments.push_to
        assert self.wrapped is not None
        models.save(self.accelerator, self.wrapped, self.tokenizer, self.output)
        if self.accelerator.is_main_process:
            if self.schemes:
                model_card.write(folder, self.results, repository)
            run_report.write(self.output / "report.html", self.results)
            run_folder.finish(self.output, self.results)
        self.say(
            f"\n{run_report.as_text(self.results)}\n\ncheckpoint  {folder}\nreport      {self.output / 'report.html'}\n"
            f"results     {self.output / 'results.json'}\n\n{run_report.verdict(self.results)}"
        )
        if repository and self.accelerator.is_main_process:
            self.say(
                hf_posenc.checkpoints.hub.push(folder, repository, private=self.arguments.private or None).commit_url
            )


def check_arguments(arguments: Arguments) -> Schemes:
    """Check everything that needs neither the text nor the weights; set the default of the learning rate.

    Returns:
        The schemes; none for a control.

    Raises:
        UsageError: if the arguments cannot work.
    """
    plots.check_installed()  # the report and the card are drawn at the end
    rates.check(arguments)
    if arguments.learning_rate is None:
        plain_swap = arguments.calibrate == "none"
        arguments.learning_rate = calibration_stage.PLAIN_RATE if plain_swap else calibration_stage.CALIBRATED_RATE
    calibration_stage.check(arguments)
    training.check(arguments, arguments.packing)
    training.check_recovery(arguments)
    corpus.check(arguments, needs_data=arguments.model is not None)
    measurements.check(arguments)
    models.check(arguments)
    check_unused(arguments)
    schemes: Schemes = ()
    if arguments.scheme != UNPATCHED:
        schemes = models.read_schemes("scheme", arguments.scheme, models.hyperparameters(arguments.scheme_args))
    elif arguments.scheme_args or arguments.lora_rank:
        raise UsageError(
            f"--scheme {UNPATCHED} takes neither --scheme-args nor --lora-rank. For a control with LoRA, patch in "
            "the base's own scheme (rope, or learned)"
        )
    if arguments.model is not None:
        family_for(models.stock_config(arguments).model_type)  # its error lists the families
    run_folder.check(arguments)
    return schemes


def check_unused(arguments: Arguments) -> None:
    """Raise UsageError for options that have no effect because of another option."""
    if arguments.distill and arguments.positions != PLAIN:
        raise UsageError(
            f"--positions {arguments.positions} cannot be combined with --distill: the base knows no others"
        )
    if arguments.distill and arguments.objective == "longce":
        raise UsageError("--objective longce cannot be combined with --distill: choose one of them")
    if arguments.context_parallel > 1 and arguments.distill:
        raise UsageError("--context-parallel cannot be combined with --distill: the teacher reads whole windows")
    if arguments.model is not None:
        refuse(arguments, "train_base", f"trains the embedded base, and the base is --model {arguments.model}")
    if not arguments.train_base:
        for name in ("base_steps", "base_seed"):
            refuse(arguments, name, "has no effect without --train-base")
    if arguments.push_to is None:
        refuse(arguments, "private", "has no effect without --push-to")
    elif arguments.scheme == UNPATCHED:
        refuse(arguments, "push_to", f"uploads a patched model, and --scheme {UNPATCHED} makes none")


def fit_windows(text: Text, arguments: Arguments) -> Tensor:
    """Return windows of the training text to fit the temperature with, as long as the longest length."""
    windows = Windows(text.train, max(arguments.fit_temperature), "concatenate")
    return windows.tokens[order(arguments.seed, len(windows), 0, FIT_WINDOWS)]


def check_fit(model: PreTrainedModel, text: Text, arguments: Arguments, accelerator: Accelerator) -> None:
    """Raise UsageError if the temperature of the patched model cannot be fitted after the training."""
    if not arguments.fit_temperature:
        return
    longest, total = max(arguments.fit_temperature), len(stream(text.train).tokens)
    if min(arguments.fit_temperature) < 2 or FIT_WINDOWS * longest > total:
        raise UsageError(
            f"--fit-temperature takes lengths from 2 to {total // FIT_WINDOWS}: it reads {FIT_WINDOWS} windows of the "
            f"training text, which has {total:,} tokens"
        )
    if arguments.lora_rank or accelerator.distributed_type in ("FSDP", "DEEPSPEED"):
        raise UsageError(
            "--fit-temperature cannot be combined with --lora-rank, FSDP or DeepSpeed: call hf_posenc.fit_temperature "
            "on the saved model"
        )
    if not trained_strengths(model):
        raise UsageError(
            f"--fit-temperature needs a trainable temperature, and --scheme {arguments.scheme} has none: add "
            '{"scheme": "temperature", "trainable": true}'
        )


def check_patch(
    model: PreTrainedModel, schemes: Schemes, text: Text, arguments: Arguments, accelerator: Accelerator
) -> None:
    """Patch the model on trial, so that schemes that do not fit are refused before anything is measured.

    For the embedded base, print the first line of `verify`.

    Raises:
        UsageError: if there are too few positions, or attention would cross from one packed document to another.
    """
    trained = max(arguments.train_length, arguments.position_length or 0)
    longest = max(trained, arguments.lengths[-1], *arguments.fit_temperature)
    with hf_posenc.patched(model, schemes, seed=arguments.seed) if schemes else nullcontext():
        limit = models.position_limit(model)
        if not schemes and limit is not None and limit < trained:
            raise UsageError(
                f"--scheme {UNPATCHED}: the base's table ends at {limit} positions, --train-length or "
                f"--position-length is {trained}"
            )
        if schemes and limit is not None and limit < longest:
            raise UsageError(
                f"--scheme {arguments.scheme} ends at {limit} positions, --train-length, --lengths and "
                f"--position-length go to {longest}: for instance --scheme-args num_positions={longest}"
            )
        if arguments.packing == "documents" and not models.keeps_documents_apart(model):
            raise UsageError(
                "--packing documents: the attention mask of this model does not take positions into account, so "
                "attention crosses from document to document"
            )
        training_positions.check_follows(model, arguments)
        check_fit(model, text, arguments, accelerator)
        # This is only for the embedded base, because `patch` verifies again, and a large model on a CPU takes a while.
        if schemes and arguments.model is None:
            report = str(hf_posenc.verify(model)).splitlines()[0]
            accelerator.print(f"Trial of the swap: {report}")

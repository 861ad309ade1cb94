"""One run: a base is measured, patched, calibrated, fine-tuned, measured again and saved.

extend_context.py makes one run, compare_schemes.py one for each of its variants and seeds.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import peft
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import set_seed
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_posenc

from ..analysis import plots
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
)
from . import (
    learning_rate_search as rates,
)
from . import (
    run_identity as identity,
)
from .calibration_stage import CalibrationArguments
from .corpus import Text, read_text, stream
from .distillation import Distillation, teacher_of
from .embedded import CONTEXT, FOLDER, PROMPT, byte_model, byte_tokenizer, sample, train_base, trained_base
from .measurements import HeldOutArguments, held_out_loss, measure_model
from .models import UNPATCHED, ModelArguments, SchemeArguments
from .options import Count, Name, Natural, UsageError, refuse
from .results import Results, origin, stopwatch
from .run_folder import FolderArguments
from .training import FineTuningArguments, Phase

MEASURED = ("seconds", "before", "retrieval_before", "calibration", "learning_rates")
"""Results that a run takes from its own progress, or from another run of its sweep."""


@dataclass
class SharedArguments(ModelArguments, HeldOutArguments, CalibrationArguments, FineTuningArguments):
    """Adapters.

    Args:
        lora_rank: train LoRA of this rank with norms, positions, and embeddings where the swap needs it; 0 trains every
            weight.
    """

    lora_rank: Natural = 0


@dataclass
class Arguments(FolderArguments, SchemeArguments, SharedArguments):
    """This recipe.

    Args:
        seed: seed of everything that is random.
        push_to: repository on the Hub to push the result to.
        private: make that repository private, if it is new.
        train_base: without --model: train the small base on the training text, instead of taking the one that comes
            with the package.
        base_steps: with --train-base: its optimizer steps.
        base_seed: with --train-base: seed of its weights and batches.
    """

    # The default: the scheme that calibration brings closest to its base.
    scheme: Name = field(default="transformer_xl", metadata=models.GUESSED)
    steps: Count = 60
    seed: int = 0
    push_to: str | None = None
    private: bool = False
    train_base: bool = False
    base_steps: Count = 1200
    base_seed: Natural = 0


@dataclass
class Sweep:
    """The part of a sweep that its runs share, so that no run makes it again.

    Attributes:
        text: that all runs read.
        identity: of this run.
        before: measurements of the base, once a run has made them.
    """

    text: Text
    identity: Results
    before: list[Results] | None = None


def run(arguments: Arguments, sweep: Sweep | None = None) -> Results:
    """Make a run.

    Args:
        arguments: checked here.
        sweep: what the runs of a sweep share; None for a run of its own.

    Returns:
        The content of results.json.

    Raises:
        UsageError: the arguments, the text and the model cannot work together; nothing long has started then.
        Interrupted, Diverged, OSError: as `training.fine_tune`.
    """
    made = prepare(arguments, sweep)
    with run_folder.alone(made.accelerator, made.output):
        made.begin()
        made.train_base()
        made.measure_base()
        made.patch()
        made.calibrate()
        made.fine_tune()
        made.measure_result()
        made.write()
    return made.results


def prepare(arguments: Arguments, sweep: Sweep | None) -> "Run":
    """Read the text and the base, and check that everything works together. Nothing long has started then."""
    scheme = check_arguments(arguments)
    accelerator = training.accelerator_for(arguments, Path(arguments.output))
    set_seed(arguments.seed)
    accelerator.print(f"Reading {corpus.describe(arguments)}")
    tokenizer = models.load_named(AutoTokenizer, arguments) if arguments.model else byte_tokenizer()
    if sweep:
        text, of = sweep.text, sweep.identity
    else:
        text = read_text(arguments, tokenizer, accelerator, arguments.tokens_to_read, arguments.split_seed)
        of = identity.of(arguments, text, scheme=models.scheme_to_json(scheme), **identity.launched(accelerator))
    if arguments.model is None and not arguments.train_base:
        of["base"] = identity.digest_of(str(FOLDER))
    earlier = run_folder.earlier(arguments, of)
    with models.loaded_whole(accelerator):
        model: PreTrainedModel = models.load_base(arguments) if arguments.model else trained_base()
    trained_length = models.position_limit(model) or model.config.max_position_embeddings
    plan = make_plan(arguments, text, trained_length, accelerator)
    data = text.to_dict(arguments)
    accelerator.print(
        f"  {data['documents']:,} documents; {data['training_tokens']:,} tokens to train on, "
        f"{data['held_out_tokens']:,} held out"
    )
    models.check_vocabulary(model, text.train, text.held_out)
    check_patch(model, scheme, arguments, accelerator)
    windows = None
    if scheme is not None and arguments.calibrate != "none":
        windows = calibration_stage.windows(text.train, trained_length, arguments, arguments.seed)
    measured = earlier or ({"before": sweep.before} if sweep and sweep.before else {})
    results = {
        **origin("extend_context", arguments, accelerator),
        "identity": of,
        "seed": arguments.seed,
        "data": data,
        "base": {
            "name": arguments.model or "embedded byte-level GPT-2",
            "on_hub": arguments.model is not None and not Path(arguments.model).exists(),
            **models.describe(model, trained_length),
        },
        "seconds": {},
        **{name: measured[name] for name in MEASURED if name in measured},
    }
    model.to(accelerator.device)
    resumed = earlier is not None
    return Run(arguments, accelerator, tokenizer, text, scheme, trained_length, plan, windows, resumed, model, results)


def make_plan(arguments: Arguments, text: Text, trained_length: int, accelerator: Accelerator) -> list[Phase]:
    """Return the phases of the fine-tuning; set the default of `--recovery-steps`.

    Raises:
        UsageError: if the text does not suffice to train on and to measure on.
    """
    if arguments.recovery_steps is None:
        longer = arguments.recovery_length is not None or arguments.train_length > trained_length
        arguments.recovery_steps = arguments.steps // 2 if longer else 0
    plan = training.phases(arguments, text.train, trained_length, packing=arguments.packing, seed=arguments.seed)
    measurements.check_text(text.held_out, arguments, trained_length if arguments.eval_every else 0)
    if arguments.train_base and len(stream(text.train).tokens) <= CONTEXT:
        raise UsageError(f"the training text has no more tokens than the embedded base's context, {CONTEXT}")
    training.check_plan(plan, accelerator)
    rates.check_plan(plan[0], arguments, accelerator)
    return plan


@dataclass
class Run:
    """A run, step by step.

    Attributes:
        arguments: checked.
        accelerator: of the processes that make it.
        tokenizer: of the base.
        text: to train and to measure on.
        scheme: to patch in; None for a control.
        trained_length: tokens of the window that the base was trained at.
        plan: phases of the fine-tuning.
        windows: to calibrate with, `(N, T)`; None where nothing is calibrated.
        resumed: whether an interrupted run is continued.
        model: the base, then the patched model, on the device.
        results: the content of results.json so far.
        calibration_loss: measures the held-out loss in windows of the calibration's length.
        base_loss: that of the base, where it is calibrated to.
        teacher: a copy of the base, with `--distill`.
        wrapped: the model as accelerate wrapped it, once it is fine-tuned.
    """

    arguments: Arguments
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    text: Text
    scheme: hf_posenc.Scheme | None
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
        """Print on one process."""
        self.accelerator.print(text)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Context manager that stores the time spent inside as `seconds[name]`, and prints it with the memory."""
        seconds: dict[str, float] = self.results["seconds"]
        with stopwatch(seconds, name):
            yield
        memory = training.peak_memory(self.accelerator) / 2**30
        self.say(f"  That took {seconds[name]:.1f} s. Most memory so far: {memory:.2f} GiB.")

    def write_progress(self) -> None:
        """Keep the results so far: `--resume` does not make them again."""
        run_folder.write_progress(self.accelerator, self.output, self.results)

    def begin(self) -> None:
        """Take the folder."""
        if self.accelerator.is_main_process:
            run_folder.check(self.arguments)  # again: another run may have begun since
        if not self.resumed:
            run_folder.begin(self.accelerator, self.output, self.results)

    def train_base(self) -> None:
        """Train the embedded base, with `--train-base`, or load the one that an interrupted run has trained."""
        arguments, folder = self.arguments, self.output / "base"
        if arguments.train_base and self.resumed and (folder / "config.json").is_file():
            self.model = trained_base(folder).to(self.accelerator.device)
        elif arguments.train_base:
            context = self.model.config.n_positions
            self.say(f"Training the embedded base: {models.count(self.model):,} weights, context {context}")
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
        """Measure the base, unless that was done before."""
        if "before" not in self.results:
            self.say(f"Measuring {self.arguments.model or 'the embedded base'} as it is")
            with self.timed("before"):
                self.results["before"], self.results["retrieval_before"] = self.measure()
        self.write_progress()
        set_seed(self.arguments.seed)  # whatever was made before, and whatever was there already

    def measure(self) -> tuple[list[Results], list[Results]]:
        """Measure the model as it is."""
        return measure_model(self.model, self.text.held_out, self.arguments, self.accelerator)

    def patch(self) -> None:
        """Patch the model, put on an adapter, and keep a copy of the base where it is the teacher."""
        arguments = self.arguments
        if self.windows is not None:
            self.calibration_loss = calibration_stage.loss_at(self.text, self.windows.shape[1])
            if "calibration" not in self.results:
                self.base_loss = self.calibration_loss(self.model)
        if arguments.distill:
            self.teacher = teacher_of(self.model, share_weights=bool(arguments.lora_rank))
        if self.scheme is not None:
            self.results["verify"] = models.patch_and_verify(self.model, self.scheme, arguments.seed)
            self.say(f"Patched\n{hf_posenc.describe(self.model)}\n{self.results['verify']}")
        self.results["scheme"] = models.scheme_to_json(*hf_posenc.schemes_of(self.model))
        if arguments.lora_rank:
            # A copy of the config: PEFT writes into it.
            self.model = peft.get_peft_model(self.model, hf_posenc.lora_config(self.model, r=arguments.lora_rank))
            trained = models.count(self.model, trained=True)
            self.say(
                f"LoRA of rank {arguments.lora_rank}: {trained:,} of {models.count(self.model):,} weights are trained"
            )

    def calibrate(self) -> None:
        """Calibrate the model, or read the calibrated weights of an interrupted run."""
        if self.windows is None:
            why = "--calibrate none" if self.arguments.calibrate == "none" else "the base keeps its positions"
            self.results["calibration"] = calibration_stage.skipped(why)
        elif "calibration" in self.results:
            run_folder.restore_calibrated(self.model, self.output)
            calibration_stage.write_down(self.model, self.results["calibration"])
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
                    state_file=self.output / run_folder.CALIBRATING,
                )
            run_folder.keep_calibrated(self.accelerator, self.model, self.output, self.results)
        self.say(run_report.calibration_line(self.results["calibration"]))
        if self.windows is not None:
            set_seed(self.arguments.seed)  # whether it was calibrated just now or before

    def fine_tune(self) -> None:
        """Fine-tune the model, with the base as its teacher where `--distill` asks for that."""
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
        """Return the learning rate that `--find-learning-rate` finds, or found before an interruption."""
        if "learning_rates" not in self.results:
            self.say("Trying learning rates")
            self.results["learning_rates"] = rates.find(
                self.arguments.find_learning_rate, self.plan[0], wrapped, optimizer, one_step, self.say
            )
            self.write_progress()
        rate: float = self.results["learning_rates"]["chosen"]
        self.say(f"Learning rate {rate:g}")
        return rate

    def measure_result(self) -> None:
        """Measure the fine-tuned model."""
        self.say("Measuring the model after fine-tuning")
        with self.timed("after"):
            self.results["after"], self.results["retrieval_after"] = self.measure()

    def write(self) -> None:
        """Save the model, its card, the report and the results; push the model where `--push-to` names a place."""
        folder, repository = self.output / "model", self.arguments.push_to
        assert self.wrapped is not None
        models.save(self.accelerator, self.wrapped, self.tokenizer, self.output)
        if self.accelerator.is_main_process:
            if self.scheme is not None:
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


def check_arguments(arguments: Arguments) -> hf_posenc.Scheme | None:
    """Check all that can be known without reading the text or the weights; set the default of the learning rate.

    Returns:
        The scheme; None for a control.

    Raises:
        UsageError: if the arguments cannot work.
    """
    plots.check_installed()  # the report and the card are drawn at the end
    rates.check(arguments)
    if arguments.learning_rate is None:
        plain = arguments.calibrate == "none"
        arguments.learning_rate = calibration_stage.PLAIN_RATE if plain else calibration_stage.CALIBRATED_RATE
    calibration_stage.check(arguments)
    training.check(arguments)
    training.check_recovery(arguments)
    corpus.check(arguments, needs_data=arguments.model is not None)
    measurements.check(arguments)
    models.check(arguments)
    check_unused(arguments)
    scheme = None
    if arguments.scheme != UNPATCHED:
        scheme = models.named_scheme("scheme", arguments.scheme, models.hyperparameters(arguments.scheme_args))
    elif arguments.scheme_args or arguments.lora_rank:
        raise UsageError(
            f"--scheme {UNPATCHED} takes neither --scheme-args nor --lora-rank; as a control with LoRA patch in the "
            "base's own scheme (rope, or learned)"
        )
    if arguments.model is not None:
        family_for(models.stock_config(arguments).model_type)  # says which families there are
    run_folder.check(arguments)
    return scheme


def check_unused(arguments: Arguments) -> None:
    """Raise UsageError for options that another option leaves without an effect."""
    if arguments.context_parallel > 1 and arguments.distill:
        raise UsageError("--context-parallel is not for --distill: the base is asked for whole windows")
    if arguments.model is not None:
        refuse(arguments, "train_base", f"trains the embedded base, and the base is --model {arguments.model}")
    if not arguments.train_base:
        for name in ("base_steps", "base_seed"):
            refuse(arguments, name, "is of --train-base, and no base is trained")
    if arguments.push_to is None:
        refuse(arguments, "private", "is of the repository that --push-to names, and there is none")
    elif arguments.scheme == UNPATCHED:
        refuse(arguments, "push_to", f"takes patched models, and --scheme {UNPATCHED} makes none")


def check_patch(
    model: PreTrainedModel, scheme: hf_posenc.Scheme | None, arguments: Arguments, accelerator: Accelerator
) -> None:
    """Patch the model on trial, so that a scheme that does not fit it is refused before anything is measured.

    It prints the first line of `verify` for the embedded base.

    Raises:
        UsageError: if there are too few positions, or packed documents cannot be kept apart.
    """
    longest = max(arguments.train_length, arguments.lengths[-1])
    with hf_posenc.patched(model, scheme, seed=arguments.seed) if scheme is not None else nullcontext():
        limit = models.position_limit(model)
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
        # With a large model this takes a while on a CPU, and it is done again when the model is patched.
        if scheme and arguments.model is None:
            report = str(hf_posenc.verify(model)).splitlines()[0]
            accelerator.print(f"The swap, tried before anything long: {report}")

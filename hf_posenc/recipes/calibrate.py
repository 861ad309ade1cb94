"""Patches a stock checkpoint, calibrates the new scheme to the base's positions, and saves the result.

    hf-posenc calibrate --model gpt2 --scheme t5 --data book.txt --output runs/gpt2-t5
    accelerate launch -m hf_posenc.recipes.calibrate --model gpt2 --scheme t5 --data book.txt --output runs/gpt2-t5

It runs `hf_posenc.calibrate` on one checkpoint and writes another. To fine-tune as well, use extend_context.py.
Closed forms come first, optimizer steps second. Ctrl-C during the steps keeps their state beside OUTPUT. `--resume`
goes on from there, and ends with the weights of an uninterrupted run.
"""

import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

from accelerate import Accelerator
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_posenc
from hf_posenc import Calibration, Matching

from ..analysis import plots
from ..calibration.calibrate import JUDGES
from ..calibration.checks import HELD_OUT, number_of_windows
from ..calibration.matching import LOSSES
from ..checkpoints import files
from ..checkpoints.scheme_entry import STAGES
from ..families.lookup import family_of
from . import corpus, models, program
from .calibration_stage import calibrate_interruptibly
from .corpus import TextArguments, stream
from .models import DeviceArguments, ModelArguments, SchemeArguments, hyperparameters
from .options import Count, File, Folder, Length, Name, Positive, UsageError, as_usage_error, option, parse, refuse
from .results import Results, write_json

EXAMPLES = """
  {prog} --model gpt2 --scheme t5 --data book.txt --output runs/gpt2-t5
  {prog} --model gpt2 --scheme shaw --scheme-args max_distance=64 --data book.txt --output runs/gpt2-shaw
  {prog} --model gpt2 --scheme t5 --data book.txt --output runs/gpt2-t5 --resume
"""
DEFAULT_LENGTH = 512
"""Default of --length, in tokens, unless the base was trained at less."""
TRAINED = ("scheme", "query_key")
"""What the second stage can train. `Matching` can also train adapters, but this command adds none."""


@dataclass
class Arguments(SchemeArguments, ModelArguments, DeviceArguments, TextArguments):
    """This recipe.

    Args:
        output: folder to save in, which does not exist yet.
        json: JSON file to write, with all numbers.
        plot: picture to write, of all layers; png, svg or pdf by its suffix.
        resume: go on with an interrupted run of the same arguments.
        length: tokens in a window of the text (default: the length the base was trained at, 512 at most).
        windows: windows to use, held-out ones included; by default all that the text has.
        held_out: number of windows that nothing is fitted on. They decide what is kept, and measure the result
            (default: 8, or fewer that hold 2,048 tokens, but at least 2).
        stage: closed_form for closed forms alone, attention for optimizer steps after them.
        weights: what the steps train. scheme: the scheme's parameters; query_key: also the projections of queries and
            keys.
        steps: optimizer steps.
        rate: learning rate of the scheme's parameters.
        weight_rate: learning rate of the weights that make queries and keys.
        judge: held-out number by which a change is kept: loss, or the distance of attention to the base's.
        loss: what the steps match: the outputs of heads, or their attention weights (default: outputs, then attention
            if the model predicts worse).
        step_lengths: window lengths for the steps, in tokens, one after the other (default: --length).
        seed: seed of everything that is random.
    """

    scheme: Name = field(default="", metadata=models.SCHEME_METADATA)
    output: Folder = ""
    json: File = ""
    plot: File | None = None
    resume: bool = False
    length: Length | None = field(default=None, metadata={"guesses": ("train_length", "calibrate_length")})
    windows: Count | None = None
    held_out: Count | None = None
    stage: Annotated[str, STAGES] = "attention"
    weights: Annotated[str, TRAINED] = "query_key"
    steps: Count = Matching.steps
    rate: Positive = Matching.rate
    weight_rate: Positive = Matching.weight_rate
    judge: Annotated[str, JUDGES] = "loss"
    loss: Annotated[str, "NAME", tuple(LOSSES)] | None = None
    step_lengths: list[int] = field(default_factory=list)
    seed: int = Matching.seed

    @property
    def state_file(self) -> Path:
        """The second stage's state, beside the folder that is going to be saved."""
        output = Path(self.output)
        return output.with_name(f"{output.name}.state.safetensors")

    def matching(self) -> Matching | None:
        """Return the second stage, or None without one."""
        if self.stage == "closed_form":
            return None
        second_stage = {name: getattr(self, name) for name in SECOND_STAGE_OPTIONS}
        with as_usage_error("", ValueError):
            return Matching(**second_stage, lengths=self.step_lengths or None, state_file=self.state_file)


SECOND_STAGE_OPTIONS = [field.name for field in fields(Arguments) if field.name in Matching.__dataclass_fields__]
"""Options that are fields of `Matching`."""


def main(argv: list[str] | None = None, prog: str | None = None) -> Results:
    """Calibrate, and return what --json holds."""
    arguments, parser = parse(Arguments, argv, __doc__, prog=prog, examples=EXAMPLES)
    with program.ending(parser, "the same command with --resume", lambda: interruption_message(arguments)):
        return run(arguments)


def interruption_message(arguments: Arguments) -> str:
    """Return the message after an interruption: whether there is a state for --resume."""
    if arguments.state_file.exists():
        return f"{arguments.state_file} has what was done so far: the same command with --resume goes on from there."
    return "Nothing was finished that could be kept: the same command begins again."


def check_arguments(arguments: Arguments) -> models.Schemes:
    """Check all that can be known without reading the text or the weights, and return the schemes."""
    for name, value in (("model", "DIR_OR_ID"), ("scheme", "NAME"), ("output", "DIR")):
        if not getattr(arguments, name):
            raise UsageError(f"{option(name)} {value} is missing")
    schemes = models.read_schemes("scheme", arguments.scheme, hyperparameters(arguments.scheme_args))
    corpus.check(arguments, needs_data=True)
    models.check(arguments)
    if arguments.stage == "closed_form":
        for name in (*SECOND_STAGE_OPTIONS, "step_lengths", "resume"):
            if name != "seed":  # a scheme may also start at random
                refuse(arguments, name, "changes nothing with --stage closed_form")
    elif arguments.weights == "scheme":
        refuse(arguments, "weight_rate", "changes nothing with --weights scheme")
    check_lengths(arguments)
    check_files(arguments)
    return schemes


def check_lengths(arguments: Arguments) -> None:
    """Set the default of `--length`, and check it against the length that the base was trained at."""
    base = models.stock_config(arguments)
    longest = getattr(base, family_of(base).names.config_length, None)
    if arguments.length is None:
        arguments.length = min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH)
    if longest is not None and arguments.length > longest:
        raise UsageError(
            f"--length {arguments.length}: {arguments.model} was trained at {longest} tokens, and can be imitated up "
            f"to that length: give --length {longest} or less"
        )
    if len(arguments.step_lengths) > arguments.steps:
        raise UsageError(
            f"--steps {arguments.steps} cannot be divided among {len(arguments.step_lengths)} --step-lengths"
        )
    if (matching := arguments.matching()) is not None:
        with as_usage_error("--step-lengths: ", ValueError):
            matching.check_length(arguments.length)


def check_files(arguments: Arguments) -> None:
    """Check that the output files can be written, and that there is a state if and only if --resume is given."""
    if Path(arguments.output).exists():
        raise UsageError(f"--output {arguments.output} exists already: name a folder that does not")
    for name in ("json", "plot"):
        if (path := getattr(arguments, name)) and not Path(path).parent.is_dir():
            raise UsageError(f"{option(name)} {path}: there is no folder {Path(path).parent}")
    if arguments.plot:
        with as_usage_error(f"--plot {arguments.plot}: ", ImportError, ValueError):
            plots.kind_of(Path(arguments.plot))
            plots.check_installed()
    if arguments.stage == "attention" and arguments.resume is not arguments.state_file.exists():
        if arguments.resume:
            raise UsageError(f"--resume: there is no {arguments.state_file}")
        raise UsageError(
            f"{arguments.state_file} is left over from an interrupted calibration: give --resume, or remove it"
        )


def run(arguments: Arguments) -> Results:
    """Calibrate a stock checkpoint, save it, and return the report, ready for JSON."""
    schemes = check_arguments(arguments)
    accelerator, device = models.accelerator_and_device(arguments)
    say = accelerator.print
    tokenizer = models.load_named(AutoTokenizer, arguments)
    windows = text_windows(arguments, tokenizer, accelerator)
    say(f"Loading {arguments.model} and patching {models.label_of(schemes)} into it")
    model = models.load_named(AutoModelForCausalLM, arguments, dtype=models.dtype_of(arguments))
    with as_usage_error(f"--model {arguments.model}: ", ValueError, hf_posenc.HfPosencError):
        model = hf_posenc.patch_model(model, schemes, seed=arguments.seed).to(device)
    held_out = number_of_windows(arguments.held_out, HELD_OUT, windows.shape[1])
    say(
        f"Calibrating with {len(windows) - held_out:,} windows of {arguments.length:,} tokens, and {held_out:,} held "
        f"out, on {device}; closed forms come first"
    )
    matching, judge = arguments.matching(), arguments.judge
    with as_usage_error("", ValueError):
        report = calibrate_interruptibly(accelerator, model, windows, held_out=held_out, matching=matching, judge=judge)
    if accelerator.is_main_process:
        write(arguments, model, tokenizer, report)
        arguments.state_file.unlink(missing_ok=True)
    accelerator.wait_for_everyone()
    say(f"{hf_posenc.describe(model)}\n{report}")
    if left := report.unexpressed():
        say(
            f"No stage brought the attention of layers {', '.join(map(str, left))} closer to the base's than 0.1 nats "
            "per query and head. To let them keep the base's positions, name only the other layers: --scheme-args "
            "layers=..., or JSON"
        )
    written = (("saved in", arguments.output), ("numbers in", arguments.json), ("picture in", arguments.plot))
    say(", ".join(f"{what} {path}" for what, path in written if path))
    return report.to_dict()


def text_windows(arguments: Arguments, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator) -> Tensor:
    """Return windows of the text in its order, (N, T) int64; what does not fill one is left out."""
    length, wanted = arguments.length, arguments.windows
    assert length is not None  # check_arguments has set it
    max_tokens = sys.maxsize if wanted is None else wanted * length
    with accelerator.main_process_first():  # the other processes then use the cache that it has written
        tokens = stream(corpus.documents(tokenizer, arguments, None, max_tokens)).tokens
    count = len(tokens) // length
    used = count if wanted is None else wanted
    held_out = number_of_windows(arguments.held_out, HELD_OUT, length)
    if used > count:
        raise UsageError(f"{corpus.describe(arguments)} has {count} windows of {length} tokens, {used} were asked for")
    if used <= held_out:
        raise UsageError(
            f"{used} windows of {length} tokens from {corpus.describe(arguments)} are too few: --held-out takes "
            f"{held_out}, and at least one more is needed to calibrate with"
        )
    return tokens[: used * length].view(used, length)


def write(
    arguments: Arguments, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, report: Calibration
) -> None:
    """Write the checkpoint, whole or not at all, and the files that were asked for."""
    with files.new_folder(Path(arguments.output)) as folder:
        model.save_pretrained(folder, tokenizer=tokenizer)
    if arguments.json:
        write_json(Path(arguments.json), report.to_dict())
    if arguments.plot:
        title = f"{report.scheme} on {Path(str(arguments.model)).name}"
        plots.save(plots.calibration(report, title=title), Path(arguments.plot))


if __name__ == "__main__":
    program.start(main)

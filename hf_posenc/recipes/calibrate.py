"""Patches a stock checkpoint, calibrates the new scheme to the base's positions, and saves the result.

It runs `hf_posenc.calibrate` on one checkpoint and writes another. To fine-tune as well, use `hf-posenc extend`.
Closed forms come first, optimizer steps second. The state of the steps is kept beside OUTPUT. `--resume` goes on from
there, and ends with the weights of an uninterrupted run.

Examples:
  hf-posenc calibrate --model gpt2 --scheme t5 --data book.txt --output runs/gpt2-t5
  hf-posenc calibrate --model gpt2 --scheme shaw --scheme-args max_distance=64 --data book.txt --output runs/gpt2-shaw
  hf-posenc calibrate --model gpt2 --scheme t5 --data book.txt --output runs/gpt2-t5 --resume
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from hf_posenc import Matching

from ..checkpoints import files
from ..core.command_arguments import Dtype
from . import corpus, models, program
from .corpus import TextArguments, Windows
from .models import ModelArguments, SchemeArguments, Schemes, load
from .options import Count, Length, UsageError, as_usage_error, parse
from .results import Results, write_json

DEFAULT_LENGTH = 512
"""Default of --length, in tokens, unless the base was trained at less."""


@dataclass(kw_only=True)
class Arguments(SchemeArguments, ModelArguments, TextArguments):
    """The calibration.

    Args:
        output: folder to save in, which does not exist yet.
        json: JSON file to write, with all numbers.
        resume: go on with an interrupted run of the same arguments.
        length: tokens in a window of the text (default: the length the base was trained at, 512 at most).
        windows: windows to use, held-out ones included; by default all that the text has.
        stage: closed_form for closed forms alone, matching for optimizer steps after them, which match each layer.
        steps: optimizer steps.
        seed: seed of everything that is random.
        dtype: dtype of the weights; auto is the dtype they were saved in.
    """

    model: str = field()
    scheme: str = field()
    data: list[str] = field()
    output: str
    json: str | None = None
    resume: bool = False
    length: Length | None = None
    windows: Count | None = None
    stage: Literal["closed_form", "matching"] = "matching"
    steps: Count = Matching.steps
    seed: int = Matching.seed
    dtype: Dtype = "auto"

    @property
    def state_file(self) -> Path:
        """The second stage's state, beside the folder that is going to be saved."""
        output = Path(self.output)
        return output.with_name(f"{output.name}.state.pt")


def main(argv: list[str] | None = None, prog: str | None = None) -> Results:
    """Calibrate, and return what --json holds."""
    arguments, parser = parse(Arguments, argv, __doc__, prog)
    advice = f"If there is a {arguments.state_file}, the same command with --resume goes on from there"
    with program.ending(parser, advice):
        return run(arguments)


def check_arguments(arguments: Arguments) -> tuple[Schemes, int]:
    """Check all that can be known without reading the text or the weights; return the schemes and the window length."""
    schemes = models.read_schemes("scheme", arguments.scheme, arguments.scheme_args)
    longest = models.trained_length(arguments.model)
    length = arguments.length or min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH)
    if longest is not None and length > longest:
        raise UsageError(
            f"--length {length}: {arguments.model} was trained at {longest} tokens, and can be imitated up to that "
            f"length: give --length {longest} or less"
        )
    if Path(arguments.output).exists():
        raise UsageError(f"--output {arguments.output} exists already: name a folder that does not")
    if arguments.resume is not arguments.state_file.exists():
        if arguments.resume:
            raise UsageError(f"--resume: there is no {arguments.state_file}")
        raise UsageError(
            f"{arguments.state_file} is left over from an interrupted calibration: give --resume, or remove it"
        )
    return schemes, length


def run(arguments: Arguments) -> Results:
    """Calibrate a stock checkpoint, save it, and return the report, ready for JSON."""
    schemes, length = check_arguments(arguments)
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    say = accelerator.print
    tokenizer = load(AutoTokenizer, arguments.model)
    max_tokens = sys.maxsize if arguments.windows is None else arguments.windows * length
    with accelerator.main_process_first():  # the other processes then use the cache that it has written
        found = Windows(corpus.documents(tokenizer, arguments, max_tokens=max_tokens), length)
    windows, needed = found.tokens[: arguments.windows], max(3, arguments.windows or 0)  # at least two are held out
    if len(windows) < needed:
        raise UsageError(f"{arguments.description} has {len(found)} windows of {length} tokens, {needed} are needed")
    say(f"Loading {arguments.model} and patching {arguments.scheme} into it")
    model = load(AutoModelForCausalLM, arguments.model, dtype=arguments.dtype)
    with as_usage_error(f"--model {arguments.model}: ", ValueError, hf_posenc.HfPosencError):
        model = hf_posenc.patch_model(model, schemes, seed=arguments.seed).to(accelerator.device)
    say(f"Calibrating with {len(windows):,} windows of {length:,} tokens, on {accelerator.device}")
    matching = None
    if arguments.stage == "matching":
        matching = Matching(steps=arguments.steps, seed=arguments.seed, state_file=arguments.state_file)
    with as_usage_error("", ValueError):
        report = hf_posenc.calibrate(model, windows, matching=matching, progress=accelerator.is_main_process)
    if accelerator.is_main_process:
        with files.new_folder(Path(arguments.output)) as folder:
            model.save_pretrained(folder, tokenizer=tokenizer)
        if arguments.json:
            write_json(Path(arguments.json), report.to_dict())
        arguments.state_file.unlink(missing_ok=True)
    accelerator.wait_for_everyone()
    say(f"{report}\n{hf_posenc.describe(model)}")
    say(f"saved in {arguments.output}")
    return report.to_dict()


if __name__ == "__main__":
    program.start(main)

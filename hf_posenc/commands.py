"""What each command of `hf-posenc` does."""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from . import files, hub
from .analysis import plots
from .api import describe, parse_schemes
from .calibration.calibrate import calibrate, check_lengths, check_positive, ignored, second_stage
from .catalogue import refused_types, served_type
from .checkpoint import from_pretrained, inspect
from .errors import PluginError, UnsupportedModelError
from .evaluation import measure_context, measure_recurrence
from .evaluation.context import stride_of
from .evaluation.recurrence import check_memory
from .pictures import KINDS, Asked, Numbers, schedule
from .registry import available_schemes, scheme_class, supported_model_types
from .verification import verify

logging.set_verbosity_error()


def list_schemes(options: argparse.Namespace) -> int:
    """Print every scheme with its hyper-parameters."""
    for name in available_schemes():
        try:
            cls = scheme_class(name)
        except PluginError as error:  # of another package, which is not to hide the others
            print(f"{name}\n    cannot be used: {error}")
            continue
        print(f"{cls()}\n    {(cls.__doc__ or '').strip().splitlines()[0]}")
    return 0


def list_families(options: argparse.Namespace) -> int:
    """Print what is known of model types: of those that were asked for, or of all, those that can be patched first."""
    refused = 0
    for model_type in options.model_types or supported_model_types():
        try:
            said = str(served_type(model_type))
        except UnsupportedModelError as error:
            refused, said = 1, str(error)
        except PluginError as error:  # of another package, which is not to hide the others
            said = f"cannot be used: {error}"
        print("\n    ".join([model_type, *said.splitlines()]))
    for reason, types in ({} if options.model_types else refused_types()).items():
        names = (name if text is None else f"{name} (its language model is {text})" for name, text in types.items())
        print(f"{', '.join(names)}\n    cannot be patched: {reason}")
    return refused


def inspect_checkpoint(options: argparse.Namespace) -> int:
    """Print what a checkpoint is."""
    checkpoint = hub.checkpoint_name(options.checkpoint)
    if options.revision and os.path.isdir(checkpoint):
        raise ValueError(f"--revision is of a checkpoint on the Hub, and {checkpoint} is a folder: leave it out")
    found = inspect(checkpoint, **({"revision": options.revision} if options.revision else {}))
    print(found)
    return 0 if found.problem is None else 1


def verify_checkpoint(options: argparse.Namespace) -> int:
    """Print what a patched checkpoint is, and which layers answer to positions."""
    model = from_pretrained(hub.checkpoint_name(options.checkpoint))
    print(describe(model))
    report = verify(model)
    print(report)
    return 0 if report.ok else 1


def patch_checkpoint(options: argparse.Namespace) -> int:
    """Patch a stock checkpoint and save it."""
    if options.output.exists():
        raise FileExistsError(f"{options.output} exists already")
    scheme = parse_schemes(options.scheme, _settings(options))  # only what is the scheme's own, before anything is read
    checkpoint = hub.checkpoint_name(options.checkpoint)
    model = from_pretrained(checkpoint, scheme=scheme, seed=options.seed)
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    except (OSError, ValueError):  # a checkpoint without one
        tokenizer = None
    with files.new_folder(options.output) as folder:
        model.save_pretrained(folder, tokenizer=tokenizer)
    print(describe(model))
    print(f"saved in {options.output}" + ("" if tokenizer else ", without a tokenizer: the checkpoint has none"))
    return 0


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return what `--set` says, by name."""
    found: dict[str, Any] = {}
    for text in options.set:
        name, value = _setting(text)
        if name in found:
            raise ValueError(f"--set says {name} twice")
        found[name] = value
    return found


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"--set takes NAME=VALUE, not {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value  # a word, e.g. layout=split


def calibrate_checkpoint(options: argparse.Namespace) -> int:
    """Patch a stock checkpoint, fit the scheme to what the base's positions did, and save it."""
    choices = _choices(options)
    if options.save_to.exists():
        raise FileExistsError(f"{options.save_to} exists already")
    for path in filter(None, (options.report, options.plot)):
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    if options.plot:
        plots.kind_of(options.plot)
        plots.check_installed()
    if choices["stage"] == "attention":
        choices["state_file"] = _state_file(options)
    scheme = parse_schemes(options.scheme, _settings(options))  # only what is the scheme's own, before anything is read
    device = _device(options.device)
    text = _read(options.text)
    checkpoint = hub.checkpoint_name(options.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    windows = _windows(options, tokenizer(text, verbose=False).input_ids, choices["held_out"])
    model = from_pretrained(checkpoint, scheme=scheme, seed=options.seed).to(device)
    print(
        f"calibrating with {len(windows) - choices['held_out']:,} windows of {options.length:,} tokens, and "
        f"{choices['held_out']:,} held out, on {device}; closed forms come first",
        file=sys.stderr,
        flush=True,
    )
    state = choices.get("state_file")
    try:
        with _Steps(choices) as steps:
            report = calibrate(model, windows, on_step=steps.made, **choices)
        with files.new_folder(options.save_to) as folder:
            model.save_pretrained(folder, tokenizer=tokenizer)
    except KeyboardInterrupt:
        if state is not None and state.exists():
            print(f"\n{state} has what was done so far: the same with --resume goes on from there", file=sys.stderr)
        raise
    if state is not None:
        state.unlink()
    if options.report:
        with files.replaced(options.report) as partial:
            partial.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    if options.plot:
        plots.save(plots.calibration(report, title=f"{report.scheme} on {Path(checkpoint).name}"), options.plot)
    print(describe(model))
    print(report)
    if left := report.unexpressed():
        print(
            f"0.1 nats per query and head, or more, are left in the layers {', '.join(map(str, left))}: "
            "--set layers=... names those that get the scheme, the others keep the base's positions"
        )
    written = [f"saved in {options.save_to}"]
    written += [f"{what} in {path}" for what, path in (("numbers", options.report), ("picture", options.plot)) if path]
    print(", ".join(written))
    return 0


class _Steps:
    """Says how the steps go, and lets a first Ctrl-C wait for the end of one, so that the state is whole.

    Before the first step, and for a second Ctrl-C, it is what it always was.
    """

    def __init__(self, choices: dict[str, Any]) -> None:
        self.steps, self.stopping = choices.get("steps", 0), False
        self.unit = " nats" if choices.get("loss") == "attention" else ""

    def __enter__(self) -> _Steps:
        self.before = signal.getsignal(signal.SIGINT)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    def made(self, step: int, loss: float) -> None:
        """Say it now and then; a KeyboardInterrupt if one is waiting."""
        if step == 1 or step == self.steps or step % max(1, self.steps // 10) == 0:
            print(f"step {step} of {self.steps}: {loss:.4f}{self.unit}", file=sys.stderr, flush=True)
        if self.stopping:
            raise KeyboardInterrupt
        signal.signal(signal.SIGINT, self.before if step == self.steps else self._wait)

    def _wait(self, *_: object) -> None:
        self.stopping = True
        signal.signal(signal.SIGINT, self.before)
        print("\nstopping after this step; once more to stop at once", file=sys.stderr, flush=True)


def _state_file(options: argparse.Namespace) -> Path:
    """Return where the second stage writes its state, beside the folder that is going to be saved."""
    state: Path = options.save_to.with_name(f"{options.save_to.name}.state.safetensors")
    if options.resume and not state.exists():
        raise FileNotFoundError(f"--resume: there is no {state}")
    if state.exists() and not options.resume:
        raise FileExistsError(f"{state} is left of an interrupted calibration: give --resume, or remove it")
    return state


def _choices(options: argparse.Namespace) -> dict[str, Any]:
    """Return arguments of `calibrate`, by default those of the command; what would change nothing is refused."""
    given = {name: value for name in options.defaults if (value := getattr(options, name)) is not None}
    choices: dict[str, Any] = {**options.defaults, **given, "seed": options.seed}
    unread = ignored(choices["stage"], choices["weights"])
    by = "stage" if choices["stage"] == "closed_form" else "weights"
    for name in unread:
        if name in given:
            raise ValueError(f"--{name.replace('_', '-')} changes nothing with --{by} {choices[by]}: leave it out")
        choices.pop(name, None)
    if options.resume and choices["stage"] == "closed_form":
        raise ValueError("--resume changes nothing with --stage closed_form: leave it out")
    second_stage(**{name: value for name, value in choices.items() if name != "held_out"})
    check_positive(held_out=choices["held_out"], **({} if options.windows is None else {"windows": options.windows}))
    if options.length < 2:
        raise ValueError(f"--length must be at least 2, not {options.length}")
    check_lengths(options.lengths, options.length)
    return choices


def _windows(options: argparse.Namespace, ids: list[int], held_out: int) -> torch.Tensor:
    """Return windows of the text, (N, T) int64; what does not fill one is left out."""
    count, length = len(ids) // options.length, options.length
    if options.windows is not None and options.windows > count:
        raise ValueError(f"{options.text} has {count} windows of {length} tokens, {options.windows} were asked for")
    used = count if options.windows is None else options.windows
    if used <= held_out:
        raise ValueError(
            f"{used} windows of {length} tokens from {options.text} are too few: --held-out takes {held_out}, and at "
            "least one is needed beside"
        )
    return torch.tensor(ids[: used * length], dtype=torch.long).view(used, length)


def evaluate_checkpoint(options: argparse.Namespace) -> int:
    """Measure length by length: each row is printed when it is there."""
    for length in options.lengths:
        stride_of(length, options.stride)
    if options.memory is not None and options.memory < 1:
        raise ValueError(f"--memory must be at least 1, not {options.memory}")
    if options.json and not options.json.parent.is_dir():
        raise FileNotFoundError(f"--json {options.json}: there is no folder {options.json.parent}")
    device = _device(options.device)
    texts = [_read(path) for path in options.text]
    checkpoint = hub.checkpoint_name(options.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).to(device)
    if options.memory is not None:
        check_memory(model)
    documents = [torch.tensor(tokenizer(text, verbose=False).input_ids, dtype=torch.long) for text in texts]
    total = sum(len(document) for document in documents)
    print(f"measuring {total:,} tokens on {device}; every length reads all of them", file=sys.stderr, flush=True)
    print(f"{'context':>10} {'sliding window':>16} {'non-overlapping':>16} {'bits per byte':>14}", flush=True)
    shared: dict[str, Any] = {
        "byte_counts": [len(text.encode()) for text in texts],
        "progress": sys.stderr.isatty(),
    }
    rows = []
    for length in options.lengths:
        (row,) = measure_context(model, documents, lengths=[length], stride=options.stride, **shared)
        sliding, fresh = row.sliding.perplexity, row.non_overlapping.perplexity
        print(f"{row.length:>10} {sliding:>16.3f} {fresh:>16.3f} {row.bits_per_byte:>14.3f}", flush=True)
        rows.append(row.to_dict())
        if options.memory is not None:
            read = [
                measure_recurrence(model, documents, segment=length, memory=memory, **shared)
                for memory in (0, options.memory)
            ]
            for each in read:
                print(
                    f"{'':>10} segments with a memory of {each.memory}: {each.perplexity.perplexity:.3f}, "
                    f"{each.bits_per_byte:.3f} bits per byte, {each.tokens_per_second:,.0f} tokens per second",
                    flush=True,
                )
            rows[-1]["recurrence"] = [each.to_dict() for each in read]
    if options.json:
        staged = options.json.with_name(options.json.name + ".partial")
        staged.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
        os.replace(staged, options.json)
    return 0


def _read(path: Path) -> str:
    """Return a text file's content; the error names the file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}") from None
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not readable as UTF-8 text: {error}") from None


def _device(name: str) -> torch.device:
    """Return the device, after trying it; ValueError in one line where it cannot be used."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except (AssertionError, NotImplementedError, RuntimeError) as error:  # what torch raises, by device and build
        raise ValueError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from None
    return device


def draw(options: argparse.Namespace) -> int:
    """Compute, write the numbers, then draw: without matplotlib the numbers are there."""
    kind = KINDS[options.kind]
    if len(options.sources) > 1 and not kind.several:
        raise ValueError(f"{options.kind} is drawn of one scheme or model, not of {len(options.sources)}")
    if len(set(options.sources)) < len(options.sources):
        raise ValueError("a scheme or model was named twice")
    asked = {source: _numbers_of(options.kind, source) for source in options.sources}
    read = {name for _, numbers in asked.values() for name in numbers.options}
    for name in ("length", "trained_length", "text", "positions", "set"):
        if getattr(options, name) not in (None, []) and name not in read:
            what = " and ".join(options.sources)
            raise ValueError(f"--{name.replace('_', '-')} changes nothing in {options.kind} of {what}: leave it out")
    if options.length is None:
        options.length = options.shown
    for path in filter(None, (options.output, options.numbers)):
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    plots.kind_of(options.output)
    settings = _settings(options)
    # A checkpoint is called by the name of its directory; two of one name keep their whole paths.
    short = {source: Path(source).name if Path(source).is_dir() else source for source in options.sources}
    names = short if len(set(short.values())) == len(short) else {source: source for source in options.sources}
    found = {names[source]: _computed(options, source, *asked[source], settings) for source in options.sources}
    if options.numbers:
        numbers = {source: _numbers(each) for source, each in found.items()}
        options.numbers.write_text(json.dumps({"kind": options.kind, "sources": numbers}, indent=1))
        print(f"numbers in {options.numbers}")
    title = " and ".join(found) if options.title is None else options.title
    print(plots.save(kind.draw(found, title), options.output))
    return 0


def _numbers_of(kind: str, source: str) -> tuple[str, Numbers]:
    """Return what sort of source it is, and what is computed of it; ValueError if a kind is not for such."""
    if source in available_schemes():
        sort = "scheme"
    elif KINDS[kind].schedule is not None and schedule(source) is not None:
        sort = "schedule"
    else:
        sort = "model"
    numbers = KINDS[kind].numbers(sort)
    if numbers is None:
        others = {
            "scheme": "a scheme, e.g. alibi",
            "model": "a checkpoint",
            "schedule": "frequencies: their base, e.g. 10000, a power of t, e.g. t^2, or a list with commas",
        }
        named = ", or ".join(words for other, words in others.items() if KINDS[kind].numbers(other) is not None)
        raise ValueError(f"{kind} is not computed of {source}: name {named}")
    return sort, numbers


def _computed(options: argparse.Namespace, source: str, sort: str, numbers: Numbers, settings: dict[str, Any]) -> Any:
    """Return what one plot shows of one source."""
    if settings and sort != "scheme":
        raise ValueError(f"--set is for schemes, and {source} is none")
    subject: Any
    if sort == "scheme":
        (subject,) = parse_schemes(source, settings)
    elif sort == "schedule":
        subject = schedule(source)
    else:
        subject = AutoModelForCausalLM.from_pretrained(hub.checkpoint_name(source))
    positions = None if options.positions is None else tuple(options.positions)
    read = partial(_tokens, options.text, source, subject)
    return numbers.compute(subject, Asked(options.length, options.trained_length, positions, read))


def _tokens(path: Path | None, source: str, model: PreTrainedModel, count: int) -> torch.Tensor:
    """Return tokens (count,) of a text, or at random."""
    if path is None:
        print(f"{source} reads {count} random tokens; --text names something to read")
        size = model.get_input_embeddings().weight.shape[0]
        return torch.randint(size, (count,), generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor(AutoTokenizer.from_pretrained(source)(_read(path), verbose=False)["input_ids"])
    if len(tokens) < count:
        raise ValueError(f"{path} has {len(tokens)} tokens, {count} were asked for")
    return tokens[:count]


def _numbers(found: Any) -> Any:
    """Return what was computed, ready for JSON."""
    if isinstance(found, torch.Tensor):
        return found.tolist()
    if isinstance(found, dict):
        return {name: _numbers(each) for name, each in found.items()}
    return [each.to_dict() for each in found] if isinstance(found, list) else found.to_dict()


def push_checkpoint(options: argparse.Namespace) -> int:
    """Upload a patched checkpoint."""
    commit = hub.push(
        options.directory,
        options.repo_id,
        private=options.private,
        revision=options.revision,
        token=options.token,
        commit_message=options.message,
    )
    print(commit.commit_url)
    return 0

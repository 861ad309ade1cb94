"""Functions behind the commands of `hf-posenc`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import shlex
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from .analysis import plots
from .api import parse_schemes
from .catalogue import language_type, refused_types, served_type
from .checkpoints import files, hub
from .checkpoints.inspecting import inspect as read_config
from .command_arguments import hyperparameters, meanings
from .description import describe
from .did_you_mean import did_you_mean
from .errors import PluginError, UnsupportedModelError
from .loading import from_pretrained
from .plot_kinds import KINDS, OPTIONS_OF, Asked, Numbers, schedule
from .registry import available_schemes, scheme_class, supported_model_types
from .schemes.base import EVERY_SCHEME, Scheme
from .verification import verify

logging.set_verbosity_error()


def list_schemes(options: argparse.Namespace) -> int:
    """Print every scheme with its hyper-parameters, or explain those that are named."""
    for name in options.names:
        print(_explained(scheme_class(name)))
    if options.names:
        return 0
    for name in available_schemes():
        try:
            cls = scheme_class(name)
        except PluginError as error:  # of another package, which is not to hide the others
            print(f"{name}\n    cannot be used: {error}")
            continue
        print(f"{cls()}\n    {(cls.__doc__ or '').strip().splitlines()[0]}")
    return 0


def _explained(cls: type[Scheme]) -> str:
    """Return what a scheme's docstring says, and each hyper-parameter with its default and its meaning."""
    said = (inspect.getdoc(cls) or "").partition("\n\nArgs:\n")[0]
    said_of = meanings(cls)
    lines = [cls.name, *("    " + line if line else "" for line in said.splitlines()), "", "    Hyper-parameters:"]
    for field in sorted(dataclasses.fields(cls), key=lambda field: field.name in EVERY_SCHEME):
        text = f"{field.name}={field.default!r}: {said_of.get(field.name, '')}"
        lines += textwrap.wrap(text, 112, initial_indent=" " * 6, subsequent_indent=" " * 10)
    return "\n".join([*lines, ""])


def list_families(options: argparse.Namespace) -> int:
    """Print what is known of model types: of those that were asked for, or of all, those that can be patched first."""
    refused = 0
    for model_type in options.model_types or supported_model_types():
        if "/" in model_type or Path(model_type).is_dir():
            raise ValueError(
                f"{model_type} is a checkpoint, not a model type: `hf-posenc inspect {model_type}` says its base, and "
                "whether that can be patched"
            )
        try:
            inside = language_type(model_type)
            within = "" if inside == model_type else f"the language model inside is patched, as a rule a {inside}:\n"
            said = within + str(served_type(inside))
        except UnsupportedModelError as error:
            refused, said = 1, str(error)
        except PluginError as error:  # of another package, which is not to hide the others
            said = f"cannot be used: {error}"
        print("\n    ".join([model_type, *said.splitlines()]))
    for reason, types in ({} if options.model_types else refused_types()).items():
        print(f"{', '.join(types)}\n    cannot be patched: {reason}")
    return refused


def inspect_checkpoint(options: argparse.Namespace) -> int:
    """Print what a checkpoint is."""
    checkpoint = hub.find_checkpoint(options.checkpoint, options.revision)
    found = read_config(checkpoint, **_where(options, checkpoint))
    print(found)
    return 0 if found.problem is None else 1


def verify_checkpoint(options: argparse.Namespace) -> int:
    """Print what a patched checkpoint is, and which layers answer to positions."""
    checkpoint = hub.checkpoint_name(options.checkpoint)
    where = _where(options, checkpoint)
    found = read_config(checkpoint, **where)
    if found.scheme is None:
        raise ValueError(
            f"{options.checkpoint} is a stock {found.base} checkpoint, so there is no patch to verify: "
            f"`hf-posenc patch {options.checkpoint} SCHEME OUTPUT` makes one"
        )
    _loading(options.checkpoint)
    model = from_pretrained(checkpoint, dtype=_dtype(options), **where)
    print(describe(model))
    report = verify(model)
    print(f"{report}\n\n{options.explained}")
    return 0 if report.ok else 1


def patch_checkpoint(options: argparse.Namespace) -> int:
    """Patch a stock checkpoint and save it."""
    if options.output.exists():
        raise FileExistsError(f"{options.output} exists already")
    # Only what is the scheme's own, before anything is read.
    scheme = parse_schemes(options.scheme, hyperparameters(options.scheme_args))
    checkpoint = hub.checkpoint_name(options.checkpoint)
    where = _where(options, checkpoint)
    if read_config(checkpoint, **where).scheme is not None:
        raise ValueError(f"{checkpoint} is patched already: name the stock checkpoint it was made from")
    _loading(options.checkpoint)
    model = from_pretrained(checkpoint, scheme=scheme, seed=options.seed, dtype=_dtype(options), **where)
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, **where)
    except (OSError, ValueError):  # a checkpoint without one
        tokenizer = None
    with files.new_folder(options.output) as folder:
        model.save_pretrained(folder, tokenizer=tokenizer)
    print(describe(model))
    print(f"saved in {options.output}" + ("" if tokenizer else ", without a tokenizer: the checkpoint has none"))
    given = f" --scheme-args {shlex.join(options.scheme_args)}" if options.scheme_args else ""
    print(
        "It is not calibrated, and most schemes make a model predict badly until they are. This swaps and calibrates:\n"
        f"hf-posenc calibrate --model {options.checkpoint} --scheme {options.scheme}{given} --data TEXT --output FOLDER"
    )
    return 0


def _where(options: argparse.Namespace, checkpoint: str) -> dict[str, Any]:
    """Return what `from_pretrained` is told of `--revision`: nothing where nothing was said."""
    if options.revision and os.path.isdir(checkpoint):
        raise ValueError(f"--revision is of a checkpoint on the Hub, and {checkpoint} is a folder: leave it out")
    return {"revision": options.revision} if options.revision else {}


def _dtype(options: argparse.Namespace) -> Any:
    return "auto" if options.dtype == "auto" else getattr(torch, options.dtype)


def _loading(what: str) -> None:
    """Say so: it can take long."""
    print(f"loading {what} ...", file=sys.stderr, flush=True)


def _read(path: Path) -> str:
    """Return a text file's content; the error names the file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}") from None
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not readable as UTF-8 text: {error}") from None


def draw(options: argparse.Namespace) -> int:
    """Compute, write the numbers, then draw: without matplotlib the numbers are there."""
    kind = KINDS[options.kind]
    if len(options.sources) > 1 and not kind.several:
        raise ValueError(f"{options.kind} is drawn of one scheme or model, not of {len(options.sources)}")
    if len(set(options.sources)) < len(options.sources):
        raise ValueError("a scheme or model was named twice")
    asked = {source: _numbers_of(options.kind, source) for source in options.sources}
    read = {name for sort, numbers in asked.values() for name in (*numbers.options, *OPTIONS_OF[sort])}
    for name in ("length", "trained_length", "data", "positions", "scheme_args", "revision"):
        if getattr(options, name) not in (None, []) and name not in read:
            what = " and ".join(options.sources)
            raise ValueError(f"--{name.replace('_', '-')} changes nothing in {options.kind} of {what}: leave it out")
    if options.length is None:
        options.length = options.shown
    for path in filter(None, (options.output, options.json)):
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    plots.kind_of(options.output)
    settings = hyperparameters(options.scheme_args)
    # A checkpoint is called by the name of its directory; two of one name keep their whole paths.
    short = {source: Path(source).name if Path(source).is_dir() else source for source in options.sources}
    names = short if len(set(short.values())) == len(short) else {source: source for source in options.sources}
    found = {names[source]: _computed(options, source, *asked[source], settings) for source in options.sources}
    if options.json:
        numbers = {source: _numbers(each) for source, each in found.items()}
        options.json.write_text(json.dumps({"kind": options.kind, "sources": numbers}, indent=1))
        print(f"numbers in {options.json}")
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
        if "/" not in source and not Path(source).is_dir() and (meant := did_you_mean(source, available_schemes())):
            raise ValueError(f"{source} is no scheme and no folder; a checkpoint on the Hub is OWNER/NAME{meant}")
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
        raise ValueError(f"--scheme-args is for schemes, and {source} is none")
    subject: Any
    if sort == "scheme":
        (subject,) = parse_schemes(source, settings)
    elif sort == "schedule":
        subject = schedule(source)
    else:
        checkpoint = hub.find_checkpoint(source, options.revision)
        where = _where(options, checkpoint)
        _loading(source)
        subject = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=_dtype(options), **where)
    positions = None if options.positions is None else tuple(options.positions)
    read = partial(_tokens, options, source, subject)
    return numbers.compute(subject, Asked(options.length, options.trained_length, positions, read))


def _tokens(options: argparse.Namespace, source: str, model: PreTrainedModel, count: int) -> torch.Tensor:
    """Return tokens (count,) of the text, or at random."""
    if options.data is None:
        print(f"{source} reads {count} random tokens; --data names something to read")
        size = model.get_input_embeddings().weight.shape[0]
        return torch.randint(size, (count,), generator=torch.Generator().manual_seed(0))
    tokenizer = AutoTokenizer.from_pretrained(hub.checkpoint_name(source), **_where(options, source))
    tokens = torch.tensor(tokenizer(_read(options.data), verbose=False)["input_ids"])
    if len(tokens) < count:
        raise ValueError(f"{options.data} has {len(tokens)} tokens, {count} were asked for")
    return tokens[:count]


def _numbers(found: Any) -> Any:
    """Return what was computed, ready for JSON."""
    if isinstance(found, torch.Tensor):
        return found.tolist()
    if isinstance(found, dict):
        return {name: _numbers(each) for name, each in found.items()}
    return [each.to_dict() for each in found] if isinstance(found, list) else found.to_dict()


def push_checkpoint(options: argparse.Namespace) -> int:
    """Upload a patched checkpoint, or say what would be."""
    if options.dry_run:
        sizes = hub.planned(options.directory)
        branch = f", branch {options.revision}" if options.revision else ""
        print(f"would upload {sum(sizes.values()):,} bytes to {options.repo_id}{branch}, in one commit:")
        for name, size in sizes.items():
            print(f"  {size:>15,}  {name}")
        print(
            "and README.md, the model card. Weight files that the repository has and this folder has not would be "
            "deleted. Nothing was sent or asked."
        )
        return 0
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

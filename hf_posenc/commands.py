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
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from .analysis import plots
from .api import parse_schemes
from .catalogue import language_type, refused_types, served_type
from .checking.check import check
from .checkpoints import files, hub
from .checkpoints.export import export_stock
from .checkpoints.gguf_export import export_gguf
from .checkpoints.inspecting import inspect as read_config
from .command_arguments import hyperparameters, meanings
from .description import describe
from .did_you_mean import did_you_mean
from .errors import PluginError, UnsupportedModelError
from .loading import from_pretrained
from .plot_kinds import KINDS, OPTIONS_OF_SOURCE, Numbers, PlotOptions, parse_frequencies
from .registry import available_schemes, scheme_class, supported_model_types
from .schemes.base import EVERY_SCHEME, Scheme
from .verification import verify

logging.set_verbosity_error()


def list_schemes(options: argparse.Namespace) -> int:
    """List all schemes with their hyper-parameters, or explain the schemes that are named."""
    for name in options.names:
        print(_explained(scheme_class(name)))
    if options.names:
        return 0
    for name in available_schemes():
        try:
            cls = scheme_class(name)
        except PluginError as error:  # a broken plugin must not keep the other schemes from being listed
            print(f"{name}\n    cannot be used: {error}")
            continue
        print(f"{cls()}\n    {(cls.__doc__ or '').strip().splitlines()[0]}")
    return 0


def _explained(cls: type[Scheme]) -> str:
    """Return a scheme's docstring and its hyper-parameters, with defaults and meanings."""
    about = (inspect.getdoc(cls) or "").partition("\n\nArgs:\n")[0]
    meaning_of = meanings(cls)
    lines = [cls.name, *("    " + line if line else "" for line in about.splitlines()), "", "    Hyper-parameters:"]
    for field in sorted(dataclasses.fields(cls), key=lambda field: field.name in EVERY_SCHEME):
        text = f"{field.name}={field.default!r}: {meaning_of.get(field.name, '')}"
        lines += textwrap.wrap(text, 112, initial_indent=" " * 6, subsequent_indent=" " * 10)
    return "\n".join([*lines, ""])


def list_families(options: argparse.Namespace) -> int:
    """Describe the model types that are named. Without names describe all: first those that can be patched."""
    status = 0
    for model_type in options.model_types or supported_model_types():
        if "/" in model_type or Path(model_type).is_dir():
            raise ValueError(
                f"{model_type} is a checkpoint, not a model type: `hf-posenc inspect {model_type}` says whether it can "
                "be patched"
            )
        try:
            inner_type = language_type(model_type)
            within = (
                "" if inner_type == model_type else f"the language model inside is patched, as a rule a {inner_type}:\n"
            )
            text = within + str(served_type(inner_type))
        except UnsupportedModelError as error:
            status, text = 1, str(error)
        except PluginError as error:  # a broken plugin must not keep the other types from being listed
            text = f"cannot be used: {error}"
        print("\n    ".join([model_type, *text.splitlines()]))
    for reason, types in ({} if options.model_types else refused_types()).items():
        print(f"{', '.join(types)}\n    cannot be patched: {reason}")
    return status


def inspect_checkpoint(options: argparse.Namespace) -> int:
    """Describe a checkpoint."""
    checkpoint = hub.find_checkpoint(options.checkpoint, options.revision)
    found = read_config(checkpoint, **_revision(options, checkpoint))
    print(found)
    return 0 if found.problem is None else 1


def verify_checkpoint(options: argparse.Namespace) -> int:
    """Describe a patched checkpoint, and print which layers respond to positions."""
    checkpoint = hub.checkpoint_name(options.checkpoint)
    revision = _revision(options, checkpoint)
    found = read_config(checkpoint, **revision)
    if found.scheme is None:
        raise ValueError(
            f"{options.checkpoint} is a stock {found.base} checkpoint, so there is no patch to verify: "
            f"`hf-posenc patch {options.checkpoint} SCHEME OUTPUT` makes one"
        )
    _print_loading(options.checkpoint)
    model = from_pretrained(checkpoint, dtype=_dtype(options), **revision)
    print(describe(model))
    report = verify(model)
    print(f"{report}\n\n{options.explained}")
    return 0 if report.ok else 1


def check_checkpoint(options: argparse.Namespace) -> int:
    """Load a checkpoint, stock, forked or patched, measure what its positions do, and print the findings."""
    if options.json and not options.json.parent.is_dir():
        raise FileNotFoundError(f"{options.json}: there is no folder {options.json.parent}")
    model, other = (_any_model(options, source) for source in (options.checkpoint, options.other))
    report = check(model, other, seed=options.seed)
    print(report)
    if options.json:
        options.json.write_text(json.dumps(report.to_dict(), indent=1))
        print(f"numbers in {options.json}")
    return 0 if report.ok else 1


def _any_model(options: argparse.Namespace, source: str | None) -> Any:
    """Return a checkpoint's model, also of code that lies beside its weights if the user trusts it; None for none."""
    if source is None:
        return None
    checkpoint = hub.checkpoint_name(source)
    _print_loading(source)
    revision = _revision(options, checkpoint) if source == options.checkpoint else {}
    return AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=_dtype(options), trust_remote_code=options.trust_remote_code, **revision
    )


def patch_checkpoint(options: argparse.Namespace) -> int:
    """Patch a stock checkpoint and save it."""
    if options.output.exists():
        raise FileExistsError(f"{options.output} exists already")
    # Fails on wrong hyper-parameters before anything is loaded.
    scheme = parse_schemes(options.scheme, hyperparameters(options.scheme_args))
    checkpoint = hub.checkpoint_name(options.checkpoint)
    revision = _revision(options, checkpoint)
    if read_config(checkpoint, **revision).scheme is not None:
        raise ValueError(f"{checkpoint} is patched already: name the stock checkpoint it was made from")
    _print_loading(options.checkpoint)
    model = from_pretrained(checkpoint, scheme=scheme, seed=options.seed, dtype=_dtype(options), **revision)
    tokenizer = _tokenizer(checkpoint, revision)
    with files.new_folder(options.output) as folder:
        model.save_pretrained(folder, tokenizer=tokenizer)
    print(describe(model))
    print(f"saved in {options.output}" + ("" if tokenizer else ", without a tokenizer: the checkpoint has none"))
    scheme_args = f" --scheme-args {shlex.join(options.scheme_args)}" if options.scheme_args else ""
    print(
        "It is not calibrated, and with most schemes a model predicts badly before that. This patches and calibrates:\n"
        f"hf-posenc calibrate --model {options.checkpoint} --scheme {options.scheme}{scheme_args} --data TEXT "
        "--output FOLDER"
    )
    return 0


def export_checkpoint(options: argparse.Namespace) -> int:
    """Write a patched checkpoint as a stock checkpoint or as a GGUF file."""
    if options.output.exists():
        raise FileExistsError(f"{options.output} exists already")
    is_gguf = options.format == "gguf" or (options.format is None and options.output.suffix == ".gguf")
    if options.dtype is not None and not is_gguf:
        raise ValueError("--dtype is for GGUF files: a stock checkpoint keeps the dtype of its weights")
    checkpoint = hub.checkpoint_name(options.checkpoint)
    revision = _revision(options, checkpoint)
    if read_config(checkpoint, **revision).scheme is None:
        raise ValueError(f"{checkpoint} is a stock checkpoint already: use it, or llama.cpp's own converter, as it is")
    _print_loading(options.checkpoint)
    model = from_pretrained(checkpoint, **revision)
    tokenizer = _tokenizer(checkpoint, revision)
    if is_gguf:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*gets no tokenizer")  # the last line says so
            export_gguf(model, options.output, tokenizer=tokenizer, dtype=options.dtype or "float32")
    else:
        with files.new_folder(options.output) as folder:
            export_stock(model, folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
    print(f"saved in {options.output}" + ("" if tokenizer else ", without a tokenizer: the checkpoint has none"))
    return 0


def _tokenizer(checkpoint: str, revision: dict[str, object]) -> Any:
    """Return the tokenizer of a checkpoint, or None if it has none."""
    try:
        return AutoTokenizer.from_pretrained(checkpoint, **revision)
    except (OSError, ValueError):
        return None


def _revision(options: argparse.Namespace, checkpoint: str) -> dict[str, Any]:
    """Return `--revision` as a keyword of `from_pretrained`; no keyword without the option."""
    if options.revision and os.path.isdir(checkpoint):
        raise ValueError(f"--revision needs a checkpoint on the Hub, but {checkpoint} is a local folder: leave it out")
    return {"revision": options.revision} if options.revision else {}


def _dtype(options: argparse.Namespace) -> str | torch.dtype:
    chosen: str | torch.dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    return chosen


def _print_loading(checkpoint: str) -> None:
    """Print a line before loading, which can take long."""
    print(f"loading {checkpoint} ...", file=sys.stderr, flush=True)


def _read(path: Path) -> str:
    """Return a text file's content; the error names the file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}") from None
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not readable as UTF-8 text: {error}") from None


def draw(options: argparse.Namespace) -> int:
    """Compute the numbers, write them, and draw them. Without matplotlib only the drawing fails."""
    kind = KINDS[options.kind]
    if len(options.sources) > 1 and not kind.several:
        raise ValueError(f"{options.kind} needs one scheme or model, not {len(options.sources)}")
    if len(set(options.sources)) < len(options.sources):
        raise ValueError("a scheme or model was named twice")
    computations = {source: _computation(options.kind, source) for source in options.sources}
    used_options = {
        name
        for source_type, numbers in computations.values()
        for name in (*numbers.options, *OPTIONS_OF_SOURCE[source_type])
    }
    for name in ("length", "trained_length", "data", "positions", "scheme_args", "revision"):
        if getattr(options, name) not in (None, []) and name not in used_options:
            sources = " and ".join(options.sources)
            raise ValueError(f"--{name.replace('_', '-')} has no effect on {options.kind} of {sources}: leave it out")
    if options.length is None:
        options.length = options.shown
    for path in filter(None, (options.output, options.json)):
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    plots.kind_of(options.output)
    keywords = hyperparameters(options.scheme_args)
    # A local checkpoint is named by its directory, unless two sources would get the same name.
    short_names = {source: Path(source).name if Path(source).is_dir() else source for source in options.sources}
    names = (
        short_names
        if len(set(short_names.values())) == len(short_names)
        else {source: source for source in options.sources}
    )
    results = {names[source]: _compute(options, source, *computations[source], keywords) for source in options.sources}
    if options.json:
        numbers = {source: _to_json(result) for source, result in results.items()}
        options.json.write_text(json.dumps({"kind": options.kind, "sources": numbers}, indent=1))
        print(f"numbers in {options.json}")
    title = " and ".join(results) if options.title is None else options.title
    print(plots.save(kind.draw(results, title), options.output))
    return 0


def _computation(kind: str, source: str) -> tuple[str, Numbers]:
    """Return the type of a source, and how to compute its numbers; ValueError if the kind does not draw that type."""
    if source in available_schemes():
        source_type = "scheme"
    elif KINDS[kind].frequencies is not None and parse_frequencies(source) is not None:
        source_type = "frequencies"
    else:
        source_type = "model"
        if "/" not in source and not Path(source).is_dir() and (meant := did_you_mean(source, available_schemes())):
            raise ValueError(f"{source} is neither a scheme nor a folder; a checkpoint on the Hub is OWNER/NAME{meant}")
    numbers = KINDS[kind].numbers(source_type)
    if numbers is None:
        source_types = {
            "scheme": "a scheme, e.g. alibi",
            "model": "a checkpoint",
            "frequencies": "frequencies: their base, e.g. 10000, a power of t, e.g. t^2, or a list with commas",
        }
        possible = ", or ".join(text for name, text in source_types.items() if KINDS[kind].numbers(name) is not None)
        raise ValueError(f"{kind} does not draw {source}: name {possible}")
    return source_type, numbers


def _compute(
    options: argparse.Namespace, source: str, source_type: str, numbers: Numbers, keywords: dict[str, object]
) -> Any:
    """Compute the numbers of one source."""
    if keywords and source_type != "scheme":
        raise ValueError(f"--scheme-args needs schemes, but {source} is none")
    subject: Any
    if source_type == "scheme":
        (subject,) = parse_schemes(source, keywords)
    elif source_type == "frequencies":
        subject = parse_frequencies(source)
    else:
        checkpoint = hub.find_checkpoint(source, options.revision)
        revision = _revision(options, checkpoint)
        _print_loading(source)
        subject = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=_dtype(options), **revision)
    positions = None if options.positions is None else tuple(options.positions)
    read = partial(_tokens, options, source, subject)
    return numbers.compute(subject, PlotOptions(options.length, options.trained_length, positions, read))


def _tokens(options: argparse.Namespace, source: str, model: PreTrainedModel, count: int) -> torch.Tensor:
    """Return the first tokens (count,) of the text of `--data`, or random tokens."""
    if options.data is None:
        print(f"{source} reads {count} random tokens; give it a text with --data")
        size = model.get_input_embeddings().weight.shape[0]
        return torch.randint(size, (count,), generator=torch.Generator().manual_seed(0))
    tokenizer = AutoTokenizer.from_pretrained(hub.checkpoint_name(source), **_revision(options, source))
    tokens = torch.tensor(tokenizer(_read(options.data), verbose=False)["input_ids"])
    if len(tokens) < count:
        raise ValueError(f"{options.data} has {len(tokens)} tokens, but {count} are needed")
    return tokens[:count]


def _to_json(numbers: Any) -> Any:
    """Return computed numbers, ready for JSON."""
    if isinstance(numbers, torch.Tensor):
        return numbers.tolist()
    if isinstance(numbers, dict):
        return {name: _to_json(item) for name, item in numbers.items()}
    return [item.to_dict() for item in numbers] if isinstance(numbers, list) else numbers.to_dict()


def push_checkpoint(options: argparse.Namespace) -> int:
    """Upload a patched checkpoint, or with `--dry-run` print what would be uploaded."""
    if options.dry_run:
        sizes = hub.planned(options.directory)
        branch = f", branch {options.revision}" if options.revision else ""
        print(f"would upload {sum(sizes.values()):,} bytes to {options.repo_id}{branch}, in one commit:")
        for name, size in sizes.items():
            print(f"  {size:>15,}  {name}")
        print(
            "and README.md, the model card. Weight files that are only in the repository would be "
            "deleted. Nothing was sent."
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

"""The command `hf-posenc`: a thin face over the package's functions."""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from . import (
    HfPosencError,
    __version__,
    available_schemes,
    describe,
    from_pretrained,
    hub,
    inspect,
    verify,
)
from .evaluation import measure_context
from .registry import scheme_class


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: of the command line, without the program's name; None takes those of the process.

    Returns:
        Exit status: 0; 1 where the answer is no (`inspect` of what cannot be loaded, `verify` that fails); 2 for an
        error.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()
    try:
        return int(options.run(options))
    except (HfPosencError, OSError, TypeError, ValueError) as error:
        print(f"hf-posenc {options.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-posenc", description="Replace the position encoding of Hugging Face causal language models."
    )
    parser.add_argument("--version", action="version", version=f"hf_posenc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser("schemes", help="list the schemes and their hyper-parameters")
    command.set_defaults(run=_schemes)

    command = commands.add_parser("inspect", help="say what a checkpoint is, without reading its weights")
    command.add_argument("checkpoint", help="directory or Hub id")
    command.add_argument("--revision")
    command.set_defaults(run=_inspect)

    command = commands.add_parser("verify", help="load a patched checkpoint and ask every layer for its positions")
    command.add_argument("checkpoint", help="directory or Hub id")
    command.set_defaults(run=_verify)

    command = commands.add_parser("patch", help="patch a stock checkpoint and save it")
    command.add_argument("checkpoint", help="directory or Hub id of a stock checkpoint")
    command.add_argument("scheme", help=f"one of {', '.join(available_schemes())}")
    command.add_argument("output", type=Path, help="directory that does not exist yet")
    command.add_argument("--seed", type=int, help="for parameters that start at random")
    command.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a hyper-parameter, e.g. max_distance=64"
    )
    command.set_defaults(run=_patch)

    command = commands.add_parser("evaluate", help="measure both perplexities of a checkpoint on a text")
    command.add_argument("checkpoint", help="directory or Hub id, with its tokenizer")
    command.add_argument("text", type=Path, nargs="+", help="UTF-8 text files, a document each")
    command.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024], help="context lengths, in tokens")
    command.add_argument("--stride", type=int, help="between sliding windows; by default a quarter of each length")
    command.add_argument("--device", default="cpu", help="for instance cuda")
    command.add_argument("--json", type=Path, help="file for every number, loss by position included")
    command.set_defaults(run=_evaluate)

    command = commands.add_parser("push", help="upload a patched checkpoint to the Hub, in one commit")
    command.add_argument("directory", type=Path)
    command.add_argument("repo_id", help="NAME or ORGANIZATION/NAME")
    command.add_argument("--private", action="store_true", default=None, help="if the repository is new")
    command.add_argument("--revision", help="branch; made if it does not exist")
    command.add_argument("--token", help="access token; by default the one that is stored")
    command.add_argument("--message", help="title of the commit")
    command.set_defaults(run=_push)
    return parser


def _schemes(options: argparse.Namespace) -> int:
    for name in available_schemes():
        cls = scheme_class(name)
        values = ", ".join(f"{key}={value!r}" for key, value in cls().hyperparameters().items())
        print(f"{name}({values})\n    {(cls.__doc__ or '').strip().splitlines()[0]}")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    found = inspect(options.checkpoint, **({"revision": options.revision} if options.revision else {}))
    print(found)
    return 0 if found.problem is None else 1


def _verify(options: argparse.Namespace) -> int:
    model = from_pretrained(options.checkpoint)
    print(describe(model))
    report = verify(model)
    print(report)
    return 0 if report.ok else 1


def _patch(options: argparse.Namespace) -> int:
    if options.output.exists():
        raise FileExistsError(f"{options.output} exists already")
    model = from_pretrained(
        options.checkpoint, scheme=options.scheme, seed=options.seed, **dict(_setting(text) for text in options.set)
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    except (OSError, ValueError):  # a checkpoint without one
        tokenizer = None
    model.save_pretrained(options.output, tokenizer=tokenizer)
    print(describe(model))
    print(f"saved in {options.output}" + ("" if tokenizer else ", without a tokenizer: the checkpoint has none"))
    return 0


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"--set takes NAME=VALUE, not {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value  # a word, e.g. layout=split


def _evaluate(options: argparse.Namespace) -> int:
    texts = [path.read_text(encoding="utf-8") for path in options.text]
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint).to(options.device)
    rows = measure_context(
        model,
        [torch.tensor(tokenizer(text, verbose=False).input_ids, dtype=torch.long) for text in texts],
        lengths=options.lengths,
        stride=options.stride,
        byte_counts=[len(text.encode()) for text in texts],
        progress=sys.stderr.isatty(),
    )
    if options.json:
        staged = options.json.with_name(options.json.name + ".partial")
        staged.write_text(json.dumps([row.to_dict() for row in rows], indent=2) + "\n", encoding="utf-8")
        os.replace(staged, options.json)
    print(f"{'context':>10} {'sliding window':>16} {'non-overlapping':>16} {'bits per byte':>14}")
    for row in rows:
        sliding, fresh = row.sliding.perplexity, row.non_overlapping.perplexity
        print(f"{row.length:>10} {sliding:>16.3f} {fresh:>16.3f} {row.bits_per_byte:>14.3f}")
    return 0


def _push(options: argparse.Namespace) -> int:
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


if __name__ == "__main__":
    sys.exit(main())

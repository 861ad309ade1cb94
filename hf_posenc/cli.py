"""The command `hf-posenc`: it calls a function of `commands`, or starts a recipe."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from .core.command_arguments import Parser, parser_of
from .core.errors import HfPosencError
from .core.version import VERSION

RECIPES = {
    "extend": ("extend_context", "measure a checkpoint, patch, calibrate, fine-tune, measure again"),
    "compare": ("compare_schemes", "do the same for several schemes and seeds on one base: tables"),
    "evaluate": ("evaluate", "measure perplexity and recall of a checkpoint at several context lengths"),
    "calibrate": ("calibrate", "patch a stock checkpoint, fit the scheme to the base's attention, and save it"),
}
"""Command -> the module of hf_posenc.recipes that it starts, and its help."""

COMMANDS = {
    "schemes": "list the schemes, or explain one: equation, options, paper",
    "families": "list the model types that can be patched, and why others cannot",
    "inspect": "describe a checkpoint, without reading its weights",
    "verify": "load a patched checkpoint and check that every layer responds to positions",
    "check": "measure what the positions of any checkpoint do, and say what is wrong",
    "patch": "patch a stock checkpoint and save it",
    "export": "write a patched checkpoint for other engines: a stock checkpoint, or a GGUF file for llama.cpp",
    "push": "upload a patched checkpoint to the Hub, in one commit",
}
"""Name of a function in `commands` -> its help."""

EXAMPLES = """examples:
  hf-posenc schemes alibi                            what a scheme computes, its options, its paper
  hf-posenc calibrate --model gpt2 --scheme t5 --data book.txt --output runs/gpt2-t5
  hf-posenc extend --model gpt2 --data book.txt --scheme t5 --train-length 2048
  accelerate launch -m hf_posenc.recipes.extend_context --model gpt2 --data book.txt      the same on many GPUs

`hf-posenc COMMAND --help` lists the options of a command, and more examples."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: words of the command line, without the program's name; None means those of this process.

    Returns:
        Exit status: 0 for success; 1 if the answer is no (`inspect`: cannot be loaded; `verify`: a layer does not
        respond; `check`: something is wrong; `families`: cannot be patched); 2 for an error; 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    name, checkpoint = words[0], ""
    if name not in COMMANDS | RECIPES:
        _parser().parse_args(words)  # prints help, the version or an error, and ends the program
    try:
        if name in RECIPES:
            return _recipe(name, words[1:])
        from . import commands  # not above: it imports torch, which --help does not need

        function = getattr(commands, name)
        options = vars(parser_of(function, f"hf-posenc {name}").parse_args(words[1:]))
        checkpoint = options.get("checkpoint", "")
        status = int(function(**options))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"\nhf-posenc {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # e.g. `| head`; what Python writes when it exits must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (HfPosencError, ImportError, OSError, TypeError, ValueError) as error:
        said = str(error).removeprefix("hf_posenc: ")
        named = "" if checkpoint in said else f"{checkpoint}: "  # transformers names no checkpoint when it is offline
        print(f"hf-posenc {name}: {named}{said}", file=sys.stderr)
        return 2


def _recipe(name: str, words: list[str]) -> int:
    """Run a recipe in this process, and return its exit status. The recipe prints its own errors."""
    module = importlib.import_module(f".recipes.{RECIPES[name][0]}", __package__)
    program = importlib.import_module(".recipes.program", __package__)
    try:
        program.start(lambda: module.main(words, prog=f"hf-posenc {name}"))
    except SystemExit as stop:
        if isinstance(stop.code, str):
            raise
        return stop.code or 0
    return 0


def _parser() -> Parser:
    """Make the parser of the first word."""
    helps = COMMANDS | {name: text for name, (_, text) in RECIPES.items()}
    listed = "\n".join(f"  {name:<10} {text}" for name, text in helps.items())
    parser = Parser(
        prog="hf-posenc",
        description=f"Replace the position encoding of Hugging Face causal language models.\n\ncommands:\n{listed}",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"hf_posenc {VERSION}")
    parser.add_argument("command", choices=helps, metavar="COMMAND", help="what to do")
    return parser

"""The command `hf-posenc`: a thin face over the package's functions, and what starts the recipes in one process."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .arguments import Parser
from .errors import HfPosencError
from .version import VERSION

PLOTS = (
    "vectors",
    "similarity",
    "grid",
    "decay",
    "waves",
    "biases",
    "wavelengths",
    "properties",
    "attention",
    "order",
    "equivariance",
    "expansion",
    "hessian",
    "terms",
    "negative",
    "table",
    "statistics",
    "recurrence",
    "precision",
)
"""What `plot` draws."""

LENGTH = 128
"""Tokens that `plot` shows."""

RECIPES = {
    "extend": (
        "extend_context",
        "measure a checkpoint, patch, calibrate, fine-tune, measure again, report",
    ),
    "compare": ("compare_schemes", "the same for several schemes and seeds on one base: tables and figures"),
    "pretrain": ("pretrain", "train small decoders from scratch, one for each scheme: train short, test long"),
    "evaluate": ("evaluate", "measure perplexity and retrieval of a checkpoint at several context lengths"),
    "calibrate": ("calibrate", "patch a stock checkpoint, fit the scheme to what its positions did, and save it"),
}
"""Commands that start a program of hf_posenc.recipes: its module, and what it does."""

DTYPES = ("auto", "float32", "bfloat16", "float16")

EXAMPLES = """examples:
  hf-posenc schemes alibi                            what a scheme computes, its options, its paper
  hf-posenc calibrate --model gpt2 --scheme t5 --data book.txt --output runs/gpt2-t5
  hf-posenc extend --model gpt2 --data book.txt --scheme alibi --train-length 2048
  accelerate launch -m hf_posenc.recipes.extend_context --model gpt2 --data book.txt      the same on many GPUs

`hf-posenc COMMAND --help` has the options of a command, and more examples."""

VERIFIED = """How to read the table: `response` is how much a layer's output changes, relative to its size, when its
positions are reversed and everything else stays; `live` the same with the scheme's parameters drawn at random,
because a scheme that starts neutral does not respond yet, and a dead one never does; `model` is the change of the
logits; `order` the change at the last token when two earlier tokens swap places, some of which the causal mask alone
makes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: of the command line, without the program's name; None takes those of the process.

    Returns:
        Exit status: 0; 1 where the answer is no (`inspect` of what cannot be loaded, `verify` that fails, `families` of
        a model type that cannot be patched); 2 for an error; 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    name = words[0] if words else ""
    options = None if name in RECIPES else _parser().parse_args(words)
    name = name if options is None else options.command
    try:
        if options is None:
            return _recipe(name, words[1:])
        if name == "completion":
            return _completion(options.shell)
        from . import commands  # which imports torch: --help does without

        status = int(getattr(commands, options.run)(options))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"\nhf-posenc {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has seen enough; what Python writes as it exits must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (HfPosencError, ImportError, OSError, TypeError, ValueError) as error:
        print(f"hf-posenc {name}: {str(error).removeprefix('hf_posenc: ')}", file=sys.stderr)
        return 2


def _recipe(name: str, words: list[str]) -> int:
    """Start a recipe in this process, which says by itself what is wrong."""
    module = importlib.import_module(f".recipes.{RECIPES[name][0]}", __package__)
    program = importlib.import_module(".recipes.program", __package__)
    try:
        program.start(lambda: module.main(words, prog=f"hf-posenc {name}"))
    except SystemExit as stop:
        if isinstance(stop.code, str):
            raise
        return stop.code or 0
    return 0


def _completion(shell: str) -> int:
    """Print a script that completes commands and options in a shell."""
    try:
        import shtab
    except ImportError:
        raise ImportError("completion needs shtab: pip install shtab") from None
    print(shtab.complete(_parser(recipes=True), shell=shell))
    return 0


def _parser(recipes: bool = False) -> Parser:
    """Return what reads the command line; with the options of the recipes too, which read their own."""
    parser = Parser(
        prog="hf-posenc",
        description="Replace the position encoding of Hugging Face causal language models.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"hf_posenc {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")

    command = commands.add_parser(
        "schemes",
        help="list the schemes, or explain one: equation, options, paper",
        epilog="examples:\n  hf-posenc schemes\n  hf-posenc schemes alibi",
    )
    command.add_argument("names", nargs="*", metavar="NAME", help="scheme to explain; by default all are listed")
    command.set_defaults(run="list_schemes")

    command = commands.add_parser(
        "families",
        help="list the model types that can be patched, and why others cannot",
        epilog="examples:\n  hf-posenc families\n  hf-posenc families llama gpt2 mamba",
    )
    command.add_argument("model_types", nargs="*", metavar="MODEL_TYPE", help="by default all that are known")
    command.set_defaults(run="list_families")

    command = commands.add_parser(
        "inspect",
        help="say what a checkpoint is, without reading its weights",
        epilog="examples:\n  hf-posenc inspect runs/gpt2-alibi/model\n  hf-posenc inspect me/gpt2-alibi --revision v1",
    )
    command.add_argument("checkpoint", help="directory or Hub id")
    _revision(command)
    command.set_defaults(run="inspect_checkpoint")

    for name, (module, said) in RECIPES.items():
        parents = []
        if recipes:
            options = importlib.import_module(".recipes.options", __package__)
            found = importlib.import_module(f".recipes.{module}", __package__)
            parents = [options.parser_of(found.Arguments, None, prog=f"hf-posenc {name}")]
        commands.add_parser(name, help=said, add_help=False, parents=parents)

    command = commands.add_parser(
        "verify",
        help="load a patched checkpoint and ask every layer for its positions",
        description=f"Load a patched checkpoint and ask every layer for its positions.\n\n{VERIFIED}",
        epilog="examples:\n  hf-posenc verify runs/gpt2-alibi/model\n  hf-posenc verify me/gpt2-alibi --dtype float32",
    )
    command.add_argument("checkpoint", help="directory or Hub id of a patched checkpoint")
    _revision(command)
    _dtype(command)
    command.set_defaults(run="verify_checkpoint", explained=VERIFIED)

    command = commands.add_parser(
        "patch",
        help="patch a stock checkpoint and save it",
        epilog="examples:\n  hf-posenc patch gpt2 alibi runs/gpt2-alibi\n"
        "  hf-posenc patch gpt2 shaw runs/gpt2-shaw --scheme-args max_distance=64 share_heads=false --seed 1",
    )
    command.add_argument("checkpoint", help="directory or Hub id of a stock checkpoint")
    command.add_argument("scheme", help="its name: `hf-posenc schemes` lists them")
    command.add_argument("output", type=Path, help="directory that does not exist yet")
    _scheme_args(command, "hyper-parameters, e.g. max_distance=64; `hf-posenc schemes NAME` explains them")
    command.add_argument("--seed", type=int, metavar="N", help="for parameters that start at random")
    _revision(command)
    _dtype(command)
    command.set_defaults(run="patch_checkpoint")

    command = commands.add_parser(
        "plot",
        help="draw what schemes or models do with positions (needs matplotlib)",
        epilog="examples:\n  hf-posenc plot biases alibi.png alibi --length 64\n"
        "  hf-posenc plot order order.png gpt2 runs/gpt2-alibi/model --data book.txt\n"
        "  hf-posenc plot decay decay.svg rope alibi --json decay.json",
    )
    command.add_argument("kind", choices=PLOTS, metavar="KIND", help=f"one of {', '.join(PLOTS)}")
    command.add_argument("output", type=Path, help="picture to write: png, svg or pdf by its suffix")
    command.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="scheme, checkpoint directory or Hub id; of waves and grid also frequencies: 10000, t^2, 1,0.1,0.01",
    )
    command.add_argument("--data", type=Path, metavar="FILE", help="text for a model to read; else tokens are drawn")
    command.add_argument("--text", type=Path, dest="data", help=argparse.SUPPRESS)  # of 0.1.0
    _scheme_args(command, "hyper-parameters of the schemes named")
    command.add_argument(
        "--length", type=int, metavar="N", help=f"tokens: positions or distances to show (default: {LENGTH})"
    )
    command.add_argument(
        "--trained-length", type=int, metavar="N", help="of a scheme's base, of wavelengths (default: 512)"
    )
    command.add_argument(
        "--positions",
        type=int,
        nargs=2,
        metavar=("M", "N"),
        help="of the two tokens of an expansion or a Hessian; by default after a third and two thirds of the text",
    )
    command.add_argument("--title", metavar="TEXT", help="above the picture; by default the sources")
    command.add_argument("--json", type=Path, metavar="FILE", help="file for every number, matplotlib or not")
    command.add_argument("--numbers", type=Path, dest="json", help=argparse.SUPPRESS)  # of 0.1.0
    _revision(command)
    _dtype(command)
    command.set_defaults(run="draw", shown=LENGTH)

    command = commands.add_parser(
        "push",
        help="upload a patched checkpoint to the Hub, in one commit",
        epilog="examples:\n  hf-posenc push runs/gpt2-alibi/model me/gpt2-alibi --dry-run\n"
        "  hf-posenc push runs/gpt2-alibi/model me/gpt2-alibi --private",
    )
    command.add_argument("directory", type=Path)
    command.add_argument("repo_id", help="NAME or ORGANIZATION/NAME")
    command.add_argument("--dry-run", action="store_true", help="say what would be uploaded, and upload nothing")
    command.add_argument("--private", action="store_true", default=None, help="if the repository is new")
    command.add_argument("--revision", metavar="NAME", help="branch; made if it does not exist")
    command.add_argument("--message", metavar="TEXT", help="title of the commit")
    command.add_argument("--token", help="access token; by default the one that is stored")
    command.set_defaults(run="push_checkpoint")

    command = commands.add_parser(
        "completion",
        help="print a script that completes commands and options in a shell (needs shtab)",
        epilog='examples:\n  eval "$(hf-posenc completion bash)"\n  hf-posenc completion zsh > ~/.zfunc/_hf-posenc',
    )
    command.add_argument("shell", choices=("bash", "zsh", "tcsh"), metavar="SHELL", help="bash, zsh or tcsh")
    return parser


def _scheme_args(command: argparse.ArgumentParser, said: str) -> None:
    """Add the option, and as 0.1.0 called it."""
    command.add_argument("--scheme-args", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=said)
    command.add_argument("--set", nargs=1, action="extend", dest="scheme_args", help=argparse.SUPPRESS)


def _revision(command: argparse.ArgumentParser) -> None:
    command.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a checkpoint on the Hub")


def _dtype(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        metavar="DTYPE",
        help=f"of the weights: {', '.join(DTYPES)} (default: auto, what they were saved in)",
    )


if __name__ == "__main__":
    sys.exit(main())

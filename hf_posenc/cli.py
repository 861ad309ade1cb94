"""The command `hf-posenc`: a thin face over the package's functions, and what starts the recipes in one process."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .command_arguments import Parser
from .errors import HfPosencError
from .version import VERSION

PLOTS = (
    *("vectors", "similarity", "grid", "decay", "waves", "biases", "wavelengths", "properties", "attention", "order"),
    *("equivariance", "expansion", "hessian", "terms", "negative", "table", "statistics", "recurrence", "precision"),
)
"""What `plot` draws."""

LENGTH = 128
"""Tokens that `plot` shows."""

RECIPES = {
    "extend": ("extend_context", "measure a checkpoint, patch, calibrate, fine-tune, measure again, report"),
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


Argument = tuple[tuple[str, ...], dict[str, Any]]
"""Names of an argument, and the keywords of `add_argument`."""


def _argument(*names: str, **keywords: Any) -> Argument:
    """Return an argument of a command."""
    return names, keywords


@dataclass(frozen=True)
class Command:
    """A command of this file: its help, its arguments, examples, and what `options` holds beside the arguments."""

    help: str
    arguments: tuple[Argument, ...]
    examples: tuple[str, ...]
    defaults: Mapping[str, object] = field(default_factory=dict)
    description: str | None = None


def _scheme_args(said: str) -> tuple[Argument, Argument]:
    """Return the option, and as 0.1.0 called it."""
    return (
        _argument("--scheme-args", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=said),
        _argument("--set", nargs=1, action="extend", dest="scheme_args", help=argparse.SUPPRESS),
    )


_N: dict[str, Any] = {"type": int, "metavar": "N"}
_REVISION = _argument("--revision", metavar="NAME", help="branch, tag or commit of a checkpoint on the Hub")
_DTYPE = _argument(
    "--dtype",
    choices=DTYPES,
    default="auto",
    metavar="DTYPE",
    help=f"of the weights: {', '.join(DTYPES)} (default: auto, what they were saved in)",
)

COMMANDS = {
    "schemes": Command(
        "list the schemes, or explain one: equation, options, paper",
        (_argument("names", nargs="*", metavar="NAME", help="scheme to explain; by default all are listed"),),
        ("hf-posenc schemes", "hf-posenc schemes alibi"),
        {"run": "list_schemes"},
    ),
    "families": Command(
        "list the model types that can be patched, and why others cannot",
        (_argument("model_types", nargs="*", metavar="MODEL_TYPE", help="by default all that are known"),),
        ("hf-posenc families", "hf-posenc families llama gpt2 mamba"),
        {"run": "list_families"},
    ),
    "inspect": Command(
        "say what a checkpoint is, without reading its weights",
        (_argument("checkpoint", help="directory or Hub id"), _REVISION),
        ("hf-posenc inspect runs/gpt2-alibi/model", "hf-posenc inspect me/gpt2-alibi --revision v1"),
        {"run": "inspect_checkpoint"},
    ),
    "verify": Command(
        "load a patched checkpoint and ask every layer for its positions",
        (_argument("checkpoint", help="directory or Hub id of a patched checkpoint"), _REVISION, _DTYPE),
        ("hf-posenc verify runs/gpt2-alibi/model", "hf-posenc verify me/gpt2-alibi --dtype float32"),
        {"run": "verify_checkpoint", "explained": VERIFIED},
        f"Load a patched checkpoint and ask every layer for its positions.\n\n{VERIFIED}",
    ),
    "patch": Command(
        "patch a stock checkpoint and save it",
        (
            _argument("checkpoint", help="directory or Hub id of a stock checkpoint"),
            _argument("scheme", help="its name: `hf-posenc schemes` lists them"),
            _argument("output", type=Path, help="directory that does not exist yet"),
            *_scheme_args("hyper-parameters, e.g. max_distance=64; `hf-posenc schemes NAME` explains them"),
            _argument("--seed", **_N, help="for parameters that start at random"),
            _REVISION,
            _DTYPE,
        ),
        (
            "hf-posenc patch gpt2 alibi runs/gpt2-alibi",
            "hf-posenc patch gpt2 shaw runs/gpt2-shaw --scheme-args max_distance=64 share_heads=false --seed 1",
        ),
        {"run": "patch_checkpoint"},
    ),
    "plot": Command(
        "draw what schemes or models do with positions (needs matplotlib)",
        (
            _argument("kind", choices=PLOTS, metavar="KIND", help=f"one of {', '.join(PLOTS)}"),
            _argument("output", type=Path, help="picture to write: png, svg or pdf by its suffix"),
            _argument(
                "sources",
                nargs="+",
                metavar="SOURCE",
                help="scheme, checkpoint directory or Hub id; of waves and grid also frequencies: "
                "10000, t^2, 1,0.1,0.01",
            ),
            _argument("--data", type=Path, metavar="FILE", help="text for a model to read; else tokens are drawn"),
            _argument("--text", type=Path, dest="data", help=argparse.SUPPRESS),  # of 0.1.0
            *_scheme_args("hyper-parameters of the schemes named"),
            _argument("--length", **_N, help=f"tokens: positions or distances to show (default: {LENGTH})"),
            _argument("--trained-length", **_N, help="of a scheme's base, of wavelengths (default: 512)"),
            _argument(
                "--positions",
                **_N | {"metavar": ("M", "N")},
                nargs=2,
                help="of the two tokens of an expansion or a Hessian; by default after a third and two thirds of the "
                "text",
            ),
            _argument("--title", metavar="TEXT", help="above the picture; by default the sources"),
            _argument("--json", type=Path, metavar="FILE", help="file for every number, matplotlib or not"),
            _argument("--numbers", type=Path, dest="json", help=argparse.SUPPRESS),  # of 0.1.0
            _REVISION,
            _DTYPE,
        ),
        (
            "hf-posenc plot biases alibi.png alibi --length 64",
            "hf-posenc plot order order.png gpt2 runs/gpt2-alibi/model --data book.txt",
            "hf-posenc plot decay decay.svg rope alibi --json decay.json",
        ),
        {"run": "draw", "shown": LENGTH},
    ),
    "push": Command(
        "upload a patched checkpoint to the Hub, in one commit",
        (
            _argument("directory", type=Path),
            _argument("repo_id", help="NAME or ORGANIZATION/NAME"),
            _argument("--dry-run", action="store_true", help="say what would be uploaded, and upload nothing"),
            _argument("--private", action="store_true", default=None, help="if the repository is new"),
            _argument("--revision", metavar="NAME", help="branch; made if it does not exist"),
            _argument("--message", metavar="TEXT", help="title of the commit"),
            _argument("--token", help="access token; by default the one that is stored"),
        ),
        (
            "hf-posenc push runs/gpt2-alibi/model me/gpt2-alibi --dry-run",
            "hf-posenc push runs/gpt2-alibi/model me/gpt2-alibi --private",
        ),
        {"run": "push_checkpoint"},
    ),
    "completion": Command(
        "print a script that completes commands and options in a shell (needs shtab)",
        (_argument("shell", choices=("bash", "zsh", "tcsh"), metavar="SHELL", help="bash, zsh or tcsh"),),
        ('eval "$(hf-posenc completion bash)"', "hf-posenc completion zsh > ~/.zfunc/_hf-posenc"),
    ),
}
"""Commands that hf_posenc.commands runs, by the name of a function there; `completion` is run here."""


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
    for name in ("schemes", "families", "inspect", *RECIPES, "verify", "patch", "plot", "push", "completion"):
        if name in RECIPES:
            parents = [_recipe_parser(name)] if recipes else []
            commands.add_parser(name, help=RECIPES[name][1], add_help=False, parents=parents)
            continue
        known = COMMANDS[name]
        examples = "\n".join(["examples:", *(f"  {line}" for line in known.examples)])
        command = commands.add_parser(name, help=known.help, description=known.description, epilog=examples)
        for names, keywords in known.arguments:
            command.add_argument(*names, **keywords)
        command.set_defaults(**known.defaults)
    return parser


def _recipe_parser(name: str) -> Parser:
    """Return what reads the options of a recipe."""
    module, options = (
        importlib.import_module(f".recipes.{module}", __package__) for module in (RECIPES[name][0], "options")
    )
    parser: Parser = options.parser_of(module.Arguments, None, prog=f"hf-posenc {name}")
    return parser


if __name__ == "__main__":
    sys.exit(main())

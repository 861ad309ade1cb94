"""The command `hf-posenc`: its arguments and help. It calls functions of `commands`, or starts a recipe."""

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
"""Kinds of pictures that `plot` can draw."""

DEFAULT_LENGTH = 128
"""Number of positions or distances that `plot` shows by default."""

RECIPES = {
    "extend": ("extend_context", "measure a checkpoint, patch, calibrate, fine-tune, measure again, report"),
    "compare": ("compare_schemes", "do the same for several schemes and seeds on one base: tables and figures"),
    "pretrain": ("pretrain", "train a small decoder from scratch for every scheme: train short, test long"),
    "evaluate": ("evaluate", "measure perplexity and retrieval of a checkpoint at several context lengths"),
    "calibrate": ("calibrate", "patch a stock checkpoint, fit the scheme to the base's attention, and save it"),
}
"""Command -> the module of hf_posenc.recipes that it starts, and its help."""

DTYPES = ("auto", "float32", "bfloat16", "float16")

EXAMPLES = """examples:
  hf-posenc schemes alibi                            what a scheme computes, its options, its paper
  hf-posenc calibrate --model gpt2 --scheme t5 --data book.txt --output runs/gpt2-t5
  hf-posenc extend --model gpt2 --data book.txt --scheme alibi --train-length 2048
  accelerate launch -m hf_posenc.recipes.extend_context --model gpt2 --data book.txt      the same on many GPUs

`hf-posenc COMMAND --help` lists the options of a command, and more examples."""

VERIFIED = """How to read the table.
`response`: the relative change of a layer's output when its positions are reversed.
`live`: the same with random parameters of the scheme. A scheme may start neutral; a broken one never responds.
`model`: the change of the logits when positions are reversed.
`order`: the change at the last token when two earlier tokens are swapped; the causal mask causes some of it.
`adds`: in how many of its layers a scheme that joins others changes the output. It may start neutral."""


CHECKED = """Run a checkpoint on short random tokens and report what its positions do: which part of each head
turns and how fast, whether a scaling takes effect, the causal mask, left padding, packing, the cache.

Exit status: 0 if nothing wrong was found, 1 if something was, 2 if the checkpoint could not be checked."""

Argument = tuple[tuple[str, ...], dict[str, Any]]
"""Names and keywords of a call of `add_argument`."""


def _argument(*names: str, **keywords: object) -> Argument:
    """Describe an argument of a command."""
    return names, keywords


@dataclass(frozen=True)
class Command:
    """A command that is not a recipe. Its parsed options also get the values in `defaults`."""

    help: str
    arguments: tuple[Argument, ...]
    examples: tuple[str, ...]
    defaults: Mapping[str, object] = field(default_factory=dict)
    description: str | None = None


def _scheme_args(help_text: str) -> tuple[Argument, Argument]:
    """Return the option `--scheme-args`, and `--set`, its name in version 0.1.0."""
    return (
        _argument("--scheme-args", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=help_text),
        _argument("--set", nargs=1, action="extend", dest="scheme_args", help=argparse.SUPPRESS),
    )


_N: dict[str, Any] = {"type": int, "metavar": "N"}
_REVISION = _argument("--revision", metavar="NAME", help="branch, tag or commit of a checkpoint on the Hub")
_DTYPE = _argument(
    "--dtype",
    choices=DTYPES,
    default="auto",
    metavar="DTYPE",
    help=f"dtype of the weights: {', '.join(DTYPES)} (default: auto, the dtype they were saved in)",
)

COMMANDS = {
    "schemes": Command(
        "list the schemes, or explain one: equation, options, paper",
        (_argument("names", nargs="*", metavar="NAME", help="scheme to explain; without names all are listed"),),
        ("hf-posenc schemes", "hf-posenc schemes alibi"),
        {"run": "list_schemes"},
    ),
    "families": Command(
        "list the model types that can be patched, and why others cannot",
        (_argument("model_types", nargs="*", metavar="MODEL_TYPE", help="model type to describe; by default all"),),
        ("hf-posenc families", "hf-posenc families llama gpt2 mamba"),
        {"run": "list_families"},
    ),
    "inspect": Command(
        "describe a checkpoint, without reading its weights",
        (_argument("checkpoint", help="directory or Hub id"), _REVISION),
        ("hf-posenc inspect runs/gpt2-alibi/model", "hf-posenc inspect me/gpt2-alibi --revision v1"),
        {"run": "inspect_checkpoint"},
    ),
    "verify": Command(
        "load a patched checkpoint and check that every layer responds to positions",
        (_argument("checkpoint", help="directory or Hub id of a patched checkpoint"), _REVISION, _DTYPE),
        ("hf-posenc verify runs/gpt2-alibi/model", "hf-posenc verify me/gpt2-alibi --dtype float32"),
        {"run": "verify_checkpoint", "explained": VERIFIED},
        f"Load a patched checkpoint and check that every layer responds to positions.\n\n{VERIFIED}",
    ),
    "check": Command(
        "measure what the positions of any checkpoint do, and say what is wrong",
        (
            _argument("checkpoint", help="directory or Hub id of any causal language model"),
            _argument("--other", metavar="MODEL", help="checkpoint to compare with, such as another conversion"),
            _argument("--json", type=Path, metavar="FILE", help="JSON file to write, with all outcomes and numbers"),
            _argument("--seed", **_N, default=0, help="seed of the random tokens (default: 0)"),
            _argument(
                "--trust-remote-code",
                action="store_true",
                help="run the code that lies beside the weights; read it first",
            ),
            _REVISION,
            _DTYPE,
        ),
        ("hf-posenc check runs/yarn/checkpoint-500", "hf-posenc check me/fork --trust-remote-code --json check.json"),
        {"run": "check_checkpoint"},
        CHECKED,
    ),
    "patch": Command(
        "patch a stock checkpoint and save it",
        (
            _argument("checkpoint", help="directory or Hub id of a stock checkpoint"),
            _argument("scheme", help="name of the scheme: `hf-posenc schemes` lists them"),
            _argument("output", type=Path, help="directory that does not exist yet"),
            *_scheme_args("hyper-parameters, e.g. max_distance=64; `hf-posenc schemes NAME` explains them"),
            _argument("--seed", **_N, help="seed of parameters that start at random"),
            _REVISION,
            _DTYPE,
        ),
        (
            "hf-posenc patch gpt2 alibi runs/gpt2-alibi",
            "hf-posenc patch gpt2 shaw runs/gpt2-shaw --scheme-args max_distance=64 share_heads=false --seed 1",
        ),
        {"run": "patch_checkpoint"},
    ),
    "export": Command(
        "write a patched checkpoint for other engines: a stock checkpoint, or a GGUF file for llama.cpp",
        (
            _argument("checkpoint", help="directory or Hub id of a patched checkpoint"),
            _argument("output", type=Path, help="directory, or file that ends in .gguf; neither may exist yet"),
            _argument(
                "--format",
                choices=("stock", "gguf"),
                metavar="FORMAT",
                help="stock or gguf (default: gguf if the output ends in .gguf, otherwise stock)",
            ),
            _argument(
                "--dtype",
                choices=("float32", "float16", "q8_0"),
                metavar="DTYPE",
                help="dtype of a GGUF file's matrices: float32 (default), float16 or q8_0",
            ),
            _REVISION,
        ),
        (
            "hf-posenc export runs/llama-alibi/model llama-alibi.gguf --dtype q8_0",
            "hf-posenc export runs/llama-yarn/model runs/llama-yarn/stock",
        ),
        {"run": "export_checkpoint"},
    ),
    "plot": Command(
        "draw a picture of positions in schemes or models (needs matplotlib)",
        (
            _argument("kind", choices=PLOTS, metavar="KIND", help=f"one of {', '.join(PLOTS)}"),
            _argument("output", type=Path, help="picture to write: png, svg or pdf by its suffix"),
            _argument(
                "sources",
                nargs="+",
                metavar="SOURCE",
                help="scheme, checkpoint directory or Hub id; for waves and grid frequencies: 10000, t^2, 1,0.1,0.01",
            ),
            _argument("--data", type=Path, metavar="FILE", help="text for a model to read; by default random tokens"),
            _argument("--text", type=Path, dest="data", help=argparse.SUPPRESS),  # its name in 0.1.0
            *_scheme_args("hyper-parameters of the schemes"),
            _argument("--length", **_N, help=f"positions or distances to show, in tokens (default: {DEFAULT_LENGTH})"),
            _argument("--trained-length", **_N, help="length that the base was trained at (default: 512)"),
            _argument(
                "--positions",
                **_N | {"metavar": ("M", "N")},
                nargs=2,
                help="positions of the two tokens of an expansion or a Hessian; by default after a third and two "
                "thirds of the text",
            ),
            _argument("--title", metavar="TEXT", help="title of the picture; by default the sources"),
            _argument(
                "--json",
                type=Path,
                metavar="FILE",
                help="JSON file to write, with all numbers; does not need matplotlib",
            ),
            _argument("--numbers", type=Path, dest="json", help=argparse.SUPPRESS),  # its name in 0.1.0
            _REVISION,
            _DTYPE,
        ),
        (
            "hf-posenc plot biases alibi.png alibi --length 64",
            "hf-posenc plot order order.png gpt2 runs/gpt2-alibi/model --data book.txt",
            "hf-posenc plot decay decay.svg rope alibi --json decay.json",
        ),
        {"run": "draw", "shown": DEFAULT_LENGTH},
    ),
    "push": Command(
        "upload a patched checkpoint to the Hub, in one commit",
        (
            _argument("directory", type=Path, help="directory of a patched checkpoint"),
            _argument("repo_id", help="repository: NAME or ORGANIZATION/NAME"),
            _argument("--dry-run", action="store_true", help="print what would be uploaded, and upload nothing"),
            _argument("--private", action="store_true", default=None, help="make the repository private, if it is new"),
            _argument("--revision", metavar="NAME", help="branch, made if it does not exist"),
            _argument("--message", metavar="TEXT", help="title of the commit"),
            _argument("--token", help="access token; by default the stored token"),
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
"""Commands that are not recipes. `run` is the function of hf_posenc.commands for it; `completion` runs here."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: words of the command line, without the program's name; None means those of this process.

    Returns:
        Exit status: 0 for success; 1 if the answer is no (`inspect`: cannot be loaded; `verify`: a layer does not
        respond; `check`: something is wrong; `families`: cannot be patched); 2 for an error; 130 after Ctrl-C.
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
        from . import commands  # not above: it imports torch, which --help does not need

        status = int(getattr(commands, options.run)(options))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"\nhf-posenc {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # e.g. `| head`; what Python writes when it exits must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (HfPosencError, ImportError, OSError, TypeError, ValueError) as error:
        print(f"hf-posenc {name}: {str(error).removeprefix('hf_posenc: ')}", file=sys.stderr)
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


def _completion(shell: str) -> int:
    """Print a script that completes commands and options in a shell."""
    try:
        import shtab
    except ImportError:
        raise ImportError("completion needs shtab: pip install shtab") from None
    print(shtab.complete(_parser(with_recipes=True), shell=shell))
    return 0


def _parser(with_recipes: bool = False) -> Parser:
    """Make the parser of the command line. Recipes parse their options themselves; `with_recipes` adds them."""
    parser = Parser(
        prog="hf-posenc",
        description="Replace the position encoding of Hugging Face causal language models.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"hf_posenc {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name in (
        "schemes",
        "families",
        "inspect",
        *RECIPES,
        "verify",
        "check",
        "patch",
        "export",
        "plot",
        "push",
        "completion",
    ):
        if name in RECIPES:
            parents = [_recipe_parser(name)] if with_recipes else []
            commands.add_parser(name, help=RECIPES[name][1], add_help=False, parents=parents)
            continue
        entry = COMMANDS[name]
        examples = "\n".join(["examples:", *(f"  {line}" for line in entry.examples)])
        command = commands.add_parser(name, help=entry.help, description=entry.description, epilog=examples)
        for names, keywords in entry.arguments:
            command.add_argument(*names, **keywords)
        command.set_defaults(**entry.defaults)
    return parser


def _recipe_parser(name: str) -> Parser:
    """Make the parser of a recipe."""
    module, options = (
        importlib.import_module(f".recipes.{module}", __package__) for module in (RECIPES[name][0], "options")
    )
    parser: Parser = options.parser_of(module.Arguments, None, prog=f"hf-posenc {name}")
    return parser


if __name__ == "__main__":
    sys.exit(main())

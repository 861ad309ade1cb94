"""The command `hf-posenc`: a thin face over the package's functions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

STAGES = ("closed_form", "attention")
MOVED = ("scheme", "query_key")
LOSSES = ("attention", "outputs")
CALIBRATION: dict[str, Any] = {
    "stage": "attention",
    "weights": "query_key",
    "steps": 100,
    "rate": 2e-2,
    "weight_rate": 1e-3,
    "loss": "attention",
    "lengths": None,
    "held_out": 8,
}
"""Choices of `calibrate`, and what it does by default, as the function of that name: --help does without it."""

WINDOW = 512
"""Tokens in a window that `calibrate` reads."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: of the command line, without the program's name; None takes those of the process.

    Returns:
        Exit status: 0; 1 where the answer is no (`inspect` of what cannot be loaded, `verify` that fails, `families` of
        a model type that cannot be patched); 2 for an error; 130 after Ctrl-C.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    from . import commands  # which imports torch: --help does without
    from .errors import HfPosencError

    try:
        return int(getattr(commands, options.run)(options))
    except KeyboardInterrupt:
        print(f"\nhf-posenc {options.command}: interrupted", file=sys.stderr)
        return 130
    except (HfPosencError, ImportError, OSError, TypeError, ValueError) as error:
        print(f"hf-posenc {options.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-posenc", description="Replace the position encoding of Hugging Face causal language models."
    )
    parser.add_argument("--version", action="version", version=f"hf_posenc {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser("schemes", help="list the schemes and their hyper-parameters")
    command.set_defaults(run="list_schemes")

    command = commands.add_parser("families", help="list the model types that can be patched, and why others cannot")
    command.add_argument("model_types", nargs="*", metavar="MODEL_TYPE", help="by default all that are known")
    command.set_defaults(run="list_families")

    command = commands.add_parser("inspect", help="say what a checkpoint is, without reading its weights")
    command.add_argument("checkpoint", help="directory or Hub id")
    command.add_argument("--revision", help="branch, tag or commit of a checkpoint on the Hub")
    command.set_defaults(run="inspect_checkpoint")

    command = commands.add_parser("verify", help="load a patched checkpoint and ask every layer for its positions")
    command.add_argument("checkpoint", help="directory or Hub id")
    command.set_defaults(run="verify_checkpoint")

    command = commands.add_parser("patch", help="patch a stock checkpoint and save it")
    command.add_argument("checkpoint", help="directory or Hub id of a stock checkpoint")
    command.add_argument("scheme", help="its name: hf-posenc schemes lists them")
    command.add_argument("output", type=Path, help="directory that does not exist yet")
    command.add_argument("--seed", type=int, help="for parameters that start at random")
    command.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a hyper-parameter, e.g. max_distance=64"
    )
    command.set_defaults(run="patch_checkpoint")

    command = commands.add_parser(
        "calibrate", help="patch a stock checkpoint, fit the scheme to what its positions did, and save it"
    )
    command.add_argument("checkpoint", help="directory or Hub id of a stock checkpoint, with its tokenizer")
    command.add_argument("--scheme", required=True, help="its name: hf-posenc schemes lists them")
    command.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a hyper-parameter, e.g. max_distance=64"
    )
    command.add_argument("--text", type=Path, required=True, help="UTF-8 text file, of the kind the base was made for")
    command.add_argument("--save-to", type=Path, required=True, help="directory that does not exist yet")
    command.add_argument(
        "--length", type=int, default=WINDOW, help=f"tokens in a window of the text (default {WINDOW})"
    )
    command.add_argument("--windows", type=int, help="how many to use, held-out ones included; by default all")
    command.add_argument("--held-out", type=int, help=_by_default("windows that only decide and measure", "held_out"))
    command.add_argument("--stage", choices=STAGES, help=_by_default("closed forms alone, or attention too", "stage"))
    command.add_argument(
        "--weights", choices=MOVED, help=_by_default("what the second stage moves beside the scheme", "weights")
    )
    command.add_argument("--steps", type=int, help=_by_default("of the second stage", "steps"))
    command.add_argument("--rate", type=float, help=_by_default("learning rate of the scheme's parameters", "rate"))
    command.add_argument(
        "--weight-rate", type=float, help=_by_default("of the weights that make queries and keys", "weight_rate")
    )
    command.add_argument("--loss", choices=LOSSES, help=_by_default("what the second stage lowers", "loss"))
    command.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        help="tokens in a window of the second stage, one length after the other; by default --length",
    )
    command.add_argument(
        "--seed", type=int, default=0, help="for parameters that start at random, and the order of windows (default 0)"
    )
    command.add_argument(
        "--resume", action="store_true", help="go on with a second stage that was interrupted, from the state it left"
    )
    command.add_argument("--device", default="cpu", help="for instance cuda")
    command.add_argument("--report", type=Path, metavar="JSON", help="file for what was found, by layer and head")
    command.add_argument("--plot", type=Path, metavar="PICTURE", help="the same drawn: png, svg or pdf by its suffix")
    command.set_defaults(run="calibrate_checkpoint", defaults=CALIBRATION)

    command = commands.add_parser("evaluate", help="measure both perplexities of a checkpoint on a text")
    command.add_argument("checkpoint", help="directory or Hub id, with its tokenizer")
    command.add_argument("text", type=Path, nargs="+", help="UTF-8 text files, a document each")
    command.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024], help="context lengths, in tokens")
    command.add_argument("--stride", type=int, help="between sliding windows; by default a quarter of each length")
    command.add_argument(
        "--memory", type=int, metavar="TOKENS", help="also read segments of each length with a memory of so many tokens"
    )
    command.add_argument("--device", default="cpu", help="for instance cuda")
    command.add_argument("--json", type=Path, help="file for every number, loss by position included")
    command.set_defaults(run="evaluate_checkpoint")

    command = commands.add_parser("plot", help="draw what schemes or models do with positions (needs matplotlib)")
    command.add_argument("kind", choices=PLOTS, metavar="KIND", help=f"one of {', '.join(PLOTS)}")
    command.add_argument("output", type=Path, help="picture to write: png, svg or pdf by its suffix")
    command.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="scheme, checkpoint directory or Hub id; of waves and grid also frequencies: 10000, t^2, 1,0.1,0.01",
    )
    command.add_argument("--length", type=int, help=f"tokens: positions or distances to show (default {LENGTH})")
    command.add_argument("--trained-length", type=int, help="of a scheme's base, 512 by default; of wavelengths")
    command.add_argument("--text", type=Path, help="text for a model to read; by default tokens are drawn at random")
    command.add_argument(
        "--positions",
        type=int,
        nargs=2,
        metavar=("M", "N"),
        help="of the two tokens of an expansion or a Hessian; by default after a third and two thirds of the text",
    )
    command.add_argument("--title", help="above the picture; by default the sources")
    command.add_argument("--numbers", type=Path, metavar="JSON", help="also write the numbers, matplotlib or not")
    command.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a hyper-parameter of the schemes named"
    )
    command.set_defaults(run="draw", shown=LENGTH)

    command = commands.add_parser("push", help="upload a patched checkpoint to the Hub, in one commit")
    command.add_argument("directory", type=Path)
    command.add_argument("repo_id", help="NAME or ORGANIZATION/NAME")
    command.add_argument("--private", action="store_true", default=None, help="if the repository is new")
    command.add_argument("--revision", help="branch; made if it does not exist")
    command.add_argument("--token", help="access token; by default the one that is stored")
    command.add_argument("--message", help="title of the commit")
    command.set_defaults(run="push_checkpoint")
    return parser


def _by_default(text: str, name: str) -> str:
    """Return the help of an option of `calibrate`."""
    return f"{text} (default {CALIBRATION[name]})"


if __name__ == "__main__":
    sys.exit(main())

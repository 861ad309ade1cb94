"""Draw the gallery: positions and distances in each scheme, and the measured cost of a swap.

    python scripts/plot_schemes.py docs/images            # writes every picture as PNG
    python scripts/plot_schemes.py docs/images --format svg --only decay similarity

No model, data or network is needed, and the same versions give the same bytes.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from measure_swaps import LATEST, loss_by_length, loss_by_tokens

from hf_posenc.analysis import Decay, decay, plots, scheme_vectors

TRAINED = 512
"""Length that the base of the measured swaps was trained at."""


def decay_of_schemes() -> Any:
    return plots.decay_curves(
        {
            "nope": decay("nope"),
            "sinusoidal": decay("sinusoidal"),
            "rope": decay("rope"),
            "rope, YaRN 4x": decay("rope", scaling={"rope_type": "yarn", "factor": 4.0}),
            "alibi, head 7 (the last)": _one_head(decay("alibi"), 7),
        },
        title="What a scheme gives to a distance",
    )


def _one_head(curve: Any, head: int) -> Any:
    return type(curve)(curve.label, curve.distances, curve.scores[:, head : head + 1])


def decay_of_integrals() -> Any:
    """Draw the integral of `cos(d theta(t))` over t from 0 to 1, which a sum of 20,000 waves is close to."""
    t = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    distances = torch.arange(-128, 129)
    schedules = {"10000^-t": 10000**-t, "1000^-t": 1000**-t, "t": t, "t^2": t**2}
    curves = {
        name: Decay(name, distances, (distances[:, None] * theta).cos().mean(-1)[None, None])
        for name, theta in schedules.items()
    }
    return plots.decay_curves(curves, title="The integral of cos(d theta(t)), for four schedules of frequencies")


def cost_of_swaps() -> Any:
    """Draw the loss at the base's length, mean of the seeds, against all tokens read, those of the calibration included."""
    shown = {
        "base (at 0 untouched)": "control",
        "transformer_xl, plain": "transformer_xl, plain",
        "transformer_xl, closed forms": "transformer_xl, closed_form",
        "transformer_xl, both stages": "transformer_xl, outputs",
        "t5, plain": "t5, plain",
        "t5, both stages": "t5, outputs",
    }
    curves = {
        label: [(tokens, statistics.fmean(losses)) for tokens, losses in loss_by_tokens(variant, TRAINED).items()]
        for label, variant in shown.items()
    }
    return plots.loss_curve(curves, xlabel="tokens read", title="What a swap costs: stories260K at its own length")


def recovery_of_swaps() -> Any:
    """Draw the loss of swaps in SmolLM2-135M-Instruct against all tokens read, of seed 0."""
    shown = {
        "the base, fine-tuned": "control",
        "transformer_xl, plain swap": "transformer_xl, plain",
        "transformer_xl in 25 of 30 layers, calibrated": "transformer_xl_most_window, calibrated",
        "shaw, calibrated": "shaw, calibrated",
    }
    curves = {
        label: [(tokens, losses[0]) for tokens, losses in loss_by_tokens(variant, TRAINED, LATEST, seeds=1).items()]
        for label, variant in shown.items()
    }
    return plots.loss_curve(curves, xlabel="tokens read", title="SmolLM2-135M-Instruct: loss at 512 tokens")


def reach_of_swaps() -> Any:
    """Draw perplexity by length of base, YaRN, plain and calibrated swap, all fine-tuned; exp of the seeds' mean loss."""
    shown = {
        "base (RoPE)": "control",
        "RoPE with YaRN": "yarn, plain",
        "Transformer-XL, plain swap": "transformer_xl, plain",
        "Transformer-XL, calibrated swap": "transformer_xl, outputs",
    }
    curves = {
        label: [
            (length, math.exp(statistics.fmean(values)))
            for length, values in loss_by_length(variant, tuned=True).items()
        ]
        for label, variant in shown.items()
    }
    title = "A LLaMA trained at 512 tokens, after 250k tokens more"
    return plots.perplexity_by_length(curves, trained_length=TRAINED, title=title)


GALLERY: dict[str, Callable[[], Any]] = {
    "similarity": lambda: plots.similarity_matrix(
        scheme_vectors("sinusoidal", 128), title="Sinusoidal: similarity of positions"
    ),
    "decay": decay_of_schemes,
    "decay-integrals": decay_of_integrals,
    "calibration": cost_of_swaps,
    "reach": reach_of_swaps,
    "recovery": recovery_of_swaps,
}
"""Name of a picture -> function that draws it."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw the gallery of position encodings.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--format", choices=("png", "svg", "pdf"), default="png")
    parser.add_argument("--only", nargs="+", choices=GALLERY, default=list(GALLERY), metavar="NAME")
    options = parser.parse_args(arguments)
    for name in options.only:
        print(plots.save(GALLERY[name](), options.directory / f"{name}.{options.format}", dpi=110))


if __name__ == "__main__":
    main()

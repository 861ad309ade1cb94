"""Kinds of pictures of `hf-posenc plot`: how each computes its numbers for a scheme, a model or frequencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from . import analysis, theory
from .analysis import Decay, plots, probe
from .api import schemes_of
from .evaluation import RecurrenceMeasurement, measure_recurrence
from .schemes.base import Scheme
from .theory import integrals
from .theory import plots as theory_plots

SEGMENTS = 8
"""Segments of a text that the picture of recurrence reads."""

GRID_SIZE = 64
"""Coordinates of the vectors that a grid is drawn for; many heads have as many."""


@dataclass(frozen=True)
class Asked:
    """Options of the command line for the numbers of one source.

    Attributes:
        length: number of positions or distances to show, or of tokens that a model reads.
        trained_length: length that a scheme's base was trained at; None means the default, or that of a model's config.
        positions: positions of the two tokens of an expansion; None means after a third and two thirds of the text.
        read: number of tokens -> tokens (n,) for the model to read.
    """

    length: int
    trained_length: int | None
    positions: tuple[int, int] | None
    read: Callable[[int], Tensor]

    @property
    def base_length(self) -> int:
        """The length that a scheme's base was trained at."""
        return self.trained_length or probe.TRAINED_LENGTH

    @property
    def text(self) -> Tensor:
        """The tokens that a model reads, (length,)."""
        return self.read(self.length)

    @property
    def pair(self) -> tuple[int, int]:
        """The positions m and n of an expansion."""
        return self.positions or (self.length // 3, 2 * self.length // 3)


@dataclass(frozen=True)
class Numbers:
    """Numbers of one sort of source.

    Attributes:
        compute: scheme, model or frequencies, and the options -> numbers to draw.
        options: names of the options of the command line that `compute` reads.
    """

    compute: Callable[[Any, Asked], Any]
    options: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """One kind of picture.

    Attributes:
        draw: numbers by source, and a title -> figure.
        scheme: numbers of a scheme; None if the kind draws no schemes.
        model: numbers of a model, likewise.
        schedule: numbers of frequencies (a base, a power of t, or a list), likewise.
        several: whether several sources are drawn on one axis.
    """

    draw: Callable[[dict[str, Any], str], Any]
    scheme: Numbers | None = None
    model: Numbers | None = None
    schedule: Numbers | None = None
    several: bool = False

    def numbers(self, sort: str) -> Numbers | None:
        """Return the numbers of a sort of source: `scheme`, `model` or `schedule`."""
        return {"scheme": self.scheme, "model": self.model, "schedule": self.schedule}[sort]


def schedule(text: str) -> integrals.Values | None:
    """Return the frequencies that a text stands for, see `theory.wave_integral`; None if it stands for none.

    `10000` is a base, `t` and `t^2` are powers of t, and `1,0.3,0.1` is a list of radians per token.
    """
    power = "1" if text == "t" else text.removeprefix("t^") if text.startswith("t^") else None
    try:
        values = [float(part) for part in ([power] if power else text.split(","))]
    except ValueError:
        return None
    if len(values) > 1:
        return values
    (value,) = values
    return (lambda t: t**value) if power else value


def _one(draw: Callable[..., Any]) -> Callable[[dict[str, Any], str], Any]:
    """Return a function that draws the only source."""
    return lambda found, title: draw(next(iter(found.values())), title=title)


def _all(draw: Callable[..., Any]) -> Callable[[dict[str, Any], str], Any]:
    """Return a function that draws all sources by their names."""
    return lambda found, title: draw(found, title=title)


def _vectors(vectors: Tensor | None, source: str) -> Tensor:
    if vectors is None:
        raise ValueError(f"{source} adds no position vectors")
    return vectors


def _of_scheme(scheme: Scheme, asked: Asked) -> Tensor:
    found = analysis.scheme_vectors(scheme, asked.length, trained_length=asked.base_length)
    return _vectors(found, scheme.name)


def _of_model(model: PreTrainedModel, asked: Asked) -> Tensor:
    return _vectors(analysis.position_vectors(model, asked.length), f"this {type(model).__name__}")


def _grid(theta: integrals.Values, asked: Asked) -> Tensor:
    if not isinstance(theta, float):
        raise ValueError("give the frequencies of a grid by their base, as 10000")
    return theory.grid_decay(theory.axis_frequencies(GRID_SIZE, base=theta), asked.length)


def _curves(model: PreTrainedModel, asked: Asked) -> dict[str, Decay]:
    found = theory.rotary_weights(model, asked.text, progress=True)
    return found.curves(range(-asked.length, asked.length + 1), progress=True)


def _segments(model: PreTrainedModel, asked: Asked) -> list[RecurrenceMeasurement]:
    text = asked.read(SEGMENTS * asked.length)
    return [
        measure_recurrence(model, [text], segment=asked.length, memory=memory, progress=True)
        for memory in (0, asked.length)
    ]


def _on_scores(name: str, schemes: Sequence[Scheme]) -> None:
    """Raise ValueError unless one of the schemes changes attention scores."""
    if not any(_has_scores(scheme) for scheme in schemes):
        where = " and ".join(scheme.acts_on.words for scheme in schemes) or "as the stock model does"
        raise ValueError(
            f"biases are what a scheme adds to attention scores, and {name} adds nothing: it acts {where}. "
            "`hf-posenc plot decay` draws how its scores fall with the distance"
        )


def _has_scores(scheme: Scheme) -> bool:
    """Return whether a scheme changes attention scores, apart from its window."""
    whole = replace(scheme, window=None)
    return whole.acts_on.dropped_by_stock_attention(whole) is not None


def _biases(scheme: Scheme, asked: Asked) -> Decay:
    _on_scores(scheme.name, [scheme])
    return CURVES.compute(scheme, asked)


def _model_biases(model: PreTrainedModel, asked: Asked) -> Decay:
    _on_scores(f"this {type(model).__name__}", schemes_of(model))
    return MODEL_CURVES.compute(model, asked)


def _losses(found: dict[str, Any], title: str) -> Any:
    return plots.loss_by_position(
        {
            f"{name}, {f'memory of {each.memory}' if each.memory else 'no memory'}": [
                (part.first, part.last, part.loss) for part in each.by_position
            ]
            for name, measured in found.items()
            for each in measured
        },
        xlabel="place in the segment (tokens)",
        title=title,
    )


VECTORS = Numbers(_of_scheme, ("length", "trained_length", "scheme_args"))
MODEL_VECTORS = Numbers(_of_model, ("length",))
CURVES = Numbers(
    lambda scheme, asked: analysis.decay(scheme, asked.length, trained_length=asked.base_length),
    ("length", "trained_length", "scheme_args"),
)
MODEL_CURVES = Numbers(
    lambda model, asked: analysis.model_decay(model, asked.text, asked.length),
    ("length", "data"),
)
READING = ("length", "data")
PAIR = (*READING, "positions")

OPTIONS_OF: dict[str, tuple[str, ...]] = {"scheme": (), "model": ("revision",), "schedule": ()}
"""Options of the command line that every kind reads for a sort of source."""

KINDS = {
    "vectors": Kind(_one(plots.position_vectors), VECTORS, MODEL_VECTORS),
    "similarity": Kind(_one(plots.similarity_matrix), VECTORS, MODEL_VECTORS),
    "grid": Kind(
        _one(theory_plots.grid_decay),
        schedule=Numbers(_grid, ("length",)),
    ),
    "decay": Kind(_all(plots.decay_curves), CURVES, MODEL_CURVES, several=True),
    "waves": Kind(
        _all(theory_plots.wave_curves),
        schedule=Numbers(lambda theta, asked: theory.wave_decay(asked.length, theta).curves(), ("length",)),
        model=Numbers(_curves, READING),
        several=True,
    ),
    "biases": Kind(
        _one(plots.bias_maps), Numbers(_biases, CURVES.options), Numbers(_model_biases, MODEL_CURVES.options)
    ),
    "wavelengths": Kind(
        lambda found, title: plots.wavelengths([each for group in found.values() for each in group], title=title),
        scheme=Numbers(
            lambda scheme, asked: analysis.frequencies(scheme, trained_length=asked.base_length),
            ("trained_length", "scheme_args"),
        ),
        model=Numbers(
            lambda model, asked: analysis.frequencies(model, trained_length=asked.trained_length), ("trained_length",)
        ),
        several=True,
    ),
    "properties": Kind(
        _all(plots.properties),
        scheme=Numbers(
            lambda scheme, asked: analysis.properties(scheme, trained_length=asked.base_length, progress=True),
            ("trained_length", "scheme_args"),
        ),
        model=Numbers(
            lambda model, asked: analysis.properties(model, trained_length=asked.trained_length, progress=True),
            ("trained_length",),
        ),
        several=True,
    ),
    "attention": Kind(
        _one(plots.attention_by_distance),
        model=Numbers(lambda model, asked: analysis.attention_by_distance(model, asked.text, progress=True), READING),
    ),
    "order": Kind(
        _all(plots.order_by_layer),
        model=Numbers(lambda model, asked: analysis.order_sensitivity(model, asked.text, progress=True), READING),
        several=True,
    ),
    "equivariance": Kind(
        _all(plots.equivariance_by_layer),
        model=Numbers(lambda model, asked: analysis.equivariance(model, asked.text, progress=True), READING),
        several=True,
    ),
    "expansion": Kind(
        _one(theory_plots.expansion_terms),
        model=Numbers(lambda model, asked: theory.expansion(model, asked.text, *asked.pair, progress=True), PAIR),
    ),
    "hessian": Kind(
        _one(theory_plots.mixed_hessian),
        model=Numbers(lambda model, asked: theory.mixed_hessian(model, asked.text, *asked.pair, progress=True), PAIR),
    ),
    "terms": Kind(
        _one(theory_plots.score_terms),
        model=Numbers(lambda model, asked: theory.score_terms(model, asked.text, progress=True), READING),
    ),
    "negative": Kind(
        _one(theory_plots.negative_products),
        model=Numbers(lambda model, asked: theory.negative_products(model, asked.text), READING),
    ),
    "table": Kind(
        _one(theory_plots.position_scores),
        model=Numbers(
            lambda model, asked: theory.position_scores(model, asked.text, length=asked.length, progress=True),
            READING,
        ),
    ),
    "statistics": Kind(
        _all(theory_plots.embedding_statistics),
        model=Numbers(lambda model, asked: theory.embedding_statistics(model), ()),
        several=True,
    ),
    "recurrence": Kind(_losses, model=Numbers(_segments, READING), several=True),
    "precision": Kind(
        _one(plots.distinct_biases),
        scheme=Numbers(
            lambda scheme, asked: analysis.precision_audit(asked.length, scheme=scheme), ("length", "scheme_args")
        ),
    ),
}
"""Kind of picture by its name."""

"""Kinds of pictures of `hf-posenc plot`: how to compute and draw the numbers of a scheme, a model or frequencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from . import analysis, theory
from .analysis import Decay, Frequencies, plots, probe
from .api import schemes_of
from .evaluation import RecurrenceMeasurement, measure_recurrence
from .schemes.base import Scheme
from .theory import integrals
from .theory import plots as theory_plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEGMENTS = 8
"""Number of segments of a text that the picture of recurrence reads."""

GRID_SIZE = 64
"""Size of the vectors that a grid is drawn for; many attention heads have this size."""


@dataclass(frozen=True)
class PlotOptions:
    """Options of the command line that change the numbers of a source.

    Attributes:
        length: number of positions or distances to show, or of tokens that a model reads.
        trained_length: length that the base was trained at; None means the length in a model's config, or the default.
        positions: positions of the two tokens of an expansion; None means after a third and two thirds of the text.
        read: function of a number of tokens n that returns tokens (n,) for the model to read.
    """

    length: int
    trained_length: int | None
    positions: tuple[int, int] | None
    read: Callable[[int], Tensor]

    @property
    def base_length(self) -> int:
        """The length that a scheme's base was trained at, or the default."""
        return self.trained_length or probe.TRAINED_LENGTH

    @property
    def text(self) -> Tensor:
        """The tokens that a model reads, (length,)."""
        return self.read(self.length)

    @property
    def pair(self) -> tuple[int, int]:
        """The positions of the two tokens of an expansion."""
        return self.positions or (self.length // 3, 2 * self.length // 3)


@dataclass(frozen=True)
class Numbers:
    """How to compute the numbers of one type of source.

    Attributes:
        compute: function of a scheme, a model or frequencies, and of the options, that returns numbers to draw.
        options: names of the options of the command line that `compute` uses.
    """

    compute: Callable[[Any, PlotOptions], object]
    options: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """One kind of picture.

    Attributes:
        figure: function that draws the numbers of a source (of several: source -> numbers), with the keyword `title`.
        scheme: how to compute the numbers of a scheme; None if the kind draws no schemes.
        model: the same for a model.
        frequencies: the same for frequencies (a base, a power of t, or a list).
        several: whether the picture can have several sources.
    """

    figure: Callable[..., Figure]
    scheme: Numbers | None = None
    model: Numbers | None = None
    frequencies: Numbers | None = None
    several: bool = False

    def draw(self, numbers: dict[str, object], title: str) -> Figure:
        """Draw numbers (name of the source -> numbers)."""
        return self.figure(numbers if self.several else next(iter(numbers.values())), title=title)

    def numbers(self, source_type: str) -> Numbers | None:
        """Return how to compute the numbers of a `scheme`, a `model` or `frequencies`; None if the kind draws none."""
        return {"scheme": self.scheme, "model": self.model, "frequencies": self.frequencies}[source_type]


def parse_frequencies(text: str) -> integrals.Values | None:
    """Parse frequencies for `theory.wave_integral`; return None for any other text.

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


def _require_vectors(vectors: Tensor | None, source: str) -> Tensor:
    """Return the vectors; ValueError if they are None."""
    if vectors is None:
        raise ValueError(f"{source} adds no position vectors")
    return vectors


def _vectors(scheme: Scheme, options: PlotOptions) -> Tensor:
    return _require_vectors(
        analysis.scheme_vectors(scheme, options.length, trained_length=options.base_length), scheme.name
    )


def _model_vectors(model: PreTrainedModel, options: PlotOptions) -> Tensor:
    return _require_vectors(analysis.position_vectors(model, options.length), f"this {type(model).__name__}")


def _decay(scheme: Scheme, options: PlotOptions) -> Decay:
    return analysis.decay(scheme, options.length, trained_length=options.base_length)


def _model_decay(model: PreTrainedModel, options: PlotOptions) -> Decay:
    return analysis.model_decay(model, options.text, options.length)


def _require_scores(name: str, schemes: Sequence[Scheme]) -> None:
    """Raise ValueError if none of the schemes changes attention scores, otherwise than by a window."""
    if not any(scheme.acts_on.dropped_by_stock_attention(replace(scheme, window=None)) for scheme in schemes):
        where = " and ".join(scheme.acts_on.words for scheme in schemes) or "as the stock model does"
        raise ValueError(
            f"biases are what a scheme adds to attention scores, but {name} adds nothing: it acts {where}. "
            "`hf-posenc plot decay` draws how its scores fall with the distance"
        )


def _biases(scheme: Scheme, options: PlotOptions) -> Decay:
    _require_scores(scheme.name, [scheme])
    return _decay(scheme, options)


def _model_biases(model: PreTrainedModel, options: PlotOptions) -> Decay:
    _require_scores(f"this {type(model).__name__}", schemes_of(model))
    return _model_decay(model, options)


def _grid(theta: integrals.Values, options: PlotOptions) -> Tensor:
    if not isinstance(theta, float):
        raise ValueError("name the frequencies of a grid by their base, e.g. 10000")
    return theory.grid_decay(theory.axis_frequencies(GRID_SIZE, base=theta), options.length)


def _waves(model: PreTrainedModel, options: PlotOptions) -> dict[str, Decay]:
    weights = theory.rotary_weights(model, options.text, progress=True)
    return weights.curves(range(-options.length, options.length + 1), progress=True)


def _recurrence(model: PreTrainedModel, options: PlotOptions) -> list[RecurrenceMeasurement]:
    text = options.read(SEGMENTS * options.length)
    return [
        measure_recurrence(model, [text], segment=options.length, memory=memory, progress=True)
        for memory in (0, options.length)
    ]


def _draw_losses(measurements: dict[str, list[RecurrenceMeasurement]], *, title: str) -> Figure:
    curves = {
        f"{name}, {f'memory of {measurement.memory}' if measurement.memory else 'no memory'}": [
            (part.first, part.last, part.loss) for part in measurement.by_position
        ]
        for name, of_source in measurements.items()
        for measurement in of_source
    }
    return plots.loss_by_position(curves, xlabel="position in the segment (tokens)", title=title)


def _draw_wavelengths(by_source: dict[str, list[Frequencies]], *, title: str) -> Figure:
    return plots.wavelengths([frequencies for group in by_source.values() for frequencies in group], title=title)


def _with_trained_length(measure: Callable[..., object], **keywords: bool) -> dict[str, Numbers]:
    """Return how to measure a scheme or a model with a function that needs the length the base was trained at."""
    return {
        "scheme": Numbers(
            lambda scheme, options: measure(scheme, trained_length=options.base_length, **keywords),
            ("trained_length", "scheme_args"),
        ),
        "model": Numbers(
            lambda model, options: measure(model, trained_length=options.trained_length, **keywords),
            ("trained_length",),
        ),
    }


def _of_text(measure: Callable[..., object], **keywords: bool) -> Numbers:
    """Return how to measure a model with a function that needs a text."""
    return Numbers(lambda model, options: measure(model, options.text, **keywords), TEXT_OPTIONS)


def _of_two_positions(measure: Callable[..., object]) -> Numbers:
    """Return how to measure a model with a function that needs a text and two positions in it."""
    return Numbers(
        lambda model, options: measure(model, options.text, *options.pair, progress=True), (*TEXT_OPTIONS, "positions")
    )


TEXT_OPTIONS = ("length", "data")
SCHEME_OPTIONS = ("length", "trained_length", "scheme_args")
VECTORS, MODEL_VECTORS = Numbers(_vectors, SCHEME_OPTIONS), Numbers(_model_vectors, ("length",))

OPTIONS_OF_SOURCE: dict[str, tuple[str, ...]] = {"scheme": (), "model": ("revision",), "frequencies": ()}
"""Type of source -> options of the command line that every kind of picture uses for it."""

KINDS = {
    "vectors": Kind(plots.position_vectors, VECTORS, MODEL_VECTORS),
    "similarity": Kind(plots.similarity_matrix, VECTORS, MODEL_VECTORS),
    "grid": Kind(theory_plots.grid_decay, frequencies=Numbers(_grid, ("length",))),
    "decay": Kind(
        plots.decay_curves, Numbers(_decay, SCHEME_OPTIONS), Numbers(_model_decay, TEXT_OPTIONS), several=True
    ),
    "waves": Kind(
        theory_plots.wave_curves,
        frequencies=Numbers(lambda theta, options: theory.wave_decay(options.length, theta).curves(), ("length",)),
        model=Numbers(_waves, TEXT_OPTIONS),
        several=True,
    ),
    "biases": Kind(plots.bias_maps, Numbers(_biases, SCHEME_OPTIONS), Numbers(_model_biases, TEXT_OPTIONS)),
    "wavelengths": Kind(_draw_wavelengths, **_with_trained_length(analysis.frequencies), several=True),
    "properties": Kind(plots.properties, **_with_trained_length(analysis.properties, progress=True), several=True),
    "attention": Kind(plots.attention_by_distance, model=_of_text(analysis.attention_by_distance, progress=True)),
    "order": Kind(plots.order_by_layer, model=_of_text(analysis.order_sensitivity, progress=True), several=True),
    "equivariance": Kind(
        plots.equivariance_by_layer, model=_of_text(analysis.equivariance, progress=True), several=True
    ),
    "expansion": Kind(theory_plots.expansion_terms, model=_of_two_positions(theory.expansion)),
    "hessian": Kind(theory_plots.mixed_hessian, model=_of_two_positions(theory.mixed_hessian)),
    "terms": Kind(theory_plots.score_terms, model=_of_text(theory.score_terms, progress=True)),
    "negative": Kind(theory_plots.negative_products, model=_of_text(theory.negative_products)),
    "table": Kind(
        theory_plots.position_scores,
        model=Numbers(
            lambda model, options: theory.position_scores(model, options.text, length=options.length, progress=True),
            TEXT_OPTIONS,
        ),
    ),
    "statistics": Kind(
        theory_plots.embedding_statistics,
        model=Numbers(lambda model, options: theory.embedding_statistics(model), ()),
        several=True,
    ),
    "recurrence": Kind(_draw_losses, model=Numbers(_recurrence, TEXT_OPTIONS), several=True),
    "precision": Kind(
        plots.distinct_biases,
        scheme=Numbers(
            lambda scheme, options: analysis.precision_audit(options.length, scheme=scheme), ("length", "scheme_args")
        ),
    ),
}
"""Name -> kind of picture."""

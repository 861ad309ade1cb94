"""Kinds of pictures of `hf-posenc plot`: how each computes its numbers for a scheme, a model or frequencies."""

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

    compute: Callable[[Any, Asked], object]
    options: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """One kind of picture.

    Attributes:
        figure: numbers of the only source, or of all sources by their names where there may be several, and `title` ->
            figure.
        scheme: numbers of a scheme; None if the kind draws no schemes.
        model: numbers of a model, likewise.
        schedule: numbers of frequencies (a base, a power of t, or a list), likewise.
        several: whether several sources are drawn on one axis.
    """

    figure: Callable[..., Figure]
    scheme: Numbers | None = None
    model: Numbers | None = None
    schedule: Numbers | None = None
    several: bool = False

    def draw(self, found: dict[str, object], title: str) -> Figure:
        """Draw the numbers of sources, by their names."""
        return self.figure(found if self.several else next(iter(found.values())), title=title)

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


def _some(vectors: Tensor | None, source: str) -> Tensor:
    """Return vectors; ValueError if there are none."""
    if vectors is None:
        raise ValueError(f"{source} adds no position vectors")
    return vectors


def _vectors(scheme: Scheme, asked: Asked) -> Tensor:
    return _some(analysis.scheme_vectors(scheme, asked.length, trained_length=asked.base_length), scheme.name)


def _model_vectors(model: PreTrainedModel, asked: Asked) -> Tensor:
    return _some(analysis.position_vectors(model, asked.length), f"this {type(model).__name__}")


def _decay(scheme: Scheme, asked: Asked) -> Decay:
    return analysis.decay(scheme, asked.length, trained_length=asked.base_length)


def _model_decay(model: PreTrainedModel, asked: Asked) -> Decay:
    return analysis.model_decay(model, asked.text, asked.length)


def _require_scores(name: str, schemes: Sequence[Scheme]) -> None:
    """Raise ValueError unless one of the schemes, apart from its window, changes attention scores."""
    if not any(scheme.acts_on.dropped_by_stock_attention(replace(scheme, window=None)) for scheme in schemes):
        where = " and ".join(scheme.acts_on.words for scheme in schemes) or "as the stock model does"
        raise ValueError(
            f"biases are what a scheme adds to attention scores, and {name} adds nothing: it acts {where}. "
            "`hf-posenc plot decay` draws how its scores fall with the distance"
        )


def _biases(scheme: Scheme, asked: Asked) -> Decay:
    _require_scores(scheme.name, [scheme])
    return _decay(scheme, asked)


def _model_biases(model: PreTrainedModel, asked: Asked) -> Decay:
    _require_scores(f"this {type(model).__name__}", schemes_of(model))
    return _model_decay(model, asked)


def _grid(theta: integrals.Values, asked: Asked) -> Tensor:
    if not isinstance(theta, float):
        raise ValueError("give the frequencies of a grid by their base, as 10000")
    return theory.grid_decay(theory.axis_frequencies(GRID_SIZE, base=theta), asked.length)


def _waves(model: PreTrainedModel, asked: Asked) -> dict[str, Decay]:
    found = theory.rotary_weights(model, asked.text, progress=True)
    return found.curves(range(-asked.length, asked.length + 1), progress=True)


def _segments(model: PreTrainedModel, asked: Asked) -> list[RecurrenceMeasurement]:
    text = asked.read(SEGMENTS * asked.length)
    return [
        measure_recurrence(model, [text], segment=asked.length, memory=memory, progress=True)
        for memory in (0, asked.length)
    ]


def _losses(found: dict[str, list[RecurrenceMeasurement]], *, title: str) -> Figure:
    curves = {
        f"{name}, {f'memory of {each.memory}' if each.memory else 'no memory'}": [
            (part.first, part.last, part.loss) for part in each.by_position
        ]
        for name, measured in found.items()
        for each in measured
    }
    return plots.loss_by_position(curves, xlabel="place in the segment (tokens)", title=title)


def _wavelengths(found: dict[str, list[Frequencies]], *, title: str) -> Figure:
    return plots.wavelengths([each for group in found.values() for each in group], title=title)


def _trained(measure: Callable[..., object], **options: bool) -> dict[str, Numbers]:
    """Return the numbers of a scheme or a model, measured with the length that its base was trained at."""
    return {
        "scheme": Numbers(
            lambda scheme, asked: measure(scheme, trained_length=asked.base_length, **options),
            ("trained_length", "scheme_args"),
        ),
        "model": Numbers(
            lambda model, asked: measure(model, trained_length=asked.trained_length, **options), ("trained_length",)
        ),
    }


def _reading(measure: Callable[..., object], **options: bool) -> Numbers:
    """Return the numbers of a model that are measured on a text."""
    return Numbers(lambda model, asked: measure(model, asked.text, **options), READING)


def _expanded(measure: Callable[..., object]) -> Numbers:
    """Return the numbers of a model that are measured on a text and two positions in it."""
    return Numbers(lambda model, asked: measure(model, asked.text, *asked.pair, progress=True), (*READING, "positions"))


READING = ("length", "data")
OF_SCHEME = ("length", "trained_length", "scheme_args")
VECTORS, MODEL_VECTORS = Numbers(_vectors, OF_SCHEME), Numbers(_model_vectors, ("length",))

OPTIONS_OF: dict[str, tuple[str, ...]] = {"scheme": (), "model": ("revision",), "schedule": ()}
"""Options of the command line that every kind reads for a sort of source."""

KINDS = {
    "vectors": Kind(plots.position_vectors, VECTORS, MODEL_VECTORS),
    "similarity": Kind(plots.similarity_matrix, VECTORS, MODEL_VECTORS),
    "grid": Kind(theory_plots.grid_decay, schedule=Numbers(_grid, ("length",))),
    "decay": Kind(plots.decay_curves, Numbers(_decay, OF_SCHEME), Numbers(_model_decay, READING), several=True),
    "waves": Kind(
        theory_plots.wave_curves,
        schedule=Numbers(lambda theta, asked: theory.wave_decay(asked.length, theta).curves(), ("length",)),
        model=Numbers(_waves, READING),
        several=True,
    ),
    "biases": Kind(plots.bias_maps, Numbers(_biases, OF_SCHEME), Numbers(_model_biases, READING)),
    "wavelengths": Kind(_wavelengths, **_trained(analysis.frequencies), several=True),
    "properties": Kind(plots.properties, **_trained(analysis.properties, progress=True), several=True),
    "attention": Kind(plots.attention_by_distance, model=_reading(analysis.attention_by_distance, progress=True)),
    "order": Kind(plots.order_by_layer, model=_reading(analysis.order_sensitivity, progress=True), several=True),
    "equivariance": Kind(
        plots.equivariance_by_layer, model=_reading(analysis.equivariance, progress=True), several=True
    ),
    "expansion": Kind(theory_plots.expansion_terms, model=_expanded(theory.expansion)),
    "hessian": Kind(theory_plots.mixed_hessian, model=_expanded(theory.mixed_hessian)),
    "terms": Kind(theory_plots.score_terms, model=_reading(theory.score_terms, progress=True)),
    "negative": Kind(theory_plots.negative_products, model=_reading(theory.negative_products)),
    "table": Kind(
        theory_plots.position_scores,
        model=Numbers(
            lambda model, asked: theory.position_scores(model, asked.text, length=asked.length, progress=True), READING
        ),
    ),
    "statistics": Kind(
        theory_plots.embedding_statistics,
        model=Numbers(lambda model, asked: theory.embedding_statistics(model), ()),
        several=True,
    ),
    "recurrence": Kind(_losses, model=Numbers(_segments, READING), several=True),
    "precision": Kind(
        plots.distinct_biases,
        scheme=Numbers(
            lambda scheme, asked: analysis.precision_audit(asked.length, scheme=scheme), ("length", "scheme_args")
        ),
    ),
}
"""Kind of picture by its name."""

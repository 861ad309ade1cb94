"""ALiBi: a bias that falls linearly with the distance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..core.dims import Dims
from ..core.dtypes import compute_dtype, constant
from ..core.forms import Slopes
from ..core.modules import ScoreModule, parameter
from ..core.positions import NO_WINDOW
from ..core.registry import register_scheme
from .base import ScoreScheme, StockForm, init

if TYPE_CHECKING:
    from ..model.base_model import BaseModel


def alibi_slopes(num_heads: int) -> list[float]:
    """Return one slope per head, the geometric sequence of the paper.

    If the number of heads n is a power of two, head h = 1 .. n gets `2 ** (-8 h / n)`. Otherwise the first p heads get
    the slopes of p heads, p the largest power of two below n. The rest get every second slope of 2p heads, as in the
    authors' code.

    Args:
        num_heads: number of query heads H.

    Returns:
        H positive numbers, in score units (nats) per token of distance.

    Source: Press, Smith, Lewis 2022, arXiv:2108.12409, section 3 and the authors' `get_slopes`.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    return slopes + [2.0 ** (-4.0 * h / power) for h in range(1, 2 * (num_heads - power), 2)]


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Alibi(ScoreScheme):
    """A bias that falls linearly with the distance, steeper in some heads than in others.

    Equation (section 3): `softmax_j(q_i . k_j / sqrt(D) - m_h (i - j))`, over keys with `i - j < w_h` if head `h` has a
    window `w_h`.
    Beyond the training length: no limit; made for it.
    Hard-ALiBi has windows and no slopes: some heads see only the last tokens, the others have no positions. With H = 12
    it is `slopes=[0] * 12, windows=[1, 2, 3, 4, 5, 6, 7, 8, None, None, None, None]` in the authors' code.
    Calibration: take `trainable=True`, because fixed slopes cannot be fitted to a base. The authors, who trained from
    scratch, won nothing with trained slopes (section 3).
    Deviations: with a soft cap on scores (Gemma 2) the bias is added after the cap, like a mask. Windows of heads count
    positions, as the bias does; `window`, which all heads have, counts tokens.
    Source: Press, Smith, Lewis 2022, arXiv:2108.12409; Jelassi, Brandfonbrener, Kakade, Malach 2024, arXiv:2402.01032
    (windows of heads), and the authors' code.

    Args:
        slopes: H slopes, positive or zero; None means the paper's slopes.
        windows: for each head the number of tokens that it sees, its own included, or None for a head without a window;
            None means that no head has one.
        trainable: every layer gets its slopes as a parameter `slopes` (H,), which a calibration can fit.
    """

    name: ClassVar[str] = "alibi"
    two_sided = True
    slopes: tuple[float, ...] | None = None
    windows: tuple[int | None, ...] | None = None
    trainable: bool = False

    def __post_init__(self) -> None:
        self.flags("trainable")
        if self.slopes is not None:
            self.number("slopes", lambda slope: 0 <= slope < math.inf, "finite and not negative", listed=True)
        if self.windows is not None:
            whole = (int, type(None))
            limits = f"positive and below {NO_WINDOW}"
            self.number("windows", lambda window: window is None or 0 < window < NO_WINDOW, limits, whole, listed=True)

    def check(self, dims: Dims) -> None:
        """Raise ValueError unless there is one slope, and one window, per head."""
        for name, values in (("slopes", self.slopes), ("windows", self.windows)):
            if values is not None and len(values) != dims.num_heads:
                raise ValueError(f"alibi: {len(values)} {name} were given for {dims.num_heads} heads")

    def keeps_kernel(self) -> bool:
        return super().keeps_kernel() and self.windows is None

    def stock_form(self, base: BaseModel, form: StockForm) -> StockForm | None:
        """Return the form with waves in the scheme's layers, which are bias enough within a length."""
        if self.windows is not None:
            return None
        return form.unturned(base.layers_of(self), waves=True, within_length=True)

    def build(self, dims: Dims) -> ScoreModule:
        start = alibi_slopes(dims.num_heads) if self.slopes is None else list(self.slopes)
        return LinearBias(start, self.trainable, self.windows)


class LinearBias(ScoreModule):
    """The scores `q . k - m_h d`, with a parameter `slopes` (H,) if trainable."""

    real = True

    def __init__(self, start: list[float], trainable: bool, windows: tuple[int | None, ...] | None = None) -> None:
        """Store the slopes and windows.

        Args:
            start: H slopes, the start values if they are trained.
            trainable: whether the slopes are a parameter.
            windows: H windows in tokens, or None.
        """
        super().__init__()
        self.start = start
        self.windows = None if windows is None else [NO_WINDOW if w is None else w for w in windows]
        self.slopes = parameter(len(start)) if trainable else None

    def reset_parameters(self) -> None:
        """Start at the slopes `start`."""
        if self.slopes is not None:
            init.copy_(self.slopes, torch.tensor(self.start).to(self.slopes))

    def form(self, like: Tensor) -> Slopes:
        dtype = compute_dtype(like)
        windows = None if self.windows is None else constant(self.windows, torch.int64, like)
        if self.slopes is not None:
            return Slopes(self.slopes.to(dtype), windows)
        name = None if windows is not None else ("slopes", *self.start)
        return Slopes(constant(self.start, dtype, like), windows, name)

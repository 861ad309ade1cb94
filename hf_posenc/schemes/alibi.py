"""ALiBi: a bias that falls linearly with the distance."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor

from ..dims import Dims
from ..dtypes import compute_dtype
from ..forms import Slopes
from ..modules import ScoreModule, parameter
from ..positions import NO_WINDOW
from ..registry import register_scheme
from .base import ScoreScheme, init


def alibi_slopes(num_heads: int) -> list[float]:
    """Return one slope per head, the geometric sequence of the paper.

    If the number of heads n is a power of two, head h = 1 .. n gets `2 ** (-8 h / n)`. Otherwise the first p heads get
    the slopes of p heads, p the largest power of two below n. The rest get every second slope of 2p heads, as in the
    authors' code.

    Args:
        num_heads: number of query heads H.

    Returns:
        H positive numbers, in score units (nats) per token of distance.

    Raises:
        ValueError: if num_heads < 1.

    Source: Press, Smith, Lewis 2022, arXiv:2108.12409, section 3 and the authors' `get_slopes`.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, not {num_heads}")
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
    Deviations: `trainable=True` is the paper's negative result (its section 3), offered to reproduce it. With a soft
    cap on scores (Gemma 2) the bias is added after the cap, like a mask. Windows of heads count positions, as the bias
    does; `window`, which all heads have, counts tokens.
    Source: Press, Smith, Lewis 2022, arXiv:2108.12409; Jelassi, Brandfonbrener, Kakade, Malach 2024, arXiv:2402.01032
    (windows of heads), and the authors' code.

    Args:
        slopes: H slopes, positive, zero or infinite; None means the paper's slopes. A head with an infinite slope sees
            its own token only. It is written down as slope 0 with a window of 1.
        windows: for each head the number of tokens that it sees, its own included, or None for a head without a window;
            None means that no head has one.
        trainable: every layer gets its slopes as a parameter `slopes` (H,).
    """

    name: ClassVar[str] = "alibi"
    added: ClassVar[tuple[str, ...]] = (*ScoreScheme.added, "windows")
    slopes: tuple[float, ...] | None = None
    windows: tuple[int | None, ...] | None = None
    trainable: bool = False

    def __post_init__(self) -> None:
        self.flags("trainable")
        self._check_windows()
        if self.slopes is None:
            return
        if not isinstance(self.slopes, (tuple, list)) or not all(
            isinstance(m, Real) and not isinstance(m, bool) for m in self.slopes
        ):
            raise TypeError(f"alibi: slopes must be a list of one number per head, not {self.slopes!r}")
        if not all(m >= 0 for m in self.slopes):
            raise ValueError(f"alibi: slopes must be numbers that are not negative, not {self.slopes!r}")
        if math.inf in self.slopes:
            windows = self.windows or (None,) * len(self.slopes)
            if len(windows) != len(self.slopes):
                raise ValueError(f"alibi: {len(self.slopes)} slopes and {len(windows)} windows were given")
            narrowed = tuple(1 if m == math.inf else w for m, w in zip(self.slopes, windows, strict=True))
            object.__setattr__(self, "windows", narrowed)
        object.__setattr__(self, "slopes", tuple(0.0 if m == math.inf else float(m) for m in self.slopes))

    def _check_windows(self) -> None:
        """Raise TypeError or ValueError unless `windows` are positive integers or None, one at least an integer."""
        if self.windows is None:
            return
        if not isinstance(self.windows, (tuple, list)) or not all(
            w is None or (isinstance(w, int) and not isinstance(w, bool)) for w in self.windows
        ):
            raise TypeError(
                f"alibi: windows must be a list with an integer or None for each head, not {self.windows!r}"
            )
        if not all(w is None or 0 < w < NO_WINDOW for w in self.windows):
            raise ValueError(f"alibi: windows must be positive and below {NO_WINDOW}, not {self.windows!r}")
        if all(w is None for w in self.windows):
            raise ValueError(f"alibi: windows must have an integer for some head, not {self.windows!r}")
        object.__setattr__(self, "windows", tuple(self.windows))

    def check(self, dims: Dims) -> None:
        """Raise ValueError unless there is one slope, and one window, per head."""
        for name, values in (("slopes", self.slopes), ("windows", self.windows)):
            if values is not None and len(values) != dims.num_heads:
                raise ValueError(f"alibi: {len(values)} {name} were given for {dims.num_heads} heads")

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
        dtype, device = compute_dtype(like), like.device
        windows = None if self.windows is None else torch.tensor(self.windows, device=device)
        start = torch.tensor(self.start, dtype=dtype, device=device) if self.slopes is None else self.slopes.to(dtype)
        return Slopes(start, windows)

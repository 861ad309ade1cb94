"""The choice of the engine for a call: the fastest one that can compute it exactly, and the reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.attention_call import Call
from ..core.did_you_mean import did_you_mean
from .banded import Banded
from .base import Engine
from .chunked import Chunked
from .clipped import Clipped
from .decode import Decode
from .flex import SCORES, Flex
from .near_far import NearFar
from .reference import Reference
from .rescaled import Rescaled
from .sdpa import Sdpa
from .toeplitz import Toeplitz
from .wide import Wide

ENGINES: tuple[Engine, ...] = (
    Sdpa(),
    Decode({None: 1024}),
    Banded({None: 1024**2}),
    Toeplitz({None: 128**2}),
    Clipped({None: 256**2}),
    Rescaled({None: 256**2}),
    Wide({None: 128**2}),
    Flex({None: SCORES}),
    NearFar({None: SCORES}),
    Chunked({None: 512**2}),
    Reference(),
)
"""Every engine, fastest first.

The numbers count scores per head (queries times keys). Below its number `auto` skips an engine, because the next one is
faster; see `Engine.floors`. They were measured by scripts/benchmark_attention.py, on two cores of a Xeon with AMX and
of a Zen 5 EPYC. Only those of `flex` and `near_far` were not measured.
"""

NAMES = tuple(engine.name for engine in ENGINES)
"""Names of the engines."""


@dataclass(frozen=True)
class Choice:
    """An engine and why it was chosen.

    Attributes:
        engine: name of the engine.
        reason: why the faster engines were not chosen.
    """

    engine: str
    reason: str

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.engine}: {self.reason}"


def find_engine(name: str) -> Engine:
    """Return an engine by its name; an unknown one is a ValueError that lists the choices."""
    for engine in ENGINES:
        if engine.name == name:
            return engine
    raise ValueError(
        f"unknown attention {name!r}; choose from auto, {', '.join(NAMES)}{did_you_mean(name, ('auto', *NAMES))}"
    )


def choose(wanted: str, call: Call) -> Choice:
    """Return the engine for a call.

    Args:
        wanted: `auto` or one of `NAMES`.
        call: the call, with its form.

    Raises:
        ValueError: if a wanted engine cannot compute the call; the message says why.
    """
    if wanted != "auto":
        if reason := find_engine(wanted).refusal(call):
            raise ValueError(f"attention={wanted!r} cannot compute this call: {reason}; use attention='auto'")
        return Choice(wanted, "asked for")
    if torch.compiler.is_compiling():  # comparing sizes, as below, would fix them in the graph
        for engine in ENGINES:
            if engine.traced and engine.refusal(call) is None:
                return Choice(engine.name, "torch.compile traces it")
    queries, keys = call.query.shape[2], call.key.shape[2]
    reasons: list[str] = []
    for engine in ENGINES:
        if not engine.considered(call):
            continue
        if queries * keys < engine.floor(call):
            reasons.append(f"not {engine.name}: {queries} queries and {keys} keys are too few to gain by it")
            continue
        reason = engine.refusal(call) or engine.distrust(call)
        if reason is None:
            return Choice(engine.name, "; ".join(reasons) or "the fastest")
        reasons.append(f"not {engine.name}: {reason}")
    raise AssertionError("the reference engine computes every call")


def attend(call: Call, wanted: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Compute a call by the chosen engine, see `choose`.

    Args:
        call: the call, with its form.
        wanted: `auto` or one of `NAMES`.

    Returns:
        output (B, Q, H, V) in the query's dtype, and the weights (B, H, Q, L) or None.

    Raises:
        ValueError: if a wanted engine cannot compute the call.
    """
    engine, size = find_engine(choose(wanted, call).engine), call.value.shape[-1]
    if size == call.query.shape[-1] or engine.value_sizes:
        return engine.attend(call)
    # This engine needs values as wide as the queries: pad with zeros, and cut the output off again.
    value = torch.nn.functional.pad(call.value, (0, call.query.shape[-1] - size))
    output, weights = engine.attend(replace(call, value=value))
    return output[..., :size], weights

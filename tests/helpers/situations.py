"""What the tests of situations, of torch.compile and of PEFT share: schemes, patched tiny models, tolerances.

The position parameters are drawn at random after patching: several schemes start neutral on purpose (DA-Transformer's
factor is 1), and a neutral scheme would agree with itself in any situation.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from typing import Any

import pytest
import torch
from families import tiny
from rows import ROWS, named
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc import available_schemes, patch_model
from hf_posenc.core.modules import PositionModule
from hf_posenc.core.registry import scheme_class
from hf_posenc.model.base_model import BaseModel
from hf_posenc.schemes.base import EmbeddingScheme, RotaryScheme, ScoreScheme
from hf_posenc.schemes.nope import Nope

# case -> (scheme, hyper-parameters); the case named as the scheme stands for it where not every one is run
CASES = named("variants")
SCHEMES = tuple(case for case in CASES if "-" not in case)
SCORE_CASES = tuple(case for case, (scheme, _) in CASES.items() if issubclass(scheme_class(scheme), ScoreScheme))
SCORE_SCHEMES = tuple(case for case in SCORE_CASES if case in SCHEMES)


def schemes_of_class(base: type) -> tuple[str, ...]:
    """Return the schemes whose class derives from this one."""
    return tuple(scheme for scheme in available_schemes() if issubclass(scheme_class(scheme), base))


EMBEDDING_SCHEMES, ROTARY_SCHEMES = schemes_of_class(EmbeddingScheme), schemes_of_class(RotaryScheme)
WITHOUT_POSITIONS = schemes_of_class(Nope)
JOINING = tuple(scheme for scheme in available_schemes() if scheme_class(scheme)().joins)
"""Schemes that join the positions which a layer has."""
OWN_ATTENTION = tuple(
    case
    for case, (scheme, hyperparameters) in CASES.items()
    if scheme_class(scheme)(**hyperparameters).dropped_by_stock_attention()
)
"""Cases whose layers attend through the package's attention function."""
ORDER_ONLY = tuple(scheme for scheme, row in ROWS.items() if not row.spacing)
"""Schemes to which the order of positions matters at most, not how far apart they are."""
BASES = ("gpt2", "llama")

THREE = ("gpt2", "llama", "gemma2")
"""Families that differ in mechanism: a table of positions; rotation and shared keys; windows, a soft cap and wide norms."""


DIFFERING = ("alibi", "rope", "shaw")
"""Schemes that differ in mechanism: a bias by an engine of its own, a rotation by the base, vectors for keys and values."""


def crossed(cases: Iterable[str], families: Iterable[str]) -> list[tuple[str, str]]:
    """Return rows (case, family): all cases on `THREE`, and cases that differ in mechanism on all families."""
    return [(c, f) for f in families for c in cases if f in THREE or c in DIFFERING]


def in_turn(rows: Iterable[Any], *axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return each row with one value of each axis, taken in turn: no fault needs a row and a value at once."""
    return list(zip(rows, *map(cycle, axes), strict=False))


# Two ways of computing one thing in the same dtype differ by the order of sums only. Logits of these models are of the
# order of 10, a few hundred float32 roundings of 1e-6 each; in float64 the same, nine decimal digits further down.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
# bfloat16 keeps 8 bits: 0.4 % per rounding, accumulating over two layers of weights ten times the usual size. Relative
# norm of the difference to float32.
BFLOAT16 = 0.08
# What counts as another result: hundreds of times the tolerance, far below what any of these schemes does.
DIFFERENT = 1e-2


def randomize(model: PreTrainedModel, seed: int = 5) -> PreTrainedModel:
    """Draw every position parameter at random, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, PositionModule):
                for parameter in module.parameters(recurse=False):
                    parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def patched_model(case: str, family: str, **config: Any) -> PreTrainedModel:
    """Return a tiny model patched with a row of `CASES`, its position parameters at random, in eval mode."""
    scheme, hyperparameters = CASES[case]
    model = tiny(family, **config)
    skip_if_refused(scheme, model)
    model.generation_config.eos_token_id = None  # sequences of equal length
    return randomize(patch_model(model, scheme, seed=0, **hyperparameters))


def is_refused(scheme: str, model: PreTrainedModel) -> bool:
    """Return whether a stock model norms queries and keys itself, and the scheme does so too; see test_joining.py."""
    return scheme == "qk_norm" and bool(BaseModel.of(model).normed)


def skip_if_refused(scheme: str, model: PreTrainedModel) -> None:
    """Skip a test of a scheme on a stock model that refuses it."""
    if is_refused(scheme, model):
        pytest.skip("the base norms queries and keys itself")


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference."""
    return (a - b).abs().max().item()


def assert_same(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Compare within the tolerance of the dtype."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert distance(actual, expected) <= TOLERANCE[expected.dtype], what


def position_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the gradients of the position parameters by name."""
    return {
        f"{name}.{key}": p.grad
        for name, module in model.named_modules()
        if isinstance(module, PositionModule)
        for key, p in module.named_parameters(recurse=False)
        if p.grad is not None
    }

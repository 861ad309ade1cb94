"""Checks for the tests of a package that brings a scheme."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import from_pretrained, patch_model, schemes_of, unpatch_model, verify
from .core.modules import position_parameters
from .model.patch_record import patch_of
from .schemes.base import Scheme

TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest logit, or to 1: rotations are in float32 in any model."""


@torch.enable_grad()
def check_scheme(model: Any, schemes: Scheme | str | Sequence[Scheme | str], *, long: int = 600) -> None:
    """Patch a model, draw the schemes' parameters at random, and check what must hold of every scheme.

    The scheme changes the logits, and `verify` finds nothing. Tokens in parts with a cache, behind padding, compiled,
    and after saving and loading have the same logits, and in a longer text the engine that `auto` takes agrees with the
    reference. Every parameter gets a gradient, and `unpatch_model` restores every bit. The formula is not checked:
    compare it with a slow one of your own, in float64.

    Args:
        model: a fresh tiny model in evaluation mode, with enough positions.
        schemes: a scheme, or a list as `patch_model` takes it.
        long: number of tokens of the longer text; engines need some hundreds to be worth it.

    Raises:
        AssertionError: for the first check that fails.
    """
    stock, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    size = model.get_input_embeddings().num_embeddings
    tokens = torch.randint(size, (2, 24), generator=generator)
    patch_model(model, schemes, seed=0)
    with torch.no_grad():  # a scheme that starts neutral would pass every comparison
        for p in position_parameters(model).values():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator))
    whole, before = _logits(model, tokens), _logits(stock, tokens)
    assert not torch.allclose(whole, before, atol=1e-3), "the scheme changes nothing"
    assert (report := verify(model)), report.problems
    parts, cache = list[Tensor](), None
    for part in tokens.split([9, 1, 6, 1, 7], 1):
        with torch.no_grad():
            output = model(part, past_key_values=cache, use_cache=True)
        parts, cache = [*parts, output.logits], output.past_key_values
    _compare(torch.cat(parts, 1), whole, "in parts with a cache")
    mask = pad(torch.ones_like(tokens), (3, 0))
    ids = (mask.cumsum(1) - 1).clamp(min=0)
    _compare(_logits(model, pad(tokens, (3, 0)), attention_mask=mask, position_ids=ids)[:, 3:], whole, "behind padding")
    torch.compiler.reset()  # behind the limit of its cache it would compile nothing, and find nothing
    _compare(_logits(torch.compile(copy.deepcopy(model), backend="eager"), tokens), whole, "compiled")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = from_pretrained(folder, dtype=model.dtype).eval()
    assert schemes_of(loaded) == schemes_of(model), "its hyper-parameters do not come back from a checkpoint"
    _compare(_logits(loaded, tokens), whole, "loaded")
    if (patch := patch_of(model)) is not None and patch.attends:
        exact = patch_model(copy.deepcopy(stock), schemes, seed=0, attention="reference")
        exact.load_state_dict(model.state_dict())
        text = torch.randint(size, (2, min(long, patch.limit or long)), generator=generator)
        _compare(_logits(model, text), _logits(exact, text), "by a faster engine")
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    missing = [name for name, p in position_parameters(model).items() if p.grad is None or not p.grad.any()]
    assert not missing, f"no gradient of {', '.join(missing)}"
    assert _logits(unpatch_model(model), tokens).equal(before), "unpatch_model leaves something behind"


@torch.no_grad()
def _logits(model: Any, tokens: Tensor, **arguments: Any) -> Tensor:
    logits: Tensor = model(tokens, use_cache=False, **arguments).logits
    return logits


def _compare(found: Tensor, expected: Tensor, how: str) -> None:
    off, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    assert off <= TOLERANCE * max(1.0, largest), f"{how}: logits of up to {largest:.1e} differ by {off:.1e}"

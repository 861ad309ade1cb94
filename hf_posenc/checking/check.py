"""check(model): run any model on short random tokens and report what its positions do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from ..errors import UnsupportedModelError
from ..families.base import base_model_type
from ..live.base_model import BaseModel
from ..live.eval_mode import evaluation
from ..live.obstacles import check_in_place, check_unwrapped
from ..live.patch_record import language_model, patch_of, without_adapter
from ..schemes.base import by_layer_type
from ..verification import verify
from .behaviour import cache_outcome, mask_outcome, packing_outcome, padding_outcome, weights_outcomes
from .fingerprint import LENGTHS, fingerprint, longest_list
from .promises import Promise, promise_of, unknown_promise
from .report import CheckReport, Outcome
from .rotation import beyond_outcomes, layers_in_words, rotation_outcomes
from .runs import Runner, change, restored, tolerance

AMONG = 5
"""Each side's pick must be among so many top ones of the other side."""

COMPARED = 32
"""Number of tokens on which two models are compared."""

_FAILURES = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a model of anybody's code may raise in a run that it was not made for."""


@torch.no_grad()
def check(model: PreTrainedModel, other: PreTrainedModel | None = None, *, seed: int = 0) -> CheckReport:
    """Measure what the positions of a model do, stock, forked or patched, and report what is wrong.

    The model runs on short random tokens. Nothing is taken from the config alone:

    - which pairs of each head turn, by which frequencies, from queries and keys; and whether that is what the config
      says: share, layout, base, scaling, layers without rotation;
    - whether a scaling that depends on the length takes effect beyond the original length;
    - whether the causal mask is there, and whether left padding or packed documents change logits;
    - whether cached and recomputed logits agree, also across the original length of such a scaling;
    - whether weights and logits are numbers;
    - whether two models agree, if there is another one.

    A factor on scores, such as that of YaRN, cannot be told from weights and is not measured. The model is left as it
    was: weights, buffers, hooks, mode, random state.

    Args:
        model: a model of transformers or of anybody's code on top of it, on any device, in any mode.
        other: a model with the same vocabulary to compare with, such as another runtime, dtype or conversion.
        seed: seed of the tokens.

    Returns:
        A report, which is true if nothing wrong was found.

    Raises:
        UnsupportedModelError: if a model is wrapped (DistributedDataParallel), sharded (FSDP), offloaded or on the meta
            device, or is an encoder-decoder.
        ValueError: if the two models have vocabularies of different sizes.
    """
    model = _ready(model)
    others = None if other is None else _ready(other)
    if others is not None and _vocabulary(others) != _vocabulary(model):
        raise ValueError(
            f"the models have {_vocabulary(model)} and {_vocabulary(others)} tokens: compare two with one vocabulary"
        )
    with evaluation(model), restored(model), torch.compiler.set_stance("force_eager"):
        outcomes = list(_outcomes(model, seed))
        if others is not None:
            with evaluation(others), restored(others):
                outcomes.append(_tried("agreement", partial(_agreement, model, others, seed)))
    config = model.config
    attention = config._attn_implementation or "eager"
    name = f"{type(model).__name__} ({base_model_type(config)}), {str(model.dtype)[6:]}, {attention}"
    return CheckReport(name, tuple(outcomes))


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    """Return the language model to check; UnsupportedModelError if it cannot run here."""
    check_unwrapped(model, "check the model")
    model = language_model(without_adapter(model))
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"a transformers PreTrainedModel is needed, not {type(model).__name__}")
    check_in_place(model, "check the model", one_device=False)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedModelError("the model is on the meta device, where nothing runs: load its weights first")
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{type(model).__name__} is an encoder-decoder: only decoders can be checked")
    return model


def _vocabulary(model: PreTrainedModel) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _outcomes(model: PreTrainedModel, seed: int) -> Iterator[Outcome]:
    base = _base_of(model)
    facts = None if base is None else base.family.rotation
    runner = Runner(model, seed, coordinates=facts is not None and facts.parameter_coordinates is not None)
    basics = list(weights_outcomes(runner))
    yield from basics
    if not all(outcome.ok for outcome in basics):
        for about in ("rotation", "causal mask", "left padding", "packing", "cache"):
            yield Outcome(about, None, "weights or logits are NaN or infinite, which would look like anything")
        return
    yield from _rotation(runner, base)
    if patch_of(model) is not None:
        yield from _scheme(model)
    counts_slots = base is not None and bool(base.scaled_by_position and base.family.rotation.attention_temperature)
    mask = _tried("causal mask", partial(mask_outcome, runner))
    yield mask
    if mask.ok is False:
        for about in ("left padding", "packing", "cache"):
            yield Outcome(about, None, "queries see later tokens, which shows here too")
        return
    yield _tried("left padding", partial(padding_outcome, runner, counts_slots))
    yield _tried("packing", partial(packing_outcome, runner, _reason_against_packing(base)))
    yield _tried("cache", partial(cache_outcome, runner))


def _base_of(model: PreTrainedModel) -> BaseModel | None:
    """Return the model as its family describes it, or None if no family serves it."""
    try:
        return BaseModel.of(model)
    except UnsupportedModelError:
        return None


def _tried(about: str, measure: Callable[[], Outcome]) -> Outcome:
    """Return an outcome; if the model cannot run this way, a question that was not measured, with the error."""
    try:
        return measure()
    except _FAILURES as error:
        return _failed(about, error)


def _failed(about: str, error: Exception) -> Outcome:
    lines = str(error).strip().splitlines() or [""]
    return Outcome(about, None, f"the model raised {type(error).__name__}: {lines[0][:200]}")


def _reason_against_packing(base: BaseModel | None) -> str | None:
    """Return why a model does not claim to part documents, or None if it does."""
    if base is None:
        return "no family says whether this model type parts documents by position_ids"
    if base.family.hybrid or base.family.joins_documents:
        return "this model type does not part documents by position_ids"
    return None


def _rotation(runner: Runner, base: BaseModel | None) -> Iterator[Outcome]:
    """Yield the rotation of all layers, within and beyond the original length."""
    model, patch = runner.model, patch_of(runner.model)
    count = getattr(model.config, "num_hidden_layers", None)
    layers = longest_list(model, count) if base is None else base.modules.layers
    sizes: dict[int, int] = {}

    def promised(layer: int) -> Promise | None:
        return unknown_promise(model.config, layer, sizes[layer]) if base is None else promise_of(base, layer)

    limit = (None if base is None else base.length) or getattr(model.config, "max_position_embeddings", None)
    try:
        changing = _changing(base, promised)
        if changing is None:
            turnings = fingerprint(runner, layers, limit or 2 * LENGTHS[0])
        else:
            turnings = fingerprint(runner, layers, changing.original_length - 1, changing.original_length - 1)
        sizes |= {layer: turning.keys.size for layer, turning in turnings.items()}
        yield from rotation_outcomes(turnings, promised if patch is None else None, by_family=base is not None)
        if hidden := [layer for layer in (base.sizes if base else range(len(layers))) if layer not in turnings]:
            yield Outcome("rotation", None, f"{layers_in_words(hidden)}: {_unseen(model)}")
        if changing is not None:
            yield from _beyond(runner, layers, changing, promised if patch is None else None)
    except _FAILURES as error:
        yield _failed("rotation", error)


def _changing(base: BaseModel | None, promised: Callable[[int], Promise | None]) -> Promise | None:
    """Return a rotation of the model that changes beyond its original length, or None.

    Args:
        base: the model as its family describes it.
        promised: layer index -> the rotation that the config of a stock model asks for.
    """
    if base is None:
        return None
    patch = patch_of(base.model)
    if patch is None:
        promises = [promise for layer in base.sizes if (promise := promised(layer)) is not None]
    else:
        rotations = (rotation for scheme in patch.schemes for rotation in scheme.acts_on.rotations(scheme) if rotation)
        size, length = base.rotation.dims.head_dim, base.length or 0
        promises = [
            Promise(parameters, size, length, None, None)
            for rotation in rotations
            for parameters in by_layer_type(rotation).values()
        ]
    return next((promise for promise in promises if promise.depends_on_length), None)


def _unseen(model: PreTrainedModel) -> str:
    backend = model.config._attn_implementation or "eager"
    return (
        f"queries and keys could not be seen under {backend}: load the model with attn_implementation='sdpa' or "
        "'eager' (or the layer has no attention of queries and keys)"
    )


def _beyond(
    runner: Runner, layers: list[nn.Module], changing: Promise, promised: Callable[[int], Promise | None] | None
) -> Iterator[Outcome]:
    """Yield whether a scaling takes effect beyond the original length, and whether the cache agrees across it."""
    border = changing.original_length
    if promised is not None:
        turnings = fingerprint(runner, layers, border, 2 * border - 1, start=border // 2)
        yield from beyond_outcomes(turnings, promised, 2 * border)
    prepares = getattr(type(runner.model), "prepare_inputs_for_generation", None)
    recomputes = prepares is not getattr(GenerationMixin, "prepare_inputs_for_generation", None)
    yield _tried("stale keys", partial(cache_outcome, runner, border, recomputes))


def _scheme(model: PreTrainedModel) -> Iterator[Outcome]:
    """Yield what `verify` says about a patched model."""
    report = verify(model)
    for problem in report.problems:
        yield Outcome("scheme", False, problem, advice="see `hf_posenc.verify`: the patch is not what its scheme says")
    if report.ok:
        answering = sum(layer.live_response > 0 for layer in report.layers)
        yield Outcome("scheme", True, f"{report.scheme} acts as it should (verify)", float(answering))


def _agreement(model: PreTrainedModel, other: PreTrainedModel, seed: int) -> Outcome:
    """Compare the logits of two models on the same tokens."""
    runner = Runner(model, seed)
    tokens = runner.tokens(COMPARED)
    logits = runner.logits(tokens).float().cpu()
    against = Runner(other, seed)
    others = against.logits(tokens.to(against.device)).float().cpu()
    if others.shape != logits.shape:
        return Outcome(
            "agreement", None, f"the outputs have the shapes {tuple(logits.shape)} and {tuple(others.shape)}"
        )
    if logits.isnan().any() or others.isnan().any():
        return Outcome("agreement", None, "logits are NaN")
    difference = (logits - others).abs().max().item()
    ranks = torch.maximum(_rank_of_pick(logits, others), _rank_of_pick(others, logits))
    equal = (ranks == 1).float().mean().item()
    found = (
        f"the largest difference of a logit is {difference:.2g}; the picks are equal at {equal:.0%} of {COMPARED} "
        f"tokens, and each side's pick is among the other's top {int(ranks.max())}"
    )
    allowed = max(tolerance(model.dtype), tolerance(other.dtype))
    off = change(others, logits)
    if off <= allowed and int(ranks.max()) <= AMONG:
        return Outcome("agreement", True, found, difference)
    return Outcome(
        "agreement",
        False,
        f"{found}; relative to the logits the difference is {off:.1%}",
        difference,
        "run `check` on each of the two: a difference of positions shows there; otherwise compare dtypes and weights",
    )


def _rank_of_pick(logits: Tensor, others: Tensor) -> Tensor:
    """Return the rank of each best token of `logits` among `others`, counted from 1, (1, T)."""
    pick = logits.argmax(-1, keepdim=True)
    return 1 + (others > others.gather(-1, pick)).sum(-1)

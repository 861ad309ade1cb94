"""check(model): run any model on short random tokens and report what its positions do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from transformers import PreTrainedModel

from ..core.errors import UnsupportedModelError
from ..families.base import base_model_type
from ..model.patch_record import language_model
from .behaviour import QUESTIONS, cache_outcome, number_outcomes
from .conformance import engine_outcomes
from .fingerprint import LENGTHS, fingerprint
from .other_engines import OtherEngine
from .report import CheckReport, Outcome
from .rotation import beyond_outcomes, rotation_outcomes
from .runner import FAILURES, InFloat32, NotMeasuredError, trial, unwrapped
from .subject import Subject
from .verify import verify

Measure = Callable[[], "Outcome | Iterator[Outcome]"]


@torch.no_grad()
def check(
    model: PreTrainedModel, *, seed: int = 0, engine: OtherEngine | None = None, length: int | None = None
) -> CheckReport:
    """Measure what the positions of a model do, stock, forked or patched, and report what is wrong.

    The model runs on short random tokens. Nothing is taken from the config alone:

    - which pairs of each head turn, by which frequencies, from queries and keys; and whether that is what the config
      says: share, layout, base, scaling, layers without rotation;
    - whether a scaling that depends on the length takes effect beyond the original length;
    - whether position ids near and past the trained length act as their own, and a shift of all changes no logits;
    - whether the causal mask is there, and each layer sees as far back as the config's sliding window;
    - whether left padding, another row in the batch or packed documents change logits;
    - whether cached and recomputed logits agree: in steps of one token and of several, with padding, after the cache
      was cropped, without position ids and mask, and across the original length of such a scaling;
    - whether weights and logits are numbers.

    Positions are measured in float32 whatever the dtype of the model, unless it has kernels for half precision
    only. The model is left as it was: weights, buffers, hooks, mode, random state.

    With `engine` the question is another one: does that engine compute the same as this model? It is asked for
    log-probabilities of a prompt, of one in several chunks, of greedy continuations, behind a cached prefix, and beyond
    `original_max_position_embeddings`. Where they differ, models with one fact about positions wrong are tried, and
    the one that agrees with the engine is named. Give the model in float32.

    Args:
        model: a model of transformers or of anybody's code on top of it, on any device, in any mode.
        seed: seed of the tokens.
        engine: `OtherEngine("vllm", FOLDER)`, for example.
        length: most tokens of a prompt for an engine; None means 4,096.

    Returns:
        A report, which is true if nothing wrong was found.

    Raises:
        UnsupportedModelError: if the model is wrapped (DistributedDataParallel), sharded (FSDP), offloaded or on the
            meta device, or is an encoder-decoder; or if the engine cannot run.
        ValueError: if the model is to be compared with an engine, and is in half precision.
    """
    model = language_model(unwrapped(model, "check the model"))
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedModelError("the model is on the meta device, where nothing runs: load its weights first")
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{type(model).__name__} is an encoder-decoder: only decoders can be checked")
    if engine is not None and model.dtype.itemsize < 4:
        raise ValueError(f"roundings in {model.dtype} hide what an engine computes: load the model with dtype=float32")
    with trial(model):
        subject = Subject(model, seed)
        outcomes = tuple(_outcomes(subject) if engine is None else engine_outcomes(subject, engine, length))
    attention = model.config._attn_implementation or "eager"
    name = f"{type(model).__name__} ({base_model_type(model.config)}), {str(model.dtype)[6:]}, {attention}"
    return CheckReport(name, outcomes)


def _tried(about: str, measure: Measure, where: str = "") -> Iterator[Outcome]:
    """Yield outcomes; if the model cannot run this way, a question that was not measured, with the error."""
    try:
        outcomes = measure()
        yield from [outcomes] if isinstance(outcomes, Outcome) else outcomes
    except NotMeasuredError as reason:
        yield Outcome(about, None, str(reason))
    except FAILURES as error:
        lines = str(error).strip().splitlines() or [""]
        yield Outcome(about, None, f"{where}the model raised {type(error).__name__}: {lines[0][:200]}")


def _outcomes(subject: Subject) -> Iterator[Outcome]:
    """Yield the answers to all questions."""
    basics = list(number_outcomes(subject))
    yield from basics
    if not all(outcome.ok for outcome in basics):
        for about in ("rotation", *QUESTIONS):
            yield Outcome(about, None, "weights or logits are NaN or infinite, which would look like anything")
        return
    rotation = list(_tried("rotation", partial(_rotation, subject), "in float32, in which rotation is measured, "))
    yield from rotation
    subject.answers["rotation"] = all(outcome.ok is not False for outcome in rotation)
    if subject.patch is not None:
        yield from _scheme(subject.model)
    with _precise(subject):
        answers = subject.answers
        for about, (measure, needed) in QUESTIONS.items():
            if answers.get("causal mask") is False:
                outcomes = [Outcome(about, None, "queries see later tokens, which shows here too")]
            elif (wrong := next((each for each in needed if not answers[each]), None)) is not None:
                why = "not measured" if answers[wrong] is None else "wrong"
                outcomes = [Outcome(about, None, f"{wrong} is {why}, see there")]
            else:
                outcomes = list(_tried(about, partial(measure, subject, about)))
            answers[about] = next((outcome.ok for outcome in outcomes), None)
            yield from outcomes


def _precise(subject: Subject) -> AbstractContextManager[object]:
    """Return what lets a model run in float32, where it can: roundings of half precision hide small faults."""
    try:
        with InFloat32():
            subject.logits(subject.tokens(1))
    except FAILURES:  # of kernels that take half precision only
        return nullcontext()
    return InFloat32()


def _rotation(subject: Subject) -> Iterator[Outcome]:
    """Yield the rotation of all layers, within and beyond the original length, and whether caches agree there."""
    changing, layers = subject.changing, subject.layers
    last = None if changing is None else changing.original_length - 1
    turnings = fingerprint(subject, layers, last or subject.length or 2 * LENGTHS[0], last)
    yield from rotation_outcomes(subject, turnings)
    if changing is not None:
        border = changing.original_length
        if subject.patch is None:
            beyond = fingerprint(subject, layers, border, 2 * border - 1, start=border // 2)
            yield from beyond_outcomes(subject, beyond, 2 * border)
        yield from _tried("stale keys", partial(cache_outcome, subject, "stale keys"))


def _scheme(model: PreTrainedModel) -> Iterator[Outcome]:
    """Yield what `verify` says about a patched model."""
    report = verify(model)
    for problem in report.problems:
        yield Outcome("scheme", False, problem)
    if report.ok:
        answering = sum(layer.live_response > 0 for layer in report.layers)
        yield Outcome("scheme", True, f"{report.scheme} acts as it should (verify)", float(answering))

"""Does another engine compute the same? Log-probabilities of the same tokens, in the shapes in which engines differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..core.errors import HfPosencError
from ..model.logits import logits_function
from ..transformers_glue.rotary import ORIGINAL_LENGTH
from .other_engines import Answer, OtherEngine, Question
from .report import Outcome
from .subject import Subject
from .variants import Variant, variants

LARGEST_UNIT = 256
"""Most tokens of the first prompt, and of a chunk."""

LONGEST = 4096
"""Most tokens of a prompt unless the caller asks for more: memory and minutes."""

TOLERANCE = 2e-3
"""Mean difference of log-probabilities, in nats, up to which two engines in float32 compute the same."""

COARSE_TOLERANCE = 0.1
"""The same for weights in 16 bits and less, or for a server, of which it is not known."""

COARSE_SHARE = 0.03
"""Then also this part of the mean of the log-probabilities: 8 bits cost 1 to 2 % on random tokens."""

CLEARLY = 0.2
"""A variant explains a difference if it leaves at most this part of it."""


def engine_outcomes(subject: Subject, target: OtherEngine, length: int | None) -> Iterator[Outcome]:
    """Yield whether an engine gives the log-probabilities of a model, in each shape, and what explains it if not.

    Args:
        subject: the model.
        target: the engine, and what it runs.
        length: most tokens of a prompt; None means at most `LONGEST`.
    """
    model = subject.model
    questions, unit, skipped = _questions(subject, length)
    answers = target.ask(questions, unit)
    is_precise = _is_precise(target)
    right = [_differences(model, each) for each in answers]
    failed = []
    for index, (question, answer, compared) in enumerate(zip(questions, answers, right, strict=True)):
        if compared is None:
            yield Outcome(question.about, None, f"{target.engine} says no log-probabilities of these tokens")
            continue
        (off, likeliest), count = compared, len(compared[0])
        mean, what = _mean(off), f"log-probabilities of {count} tokens"
        if question.new:
            what = f"behind {len(question.tokens)} tokens {likeliest} of {count} greedy tokens are the same, {what}"
        found = f"{what} differ by {float(off.nan_to_num(math.inf).max()):.1e} at most, {mean:.1e} in the mean"
        likely = sum(answer.scores or []) / count
        tolerance = TOLERANCE if is_precise else max(COARSE_TOLERANCE, -COARSE_SHARE * likely)
        is_ok = mean <= tolerance
        if not is_ok:
            failed.append(index)
            first = int((off.nan_to_num(math.inf) > tolerance).nonzero()[0]) + len(answer.tokens) - count
            found += f", from token {first} on"
        yield Outcome(question.about, is_ok, found, mean)
    yield from skipped
    if failed:
        yield _cause(subject, target, [(answers[each], bool(questions[each].new)) for each in failed])


def _is_precise(target: OtherEngine) -> bool:
    """Return whether an engine computes in float32 with float32 weights."""
    if target.is_server:
        return False
    if target.engine == "llama.cpp":
        try:
            from gguf import GGUFReader
        except ModuleNotFoundError as error:
            raise ImportError("the package gguf reads what a GGUF file holds: pip install gguf") from error
        kinds = {tensor.tensor_type.name for tensor in GGUFReader(target.served).tensors}
        return kinds == {"F32"}
    return target.dtype == "float32"


def _questions(subject: Subject, length: int | None) -> tuple[list[Question], int, list[Outcome]]:
    """Return the questions, the size of a chunk, and what is not asked."""
    config = subject.model.config
    rotation: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    served = getattr(config, "max_position_embeddings", None) or LONGEST
    original = rotation.get(ORIGINAL_LENGTH) or getattr(config, ORIGINAL_LENGTH, None) or served
    if rotation.get("rope_type") == "dynamic":  # it begins where the model was trained, and has no end
        original, served = served, 2 * served
    most = min(served, length or LONGEST)
    within = min(most, original)
    unit = max(8, min(LARGEST_UNIT, within // 4))
    random = subject.tokens(4 * unit)[0].tolist()
    half = random[: unit // 2]
    prompt = half + half  # what comes a second time can be foreseen from afar, and only with the right positions
    questions = [
        Question("prompt", prompt),
        Question("cached prefix", prompt + random[unit : unit + unit // 4], max(2, unit // 8)),
        Question("decoding", random[: unit // 4], min(200, within - unit // 4 - 1)),
        Question("chunks", half + random[unit : unit + 2 * unit] + half),
    ]
    if original >= served:
        return questions, unit, []
    beyond = original + max(4, min(original // 2, served - original - 4))
    if beyond > most:
        why = f"{original:,} tokens are its original length; length={beyond} (--length) asks beyond it"
        return questions, unit, [Outcome("past original", None, why)]
    far = half + subject.tokens(beyond - unit // 2)[0].tolist()
    questions.append(Question("past original", far))
    if rotation.get("rope_type") != "dynamic":  # whose frequencies change with every token
        questions.append(Question("decoding far", far[:-4], 4))
    return questions, unit, []


@torch.no_grad()
def _scores(model: PreTrainedModel, tokens: list[int], count: int) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the last tokens (count,), in float64, and whether each is the likeliest."""
    ids, first = torch.tensor([tokens], device=model.device), len(tokens) - 1 - count
    # An engine that wrote the last token has not computed it, and a prompt it has: some rotations ask for the length.
    computed = ids[:, :-1] if first else ids
    pieces = logits_function(model, ids[0])(computed, slice(first, len(tokens) - 1))
    logits = torch.cat([each.double().log_softmax(-1).cpu() for each in pieces])
    last = ids[0, first + 1 :].cpu()
    return logits.gather(1, last[:, None])[:, 0], logits.argmax(-1) == last


@torch.no_grad()
def _stepped(model: PreTrainedModel, changed: PreTrainedModel, tokens: list[int], count: int) -> Tensor:
    """Return the same where a changed model takes the steps behind a prompt that the right one has computed."""
    ids, first = torch.tensor([tokens], device=model.device), len(tokens) - count
    prompt = model(ids[:, :first], use_cache=True)
    steps = changed(ids[:, first:-1], past_key_values=prompt.past_key_values, use_cache=True) if count > 1 else prompt
    logits = torch.cat([prompt.logits[0, -1:], steps.logits[0, : count - 1]])
    return logits.double().log_softmax(-1).gather(1, ids[0, first:, None])[:, 0].cpu()


def _differences(model: PreTrainedModel, answer: Answer) -> tuple[Tensor, int] | None:
    """Return how far an engine's log-probabilities are from a model's, and how many of the tokens are the likeliest.

    Returns:
        (count,) float64, NaN where the engine gives no number; None if it gives none at all.
    """
    if answer.scores is None:
        return None
    said = torch.tensor(answer.scores, dtype=torch.float64)
    own, likeliest = _scores(model, answer.tokens, len(said))
    return (said - own).abs(), int(likeliest.sum())


def _mean(off: Tensor) -> float:
    return math.inf if bool(off.isnan().any()) else float(off.mean())


def _off(model: PreTrainedModel, answers: list[Answer], behind: PreTrainedModel | None = None) -> float:
    """Return the mean difference of answers to a model, summed; a model `behind` which it takes steps may differ."""
    total = 0.0
    for answer in answers:
        said = torch.tensor(answer.scores, dtype=torch.float64)
        own = (
            _scores(model, answer.tokens, len(said))[0]
            if behind is None
            else _stepped(behind, model, answer.tokens, len(said))
        )
        total += _mean((said - own).abs())
    return total


def _cause(subject: Subject, target: OtherEngine, failed: list[tuple[Answer, bool]]) -> Outcome:
    """Return which wrong fact about positions explains the differences best, or that none does."""
    model = subject.model
    answers = [answer for answer, _ in failed if all(map(math.isfinite, answer.scores or []))]
    if not answers:
        return Outcome("no numbers", False, f"{target.engine} gives NaN")
    before = _off(model, answers)
    best: tuple[float, Variant, str] | None = None
    for variant in _candidates(model, target):
        try:
            made = variant.make()
        except (HfPosencError, ValueError):  # the fact cannot be wrong here
            continue
        tried = {"": _off(made, answers)}
        if all(new for _, new in failed):
            tried[", only in steps behind a cache"] = _off(made, answers, model)
        for where, left in tried.items():
            if best is None or left < best[0]:
                best = left, variant, where
    if best is None or not best[0] <= CLEARLY * before:
        return Outcome(
            "unexplained", False, f"no single fact about positions makes transformers agree with {target.engine}"
        )
    left, variant, where = best
    mean = left / len(answers)
    found = f"{target.engine} {variant.said}{where}: a model that does so differs from it by {mean:.1e} in the mean"
    return Outcome(variant.about, False, found, mean)


def _candidates(model: PreTrainedModel, target: OtherEngine) -> Iterator[Variant]:
    """Yield the variants of a model and, if the engine runs another checkpoint, of that one."""
    yield from variants(model)
    folder = Path(target.served)
    if folder.is_dir() and folder.resolve() != Path(model.config._name_or_path).resolve():
        other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        yield from variants(other.eval())

"""Free generation: does a model end its texts, and how much does it repeat itself?"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.measurement import Result
from .batches import reading


@dataclass(frozen=True, kw_only=True)
class GenerationMeasurement(Result):
    """How texts of at most so many generated tokens end and repeat.

    Attributes:
        length: largest number of generated tokens, without the prompt.
        samples: number of texts.
        temperature: temperature of the drawn tokens; 0 takes the likeliest.
        ended: share of texts that end with an end-of-text token within `length` tokens.
        repetition: `repeated_ngrams` of a text up to its end, mean over the texts with an n-gram; None without any.
            It is seq-rep-n of Welleck et al. 2019 (arXiv:1908.04319), and 1 minus distinct-n of one text.
        ngram: tokens in an n-gram.
    """

    length: int
    samples: int
    temperature: float
    ended: float
    repetition: float | None
    ngram: int


def repeated_ngrams(tokens: Sequence[int], ngram: int = 4) -> float | None:
    """Return the share of a text's n-grams that occurred before in it: 1 minus different ones by all.

    Args:
        tokens: token ids of one text.
        ngram: tokens in an n-gram, at least 1.

    Returns:
        A number from 0 (no repetition) to almost 1 (one n-gram over and over). None for fewer than `ngram` tokens.
    """
    ngrams = [tuple(tokens[start : start + ngram]) for start in range(len(tokens) - ngram + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else None


def measure_generation(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    *,
    lengths: Sequence[int],
    ends: Sequence[int] | None = None,
    temperature: float = 0.0,
    ngram: int = 4,
    seed: int = 0,
    batch_size: int | None = None,
    distributed: bool = False,
    progress: bool = False,
) -> list[GenerationMeasurement]:
    """Let a model continue prompts, and measure how many texts end and how much they repeat.

    Every text is continued to the longest length, and cut at its first end-of-text token; the shorter lengths are its
    beginnings. Nothing else shapes the text: no top-k, no top-p, no penalty of the generation config.

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        prompts: sequences `(P,)` int64 of at least one token each. Repeat a prompt for several samples of it.
        lengths: numbers of generated tokens, at least 1.
        ends: ids of end-of-text tokens. None means those of the model's generation config.
        temperature: 0 takes the likeliest token, which shows repetition at its worst. Above 0, tokens are drawn from
            `softmax(logits / temperature)`.
        ngram: tokens in an n-gram, at least 1.
        seed: seed of drawn tokens. A text depends on the seed and on the number of its prompt.
        batch_size: prompts per batch. None means about 8192 tokens, 1024 on a CPU.
        distributed: divide the prompts among the processes of `torch.distributed`. All processes get the same result.
        progress: show a progress bar, in texts.

    Returns:
        One measurement per length, in the order of `lengths`.

    Raises:
        ValueError: for a number out of range, a prompt that is empty, no `ends` where the configs have none, or
            `distributed` without a process group.
    """
    if not lengths or min(lengths) < 1 or ngram < 1 or temperature < 0:
        raise ValueError(
            "lengths and ngram must be at least 1 and temperature at least 0, "
            f"not {list(lengths)}, {ngram} and {temperature}"
        )
    if not prompts or any(prompt.dim() != 1 or not len(prompt) for prompt in prompts):
        raise ValueError("prompts must be one or more sequences of shape (P,), each with a token")
    ending = set(_end_tokens(model) if ends is None else ends)
    longest = max(lengths)

    def score(batch: list[int]) -> Tensor:
        chances = _chances(seed, batch, longest) if temperature else None
        start = torch.stack([prompts[index] for index in batch]).to(reader.device)
        texts = _continuations(model, start, longest, temperature, chances).tolist()
        rows = [[_ending(text[:length], ending, ngram) for length in lengths] for text in texts]
        return torch.tensor(rows, dtype=torch.float64)

    with reading(model, prompts[0], distributed=distributed, progress=progress) as reader:
        shapes, row = [(len(prompt) + longest,) for prompt in prompts], (len(lengths), 3)
        scores = reader.scores(shapes, score, row, "text", batch_size)
    return [
        GenerationMeasurement(
            length=length,
            samples=len(prompts),
            temperature=temperature,
            ended=ended / len(prompts),
            repetition=repeated / counted if counted else None,
            ngram=ngram,
        )
        for length, (ended, repeated, counted) in zip(lengths, scores.sum(0).tolist(), strict=True)
    ]


def _chances(seed: int, numbers: list[int], length: int) -> Tensor:
    """Return where in their distributions the tokens of texts are drawn, (B, length) float64 in [0, 1)."""
    seeds = [random.Random(f"{seed} {number}").getrandbits(63) for number in numbers]
    rows = [torch.rand(length, generator=torch.Generator().manual_seed(each), dtype=torch.float64) for each in seeds]
    return torch.stack(rows)


def _ending(text: list[int], ends: set[int], ngram: int) -> tuple[bool, float, bool]:
    """Return whether a text ends, its share of repeated n-grams before the end, and whether it has an n-gram."""
    end = next((place for place, token in enumerate(text) if token in ends), None)
    repeated = repeated_ngrams(text[:end], ngram)
    return end is not None, repeated or 0.0, repeated is not None


def _end_tokens(model: PreTrainedModel) -> list[int]:
    """Return the ids of end-of-text tokens that the generation config of a model names; ValueError without any."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        raise ValueError("the model's config names no end-of-text token: give ends=[...], or ends=[] for repetition")
    return list(ids) if isinstance(ids, list | tuple) else [ids]


def _continuations(model: nn.Module, tokens: Tensor, length: int, temperature: float, chances: Tensor | None) -> Tensor:
    """Return `length` generated tokens (B, length) after prompts (B, P).

    Args:
        model: the model, in eval mode. Without a cache in its output, it reads the whole text at every step.
        tokens: prompts, on the model's device.
        length: number of tokens to generate.
        temperature: divides the logits of drawn tokens.
        chances: (B, length) in [0, 1), float64: where in the distribution a token is drawn. None takes the likeliest.
    """
    prompt, cache = tokens.shape[1], None
    for step in range(length):
        state: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
        output = model(input_ids=tokens if cache is None else tokens[:, -1:], use_cache=True, **state)
        cache = getattr(output, "past_key_values", None)
        logits = output.logits[:, -1]
        if chances is None:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            sums = (logits.double() / temperature).softmax(-1).cumsum(-1)
            place = chances[:, step, None].to(sums.device) * sums[:, -1:]  # round-off leaves the last sum beside 1
            chosen = torch.searchsorted(sums, place, right=True).clamp(max=logits.shape[-1] - 1)
        tokens = torch.cat([tokens, chosen], dim=1)
    return tokens[:, prompt:]

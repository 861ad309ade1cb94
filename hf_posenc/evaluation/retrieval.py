"""Retrieval tests: can a model find information far back in its context?

Perplexity hardly shows this, because most tokens need little context.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..measurement import Result
from .batches import Reader, progress_bar, reading


@dataclass(frozen=True, kw_only=True)
class Cell(Result):
    """Result of all trials with the same length and depth.

    Attributes:
        length: number of tokens in a context, with the answer.
        depth: position of the information in the context: 0 at the start, 1 right before the question.
        trials: number of contexts.
        tokens: number of scored answer tokens in all contexts.
        accuracy: share of answer tokens that the model ranks first, after the true tokens before them.
        exact: share of trials in which the model ranks all answer tokens first, so that greedy decoding is right.
        logprob: mean log-probability of an answer token, in nats.
        chance: accuracy of a random guess among the possible answers.
    """

    length: int
    depth: float
    trials: int
    tokens: int
    accuracy: float
    exact: float
    logprob: float
    chance: float


MakeContext = Callable[[int, float, torch.Generator], tuple[Tensor, int]]
"""Length, depth and generator -> a context `(length,)`, and the number of answer tokens at its end."""


@dataclass(frozen=True)
class _Trials:
    """The common arguments of all tests, see `induction_copy`; `count` is the number of trials per cell."""

    lengths: Sequence[int]
    depths: Sequence[float]
    count: int
    seed: int
    distributed: bool
    progress: bool

    def run(self, model: nn.Module, make: MakeContext, chance: float, shortest: int) -> list[Cell]:
        """Run all trials, divided among the processes, and return a cell for each length and depth.

        Raises:
            ValueError: for lengths under `shortest` or too short for `make`, and for depths or numbers out of range.
        """
        if any(length < shortest for length in self.lengths):
            raise ValueError(f"lengths must be at least {shortest}, not {min(self.lengths)}")
        if any(not 0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths must lie between 0 and 1, not {list(self.depths)}")
        if self.count < 1:
            raise ValueError(f"trials must be at least 1, not {self.count}")
        cells = [(length, depth) for length in self.lengths for depth in self.depths]
        jobs = [(*cell, trial) for cell in cells for trial in range(self.count)]

        def context(job: tuple[int, float, int]) -> tuple[Tensor, int]:
            length, depth, trial = job
            seed = random.Random(f"{self.seed} {length} {depth} {trial}").getrandbits(63)
            return make(length, depth, torch.Generator().manual_seed(seed))

        firsts = [context(job)[0] for job in jobs[:: self.count]]  # a length that is too short raises here
        if not jobs:
            return []
        bar = progress_bar(len(jobs), "retrieval", "trial", self.progress)
        with reading(model, firsts[0], distributed=self.distributed) as reader, bar:

            def score(batch: list[int]) -> Tensor:
                return _scores(reader, [context(jobs[index]) for index in batch])

            batches = reader.batches([length for length, *_ in jobs], lambda length: length)
            parts = reader.scores(batches, score, (3,), bar).split(self.count)
        return [_cell(*cell, part, chance) for cell, part in zip(cells, parts, strict=True)]


def _scores(reader: Reader, contexts: list[tuple[Tensor, int]]) -> Tensor:
    """Return for each context the numbers of answer tokens and of right ones, and the sum of log-probabilities.

    Args:
        reader: the model that is read.
        contexts: B pairs of a context and its number of answer tokens.

    Returns:
        (B, 3) float64 on the CPU.
    """
    longest = max(answer for _, answer in contexts)  # numbers can differ in their numbers of tokens
    tokens = torch.stack([context for context, _ in contexts]).to(reader.device)
    size = tokens.shape[1]
    pieces = reader.logits_of(tokens, slice(size - longest - 1, size - 1))
    logits = torch.cat(list(pieces)).view(len(contexts), longest, -1)
    targets = tokens[:, size - longest :, None]
    chosen = logits.float().log_softmax(-1).gather(-1, targets)[..., 0].double().cpu()
    # A tie is not right. With argmax it could be, because argmax returns the first of several equal logits.
    at_least_as_likely = logits >= logits.gather(-1, targets)
    right = (at_least_as_likely.sum(-1) == 1).cpu()
    rows = []
    for row, (_, answer) in enumerate(contexts):
        last = slice(longest - answer, None)
        rows.append([answer, right[row, last].sum().item(), chosen[row, last].sum().item()])
    return torch.tensor(rows, dtype=torch.float64)


def _cell(length: int, depth: float, scores: Tensor, chance: float) -> Cell:
    """Return the cell of a length and a depth from the scores (trials, 3)."""
    tokens = int(scores[:, 0].sum())
    return Cell(
        length=length,
        depth=depth,
        trials=len(scores),
        tokens=tokens,
        accuracy=scores[:, 1].sum().item() / tokens,
        exact=(scores[:, 0] == scores[:, 1]).double().mean().item(),
        logprob=scores[:, 2].sum().item() / tokens,
        chance=chance,
    )


def induction_copy(
    model: nn.Module,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.5, 0.9),
    trials: int = 8,
    passage: int = 16,
    vocabulary: Sequence[int] | None = None,
    seed: int = 0,
    distributed: bool = False,
    progress: bool = False,
) -> list[Cell]:
    """Repeat a passage of random tokens at the end of a random context, and score all but its first two tokens.

    The test needs no instructions and no language. The first two tokens say which passage is meant. The rest must be
    copied from its first occurrence (induction heads, Olsson et al. 2022, arXiv:2209.11895).

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        lengths: lengths of contexts in tokens, at least twice the passage.
        depths: positions of the passage's first occurrence, between 0 (start) and 1.
        trials: number of contexts per length and depth.
        passage: length of the passage in tokens, at least 3.
        vocabulary: token ids to draw from. None means all ids of the model except the first and last hundredth, where
            tokenizers keep their special tokens.
        seed: seed of the contexts. A context depends only on the seed, the length, the depth and the trial's number.
        distributed: divide the trials among the processes of `torch.distributed`. All processes get the same result.
        progress: show a progress bar, in trials.

    Returns:
        One cell per length and depth.

    Raises:
        ValueError: for a length, depth or number out of range.
        RuntimeError: for `distributed` without an initialised process group.
    """
    if passage < 3:
        raise ValueError(f"passage must be at least 3 tokens, not {passage}")
    words = _vocabulary(model, vocabulary)

    def make(length: int, depth: float, generator: torch.Generator) -> tuple[Tensor, int]:
        context = words[torch.randint(len(words), (length,), generator=generator)]
        start = round(depth * (length - 2 * passage))
        context[length - passage :] = context[start : start + passage]
        return context, passage - 2

    return _Trials(lengths, depths, trials, seed, distributed, progress).run(model, make, 1 / len(words), 2 * passage)


def associative_recall(
    model: nn.Module,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.5, 0.9),
    trials: int = 8,
    vocabulary: Sequence[int] | None = None,
    seed: int = 0,
    distributed: bool = False,
    progress: bool = False,
) -> list[Cell]:
    """Write pairs of a key token and a value token, repeat one key at the end, and score the value after it.

    This is multi-query recall with one query (Arora et al. 2023, arXiv:2312.04927). Half of the vocabulary are keys,
    the other half values, and every key occurs in one pair. A context of `length` tokens, at least 6, holds as many
    pairs as possible. If there are not enough keys, more values fill the space between pairs. The depth is that of the
    pair whose key is repeated. For the other arguments, the result and the errors see `induction_copy`.
    """
    words = _vocabulary(model, vocabulary)
    keys, values = words[: len(words) // 2], words[len(words) // 2 :]

    def make(length: int, depth: float, generator: torch.Generator) -> tuple[Tensor, int]:
        context = values[torch.randint(len(values), (length,), generator=generator)]
        slots = (length - 2) // 2
        # If there are more slots than keys, the keys are spread evenly.
        used = torch.linspace(0, slots - 1, min(slots, len(keys))).round().long()
        order = torch.randperm(len(keys), generator=generator)[: len(used)]
        context[length % 2 + 2 * used] = keys[order]
        asked = round(depth * (len(used) - 1))
        slot = length % 2 + 2 * int(used[asked])
        context[-2:] = context[slot : slot + 2]
        return context, 1

    return _Trials(lengths, depths, trials, seed, distributed, progress).run(model, make, 1 / len(values), 6)


FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


def passkey(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    trials: int = 4,
    seed: int = 0,
    distributed: bool = False,
    progress: bool = False,
) -> list[Cell]:
    """Hide a five-digit number in repeated filler and ask for it (Mohtashami and Jaggi 2023, arXiv:2305.16300).

    Papers report `exact`. The test is easier than `needle`. Base models that follow no instructions may fail it at
    every length. The sentences take about 64 tokens, and a shorter length raises ValueError. `tokenizer` is the model's
    tokenizer, and the depth is that of the number. For the other arguments, the result and the errors see
    `induction_copy`.
    """
    sentence = "\nThe pass key is {0}. Remember it. {0} is the pass key.\n"
    question = "\nWhat is the pass key? The pass key is"
    test = _Trials(lengths, depths, trials, seed, distributed, progress)
    return _run_hidden_number(model, tokenizer, FILLER, sentence, question, test)


def needle(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    text: str,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    trials: int = 4,
    seed: int = 0,
    distributed: bool = False,
    progress: bool = False,
) -> list[Cell]:
    """Hide a sentence with a number in real text and ask for it (Kamradt 2023, "needle in a haystack").

    `text` is the haystack; it is repeated if it is too short. For the other arguments, the result and the errors see
    `passkey`.
    """
    sentence = "\nThe special magic number is {0}.\n"
    question = "\nWhat is the special magic number? The special magic number is"
    test = _Trials(lengths, depths, trials, seed, distributed, progress)
    return _run_hidden_number(model, tokenizer, text, sentence, question, test)


def _run_hidden_number(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, text: str, sentence: str, question: str, test: _Trials
) -> list[Cell]:
    """Run a test that hides a number in a text. The text is cut so that contexts have exactly the given length."""

    def ids(words: str) -> Tensor:
        return torch.tensor(tokenizer(words, add_special_tokens=False, verbose=False).input_ids, dtype=torch.long)

    filler, ending = ids(text), ids(question)
    if not len(filler):
        raise ValueError("the filler text is empty")
    start = torch.tensor(tokenizer("").input_ids[:1], dtype=torch.long)  # the token that texts begin with, if any

    def make(length: int, depth: float, generator: torch.Generator) -> tuple[Tensor, int]:
        number = str(int(torch.randint(10000, 100000, (), generator=generator)))
        needle_ids, answer = ids(sentence.format(number)), ids(" " + number)
        room = length - sum(map(len, (start, needle_ids, ending, answer)))
        if room < 0:
            raise ValueError(f"length {length} is too short for needle and question, which take {length - room} tokens")
        hay = filler.repeat(math.ceil(room / len(filler)))[:room]
        slot = round(depth * room)
        return torch.cat([start, hay[:slot], needle_ids, hay[slot:], ending, answer]), len(answer)

    return test.run(model, make, 0.1, 2)


def _vocabulary(model: nn.Module, ids: Sequence[int] | None) -> Tensor:
    """Return the token ids to draw from, (V,); ValueError for fewer than 4 ids or unknown ids."""
    size = model.get_input_embeddings().num_embeddings  # type: ignore[operator]  # ZeRO-3 leaves its weight empty
    words = list(ids) if ids is not None else list(range(size // 100 + 1, size - size // 100 - 1))
    if len(set(words)) < 4 or min(words) < 0 or max(words) >= size:
        raise ValueError(f"vocabulary must be at least 4 token ids of 0 .. {size - 1}")
    return torch.tensor(words, dtype=torch.long)

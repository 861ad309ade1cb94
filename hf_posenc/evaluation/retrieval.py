"""Retrieval tests: can a model find what it has seen, that far back?

Perplexity hardly tells, because most tokens need little context.
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
    """Result of the trials of one length and depth.

    Attributes:
        length: tokens of the whole context, the answer included.
        depth: place of the answer in the context: 0 at its start, 1 right before the question.
        trials: number of contexts.
        tokens: number of answer tokens that were scored in all of them.
        accuracy: share of these tokens that are the model's first choice, given the tokens before.
        exact: share of trials whose answer tokens were all the first choice: what greedy decoding would get right.
        logprob: mean log-probability of an answer token, in nats.
        chance: accuracy of a guess among the possible answers.
    """

    length: int
    depth: float
    trials: int
    tokens: int
    accuracy: float
    exact: float
    logprob: float
    chance: float


Make = Callable[[int, float, torch.Generator], tuple[Tensor, int]]
"""Length, depth and generator -> a context `(length,)`, and how many tokens at its end are the answer."""


@dataclass(frozen=True)
class _Trials:
    """Lengths, depths and number of the contexts of a test, and how it is run; see `induction_copy`."""

    lengths: Sequence[int]
    depths: Sequence[float]
    count: int
    seed: int
    distributed: bool
    progress: bool

    def run(self, model: nn.Module, make: Make, chance: float, shortest: int) -> list[Cell]:
        """Run every trial in one of the processes, and add up in the order of the trials.

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

        firsts = [context(job)[0] for job in jobs[:: self.count]]  # too short a length raises before anything is read
        if not jobs:
            return []
        bar = progress_bar(len(jobs), "retrieval", "trial", self.progress)
        with reading(model, firsts[0], distributed=self.distributed) as reader, bar:

            def score(batch: list[int]) -> Tensor:
                return _scores(reader, [context(jobs[index]) for index in batch])

            batches = reader.batches([length for length, *_ in jobs], lambda length: length)
            parts = reader.scores(batches, score, (3,), bar).split(self.count)
        return [_cell(*cell, part, chance) for cell, part in zip(cells, parts, strict=True)]


def _scores(reader: Reader, made: list[tuple[Tensor, int]]) -> Tensor:
    """Return answer tokens, right ones and the sum of their log-probabilities of each context, (B, 3) on the CPU."""
    longest = max(answer for _, answer in made)  # digits need not be as many tokens in every number
    tokens = torch.stack([context for context, _ in made]).to(reader.device)
    size = tokens.shape[1]
    pieces = reader.logits_of(tokens, slice(size - longest - 1, size - 1))
    logits = torch.cat(list(pieces)).view(len(made), longest, -1)
    targets = tokens[:, size - longest :, None]
    chosen = logits.float().log_softmax(-1).gather(-1, targets)[..., 0].double().cpu()
    # Not argmax: where several are equally likely it would name the first, which may be the answer.
    beaten = logits >= logits.gather(-1, targets)
    right = (beaten.sum(-1) == 1).cpu()
    rows = []
    for row, (_, answer) in enumerate(made):
        last = slice(longest - answer, None)
        rows.append([answer, right[row, last].sum().item(), chosen[row, last].sum().item()])
    return torch.tensor(rows, dtype=torch.float64)


def _cell(length: int, depth: float, scores: Tensor, chance: float) -> Cell:
    """Return the sums and means of the scores (trials, 3) of one length and depth."""
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
    """Repeat a passage of random tokens at the end of random tokens, and score all but the first two of them.

    It needs no instructions and no language. Two tokens say which passage is meant, and the rest has to be copied from
    its first place (induction heads, Olsson et al. 2022, arXiv:2209.11895).

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        lengths: tokens of a context, at least twice the passage.
        depths: first place of the passage, between 0 (start) and 1.
        trials: contexts per length and depth.
        passage: tokens that are repeated, at least 3.
        vocabulary: token ids to draw from; by default all of the model's but the first and last hundredth, where
            tokenizers keep their special tokens.
        seed: seed of the contexts. They depend on it, the length, the depth and the trial's number alone.
        distributed: spread the trials over the processes of `torch.distributed`; all get the same result.
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
    """Write pairs of a key and a value token, no key twice, repeat one of the keys, and score the value behind it.

    Multi-query recall with one query (Arora et al. 2023, arXiv:2312.04927). A context of `length` tokens, at least 6,
    holds as many pairs as fit and as there are keys; where keys run out, values follow one another in between. Half of
    the vocabulary are keys, the other half values. The depth is that of the pair whose key is repeated. Arguments,
    result and errors are otherwise those of `induction_copy`.
    """
    words = _vocabulary(model, vocabulary)
    keys, values = words[: len(words) // 2], words[len(words) // 2 :]

    def make(length: int, depth: float, generator: torch.Generator) -> tuple[Tensor, int]:
        context = values[torch.randint(len(values), (length,), generator=generator)]
        slots = (length - 2) // 2
        # Where there are more places than keys, keys are spread over them evenly.
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

    `exact` is the number that papers report. The test is easier than finding a needle in real text. Base models that
    follow no instructions may fail it at every length. Contexts have 64 tokens or more, about: a length in which the
    sentences do not fit is a ValueError. `tokenizer` is the model's; the depth is that of the number. Arguments, result
    and errors are otherwise those of `induction_copy`.
    """
    sentence = "\nThe pass key is {0}. Remember it. {0} is the pass key.\n"
    question = "\nWhat is the pass key? The pass key is"
    test = _Trials(lengths, depths, trials, seed, distributed, progress)
    return _hidden(model, tokenizer, FILLER, sentence, question, test)


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

    `text` is the haystack, repeated where it is too short. Arguments, result and errors are otherwise those of
    `passkey`.
    """
    sentence = "\nThe special magic number is {0}.\n"
    question = "\nWhat is the special magic number? The special magic number is"
    test = _Trials(lengths, depths, trials, seed, distributed, progress)
    return _hidden(model, tokenizer, text, sentence, question, test)


def _hidden(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, text: str, sentence: str, question: str, test: _Trials
) -> list[Cell]:
    """Run a test that hides a number in a text, cut to the token: a context has exactly the length asked for."""

    def ids(words: str) -> Tensor:
        return torch.tensor(tokenizer(words, add_special_tokens=False, verbose=False).input_ids, dtype=torch.long)

    filler, ending = ids(text), ids(question)
    if not len(filler):
        raise ValueError("the filler text is empty")
    before = torch.tensor(tokenizer("").input_ids[:1], dtype=torch.long)  # a mark that texts begin with, if any

    def make(length: int, depth: float, generator: torch.Generator) -> tuple[Tensor, int]:
        number = str(int(torch.randint(10000, 100000, (), generator=generator)))
        hidden, answer = ids(sentence.format(number)), ids(" " + number)
        room = length - sum(map(len, (before, hidden, ending, answer)))
        if room < 0:
            raise ValueError(f"length {length} is too short for needle and question, which take {length - room} tokens")
        hay = filler.repeat(math.ceil(room / len(filler)))[:room]
        slot = round(depth * room)
        return torch.cat([before, hay[:slot], hidden, hay[slot:], ending, answer]), len(answer)

    return test.run(model, make, 0.1, 2)


def _vocabulary(model: nn.Module, given: Sequence[int] | None) -> Tensor:
    """Return the token ids to draw from, (V,); ValueError for fewer than 4, or ids that the model does not have."""
    size = model.get_input_embeddings().num_embeddings  # type: ignore[operator]  # ZeRO-3 leaves its weight empty
    words = list(given) if given is not None else list(range(size // 100 + 1, size - size // 100 - 1))
    if len(set(words)) < 4 or min(words) < 0 or max(words) >= size:
        raise ValueError(f"vocabulary must be at least 4 token ids of 0 .. {size - 1}")
    return torch.tensor(words, dtype=torch.long)

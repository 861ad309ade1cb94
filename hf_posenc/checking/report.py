"""The results of `check`: one outcome per question, and the page that shows them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..core.measurement import Result

WIDTH = 112
"""Number of characters in a line of the page."""

ADVICE = {
    "weights": "load the checkpoint again; look for missing weights, or an overflow when it was saved or trained",
    "logits": "repair the weights first; float16 overflows in some models, so run in float32 or bfloat16",
    "rotation": "turn queries and keys of all heads by the same cosines and sines, as the stock class does",
    "share": "turn the dimensions of each head that partial_rotary_factor (or rotary_dim) of the config says",
    "layout": "rotate by the model type's layout, or reorder rows of the query and key projections when converting",
    "direction": "give the sines the sign of the stock class, or swap the dimensions of each pair when converting",
    "unrotated layer": "skip the rotation where the config says so, or correct the config",
    "base": "use the rope_theta that the weights were trained with, in the code and in the config",
    "scaling": "make the rotary embedding from config.rope_parameters (older releases: rope_scaling), "
    "with attention_scaling, and dynamic_rope_update where it changes with the length",
    "frequencies": "compute them as transformers' ROPE_INIT_FUNCTIONS do, in float32, or correct rope_parameters",
    "norm": "norm queries and keys before their rotation: otherwise scores depend on the absolute position",
    "offset": "give queries and keys the cosines and sines of the same position_ids",
    "stale keys": "take a scaling that does not change with the length (yarn, linear), or use_cache=False across it",
    "causal mask": "hand the causal mask to every attention; until then loss and perplexity mean nothing",
    "positions": "hand position_ids on as they are, make tables long enough, and look for what else reads them",
    "window": "make masks by create_sliding_window_causal_mask, and give each layer that of its own layer_types",
    "left padding": "hand attention_mask and position_ids on to the layers; until then pad nothing in generate",
    "batch": "give each row its own mask and position_ids; until then generate in batches of equal length",
    "padded cache": "hand the mask of the whole row, with the cached tokens, on to the layers in every step",
    "packing": "hand position_ids to create_causal_mask; until then set packing=False, padding_free=False",
    "cache": "generate with use_cache=False, and compare positions and masks of a step with those of a whole run",
    "default ids": "pass position_ids in every call, or count on from past_key_values.get_seq_length()",
    "chunk": "count on from the cached tokens, and mask for each token of a step; until then no prefill_chunk_size",
    "crop": "count from past_key_values.get_seq_length(); until then no assistant model and no prompt lookup",
    "scheme": "see `hf_posenc.verify`: the patch is not what its scheme says",
    "factor": "write the attention factor where this engine reads it, or fold it into the query projection",
    "factors": "give both lists the same numbers, and original_max_position_embeddings the length that is served",
    "patch ignored": "serve what `hf-posenc export` writes, or install hf_posenc where the engine runs",
    "no positions": "the engine drops what the model adds: serve what `hf-posenc export` writes",
    "parameters": "export the model again: trained parameters and hyper-parameters of the scheme got lost",
    "prompt": "see below for the cause",
    "chunks": "see below for the cause; where single prompts agree, let prompts be computed at once",
    "decoding": "see below for the cause; where prompts agree, the engine's kernel for single tokens differs",
    "cached prefix": "see below for the cause; where the rest agrees, switch the prefix cache off",
    "past original": "see below for the cause; until then serve no longer texts than the original length",
    "decoding far": "see below for the cause; until then serve no longer texts than the original length",
    "no numbers": "the engine has no angles at this length: export with a static scaling (yarn, linear)",
    "unexplained": "compare the weights and the tokenizer first: other faults than positions look like this",
}
"""Question -> what to do about a finding."""


@dataclass(frozen=True)
class Outcome(Result):
    """The answer to one question about a model.

    Attributes:
        about: the question in one or two words, such as `cache`.
        ok: whether nothing is wrong; None if the question could not be measured.
        found: what was found, in words; where nothing was measured, the reason.
        measured: the number behind it; None if there is none.
    """

    derived = ("advice",)

    about: str
    ok: bool | None
    found: str
    measured: float | None = None

    @property
    def advice(self) -> str:
        """What to do about a finding; empty if nothing is wrong."""
        return ADVICE[self.about] if self.ok is False else ""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the page."""
        mark = {True: "ok", False: "FOUND", None: "-"}[self.ok]
        head = f"  {mark:<6}{self.about:<16}"
        yield from textwrap.wrap(self.found, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
        lead = " " * len(head) + "do: "
        yield from textwrap.wrap(self.advice, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead))


def in_words(numbers: list[int], thing: str = "layer") -> str:
    """Return `layer 3`, `layers 0 to 7` or `layers 0, 2, 5`."""
    if len(numbers) == 1:
        return f"{thing} {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{thing}s {numbers[0]} to {numbers[-1]}"
    return f"{thing}s {', '.join(map(str, numbers))}"


def joined(by_layer: Iterable[tuple[int, Outcome]]) -> Iterator[Outcome]:
    """Yield one outcome for all layers of which the same is said, with the largest number."""
    cases: dict[tuple[str, bool | None, str], dict[int, float]] = {}
    for layer, each in by_layer:
        cases.setdefault((each.about, each.ok, each.found), {})[layer] = each.measured or 0.0
    for (about, ok, found), measured in cases.items():
        yield Outcome(about, ok, f"{in_words(list(measured))}: {found}", max(measured.values()))


@dataclass(frozen=True)
class CheckReport(Result):
    """The results of `check`. `str` gives one page; the report is true if nothing was found.

    Attributes:
        model: class of the model, its model type, dtype and attention implementation.
        outcomes: one or more outcomes per question.
    """

    derived = ("ok",)

    model: str
    outcomes: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing wrong was found. Questions that could not be measured do not count."""
        return not self.findings

    @property
    def findings(self) -> tuple[Outcome, ...]:
        """What is wrong."""
        return tuple(outcome for outcome in self.outcomes if outcome.ok is False)

    @property
    def not_measured(self) -> tuple[Outcome, ...]:
        """The questions that could not be measured, each with the reason in `found`."""
        return tuple(outcome for outcome in self.outcomes if outcome.ok is None)

    def __bool__(self) -> bool:
        """Whether nothing wrong was found."""
        return self.ok

    def __str__(self) -> str:
        """Return one page: the findings first, then what is right, then what was not measured."""
        count = len(self.findings)
        verdict = "nothing found" if self.ok else f"{count} finding{'s' if count > 1 else ''}"
        right = (outcome for outcome in self.outcomes if outcome.ok)
        lines = [line for outcome in (*self.findings, *right) for line in outcome.lines()]
        if self.not_measured:
            lines += ["  not measured:", *(line for outcome in self.not_measured for line in outcome.lines())]
        return "\n".join([f"{self.model}: {verdict}", *lines])

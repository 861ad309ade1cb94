"""Evaluate a patched model in EleutherAI's language model evaluation harness (lm_eval), in process."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..checking.verify import verify
from ..core.errors import HfPosencError
from ..model.patch_record import patch_of


def harness_model(
    model: nn.Module,
    tokenizer: object,
    *,
    max_length: int | None = None,
    **options: object,
) -> Any:
    """Wrap a model in memory for lm_eval, after a check that every layer responds to positions.

    The harness itself would load a checkpoint by name, with classes that ignore the patch.

        from lm_eval import simple_evaluate
        results = simple_evaluate(harness_model(model, tokenizer), tasks=["lambada_openai"])

    The harness also cuts the beginning off a prompt that is longer than `max_length`, and only logs it. In a test of
    long contexts, such as its `ruler` tasks, that removes what the model is asked for. Here it is an error.

    Args:
        model: a patched model on its device, or a stock model for comparison.
        tokenizer: the model's tokenizer.
        max_length: context length in tokens. None means the length in the config. Schemes without a limit that do
            not rotate set it to at least 131072. Then give the trained length for rolling perplexities, which otherwise
            take one window.
        **options: options of `lm_eval.models.huggingface.HFLM`, for instance `batch_size`.

    Returns:
        An `lm_eval.api.model.LM`.

    Raises:
        ImportError: if lm_eval is not installed.
        HfPosencError: if a layer of a patched model does not respond to positions. The message is the report.
        ValueError: if `max_length` is above the scheme's limit, or for `truncation=True`. During an evaluation, if
            a prompt and its answer are longer than `max_length`.
    """
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError:
        raise ImportError("this needs lm_eval: pip install 'lm_eval>=0.4.9,<0.5'") from None
    patch = patch_of(model)
    if patch is not None:
        limit = patch.limit
        if limit is not None and max_length is not None and max_length > limit:
            raise ValueError(f"max_length {max_length} is beyond the {limit} positions of {patch.name}")
        report = verify(model)
        if not report.ok:
            raise HfPosencError(
                f"the model does not pass verify, so results would not be those of its scheme:\n{report}"
            )
    if options.get("truncation"):
        raise ValueError("truncation=True would cut prompts: leave it out")
    device = str(next(model.parameters()).device)
    return _refusing_long_prompts(HFLM)(
        pretrained=model, tokenizer=tokenizer, max_length=max_length, device=device, **options
    )


def _refusing_long_prompts(wrapper: Any) -> Any:
    """Return a class of lm_eval that raises ValueError where the original cuts a prompt."""

    def check(needed: int, max_length: int) -> None:
        if needed > max_length:
            raise ValueError(
                f"a prompt and its answer take {needed} tokens, and the harness would cut the prompt's beginning to "
                f"fit max_length {max_length}: give harness_model(max_length={needed}) or more if the model reads so "
                "far, or shorter prompts (for ruler: max_seq_lengths)"
            )

    class WholePrompts(wrapper):
        """A model whose prompts are never cut."""

        def tok_batch_encode(self, *args: Any, left_truncate_len: int | None = None, **options: Any) -> Any:
            encoded = super().tok_batch_encode(*args, **options)
            if left_truncate_len is not None:  # what is left beside the tokens to generate
                check(encoded[0].shape[1] + self.max_length - left_truncate_len, self.max_length)
            return encoded

        def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **options: Any) -> Any:
            # The last token is only predicted, never read.
            longest = max((len(prompt) + len(answer) - 1 for _, prompt, answer in requests), default=0)
            check(longest, self.max_length)
            return super()._loglikelihood_tokens(requests, *args, **options)

    return WholePrompts

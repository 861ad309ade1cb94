"""Evaluate a patched model in EleutherAI's language model evaluation harness (lm_eval), in process."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import HfPosencError
from ..live.patch_record import patch_of
from ..verification import verify


def harness_model(model: nn.Module, tokenizer: object, *, max_length: int | None = None, **options: object) -> Any:
    """Wrap a model in memory for lm_eval, after a check that every layer responds to positions.

    The harness itself would load a checkpoint by name, with classes that ignore the patch.

        from lm_eval import simple_evaluate
        results = simple_evaluate(harness_model(model, tokenizer), tasks=["lambada_openai"])

    Args:
        model: a patched model on its device, or a stock model for comparison.
        tokenizer: the model's tokenizer.
        max_length: context length in tokens. None means the length in the config, which a scheme without a limit sets
            to at least 131072. Give the trained length for rolling perplexities, which otherwise take one window.
        **options: options of `lm_eval.models.huggingface.HFLM`, for instance `batch_size`.

    Returns:
        An `lm_eval.api.model.LM`.

    Raises:
        ImportError: if lm_eval is not installed.
        HfPosencError: if a layer of a patched model does not respond to positions. The message is the report.
        ValueError: if `max_length` is above the scheme's limit.
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
    device = str(next(model.parameters()).device)
    return HFLM(pretrained=model, tokenizer=tokenizer, max_length=max_length, device=device, **options)

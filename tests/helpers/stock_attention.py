"""A scheme inside the stock model's own eager attention, from the formulas of `cases.py`: no engine of the package runs.

A formula's scores, less those of content alone, enter the stock attention as a float mask, so that scaling, soft cap,
sinks, grouped heads and sizes of values are the stock model's own.
"""

import sys
from contextlib import ExitStack, contextmanager
from unittest import mock

import cases
import torch

SCALE_QUERIES = ("OPTAttention",)
LOWEST = torch.finfo(torch.float32).min


def formula(scheme):
    """Return the slow attention of a scheme on scores."""
    return next(case.attention for case in cases.CASES if case.scheme == scheme)


def pairs(attention, query, key, value, parameters, **keywords):
    """Return what a formula gives each pair of positions, in float64.

    Returns:
        Scores (B, H, T, T), minus infinity where a key is ahead; and what is added to values, (H, T, T, D), or None.
    """
    found = {}

    def collect(query, key, value, score, vector=None, weigh=None):
        heads, length = query.shape[1:3]
        shared_by = heads // key.shape[1]
        scores = query.new_full((query.shape[0], heads, length, length), -torch.inf)
        vectors = value.new_zeros(heads, length, length, value.shape[-1])
        for h in range(heads):
            for i in range(length):
                for j in range(i + 1):
                    scores[:, h, i, j] = score(h, i, j, query[:, h, i], key[:, h // shared_by, j])
                    if vector is not None:
                        vectors[h, i, j] = vector(h, i, j, 0.0)
        found["pairs"] = scores, vectors if vector is not None else None

    with mock.patch.object(cases, "attend", collect):
        attention(query.double(), key.double(), value.double(), parameters, **keywords)
    return found["pairs"]


@contextmanager
def scheme_in(attentions, scheme, hyperparameters, parameters):
    """Let attentions of a stock model compute a scheme on scores; what its mask says is replaced by causality.

    Args:
        attentions: modules whose class has an `eager_attention_forward` beside it.
        scheme: its name in `cases.py`.
        hyperparameters: of the scheme.
        parameters: of a layer's scheme by their names in a checkpoint, as a function of the attention module.
    """

    def instead_of(stock):
        def attend(module, query, key, value, attention_mask, *args, **kwargs):
            root = query.shape[-1] ** 0.5
            scale = kwargs.get("scaling") or 1 / root
            # What has no query in it needs the scale all the same where queries have been multiplied by it before.
            unscaled, scale = (query * root, 1 / root) if type(module).__name__ in SCALE_QUERIES else (query, scale)
            cap, keywords = kwargs.get("softcap"), {"softmax_scale": scale}
            if cap is not None:
                keywords["cap"] = lambda x: cap * torch.tanh(x / cap)
            inputs = unscaled, key, value, parameters(module)
            scores, vectors = pairs(formula(scheme), *inputs, **keywords, **hyperparameters)
            content, _ = pairs(cases.plain, *inputs, **keywords)
            mask = (scores - content).nan_to_num(nan=LOWEST).float()
            output, weights = stock(module, query, key, value, mask, *args, **kwargs)
            if vectors is not None:
                # Weights may or may not have been divided with sinks: what is left for values says so.
                left, _ = stock(module, query, key, torch.ones_like(value), mask, *args, **kwargs)
                shares = weights.double() / weights.double().sum(-1, keepdim=True) * left[..., 0].mT[..., None].double()
                output = output + torch.einsum("bhij,hijd->bihd", shares, vectors).to(output.dtype)
            return output, weights

        return attend

    with ExitStack() as stack:
        for source in {sys.modules[type(module).__module__] for module in attentions}:
            function = instead_of(source.eager_attention_forward)
            stack.enter_context(mock.patch.object(source, "eager_attention_forward", function))
        yield

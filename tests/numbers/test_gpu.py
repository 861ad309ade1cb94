"""On a GPU: whole models against themselves in float64 on the CPU, and what makes the GPU wait.

`HF_POSENC_DEVICE=cpu pytest -m gpu tests/numbers/test_gpu.py` runs the tests themselves where there is none.
"""

import copy
import os
import warnings

import pytest
import torch
from families import tiny, tokens
from situations import randomize

from hf_posenc import patch_model, unpatch_model

DEVICE = os.environ.get("HF_POSENC_DEVICE") or ("cuda" if torch.cuda.is_available() else None)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE is None, reason="there is no CUDA device; HF_POSENC_DEVICE=cpu runs the tests without one"
    ),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("error:FlexAttention on"),
]
SMALL = DEVICE == "cpu"
LONG, SHORT, FLOAT32, BFLOAT16 = 96 if SMALL else 1100, 64 if SMALL else 500, torch.float32, torch.bfloat16
"""From 1,024 queries and keys on, calls go to FlexAttention where a mask would have an entry for every score."""

FORGETTING = ["rope", "forgetting"]
ROWS = [
    ("alibi", {}, LONG, BFLOAT16),
    ("transformer_xl", {}, LONG, BFLOAT16),
    ("t5", {"share_layers": False}, LONG, BFLOAT16),
    ("nope", {"window": 256}, LONG, BFLOAT16),
    ("alibi", {}, SHORT, FLOAT32),
    ("transformer_xl", {}, SHORT, FLOAT32),
    (FORGETTING, {}, SHORT, FLOAT32),
    (FORGETTING, {}, SHORT, BFLOAT16),
    ("alibi", {"trainable": True}, SHORT, BFLOAT16),
    ("t5", {}, SHORT, FLOAT32),
    ("kerple", {}, SHORT, FLOAT32),
    ("shaw", {}, LONG, FLOAT32),
    ("da_transformer", {}, SHORT, FLOAT32),
    ("fire", {}, SHORT, FLOAT32),
    ("cope", {}, SHORT, FLOAT32),
    ("bam", {}, SHORT, BFLOAT16),
    ("far_rope", {"near": 40}, LONG, BFLOAT16),
    (["rope", "qk_norm"], {}, SHORT, BFLOAT16),
]
TOLERANCE = {FLOAT32: 1e-4, BFLOAT16: 5e-2}
"""Of logits, relative. Products of float32 may be computed in TF32. Gradients may be off by six times as much."""


def llama():
    return tiny("llama", hidden_size=256, head_dim=64, num_attention_heads=4, num_key_value_heads=2)


def pair(scheme, hyperparameters, dtype):
    """A patched model on the device, the same in float64 on the CPU, and the latter unpatched."""
    model = randomize(patch_model(llama(), scheme, seed=0, **hyperparameters)).to(dtype)
    expected = copy.deepcopy(model).double()
    return model.to(DEVICE), expected, unpatch_model(copy.deepcopy(expected))


def error(actual, expected):
    return ((actual.double().cpu() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(("scheme", "hyperparameters", "length", "dtype"), ROWS, ids=str)
def test_a_model(scheme, hyperparameters, length, dtype):
    model, expected, stock = pair(scheme, hyperparameters, dtype)
    ids, tolerance = tokens(2, length), TOLERANCE[dtype]
    there = ids.to(DEVICE)
    loss = {}
    for each, batch in ((model, there), (expected, ids)):
        loss[each] = each(batch, labels=batch)
        loss[each].loss.backward()
    found, wanted = loss[model].logits, loss[expected].logits
    assert error(found, wanted) <= tolerance
    with torch.no_grad():
        assert error(stock(ids).logits, wanted) > 2 * tolerance
    gradients = {name: each.grad for name, each in expected.named_parameters()}
    least = max(each.norm() for each in gradients.values()) / 100
    errors = {
        name: ((each.grad.double().cpu() - gradients[name]).norm() / gradients[name].norm().clamp(min=least)).item()
        for name, each in model.named_parameters()
    }
    # Numbers for a whole head are sums with many cancellations, in a dtype of 8 bits.
    allowed = {name: 6 * tolerance * (4 if gradients[name].ndim == 1 else 1) for name in errors}
    assert {name: each for name, each in errors.items() if not each <= allowed[name]} == {}

    with torch.no_grad():
        mask = torch.ones_like(ids)
        mask[0, : length // 9] = 0
        padded = [m(i, attention_mask=k).logits for m, i, k in ((model, there, mask.to(DEVICE)), (expected, ids, mask))]
        assert error(*(each[mask.bool().to(each.device)] for each in padded)) <= tolerance
        places = torch.cat([torch.arange(length // 3), torch.arange(length - length // 3)])[None]
        packed = [
            m(i[:1], position_ids=p, use_cache=False).logits
            for m, i, p in ((model, there, places.to(DEVICE)), (expected, ids, places))
        ]
        assert error(*packed) <= tolerance
        cache, steps = None, []
        for part in (there[:, :-3], *there[:, -3:].split(1, 1)):
            output = model(part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output.logits)
        assert error(torch.cat(steps, 1), wanted) <= tolerance


@pytest.mark.parametrize("scheme", ["alibi", "transformer_xl", "t5"])
def test_a_compiled_model(scheme):
    """In one graph, with gradients."""
    if SMALL and scheme == "t5":
        pytest.skip("on a CPU torch does not compile the backward of FlexAttention")
    model, expected, _ = pair(scheme, {}, FLOAT32)
    ids = tokens(1, LONG)
    compiled = torch.compile(model, fullgraph=True)
    for each, batch in ((compiled, ids.to(DEVICE)), (expected, ids)):
        each(batch, labels=batch, use_cache=False).loss.backward()
    gradients = dict(expected.named_parameters())
    assert max(error(each.grad, gradients[name].grad) for name, each in model.named_parameters()) <= 1e-3


@pytest.mark.skipif(SMALL, reason="a CPU is not waited for")
@pytest.mark.parametrize("scheme", ["alibi", "transformer_xl", FORGETTING, "t5", "shaw", "far_rope"], ids=str)
@torch.no_grad()
def test_nothing_waits_for_the_device(scheme):
    """But for one number in a forward pass: whether position ids are those that the model counts."""
    model, _, _ = pair(scheme, {"near": 40} if scheme == "far_rope" else {}, BFLOAT16)
    ids = tokens(1, LONG).to(DEVICE)
    cache = model(ids, use_cache=True).past_key_values  # constants are copied, kernels are compiled
    model(ids[:, :1], past_key_values=cache)
    waits = {}
    for what, call in (
        ("prompt", lambda: model(ids, use_cache=False)),
        ("token", lambda: model(ids[:, :1], past_key_values=cache)),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits[what] = [f"{each.filename}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)]
    ours = {what: [place for place in places if "hf_posenc" in place] for what, places in waits.items()}
    assert ours["token"] == []
    assert len(ours["prompt"]) <= 1, ours

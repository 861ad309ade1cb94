"""First tokens that a sliding window keeps (`sinks=`).

The reference is attention in float64 with a mask written out pair by pair, from the projections of the layer.
"""

import math

import pytest
import torch
from families import tiny, tokens
from situations import assert_same, randomize
from transformers import StaticCache
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posenc import UnsupportedModelError, is_patched, patch_model, verify
from hf_posenc.engines import chunked, sdpa
from hf_posenc.schemes.nope import Nope
from hf_posenc.schemes.rope import Rope
from hf_posenc.transformers_glue.masks import position_channel

WINDOW, SINKS = 5, 3
SCHEMES = {
    "rope": {},
    "nope": {},
    "alibi": {},
    "t5": {"num_buckets": 8, "max_distance": 16, "share_layers": False},
    "shaw": {"max_distance": 4},
    "cope": {"num_positions": 6},
    "transformer_xl": {},
    "da_transformer": {},
    "fire": {"hidden_size": 4, "threshold": 8.0},
}


def sinking(scheme, family="llama", window=WINDOW, sinks=SINKS, attention="auto"):
    model = tiny(family)
    model.generation_config.eos_token_id = None
    chosen = SCHEMES[scheme] | {"window": window, "sinks": sinks}
    return randomize(patch_model(model, scheme, attention=attention, seed=0, **chosen))


def visible_pairs(documents):
    """Return (T, T) bool: may token i see token j. `documents` has the document of each token, -1 for padding."""
    ranks = [documents[:j].count(document) for j, document in enumerate(documents)]
    i, j = torch.arange(len(documents))[:, None], torch.arange(len(documents))
    document, rank = torch.tensor(documents), torch.tensor(ranks)
    same = (document[:, None] == document) & (document != -1)
    return (j <= i) & same & ((i - j < WINDOW) | (rank < SINKS))


def literal(attention, hidden, places, seen, scheme):
    """Return the attention's output (T, E) from hidden states (T, E), positions (T,) and visible pairs (T, T)."""
    heads, size = attention.config.num_attention_heads, attention.head_dim
    q, k, v = (
        projection(hidden).unflatten(-1, (-1, size)).transpose(0, 1)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    distance = (seen.long().flip(-1).cumsum(-1).flip(-1) - 1).clamp(min=0)  # places in a cache of what is seen
    bias = torch.zeros((), dtype=torch.float64)
    if scheme == "rope":
        angles = torch.outer(places.double(), 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size))
        q, k = (turn(each, angles) for each in (q, k))
    elif scheme == "alibi":
        slopes = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)], dtype=torch.float64)
        bias = -slopes[:, None, None] * distance
    elif scheme == "t5":
        bucket = T5Attention._relative_position_bucket(-distance, False, num_buckets=8, max_distance=16)
        bias = attention.posenc.biases[bucket].movedim(-1, 0)
    k, v = (each.repeat_interleave(heads // len(each), 0) for each in (k, v))
    scores = (q @ k.mT / math.sqrt(size) + bias).masked_fill(~seen, -math.inf)
    return attention.o_proj((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))


def turn(x, angles):
    """Rotate dimension u together with dimension u + D/2, as LLaMA does."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


ROWS = {
    "plain": [[0] * 24],
    "left padding": [[0] * 24, [-1] * 6 + [0] * 18],
    "right padding": [[0] * 24, [0] * 20 + [-1] * 4],
    "packed": [[0] * 4 + [1] * 2 + [2] * 18],
}


# LLaMA computes cosines and sines in float32, whatever the dtype of the model; everything else is float64.
EXACT = {"rope": 1e-6, "nope": 1e-10, "alibi": 1e-10, "t5": 1e-10}
ENGINES = [("rope", "sdpa"), ("rope", "reference"), ("nope", "chunked"), ("alibi", "chunked"), ("t5", "reference")]


@pytest.mark.rows(slow=12)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("scheme", "engine"), ENGINES)
def test_against_attention_with_visibility_written_out(scheme, engine, rows, monkeypatch):
    """Outputs and gradients of one layer, in float64."""
    for module, sizes in ((chunked, ("SCORES",)), (sdpa, ("WHOLE", "PAIRS"))):  # two chunks of queries
        for size in sizes:
            monkeypatch.setattr(module, size, 1)
    model = tiny("llama", num_hidden_layers=1)
    patch_model(model, scheme, attention=engine, seed=0, window=WINDOW, sinks=SINKS, **SCHEMES[scheme])
    randomize(model).double()
    documents = ROWS[rows]
    shape = (len(documents), 24)
    if rows == "packed":
        places = torch.tensor([[*range(4), *range(2), *range(18)]])
        arguments = {"position_ids": places}
    else:
        mask = torch.tensor(documents) >= 0
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        arguments = {"attention_mask": mask.long()} if not mask.all() else {}
    attention, seen = model.model.layers[0].self_attn, {}

    def note(module, args, kwargs, output):
        seen.update(hidden=kwargs["hidden_states"], output=output[0])

    with attention.register_forward_hook(note, with_kwargs=True) as _:
        model(tokens(*shape), use_cache=False, **arguments)
    shown = torch.tensor(documents) >= 0
    expected = torch.stack(
        [
            literal(attention, hidden, place, visible_pairs(row) | torch.eye(24, dtype=torch.bool), scheme)
            for hidden, place, row in zip(seen["hidden"], places.expand(shape), documents, strict=True)
        ]
    )
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    cotangent = cotangent * shown[..., None]
    assert (seen["output"] - expected)[shown].abs().max() < EXACT[scheme]
    found, wanted = (
        torch.autograd.grad((each * cotangent).sum(), [seen["hidden"], *attention.parameters()], retain_graph=True)
        for each in (seen["output"], expected)
    )
    for a, e in zip(found, wanted, strict=True):
        assert (a - e).abs().max() < 10 * EXACT[scheme] * max(1, e.abs().max())


@pytest.mark.rows(default=4)
@pytest.mark.parametrize(
    ("scheme", "family"),
    [*((scheme, "llama") for scheme in ("rope", "nope", "alibi", "t5", "shaw", "cope", "fire")), ("rope", "gpt2")],
)
def test_verify_caches_padding_and_generation(scheme, family):
    model, ids = sinking(scheme, family), tokens(2, 20)
    assert (report := verify(model)).ok, report
    whole = model(ids, use_cache=False).logits
    for cache in (None, StaticCache(model.config, max_cache_len=32)):
        parts = []
        for start, end in ((0, 2), (2, 3), (3, 13), *((n, n + 1) for n in range(13, 20))):
            output = model(ids[:, start:end], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
        assert_same(torch.cat(parts, 1), whole)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    alone = [model.generate(each[None], **options)[0, len(each) :] for each in (ids[0], ids[1, 6:])]
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    for cache in ({}, {"cache_implementation": "static", "disable_compile": True}):
        together = model.generate(ids, attention_mask=mask, **options, **cache)[:, 20:]
        assert together.equal(torch.stack(alone)), cache


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["alibi", "t5", "shaw", "transformer_xl", "da_transformer"])
def test_engines_agree_on_the_distance_of_sinks(scheme):
    ids = tokens(2, 24)
    models = {each: sinking(scheme, attention=each).double() for each in ("reference", "chunked", "decode")}
    whole = models["reference"](ids, use_cache=False).logits
    assert (models["chunked"](ids, use_cache=False).logits - whole).abs().max() < 1e-10
    cache = models["reference"](ids[:, :21]).past_key_values
    assert_same(models["decode"](ids[:, 21:], past_key_values=cache).logits, whole[:, 21:])


@torch.no_grad()
def test_a_window_that_holds_all_tokens_is_no_window():
    """To the last digit: so the same engine computes it. With more tokens only `chunked` can."""
    ids, windowed = tokens(2, 129), sinking("transformer_xl", window=128)
    whole = randomize(patch_model(tiny("llama"), "transformer_xl", seed=0))
    assert windowed(ids[:, :128]).logits.equal(whole(ids[:, :128]).logits)
    assert not windowed(ids).logits.equal(whole(ids).logits)
    of_base = position_channel(1, 128, 128, mask_function=sliding_window_causal_mask_function(128))
    assert of_base.equal(position_channel(1, 128, 128))


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated, and warns of the sizes that it reads
@torch.no_grad()
@pytest.mark.parametrize("scheme", ["alibi", "nope", "window of the base"])
def test_a_trace_of_a_text_within_the_window_keeps_it(scheme):
    model = patch_model(tiny("mistral", sliding_window=WINDOW), "alibi") if " " in scheme else sinking(scheme)
    model, ids = model.requires_grad_(False), tokens(1, 24)
    traced = torch.jit.trace(lambda each: model(each).logits, ids[:, :WINDOW], check_trace=False)
    assert_same(traced(ids), model(ids).logits)


def test_a_users_own_4d_mask_is_refused():
    model = sinking("nope")
    with pytest.raises(ValueError, match="does not say which tokens are the first"):
        model(tokens(1, 6), attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool).tril())


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


@pytest.mark.parametrize(
    ("family", "config", "schemes", "error", "message"),
    [
        ("llama", {}, [Rope(sinks=2)], ValueError, "sinks=2 are first tokens that a window passes: give window="),
        ("llama", {}, [Rope(window=4, sinks=0)], ValueError, "sinks must be at least 1"),
        ("llama", {}, [Rope(window=4, sinks=2.0)], TypeError, "sinks must be an integer"),
        ("mistral", {"sliding_window": 8}, [Rope(window=4, sinks=2)], UnsupportedModelError, "drop the first tokens"),
        ("gemma3", SLIDING, [Nope(window=4, sinks=2)], UnsupportedModelError, "cannot act in layer 0"),
    ],
)
def test_what_cannot_be_is_refused(family, config, schemes, error, message):
    model = tiny(family, **config)
    with pytest.raises(error, match=message):
        patch_model(model, schemes)
    assert not is_patched(model)

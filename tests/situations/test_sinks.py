"""First tokens that a sliding window keeps (`sinks=`), and the cache of constant size that they make possible.

The reference is attention in float64 with a mask written out pair by pair, from the projections of the layer.
"""

import json
import math

import pytest
import torch
from families import tiny, tokens
from situations import assert_same, randomize
from transformers import StaticCache
from transformers.models.t5.modeling_t5 import T5Attention

import hf_posenc
from hf_posenc import EndlessCache, UnsupportedModelError, patch_model, schemes_of, verify, which_engine
from hf_posenc.engines import chunked, sdpa
from hf_posenc.schemes.nope import Nope
from hf_posenc.schemes.rope import Rope
from hf_posenc.schemes.t5 import T5
from hf_posenc.schemes.temperature import Temperature

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


# ------------------------------------------------------------------------------------------------------- the definition


def visible_pairs(documents):
    """Return (T, T) bool: may token i see token j. `documents` has the document of each token, -1 for padding."""
    ranks = [documents[:j].count(document) for j, document in enumerate(documents)]
    return torch.tensor(
        [
            [
                j <= i and documents[i] == documents[j] != -1 and (i - j < WINDOW or ranks[j] < SINKS)
                for j in range(len(documents))
            ]
            for i in range(len(documents))
        ]
    )


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
    weights = [*attention.parameters()]
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
        torch.autograd.grad((each * cotangent).sum(), [seen["hidden"], *weights], retain_graph=True)
        for each in (seen["output"], expected)
    )
    for a, e in zip(found, wanted, strict=True):
        assert (a - e).abs().max() < 10 * EXACT[scheme] * max(1, e.abs().max())


def test_only_the_first_tokens_are_seen_behind_the_window():
    model = patch_model(tiny("llama", num_hidden_layers=1), "alibi", window=WINDOW, sinks=SINKS)
    ids = tokens(1, 14)

    def moved(place):
        changed = ids.clone()
        changed[0, place] = (changed[0, place] + 1) % 97
        return [n for n, d in enumerate((model(changed).logits - model(ids).logits).abs().amax(-1)[0]) if d > 0]

    assert moved(SINKS - 1) == list(range(SINKS - 1, 14))
    assert moved(SINKS) == list(range(SINKS, SINKS + WINDOW))


# ------------------------------------------------------------------------------------------------------------ situations


@pytest.mark.rows(default=4)
@pytest.mark.parametrize(
    ("scheme", "family"),
    [*((scheme, "llama") for scheme in ("rope", "nope", "alibi", "t5", "shaw", "cope", "fire")), ("rope", "gpt2")],
)
def test_verify_caches_padding_and_generation(scheme, family):
    model, ids = sinking(scheme, family), tokens(2, 20)
    report = verify(model)
    assert report.ok, report
    whole = model(ids, use_cache=False).logits
    for cache in (None, StaticCache(model.config, max_cache_len=32), EndlessCache(model)):
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
    for cache in (
        {},
        {"cache_implementation": "static", "disable_compile": True},
        {"past_key_values": EndlessCache(model)},
    ):
        together = model.generate(ids, attention_mask=mask, **options, **cache)[:, 20:]
        assert together.equal(torch.stack(alone)), cache


def test_engines_carry_it_or_say_why_not():
    model = sinking("alibi")
    engines = [which_engine(model, queries, keys=keys) for queries, keys in ((2048, 2048), (1, 4096), (64, 64))]
    assert [each.engine for each in engines] == ["chunked", "decode", "reference"]
    assert "not banded: the first tokens stay visible outside the window" in engines[0].reason


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["alibi", "t5", "shaw", "transformer_xl", "da_transformer"])
def test_engines_agree_on_the_distance_of_sinks(scheme):
    ids = tokens(2, 24)
    models = {each: sinking(scheme, attention=each).double() for each in ("reference", "chunked", "decode")}
    whole = models["reference"](ids, use_cache=False).logits
    assert (models["chunked"](ids, use_cache=False).logits - whole).abs().max() < 1e-10
    cache = models["reference"](ids[:, :21]).past_key_values
    assert_same(models["decode"](ids[:, 21:], past_key_values=cache).logits, whole[:, 21:])


def test_a_checkpoint_keeps_sinks_and_an_older_one_has_none(tmp_path):
    model, ids = sinking("t5"), tokens(2, 20)
    model.save_pretrained(tmp_path)
    loaded = hf_posenc.from_pretrained(tmp_path)
    assert (schemes_of(loaded)[0].window, schemes_of(loaded)[0].sinks) == (WINDOW, SINKS)
    assert "sinks=3" in str(hf_posenc.describe(loaded))
    assert loaded(ids).logits.equal(model(ids).logits)
    file = tmp_path / "config.json"
    written = json.loads(file.read_text())
    del written["hf_posenc_digests"], written["position_encoding"]["schemes"][0]["sinks"]
    file.write_text(json.dumps(written))
    assert schemes_of(hf_posenc.from_pretrained(tmp_path))[0].sinks is None


def test_a_users_own_4d_mask_is_refused():
    model = sinking("nope")
    with pytest.raises(ValueError, match="does not say which these are"):
        model(tokens(1, 6), attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool).tril())


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


@pytest.mark.parametrize(
    ("family", "config", "schemes", "error", "message"),
    [
        ("llama", {}, [Rope(sinks=2)], ValueError, "sinks=2 are first tokens that a window passes: give window="),
        ("llama", {}, [Rope(window=4, sinks=0)], ValueError, "sinks must be at least 1"),
        ("llama", {}, [Rope(window=4, sinks=-1)], ValueError, "sinks must be at least 1"),
        ("llama", {}, [Rope(window=4, sinks=2**31)], ValueError, "below 2147483647"),
        ("llama", {}, [Rope(window=4, sinks=True)], TypeError, "sinks must be a number of tokens"),
        ("llama", {}, [Rope(window=4, sinks=2.0)], TypeError, "sinks must be a number of tokens"),
        ("mistral", {"sliding_window": 8}, [Rope(window=4, sinks=2)], UnsupportedModelError, "drop the first tokens"),
        ("gemma3", SLIDING, [Nope(window=4, sinks=2)], UnsupportedModelError, "cannot act in layer 0"),
        (
            "llama",
            {},
            [Rope(window=4, sinks=2), Temperature("constant", strength=2.0, window=6)],
            ValueError,
            "layer 0 gets a window from two schemes",
        ),
    ],
)
def test_what_cannot_be_is_refused(family, config, schemes, error, message):
    model = tiny(family, **config)
    with pytest.raises(error, match=message):
        patch_model(model, schemes)
    assert not hf_posenc.is_patched(model)


def test_no_stock_class_and_no_gguf_file_has_sinks(tmp_path):
    model = sinking("rope")
    with pytest.raises(UnsupportedModelError, match="no stock class computes"):
        hf_posenc.export_stock(model, tmp_path / "stock")
    with pytest.raises(UnsupportedModelError, match="no sliding window"):
        hf_posenc.export_gguf(model, tmp_path / "model.gguf")


# ---------------------------------------------------------------------------------------------------- the endless cache


@pytest.mark.parametrize("sinks", [None, 1, SINKS])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 40])
def test_an_endless_cache_in_chunks_is_the_whole(chunk, sinks):
    """In float64, with padding of different lengths, one of them longer than the first chunks and the window."""
    model = sinking("rope", sinks=sinks).double()
    ids, mask = tokens(3, 40), torch.ones(3, 40, dtype=torch.long)
    mask[1, :2] = mask[2, :9] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    whole = model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits
    cache, parts = EndlessCache(model), []
    for start in range(0, 40, chunk):
        here = slice(start, min(start + chunk, 40))
        given = {"attention_mask": mask[:, : here.stop], "position_ids": places[:, here]}
        parts.append(model(ids[:, here], past_key_values=cache, **given).logits)
    assert (torch.cat(parts, 1) - whole)[mask.bool()].abs().max() < 1e-10
    assert cache.get_seq_length() == 40
    assert {layer.keys.shape[2] for layer in cache.layers} == {(0 if sinks is None else sinks + 9) + WINDOW - 1}


def test_windows_of_different_layers_share_a_cache():
    model = patch_model(tiny("llama"), [Rope(window=3, sinks=4, layers=[0]), Nope(window=7, sinks=1, layers=[1])])
    ids, cache = tokens(1, 30), EndlessCache(model)
    parts = [model(part, past_key_values=cache).logits for part in ids.split(4, 1)]
    assert_same(torch.cat(parts, 1), model(ids, use_cache=False).logits)
    assert cache.layers[0].keys.shape[2] == 4 + 6


def test_beams_and_a_new_start_with_an_endless_cache():
    model, ids = sinking("t5"), tokens(2, 20)
    options = {"max_new_tokens": 10, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    cache = EndlessCache(model)
    expected = model.generate(ids, attention_mask=mask, **options)
    assert model.generate(ids, attention_mask=mask, past_key_values=cache, **options).equal(expected)
    cache.reset()
    assert_same(model(ids[:, :9], past_key_values=cache).logits, model(ids[:, :9], use_cache=False).logits)


def test_an_endless_cache_is_refused_where_keys_would_be_lost():
    with pytest.raises(UnsupportedModelError, match="2 of 2 layers have no window"):
        EndlessCache(tiny("llama"))
    with pytest.raises(UnsupportedModelError, match="1 of 2 layers have no window"):
        EndlessCache(patch_model(tiny("llama"), [T5(window=4, layers=[1])]))
    with pytest.raises(UnsupportedModelError, match="take DynamicCache"):
        EndlessCache(patch_model(tiny("mistral", sliding_window=8), "rope", window=4))
    narrow, ids = EndlessCache(sinking("rope", window=3)), tokens(1, 8)
    with pytest.raises(ValueError, match="a smaller window or fewer sinks"):
        sinking("rope")(ids, past_key_values=narrow)
    with pytest.raises(ValueError, match="asks for a mask as if it held all"):
        tiny("llama")(ids, past_key_values=narrow)
    model = sinking("rope")
    cache = EndlessCache(model)
    model(ids, past_key_values=cache)
    with pytest.raises(NotImplementedError, match="cannot go back"):
        cache.crop(-1)
    with pytest.raises(ValueError, match=r"pass an attention mask \(1, 9\) of all tokens"):
        model(ids[:, :1], past_key_values=cache, attention_mask=torch.ones(1, 1))
    padded = torch.ones(1, 9, dtype=torch.long)
    padded[0, :2] = 0
    with pytest.raises(ValueError, match="padding that earlier calls"):
        model(ids[:, :1], past_key_values=cache, attention_mask=padded)

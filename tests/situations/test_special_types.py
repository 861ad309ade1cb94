"""What is special about some model types, in the situations in which it could be lost; see `tests/situations/test_every_decoder.py`."""

import copy
import pickle

import pytest
import torch
from decoders import decoder, out
from situations import randomize
from transformers import CONFIG_MAPPING, DynamicCache, StaticCache

import hf_posenc
from hf_posenc import UnsupportedModelError, export_stock, from_pretrained, patch_model, verify
from hf_posenc.analysis.probe import position_vectors
from hf_posenc.core.registry import family_for, supported_model_types
from hf_posenc.families.refused import missing_release
from hf_posenc.model.base_model import BaseModel
from hf_posenc.schemes.alibi import Alibi
from hf_posenc.schemes.gated import Gated
from hf_posenc.schemes.inkling import Inkling
from hf_posenc.schemes.learned import Learned
from hf_posenc.schemes.nope import Nope
from hf_posenc.schemes.rope import Rope
from hf_posenc.schemes.sinusoidal import Sinusoidal
from hf_posenc.schemes.softpick import Softpick

LENGTH = 20
EXACT = 2e-4  # relative norm of a difference in float32: two ways of adding up the same numbers


def tokens():
    return torch.arange(3, 3 + LENGTH)[None]


@torch.no_grad()
def logits(model, **arguments):
    return out(model(tokens(), use_cache=False, **arguments))


def relative(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


SEVERAL = ("qwen2_vl_text", "qwen3_5_text", "qwen3_vl_text", "glm4v_text", "hunyuan_vl_text", "ernie4_5_vl_moe_text")
"""Types that take several coordinates, each in its own way: by sections, interleaved in a part of the head or in all of
it, by sections of neighbouring dimensions, by sections of both halves, by height and width in turn."""
MROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}


def sectioned(model_type, number, parameters=None, **config):
    """Return a model that divides its pairs among coordinates in one of two ways."""
    sections, size = [[1, 2, 1], [3, 1, 0]], 8
    if model_type == "ernie4_5_vl_moe_text":  # height and width have as many, and come before the time
        sections, size = [[3, 3, 2], [1, 1, 6]], 16
    divided = {"mrope_section": sections[number]}
    return decoder(model_type, rope_parameters=MROPE | divided | (parameters or {}), head_dim=size, **config)


def coordinates(*, alike, axes, step=1):
    """Return positions (axes, 1, T); the first of four axes is that of the text."""
    time = torch.arange(LENGTH) * step
    seen = [time, time, time] if alike else [time, time // 2, time % 5]
    return torch.stack([time, *seen][-axes:])[:, None]


@pytest.mark.rows(default=2, slow=9)
@pytest.mark.parametrize("model_type", SEVERAL)
@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize(
    "scheme", [Alibi(), Learned(num_positions=64), Alibi(layers=[1]), Rope(layers=[1], rope_theta=9)]
)
def test_several_coordinates_are_refused_where_one_number_counts(model_type, scheme, axes):
    """And where they are all alike, they are that number, gaps included."""
    kinds = {"layer_types": ["full_attention", "full_attention"]} if model_type == "qwen3_5_text" else {}
    model = patch_model(sectioned(model_type, 0, **kinds), scheme, seed=0)
    for step in (1, 3):
        alike = coordinates(alike=True, axes=axes, step=step)
        assert logits(model, position_ids=alike).equal(logits(model, position_ids=alike[0]))
    with pytest.raises(ValueError, match="several coordinates"):
        logits(model, position_ids=coordinates(alike=False, axes=axes))


@pytest.mark.rows(default=1, slow=7)
@pytest.mark.parametrize("model_type", SEVERAL)
@pytest.mark.parametrize("axes", [3, 4])
def test_several_coordinates_turn_what_the_base_turns(model_type, axes, tmp_path):
    """A rotation of the whole model keeps how the base divides the pairs, also in a checkpoint and exported."""
    given = coordinates(alike=False, axes=axes)
    if model_type == "hunyuan_vl_text":  # whose decoder takes none of the text
        given = given[-3:]
    expected, other = (
        logits(sectioned(model_type, number, {"rope_theta": 50.0}), position_ids=given) for number in (0, 1)
    )
    assert relative(other, expected) > 1e-2
    for number, wanted in enumerate((expected, other)):
        model = patch_model(sectioned(model_type, number), "rope", rope_theta=50.0)
        assert logits(model, position_ids=given).equal(wanted)
        model.save_pretrained(tmp_path / f"{number}")
        assert logits(from_pretrained(tmp_path / f"{number}"), position_ids=given).equal(wanted)
    if model_type == "ernie4_5_vl_moe_text":  # which no scaling is made for
        return
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    stock = sectioned(model_type, 0, scaled)
    before = logits(stock, position_ids=given)
    assert logits(patch_model(stock, "rope"), position_ids=given).equal(before)


TEMPERED = ("ministral3", "mistral4")
MIXTURES = {
    "beside a rotation": [Alibi(layers=[0]), Rope(layers=[1], rope_theta=10.0)],
    "beside the base's own": [Alibi(layers=[0])],
    "the last": [Nope(layers=[1])],
    "vectors": [Sinusoidal(placement="every_layer", layers=[0])],
}


@pytest.mark.rows(default=0, slow=5)
@torch.no_grad()
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("model_type", TEMPERED)
def test_a_temperature_goes_with_the_rotation_of_a_layer(model_type, mixture, tmp_path):
    """Queries of layers that rotate go on growing with the position, those of the others do not."""
    schemes = MIXTURES[mixture]
    silent = schemes[0].layers[0]
    stock = decoder(model_type)
    before, ids = logits(stock), tokens()
    own = stock.config.rope_parameters
    expected = patch_model(decoder(model_type, rope_parameters=own | {"llama_4_scaling_beta": 0.0}), schemes)
    for layer, decoder_layer in enumerate(expected.model.layers):  # from outside: another config of that layer alone
        if layer != silent:
            decoder_layer.self_attn.config = copy.deepcopy(expected.config)
            decoder_layer.self_attn.config.rope_parameters = own
    wrong = logits(patch_model(decoder(model_type, rope_parameters=own | {"llama_4_scaling_beta": 0.0}), schemes))
    wanted = logits(expected)
    assert relative(wrong, wanted) > 1e-3
    model = patch_model(stock, schemes)
    assert logits(model).equal(wanted)
    assert verify(model).ok
    first = model(ids[:, :12], use_cache=True)
    rest = model(ids[:, 12:], past_key_values=first.past_key_values, use_cache=True).logits
    assert relative(torch.cat([first.logits, rest], 1), wanted) <= EXACT
    assert logits(copy.deepcopy(model)).equal(wanted)
    assert logits(pickle.loads(pickle.dumps(model))).equal(wanted)
    assert (
        relative(torch.compile(model, fullgraph=model_type == "ministral3", backend="eager")(ids).logits, wanted)
        <= EXACT
    )
    model.save_pretrained(tmp_path)
    assert logits(from_pretrained(tmp_path)).equal(wanted)
    hf_posenc.unpatch_model(model)
    assert logits(model).equal(before)


@pytest.mark.parametrize("model_type", ["phi", "persimmon", "stablelm"])
def test_p_rope_where_attention_slices_by_its_own_number(model_type, tmp_path):
    """What is loaded computes what was saved; the stock class, which would take fewer dimensions, is refused."""
    model = patch_model(
        decoder(model_type), "rope", scaling={"rope_type": "proportional"}, partial_rotary_factor=0.75, rope_theta=50.0
    )
    expected = logits(model)
    model.save_pretrained(tmp_path / "patched")
    assert logits(from_pretrained(tmp_path / "patched")).equal(expected)
    with pytest.raises(hf_posenc.UnsupportedModelError, match="no stock class computes rope"):
        export_stock(model, tmp_path / "stock")


@pytest.mark.rows(slow=4)
@torch.no_grad()
@pytest.mark.parametrize("scheme", [Alibi(), Sinusoidal(placement="every_layer")])
@pytest.mark.parametrize("model_type", ["ministral3", "persimmon", "qwen2_vl_text"])
def test_a_cropped_cache_is_counted_anew(model_type, scheme):
    """Speculation crops a cache. We count for the layers whose decoder keeps position ids to itself: from what is left."""
    model = patch_model(decoder(model_type), scheme)
    cache = DynamicCache(config=model.config)
    model(tokens(), past_key_values=cache)
    cache.crop(12 - LENGTH)
    assert relative(out(model(tokens()[:, 12:], past_key_values=cache)), logits(model)[:, 12:]) <= EXACT


@pytest.mark.rows(default=1, slow=4)
@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scheme", [Alibi(), Alibi(layers=[0]), Alibi(window=5)])
def test_chunks_of_attention_with_a_static_cache(scheme, compiled):
    """Queries see keys of their own chunk only, also where a compiled step cannot look into the mask's closure."""
    model = patch_model(decoder("llama4_text", attention_chunk_size=8), scheme)
    expected, ids, positions = logits(model), tokens(), torch.arange(LENGTH)[None]
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 4)
    found = [model(ids[:, :6], position_ids=positions[:, :6], past_key_values=cache).logits]
    step = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    for n in range(6, LENGTH):
        here = slice(n, n + 1)
        found.append(step(ids[:, here], position_ids=positions[:, here], past_key_values=cache).logits)
    assert relative(torch.cat(found, 1), expected) <= EXACT


def own_mask(*, kind, window=None):
    """Return a mask of the user's own, (1, 1, T, T): key 2 hidden from later tokens, and perhaps beyond a window.

    A float mask adds something to the scores, too.
    """
    lag = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None]
    seen = (lag >= 0) & ((torch.arange(LENGTH) != 2)[None] | (lag == 0))
    if window is not None:
        seen &= lag < window
    if kind == "bool":
        return seen[None, None]
    added = torch.randn(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0))
    return added.masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


@pytest.mark.rows(slow=9)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("scheme", [Alibi, Nope, Rope])
@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "deepseek_v3", "cohere2"])
def test_a_window_under_a_mask_of_ones_own(model_type, scheme, kind):
    """The window of the scheme hides what the same window in the mask hides."""
    windowed = patch_model(decoder(model_type), scheme(window=5))
    wide = patch_model(decoder(model_type), scheme(window=LENGTH))  # the same attention function, and nothing hidden
    found = logits(windowed, attention_mask=own_mask(kind=kind))
    assert relative(found, logits(wide, attention_mask=own_mask(kind=kind, window=5))) <= EXACT
    assert relative(found, logits(wide, attention_mask=own_mask(kind=kind))) > 1e-2


SCALED = {
    "gemma": {}, "gemma2": {}, "gemma3_text": {}, "granite": {"embedding_multiplier": 12.0}, "nanochat": {},
    "minicpm3": {"scale_emb": 12.0}, "falcon_h1": {"embedding_multiplier": 5.0}, "llama": {},
}  # fmt: skip
"""Types that scale or normalise their token embeddings on the way to the first layer, and how much; LLaMA does not."""


@torch.no_grad()
@pytest.mark.parametrize("model_type", SCALED)
def test_the_size_of_what_enters_the_first_layer(model_type):
    """Seen from outside, by a hook: vectors that are added start at that size, measured over the whole vocabulary."""
    model = decoder(model_type, **SCALED[model_type])
    entering = []
    layer = model.model.layers[0]
    handle = layer.register_forward_pre_hook(
        lambda module, args, kwargs: entering.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    model(torch.arange(model.config.vocab_size)[None], use_cache=False)
    handle.remove()
    wanted = entering[0].double().square().mean().sqrt().item()
    table = model.get_input_embeddings().weight.double().square().mean().sqrt().item()
    assert (abs(wanted / table - 1) > 0.5) == (model_type != "llama")
    assert BaseModel.of(model).native.token_rms() == pytest.approx(wanted, rel=1e-5)
    vectors = position_vectors(patch_model(model, "sinusoidal"), 64)
    assert vectors.square().mean().sqrt().item() == pytest.approx(wanted, rel=1e-3)


SECTIONED = ("glm4v_moe_text", "glm4v_text", "glm_image_text", "glm_ocr_text")
"""Types that turn a part of each head, whose pairs the sections of time, height and width add up to."""


@pytest.mark.parametrize("model_type", [t for t in SECTIONED if t in CONFIG_MAPPING])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_share_that_does_not_fit_the_sections_is_refused(model_type, share):
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor other than its own"):
        patch_model(decoder(model_type), "rope", partial_rotary_factor=share)


@pytest.mark.skipif("molmo2_text" not in CONFIG_MAPPING, reason="an older release lacks it")
def test_a_second_rotary_module_in_use_is_refused():
    with pytest.raises(UnsupportedModelError, match="a rotary module of their own"):
        patch_model(decoder("molmo2_text", rope_scaling_layers=[1]), "alibi")


def can_share(model_type):
    """Return whether a type rotates, and not by coordinates that divide the pairs by sections or in whole heads.

    Nor do all layers of lfm3 have one share: those of the type `proportional` keep it as frequencies of 0. Heads of two
    sizes (Gemma 4) are turned whole.
    """
    facts = family_for(model_type).rotation
    whole = facts.parameter_coordinates is None or facts.slices_rotary
    two_sizes = "gemma4_text", "gemma4_unified_text"
    return facts.rotary is not None and whole and model_type not in (*SECTIONED, *two_sizes, "lfm3")


TURNED = [t for t in supported_model_types() if t in CONFIG_MAPPING and can_share(t)]


@pytest.mark.rows(default=4, slow=40)
@pytest.mark.parametrize("model_type", TURNED)
def test_a_share_of_each_head_is_a_share(model_type):
    """No type's own module of angles reads the share from somewhere else, or not at all."""
    half, whole = (
        logits(patch_model(decoder(model_type), "rope", partial_rotary_factor=share, rope_theta=10.0, scaling="none"))
        for share in (0.5, 1.0)
    )
    assert relative(half, whole) > 1e-4


BORROWING = [t for t in ("gemma3n_text", "gemma4_text", "gemma4_unified_text") if t in CONFIG_MAPPING]
"""Types whose last layers borrow keys and values: in tiny models, layers 2 and 3 those of layers 0 and 1."""


@torch.no_grad()
@pytest.mark.parametrize(
    ("scheme", "cache"),
    [
        (Alibi(), "static"),
        (Nope(), "dynamic"),
        (Rope(rope_theta=50.0), "static"),
        (Learned(num_positions=64, placement="every_layer"), "dynamic"),
    ],
)
@pytest.mark.rows(default=3, slow=8)
@pytest.mark.parametrize("model_type", BORROWING)
def test_generation_with_borrowed_keys(model_type, scheme, cache):
    """Some decoders drop most tokens before the layers that borrow; the window is crossed, and a row is padded."""
    model = decoder(model_type, sliding_window=5)
    own = dict(model.model.__dict__)
    randomize(patch_model(model, scheme, seed=0))
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12], [0, 0, 0, 8, 9, 10, 11, 12]])
    given = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    found = model.generate(
        ids,
        attention_mask=ids.clamp(max=1),
        cache_implementation=cache,
        output_logits=True,
        return_dict_in_generate=True,
        **given,
    )
    mask = torch.cat([ids.clamp(max=1), torch.ones(2, 6, dtype=torch.long)], 1)
    whole = model(
        found.sequences, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), use_cache=False
    )
    assert relative(torch.stack(found.logits, 1), whole.logits[:, 7:-1]) <= EXACT
    hf_posenc.unpatch_model(model)
    assert {name: value for name, value in model.model.__dict__.items() if not name.startswith("_")} == {
        name: value for name, value in own.items() if not name.startswith("_")
    }


@pytest.mark.rows(default=2)
@torch.no_grad()
@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
@pytest.mark.parametrize("model_type", BORROWING)
def test_layers_that_lend_and_borrow_beside_others(model_type, kind):
    """Against the stock model: without rotation in these layers, by hooks, and with another one, by its config."""

    def still(attention, args, kwargs):
        cos, sin = kwargs["position_embeddings"]
        return args, {**kwargs, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}

    stock = decoder(model_type)
    own = copy.deepcopy(stock.config.rope_parameters)
    own[kind]["rope_theta"] = 50.0
    for layer in stock.model.layers:
        if layer.self_attn.layer_type == kind:
            layer.self_attn.register_forward_pre_hook(still, with_kwargs=True)
    turned = decoder(model_type, rope_parameters=own)
    assert relative(logits(stock), logits(turned)) > 1e-3
    for scheme, expected in ((Nope(layers=kind), stock), (Rope(layers=kind, rope_theta=50.0), turned)):
        model = patch_model(decoder(model_type), scheme)
        assert relative(logits(model), logits(expected)) <= EXACT
        assert verify(model).ok


@pytest.mark.parametrize(
    "schemes",
    [
        Alibi(layers=[2]),
        Alibi(layers=[0, 1, 3]),
        Nope(layers=[1]),
        Rope(layers=[3], rope_theta=50.0),
        [Rope(layers=[0], rope_theta=50.0), Alibi(layers=[2])],
    ],
)
@pytest.mark.rows(default=2, slow=6)
@pytest.mark.parametrize("model_type", BORROWING)
def test_queries_that_would_not_fit_borrowed_keys(model_type, schemes):
    model = decoder(model_type)
    before = logits(model)
    with pytest.raises(
        hf_posenc.UnsupportedModelError, match=r"takes its keys from layer [01], which would be rotated"
    ):
        patch_model(model, schemes)
    assert logits(model).equal(before)
    for fitting in ([Alibi(layers=[0, 1]), Nope(layers=[2, 3])], Rope(layers=[3])):  # the latter is the base's own
        assert verify(patch_model(decoder(model_type), fitting)).ok


@pytest.mark.parametrize("model_type", BORROWING[1:])
def test_a_share_of_heads_of_two_sizes_is_refused(model_type):
    with pytest.raises(ValueError, match="turns whole heads, so partial_rotary_factor is one for all layers"):
        patch_model(decoder(model_type), "rope", partial_rotary_factor=0.5, scaling="none")


@pytest.mark.parametrize("model_type", [t for t in ("granite_swa", "granitemoe_swa") if t in CONFIG_MAPPING])
def test_a_base_of_frequencies_for_each_layer(model_type, tmp_path):
    """Against the stock model, whose config can say the same: 0 leaves a layer unrotated."""

    def stock(*thetas):
        return decoder(model_type, layer_rope_theta=list(thetas))

    for scheme, before, after in (
        (Nope(layers=[0]), (10.0, 500.0), (0, 500.0)),
        (Nope(), (10.0, 500.0), (0, 0)),
        (Rope(layers=[0], rope_theta=50.0), (10.0, 10.0), (50.0, 10.0)),
        (Rope(rope_theta=50.0), (0, 10.0), (0, 50.0)),
        (Rope(), (10.0, 0), (10.0, 0)),
    ):
        expected = logits(stock(*after))
        assert before == after or relative(logits(stock(*before)), expected) > 1e-3
        model = patch_model(stock(*before), scheme)
        assert relative(logits(model), expected) <= EXACT
        assert verify(model).ok
        model.save_pretrained(tmp_path)
        assert logits(from_pretrained(tmp_path)).equal(logits(model))
    for scheme, thetas, message in (
        (Rope(rope_theta=50.0), (10.0, 500.0), "2 bases of frequencies"),
        (Rope(), (0, 0), "0 bases of frequencies"),
        (Rope(layers=[1]), (10.0, 0), "unrotated in its own code"),
    ):
        with pytest.raises(hf_posenc.UnsupportedModelError, match=message):
            patch_model(stock(*thetas), scheme)


INKLINGS = [t for t in ("inkling_text", "inkling2_text") if t in CONFIG_MAPPING and missing_release(t) is None]
"""Types whose positions are a bias on scores, beside a factor on the queries of layers without a window."""
STEADY = {"inkling_text": {"log_scaling_n_floor": None}, "inkling2_text": {"log_scaling_alpha": 0.0}}


def without_bias(model, layers=(0, 1)):
    """Return a copy of a stock model whose layers have a bias of zeros."""
    model = copy.deepcopy(model)
    for layer in layers:
        torch.nn.init.zeros_(model.model.layers[layer].self_attn.rel_logits_proj.proj)
    return model


@pytest.mark.parametrize("layers", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("model_type", INKLINGS)
def test_a_bias_of_the_base_is_left_out_where_it_is_replaced(model_type, layers):
    """With `nope`, by the stock attention and by ours, whose other layers keep the bias."""
    stock = decoder(model_type, **STEADY[model_type])
    expected = logits(without_bias(stock, layers))
    assert relative(expected, logits(stock)) > 0.01
    others = [layer for layer in (0, 1) if layer not in layers]
    mixed = [Nope(layers=layers), *([Gated(layers=others)] if others else [])]
    for schemes in (mixed[:1], mixed, [Nope(layers=layers), Gated()]):
        model = patch_model(copy.deepcopy(stock), schemes)
        assert relative(logits(model), expected) <= EXACT
        assert verify(model).ok


@pytest.mark.parametrize("model_type", INKLINGS)
def test_a_factor_of_the_base_goes_with_its_bias(model_type):
    stock = decoder(model_type)
    steady = decoder(model_type, **STEADY[model_type])
    assert relative(logits(stock), logits(steady)) > 0.005
    model = patch_model(copy.deepcopy(stock), "nope")
    assert relative(logits(model), logits(without_bias(steady))) <= EXACT
    with pytest.raises(UnsupportedModelError, match="itself multiplies the queries of layer 1"):
        patch_model(copy.deepcopy(stock), "temperature")
    model = patch_model(copy.deepcopy(stock), "temperature", layers=[0], length=4)
    assert verify(model).ok
    with pytest.raises(UnsupportedModelError, match="rotates nothing, and no rotation can be put"):
        patch_model(copy.deepcopy(stock), "rope")
    with pytest.raises(UnsupportedModelError, match=r"no stock class computes alibi|its attention has other parts"):
        export_stock(patch_model(stock, "alibi"), "nowhere", length=64)


@pytest.mark.parametrize("engine", ["auto", "reference", "chunked"])
@pytest.mark.parametrize("model_type", INKLINGS)
def test_a_bias_of_the_base_is_kept_beside_a_scheme_that_starts_neutral(model_type, engine):
    """In one run, and in steps with a cache that loses tokens behind a window."""
    stock = decoder(model_type, sliding_window_size=8)
    model = patch_model(copy.deepcopy(stock), Softpick() if engine == "auto" else Gated(), attention=engine)
    if engine == "auto":  # which is no softmax: compared with itself
        stock = model
    expected = logits(stock)
    assert relative(logits(model), expected) <= EXACT
    with torch.no_grad():
        found = model(tokens()[:, :12], use_cache=True)
        steps = [found.logits]
        for n in range(12, LENGTH):
            found = model(tokens()[:, n : n + 1], past_key_values=found.past_key_values, use_cache=True)
            steps.append(found.logits)
    assert relative(torch.cat(steps, 1), expected) <= EXACT


@pytest.mark.skipif("inkling_text" not in INKLINGS, reason="an older release lacks it")
@pytest.mark.parametrize("kinds", [["hybrid", "hybrid"], ["hybrid_sliding", "hybrid"]])
def test_the_scheme_that_is_the_bias_of_inkling(kinds):
    """Outputs and gradients, with the weights of the stock model, in layers without a factor on queries."""
    stock = decoder("inkling_text", layer_types=kinds, log_scaling_n_floor=None, mlp_layer_types=["dense"] * 2).double()
    window = stock.config.sliding_window_size
    extents = [window if kind == "hybrid_sliding" else stock.config.rel_extent for kind in kinds]
    schemes = [Inkling(rank=stock.config.d_rel, extent=extent, layers=[n]) for n, extent in enumerate(extents)]
    model = patch_model(copy.deepcopy(stock), [Nope(), *schemes])
    pairs = []
    for ours, theirs in zip(model.model.layers, stock.model.layers, strict=True):
        own, base = ours.self_attn.posenc, theirs.self_attn
        for parameter, weight in ((own.queries.weight, base.r_proj.weight), (own.profiles, base.rel_logits_proj.proj)):
            parameter.data.copy_(weight.data)
            pairs.append((parameter, weight))
        pairs.append((ours.self_attn.k_proj.weight, base.k_proj.weight))
    outputs = [each(tokens(), use_cache=False).logits for each in (model, stock)]
    assert relative(*outputs) <= 1e-6
    for output in outputs:
        output.square().sum().backward()
    for parameter, weight in pairs:
        assert relative(parameter.grad, weight.grad) <= 1e-6


OWN_BIAS = [Inkling(rank=4, extent=32, layers=[0]), Inkling(rank=4, extent=12, layers=[1])]
"""Of the rank and the extents that the layers of `decoder("inkling_text")` have."""


@pytest.mark.skipif("inkling_text" not in INKLINGS, reason="an older release lacks it")
@pytest.mark.parametrize(
    ("schemes", "floor"),
    [([Nope()], None), ([Nope(), *OWN_BIAS], None), ([Nope(layers=[0]), OWN_BIAS[0]], 4), ([Nope(layers=[1])], None)],
)
def test_what_has_the_bias_of_the_base_is_exported(schemes, floor, tmp_path):
    """A stock model has one setting for the factor on queries: it stays where no layer of that kind is replaced."""
    model = randomize(patch_model(decoder("inkling_text"), schemes))
    export_stock(model, tmp_path)
    exported = CONFIG_MAPPING["inkling_text"].from_pretrained(tmp_path)
    assert exported.log_scaling_n_floor == floor
    stock = type(decoder("inkling_text")).from_pretrained(tmp_path)
    assert relative(logits(stock), logits(model)) <= EXACT


@pytest.mark.skipif("inkling_text" not in INKLINGS, reason="an older release lacks it")
@pytest.mark.parametrize(
    "schemes", [OWN_BIAS, [Nope(), Inkling(rank=4, extent=12)], [Nope(), Gated()], [Nope(window=5)]]
)
def test_what_has_another_bias_is_not_exported(schemes, tmp_path):
    """Two biases in a layer, another extent, a scheme beside, a window."""
    with pytest.raises(UnsupportedModelError, match="no stock class computes"):
        export_stock(patch_model(decoder("inkling_text"), schemes), tmp_path)

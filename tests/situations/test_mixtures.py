"""Schemes in some of a model's layers, several in one model, and sliding windows: computed, moved, saved and undone.

The reference runs the layers of the stock model one by one, by transformers' own eager attention, with masks and
rotations written out here.
"""

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import tiny, tokens
from matrix import matrix
from situations import assert_same, distance, randomize
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

import hf_posenc
from hf_posenc import UnsupportedModelError, patch_model, schemes_of, unpatch_model, verify
from hf_posenc.schemes.alibi import Alibi
from hf_posenc.schemes.forgetting import Forgetting
from hf_posenc.schemes.kerple import Kerple
from hf_posenc.schemes.learned import Learned
from hf_posenc.schemes.nope import Nope
from hf_posenc.schemes.qk_norm import QKNorm
from hf_posenc.schemes.rope import Rope
from hf_posenc.schemes.shaw import Shaw
from hf_posenc.schemes.sinusoidal import Sinusoidal
from hf_posenc.schemes.t5 import T5
from hf_posenc.schemes.temperature import Temperature

LAYERS = 4

MIXTURES = {
    "nope-every-4th": lambda: [Nope(layers="3::4")],
    "alibi-half": lambda: [Alibi(layers="0::2")],
    "alibi-and-nope": lambda: [Alibi(layers="0::2"), Nope(layers="1::2")],
    "rope-and-alibi": lambda: [Rope(rope_theta=50.0, layers=[0, 3]), Alibi(layers=[1])],
    "two-ropes": lambda: [Rope(rope_theta=50.0, layers=[0]), Rope(rope_theta=900.0, layers=[1, 2, 3])],
    "two-alibis": lambda: [Alibi(layers=[0, 1]), Alibi(slopes=(0.5, 0.1, 0.0, 1.0), layers=[3])],
    "two-that-share": lambda: [
        Shaw(max_distance=3, share_layers=True, layers=[0, 1]),
        Kerple(layers=[2, 3]),
    ],
    "hidden-and-scores": lambda: [
        Sinusoidal(placement="every_layer", scale=0.5, layers=[1, 2]),
        T5(num_buckets=8, max_distance=16, layers=[0, 3]),
    ],
    "learned-in-two": lambda: [Learned(num_positions=64, placement="every_layer", share_layers=False, layers=[0, 2])],
    "windows": lambda: [Nope(window=5, layers=[0]), Rope(rope_theta=70.0, window=7, layers=[1]), Alibi(layers=[2])],
    "a-window-alone": lambda: [Rope(window=6)],
    "rope-and-temperature": lambda: [Rope(rope_theta=50.0), Temperature("log_n", length=3, trainable=True)],
    "nope-with-temperature": lambda: [
        Nope(layers="3::4"),
        Rope(rope_theta=70.0, layers="rest"),
        Temperature("llama4", length=3, strength=0.7, layers="3::4"),
    ],
    "alibi-and-temperature": lambda: [Alibi(), Temperature("scalable", length=30, share_layers=True)],
    "temperature-alone": lambda: [Temperature("constant", strength=1.4, layers="1::2")],
    "two-temperatures": lambda: [
        T5(num_buckets=8, max_distance=16, window=7),
        Temperature("log_n", length=2, layers=[0]),
        Temperature("constant", strength=0.5, layers=[2, 3]),
    ],
    "norms-and-temperature": lambda: [
        Nope(layers="1::2"),
        Temperature("log_n", length=3),
        QKNorm(layers=[0, 1]),
        QKNorm(over="all_heads", layers=[3]),
    ],
    "rope-and-forgetting": lambda: [Rope(rope_theta=50.0), Forgetting(layers="1::2")],
    "nope-with-two-additions": lambda: [Nope(window=7), Forgetting(), Temperature("log_n", length=3)],
    "forgetting-alone": lambda: [Forgetting(bias=2.0)],
}
FAMILIES = ("gpt2", "opt", "llama", "gpt_neox", "gemma3", "phi", "smollm3")
NOTHING_TO_DO = {
    ("nope-every-4th", "gpt2"),
    ("nope-every-4th", "opt"),
    ("norms-and-temperature", "gpt2"),
    ("norms-and-temperature", "opt"),
    ("norms-and-temperature", "gemma3"),  # which norms itself
}


# What a family lists by layer; and for GPT-NeoX more than the one pair that a quarter of 8 dimensions is.
BY_LAYER = {
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1]},
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
}


def base(family):
    return tiny(family, num_hidden_layers=LAYERS, **BY_LAYER.get(family, {}))


def mixed(family, name):
    model = base(family)
    model.generation_config.eos_token_id = None
    return randomize(patch_model(model, MIXTURES[name](), seed=0))


PAIRS = [
    (family, name) for family, name in itertools.product(FAMILIES, MIXTURES) if (name, family) not in NOTHING_TO_DO
]
over_some_pairs = matrix(PAIRS, family=None, name=None)


def layers_of(model):
    decoder = model.base_model
    for name in ("decoder", "h", "layers"):
        decoder = getattr(decoder, name, decoder)
    return list(decoder)


def attention_of(layer):
    return next(getattr(layer, name) for name in ("attn", "self_attn", "attention") if hasattr(layer, name))


@torch.no_grad()
def through(model, ids, index, hidden=None):
    """Run a model and return what entered and left one layer; with `hidden`, that is what enters it."""
    seen = {}

    def enter(module, args, kwargs):
        given = args[0] if args else kwargs["hidden_states"]
        seen["in"] = given if hidden is None else hidden
        if args:
            return (seen["in"], *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": seen["in"]}

    def leave(module, args, output):
        seen["out"] = output[0] if isinstance(output, tuple) else output

    layer = layers_of(model)[index]
    handles = [
        layer.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
        layer.register_forward_hook(leave),
    ]
    try:
        model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen["in"], seen["out"]


@pytest.mark.rows(default=8, slow=28)
@over_some_pairs
def test_each_layer_is_that_of_a_model_with_one_scheme(family, name):
    """A layer that has a scheme computes what it does where all have it; a layer that nobody names is the base's own."""
    ids, mixture = tokens(2, 20), mixed(family, name)
    of_layer = {}
    for scheme in schemes_of(mixture):
        for index in range(LAYERS) if scheme.layers is None else scheme.layers:
            of_layer.setdefault(index, []).append(scheme)
    for index in range(LAYERS):
        entering, leaving = through(mixture, ids, index)
        alike = base(family)
        stock = through(alike, ids, index, entering)[1]
        if index in of_layer:
            patch_model(alike, [replace(scheme, layers=None) for scheme in of_layer[index]], seed=0)
            ours, theirs = layers_of(mixture)[index], layers_of(alike)[index]
            for one, other in ((ours, theirs), (attention_of(ours), attention_of(theirs))):
                for child in {"posenc", "posenc_additions"} & set(one._modules):
                    setattr(other, child, one._modules[child])
            if hasattr(attention_of(theirs), "use_rope"):  # a layer that is named is turned, though the base may not
                attention_of(theirs).use_rope = attention_of(ours).use_rope
            expected = through(alike, ids, index, entering)[1]
        else:
            expected = stock
        torch.testing.assert_close(leaving, expected, atol=1e-4, rtol=1e-4)
        turned = family not in ("gpt2", "opt") and not (family == "smollm3" and index == 1)
        if index in of_layer and (turned or [scheme.name for scheme in of_layer[index]] != ["nope"]):
            assert distance(leaving, stock) > 1e-3, "the stock layer computes the same"


@pytest.mark.parametrize("layers", ["3::4", [3], [-1]])
def test_nope_in_every_fourth_layer_of_a_llama_is_smollm3(layers):
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.2, "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "tie_word_embeddings": False,
        "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    smollm3 = SmolLM3ForCausalLM(SmolLM3Config(**sizes, use_sliding_window=False)).eval()
    assert smollm3.config.no_rope_layers == [1, 1, 1, 0]
    smollm3.load_state_dict(llama.state_dict())
    ids = tokens(2, 30)
    assert distance(llama(ids).logits, smollm3(ids).logits) > 0.01
    patch_model(llama, "nope", layers=layers)
    assert llama(ids).logits.equal(smollm3(ids).logits)
    padded = torch.ones_like(ids)
    padded[0, :5] = 0
    assert llama(ids, attention_mask=padded).logits.equal(smollm3(ids, attention_mask=padded).logits)
    unpatch_model(llama)
    patch_model(smollm3, "rope", layers=[3])  # named, so turned: now it is the llama again
    assert smollm3(ids).logits.equal(llama(ids).logits)


def test_a_window_from_its_definition():
    """One layer, ALiBi: what is further than the window is not there, and what is inside is as without one."""
    model = patch_model(tiny("llama", num_hidden_layers=1), "alibi", window=3)
    ids = tokens(1, 12)
    assert_same(model(ids).logits[:, :3], patch_model(tiny("llama", num_hidden_layers=1), "alibi")(ids).logits[:, :3])
    changed = ids.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 97
    moved = (model(changed).logits - model(ids).logits).abs().amax(-1)[0]
    assert moved[:5].max() == 0
    assert moved[5:8].min() > 1e-4
    assert moved[8:].max() == 0


@pytest.mark.rows(default=8, slow=28)
@over_some_pairs
def test_a_mixture_is_what_it_says(family, name):
    """verify, cached and padded forward passes, generation, gradients, copies."""
    model = mixed(family, name)
    report = verify(model)
    assert report.ok, report
    ids = tokens(2, 20)
    whole = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    first = model(ids[:, :13], past_key_values=cache, use_cache=True).logits
    rest = [model(ids[:, n : n + 1], past_key_values=cache, use_cache=True).logits for n in range(13, 20)]
    assert_same(torch.cat([first, *rest], 1), whole)
    padded = torch.nn.functional.pad(ids, (4, 0), value=0)
    mask = torch.nn.functional.pad(torch.ones_like(ids), (4, 0))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    assert_same(model(padded, attention_mask=mask, position_ids=positions).logits[:, 4:], whole)
    if family != "opt":  # which never hands its position ids to the mask, see test_situations.py
        packed = torch.cat([ids[:1, :8], ids[:1, :12]], 1)
        restarts = torch.cat([torch.arange(8), torch.arange(12)])[None]
        logits = model(packed, position_ids=restarts, use_cache=False).logits
        assert_same(logits[:, :8], whole[:1, :8])
        assert_same(logits[:, 8:], whole[:1, :12])
    greedy, again = model.generate(ids, max_new_tokens=6, do_sample=False), ids
    for _ in range(6):
        again = torch.cat([again, model(again, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert greedy.equal(again)

    assert_same(copy.deepcopy(model)(ids, use_cache=False).logits, whole)
    model.train()
    model(ids, labels=ids, use_cache=False).loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    ours = {n: p for n, p in model.named_parameters() if "posenc" in n}
    assert all(expected[n].norm() > 0 for n in ours), "a position parameter has no gradient"
    model.zero_grad()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model(ids, labels=ids, use_cache=False).loss.backward()
    for n, p in model.named_parameters():
        if p.grad is not None:
            assert_same(p.grad, expected[n], n)


@pytest.mark.rows(default=4, slow=24)
@over_some_pairs
def test_a_mixture_is_saved_loaded_and_undone(family, name, tmp_path):
    model = base(family)
    ids, before = tokens(2, 18), base(family)(tokens(2, 18)).logits
    stock = {key: value.clone() for key, value in model.state_dict().items()}
    settings = model.config.to_dict()
    patch_model(model, MIXTURES[name](), seed=0)
    randomize(model)
    expected = model(ids).logits
    assert distance(expected, before) > 1e-3
    said = hf_posenc.describe(model)
    model.save_pretrained(tmp_path)
    loaded = hf_posenc.from_pretrained(tmp_path)
    assert schemes_of(loaded) == schemes_of(model)
    assert loaded(ids).logits.equal(expected)
    assert verify(loaded).ok
    again = hf_posenc.describe(loaded)
    assert (again.schemes, again.kept, again.limit) == (said.schemes, said.kept, said.limit)
    for scheme in said.schemes:
        assert scheme.name in str(said)
    assert [each["scheme"] for each in hf_posenc.inspect(tmp_path).schemes] == [each.name for each in said.schemes]
    card = (tmp_path / "README.md").read_text()
    assert all(f"`{scheme.name}`" in card for scheme in said.schemes)
    unpatch_model(model)
    assert model(ids).logits.equal(before)
    assert {**model.config.to_dict(), "dtype": None} == settings  # which transformers writes into it when saving
    assert model.state_dict().keys() == stock.keys()
    assert all(value.equal(stock[key]) for key, value in model.state_dict().items())
    assert not hf_posenc.is_patched(model)


@pytest.mark.parametrize(
    ("family", "schemes", "error", "message"),
    [
        ("llama", [Alibi(layers="0::2"), Nope(layers=[2])], ValueError, "alibi and nope both name layer 2"),
        ("llama", [Alibi(layers=[4])], ValueError, "no layer 4: the model has 4, counted from 0"),
        ("llama", [Alibi(layers="9:")], ValueError, "selects none of the 4 layers"),
        ("llama", [Alibi(layers="even")], ValueError, "neither a layer type of this model nor a slice"),
        ("gemma3", [Alibi(layers="full")], ValueError, "full_attention, sliding_attention, a slice like"),
        ("llama", [Alibi(layers=[1.0])], TypeError, "layers must be a list of indices"),
        ("llama", [Alibi(layers=np.array([0.0]))], TypeError, "layers must be a list of indices"),
        ("llama", [Sinusoidal(layers=[1])], ValueError, "layers is for placement='every_layer'"),
        ("gpt2", [Nope(layers=[1])], UnsupportedModelError, "positions of gpt2 enter at the input"),
        ("llama", [Alibi(window=0)], ValueError, "window must be at least 1"),
        ("llama", [Alibi(window=2.0)], TypeError, "window must be an integer"),
        ("llama", [Alibi(window=2**31 - 1)], ValueError, "below 2147483647"),
        ("mistral", [Alibi(window=8)], ValueError, "would change nothing in layer 0, which has a sliding window of 8"),
        ("llama", [], TypeError, "a list of names or Schemes"),
        ("llama", [Alibi(), 3], TypeError, "a list of names or Schemes"),
        ("llama", {"0::2": 3}, TypeError, "a mapping of layers"),
        ("llama", {"0::2": Alibi(layers=[1])}, TypeError, "alibi names layers itself"),
        ("llama", {"0::2": "alibi", "_default": ["nope", "rope"]}, ValueError, "nope and rope both name layer 1"),
        ("llama", {":": "alibi", "_default": "nope"}, ValueError, "layers='rest' selects no layer"),
        ("llama", ["temperature", "alibi", "temperature"], ValueError, "temperature and temperature both name layer 0"),
        ("gpt2", ["temperature"], ValueError, "would change nothing: it acts from 65 tokens on"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_changed(family, schemes, error, message):
    model = base(family)
    before = [(key, id(module), type(module)) for key, module in model.named_modules()]
    with pytest.raises(error, match=message):
        patch_model(model, schemes)
    assert before == [(key, id(module), type(module)) for key, module in model.named_modules()]
    assert not hf_posenc.is_patched(model)


@pytest.mark.parametrize("layers", [[np.int64(0), 2], range(0, 4, 2), torch.tensor([0, 2]), (0, -2)])
def test_any_integers_select_layers_and_are_written_as_numbers(layers, tmp_path):
    model = patch_model(base("llama"), "alibi", layers=layers, window=np.int64(4))
    assert repr((schemes_of(model)[0].layers, schemes_of(model)[0].window)) == "((0, 2), 4)"
    expected = patch_model(base("llama"), "alibi", layers=[0, 2], window=4)
    model.save_pretrained(tmp_path)
    expected.load_state_dict(model.state_dict())
    ids = tokens()
    loaded = hf_posenc.from_pretrained(tmp_path)
    assert loaded(ids).logits.equal(expected(ids).logits)


@pytest.mark.parametrize("change", ["drop", "append", "swap"])
def test_layers_that_change_afterwards_are_noticed(change, tmp_path):
    model = patch_model(base("llama"), [Alibi(layers=[0, 1]), Nope(layers=[2])])
    layers = model.model.layers
    if change == "drop":
        del layers[0]
    elif change == "append":
        layers.append(copy.deepcopy(layers[0]))
    else:
        layers[0], layers[2] = layers[2], layers[0]
    model.config.num_hidden_layers = len(layers)
    with pytest.raises(UnsupportedModelError, match="then patch it again"):
        model(tokens(), use_cache=False)
    with pytest.raises(UnsupportedModelError, match="then patch it again"):
        model.save_pretrained(tmp_path)


def test_a_mixture_is_exported_where_a_stock_class_has_it(tmp_path):
    model = patch_model(base("llama"), "nope", layers="1::2")
    hf_posenc.export_stock(model, tmp_path)
    stock = SmolLM3ForCausalLM.from_pretrained(tmp_path)
    assert stock.config.no_rope_layers == [1, 0, 1, 0]
    ids = tokens(2, 30)
    assert stock(ids).logits.equal(model(ids).logits)
    for schemes in ([Alibi(layers=[0])], [Rope(rope_theta=3.0, layers=[0])], [Nope(window=5, sinks=1)]):
        with pytest.raises(UnsupportedModelError, match="no stock class computes"):
            hf_posenc.export_stock(patch_model(base("llama"), schemes), tmp_path / "no")

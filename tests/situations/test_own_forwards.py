"""Families whose attention never calls transformers' interface: what replaces it is what it was.

Where the stock model has a scheme by itself (ALiBi on BLOOM, MPT and Falcon, rotation on GPT-J, CodeGen and Falcon), the
stock model is the reference; `test_every_decoder.py` has the other schemes.
"""

import copy
import inspect

import pytest
import torch
import transformers
from decoders import decoder
from packaging.version import parse
from peft import LoraConfig, get_peft_model
from transformers import StaticCache

from hf_posenc import UnsupportedModelError, from_pretrained, patch_model, unpatch_model, verify
from hf_posenc.core.registry import family_for, supported_model_types
from hf_posenc.model.base_model import BaseModel
from hf_posenc.schemes.alibi import Alibi, alibi_slopes
from hf_posenc.schemes.nope import Nope

# peft 0.21 asks for it by the name that transformers 5.23 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LENGTH = 20
CLOSE = 1e-4  # largest difference of float32 logits, of order 1: two ways of adding up the same numbers
DIFFERENT = 100 * CLOSE
HALF = {torch.float16: 0.02, torch.bfloat16: 0.15}  # relative norm; roundings of 2**-11 and 2**-8 over two layers

REPLACED = [name for name in supported_model_types() if family_for(name).always_replaced]
ALIBI = ["bloom", "mpt", "falcon"]
# The variants of a family: every branch of its code.
ROTATING = {
    "gptj": ("gptj", {}),
    "codegen": ("codegen", {}),
    "falcon": ("falcon", {}),
    "falcon, one key for each query": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon, groups": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt_neox_japanese": ("gpt_neox_japanese", {}),
    "gpt_neox_japanese, a part": (
        "gpt_neox_japanese",
        {"rope_parameters": {"rope_theta": 1e3, "partial_rotary_factor": 0.5}},
    ),
    "falcon, scaled": ("falcon", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}}),
}


def tokens(rows=1, length=LENGTH, seed=0):
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def difference(a, b):
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def alibi_base(name, **config):
    """A stock model with ALiBi of its own, and the slopes that it has."""
    if name == "falcon":
        config["alibi"] = True
    model = decoder(name, **config)
    heads = model.config.num_attention_heads
    # Falcon adds the bias before it scales the scores.
    factor = (model.config.hidden_size // heads) ** -0.5 if name == "falcon" else 1.0
    return model, [slope * factor for slope in alibi_slopes(heads)]


@pytest.mark.rows(slow=9)
@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("heads", [4, 6, 12])
@pytest.mark.parametrize("name", ALIBI)
def test_alibi_is_what_the_stock_model_has(name, heads, padding):
    model, slopes = alibi_base(name, num_attention_heads=heads, hidden_size=8 * heads)
    ids = tokens(2)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    stock = model(ids, attention_mask=mask, use_cache=False).logits[:, padding:]
    if name != "falcon":
        assert slopes == alibi_slopes(heads)
    patch_model(model, "alibi", slopes=slopes)
    # Falcon makes its bias in bfloat16, which rounds slopes that are no powers of two.
    close = 0.01 if name == "falcon" and heads == 12 else CLOSE
    assert difference(model(ids, attention_mask=mask, use_cache=False).logits[:, padding:], stock) <= close
    unpatch_model(model)
    patch_model(model, "nope")
    assert difference(model(ids, attention_mask=mask, use_cache=False).logits[:, padding:], stock) > DIFFERENT


@torch.no_grad()
def test_settings_of_mpt():
    """Clipped projections and another scale are the base's; a largest slope of its own is read by no stock model."""
    model = decoder("mpt", attn_config={"alibi_bias_max": 4, "clip_qkv": 0.5, "softmax_scale": 0.7})
    stock = model(tokens(), use_cache=False).logits
    patch_model(model, "alibi")
    assert verify(model)
    assert difference(model(tokens(), use_cache=False).logits, stock) <= CLOSE
    for attention in BaseModel.of(model).modules.attentions:
        attention.clip_qkv = None
    assert difference(model(tokens(), use_cache=False).logits, stock) > DIFFERENT


@torch.no_grad()
@pytest.mark.parametrize("variant", ROTATING)
def test_rope_is_what_the_stock_model_has(variant):
    name, config = ROTATING[variant]
    if variant.endswith("a part") and parse(transformers.__version__) < parse("5.23"):
        pytest.skip("older stock models of this family turn whole heads only")
    model, ids = decoder(name, **config), tokens(2)
    stock = model(ids, use_cache=False).logits
    patch_model(model, "rope")
    assert verify(model)
    assert difference(model(ids, use_cache=False).logits, stock) <= CLOSE / 10
    unpatch_model(model)
    patch_model(model, "rope", rope_theta=7.0)
    assert difference(model(ids, use_cache=False).logits, stock) > DIFFERENT
    unpatch_model(model)
    assert model(ids, use_cache=False).logits.equal(stock)


@pytest.mark.parametrize(
    ("name", "scheme"), [("bloom", "alibi"), ("mpt", "alibi"), ("gptj", "rope"), ("falcon", "rope")]
)
def test_gradients_are_those_of_the_stock_model(name, scheme):
    model, ids = decoder(name).train(), tokens(2)
    found = []
    for patch in (False, True):
        if patch:
            patch_model(model, scheme)
        model(ids, labels=ids, use_cache=False).loss.backward()
        found.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    stock, ours = found
    assert stock.keys() == ours.keys()
    for key, gradient in stock.items():
        assert difference(ours[key], gradient) <= CLOSE * max(1.0, gradient.abs().max().item()), key


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 2])
def test_local_layers_of_gpt_neo(window):
    """Its windows are in no mask: they stay under every scheme, and a scheme may have a smaller one."""
    layers = [[["global", "local"], 1]]
    model = decoder("gpt_neo", attention_types=layers, window_size=4)
    stock = decoder("gpt_neo", attention_types=layers, window_size=4 if window is None else window)
    stock.transformer.wpe.weight.zero_()
    expected = stock(tokens(), use_cache=False).logits
    chosen = "nope" if window is None else [Nope(layers=[0]), Nope(layers=[1], window=window)]
    patch_model(model, chosen)
    assert verify(model)
    assert difference(model(tokens(), use_cache=False).logits, expected) <= CLOSE
    everywhere = patch_model(decoder("gpt_neo", attention_types=[[["global"], 2]]), "nope")
    assert difference(everywhere(tokens(), use_cache=False).logits, expected) > DIFFERENT
    with pytest.raises(ValueError, match="would change nothing in layer 1"):
        patch_model(decoder("gpt_neo", attention_types=layers, window_size=4), "alibi", window=4)


@pytest.mark.rows(slow=12)
@torch.no_grad()
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("scheme", ["alibi", "rope", "nope"])
@pytest.mark.parametrize("name", REPLACED)
def test_half_precision(name, scheme, dtype):
    model = patch_model(decoder(name), scheme)
    expected = model(tokens(), use_cache=False).logits
    found = model.to(dtype)(tokens(), use_cache=False).logits
    assert found.dtype == dtype
    assert (found.float() - expected).norm() <= HALF[dtype] * expected.norm()


@pytest.mark.rows(slow=12)
@torch.no_grad()
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("scheme", ["alibi", "rope", "sinusoidal"])
@pytest.mark.parametrize("name", [name for name in supported_model_types() if family_for(name).positions_in_mask])
def test_chosen_position_ids_reach_the_layers(name, scheme, adapter):
    """Also where the model with a head hands them to nobody, and where PEFT calls its forward without hooks."""
    options = {"placement": "every_layer"} if scheme == "sinusoidal" else {}
    transposed = {"fan_in_fan_out": True} if name == "openai-gpt" else {}
    model = patch_model(decoder(name), scheme, **options)
    if adapter:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **transposed))
    ids = tokens(2)
    counted = model(ids, use_cache=False).logits
    shifted = torch.arange(LENGTH)[None] + 3
    apart = 2 * torch.arange(LENGTH)[None]
    same = model(ids, attention_mask=torch.ones_like(ids), position_ids=shifted, use_cache=False).logits
    assert (difference(same, counted) <= CLOSE) == (scheme != "sinusoidal")
    other = model(ids, attention_mask=torch.ones_like(ids), position_ids=apart, use_cache=False).logits
    assert difference(other, counted) > DIFFERENT
    if scheme == "alibi" and not adapter:
        unpatch_model(model)
        slopes = [2 * slope for slope in alibi_slopes(4)]
        assert difference(patch_model(model, "alibi", slopes=slopes)(ids, use_cache=False).logits, other) <= CLOSE


@torch.no_grad()
def test_a_mask_of_the_users_own():
    ids = tokens()
    causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    for name in ("bloom", "gpt_neo", "gptj", "falcon"):
        model = patch_model(decoder(name), "alibi")
        expected = model(ids, use_cache=False).logits
        assert difference(model(ids, attention_mask=causal, use_cache=False).logits, expected) <= CLOSE
    for name, options in [("mpt", {}), ("bloom", {"position_ids": torch.arange(LENGTH)[None]})]:
        with pytest.raises(ValueError, match="pass a 2-D mask"):
            patch_model(decoder(name), "alibi")(ids, attention_mask=causal, **options)
    for name in ("bloom", "gpt_neo"):
        with pytest.raises(ValueError, match="pass a 2-D mask"):
            patch_model(decoder(name), "rope")(ids, attention_mask=causal)


@torch.no_grad()
@pytest.mark.rows(slow=5)
@pytest.mark.parametrize("name", ["gpt_neo", "gpt_bigcode", "biogpt", "bloom", "xglm"])
@pytest.mark.parametrize("scheme", ["alibi", "rope"])
def test_a_static_cache(name, scheme):
    model = patch_model(decoder(name), scheme)
    expected = model(tokens(), use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=32)
    found = [model(tokens()[:, :12], past_key_values=cache).logits]
    found += [model(tokens()[:, n : n + 1], past_key_values=cache).logits for n in range(12, LENGTH)]
    assert difference(torch.cat(found, 1), expected) <= CLOSE


OWN = {**{name: (name, {}) for name in REPLACED}, "falcon, ALiBi": ("falcon", {"alibi": True})}
SLOPE = 0.3


def penalise_one_layer(name, model, layer):
    """Give a layer of a stock model a bias by distance in place of its own positions, the same in all heads."""
    attention, own = BaseModel.of(model).modules.attentions[layer], family_for(name).attention
    lag = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None]
    mask = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(lag < 0, torch.finfo(torch.float32).min)

    def see(module, args, kwargs):
        hidden, *rest = args or [kwargs.pop("hidden_states")]
        names = list(inspect.signature(module.forward).parameters)[1:]
        given = {**dict(zip(names, rest, strict=False)), **kwargs}
        # MPT turns its mask into bools and has an argument for a bias, which is by key alone; CodeGen divides both.
        factor = {"mpt": 0.0, "codegen": module.scale_attn if name == "codegen" else 1.0}.get(name, 1.0)
        added = (mask - factor * SLOPE * lag.clamp(min=0)).expand(len(hidden), -1, -1, -1)
        given = own.without_positions(module, {**given, "attention_mask": added})
        if name == "mpt":
            given["position_bias"] = SLOPE * torch.arange(1.0 - LENGTH, 1.0).expand(module.n_heads, 1, -1)
        return (hidden,), given

    attention.register_forward_pre_hook(see, with_kwargs=True)


@pytest.mark.rows(default=6, slow=12)
@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("variant", OWN)
def test_layers_that_nobody_names_keep_what_the_base_has(variant, layer, tmp_path):
    """Against the stock model, of which one layer is given a bias by a hook."""
    name, config = OWN[variant]
    model, ids = decoder(name, **config), tokens(2)
    stock = copy.deepcopy(model)
    before = model(ids, use_cache=False).logits
    penalise_one_layer(name, stock, layer)
    expected = stock(ids, use_cache=False).logits
    assert difference(expected, before) > DIFFERENT
    patch_model(model, Alibi(slopes=[SLOPE] * 4, layers=[layer]))
    assert difference(model(ids, use_cache=False).logits, expected) <= CLOSE
    assert verify(model)
    if name != "openai-gpt":  # which has no cache
        first = model(ids[:, :12], use_cache=True)
        rest = [first.logits]
        for n in range(12, LENGTH):
            rest.append(model(ids[:, n : n + 1], past_key_values=first.past_key_values).logits)
        assert difference(torch.cat(rest, 1), expected) <= CLOSE
    mask = torch.nn.functional.pad(torch.ones_like(ids), (3, 0))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = torch.nn.functional.pad(ids, (3, 0), value=5)
    padded = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, 3:]
    assert difference(padded, expected) <= CLOSE
    model.save_pretrained(tmp_path)
    assert difference(from_pretrained(tmp_path)(ids, use_cache=False).logits, expected) <= CLOSE
    unpatch_model(model)
    assert model(ids, use_cache=False).logits.equal(before)


@pytest.mark.rows(slow=9)
@pytest.mark.parametrize("scheme", ["nope", "rope", "alibi", "learned"])
@pytest.mark.parametrize("name", REPLACED)
def test_flash_attention_is_refused(name, scheme):
    model = decoder(name)
    model.config._attn_implementation_internal = "flash_attention_2"
    options = {"num_positions": 8} if scheme == "learned" else {}
    with pytest.raises(UnsupportedModelError, match="which flash_attention_2 cannot carry"):
        patch_model(model, scheme, **options)


def test_what_bloom_does_not_know():
    with pytest.raises(ValueError, match="give num_positions"):
        patch_model(decoder("bloom"), "learned")
    with pytest.raises(ValueError, match=r"set config\.seq_length"):
        patch_model(decoder("bloom"), "rope", scaling={"rope_type": "linear", "factor": 2.0})
    model = decoder("bloom")
    model.config.seq_length = 16
    assert patch_model(model, "learned").config.max_position_embeddings == 16
    unpatch_model(model)
    assert "max_position_embeddings" not in model.config.to_dict()
    patch_model(model, "rope", scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(UnsupportedModelError, match="slow_but_exact = True"):
        patch_model(decoder("bloom", slow_but_exact=True), "nope")


# The layers of ABEJA's GPT-NeoX and of the first GPT cannot be checkpointed by transformers.
@pytest.mark.rows(default=2)
@pytest.mark.parametrize("name", [name for name in REPLACED if name not in ("gpt_neox_japanese", "openai-gpt")])
def test_activation_checkpointing(name):
    model, ids = patch_model(decoder(name), "t5", num_buckets=8, max_distance=16, seed=0).train(), tokens(2)
    found = []
    for _ in range(2):
        # Two forward passes before the backward one: what the first had must be there when it is run again.
        (model(ids, labels=ids).loss + model(ids[:, :9], labels=ids[:, :9]).loss).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        # Renamed within the supported versions; the old name warns.
        name = "activation_checkpointing_enable"
        getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")({"use_reentrant": False})
    assert all(difference(*pair) <= CLOSE * max(1.0, pair[0].abs().max()) for pair in zip(*found, strict=True))

"""`transformer_xl` and `alibi` as stock checkpoints: stock RoPE over wider heads computes what the patched model does."""

import argparse
import inspect
import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from decoders import decoder
from families import tiny
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from hf_posenc import UnsupportedModelError, export_stock, patch_model, unpatch_model
from hf_posenc.core.registry import supported_model_types
from hf_posenc.schemes.alibi import Alibi
from hf_posenc.schemes.nope import Nope
from hf_posenc.schemes.transformer_xl import TransformerXL

HELD = (
    "arcee aria_text cohere emu3_text_model evolla falcon_h1 gemma gemma2 glm_image_text granite granite4_vision_text "
    "granite_docling_text granitemoe granitemoeshared iquestcoder jais2 llama mistral olmo qwen2 qwen2_moe seed_oss "
    "smollm3 solar_open starcoder2 vaultgemma"
).split()
"""Types whose swapped models a stock class holds. Whatever else is served must be refused."""

TOLERANCE = 3e-5
"""Of logits, relative to the largest: two orders of float32 sums."""


def on_a_real_model(test):
    reason = "HF_POSENC_SMOLLM2=FOLDER runs this; scripts/get_smollm2.py FOLDER brings it"
    return pytest.mark.slow(pytest.mark.skipif("HF_POSENC_SMOLLM2" not in os.environ, reason=reason)(test))


def made(model, seed=0, **scheme):
    """A patched model whose biases and position parameters are far from 0."""
    patch_model(model, scheme.pop("scheme", "transformer_xl"), seed=seed, **scheme)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "posenc" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def assert_exported(model, folder, **options):
    """Export, load, compare; return the stock model."""
    export_stock(model, folder, **options)
    assert "posenc" not in (folder / "config.json").read_text()
    (name,) = AutoConfig.from_pretrained(folder).architectures
    stock = getattr(transformers, name).from_pretrained(folder)
    assert not hf_posenc.is_patched(stock)
    ids = torch.randint(model.config.vocab_size, (2, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = model(ids)[0], stock(ids)[0]
    largest = expected.abs().max()
    assert (found - expected).abs().max() < TOLERANCE * largest
    moved = [parameter for name, parameter in model.named_parameters() if name.endswith("position_bias")]
    with torch.no_grad():
        for parameter in moved:
            parameter.mul_(-1)
        assert (model(ids)[0] - found).abs().max() > 100 * TOLERANCE * largest
    return stock


# A plain one; biases and another twin than itself; its own factor of scores; soft caps and windows; pairs of neighbours;
# unrotated layers of the base.
@pytest.mark.parametrize("model_type", ["llama", "mistral", "granite", "gemma2", "cohere", "smollm3"])
def test_the_stock_class_computes_the_same(model_type, tmp_path):
    config = {"sliding_window": None} if model_type == "mistral" else {}
    stock = assert_exported(made(decoder(model_type, **config)), tmp_path)
    assert stock.config.model_type == {"mistral": "llama"}.get(model_type, model_type)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}


# A plain one; a factor on cosines and sines; its own factor of scores; pairs of neighbours; soft caps and windows; a twin.
@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": YARN}),
        ("granite", {}),
        ("cohere", {}),
        ("gemma2", {}),
        ("mistral", {"sliding_window": None}),
    ],
)
def test_beside_layers_that_keep_the_rotation(model_type, config, tmp_path):
    assert_exported(made(decoder(model_type, **config), layers=[1]), tmp_path)


def test_frequencies_of_the_base_share_its_pairs(tmp_path):
    base = tiny("llama")
    size = base.config.head_dim
    frequencies = [base.config.rope_parameters["rope_theta"] ** (-2 * i / size) for i in range(0, size // 2, 2)]
    model = made(base, layers=[1], frequencies=frequencies)
    assert assert_exported(model, tmp_path, head_dim=2 * size).config.head_dim == 2 * size
    apart = made(tiny("llama"), layers=[1], frequencies=[1.001 * each for each in frequencies])
    with pytest.raises(ValueError, match=f"at least {2 * size + 2 * len(frequencies)}"):
        export_stock(apart, tmp_path / "apart", head_dim=2 * size)


def test_a_rotation_that_depends_on_the_length_is_refused(tmp_path):
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match="keep a rotation, and its angles depend on the length"):
        export_stock(made(tiny("llama", rope_parameters=dynamic), layers=[1]), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", supported_model_types())
def test_every_type_is_held_or_refused(model_type, tmp_path):
    config = {"sliding_window": None} if model_type == "mistral" else {}
    model = made(decoder(model_type, **config))
    if model_type in HELD:
        assert_exported(model, tmp_path)
        return
    with pytest.raises(
        UnsupportedModelError, match=r"(?s)no stock class computes transformer_xl on .*: .* can be exported"
    ):
        export_stock(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted({*HELD} - {"glm_image_text"}))
def test_every_type_that_is_held_keeps_rotations(model_type, tmp_path):
    config = {"sliding_window": None} if model_type == "mistral" else {}
    assert_exported(made(decoder(model_type, **config), layers=[1]), tmp_path)


def test_layers_without_positions_and_frequencies_of_a_list(tmp_path):
    schemes = [TransformerXL(layers=[1], frequencies=[1.0, 0.2, 0.0031]), Nope(layers=[0])]
    stock = assert_exported(made(tiny("llama"), scheme=schemes), tmp_path, head_dim=48, length=777)
    assert (stock.config.head_dim, stock.config.max_position_embeddings) == (48, 777)
    said = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    assert said["original_max_position_embeddings"] == 777  # or vLLM would scale cosines


def test_words_are_equal_without_this_package(tmp_path):
    """In a process that cannot import hf_posenc, with a cache, in bfloat16, past the base's length."""
    model = made(tiny("llama", max_position_embeddings=32)).to(torch.bfloat16)
    export_stock(model, tmp_path / "stock")
    prompt = torch.randint(model.config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(1))
    code = f"""
import sys
sys.modules["hf_posenc"] = None
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "stock")!r}, dtype=torch.float32)
print(model.generate(torch.tensor({prompt.tolist()}), max_new_tokens=100, do_sample=False, pad_token_id=0).tolist())
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    written = model.float().generate(prompt, max_new_tokens=100, do_sample=False, pad_token_id=0)
    assert json.loads(found) == written.tolist()


@pytest.mark.parametrize(
    ("model_type", "scheme", "reason"),
    [
        (
            "llama",
            {"scheme": "alibi", "layers": [0]},
            "keep a rotation, which can be written only beside transformer_xl",
        ),
        ("llama", {"window": 8}, "has a window"),
        ("glm_image_text", {"layers": [0]}, "only of one coordinate"),
        ("glm", {"layers": [0]}, "rotates a part of each head"),
        ("mistral", {}, "sliding window, and llama has none"),
        ("qwen3", {}, "q_norm"),
        ("nanochat", {}, "norms queries and keys"),
        ("gpt2", {}, "c_attn"),
    ],
)
def test_refused_with_the_reason(model_type, scheme, reason, tmp_path):
    with pytest.raises(UnsupportedModelError, match=f"{reason}.*can be exported"):
        export_stock(made(decoder(model_type), **scheme), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("trainable", [False, True])
def test_alibi_within_a_length(trainable, tmp_path):
    """As waves: nearly the same up to the length, and not far past it; trained slopes, and a layer without positions."""
    model = tiny("llama", hidden_size=64, head_dim=16, num_attention_heads=4, num_key_value_heads=2)
    patch_model(model, [Alibi(layers=[0], trainable=trainable), Nope(layers=[1])]).eval()
    if trainable:
        with torch.no_grad():
            model.model.layers[0].self_attn.posenc.slopes.copy_(torch.tensor([0.3, 0.11, 0.05, 0.0]))
    with pytest.raises(ValueError, match="give length="):
        export_stock(model, tmp_path)
    export_stock(model, tmp_path, length=400)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert stock.config.max_position_embeddings == 400
    assert stock.config.head_dim <= 64
    errors = {}
    for length in (60, 400, 401, 8000):
        ids = torch.randint(3, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            expected, found = model(ids).logits, stock(ids).logits
        errors[length] = ((found - expected).abs().max() / expected.abs().max()).item()
    assert max(errors[60], errors[400], errors[401]) <= 3e-3
    assert errors[8000] > 0.05
    unpatch_model(model)
    with torch.no_grad():
        assert (model(ids).logits - expected).abs().max() > 0.05 * expected.abs().max()


def test_alibi_is_refused_where_waves_are_too_coarse(tmp_path):
    model = patch_model(tiny("llama"), "alibi")
    for options, reason in (
        ({"length": 20000}, "within 4096 tokens at most"),
        ({"length": 300, "head_dim": 12}, "2 waves"),
    ):
        with pytest.raises(UnsupportedModelError, match=reason):
            export_stock(model, tmp_path, **options)
    with pytest.raises(UnsupportedModelError, match="too coarse"):
        export_stock(model.bfloat16(), tmp_path, length=100)
    with pytest.raises(UnsupportedModelError, match="no stock class"):
        export_stock(patch_model(tiny("llama"), "alibi", windows=[5, 5, 5, None]), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_wrong_sizes_are_refused(tmp_path):
    model = made(tiny("llama"), frequencies=4)
    for options, reason in (
        ({"head_dim": 0}, "at least 16"),
        ({"head_dim": 14}, "at least 16"),
        ({"head_dim": 17}, "even"),
        ({"length": 0}, "positive"),
    ):
        with pytest.raises(ValueError, match=reason):
            export_stock(model, tmp_path, **options)
    with pytest.raises(ValueError, match="leave them out"):
        export_stock(patch_model(tiny("llama"), "nope"), tmp_path, head_dim=0)
    assert list(tmp_path.iterdir()) == []


@on_a_real_model
@torch.no_grad()
def test_alibi_of_a_real_model_within_1024_tokens(tmp_path):
    """Trained weights, whose scores spread; 30 layers."""
    model = AutoModelForCausalLM.from_pretrained(os.environ["HF_POSENC_SMOLLM2"], dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(os.environ["HF_POSENC_SMOLLM2"])
    ids = tokenizer(inspect.getsource(argparse), return_tensors="pt", verbose=False).input_ids[:, :1024]
    unpatched = model(ids).logits.log_softmax(-1)
    export_stock(patch_model(model, "alibi"), tmp_path, length=1024)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert stock.config.head_dim <= 128
    expected, found = (each(ids).logits.log_softmax(-1) for each in (model, stock))

    def divergence(other):
        return (expected.exp() * (expected - other)).sum(-1).mean()

    assert divergence(found) < 1e-5
    assert (expected.argmax(-1) == found.argmax(-1)).float().mean() > 0.995
    assert divergence(unpatched) > 0.1


@on_a_real_model
@pytest.mark.parametrize("layers", [None, range(25)], ids=["all", "some"])
def test_a_real_model_writes_the_same_words(layers, tmp_path):
    """Trained weights, 30 layers, 6,000 tokens, after closed forms: greedy words of the stock class."""
    model = AutoModelForCausalLM.from_pretrained(os.environ["HF_POSENC_SMOLLM2"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(os.environ["HF_POSENC_SMOLLM2"])
    ids = tokenizer(inspect.getsource(argparse), return_tensors="pt", verbose=False).input_ids[:, :6144]
    hf_posenc.calibrate(patch_model(model, "transformer_xl", layers=layers, seed=0), ids.view(48, 128), matching=None)
    export_stock(model, tmp_path / "stock", length=8192)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", dtype=torch.float32)
    with torch.no_grad():
        expected, found = model(ids[:, :6000]).logits, stock(ids[:, :6000]).logits
    assert (found - expected).abs().max() < 2e-2  # of 40; angles of 6,000 are float32 in every stock model
    options = {"max_new_tokens": 200, "do_sample": False}
    assert stock.generate(ids[:, :64], **options).equal(model.generate(ids[:, :64], **options))

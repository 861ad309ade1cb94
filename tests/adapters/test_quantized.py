"""Patching beside quantisation: either order computes the same, and what needs the real weights is refused.

bitsandbytes and torchao are the extra `qlora`; what runs them is skipped where they are not installed.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from decoders import decoder
from families import tiny
from torch import nn

import hf_posenc
from hf_posenc.core.errors import UnsupportedModelError

ROOT = Path(__file__).parents[2]


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"pip install {package} runs this")


class Packed(torch.Tensor):
    """Stands for the tensor classes of torchao, which say of themselves that they are float32."""


def integers(weight):
    return nn.Parameter(weight.detach().to(torch.int8), requires_grad=False)


def a_class(weight):
    return nn.Parameter(weight.detach().as_subclass(Packed), requires_grad=False)


@pytest.mark.parametrize("packed", [integers, a_class])
def test_what_needs_the_weights_is_refused(packed, tmp_path):
    """A closed form written into packed weights, or a stock checkpoint made of them, would be of other numbers."""
    model = hf_posenc.patch_model(tiny("llama"), "rope")
    projection = model.model.layers[1].self_attn.q_proj
    projection.weight = packed(projection.weight)
    for act in (lambda: hf_posenc.export_stock(model, tmp_path / "stock"), lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(UnsupportedModelError, match=r"layers\.1\.self_attn\.q_proj\.weight is packed"):
            act()
    assert not list(tmp_path.iterdir())
    with pytest.raises(UnsupportedModelError, match=r"quantised .*: calibrate the model before that"):
        hf_posenc.calibrate(model, torch.randint(97, (40, 16)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.ao, for which torchao stands in by now
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore:is_gradient_checkpointing:FutureWarning")
def test_dynamic_quantisation_is_refused_where_weights_are_needed(tmp_path):
    """torch.ao keeps weights in objects that are no parameters."""

    def quantised(model):
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)

    windows = torch.randint(97, (12, 16))
    model = quantised(hf_posenc.patch_model(tiny("llama"), "t5", seed=0))
    with pytest.raises(UnsupportedModelError, match=r"quantised .*: calibrate the model before that"):
        hf_posenc.calibrate(model, windows)
    with pytest.raises(UnsupportedModelError, match=r"quantised .*: take it as the base before that"):
        hf_posenc.calibrate(hf_posenc.patch_model(tiny("llama"), "t5", seed=0), windows, base=quantised(tiny("llama")))
    with pytest.raises(UnsupportedModelError, match=r"quantised .*: save the model before that"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_weights_packed_into_buffers_are_refused():
    """As GPTQ and AWQ do, under names of their own."""
    model = hf_posenc.patch_model(tiny("llama"), "t5", seed=0)
    model.is_quantized = True
    model.model.layers[0].mlp.up_proj.register_buffer("qweight", torch.zeros(4, 8, dtype=torch.int32))
    with pytest.raises(UnsupportedModelError, match=r"quantised \(.*up_proj\.qweight is packed\): calibrate the model"):
        hf_posenc.calibrate(model, torch.randint(97, (40, 16)))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # in the import of transformers' BitNet layers
def test_layers_that_round_dense_weights_as_they_compute_stay(tmp_path):
    """BitNet's master weights. Without the config's word a checkpoint would be loaded into layers that do not round."""
    decoder("bitnet").save_pretrained(tmp_path / "stock")
    config = json.loads((tmp_path / "stock" / "config.json").read_text())
    rounding = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    (tmp_path / "stock" / "config.json").write_text(json.dumps(config | {"quantization_config": rounding}))
    model = hf_posenc.from_pretrained(tmp_path / "stock", scheme="alibi")
    model.save_pretrained(tmp_path / "patched")
    loaded = hf_posenc.from_pretrained(tmp_path / "patched")
    assert [type(each.model.layers[0].mlp.up_proj).__name__ for each in (model, loaded)] == ["AutoBitLinear"] * 2
    with pytest.raises(UnsupportedModelError, match=r"the weights .* are quantised: calibrate the model before that"):
        hf_posenc.calibrate(model, torch.randint(97, (40, 16)))


def test_blocks_of_a_gguf_file_are_refused_with_what_unpacks_them(tmp_path):
    """transformers keeps a file's blocks as bytes where a kernel computes with them."""
    from transformers import GgufConfig
    from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

    model = tiny("llama")
    model.hf_quantizer, model.is_quantized, model.quantization_method = GgufHfQuantizer(GgufConfig()), True, "gguf"
    projection = model.model.layers[1].mlp.up_proj
    projection.weight = nn.Parameter(torch.zeros(4, 8, dtype=torch.uint8), requires_grad=False)
    hf_posenc.patch_model(model, "rope")
    for act in (
        lambda: hf_posenc.calibrate(model, torch.randint(97, (40, 16))),
        lambda: model.save_pretrained(tmp_path / "saved"),
        lambda: hf_posenc.export_stock(model, tmp_path / "stock"),
    ):
        with pytest.raises(UnsupportedModelError, match=r"up_proj\.weight is packed.*GgufConfig\(dequantize=True\)"):
            act()
    assert not list(tmp_path.iterdir())


def nf4():
    from transformers import BitsAndBytesConfig

    # Without double quantisation bitsandbytes 0.50 spoils what it saves after a forward on some processors.
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def int8():
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig(version=2))


FORMATS = [
    pytest.param(nf4, marks=needs("bitsandbytes"), id="nf4"),
    pytest.param(int8, marks=needs("torchao"), id="int8"),
]
# What these packages and their kernels say of themselves while they are imported and run.
noisy = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A LLaMA of 64 dimensions: the smallest blocks that 4 bits are kept in."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    folder = tmp_path_factory.mktemp("stock")
    LlamaForCausalLM(LlamaConfig(vocab_size=97, initializer_range=0.2, **sizes)).save_pretrained(folder)
    return folder


def dequantised(model):
    """A copy in plain float32 weights of the numbers that the packed ones stand for."""
    import copy

    copied = copy.deepcopy(model)
    for module in copied.modules():
        if not isinstance(module, nn.Linear) or type(module.weight) is nn.Parameter:
            continue
        if hasattr(module.weight, "quant_state"):
            import bitsandbytes.functional

            values = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        else:
            values = module.weight.dequantize()
        plain = nn.Linear(module.in_features, module.out_features, bias=False)
        plain.weight = nn.Parameter(values.float())
        parent, _, name = next(n for n, child in copied.named_modules() if child is module).rpartition(".")
        setattr(copied.get_submodule(parent), name, plain)
    return copied


@pytest.mark.slow
@noisy
@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("scheme", ["alibi", "transformer_xl", "rope", "sinusoidal"])
def test_either_order_computes_what_the_numbers_say(stock, tmp_path, quantization, scheme):
    """Quantise and patch; patch, save and load quantised; and both in plain weights of the same numbers."""
    from transformers import LlamaForCausalLM

    options = {"seed": 0}
    tokens = torch.randint(97, (2, 40))
    loaded = LlamaForCausalLM.from_pretrained(stock, quantization_config=quantization())
    plain = hf_posenc.patch_model(dequantised(loaded).eval(), scheme, **options)
    one = hf_posenc.patch_model(loaded, scheme, **options)
    hf_posenc.from_pretrained(stock, scheme=scheme, **options).save_pretrained(tmp_path / "patched")
    other = hf_posenc.from_pretrained(tmp_path / "patched", quantization_config=quantization())

    assert type(other.model.layers[0].self_attn.q_proj.weight) is not nn.Parameter
    expected = plain(tokens).logits
    scale = expected.abs().mean()
    for model in (one, other):
        # With gradients both packages multiply by the numbers themselves, in float32.
        assert (model(tokens).logits - expected).abs().mean() < 1e-4 * scale
        assert hf_posenc.verify(model)
    whole = hf_posenc.from_pretrained(tmp_path / "patched")
    assert (whole(tokens).logits - expected).abs().mean() > 0.01 * scale  # it was quantised


@pytest.mark.slow
@noisy
@pytest.mark.parametrize("quantization", FORMATS)
def test_a_quantised_patched_model_is_saved_as_it_is(stock, tmp_path, quantization):
    model = hf_posenc.from_pretrained(stock, scheme="t5", seed=0, quantization_config=quantization())
    tokens = torch.randint(97, (1, 40))
    model.save_pretrained(tmp_path / "quantised")
    before = model(tokens).logits
    again = hf_posenc.from_pretrained(tmp_path / "quantised")
    assert type(again.model.layers[0].self_attn.q_proj.weight) is not nn.Parameter
    assert torch.allclose(again(tokens).logits, before, atol=1e-4)
    with pytest.raises(UnsupportedModelError, match="are quantised"):
        hf_posenc.calibrate(model, torch.randint(97, (40, 16)))
    with pytest.raises(UnsupportedModelError, match="are quantised"):
        hf_posenc.export_stock(model, tmp_path / "stock")

"""A rotary scheme of one's own, a few lines of a sub-class, is carried by every kind of base: turned, saved, undone."""

import copy
import itertools
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from cases import turn
from decoders import decoder, out
from families import tiny, tokens
from matrix import matrix
from situations import DIFFERENT, assert_same, distance, randomize
from torch import nn
from transformers import CONFIG_MAPPING
from transformers import initialization as init

import hf_posenc
from hf_posenc import (
    RotaryScheme,
    Rotation,
    UnsupportedModelError,
    export_stock,
    from_pretrained,
    patch_model,
    register_scheme,
    unpatch_model,
    verify,
)
from hf_posenc.core import registry
from hf_posenc.core.registry import family_for
from hf_posenc.model.base_model import BaseModel
from hf_posenc.schemes.alibi import Alibi
from hf_posenc.schemes.rope import Rope

PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
FAMILIES = {
    "gpt2": {},
    "opt": {},
    "llama": {},
    "gpt_neox": PARTIAL,
    "phi": PARTIAL,
    "phi3": {},
    "gemma3": {},
    "smollm3": {"no_rope_layers": [1, 1]},
    "olmo2": {},
}


@dataclass(frozen=True, kw_only=True)
class Linear(RotaryScheme):
    """Frequencies that fall linearly, `w_u = first (1 - u / F)`, fixed or trained."""

    name: ClassVar[str] = "linear_rotation"
    first: float = 1.0
    share: float = 1.0
    trainable: bool = False
    layout: str = "half"

    @property
    def pairs(self):
        return self.layout

    def build(self, dims):
        return LinearRotation(int(dims.head_dim * self.share) // 2, self.first, self.trainable)


class LinearRotation(Rotation):
    """Parameter `angles` (F,) if trainable."""

    def __init__(self, count, first, trainable):
        super().__init__()
        self.count, self.first = count, first
        self.angles = nn.Parameter(torch.empty(count)) if trainable else None

    def start(self, device):
        return self.first * (1 - torch.arange(self.count, dtype=torch.float64, device=device) / self.count)

    def reset_parameters(self):
        if self.angles is not None:
            init.copy_(self.angles, self.start(self.angles.device).to(self.angles.dtype))

    def frequencies(self, device):
        return self.start(device) if self.angles is None else self.angles


@dataclass(frozen=True, kw_only=True)
class Quadrupled(RotaryScheme):
    """Transformers' own rotary modules with parameters of the scheme's: no module of its own."""

    name: ClassVar[str] = "quadrupled"
    factor: float = 4.0

    def rope_parameters(self):
        return {"rope_type": "linear", "rope_theta": 100.0, "factor": self.factor}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))
    for scheme in (Linear, Quadrupled):
        register_scheme(scheme)


def base(family, **config):
    if family in FAMILIES:
        model = tiny(family, **FAMILIES[family], **config)
    else:  # these turn neighbouring dimensions together
        model = decoder(family, **config)
    model.generation_config.eos_token_id = None
    return model


CASES = {
    "fixed": lambda: [Linear()],
    "trainable": lambda: [Linear(trainable=True)],
    "partial": lambda: [Linear(share=0.5, trainable=True)],
    "one-layer": lambda: [Linear(trainable=True, layers=[1])],
    "beside-rope": lambda: [Linear(first=0.7, layers=[0]), Rope(rope_theta=50.0, layers=[1])],
    "beside-alibi": lambda: [Linear(trainable=True, layers=[0]), Alibi(layers=[1])],
    "two": lambda: [Linear(first=0.7, layers=[0]), Linear(first=0.3, trainable=True, layers=[1])],
    "windowed": lambda: [Linear(window=5)],
}


def patched(family, case, **config):
    return randomize(patch_model(base(family, **config), CASES[case](), seed=0))


def full(model, ids):
    return model(input_ids=ids, use_cache=False).logits


def recorded(model, index, ids):
    """Run a model and return queries, keys and scores of one layer's attention, by transformers' own interface."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen = {}

    def record(module, query, key, value, mask, **kwargs):
        if module.layer_idx == index:
            seen.update(query=query.detach().double(), key=key.detach().double())
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("recording", record)
    try:
        model.config._attn_implementation_internal = "recording"
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation_internal = "recording"
        full(model, ids)
    finally:
        ALL_ATTENTION_FUNCTIONS._local_mapping.pop("recording", None)
    return seen["query"], seen["key"]


def turned(x, angles, size, layout):
    """Rotate pair by pair: (u, u + size/2) or (2u, 2u + 1)."""
    pairs = [(u, u + size // 2) if layout == "half" else (2 * u, 2 * u + 1) for u in range(len(angles))]
    return torch.stack([turn(x[:, :, t], t, angles.tolist(), pairs, 1.0) for t in range(x.shape[2])], 2)


TURNED = [(*row, "half") for row in itertools.product(FAMILIES, [1.0, 0.5], [False, True])]
TURNED += [("gpt2", 1.0, False, "interleaved"), ("opt", 1.0, True, "interleaved")]


@pytest.mark.rows(slow=14)
@torch.no_grad()
@matrix(TURNED, family=None, share=None, trainable=None, layout=None)
def test_queries_and_keys_are_turned_as_the_formula_says(family, share, trainable, layout):
    """In float64, against queries and keys of the same model without positions."""
    ids = tokens(2, 12)
    model = randomize(patch_model(base(family).double(), Linear(share=share, trainable=trainable, layout=layout)))
    rotation = next(module for module in model.modules() if isinstance(module, LinearRotation))
    angles = rotation.frequencies(torch.device("cpu")).double()
    still = patch_model(base(family).double(), "nope")
    size = recorded(still, 0, ids)[0].shape[-1]
    assert len(angles) == int(size * share) // 2
    # Bases that turn whole heads know pairs of whole heads only; the others turn the first dimensions of each.
    whole = family not in ("gpt2", "opt", "gpt_neox", "phi", "phi3")
    for actual, untouched in zip(recorded(model, 0, ids), recorded(still, 0, ids), strict=True):
        expected = turned(untouched, angles, size if whole else 2 * len(angles), layout)
        assert distance(actual, expected) < 1e-6  # cosines reach some bases' attention in float32 at most
        assert distance(actual, untouched) > DIFFERENT


@pytest.mark.rows(default=9, slow=27)
@torch.no_grad()
@matrix(family=FAMILIES, case=CASES)
def test_it_verifies_generates_and_is_saved_loaded_and_undone(family, case, tmp_path):
    ids = tokens(2, 20)
    stock = full(base(family), ids)
    model = patched(family, case)
    assert (report := verify(model)), report
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0, "max_new_tokens": 5}
    made = model.generate(ids, output_scores=True, return_dict_in_generate=True, **options)
    again = full(model, made.sequences[:, :-1])
    for step, scores in enumerate(made.scores):
        assert_same(scores, again[:, 19 + step])
    expected = full(model, ids)
    assert distance(expected, stock) > DIFFERENT
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert full(loaded, ids).equal(expected)
    assert {name: p.tolist() for name, p in loaded.named_parameters() if "angles" in name} == {
        name: p.tolist() for name, p in model.named_parameters() if "angles" in name
    }
    assert verify(loaded)
    assert full(copy.deepcopy(model), ids).equal(expected)
    with pytest.raises(UnsupportedModelError, match="no stock class computes"):
        export_stock(model, tmp_path / "stock")
    unpatch_model(model)
    assert full(model, ids).equal(stock)
    assert model.state_dict().keys() == base(family).state_dict().keys()


@pytest.mark.rows(default=5, slow=12)
@pytest.mark.parametrize("case", ["trainable", "partial", "one-layer", "beside-alibi", "two"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trained_frequencies_get_gradients(family, case):
    """The same with gradient checkpointing as without."""
    found = []
    for checkpointing in (False, True):
        model = patched(family, case).train()
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable()
        ids = tokens(2, 20)
        model(ids, labels=ids).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if "angles" in name})
    assert len(found[0]) == 1
    for name, gradient in found[0].items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(found[1][name], gradient)


@pytest.mark.rows(default=3, slow=5)
@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_transformers_are_enough(family, tmp_path):
    """A sub-class that only names `rope_parameters` is `rope` with them, and can be exported where that can."""
    if family == "phi3":
        with pytest.raises(ValueError, match="rope"):  # whose config takes no type but longrope
            patch_model(base(family), Quadrupled())
        return
    share = {"partial_rotary_factor": 1.0}
    scaling = {"scaling": {"rope_type": "linear", "factor": 4.0}}
    ids = tokens(2, 30)
    model = patch_model(base(family), Quadrupled())
    expected = full(model, ids)
    assert verify(model)
    assert full(patch_model(base(family), "rope", rope_theta=100.0, **share, **scaling), ids).equal(expected)
    model.save_pretrained(tmp_path / "patched")
    assert full(from_pretrained(tmp_path / "patched"), ids).equal(expected)
    if family not in ("gpt2", "opt"):
        export_stock(model, tmp_path / "stock")
        assert full(type(base(family)).from_pretrained(tmp_path / "stock"), ids).equal(expected)


def test_what_does_not_fit_is_refused():
    before = tiny("llama")
    for wrong in (Linear(share=0.1), Linear(share=1.5)):
        with pytest.raises(ValueError, match=r"linear_rotation: \d+ frequencies do not fit heads of 8"):
            patch_model(before, wrong)
    with pytest.raises(UnsupportedModelError, match="linear_rotation: llama rotates by halves"):
        patch_model(before, Linear(layout="interleaved"))
    assert not hf_posenc.is_patched(before)


def test_shapes_of_what_a_module_computes_are_checked(monkeypatch):
    """As many tokens as heads: frequencies by head, (H, F), would pass for those of each position."""
    with monkeypatch.context() as patch:
        patch.setattr(LinearRotation, "frequencies", lambda module, device: torch.ones(4, 4, device=device))
        with pytest.raises(
            ValueError, match=r"frequencies of LinearRotation, \(F,\), must have the shape \(any\), not"
        ):
            patch_model(tiny("llama"), Linear())(tokens(1, 4))


def in_form(angles, form):
    """Return angles (..., F) as a stock attention takes them, written out; see `RotationFacts.angles`."""
    if form == "complex":
        return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    repeated = {
        "once": angles,
        "each twice": torch.stack([angles, angles], -1).flatten(-2),
        "list twice": torch.cat([angles, angles], -1),
    }[form]
    return repeated.cos().float(), repeated.sin().float()


SPECIAL = tuple(
    """
    gpt_oss cohere cohere2 deepseek_v2 deepseek_v3 minicpm3 bailing_hybrid llama4_text mimo_v2_flash laguna
    persimmon lfm3 qwen3_next qwen3_5_text qwen2_vl_text glm4v_text glm4v_moe_text ernie4_5_vl_moe_text
    hunyuan_vl_text qwen3_omni_moe_text muse_glimmer_text step3p5 mistral4 modernbert-decoder granitemoehybrid
    minimax jetmoe gemma3_text
    """.split()
)


@pytest.mark.rows(default=3, slow=28)
@torch.no_grad()
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("model_type", [t for t in SPECIAL if t in CONFIG_MAPPING])  # an older release lacks some
def test_it_turns_whatever_form_a_base_takes_angles_in(model_type, share, tmp_path):
    """Against the stock model with its module of angles replaced by the formula in float64."""
    ids = torch.arange(3, 23)[None]
    stock, model = decoder(model_type), decoder(model_type)
    own, facts = BaseModel.of(stock), family_for(model_type).rotation
    size = own.rotation.dims.head_dim
    count = int(size * share) // 2
    frequencies = 0.7 * (1 - torch.arange(count, dtype=torch.float64) / count)
    still = 0 if facts.slices_rotary else size // 2 - count

    def literal(x, position_ids, *args, **kwargs):
        positions = position_ids[0] if position_ids.ndim == 3 else position_ids
        return in_form(nn.functional.pad(positions[..., None] * frequencies, (0, still)), facts.angles)

    own.modules.rotary.forward = literal
    if facts.attention_size is not None:
        for attention in own.modules.attentions:
            setattr(attention, facts.attention_size, 2 * count)
    expected = out(stock(ids, use_cache=False))
    patch_model(model, Linear(first=0.7, share=share, layout=own.rotation.pairs))
    found = out(model(ids, use_cache=False))
    assert ((found - expected).norm() / expected.norm()).item() < 2e-5
    assert verify(model).ok
    model.save_pretrained(tmp_path / "patched")
    assert out(from_pretrained(tmp_path / "patched")(ids, use_cache=False)).allclose(found, atol=1e-5)
    with pytest.raises(UnsupportedModelError, match="no stock class"):
        export_stock(model, tmp_path / "stock")
    if facts.parameter_coordinates is not None:
        axes = torch.stack([ids, ids // 2, ids % 5])
        with pytest.raises(ValueError, match="several coordinates"):
            model(ids, position_ids=axes, use_cache=False)


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="an older transformers does not have it")
def test_frequencies_for_one_size_of_heads():
    """Layers with heads of another size are refused, and those that are alike get as many frequencies as they have."""
    with pytest.raises(UnsupportedModelError, match="heads of different sizes"):
        patch_model(decoder("gemma4_text"), Linear())
    for kind, size in (("sliding_attention", 8), ("full_attention", 16)):
        model = patch_model(decoder("gemma4_text"), Linear(layers=kind))
        assert verify(model).ok
        assert [each.count for each in model.modules() if isinstance(each, LinearRotation)] == [size // 2]

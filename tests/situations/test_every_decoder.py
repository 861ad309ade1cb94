"""Every model type that is served: what it computes, in every situation, against its own eager attention.

The oracle is the stock model with its rotation stubbed, running its own eager attention with the scheme inside, from the
formulas of `cases.py`: whatever is special about a type (norms, caps, sinks, experts, windows) is in it.
"""

import copy
import inspect
import itertools
import pickle
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from calls import FORMS
from cases import CASES
from decoders import WITHOUT_TEMPERATURE, auto_class, decoder, has_head, out
from matrix import matrix
from rows import ROWS
from situations import EMBEDDING_SCHEMES, JOINING, ROTARY_SCHEMES, SCORE_SCHEMES, WITHOUT_POSITIONS, in_turn, randomize
from stock_attention import LOWEST, formula, pairs, scheme_in
from transformers import CONFIG_MAPPING, AutoConfig, DynamicCache

import hf_posenc
from hf_posenc import patch_model, unpatch_model, verify
from hf_posenc.checkpoints.model_classes import PosEncMixin
from hf_posenc.core.forms import Bias, Slopes
from hf_posenc.core.frequency_edits import EDITS, Edit
from hf_posenc.core.layer_state import STATE, OnAttention
from hf_posenc.core.modules import PositionEmbedding, PositionModule
from hf_posenc.core.registry import family_for, scheme_class, supported_model_types
from hf_posenc.families.base import base_model_type, resolve
from hf_posenc.families.refused import missing_release
from hf_posenc.schemes.base import by_layer_type
from hf_posenc.transformers_glue.derived_classes import stock_class

# An older transformers does not have all of them, or not as they are served.
SERVED = tuple(t for t in supported_model_types() if t in CONFIG_MAPPING and missing_release(t) is None)
EXACT = 2e-4  # relative norm of a difference in float32: two ways of adding up the same numbers
LENGTH = 20
PREFIX = 14  # tokens that the oracle computes, whose formulas go through all pairs one by one

# What the stock model has already: with it patched, nothing changes.
NATIVE = {"bloom": "alibi", "mpt": "alibi", "jamba": "nope", "kimi_linear": "nope", "nemotron_h": "nope"}

SCHEMES = {scheme: row.variants[""] for scheme, row in ROWS.items()}

BIASES = tuple(scheme for scheme in SCORE_SCHEMES if FORMS.get(scheme) in (Bias, Slopes))
"""Schemes that add a number to a score, whatever is compared."""
SCALES_QUERIES = {"inkling2_text", "inkling_text", "llama4_text", "ministral3", "mistral4"}
"""Types whose queries grow with their position."""
COUNTS_SLOTS = {"inkling_text", "llama4_text"}
"""Types whose own factor on queries counts the tokens of the row, padding and other documents too. What replaces
rotation replaces the factor."""
JOINS_DOCUMENTS = set(
    """
    afmoe bailing_hybrid bamba biogpt evolla falcon falcon_h1 gpt_oss granitemoehybrid hunyuan_vl_text inkling2_text
    inkling_text jamba
    kimi_linear lfm2 lfm2_moe lfm3 minimax nemotron_h olmo_hybrid opt qwen3_5_moe_text qwen3_5_text qwen3_next
    """.split()
)
"""Types in which documents of one row see each other, stock or not: a state runs on, or masks get no position ids."""

MAKES_NO_CACHE = {"granite4_vision_text"}
"""Types to which the model around them gives a cache."""

WITHOUT_CACHE = {"openai-gpt"}
"""Types that compute everything anew at each step."""
CANNOT_ROTATE = {"kimi_linear"}
"""Types that rotate nothing, and whose queries and keys (latent attention) nothing from outside can turn."""
LOSES_NUMBERS = set(
    """
    axk1 bailing_hybrid deepseek_v2 deepseek_v3 gemma3n_text gemma4_text gemma4_unified_text glm4_moe_lite jetmoe
    kimi_linear minicpm3 mistral4 openai-gpt youtu
    """.split()
)
"""Types that cannot cache numbers beside their keys: latent attention, keys that layers or experts share, no cache."""


FOLLOWING = tuple(scheme for scheme in SCHEMES if scheme_class(scheme)().keeps_frequencies)
"""Schemes that rotate by the base's own frequencies, at the call."""
LIKE_STOCK = {"far_rope": {"near": LENGTH}, "rope_by_head": {}}
"""Hyper-parameters with which they compute what the stock model does."""
ONE_PAIR = {"gpt_neox", "mimo_v2_flash", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "stablelm"}
"""Types whose tiny models rotate one pair of each head: where the fastest pair turns, all do."""
NORMS_AFTER_ROTATION = {"hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text"}
"""Types whose queries and keys are normed after they are rotated, dimension by dimension."""
PARTED_BY_US = {"bloom", "mpt", "openai-gpt", "xglm"}
"""Types in which they do so in a stock model only."""


def relative(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


def without_rotation(model):
    """Stub the modules that make cosines and sines, in place: of any shape, the angle is 0. A bias by distance is 0."""
    for module in model.modules():
        if "RelativeLogits" in type(module).__name__:
            torch.nn.init.zeros_(module.proj)
        if "RotaryEmbedding" in type(module).__name__:

            def forward(*args, stock=module.forward, **kwargs):
                turned = stock(*args, **kwargs)
                if isinstance(turned, torch.Tensor):  # complex numbers
                    return torch.ones_like(turned)
                return torch.ones_like(turned[0]), torch.zeros_like(turned[1])

            module.forward = forward
    return model


@torch.no_grad()
def oracle(model_type, scheme, patched=None, change=lambda model: model):
    """Return the logits that a scheme must give, from the stock model and the formulas of `cases.py`.

    Args:
        model_type: of transformers.
        scheme: its name.
        patched: a patched model, whose position parameters are taken; None where the scheme has none.
        change: what is done to the stock model before.

    Returns:
        Logits of the first `PREFIX` tokens. None for `rope` where the base rotates nothing; for schemes that join the
        base's positions; and for schemes whose term depends on queries and keys where a type attends in code of its
        own, which takes no term but a bias.
    """
    stock = decoder(model_type, **(WITHOUT_TEMPERATURE.get(model_type, {}) if scheme not in ROTARY_SCHEMES else {}))
    family, ids = family_for(model_type), tokens()[:, :PREFIX]
    if scheme in FOLLOWING:  # `check` compares them with the stock model itself
        return None
    if scheme in JOINING:  # their formula needs what enters an attention: test_formulas.py
        return None
    if scheme in ROTARY_SCHEMES:
        if family.rotation.rotary is None:
            return None
        own = copy.deepcopy(stock.config.rope_parameters)
        for each in own.values() if all(isinstance(value, dict) for value in own.values()) else [own]:
            each.update(hyperparameters(model_type, scheme))
        by_layer = getattr(stock.config, "layer_rope_theta", None)
        thetas = (
            {} if by_layer is None else {"layer_rope_theta": [own["rope_theta"] if each else 0 for each in by_layer]}
        )
        return out(decoder(model_type, rope_parameters=own, **thetas)(ids, use_cache=False))
    change(stock).set_attn_implementation("eager")
    resolved = resolve(family, stock)
    if (table := resolved.position_table) is not None:
        for tensor in (*table.parameters(), *table.buffers()):
            tensor.zero_()
    window = getattr(stock.config, "sliding_window", None)
    assert not window or window >= PREFIX, "the oracle's mask has no window"
    if scheme in EMBEDDING_SCHEMES:
        added = vectors_at_the_input(scheme, patched)
        resolved.layers[0].register_forward_pre_hook(lambda layer, args: (args[0] + added, *args[1:]))
        scheme = "nope"

    paths = {module: f"{path}." for path, module in stock.named_modules() if module in resolved.attentions}

    def parameters(attention):
        """Return what a layer's scheme reads: the parameters in its attention, and those that are in none."""
        elsewhere = tuple(path for module, path in paths.items() if module is not attention)
        return {
            name.rpartition(".")[2]: parameter.detach().double()
            for name, parameter in (patched.named_parameters() if patched is not None else ())
            if ".posenc." in f".{name}" and not name.startswith(elsewhere)
        }

    if all(hasattr(sys.modules[type(module).__module__], "eager_attention_forward") for module in paths):
        with scheme_in(list(paths), scheme, SCHEMES[scheme], parameters):
            return out(without_rotation(stock)(ids, use_cache=False))
    if scheme not in (*WITHOUT_POSITIONS, *BIASES):
        return None
    masks = {}
    for attention in paths:
        same = torch.zeros(1, stock.config.num_attention_heads, PREFIX, 1)
        bias, _ = pairs(formula(scheme), same, same, same, parameters(attention), softmax_scale=1.0, **SCHEMES[scheme])
        masks[attention] = bias.clamp(min=LOWEST).float()
    if model_type in OWN_ORACLES:
        mask, *others = masks.values()
        assert all(other.equal(mask) for other in others), "these oracles put one bias into all layers"
        return OWN_ORACLES[model_type](stock, ids, mask[0].masked_fill(mask[0] == LOWEST, 0), mask)

    def see(attention, args, kwargs):
        """Forward pre-hook of the stock attention, which gets the scheme as a float mask."""
        given = inspect.signature(attention.forward).bind(*args, **kwargs)
        assert "attention_mask" in given.arguments
        given.arguments["attention_mask"] = masks[attention]
        return given.args, given.kwargs

    for attention in paths:
        attention.register_forward_pre_hook(see, with_kwargs=True)
    return out(without_rotation(stock)(ids, use_cache=False))


def vectors_at_the_input(scheme, patched):
    """Return the vectors (PREFIX, E) that a scheme adds to what enters the first layer.

    How large sinusoids are is asked of the patched model; test_special_types.py says how large they have to be.
    """
    table = next(case.table for case in CASES if case.scheme == scheme)
    module = next(module for module in patched.modules() if isinstance(module, PositionEmbedding))
    size = patched.config.hidden_size
    keywords = {**SCHEMES[scheme], "match": None, "scale": getattr(module, "scale", None)}
    return table(range(PREFIX), size, dict(module.named_parameters()), **keywords).float()


def at_position_zero(stock, ids, bias, mask):
    """Where the angle is 0: the rotation is in the attention's own code."""
    return out(stock(ids, attention_mask=mask, position_ids=torch.zeros_like(ids), use_cache=False))


def divided_at_position_zero(stock, ids, bias, mask):
    """As `at_position_zero`, where the mask is divided by the square root of the size of a head, as the scores are."""
    root = (stock.config.hidden_size // stock.config.num_attention_heads) ** 0.5
    return at_position_zero(stock, ids, bias, torch.where(mask > -1e30, mask * root, mask))


def with_alibi_of_zeros(stock, ids, bias, mask):
    """The mask is added to scores that have no bias of the model's own."""
    heads = stock.config.num_attention_heads
    stock.base_model.build_alibi_tensor = lambda *args, **kwargs: torch.zeros(heads, 1, PREFIX)
    return out(stock(ids, attention_mask=mask, use_cache=False))


def with_bias_for_alibi(stock, ids, bias, mask):
    """The mask is turned into bools, so the bias goes in where the model's own is made."""
    bias = bias.expand(stock.config.num_attention_heads, -1, -1)
    stock.base_model.build_mpt_alibi_tensor = lambda *args, **kwargs: bias
    return out(stock(ids, use_cache=False))


def with_bias_on_products(stock, ids, bias, mask):
    """The mask has to be the same for all heads, so the bias is added where the scores are made."""
    multiply = torch.bmm

    def biased(a, b):
        product = multiply(a, b)
        return product + bias if product.shape[1:] == bias.shape[1:] else product

    with mock.patch("torch.bmm", biased):
        return out(stock(ids, use_cache=False))


OWN_ORACLES = {
    "xglm": with_bias_on_products, "gptj": at_position_zero, "codegen": divided_at_position_zero,
    "bloom": with_alibi_of_zeros, "mpt": with_bias_for_alibi,
}  # fmt: skip


def hyperparameters(model_type, scheme):
    if scheme == "rope" and family_for(model_type).rotation.slices_rotary:
        # More than the one pair that a quarter of 8 dimensions is, whose angle is 1 for every base of frequencies.
        return {**SCHEMES[scheme], "partial_rotary_factor": 0.5}
    if (
        scheme in BIASES
        and "share_layers" in ROWS[scheme].values
        and family_for(model_type).names.attention_heads is not None
    ):
        return {**SCHEMES[scheme], "share_layers": False}  # their numbers are as many as heads
    if scheme == "transformer_xl":
        return {"longest": 10000}  # as the formula has it
    return SCHEMES[scheme]


def tokens():
    return torch.arange(3, 3 + LENGTH)[None]


def by_steps(model):
    """Return the logits of a prompt and of generation, token by token, with the model's own cache, if it has one."""
    ids, positions = tokens(), torch.arange(LENGTH)[None]
    if base_model_type(model.config) in WITHOUT_CACHE:
        return torch.cat([out(model(ids[:, : n + 1], use_cache=True))[:, n:] for n in range(LENGTH)], 1)
    cache = DynamicCache(config=model.config) if base_model_type(model.config) in MAKES_NO_CACHE else None
    found = model(ids[:, :12], position_ids=positions[:, :12], past_key_values=cache, use_cache=True)
    steps = [out(found)]
    for n in range(12, LENGTH):
        step = slice(n, n + 1)
        found = model(
            ids[:, step], position_ids=positions[:, step], past_key_values=found.past_key_values, use_cache=True
        )
        steps.append(out(found))
    return torch.cat(steps, 1)


def left_padded(model):
    """Return the logits of the tokens behind some padding."""
    ids = tokens()
    mask = torch.nn.functional.pad(torch.ones_like(ids), (4, 0))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = torch.nn.functional.pad(ids, (4, 0))
    return out(model(padded, attention_mask=mask, position_ids=positions, use_cache=False))[:, 4:]


def packed(model):
    """Return the logits of two documents in one row, whose positions start again."""
    ids = tokens()
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    if family_for(base_model_type(model.config)).rotation.parameter_coordinates is not None:
        positions = positions.expand(4, 1, -1)  # of the text first: some types make no mask of others
    logits = out(model(torch.cat([ids[:, :8], ids[:, :12]], 1), position_ids=positions, use_cache=False))
    return logits[:, :8], logits[:, 8:]


def loader(cls):
    """Return what loads models of one of our classes: its Auto class, or itself where no Auto class knows it."""
    return auto_class(cls.config_class) or cls


def from_config(folder, cls):
    config, auto = AutoConfig.from_pretrained(folder), auto_class(cls.config_class)
    built = cls(config) if auto is None else auto.from_config(config)
    built.load_state_dict(cls.from_pretrained(folder).state_dict())
    return built.eval()


LOADERS = (
    lambda folder, cls: hf_posenc.from_pretrained(folder),
    lambda folder, cls: loader(cls).from_pretrained(folder),
    lambda folder, cls: loader(cls).from_pretrained(folder, trust_remote_code=True),
    lambda folder, cls: loader(cls).from_pretrained(folder, attn_implementation="eager"),
    lambda folder, cls: cls.from_pretrained(folder),
    from_config,
    lambda folder, cls: pickle.loads(pickle.dumps(cls.from_pretrained(folder))),
)
"""The ways to load a checkpoint that give back the model, says the README."""


def refused_additions(model, model_type):
    """Schemes that would change what the base changes itself: the size of its queries, or a factor on them."""
    names = ("q_norm", "q_layernorm", "query_layernorm", "qk_norm")
    norms = any(
        name.rpartition(".")[2] in names and not isinstance(module, torch.nn.Identity)
        for name, module in model.named_modules()
    )
    if model_type in SCALES_QUERIES:
        return {"qk_norm", "temperature"}
    return {"qk_norm"} if norms else set()


def check(model_type, scheme, tmp_path, loaders=LOADERS):
    ids, model = tokens(), decoder(model_type)
    with torch.no_grad():
        before = out(model(ids, use_cache=False))
    stock = copy.deepcopy(model.state_dict())
    if scheme in ROTARY_SCHEMES and model_type in CANNOT_ROTATE:
        with pytest.raises(hf_posenc.UnsupportedModelError, match="rotates nothing"):
            patch_model(model, scheme)
        return
    if scheme == "forgetting" and model_type in LOSES_NUMBERS:
        with pytest.raises(hf_posenc.UnsupportedModelError, match="keeps numbers of each token beside the keys"):
            patch_model(model, scheme)
        return
    if scheme in refused_additions(model, model_type):
        with pytest.raises(hf_posenc.UnsupportedModelError, match=r"itself (norms|multiplies)"):
            patch_model(model, scheme, **hyperparameters(model_type, scheme))
        return
    keeps_rotation = family_for(model_type).rotation.rotary is not None
    if scheme in FOLLOWING and keeps_rotation and model_type in NORMS_AFTER_ROTATION | SCALES_QUERIES:
        with pytest.raises(hf_posenc.UnsupportedModelError, match=r"after their rotation|itself multiplies"):
            patch_model(model, scheme, **hyperparameters(model_type, scheme))
        return
    if scheme in FOLLOWING and keeps_rotation:
        with torch.no_grad(), hf_posenc.patched(model, scheme, **LIKE_STOCK[scheme]):
            assert relative(out(model(ids, use_cache=False)), before) <= 1e-6
    patch_model(model, scheme, seed=0, **hyperparameters(model_type, scheme))
    randomize(model)
    report = verify(model)
    assert report.ok, report
    with torch.no_grad():
        full = out(model(ids, use_cache=False))
        same = NATIVE.get(model_type) == scheme or (scheme == "rope_by_head" and model_type in ONE_PAIR)
        assert same == (relative(full, before) < 1e-3)
        expected = oracle(model_type, scheme, model)
        family = family_for(model_type)
        assert (
            expected is not None
            or family.always_replaced
            or scheme in JOINING + FOLLOWING
            or (scheme in ROTARY_SCHEMES and family.rotation.rotary is None)
        )
        if expected is not None:
            assert same == (relative(expected, before[:, :PREFIX]) < 1e-3)
            assert relative(full[:, :PREFIX], expected) <= EXACT
        if scheme in SCORE_SCHEMES:
            for module in model.modules():
                if isinstance(getattr(module, STATE, None), OnAttention):
                    setattr(module, STATE, replace(OnAttention.of(module), engine="chunked"))
            assert relative(out(model(ids, use_cache=False)), full) <= EXACT
            for module in model.modules():
                if isinstance(getattr(module, STATE, None), OnAttention):
                    setattr(module, STATE, replace(OnAttention.of(module), engine="auto"))
        assert relative(by_steps(model), full) <= EXACT
        counts_slots = model_type in COUNTS_SLOTS and scheme in ROTARY_SCHEMES + JOINING
        if not counts_slots:
            assert relative(left_padded(model), full) <= EXACT
        if not counts_slots and model_type not in JOINS_DOCUMENTS:
            first, second = packed(model)
            assert relative(first, full[:, : first.shape[1]]) <= EXACT
            assert relative(second, full[:, : second.shape[1]]) <= EXACT
    model.train()
    found = model(ids, **({"labels": ids} if has_head(model_type) else {}), use_cache=False)
    (found.loss if has_head(model_type) else out(found).abs().mean()).backward()
    model.eval()
    for owner in [module for module in model.modules() if isinstance(module, PositionModule)]:
        assert all(p.grad is not None and p.grad.norm() > 0 for p in owner.parameters())
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        for load in loaders:
            loaded = load(tmp_path, type(model))
            assert type(loaded) is type(model)
            # Experts lie elsewhere in memory, and one of the loaders asks for another attention.
            assert relative(out(loaded(ids, use_cache=False)), full) <= 1e-5
    with pytest.raises(Exception, match="hf_posenc"):  # of several types: of transformers, or of what it validates with
        stock_class(type(model), PosEncMixin).from_pretrained(tmp_path, attn_implementation="eager")
    unpatch_model(model)
    assert all(value.equal(stock[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        assert out(model(ids, use_cache=False)).equal(before)


@pytest.mark.rows(default=12)
@torch.no_grad()
@pytest.mark.parametrize("model_type", SERVED)
def test_what_a_stock_model_cannot_do(model_type):
    """The exceptions above are those of the stock model, in the situations in which ours are excused."""
    model = decoder(model_type)
    full = out(model(tokens(), use_cache=False))
    assert relative(by_steps(model), full) <= EXACT
    assert (relative(left_padded(model), full) > EXACT) == (model_type in COUNTS_SLOTS)
    _, second = packed(model)
    assert (relative(second, full[:, : second.shape[1]]) > EXACT) == (
        model_type in JOINS_DOCUMENTS | COUNTS_SLOTS | PARTED_BY_US
    )
    family = family_for(model_type)
    assert (family.hybrid or family.joins_documents) == (model_type in JOINS_DOCUMENTS | PARTED_BY_US)


TYPES = ("gpt_oss", "deepseek_v3", "bloom")
"""Types that differ in mechanism: sinks and windows, latent attention, an attention of its own with positions in the mask."""
ALL = [*((t, "alibi") for t in SERVED), *itertools.product([t for t in TYPES if t in SERVED], SCHEMES)]
ALL += in_turn(
    [t for t in SERVED if t not in TYPES][::2], ["rope", "t5", "sinusoidal", "shaw", "nope", "forgetting", "cope"]
)


@pytest.mark.rows(default=8)
@matrix(in_turn(dict.fromkeys(ALL), LOADERS), row=None, loader=None)
def test_a_type_carries_a_scheme(row, loader, tmp_path):
    """ALiBi on all types, all schemes on three, and schemes of other mechanisms on the other types in turn."""
    if tuple(row) == ("bloom", "inkling"):
        with pytest.raises(hf_posenc.UnsupportedModelError, match="which it cannot join"):
            patch_model(decoder("bloom"), "inkling")
        return
    check(*row, tmp_path, [loader])


SCALED = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
"""A scaling of which attentions may read something too. It leaves cosines and sines as large as they are."""
OWN_SCALED = {
    "cosmos3_edge_text": None,  # these two take no scaling
    "ernie4_5_vl_moe_text": None,
    "hunyuan_v1_dense": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32},
    "hunyuan_v1_moe": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32},
    "ministral3": SCALED | {"llama_4_scaling_beta": 0.5},
    "mistral4": SCALED | {"llama_4_scaling_beta": 0.5},
    "phi3": {"rope_type": "longrope", "short_factor": [1.5] * 4, "long_factor": [1.5] * 4, "attention_factor": 1.0},
    "phimoe": {"rope_type": "linear", "factor": 4.0, "short_mscale": 1.2, "long_mscale": 1.2}
    | {"original_max_position_embeddings": 16},
}
"""Type -> a scaling with all that its own code reads, where that is another one."""
NO_LONGROPE = {"ernie4_5_vl_moe_text", "gemma4_text", "gemma4_unified_text", "step3p5"}
"""Types that take no frequencies of their own."""
ONLY_ITS_OWN = {"ernie4_5_vl_moe_text": "default", "phi3": "linear", "phimoe": "short_mscale"}
"""Types that need another scaling than a factor of 1 where they have none, and what the refusal says of it."""


def rotates_by_config(model_type):
    return family_for(model_type).rotation.rotary is not None or model_type in ("falcon", "gpt_neox_japanese")


@pytest.mark.rows(default=5, slow=60)
@torch.no_grad()
@matrix([(t, scaled) for t in SERVED for scaled in (0, 1) if rotates_by_config(t)], model_type=None, scaled=None)
def test_an_edit_that_changes_nothing(model_type, scaled, tmp_path, monkeypatch):
    """It keeps all that the type's own code reads of `rope_parameters`, live, saved and exported, or is refused by name."""
    nearly = Edit("pairs", 2, apply=lambda frequencies, pairs: tuple(w * (1 + 1e-12) for w in frequencies))
    monkeypatch.setitem(EDITS, "nearly the same", nearly)
    base, facts = decoder(model_type), family_for(model_type).rotation
    parameters = copy.deepcopy(base.config.rope_parameters)
    added = OWN_SCALED.get(model_type, SCALED)
    if scaled and added is None:
        return
    if scaled:
        for each in by_layer_type(parameters).values():
            each.update(added if each["rope_type"] in ("default", added["rope_type"]) else {})
        base = decoder(model_type, rope_parameters=parameters)
    expected, own = out(base(tokens(), use_cache=False)), by_layer_type(base.config.rope_parameters)

    def everywhere(value):
        return value(own[None]) if None in own else {kind: value(each) for kind, each in own.items()}

    def same_again(each):
        kind = each["rope_type"]
        factor = {"factor": each.get("factor", 1.0)} if kind != "longrope" else {}
        lists = {key: each[key] for key in ("short_factor", "long_factor") if key in each}
        return {"rope_type": "linear" if kind == "default" else kind, **factor, **lists}

    edits = {
        "frequencies": {"name": "nearly the same"},  # an edit that leaves them the same to the last digit is refused
        "rope_theta": everywhere(lambda each: each["rope_theta"]),
        "scaling": everywhere(same_again),
    }
    for field, value in edits.items():
        model = copy.deepcopy(base)
        refused = None
        if field == "frequencies":
            refused = "cannot rotate by" if model_type in NO_LONGROPE else None
            if not scaled and any(each["rope_type"] == "yarn" for each in own.values()):
                refused = "yarn multiplies cosines and sines as well: give"
        elif field == "scaling" and not scaled:
            refused = ONLY_ITS_OWN.get(model_type)
        if refused is not None:
            with pytest.raises(ValueError, match=refused):
                patch_model(model, "rope", **{field: value})
            continue
        patch_model(model, "rope", **{field: value})
        assert relative(out(model(tokens(), use_cache=False)), expected) <= 1e-5, field
        if scaled and field != "rope_theta":
            model.save_pretrained(tmp_path / field)
            assert relative(out(LOADERS[0](tmp_path / field, type(model))(tokens(), use_cache=False)), expected) <= 1e-5
            if facts.rotary is not None and facts.config_thetas is None:
                hf_posenc.export_stock(model, tmp_path / f"{field}-stock")
                stock = type(base).from_pretrained(tmp_path / f"{field}-stock")
                assert relative(out(stock(tokens(), use_cache=False)), expected) <= 1e-5

"""Every language model of transformers, multimodal ones too: served, or refused with a reason, and then left as it was."""

import pytest
import torch
import transformers
from decoders import SIZES
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto import modeling_auto

import hf_posenc
from hf_posenc import UnsupportedModelError, patch_model
from hf_posenc.checkpoints.class_names import family_of
from hf_posenc.core import registry
from hf_posenc.core.registry import family_for, reason_against, refusals, supported_model_types
from hf_posenc.families import Family
from hf_posenc.families.base import base_model_type
from hf_posenc.families.refused import REFUSED

CAUSAL = tuple(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
TYPES = tuple(
    {
        model_type: None
        for table in (
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        )
        for model_type in table
    }
)
SERVED = supported_model_types()  # each is in test_every_decoder.py
SMALL = 5_000_000  # parameters; what has more stays on the meta device
SETTINGS = {"reformer": {"is_decoder": True}, "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}}


def meant(model_type):
    """Return what models of a type say they are: gpt-sw3 is another name of gpt2."""
    return CONFIG_MAPPING[model_type].model_type


@pytest.mark.filterwarnings("ignore")  # what stock configs say while they are made is their own business
@pytest.mark.parametrize("model_type", TYPES)
def test_a_type_is_served_or_refused_with_a_reason(model_type):
    """A newer transformers may fail here, and the package works with it all the same: it refuses what it does not know."""
    if model_type in refusals():
        with pytest.raises(UnsupportedModelError) as raised:
            family_for(model_type)
        assert str(raised.value) == f"model type {model_type!r} cannot be patched: {reason_against(model_type)}"
        return
    try:
        config = CONFIG_MAPPING[model_type]()
    except ValueError as error:
        pytest.skip(f"its config has no default: {error}")
    reason = None
    try:
        family_of(config)
    except UnsupportedModelError as error:
        reason = str(error)
    assert reason is None or "is not supported (" not in reason, (
        f"nothing is known of {model_type}: describe it in hf_posenc/families/table.py, or say in "
        f"hf_posenc/families/refused.py what stands in the way ({reason})"
    )


def built(model_type):
    """Return a model of a type, tiny where its config has the sizes that others have, on the meta device if it is large."""
    stock, settings = CONFIG_MAPPING[model_type], SETTINGS.get(model_type, {})
    problems = []
    for sizes in (SIZES, {}):
        try:
            known = set(stock().to_dict()) | set(stock.attribute_map)
            config = stock(**{key: value for key, value in sizes.items() if key in known}, **settings)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            break
        except Exception as error:  # whatever a config or a model finds wrong with these sizes
            problems.append(f"{type(error).__name__}: {error}".strip().splitlines()[0])
    else:
        pytest.skip(f"no model of {model_type} can be built by these sizes, or by default: {problems[-1]}")
    if sum(parameter.numel() for parameter in model.parameters()) > SMALL:
        return model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)


def facts(model):
    """Return what a patch changes: classes, configs, modules, hooks, attributes, and which tensors there are."""
    modules = [
        (name, type(module), sorted(vars(module)), list(module._forward_hooks), list(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]
    tensors = [(name, id(tensor)) for name, tensor in (*model.named_parameters(), *model.named_buffers())]
    configs = [(id(module.config), type(module.config)) for module in model.modules() if hasattr(module, "config")]
    return type(model), modules, tensors, configs, model.config.to_dict()


@pytest.mark.rows(default=8)
@pytest.mark.filterwarnings("ignore")  # what stock configs and models say while they are built is their own business
@pytest.mark.parametrize("model_type", [model_type for model_type in CAUSAL if meant(model_type) not in SERVED])
def test_a_refused_model_is_left_as_it_was(model_type):
    model = built(model_type)
    model_type = model.config.model_type  # AutoModelForCausalLM takes the language model out of some multimodal ones
    if base_model_type(model.config) in SERVED:
        return
    before = facts(model)
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for scheme in ("alibi", "nope", "rope", "learned"):
        with pytest.raises(UnsupportedModelError) as raised:
            patch_model(model, scheme)
        inside = base_model_type(model.config)
        assert str(raised.value).endswith(f"model type {inside!r} cannot be patched: {reason_against(inside)}")
    with pytest.raises(UnsupportedModelError, match=repr(inside)):
        hf_posenc.describe(model)
    assert facts(model) == before
    assert all(value.is_meta or value.equal(values[name]) for name, value in model.state_dict().items())


def test_a_reason_is_for_what_is_not_served():
    assert not {*REFUSED} & {*SERVED}, "take them off families/refused.py"


def test_the_reason_is_given_before_weights_are_read(tmp_path):
    transformers.MambaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="'mamba' cannot be patched: it has no attention"):
        hf_posenc.from_pretrained(tmp_path, scheme="alibi")
    assert "it has no attention" in hf_posenc.inspect(tmp_path).problem


OTHERS = {
    "clip": (
        transformers.CLIPConfig,
        {},
        "of the language model inside it is said: model type 'clip_text_model' is not",
    ),
    "llava": (
        transformers.LlavaConfig,
        {"text_config": {"model_type": "mamba"}},
        "of the language model inside it is said: model type 'mamba' cannot be patched: it has no attention",
    ),
    "t5": (transformers.T5Config, {}, "it is an encoder-decoder, whose layers also attend to another sequence"),
}


@pytest.mark.parametrize("model_type", OTHERS)
def test_what_is_inside_a_model_of_no_known_type_is_said(model_type, tmp_path):
    """By its own config, since checkpoints of one multimodal type have language models of several types."""
    cls, settings, message = OTHERS[model_type]
    cls(**settings).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"'{model_type}' cannot be patched: {message}"):
        hf_posenc.from_pretrained(tmp_path, scheme="alibi")
    assert f"{model_type!r} cannot be patched" in hf_posenc.inspect(tmp_path).problem


def test_whoever_has_a_family_for_a_refused_type_can_register_it(monkeypatch):
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    family = registry.register_family(Family(model_types=("mamba",)))
    assert family_for("mamba") is family
    assert reason_against("mamba") is None
    assert "mamba" not in refusals()

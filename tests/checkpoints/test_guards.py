"""What stands in a saved config so that no stock class accepts it, and how our classes take it off again."""

import copy
import json
import pickle

import pytest
import torch
from decoders import decoder, stock_model
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_posenc
from hf_posenc.checkpoints.config import ACTIVATIONS, CHECKED, NUMBER, PREFIX, guarded
from hf_posenc.checkpoints.model_classes import config_class
from hf_posenc.core.registry import supported_model_types
from hf_posenc.families.refused import missing_release

SERVED = [t for t in supported_model_types() if t in CONFIG_MAPPING and missing_release(t) is None]
# They declare no setting of this name, or hold configs that have one.
WITHOUT = {"inkling2_text", "inkling_text", "mllama", "musicgen", "musicgen_melody"}
NEVER_TIED = {"dbrx"}


def made_of(stock, model_type):
    """Return a config of ours with both values of the setting in turn, as `patch_model` leaves it."""
    entry = {"schemes": [{"scheme": "nope", "layers": None, "window": None}], "hf_posenc_version": "0.2.0"}
    for tied in (False,) if model_type in NEVER_TIED else (False, True):
        yield tied, config_class(stock)(tie_word_embeddings=tied, position_encoding=entry)


@pytest.mark.parametrize("model_type", [t for t in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if t not in WITHOUT])
def test_every_decoders_config_class_refuses_the_setting(model_type):
    stock = CONFIG_MAPPING[model_type]
    for value in (True, False):
        with pytest.raises(Exception, match=f"{CHECKED}.*expected bool.*{PREFIX}"):
            stock(**{CHECKED: guarded(value)})
        with pytest.raises(Exception, match=f"{CHECKED}.*expected bool.*{PREFIX}"):
            stock.from_dict({CHECKED: guarded(value)}, attn_implementation="eager", **{CHECKED: False})


def test_a_family_of_a_class_that_does_not_check_has_a_checked_number():
    for model_type in WITHOUT & set(SERVED):
        config = config_class(CONFIG_MAPPING[model_type])()
        assert config.to_diff_dict()[NUMBER] == guarded(getattr(config, NUMBER))
        with pytest.raises(Exception, match=f"{NUMBER}.*expected float.*{PREFIX}"):
            CONFIG_MAPPING[model_type](**{NUMBER: guarded(0.02)})


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # GPT-BigCode in older releases of transformers
@pytest.mark.parametrize("model_type", SERVED)
def test_a_saved_config_is_refused_by_its_stock_class_and_read_by_ours(model_type, tmp_path):
    stock = CONFIG_MAPPING[model_type]
    for tied, config in made_of(stock, model_type):
        config.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert saved[CHECKED] == guarded(tied)
        for options in ({}, {"attn_implementation": "eager"}):
            with pytest.raises(Exception, match=PREFIX):
                stock.from_pretrained(tmp_path, **options)
        # The dict in memory, with the one guard replaced that names our attention.
        with pytest.raises(Exception, match=PREFIX), torch.device("meta"):
            stock_model(stock.from_dict({**config.to_dict(), "attn_implementation": "eager"}))
        read, _ = PreTrainedConfig.get_config_dict(tmp_path)  # JSON has no infinity, and transformers its own way
        ways = {
            "from_pretrained": type(config).from_pretrained(tmp_path),
            "AutoConfig": AutoConfig.from_pretrained(tmp_path),
            "from_dict": type(config).from_dict(saved),
            "from_json_file": type(config).from_json_file(tmp_path / "config.json"),
            "of the saved dict": type(config)(**read),
            "of the whole dict": type(config)(**config.to_dict()),
            "for_model": AutoConfig.for_model(**read),
            "copy": copy.copy(config),
            "deepcopy": copy.deepcopy(config),
            "pickle": pickle.loads(pickle.dumps(config)),
        }
        for way, made in ways.items():
            assert type(made) is type(config), way
            assert getattr(made, CHECKED) is tied, way
            assert not any(PREFIX in str(getattr(made, name, "")) for name in (*ACTIVATIONS, NUMBER)), way
            assert made.to_diff_dict() == config.to_diff_dict(), way


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_settings_given_while_reading(model_type, tmp_path):
    config = next(config for tied, config in made_of(CONFIG_MAPPING[model_type], model_type) if tied)
    config.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(
        tmp_path, tie_word_embeddings=False, num_labels=3, problem_type="single_label_classification"
    )
    assert (read.tie_word_embeddings, read.num_labels) == (False, 3)
    assert read.problem_type == "single_label_classification"
    read.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == read.to_diff_dict()
    read.update(config.to_diff_dict())
    assert getattr(read, CHECKED) is True


def test_what_reads_any_config_can_read_ours(tmp_path):
    """The Trainer resumes, and AutoTokenizer looks for a name, by the class that stock configs derive from."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = hf_posenc.patch_model(decoder("llama"), "nope")
    model.save_pretrained(tmp_path, tokenizer=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())))
    assert PreTrainedConfig.from_json_file(tmp_path / "config.json").transformers_version
    # As where hf_posenc is not installed.
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "unknown", "auto_map": {}}))
    assert AutoTokenizer.from_pretrained(tmp_path)


def test_peft_finds_the_setting_in_the_dict():
    import peft

    model = hf_posenc.patch_model(decoder("llama", tie_word_embeddings=True), "nope")
    assert peft.tuners.tuners_utils.BaseTuner.get_model_config(model)[CHECKED] is True

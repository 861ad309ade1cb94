"""The example that runs lm_eval: no prompt is cut, and where definitions coincide the numbers are ours."""

import importlib.util

import pytest
import torch

import hf_posenc
from hf_posenc.evaluation import measure_context

INSTALLED = importlib.util.find_spec("lm_eval") is not None
needs_lm_eval = pytest.mark.skipif(not INSTALLED, reason="pip install lm_eval, which is an extra, runs this")
# What lm_eval and its dependencies say of themselves.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def model(tiny_checkpoints):
    from transformers import LlamaForCausalLM

    return hf_posenc.patch_model(LlamaForCausalLM.from_pretrained(tiny_checkpoints / "llama"), "alibi").eval()


@pytest.fixture
def tokenizer(tiny_checkpoints):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_checkpoints / "llama")


@pytest.fixture
def run(recipes, monkeypatch):
    monkeypatch.syspath_prepend(str(recipes / "harness"))
    return importlib.import_module("run")


@pytest.fixture
def adapted(run, model, tokenizer):
    def make(max_length):
        from lm_eval.models.huggingface import HFLM

        return run.whole_prompts(HFLM)(pretrained=model, tokenizer=tokenizer, max_length=max_length, device="cpu")

    return make


@needs_lm_eval
@pytest.mark.parametrize("max_length", [5, 16])
def test_rolling_likelihood_is_a_sliding_window_of_the_longest_stride(model, tokenizer, adapted, max_length):
    """The harness feeds `max_length` tokens and has the token after them predicted as well: our windows have one more.

    Its windows share one token, the last one reaches back a full length, and so do ours with a stride of all but one.
    """
    from lm_eval.api.instance import Instance

    text = "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse."
    (theirs,) = adapted(max_length).loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    tokens = torch.tensor([tokenizer.eos_token_id, *tokenizer(text, add_special_tokens=False).input_ids])
    assert len(tokens) > 2 * max_length + 1
    (ours,) = measure_context(model, [tokens], lengths=[max_length + 1], stride=max_length)
    assert ours.sliding.tokens == len(tokens) - 1
    assert -theirs == pytest.approx(ours.sliding.nll, rel=1e-5)


@needs_lm_eval
def test_the_example_task_runs_offline(run, tiny_checkpoints, model, tokenizer):
    model.save_pretrained(tiny_checkpoints / "patched", tokenizer=tokenizer)
    results = run.main([str(tiny_checkpoints / "patched"), "--max-length", "512"])
    accuracy = results["results"]["hf_posenc_last_word"]["acc,none"]
    assert accuracy * 8 == round(accuracy * 8)


class Cutting:
    """What `HFLM` does with prompts that are too long, in a few lines: it cuts them."""

    max_length = 16

    def tok_batch_encode(self, strings, left_truncate_len=None, truncation=False):
        tokens = torch.zeros(len(strings), max(map(len, strings)), dtype=torch.long)
        return tokens[:, -(left_truncate_len or 0) :], None

    def _loglikelihood_tokens(self, requests, disable_tqdm=False):
        return [len(prompt + answer) for _, prompt, answer in requests]


def test_a_prompt_that_would_be_cut_is_refused(run):
    adapted = run.whole_prompts(Cutting)()
    assert adapted.tok_batch_encode(["a" * 12, "b"], left_truncate_len=12)[0].shape == (2, 12)
    with pytest.raises(ValueError, match=r"take 17 tokens.* fit 16.*--max-length 17"):
        adapted.tok_batch_encode(["a" * 13, "b"], left_truncate_len=12)
    assert adapted._loglikelihood_tokens([("", [1] * 9, [2] * 8)], disable_tqdm=True) == [17]
    with pytest.raises(ValueError, match="take 17 tokens"):
        adapted._loglikelihood_tokens([("", [1] * 9, [2] * 8), ("", [1] * 9, [2] * 9)])


@needs_lm_eval
@pytest.mark.parametrize("kind", ["generate_until", "loglikelihood"])
def test_the_harness_itself_would_cut_and_is_stopped(adapted, kind):
    from lm_eval.api.instance import Instance

    text = "Call me Ishmael. Some years ago, never mind how long precisely."
    arguments = (text, {"max_gen_toks": 4}) if kind == "generate_until" else (text, " now")
    request = Instance(kind, {}, arguments, 0)
    with pytest.raises(ValueError, match="would cut the prompt's beginning"):
        getattr(adapted(16), kind)([request])
    assert len(getattr(adapted(512), kind)([request])) == 1

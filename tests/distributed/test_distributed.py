"""Two processes compute what one computes: context parallel, data parallel, sharded; and what cannot be exact is refused.

The expected values are those of the same model in one process. Logits and weights are compared in float64; losses are
formed in float32 by transformers, whatever the model's dtype.
"""

import itertools
import re

import pytest
import torch
from decoders import decoder
from distributed_jobs import (
    attend_inside_the_shard,
    compare_calibration,
    compare_context_parallel,
    compare_measurements,
    compare_tensor_parallel,
    compare_training,
    fewer_heads,
    inspect_wrapped,
    leaves_no_trace,
    misuse,
    patch_tensor_parallel,
    refused,
    resume_calibration,
    shard,
)
from families import FAMILIES, tiny, tokens
from matrix import matrix
from processes import Processes
from situations import BASES, CASES, SCHEMES, in_turn, skip_if_refused
from transformers import CONFIG_MAPPING

from hf_posenc import context_group, shard_sequence
from hf_posenc.families.refused import missing_release

# In float64 sums in another order differ in the last digits, layer by layer; Gemma rounds its soft cap to float32.
EXACT, ROUNDED = 1e-12, 2e-6
# Norms and losses are computed in float32 by transformers: 6e-8 per rounding, on losses of about 10.
LOSS = 5e-6
# 6.8e-6 in a network between distances and scores; a key that one shard has not seen is 1e-2 and more.
GRADIENTS = 2e-5
# transformers 5.17 gives Gemma 2 an sdpa that leaves out its soft cap; context_parallel has it.
CAPPED = {"gemma2": {"config": {"attn_implementation": "eager"}}}
# In float64; a step of Adam divides by the gradient's size, which makes its rounding a step's where it is small.
CALIBRATED = 1e-9
# Of a model in float32, whose logits are of the order of 10.
FLOAT32 = 2e-5
CONVOLVING = [name for name in ("inkling_text",) if name in CONFIG_MAPPING and missing_release(name) is None]


@pytest.fixture(scope="module")
def pair():
    processes = Processes(2)
    yield processes
    processes.stop()


@pytest.fixture(scope="module")
def four():
    processes = Processes(4)
    yield processes
    processes.stop()


def assert_equal(answers, logits=EXACT):
    for answer in answers:
        assert answer["logits"] <= logits, answer
        assert answer["loss"] <= LOSS, answer
        assert answer["gradients"] <= GRADIENTS, answer


# ------------------------------------------------------------------------------------------------- context parallelism


HOW = {
    "plain": {},
    "checkpointed": {"checkpointing": True},
    "packed": {"kind": "packed"},
    "left-padded": {"kind": "left"},
}


@pytest.mark.rows(default=8, slow=57)
@matrix(in_turn(itertools.product(SCHEMES, HOW), ["llama", "gpt2", "llama", "llama"]), row=None, family=None)
def test_a_shared_sequence_is_one_sequence(pair, row, family):
    case, how = row
    assert_equal(pair.run(compare_context_parallel, family, case, **HOW[how]))


@pytest.mark.parametrize("family", ["gemma2", "mistral", "qwen2"])
def test_sliding_windows_are_kept(pair, family):
    for case in ("alibi", "rope"):
        more = CAPPED.get(family, {})
        assert_equal(pair.run(compare_context_parallel, family, case, **more), ROUNDED)


@pytest.mark.rows(default=3, slow=5)
@pytest.mark.parametrize("case", ["nope", "rope", "shaw"])
@pytest.mark.parametrize("more", [{"layers": (1,)}, {"window": 5}, {"layers": (0,), "window": 5}], ids=str)
def test_schemes_in_some_layers_and_windows_are_shared(pair, case, more):
    assert_equal(pair.run(compare_context_parallel, "llama", case, "left", **more))


@pytest.mark.rows(default=2, slow=6)
@pytest.mark.parametrize("kind", ["left", "packed"])
@pytest.mark.parametrize("model_type", ["gptj", "bloom", "mpt", "gpt_neo", "gpt_bigcode"])
def test_replaced_attention_and_positions_in_the_mask_are_shared(pair, model_type, kind):
    for case in ("alibi", "rope"):
        assert_equal(pair.run(compare_context_parallel, model_type, case, kind))


@pytest.mark.rows(default=2)
@pytest.mark.parametrize(
    "model_type", ["gpt_oss", "flint", "mimo_v2_flash", "deepseek_v3", "minicpm3", "laguna", "cohere2"]
)
def test_what_is_special_about_some_types_is_shared(pair, model_type):
    """Sinks, values of another size, layers that differ in heads, windows that some layers have."""
    own = decoder(model_type).config
    config = {"sliding_window": 8} if getattr(own, "sliding_window", None) else {}
    for case in (None, "alibi", "rope"):
        answers = pair.run(compare_context_parallel, model_type, case, dtype=torch.float32, config=config)
        assert_equal(answers, FLOAT32)


@pytest.mark.parametrize("model_type", ["falcon_h1", "llama4_text", "bamba", *CONVOLVING])
def test_what_cannot_be_divided_is_refused(pair, model_type):
    for case in (None, "alibi"):
        # Experts of Inkling are not computed in float64.
        for answer in pair.run(refused, compare_context_parallel, model_type, case, dtype=torch.float32):
            assert "state, which would have to" in answer or "state would have to" in answer or "chunks" in answer


@pytest.mark.rows(default=1, slow=4)
@pytest.mark.parametrize("case", SCHEMES)
def test_shared_sequences_in_bfloat16(pair, case):
    for answer in pair.run(compare_context_parallel, "gpt2", case, "left", dtype=torch.bfloat16):
        # The forward pass adds up in the same order; gradients of shards are rounded to 8 bits before they are added.
        assert answer["logits"] <= 0.1
        assert answer["gradients"] <= 0.04


@pytest.mark.parametrize("case", ["rope", "shaw"])
def test_adapters_are_shared(pair, case):
    assert_equal(pair.run(compare_context_parallel, "llama", case, lora=True))


@pytest.mark.parametrize(
    ("case", "attention"),
    [("alibi", "banded"), ("alibi", "toeplitz"), ("shaw", "clipped"), ("da_transformer", "chunked")],
)
def test_fast_engines_take_contiguous_shards(pair, case, attention):
    more = {"attention": attention, "length": 300, "dtype": torch.float32}
    assert_equal(pair.run(compare_context_parallel, "llama", case, **more), FLOAT32)


@pytest.mark.rows(default=0, slow=20)
@matrix(family=FAMILIES, kind=["plain", "packed", "left"], case=CASES)
def test_every_family_shares_sequences(pair, family, kind, case):
    skip_if_refused(CASES[case][0], tiny(family))
    if (family, kind) == ("opt", "packed"):
        pytest.skip("transformers' OPT does not see packed documents in one process: there is nothing to compare with")
    more, tolerance = dict(CAPPED.get(family, {})), ROUNDED
    if (family, kind) == ("gemma2", "left"):  # in float64 its own attention makes NaN of rows that see nothing
        more["dtype"], tolerance = torch.float32, FLOAT32
    for how in ({}, {"checkpointing": True}):
        assert_equal(pair.run(compare_context_parallel, family, case, kind, **how, **more), tolerance)


@pytest.mark.slow
@pytest.mark.rows(slow=4)
@pytest.mark.parametrize("case", SCHEMES)
def test_four_processes_share_sequences(four, case):
    for kind in ("plain", "packed", "left"):
        assert_equal(four.run(compare_context_parallel, "llama", case, kind))
    for how in ("ddp", "fsdp2"):  # two groups of two, which read different data
        assert_trained_alike(four.run(compare_training, "llama", case, how, context=2))


@pytest.mark.parametrize("case", ["rope", "shaw"])
def test_a_shard_by_itself_is_something_else(pair, case):
    # What the comparisons above would find if keys were not exchanged.
    assert max(pair.run(attend_inside_the_shard, "llama", case)) > 0.1


@pytest.mark.parametrize(
    ("what", "case", "message"),
    [
        ("accelerate without", "alibi", "ValueError: the attention mask.*hf_posenc.context_parallel"),
        ("accelerate inside", "alibi", "ValueError: the attention mask.*without cp_size"),
        ("accelerate inside", "rope", "ValueError: the attention mask.*without cp_size"),
        ("by hand", "alibi", "ValueError: .*pass what hf_posenc.shard_sequence"),
        ("cache", "alibi", "ValueError: .*no key-value cache"),
        ("generate", "rope", "ValueError: .*no key-value cache"),
        ("by hand", "nope", "ValueError: .*pass what hf_posenc.shard_sequence"),
        ("packed under a mask", "alibi", "ValueError: position_ids fall inside a document.*without attention_mask"),
        ("twice", "alibi", "ValueError: .*already"),
        ("unknown key", "alibi", "TypeError: cannot shard token_type_ids"),
        ("another length", "alibi", r"ValueError: labels of shape \(2, 7\)"),
        ("two labels", "alibi", "ValueError: .*no more than one of labels and shift_labels"),
        ("size", "alibi", r"ValueError: .*\(3\) must not exceed the world size \(2\)"),
        ("dynamic", "rope", "UnsupportedModelError: rope_type='dynamic'"),
    ],
)
def test_what_cannot_be_exact_is_refused(pair, what, case, message):
    for answer in pair.run(refused, misuse, what, case):
        assert re.match(message, answer), answer


@pytest.mark.parametrize("family", BASES)
def test_nothing_is_left_behind(pair, family):
    for case in ("alibi", "rope", "learned-every_layer", None):
        assert pair.run(leaves_no_trace, family, case) == [[], []]


def test_shards_make_up_the_batch(pair):
    ids = torch.arange(20).view(2, 10) + 5
    labels = ids.clone()
    labels[1, 4] = -100
    for length, slots in ((10, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]), (9, [[0, 1, 2, 3, 4], [5, 6, 7, 8, -1]])):
        parts = pair.run(shard, {"input_ids": ids[:, :length], "labels": labels[:, :length]})
        for part, own in zip(parts, slots, strict=True):
            for n, slot in enumerate(own):
                if slot < 0:  # filled up
                    assert part["shift_labels"][:, n].tolist() == [-100, -100]
                    continue
                assert part["input_ids"][:, n].equal(ids[:, slot])
                assert part["position_ids"][:, n].tolist() == [slot, slot]
                following = labels[:, slot + 1].tolist() if slot < length - 1 else [-100, -100]
                assert part["shift_labels"][:, n].tolist() == following
            assert int(part["num_items_in_batch"]) == 2 * length - 3  # those that follow something, less one


def test_without_processes_it_says_so():
    for call in (lambda: shard_sequence({"input_ids": tokens(1, 4)}), lambda: context_group(2)):
        with pytest.raises(ValueError, match="process group has not been initialized"):
            call()


# ------------------------------------------------------------------------------------------------------------- training

WRAPPED = ("ddp", "fsdp2", "accelerate-fsdp2-checkpointing")


def assert_trained_alike(answers, tolerance=1e-10):
    for answer in answers:
        assert answer["losses"] <= LOSS, answer
        assert answer["moved"] > 1e-3, answer
        assert answer.get("weights", 0.0) <= tolerance, answer
        assert answer.get("saved", 0.0) <= tolerance, answer
    assert "weights" in answers[0]


@pytest.mark.rows(default=3, slow=15)
@matrix(how=WRAPPED, case=SCHEMES)
def test_trains_as_one_process_does(pair, case, how, tmp_path):
    answers = pair.run(compare_training, "llama", case, how, folder=str(tmp_path / "model"))
    assert_trained_alike(answers)
    assert answers[0]["class"] == "PosEncLlamaForCausalLM"
    assert (answers[0]["sharded"] > 20) == (how != "ddp")


@pytest.mark.rows(default=3, slow=3)
@pytest.mark.parametrize("how", WRAPPED)
@pytest.mark.parametrize("case", ["rope", "alibi"])
def test_trains_alike_on_shared_sequences(pair, case, how):
    assert_trained_alike(pair.run(compare_training, "llama", case, how, context=2))


@pytest.mark.parametrize("action", ["verify", "unpatch", "patch", "save"])
def test_wrapped_models_are_refused_by_name(pair, action):
    for answer in pair.run(refused, inspect_wrapped, "ddp", action) if action != "save" else ():
        assert answer.startswith("UnsupportedModelError: DistributedDataParallel")
        assert ".module" in answer
    for answer in pair.run(refused, inspect_wrapped, "fsdp2", action):
        assert answer.startswith("UnsupportedModelError: the parameters of this ")
        assert ("accelerator.get_state_dict(model)" in answer) == (action == "save")


def assert_measured_alike(answers):
    assert all(answer["sharded"] > 10 for answer in answers)
    assert all(answer["same counts"] for answer in answers)
    assert all(answer["difference"] < 1e-5 for answer in answers)  # float32
    assert answers[0]["losses"] == answers[1]["losses"]


def test_measurements_of_a_sharded_model(pair):
    assert_measured_alike(pair.run(compare_measurements, "fsdp2"))


# ---------------------------------------------------------------------------------------------------------- calibration


@pytest.mark.rows(default=1)
@pytest.mark.parametrize("case", ["kerple", "nope", pytest.param("shaw", marks=pytest.mark.slow)])
def test_calibrates_as_one_process_with_all_windows_does(pair, case):
    answers = pair.run(compare_calibration, case)
    assert len({answer["digest"] for answer in answers}) == 1  # to the last bit: nothing else keeps the ranks together
    for answer in answers:
        assert answer["weights"] <= CALIBRATED, answer
        assert answer["divergences"] <= CALIBRATED, answer
        assert answer["alone"] > 1e-4, answer


def test_goes_on_with_a_calibration_that_all_processes_see(pair, tmp_path):
    for answer in pair.run(resume_calibration, str(tmp_path)):
        assert not answer["half"]
        assert answer["rest"]
        assert answer["rewritten"]
        assert "the processes do not all see the same" in answer["said"]
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


# ------------------------------------------------------------------------------------------------------ tensor parallel


@pytest.mark.parametrize("case", ["rope", "learned-every_layer"])
def test_tensor_parallel_is_exact_for_stock_attention(pair, case, tmp_path):
    for answer in pair.run(compare_tensor_parallel, case, str(tmp_path)):
        assert answer["split"] == 2
        assert answer["logits"] <= FLOAT32
        assert answer["gradients"] <= 1e-5


@pytest.mark.parametrize("case", ["alibi", "shaw"])
def test_tensor_parallel_is_refused_where_heads_matter(pair, case, tmp_path):
    for answer in pair.run(refused, compare_tensor_parallel, case, str(tmp_path / "loaded")):
        assert answer.startswith(f"UnsupportedModelError: {case}: tensor parallelism")
        assert "context_parallel" in answer
    for answer in pair.run(refused, patch_tensor_parallel, str(tmp_path / "patched")):
        assert answer.startswith("UnsupportedModelError: alibi: tensor parallelism")
    for answer in pair.run(refused, fewer_heads):
        assert answer.startswith("ValueError: 2 of 4 heads arrived at the attention layer")


# -------------------------------------------------------------------------------------------------------- launch files

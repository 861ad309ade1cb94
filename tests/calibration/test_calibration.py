"""Calibration: what a base's positions did is found, put into the scheme, and nothing else is changed."""

import copy
import dataclasses
import gc
import json
import math
import re

import pytest
import torch
from decoders import decoder
from families import FAMILIES, LEARNED, tiny, tokens
from matrix import matrix
from situations import EMBEDDING_SCHEMES, SCORE_SCHEMES, WITHOUT_POSITIONS
from snapshots import assert_same, snapshot
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING

import hf_posenc
from hf_posenc import CheckpointError, NotPatchedError, UnsupportedModelError, patch_model, unpatch_model
from hf_posenc.calibration import observe as watching
from hf_posenc.calibration.candidates import hold_tails, mean_rotations
from hf_posenc.calibration.closed_forms import RIDGE, coefficients, target_of
from hf_posenc.calibration.matching import Matching, add_logit_gradients, add_output_gradients
from hf_posenc.calibration.observe import attending, observe
from hf_posenc.calibration.pair import Pair, put
from hf_posenc.core.modules import PositionModule
from hf_posenc.model.patch_record import patch_of

LENGTH = 24


def calibrate(model, tokens, **given):
    """Judged by attention, since models with random weights predict nothing; those that do are in test_judging.py."""
    return hf_posenc.calibrate(model, tokens, **({"judge": "attention"} | given))


def calibrate_with(model, tokens, given):
    """Of these arguments some are fields of `Matching`."""
    fields = {field.name for field in dataclasses.fields(Matching)} & given.keys()
    matching = {"matching": Matching(**{name: given[name] for name in fields})} if fields else {}
    return calibrate(model, tokens, **matching, **{name: given[name] for name in given.keys() - fields})


def windows(count=12, length=LENGTH):
    return tokens(count, length, seed=3)


def logits(model, ids=None):
    with torch.no_grad():
        return model(windows(2) if ids is None else ids, use_cache=False).logits


def pair_of(model, base=None, count=6, held=2):
    return Pair(model, patch_of(model), base, windows(count), held)


# --------------------------------------------------------------------------------------------- the base under the patch


@pytest.mark.parametrize(
    ("family", "scheme"), [("llama", "sinusoidal"), ("gpt2", "alibi"), ("gemma3", "rope"), ("phi3", "t5")]
)
def test_a_patch_can_be_suspended(family, scheme):
    options = {"rope_theta": 50.0} if scheme == "rope" else {}
    model = tiny(family)
    stock = logits(model)
    patch_model(model, scheme, seed=0, **options)
    before, patched = snapshot(model), logits(model)
    assert not patched.equal(stock)
    for _ in range(2):
        with patch_of(model).undo.suspended():
            assert logits(model).equal(stock)
            assert type(model) is type(tiny(family))
        assert_same(snapshot(model), before)
        assert logits(model).equal(patched)
    with pytest.raises(ZeroDivisionError), patch_of(model).undo.suspended():
        raise ZeroDivisionError
    assert logits(unpatch_model(model)).equal(stock)


# ----------------------------------------------------------------------------------------------------- brute force


def by_hand(model, ids):
    """Scores of the first layer of a LLaMA in float64, rotated and not, (B, H, T, T) each."""
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        x = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
        q, k = (p(x).view(*ids.shape, -1, 8).transpose(1, 2) for p in (attention.q_proj, attention.k_proj))
        k = k.repeat_interleave(2, 1)
        angles = torch.arange(ids.shape[1])[:, None] * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)

        def turned(v):
            z = torch.complex(v[..., :4], v[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
            return torch.cat([z.real, z.imag], -1)

        return turned(q) @ turned(k).mT * 8**-0.5, q @ k.mT * 8**-0.5


def exact(model):
    """A model in float64, whose rotation is computed in float64 too."""
    model = model.double()
    frequencies = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)

    def forward(x, position_ids):
        angles = position_ids[..., None].double() * frequencies
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    model.model.rotary_emb.forward = forward
    return model


@pytest.mark.parametrize("scheme", ["t5", "da_transformer"])
def test_averages_are_those_over_all_pairs(scheme):
    model, ids = exact(tiny("llama")), windows()[:4]
    rotated, plain = by_hand(model, ids)
    patch_model(model, scheme)
    factors = scheme == "da_transformer"  # which clips what is negative
    pair = pair_of(model)
    found = pair.averages(4)[0]
    lag = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    weights = rotated.masked_fill(lag < 0, -torch.inf).softmax(-1)
    for distance in range(LENGTH):
        here = lag == distance
        assert found.pairs[distance] == 4 * here.sum()
        for sums, values in (
            (found.difference, rotated - plain),
            (found.product, rotated * plain.clamp(min=0) * factors),
            (found.square, plain.clamp(min=0) ** 2 * factors),
            (found.mass, weights),
        ):
            expected = values[:, :, here].sum((0, 2))
            assert (sums[:, distance] - expected).abs().max() <= 1e-10 * max(1.0, expected.abs().max())
    assert found.by_query is None
    assert found.moment is None


@pytest.mark.parametrize("scheme", ["alibi", "nope"])
def test_a_window_is_matched_with_what_it_shows(scheme):
    """The divergence is that from the base's weights on the keys within the window, which sum to one."""
    rotated, plain = by_hand(exact(tiny("llama")), windows()[-8:])
    lag, window = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH), 4
    hidden = (lag < 0) | (lag >= window)
    if scheme == "alibi":
        plain = plain - torch.tensor([2.0 ** (-2 * (h + 1)) for h in range(4)])[:, None, None] * lag
    theirs, ours = (scores.masked_fill(hidden, -torch.inf).log_softmax(-1) for scores in (rotated, plain))
    kl = torch.where(hidden, 0.0, theirs.exp() * (theirs - ours)).sum(-1).mean((0, 2))
    model = patch_model(tiny("llama"), scheme, window=window, seed=0)
    found = pair_of(model, count=12, held=8).divergence()[0].double()
    assert torch.allclose(found, kl, rtol=1e-4, atol=1e-6)
    report = calibrate(model, windows(), matching=Matching(steps=3))
    assert all(layer.closed.mean() <= layer.before.mean() for layer in report.layers)


@pytest.mark.parametrize("scheme", ["shaw", "transformer_xl"])
def test_vectors_solve_the_normal_equations_of_all_pairs(scheme):
    model, ids = exact(tiny("llama")), windows()[:4]
    rotated, plain = by_hand(model, ids)
    attention, layer = model.model.layers[0].self_attn, model.model.layers[0]
    with torch.no_grad():
        x = layer.input_layernorm(model.model.embed_tokens(ids))
        query = attention.q_proj(x).view(*ids.shape, -1, 8).transpose(1, 2) * 8**-0.5
    query = torch.cat([query, torch.full_like(query[..., :1], 8**-0.5)], -1)
    patch_model(model, scheme)
    pair = pair_of(model)
    found = target_of(pair.modules()[0], pair.like(0), pair.averages(4)[0])
    for head in range(4):
        pairs = [(b, i, j) for b in range(4) for i in range(LENGTH) for j in range(i + 1)]
        moment = sum(torch.outer(query[b, head, i], query[b, head, i]) for b, i, _ in pairs) / len(pairs)
        ridged = moment + RIDGE * moment.diagonal().mean() * torch.eye(9, dtype=torch.float64)
        assert torch.allclose(found.metric[head], ridged, rtol=1e-10, atol=1e-10 * moment.abs().max())
        for distance in (0, 1, 7, LENGTH - 1):
            here = [pair for pair in pairs if pair[1] - pair[2] == distance]
            added = sum(query[b, head, i] * (rotated - plain)[b, head, i, j] for b, i, j in here) / len(here)
            assert (ridged @ found.values[head, distance] - added).abs().max() <= 1e-10 * added.abs().max().clamp(min=1)


def test_the_mean_rotation_goes_into_the_queries():
    model = exact(tiny("llama"))
    query = model.model.layers[0].self_attn.q_proj
    weight = query.weight.detach().clone()
    patch_model(model, "nope")
    pair = pair_of(model)
    averages = pair.averages(4)
    mass, turn = averages[0].mass, mean_rotations(pair, averages)[0]
    assert turn.projection is query
    heads = torch.tensor([True, False, True, True])
    turn.apply(heads)
    angles = torch.arange(LENGTH)[:, None] * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    share = mass / mass.sum(-1, keepdim=True)
    for head in range(4):
        rows = weight.view(4, 8, -1)[head]
        z = torch.complex(rows[:4], rows[4:])
        if heads[head]:
            z = z * torch.complex(share[head] @ angles.cos(), share[head] @ angles.sin())[:, None]
        expected = torch.cat([z.real, z.imag])
        assert (query.weight.view(4, 8, -1)[head] - expected).abs().max() <= 1e-10


@pytest.mark.parametrize(
    ("model_type", "given", "found"),
    [
        ("olmo", {}, True),
        ("olmo", {"clip_qkv": 0.1}, False),
        ("qwen3", {}, False),  # a norm behind the projection
        ("phi3", {}, False),  # one projection for queries, keys and values
    ],
)
def test_a_projection_is_known_by_what_it_makes(model_type, given, found):
    pair = pair_of(patch_model(decoder(model_type, **given), "nope"))
    attentions = [layer.self_attn for layer in pair.model.model.layers]
    assert list(pair.projections.values()) == [each.q_proj if found else None for each in attentions]


def test_no_rows_beyond_a_part(monkeypatch):
    """The same numbers whatever number of rows is computed at once."""

    def found():
        model = patch_model(tiny("llama").double(), "t5", share_layers=False, seed=0)
        pair = pair_of(model)
        return pair.divergence(), pair.averages(4)

    divergence, averages = found()
    monkeypatch.setattr(watching, "SCORES_AT_ONCE", 700)
    again, others = found()
    for index in divergence:
        assert torch.allclose(divergence[index].double(), again[index].double(), rtol=1e-6)
        for name in ("pairs", "difference", "product", "square", "mass"):
            assert torch.allclose(getattr(averages[index], name), getattr(others[index], name), rtol=1e-12)


@pytest.mark.slow
def test_nothing_is_as_large_as_queries_times_keys(monkeypatch):
    monkeypatch.setattr(watching, "SCORES_AT_ONCE", 4 * 400 * 8)

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.most = max(self.most, result.numel())
            return result

    model = patch_model(tiny("llama", max_position_embeddings=400), "t5", share_layers=False)
    with Largest() as largest:
        calibrate(model, tokens(3, 400), matching=Matching(steps=1, batch_size=1), held_out=1)
    assert largest.most < 2 * 400 * 400  # a head alone has 400 * 400 scores, of four


# --------------------------------------------------------------------------------------------------- what it comes to


@pytest.mark.rows(default=1)
@matrix(scheme=[*SCORE_SCHEMES, *WITHOUT_POSITIONS], family=["llama", "gpt2"])
def test_attention_comes_closer_to_the_bases(scheme, family):
    options = {
        "t5": {"share_layers": False},
        "kerple": {"share_layers": False},
        "alibi": {"trainable": True},
        "far_rope": {"near": 2},  # shorter than the windows
        "rope_by_head": {"pairs": [0]},  # not all
    }
    model = tiny(family)
    schemes = ["nope", scheme] if scheme == "inkling" else scheme  # beside the base's positions it starts at the base
    patch_model(model, schemes, seed=0, **options.get(scheme, {}))
    others = {n: p.clone() for n, p in model.named_parameters() if not moves(n)}
    flags = {n: p.requires_grad for n, p in model.named_parameters()}
    seen = []
    report = calibrate(
        model,
        windows(56),
        matching=Matching(steps=40, weight_rate=3e-3, loss="attention", on_step=lambda *said: seen.append(said)),
    )
    assert [step for step, _ in seen] == list(range(1, 41))
    before, closed, after = (
        sum(getattr(each, name).mean().item() for each in report.layers) for name in ("before", "closed", "after")
    )
    assert closed <= before
    assert after < closed
    assert sum(value for _, value in seen[-5:]) < sum(value for _, value in seen[:5])
    assert all(p.equal(others[n]) for n, p in model.named_parameters() if not moves(n))
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
    assert all(p.grad is None for p in model.parameters())
    assert len([line for line in str(report).splitlines() if line[2:].lstrip()[:1].isdigit()]) == 2  # a line each
    drawn = torch.Generator().manual_seed(0)
    read = {i for _ in range(40) for i in torch.randint(48, (1, 4), generator=drawn).flatten().tolist()}
    assert report.tokens == (len(read | set(range(24))) + 8) * LENGTH
    assert (report.unexpressed(0.0), report.unexpressed(100.0)) == ((0, 1), ())


def moves(name):
    return "posenc" in name or any(part in name for part in ("q_proj", "k_proj", "c_attn", "rotary_emb", "wte"))


@pytest.mark.rows(default=1)
@pytest.mark.parametrize("scheme", ["t5", "sinusoidal", "rope"])
@pytest.mark.parametrize("model_type", [t for t in ("gemma3n_text", "gemma4_text") if t in CONFIG_MAPPING])
def test_keys_that_a_layer_borrows(model_type, scheme):
    """They are those of the same tokens, made from the base's hidden states, and move with the layer that lends."""
    model = patch_model(decoder(model_type), scheme, seed=0, **({"rope_theta": 50.0} if scheme == "rope" else {}))
    if scheme != "sinusoidal":  # which a base that had it too would add twice
        pair = pair_of(model, copy.deepcopy(model).eval())
        assert all(found.abs().max() < 1e-6 for found in pair.divergence().values())
    report = calibrate(model, windows(24), matching=Matching(steps=20))
    assert all(layer.after.mean() < layer.before.mean() for layer in report.layers)


@pytest.mark.rows(default=1)
@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_bigcode", "biogpt"])
def test_the_mean_of_a_table_stays(family):
    """In the token embeddings, where it enters the model as before: biogpt multiplies them on the way."""
    model = decoder(family)
    found = hf_posenc.families.base.resolve(hf_posenc.core.registry.family_for(model.config.model_type), model)
    ids, entering = windows(1), {}

    def note(name):
        with found.layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: entering.update({name: args[0] if args else kwargs["hidden_states"]}),
            with_kwargs=True,
        ):
            logits(model, ids)

    note("stock")
    weight = next(found.token_embedding.parameters())
    stock = weight.detach().clone()
    patch_model(model, "t5", share_layers=False, seed=0)
    note("swapped")
    with torch.no_grad():
        calibrate(model, windows(), matching=None)
    note("calibrated")
    expected = (entering["stock"] - entering["swapped"]).mean(1, keepdim=True)
    assert expected.norm() > 1e-3
    assert torch.allclose(
        entering["calibrated"] - entering["swapped"], expected.expand_as(entering["stock"]), atol=1e-5
    )
    added = weight.detach() - stock
    assert torch.allclose(added, added[:1].expand_as(added), atol=1e-6)
    with pytest.raises(ValueError, match="give the base"):  # its embeddings are no longer the base's
        calibrate(model, windows(), matching=None)


def test_vectors_beyond_what_windows_reach_are_settled():
    """What they add to a score falls there as twice the logarithm of the distance, and stays what it was before."""
    model = patch_model(tiny("llama"), "transformer_xl", seed=0)
    pair = pair_of(model)
    module, like, distances = pair.modules()[0], torch.empty(0), torch.arange(16 * LENGTH)
    with torch.no_grad():
        module.position_projection.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    before = coefficients(module, like, distances, 4).detach()
    hold_tails(pair)
    after = coefficients(module, like, distances, 4).detach()
    moved = (after - before)[:, :LENGTH].mean(1, keepdim=True)  # which the softmax does not see
    moved_by = (after - before - moved)[:, :LENGTH].norm()
    assert moved_by < 0.2 * before[:, :LENGTH].norm()
    end = before[:, LENGTH * 3 // 4 : LENGTH].mean(1, keepdim=True)
    query = 8**-0.5 * torch.cat([torch.zeros(8), torch.ones(1)])  # the average one: see `coefficients`
    for times in (2, 4, 8):
        wrong = [
            ((each - end)[:, times * LENGTH] @ query + 2 * math.log(times)).abs() for each in (after - moved, before)
        ]
        assert wrong[0].max() < 0.5 * wrong[1].min()


def test_vectors_beyond_what_windows_reach_are_settled_after_the_second_stage():
    model = patch_model(tiny("llama"), "transformer_xl", seed=0)
    matching = Matching(weights="scheme", steps=4, loss="outputs")
    assert calibrate(model, windows(), judge="attention", matching=matching).kept == "outputs"
    vectors = coefficients(pair_of(model).modules()[0], torch.empty(0), torch.arange(8 * LENGTH + 1), 4).detach()
    end = vectors[:, LENGTH * 3 // 4 : LENGTH].mean(1, keepdim=True)
    for times in (2, 4, 8):  # the last coefficient meets no query, see `coefficients`
        added = (vectors - end)[:, times * LENGTH, -1] * 8**-0.5
        assert (added + 2 * math.log(times)).abs().max() < 0.5


@pytest.mark.parametrize("scheme", EMBEDDING_SCHEMES)
def test_vectors_at_the_input_reach_the_attention_of_every_layer(scheme):
    """On a base that rotates: the closed form turns queries, the second stage moves the table by all layers."""
    model = patch_model(tiny("llama"), scheme, seed=0)
    pair = pair_of(model)
    _, call = pair.layer_calls(windows(2))
    with pair.as_base() as base:
        stock = observe(base, windows(2), [0, 1])
    vectors = model.model.layers[0].posenc(torch.arange(LENGTH)[None])
    for index, layer in enumerate(model.model.layers):
        with attending(model, pair.base_model):
            query = call(index).query
        entering = stock[index].layer.hidden_states + vectors.float()
        expected = layer.self_attn.q_proj(layer.input_layernorm(entering)).view(2, LENGTH, 4, 8).transpose(1, 2)
        assert torch.allclose(query, expected, rtol=1e-4, atol=1e-6)
    report = calibrate(model, windows(), matching=Matching(steps=30, rate=5e-3, weight_rate=3e-3))
    assert all(each.after.mean() < 0.9 * each.before.mean() for each in report.layers)


def test_the_base_stays_what_it_was():
    """It shares its weights with the model: those that are moved are not the base's."""
    model = tiny("llama")
    stock = copy.deepcopy(model)
    patch_model(model, "t5", share_layers=False, seed=0)
    pair = Pair(model, patch_of(model), None, windows(3), 1, whole_attention=True)
    with torch.no_grad():
        put((p, p + 1.0) for p in model.model.layers[0].self_attn.parameters())
    with pair.as_base() as base:
        assert logits(base).equal(logits(stock))


@pytest.mark.parametrize(
    ("family", "weights", "expected"),  # phi3: one weight makes queries, keys and values
    [("llama", "query_key", r"layers.1.self_attn.[qk]_"), ("llama", None, "attn[.]"), ("phi3", None, "attn[.]")],
)
def test_which_weights_of_a_mixture_move(family, weights, expected):
    model = patch_model(tiny(family), "nope", layers=(1,))
    kept = {n: p.clone() for n, p in model.named_parameters()}
    matching = Matching(weights=weights, loss="logits", steps=3)
    report = calibrate(model, windows().int(), matching=matching, judge="attention")  # of either integer type
    assert [each.index for each in report.layers] == [1]
    for name, p in model.named_parameters():
        moved = (p != kept[name]).view(len(p), -1).any(1)
        assert moved.all() if re.search(expected, name) else not moved.any()


def output_gradients(model, ids):
    """The output error of a patched model's layers, and the parameters of its layers with their gradients."""
    pair = pair_of(model)
    parameters = {name: p for name, p in model.model.layers.named_parameters() if "self_attn" in name}
    with attending(model, pair.base_model):
        error = add_output_gradients(pair, ids, list(parameters.values()))
    return error, {name: p for name, p in parameters.items() if p.grad is not None}


def seen_by(model, ids, name="o_proj", moved=None):
    """What enters `o_proj`, or leaves another module, in each layer. `moved` is added to one layer's hidden states."""
    found, hooks = [], []
    for index, layer in enumerate(model.model.layers):
        module = getattr(layer.self_attn, name)
        hooks.append(
            module.register_forward_hook(lambda _, args, output: found.append(args[0] if name == "o_proj" else output))
        )
        if moved is not None and moved[0] == index:
            hooks.append(layer.register_forward_pre_hook(lambda _, args: (args[0] + moved[1], *args[1:])))
    logits(model.eval(), ids)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("scheme", ["t5", "shaw"])
def test_each_layer_corrects_outputs_on_the_models_own_hidden_states(scheme):
    """The error is that of a forward pass of both models, and a gradient is that of its own layer's error alone."""
    model, ids = exact(tiny("llama")), windows()[:2]
    theirs = seen_by(model, ids)
    squares = [values.square().mean() for values in seen_by(model, ids, "v_proj")]
    patch_model(model, scheme, seed=0, **({"share_layers": False} if scheme == "t5" else {}))

    def errors():
        pairs = zip(seen_by(model, ids), theirs, squares, strict=True)
        return [((ours - base).square().mean() / square).item() for ours, base, square in pairs]

    found, trained = output_gradients(model, ids)
    assert abs(found - sum(errors()) / 2) <= 1e-8 * found
    assert {name[0] for name in trained} == {"0", "1"}
    torch.manual_seed(0)
    for name, p in trained.items():
        direction, slopes = torch.randn_like(p), []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                p.add_(direction, alpha=step)
                slopes.append(errors()[int(name[0])] / (2 * step))
                p.add_(direction, alpha=-step)
        assert abs((p.grad * direction).sum().item() - sum(slopes)) <= 1e-5 * p.grad.norm() * direction.norm()


def test_logits_are_matched_through_all_layers():
    """The loss is the mean divergence of the next token's distribution, and its gradient reaches every layer."""
    model, ids = exact(tiny("llama")), windows()[:2]
    base = logits(model, ids).softmax(-1)
    patch_model(model, "t5", share_layers=False, seed=0)
    pair = pair_of(model)
    parameters = [p for p in model.model.layers.parameters() if p.requires_grad]
    directions = [torch.randn(p.shape, generator=torch.Generator().manual_seed(0), dtype=p.dtype) for p in parameters]

    def divergence(step):
        with torch.no_grad():
            for p, direction in zip(parameters, directions, strict=True):
                p.add_(direction, alpha=step)
            return (base * (base.log() - logits(model, ids).log_softmax(-1))).sum(-1).mean().item()

    with attending(model, pair.base_model):
        assert abs(add_logit_gradients(pair, ids, parameters) - divergence(0.0)) <= 1e-7  # LLaMA's norms are in float32
    slope = sum((p.grad * direction).sum().item() for p, direction in zip(parameters, directions, strict=True))
    assert all(layer.self_attn.q_proj.weight.grad.norm() > 1e-6 for layer in model.model.layers)
    assert slope == pytest.approx((divergence(1e-4) - divergence(-2e-4)) / 2e-4, rel=1e-2)


def test_vectors_at_the_input_are_trained_by_the_outputs_of_every_layer():
    """Their gradient adds up what a change at the input of each layer alone would change in its own error."""
    model, ids = exact(tiny("llama")), windows()[:2]
    theirs = seen_by(model, ids)
    squares = [values.square().mean() for values in seen_by(model, ids, "v_proj")]
    patch_model(model, "learned", num_positions=LENGTH, seed=0)
    (table,) = {p for each in model.modules() if isinstance(each, PositionModule) for p in each.parameters()}
    pair = pair_of(model)
    with attending(model, pair.base_model):
        add_output_gradients(pair, ids, [table])
    direction, slope = torch.randn(table.shape, generator=torch.Generator().manual_seed(0), dtype=table.dtype), 0.0
    for layer in range(2):
        for step in (1e-3, -1e-3):  # LLaMA's norms are computed in float32
            ours = seen_by(model, ids, moved=(layer, step * direction[:LENGTH]))[layer]
            slope += ((ours - theirs[layer]).square().mean() / squares[layer]).item() / (2 * step)
    assert abs((table.grad * direction).sum().item() - slope) <= 1e-5 * table.grad.norm() * direction.norm()


@pytest.mark.rows(default=5)
@matrix(loss=["outputs", "attention"], family=FAMILIES)
def test_values_move_with_outputs_where_a_table_of_positions_is_gone(loss, family):
    """And where one weight makes queries, keys and values."""
    model = tiny(family)
    patch_model(model, "alibi", seed=0)
    pair = pair_of(model)
    with attending(model, pair.base_model), torch.no_grad():
        _, call = pair.layer_calls(windows()[:2])
        before = call(0)
    matching = Matching(weights="query_key", loss=loss, steps=2, weight_rate=1e-2)
    report = calibrate(model, windows(), matching=matching, judge="attention")
    with attending(model, pair.base_model), torch.no_grad():
        after = call(0)
    assert report.kept in (loss, "closed_form")
    if loss == "outputs":
        assert report.kept == loss  # this judge takes nothing of it back
        assert not after.query.equal(before.query)
        assert not after.key.equal(before.key)
    assert (not after.value.equal(before.value)) is (loss == "outputs" and family in (*LEARNED, "gpt_neox", "phi3"))


# ------------------------------------------------------------------------------------------------ going on from a state


def calibrated_until(stop, path, case, **changes):
    """A model that is patched anew and calibrated, its report, and the steps that were made."""
    (scheme, hyperparameters), more = case
    made = []

    def on_step(step, value):
        made.append((step, value))
        if step == stop:
            raise KeyboardInterrupt

    given = (
        {"steps": 5, "seed": 2, "weight_rate": 1e-3, "rate": 2e-3, "state_file": path, "on_step": on_step}
        | more
        | changes
    )
    model = patch_model(tiny("llama").to(given.pop("dtype", torch.float32)), scheme, seed=0, **hyperparameters)
    try:
        return model, calibrate(model, windows(), matching=Matching(**given)), made
    except KeyboardInterrupt:
        return model, None, made


def same_parameters(model, other):
    """To the last bit."""
    theirs = dict(other.named_parameters())
    return all(p.equal(theirs.pop(n)) for n, p in model.named_parameters()) and not theirs


@pytest.mark.rows(default=0)
@pytest.mark.parametrize(
    ("stop", "case"),
    [
        (3, (("nope", {}), {"batch_size": 2})),
        (1, (("shaw", {}), {"weights": "scheme"})),  # the closed forms have turned weights as well
        (3, (("nope", {}), {"weight_rate": 9.0})),  # ends further away, and is put back to what the closed forms found
        (3, (("nope", {}), {"dtype": torch.bfloat16})),  # steps are less than a digit of the weights
    ],
)
def test_goes_on_exactly_where_it_was(stop, case, tmp_path):
    """In a new process as well: nothing but the file is left of the first half."""
    whole, expected, made = calibrated_until(None, None, case)
    put_back = all(each.after.equal(each.closed) for each in expected.layers)
    assert put_back is ("weight_rate" in case[1])
    path = tmp_path / "state"
    _, report, first = calibrated_until(stop, path, case)
    assert report is None
    resumed, report, rest = calibrated_until(None, path, case)
    assert [step for step, _ in rest] == list(range(stop + 1, 6))
    assert first + rest == made
    assert same_parameters(resumed, whole)
    assert report.to_dict() == expected.to_dict()
    ended, report, none = calibrated_until(None, path, case)  # there is one after the last step too
    assert none == []
    assert same_parameters(ended, whole)
    assert report.to_dict() == expected.to_dict()


def test_no_batch_outlives_its_visit():
    """A reference cycle would keep batches until Python looks for cycles: too late for a large model."""
    model = patch_model(tiny("llama"), "transformer_xl", seed=0)
    gc.collect()
    gc.disable()
    try:
        calibrate(model, windows(), matching=Matching(steps=2))
        found = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.ndim > 2]
        assert not [each.shape for each in found if LENGTH in each.shape]
    finally:
        gc.enable()


def test_half_precision_loses_no_small_step():
    """Each is less than half of a weight's last digit; together they move it as in float32."""
    moved = {}
    for dtype in (torch.float32, torch.bfloat16):
        found = []
        for matching in (None, Matching(steps=40, weight_rate=1e-4, loss="outputs")):
            model = patch_model(tiny("llama").bfloat16().to(dtype), "t5", seed=0)
            calibrate(model, windows(), matching=matching, judge="attention")
            found.append(torch.stack([layer.self_attn.q_proj.weight.detach() for layer in model.model.layers]).double())
        moved[dtype] = ((found[1] - found[0]) * (found[0].abs() > 0.0625)).flatten()
    expected, found = moved.values()
    assert expected.abs().max() > 1e-3
    assert torch.nn.functional.cosine_similarity(expected, found, 0) > 0.9


def test_a_state_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    from hf_posenc.calibration import state

    def fails(content, file):
        file.write(b"half")
        raise OSError("no space left")

    case, path = (("nope", {}), {"save_every": 1}), tmp_path / "state"
    calibrated_until(2, path, case)
    before = path.read_bytes()
    monkeypatch.setattr(state.torch, "save", fails)
    with pytest.raises(OSError, match="no space left"):
        calibrated_until(None, path, case)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_a_state_of_something_else_is_refused(tmp_path):
    case, path = (("kerple", {}), {}), tmp_path / "state"
    calibrated_until(1, path, case)

    def patched(config=None, **hyperparameters):
        return patch_model(tiny("llama", **(config or {})), "kerple", seed=0, **hyperparameters)

    given = {"steps": 5, "seed": 2, "weight_rate": 1e-3, "rate": 2e-3, "state_file": path}
    for changes, message in (
        ({"steps": 6}, "another run: steps was 5 and is 6$"),
        ({"seed": 3}, "another run: seed was 2 and is 3$"),
        ({"tokens": windows().flip(0)}, "tokens was 12 x 24, "),
        ({"base": tiny("llama")}, "digest of the base was None and is "),
        ({"labels": windows().index_fill(1, torch.tensor(3), -100)}, "labels was 8 x 24, "),
    ):
        model = patched()
        before = snapshot(model)
        with pytest.raises(CheckpointError, match=message):
            calibrate_with(model, changes.pop("tokens", windows()), given | changes)
        assert_same(snapshot(model), before)
    for other, message in (
        (patched(config={"rope_theta": 500.0}), "digest of the model was"),
        (patched(share_layers=False), "scheme was kerple.* and is kerple"),
    ):
        with pytest.raises(CheckpointError, match=message):
            calibrate_with(other, windows(), given)
    model = patched()
    for wrong in (b"no state", path.read_bytes()[:-9]):
        (tmp_path / "wrong").write_bytes(wrong)
        with pytest.raises(CheckpointError, match="wrong is not a state to resume from"):
            calibrate_with(model, windows(), given | {"state_file": tmp_path / "wrong"})
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        calibrate_with(model, windows(), given | {"state_file": tmp_path / "nowhere" / "state"})


@pytest.mark.slow
def test_what_was_calibrated_is_written_down(tmp_path):
    """The last one, in the config, from where a checkpoint, its description and its card have it."""
    model = patch_model(tiny("llama"), "t5", seed=0)
    model.save_pretrained(tmp_path / "plain")
    assert hf_posenc.inspect(tmp_path / "plain").calibration is None
    assert "\n  calibrated  no\n" in str(hf_posenc.inspect(tmp_path / "plain"))
    assert "The swap was not calibrated." in (tmp_path / "plain" / "README.md").read_text()
    calibrate(model, windows(), matching=None, held_out=2)
    matching = Matching(steps=1, rate=1e-3, weight_rate=1e-4)
    report = calibrate(model, windows(), held_out=2, base=tiny("llama"), matching=matching)
    with patch_of(model).undo.suspended():
        assert not hasattr(model.config, "position_encoding")
    model.save_pretrained(tmp_path / "calibrated")
    said = hf_posenc.inspect(tmp_path / "calibrated")
    assert said.calibration["stage"] == "matching"
    assert said.calibration["tokens"] == 12 * LENGTH
    losses = dataclasses.asdict(report.held_out_loss)
    assert said.calibration["held_out_loss"] == {name: round(loss, 6) for name, loss in losses.items()}
    assert f"\n  calibrated  with {12 * LENGTH} tokens, stage matching" in str(said)
    card = (tmp_path / "calibrated" / "README.md").read_text()
    assert f"The swap was calibrated to its base with {12 * LENGTH} tokens, stage matching" in card
    with pytest.warns(UserWarning, match="calibration has changed"):
        unpatch_model(model)
    assert "calibration" not in patch_model(model, "t5", seed=0).config.position_encoding


def test_a_loaded_model_needs_its_base(tmp_path):
    stock = tiny("llama")
    model = patch_model(tiny("llama"), "t5", share_layers=False, seed=0)
    model.save_pretrained(tmp_path)
    loaded = hf_posenc.from_pretrained(tmp_path)
    with pytest.raises(NotPatchedError, match="give the base"):
        calibrate(loaded, windows())
    mine = calibrate(loaded, windows(), matching=Matching(steps=3), base=stock)
    theirs = calibrate(model, windows(), matching=Matching(steps=3))
    for a, b in zip(mine.layers, theirs.layers, strict=True):
        assert a.chosen == b.chosen
        assert torch.allclose(a.after, b.after, rtol=1e-4)
    assert logits(stock).equal(logits(tiny("llama")))


def test_the_report_goes_to_json():
    """Also of a scheme that has nothing to train."""
    report = calibrate(patch_model(tiny("llama"), "alibi"), windows(), matching=None)
    written = json.loads(json.dumps(report.to_dict()))
    assert written["scheme"] == "alibi"
    assert [each["index"] for each in written["layers"]] == [0, 1]
    for layer, said in zip(report.layers, written["layers"], strict=True):
        assert set(said) == {field.name for field in dataclasses.fields(layer)}
        assert said["after"] == layer.after.tolist()


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"matching": "attention"}, "matching must be a Matching, or None for closed forms alone, not 'attention'"),
        ({"weights": "everything"}, "weights must be one of scheme, query_key, attention, adapter, not 'everything'"),
        ({"weights": "scheme"}, "leaves nothing to train: alibi has no parameters"),
        ({"judge": "me"}, "judge must be one of loss, attention, not 'me'"),
        ({"tokens": ["a text", "another"]}, "tokens must be integers .*, not a .*list.*. From a text: tokenizer"),
        ({"tokens": windows() + 97}, "tokens hold the id .*, and the model's vocabulary has the ids 0 to 96"),
        ({"tokens": -1 - windows()}, "tokens hold the id -97, and the model's vocabulary"),
        ({"tokens": tokens(12, 65)}, "windows of 65 tokens are longer than the 64 the base was trained at"),
        ({"steps": 0}, "steps must be a positive integer, not 0"),
        ({"closed_windows": 1e1}, "closed_windows must be a positive integer, not 10.0"),
        ({"held_out": True}, "held_out must be a positive integer, not True"),
        ({"held_out": 12}, "12 windows are too few: 12 are held out"),
        ({"rate": float("nan")}, "rate must be a positive number, not nan"),
        ({"labels": windows() + 1}, "labels must be the tokens, or -100"),
        ({"labels": torch.full((12, 24), -100)}, "and not for all in the 8 held-out windows"),
    ],
)
def test_wrong_arguments(changes, message):
    model = patch_model(tiny("llama"), "alibi")
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        calibrate_with(model, changes.pop("tokens", windows()), changes)
    assert_same(snapshot(model), before)


@pytest.mark.slow
def test_a_base_whose_weights_have_moved_is_not_followed():
    def weights(model):
        return [p.clone() for n, p in model.named_parameters() if "posenc" not in n]

    given = {"matching": Matching(weights="scheme", steps=1)}
    model = patch_model(tiny("gpt2"), "t5", share_layers=False, layers=[0], seed=0)
    stock = weights(model)
    for _ in range(2):  # no rotation goes into the queries, no mean of a table into the tokens: it is still the base
        calibrate(model, windows(), **given)
        assert all(a.equal(b) for a, b in zip(weights(model), stock, strict=True))
    model = patch_model(tiny("gpt2"), "t5", share_layers=False, seed=0)
    calibrate(model, windows(), **given)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"weights of this model have changed .* calibrate\(model, tokens, base=...\)"):
        calibrate(model, windows(), **given)
    assert_same(snapshot(model), before)
    calibrate(model, windows(), **given, base=tiny("gpt2"))


def test_an_error_half_way_leaves_the_patch():
    """And a model that is no longer the base, as its config says."""
    model = patch_model(tiny("llama"), "t5", share_layers=False, seed=0)

    def stop(step, value):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(model, windows(), matching=Matching(on_step=stop))
    assert hf_posenc.verify(model).ok
    assert all(p.grad is None for p in model.parameters())
    assert model.config.position_encoding["calibration"]["stage"] == "matching"  # what is saved now says so
    with pytest.raises(ValueError, match="give the base"):
        calibrate(model, windows())
    with pytest.warns(UserWarning, match="changed weights of this LlamaForCausalLM"):
        unpatch_model(model)


def test_models_that_cannot_be():
    with pytest.raises(NotPatchedError, match="patch it first, then calibrate"):
        calibrate(tiny("llama"), windows())
    with pytest.raises(UnsupportedModelError, match="a PosEncLlamaModel predicts none"):
        calibrate(patch_model(tiny("llama").model, "t5", seed=0), windows())
    with pytest.raises(UnsupportedModelError, match="a LlamaModel predicts none"):
        calibrate(patch_model(tiny("llama"), "t5", seed=0), windows(), base=tiny("llama").model)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_error_of_the_first_stage_changes_nothing(family, monkeypatch):
    """Weights that are no numbers, and Ctrl-C behind the last of the closed forms."""
    model = patch_model(tiny(family), "t5", share_layers=False, seed=0)
    before = snapshot(model)

    def stopped(pair):
        assert [n for n, p in model.named_parameters() if not p.equal(dict(before.values)[n])]
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Pair, "divergence", stopped)
        with pytest.raises(KeyboardInterrupt):
            calibrate(model, windows(), matching=None)
    assert_same(snapshot(model), before)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if moves(n) and "wte" not in n and p.ndim == 2).view(-1)[3] = (
            torch.nan
        )
    kept = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"attention of layer 0.* is NaN or infinite"):
        calibrate(model, windows(), matching=None)
    for name, p in model.named_parameters():
        assert torch.equal(p.isnan(), kept[name].isnan())
        assert p.nan_to_num().equal(kept[name].nan_to_num())


def test_a_second_stage_that_runs_off_is_put_back():
    model = patch_model(tiny("llama"), "t5", share_layers=False, seed=0)
    report = calibrate(model, windows(), matching=Matching(steps=3, rate=1e30, weight_rate=1e30))
    assert all(each.after.equal(each.closed) for each in report.layers)
    assert all(torch.isfinite(p).all() for p in model.parameters())

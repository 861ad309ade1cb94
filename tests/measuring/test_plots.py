"""Figures: what they show, that they are the same bytes twice, and what is said without matplotlib."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import tiny, tokens

import hf_posenc
from hf_posenc import analysis, theory
from hf_posenc.analysis import plots, probe
from hf_posenc.calibration import Calibration, HeldOutLoss, LayerFit
from hf_posenc.cli import main
from hf_posenc.theory import plots as theory_plots

pytest.importorskip("matplotlib", reason="pip install matplotlib runs this")

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}

CURVES = {
    "base, sliding": [(128, 4.5), (256, 4.2), (512, math.inf)],
    "base, non-overlapping": [(128, 5.5), (256, 5.0), (512, 50.0)],
    "alibi, sliding": [(512, 4.0), (128, 4.4), (256, 4.1)],
}
BINS = {"base": [(0, 1, 6.0), (1, 4, 4.0), (4, 16, 3.0)], "alibi": [(0, 1, 6.1), (4, 16, 2.9)]}
CELLS = [{"length": n, "depth": d, "accuracy": d} for n in (128, 256) for d in (0, 0.5, 1) if (n, d) != (256, 0.5)]


def figures():
    yield "perplexity", lambda: plots.perplexity_by_length(CURVES, trained_length=256, title="Perplexity")
    yield "position", lambda: plots.loss_by_position(BINS, trained_length=8)
    yield "loss", lambda: plots.loss_curve({"base": [(0, 5.0), (1000, 4.0)]}, title="Loss")
    yield "retrieval", lambda: plots.retrieval_heat_map(CELLS, title="Passkey")
    yield "vectors", lambda: plots.position_vectors(analysis.scheme_vectors("sinusoidal", 20), title="Vectors")
    yield "similarity", lambda: plots.similarity_matrix(analysis.scheme_vectors("sinusoidal", 20))
    yield "decay", lambda: plots.decay_curves({s: analysis.decay(s, 30) for s in ("rope", "shaw")}, heads=True)
    yield "biases", lambda: plots.bias_maps(analysis.decay("alibi", 10), title="Biases")
    yield "wavelengths", lambda: plots.wavelengths(analysis.frequencies("rope"))
    yield "precision", lambda: plots.distinct_biases(analysis.precision_audit(300))
    yield "attention", lambda: plots.attention_by_distance(analysis.attention_by_distance(tiny("gpt2"), tokens(1, 20)))
    yield "order", lambda: plots.order_by_layer({"a": analysis.order_sensitivity(tiny("gpt2"), tokens(1, 8))})
    yield "waves", lambda: theory_plots.wave_curves({"t": theory.wave_decay(9, lambda t: t).curves()}, title="Waves")
    yield "grid", lambda: theory_plots.grid_decay(theory.grid_decay(theory.axis_frequencies(8), 4))
    yield "properties", lambda: plots.properties({"learned": analysis.properties("learned", trained_length=16)})
    yield (
        "hessian",
        lambda: theory_plots.mixed_hessian(theory.mixed_hessian(tiny("gpt2"), tokens(1, 9)[0], 2, 5, rows=8)),
    )
    yield "negative", lambda: theory_plots.negative_products(theory.negative_products(tiny("gpt2"), tokens(1, 9)))
    yield (
        "statistics",
        lambda: theory_plots.embedding_statistics({f: theory.embedding_statistics(tiny(f)) for f in ("gpt2", "llama")}),
    )
    yield "equivariance", lambda: plots.equivariance_by_layer({"a": analysis.equivariance(tiny("gpt2"), tokens(1, 8))})
    yield (
        "expansion",
        lambda: theory_plots.expansion_terms(theory.expansion(tiny("gpt2"), tokens(1, 9), 2, 5), title="Terms"),
    )
    yield "terms", lambda: theory_plots.score_terms(theory.score_terms(tiny("gpt2"), tokens(1, 12)), title="Terms")

    yield "table", lambda: theory_plots.position_scores(theory.position_scores(tiny("gpt2"), length=12), title="Table")
    yield "calibration", lambda: plots.calibration(REPORT, title="Calibration")


def fit(index, curve, *, multiplies=False):
    """What calibration could have done to a layer of two heads."""
    before, closed, after = (torch.tensor([share, share / 2]) for share in (1.0, 0.4, 0.0))
    base = torch.tensor([[4.0, 1.0, 1.0, 0.0], [0.0, -1.0, -2.0, -3.0]])
    return LayerFit(index, before, closed, after, ("bias", "as it was"), base, curve, multiplies)


CURVE = torch.tensor([[3.0, 2.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
LOSSES = HeldOutLoss(1.0, 3.0, 2.0, 1.5)
REPORT = Calibration("some", (fit(1, CURVE), fit(4, CURVE, multiplies=True), fit(5, None)), 1000, LOSSES, "attention")
FIGURES = dict(figures())


# PNG of every picture, the other formats of one: they come from the same figure.
@pytest.mark.rows(default=2)
@pytest.mark.parametrize(("name", "kind"), [(name, "png") for name in FIGURES] + [("decay", "svg"), ("decay", "pdf")])
def test_a_figure_is_the_same_bytes_twice(name, kind, tmp_path):
    first, second = (plots.save(FIGURES[name](), tmp_path / f"{i}.{kind}").read_bytes() for i in range(2))
    assert first == second
    assert first.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind])
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"0.{kind}", f"1.{kind}"]  # nothing of the writing is left


def test_perplexity_lines_are_the_numbers_and_methods_share_a_colour():
    axes = plots.perplexity_by_length(CURVES, trained_length=256).axes[0]
    lines = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    assert list(lines) == list(CURVES)
    assert list(lines["alibi, sliding"].get_xdata()) == [128, 256, 512]
    assert list(lines["alibi, sliding"].get_ydata()) == [4.4, 4.1, 4.0]
    sliding, fresh = lines["base, sliding"], lines["base, non-overlapping"]
    assert sliding.get_color() == fresh.get_color() != lines["alibi, sliding"].get_color()
    assert sliding.get_linestyle() != fresh.get_linestyle()
    assert math.isnan(sliding.get_ydata()[2])  # infinite: an arrow instead, at its length
    assert [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "$\\uparrow$"] == [[512]]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("context length (tokens)", "perplexity per token (log scale)")
    assert "trained length 256" in [text.get_text() for text in axes.texts]


def test_a_small_difference_of_perplexities_looks_small():
    """The axis is logarithmic and spans a factor of two at least, around what was measured."""
    axes = plots.perplexity_by_length({"a": [(128, 4.0), (256, 4.2)]}).axes[0]
    low, high = axes.get_ylim()
    assert axes.get_yscale() == "log"
    assert high / low >= 2
    assert low * high == pytest.approx(4.0 * 4.2)
    assert len([tick for tick in axes.get_yticks() if low < tick < high]) >= 2
    with pytest.raises(ValueError, match="more than 0"):
        plots.perplexity_by_length({"a": [(128, 0.0)]})


def test_sixteen_curves_can_be_told_apart():
    curves = {f"scheme {i}": [(128, 4.0 + i), (256, 4.0)] for i in range(16)}
    lines = plots.perplexity_by_length(curves).axes[0].lines
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle(), line._unscaled_dash_pattern) for line in lines}
    assert len(looks) == 16


def test_steps_of_loss_by_position():
    line = plots.loss_by_position(BINS).axes[0].lines[0]
    assert list(line.get_xdata()) == [0.5, 1, 1, 4, 4, 16]
    assert list(line.get_ydata()) == [6, 6, 4, 4, 3, 3]
    gapped = list(plots.loss_by_position(BINS).axes[0].lines[1].get_ydata())
    assert [y for y in gapped if not math.isnan(y)] == [6.1, 6.1, 2.9, 2.9]
    assert math.isnan(gapped[2])  # no line over bins that were not measured


def test_cells_of_retrieval():
    image = plots.retrieval_heat_map(CELLS).axes[0].images[0].get_array()
    assert image[:, 0].tolist() == [0, 0.5, 1]
    assert image.mask[:, 1].tolist() == [False, True, False]


def test_scheme_pictures_are_the_numbers():
    vectors = analysis.scheme_vectors("sinusoidal", 20)
    shown = FIGURES["vectors"]().axes[0].images[0]
    assert torch.tensor(shown.get_array()).T.equal(vectors)
    assert shown.norm.vmin == -shown.norm.vmax  # white is 0
    cosines = torch.tensor(FIGURES["similarity"]().axes[0].images[0].get_array())
    # Sinusoids all have one length, and the cosine depends on the distance only.
    expected = analysis.decay("sinusoidal", 20).scores[0, 0]
    torch.testing.assert_close(cosines[0], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(cosines[19].flip(0), expected, rtol=0, atol=1e-12)

    assert FIGURES["similarity"]().axes[1].get_ylabel() == f"cosine similarity ({float(expected.min()):.2f} to 1.00)"
    spanned = plots.similarity_matrix(torch.tensor([[1.0, 0.0], [-1.0, 1.0]])).axes[0].images[0].norm
    assert (spanned.vmin, spanned.vmax) == (-1, 1)  # white is 0 where there are negative ones

    curve = analysis.decay("alibi", 10)
    drawn = plots.bias_maps(curve)
    assert drawn.axes[-1].get_ylabel().endswith("logarithmic beyond ±0.045")  # a hundredth of 9 / 2
    panels = drawn.axes[:8]
    for head, axes in enumerate(panels):
        shown = axes.images[0].get_array()
        assert shown[9, 2] == pytest.approx(-7 * 2.0 ** -(head + 1))
        assert shown.mask[2, 9]  # the future is blank

    line = plots.decay_curves({"alibi": curve}).axes[0].lines[0]
    assert list(line.get_ydata()) == pytest.approx(curve.scores.mean((0, 1)).tolist())
    assert len(plots.decay_curves({"alibi": curve}, heads=True).axes[0].lines) == 9


def test_bins_of_attention_hold_all_of_it():
    measured = analysis.attention_by_distance(tiny("gpt2"), tokens(1, 20))
    axes = plots.attention_by_distance(measured).axes[0]
    image = torch.tensor(axes.images[0].get_array().data)
    torch.testing.assert_close(image.sum(-1), torch.full((8,), 100.0, dtype=torch.float64), rtol=1e-5, atol=0)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2-3", "4-7", "8-15", "16-19"]
    torch.testing.assert_close(image[5, 3], 100 * measured.mass[1, 1, 4:8].sum(), rtol=1e-9, atol=0)


def test_equivariance_has_a_panel_with_the_mask_and_one_without():
    measured = analysis.equivariance(tiny("gpt2"), tokens(1, 8))
    panels = plots.equivariance_by_layer({"a": measured}).axes
    shown = [list(axes.lines[0].get_ydata()) for axes in panels]
    rows = [(layer.unmasked, layer.causal, max(layer.causal_last, 1e-17)) for layer in measured.layers]
    assert shown == [list(column) for column in zip(*rows, strict=True)]
    assert [axes.get_title() for axes in panels] == ["no mask", "causal mask", "causal mask, last token"]


def test_sizes_of_the_terms_of_an_expansion():
    found = theory.expansion(tiny("gpt2"), tokens(1, 9), 2, 5, rows=0)
    lines = theory_plots.expansion_terms(found).axes[0].lines
    for name, (layers, output) in zip(found.output.sizes, zip(lines[0::2], lines[1::2], strict=True), strict=True):
        assert math.isnan(layers.get_ydata()[0])  # nothing has reached the last token yet
        assert layers.get_ydata()[1] == found.layers[1].sizes[name]
        assert list(output.get_ydata()) == [found.output.sizes[name]]


def test_terms_have_a_panel_each():
    measured = theory.score_terms(tiny("gpt2"), tokens(1, 12))
    panels = theory_plots.score_terms(measured).axes[:4]
    assert [axes.get_title() for axes in panels] == list(measured.names)
    for place, axes in enumerate(panels):
        shown = torch.tensor(axes.images[0].get_array().data)
        torch.testing.assert_close(shown, 100 * torch.stack([layer.shares[:, place] for layer in measured.layers]))
        assert axes.images[0].norm.vmin == -axes.images[0].norm.vmax <= -100  # white is 0


def test_wavelengths_and_trained_length():
    axes = FIGURES["wavelengths"]().axes[0]
    assert axes.lines[0].get_ydata()[0] == pytest.approx(2 * math.pi, rel=1e-6)
    assert axes.get_legend().get_texts()[0].get_text() == "rope (16 of 32 turn)"
    with pytest.raises(ValueError, match="the same trained length"):
        plots.wavelengths(analysis.frequencies("rope") + analysis.frequencies("rope", trained_length=64))


def test_waves_are_a_line_and_dashes_of_one_colour():
    found = {"t": theory.wave_decay(9, lambda t: t), "t^2": theory.wave_decay(9, lambda t: t**2)}
    lines = theory_plots.wave_curves({label: each.curves() for label, each in found.items()}).axes[0].lines
    assert [line.get_label() for line in lines] == ["t, sum", "t, integral", "t^2, sum", "t^2, integral"]
    assert lines[0].get_color() == lines[1].get_color() != lines[2].get_color()
    assert lines[2].get_ydata().tolist() == found["t^2"].sum.real.tolist()
    assert lines[3].get_ydata().tolist() == found["t^2"].integral.real.tolist()


def test_verdicts_stand_in_their_cells():
    found = {name: analysis.properties(name, trained_length=16) for name in ("sinusoidal", "learned", "alibi")}
    axes = plots.properties(found).axes[0]
    assert [text.get_text() for text in axes.texts] == [row.verdict for each in found.values() for row in each.rows]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["sinusoidal", "learned *", "alibi"]


def test_statistics_of_a_model_without_positions_have_no_neighbours():
    both = {family: theory.embedding_statistics(tiny(family)) for family in ("gpt2", "llama")}
    norms, diagonals, steps = theory_plots.embedding_statistics(both).axes
    assert [label.get_text() for label in norms.get_yticklabels()] == [
        "gpt2, tokens",
        "gpt2, positions",
        "llama, tokens",
    ]
    assert list(diagonals.lines[0].get_xdata()) == [
        both["gpt2"].tokens.diagonal_share,
        both["gpt2"].positions.diagonal_share,
        both["llama"].tokens.diagonal_share,
    ]
    (line,) = steps.lines
    assert line.get_ydata().tolist() == both["gpt2"].neighbour_distances.tolist()
    assert not theory_plots.embedding_statistics({"llama": both["llama"]}).axes[2].get_visible()


def test_calibration_shows_curves_and_divergences():
    """Curves less their mean over pairs, of which a window of 4 has 4, 3, 2 and 1; factors on an axis of their own."""
    figure = plots.calibration(REPORT)
    left, right = figure.axes[0:6:2], figure.axes[1:6:2]
    (beside,) = figure.axes[6:]
    base = [list(line.get_ydata()) for line in left[0].lines[:2]]
    assert base[0] == pytest.approx([4 - 2.1, 1 - 2.1, 1 - 2.1, -2.1])
    assert base[1] == pytest.approx([1, 0, -1, -2])
    assert [list(line.get_ydata()) for line in left[0].lines[2:]] == [[1, 0, -1, -2], [0, 0, 0, 0]]
    assert [len(axes.lines) for axes in left] == [4, 2, 2]
    assert [list(line.get_ydata()) for line in beside.lines] == CURVE.tolist()
    assert left[0].lines[0].get_color() == left[0].lines[2].get_color() != left[0].lines[1].get_color()
    assert left[0].lines[0].get_linestyle() != left[0].lines[2].get_linestyle()
    assert [axes.get_ylabel().splitlines()[0] for axes in left] == ["layer 1", "layer 4", "layer 5"]
    shown = {line.get_label(): list(line.get_ydata()) for line in right[0].lines}
    assert list(shown) == ["before", "closed forms", "at the end"]
    assert shown["closed forms"] == pytest.approx([0.4, 0.2])
    assert shown["at the end"] == pytest.approx([1e-6, 1e-6])  # as low as the axis goes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["base", "some", *shown]


def test_calibration_of_many_layers_has_a_panel_for_each():
    many = Calibration("some", tuple(fit(index, None) for index in range(33)), 1000, LOSSES, "attention")
    figure = plots.calibration(many)
    shown = [axes.get_ylabel().splitlines()[0] for axes in figure.axes if axes.get_visible()]
    assert sorted(label for label in shown if label.startswith("layer")) == sorted(f"layer {n}" for n in range(33))
    assert shown.count("KL (nats)") == 33
    assert [text.get_text() for text in figure.legends[0].get_texts()][:2] == ["base", "before"]


def test_the_bias_that_comes_closest_to_a_tables_scores_is_drawn_head_by_head():
    found = theory.position_scores(tiny("gpt2"), length=12)
    axes = theory_plots.position_scores(found).axes[0]
    assert [line.get_ydata().tolist() for line in axes.lines] == found.bias.tolist()
    shares = [text.get_text() for text in axes.get_legend().get_texts()]
    assert shares == [f"head {head}: {share:.0%}" for head, share in enumerate(found.explained_in_rows.tolist())]


@pytest.mark.slow
def test_the_gallery_is_drawn_from_schemes_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import plot_schemes

    plot_schemes.main([str(tmp_path / "a"), "--format", "svg"])
    plot_schemes.main([str(tmp_path / "b"), "--format", "svg", "--only", "decay", "wavelengths"])
    assert {path.stem for path in (tmp_path / "a").iterdir()} == set(plot_schemes.GALLERY)
    for name in ("decay.svg", "wavelengths.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


COMMANDS = [
    (["similarity", "sinusoidal", "--set", "base=100", "--length", "20"], "sinusoidal"),
    (["decay", "MODEL", "rope", "--length", "20"], "model"),
    (["attention", "MODEL", "--length", "20"], "model"),
    (["order", "MODEL", "--length", "8"], "model"),
    (["expansion", "MODEL", "--length", "9", "--positions", "2", "5"], "model"),
    (["equivariance", "MODEL", "--length", "8"], "model"),
    (["terms", "MODEL", "--length", "12"], "model"),
    (["table", "MODEL", "--length", "20"], "model"),
    (["grid", "1000", "--length", "8"], "1000"),
    (["waves", "10000", "t^2", "1,0.3,0.1", "--length", "20"], "t^2"),
    (["properties", "MODEL", "alibi", "--trained-length", "16"], "model"),
    (["hessian", "MODEL", "--length", "9", "--positions", "2", "5"], "model"),
    (["negative", "MODEL", "--length", "9"], "model"),
    (["statistics", "MODEL"], "model"),
    (["vectors", "MODEL", "--length", "20"], "model"),
    (["wavelengths", "rope", "--trained-length", "64"], "rope"),
    (["precision", "alibi", "--length", "300"], "alibi"),
    (["biases", "alibi", "--length", "10"], "alibi"),
]


@pytest.mark.rows(default=2)
@pytest.mark.parametrize(("arguments", "source"), COMMANDS, ids=[arguments[0] for arguments, _ in COMMANDS])
def test_command(arguments, source, tmp_path, capsys):
    tiny("gpt2").save_pretrained(tmp_path / "model")
    kind, *rest = [str(tmp_path / "model") if argument == "MODEL" else argument for argument in arguments]
    picture, numbers = tmp_path / "picture.png", tmp_path / "numbers.json"
    assert main(["plot", kind, str(picture), *rest, "--json", str(numbers)]) == 0, capsys.readouterr().err
    assert picture.read_bytes().startswith(b"\x89PNG")
    written = json.loads(numbers.read_text())
    assert written["kind"] == kind
    assert written["sources"][source]


@pytest.mark.parametrize(
    ("source", "acts"),
    [
        ("rope", "on queries and keys"),
        ("nope", "nowhere"),
        ("sinusoidal", "on the hidden states, input"),
        ("STOCK", "as the stock model does"),
        ("ROTATED", "on queries and keys"),
    ],
)
def test_biases_are_refused_of_what_adds_nothing_to_scores(source, acts, tmp_path, capsys):
    """Instead of a picture of the products that rotations make; the plot that is named draws those."""
    if source.isupper():
        model = tiny("llama") if source == "STOCK" else hf_posenc.patch_model(tiny("llama"), "rope")
        model.save_pretrained(tmp_path / "model")
        source = str(tmp_path / "model")
    picture = tmp_path / "a.png"
    assert main(["plot", "biases", str(picture), source, "--length", "8"]) == 2
    said = capsys.readouterr().err
    assert f"adds nothing: it acts {acts}" in said
    assert "`hf-posenc plot decay`" in said
    assert not picture.exists()
    assert main(["plot", "decay", str(picture), source, "--length", "8"]) == 0


def test_the_label_of_the_colours_is_no_longer_than_they_are():
    """In the least of its pictures, of one row of heads."""
    figure = plots.bias_maps(analysis.decay("alibi", 8, dims=replace(probe.DIMS, num_heads=4, num_key_value_heads=4)))
    figure.draw_without_rendering()
    bar = figure.axes[-1]
    assert bar.yaxis.label.get_window_extent().height < bar.get_window_extent().height


def test_waves_and_recurrence_of_a_model_that_rotates(tmp_path, capsys):
    """The numbers beside the picture are those of the functions, on the same tokens."""
    from hf_posenc.evaluation import measure_recurrence

    model = tiny("llama")
    model.save_pretrained(tmp_path / "model")
    source, found = str(tmp_path / "model"), {}
    for kind in ("waves", "recurrence"):
        numbers = tmp_path / f"{kind}.json"
        arguments = [kind, str(tmp_path / "a.png"), source, "--length", "8", "--json", str(numbers)]
        assert main(["plot", *arguments]) == 0, capsys.readouterr().err
        found[kind] = json.loads(numbers.read_text())["sources"]["model"]
    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (64,), generator=torch.Generator().manual_seed(0))
    for each, memory in zip(found["recurrence"], (0, 8), strict=True):
        expected = measure_recurrence(model, [ids], segment=8, memory=memory)
        assert each["memory"] == memory
        assert each["perplexity"]["nll"] == pytest.approx(expected.perplexity.nll, rel=1e-5)
    ids = torch.randint(vocabulary, (8,), generator=torch.Generator().manual_seed(0))
    weights = theory.rotary_weights(model, ids)
    for name, curve in (("sum", weights.decay(range(-8, 9))), ("integral", weights.integral(range(-8, 9)))):
        torch.testing.assert_close(torch.tensor(found["waves"][name]["scores"]).double(), curve.scores)


def test_the_command_line_names_every_kind_of_picture():
    from hf_posenc.cli import PLOTS
    from hf_posenc.plot_kinds import KINDS

    assert list(PLOTS) == list(KINDS)


@pytest.mark.parametrize(
    ("text", "at_a_half"),
    [("10000", 0.01), ("1e2", 0.1), ("t^2", 0.25), ("t^0.5", 0.5**0.5), ("t", 0.5), ("t^1,2", None), ("a,b", None)],
)
def test_frequencies_that_a_command_line_can_say(text, at_a_half):
    from hf_posenc.plot_kinds import parse_frequencies

    found = parse_frequencies(text)
    if at_a_half is None:
        assert found is None
    else:
        half = torch.tensor(0.5, dtype=torch.float64)
        assert (found**-0.5 if isinstance(found, float) else float(found(half))) == pytest.approx(at_a_half)
    assert parse_frequencies("1,0.5") == [1.0, 0.5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "o.png", "alibi"], "name a checkpoint"),
        (["waves", "o.png", "alibi"], "a checkpoint, or frequencies: their base"),
        (["grid", "o.png", "t^2"], "by their base"),
        (["grid", "o.png", "100", "--data", "a"], "--data has no effect on grid of 100"),
        (["precision", "o.png", "100"], "name a scheme"),
        (["waves", "o.png", "t^2", "--scheme-args", "base=3"], "--scheme-args has no effect"),
        (["expansion", "o.png", "rope"], "name a checkpoint"),
        (["similarity", "o.png", "rope"], "adds no position vectors"),
        (["similarity", "o.png", "rope", "alibi"], "needs one scheme or model"),
        (["decay", "o.bmp", "rope"], "png, svg, pdf"),
        (["decay", "o.png", "rope", "--set", "base=3"], "no hyper-parameter base"),
    ],
)
def test_wrong_commands(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.perplexity_by_length({"base": []}), "nothing to draw"),
        (lambda: plots.loss_by_position({"base": [(4, 4, 1.0)]}), "last position"),
        (lambda: plots.calibration(Calibration("some", (), 0, LOSSES, "nothing")), "nothing to draw"),
        (lambda: plots.retrieval_heat_map([*CELLS, CELLS[0]]), "two cells"),
        (lambda: plots.save(FIGURES["loss"](), "figure.bmp"), "png, svg, pdf"),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_without_matplotlib_the_message_names_the_extra_and_the_numbers_remain(tmp_path):
    """Importing does not take it; drawing asks for it; the command has written the numbers by then."""
    program = (
        "import sys, hf_posenc.analysis\n"
        "from hf_posenc.analysis import plots\n"
        "from hf_posenc.cli import main\n"
        "print('matplotlib' in sys.modules)\n"
        "sys.modules['matplotlib'] = None\n"
        "try:\n    plots.loss_curve({'a': [(0, 1.0)]})\n"
        "except ImportError as error:\n    print(error)\n"
        "sys.exit(main(['plot', 'decay', 'o.png', 'alibi', '--numbers', 'n.json']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=ENV)
    assert done.returncode == 2, done.stderr
    imported, said = done.stdout.splitlines()[:2]
    assert imported == "False"
    assert "pip install matplotlib" in said
    assert "pip install matplotlib" in done.stderr
    assert json.loads((tmp_path / "n.json").read_text())["sources"]["alibi"]["distances"][:2] == [0, 1]

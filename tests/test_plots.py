"""Figures: what they show, that they are the same bytes twice, and what is said without matplotlib."""

import math
import subprocess
import sys

import pytest

from hf_posenc.analysis import plots

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


FIGURES = dict(figures())


@pytest.mark.parametrize("kind", plots.FORMATS)
@pytest.mark.parametrize("name", FIGURES)
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
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("context length (tokens)", "perplexity per token")
    assert "trained length 256" in [text.get_text() for text in axes.texts]


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.perplexity_by_length({"base": []}), "nothing to draw"),
        (lambda: plots.loss_by_position({"base": [(4, 4, 1.0)]}), "last position"),
        (lambda: plots.retrieval_heat_map([*CELLS, CELLS[0]]), "two cells"),
        (lambda: plots.save(FIGURES["loss"](), "figure.bmp"), "png, svg, pdf"),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_without_matplotlib_the_message_names_the_extra_and_the_numbers_remain():
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import hf_posenc.analysis\n"
        "from hf_posenc.analysis import plots\n"
        "try:\n    plots.loss_curve({'a': [(0, 1.0)]})\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'hf_posenc[plots]'" in done.stdout


def test_importing_the_analysis_does_not_import_matplotlib():
    program = "import sys, hf_posenc.analysis, hf_posenc.analysis.plots; print('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "False"

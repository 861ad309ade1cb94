"""Figures: what they show, that they are the same bytes twice, and what is said without matplotlib."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_posenc import analysis
from hf_posenc.analysis import plots
from hf_posenc.calibration.report import Calibration, HeldOutLoss, LayerFit

pytest.importorskip("matplotlib", reason="pip install matplotlib runs this")

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}

CURVES = {
    "base, sliding": [(128, 4.5), (256, 4.2), (512, math.inf)],
    "base, non-overlapping": [(128, 5.5), (256, 5.0), (512, 50.0)],
    "alibi, sliding": [(512, 4.0), (128, 4.4), (256, 4.1)],
}
BINS = {"base": [(0, 1, 6.0), (1, 4, 4.0), (4, 16, 3.0)], "alibi": [(0, 1, 6.1), (1, 4, 4.2), (4, 16, 2.9)]}
CELLS = [{"length": n, "depth": d, "accuracy": d} for n in (128, 256) for d in (0, 0.5, 1) if (n, d) != (256, 0.5)]


def figures():
    yield "perplexity", lambda: plots.perplexity_by_length(CURVES, trained_length=256, title="Perplexity")
    yield "position", lambda: plots.loss_by_position(BINS, trained_length=8)
    yield "loss", lambda: plots.loss_curve({"base": [(0, 5.0), (1000, 4.0)]}, title="Loss")
    yield "retrieval", lambda: plots.retrieval_heat_map(CELLS, title="Passkey")
    yield "similarity", lambda: plots.similarity_matrix(analysis.scheme_vectors("sinusoidal", 20))
    yield "decay", lambda: plots.decay_curves({s: analysis.decay(s, 30) for s in ("rope", "shaw")}, heads=True)
    yield "wavelengths", lambda: plots.wavelengths(analysis.frequencies("rope"))
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


def test_perplexity_lines_are_the_numbers_on_an_axis_of_at_least_a_factor_of_two():
    axes = plots.perplexity_by_length(CURVES, trained_length=256).axes[0]
    *lines, trained = axes.lines
    assert [line.get_label() for line in lines] == list(CURVES)
    assert [list(lines[2].get_xdata()), list(lines[2].get_ydata())] == [[128, 256, 512], [4.4, 4.1, 4.0]]
    assert len({line.get_color() for line in lines}) == len({line.get_marker() for line in lines}) == 3
    assert (trained.get_xdata()[0], trained.get_label()) == (256, "trained length 256")
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("context length (tokens)", "perplexity per token (log scale)")
    axes = plots.perplexity_by_length({"a": [(128, 4.0), (256, 4.2)]}).axes[0]
    low, high = axes.get_ylim()
    assert high / low == pytest.approx(2)
    assert low * high == pytest.approx(4.0 * 4.2)
    assert len([tick for tick in axes.get_yticks() if low < tick < high]) >= 2
    assert plots.perplexity_by_length({"diverged": [(128, math.inf)]})


def test_steps_of_loss_by_position():
    axes = plots.loss_by_position(BINS).axes[0]
    values, edges, _ = axes.patches[0].get_data()
    assert (list(values), list(edges)) == ([6, 4, 3], [0.5, 1, 4, 16])
    assert axes.get_xscale() == "log"


def test_scheme_pictures_are_the_numbers():
    figure = FIGURES["similarity"]()
    cosines = torch.tensor(figure.axes[0].images[0].get_array())
    # Sinusoids all have one length, and the cosine depends on the distance only.
    expected = analysis.decay("sinusoidal", 20).scores[0, 0]
    torch.testing.assert_close(cosines[0], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(cosines[19].flip(0), expected, rtol=0, atol=1e-12)
    assert figure.axes[1].get_ylabel() == f"cosine similarity ({float(expected.min()):.2f} to 1.00)"

    curve = analysis.decay("alibi", 10)
    line = plots.decay_curves({"alibi": curve}).axes[0].lines[0]
    assert list(line.get_ydata()) == pytest.approx(curve.scores.mean((0, 1)).tolist())
    assert len(plots.decay_curves({"alibi": curve}, heads=True).axes[0].lines) == 9


def test_wavelengths_and_trained_length():
    axes = FIGURES["wavelengths"]().axes[0]
    assert axes.lines[0].get_ydata()[0] == pytest.approx(2 * math.pi, rel=1e-6)
    assert axes.get_legend().get_texts()[0].get_text() == "rope (16 of 32 turn)"
    with pytest.raises(ValueError, match="the same trained length"):
        plots.wavelengths(analysis.frequencies("rope") + analysis.frequencies("rope", trained_length=64))


def test_calibration_shows_curves_and_divergences():
    """Curves less their mean over pairs, of which a window of 4 has 4, 3, 2 and 1; factors on an axis of their own."""
    figure = plots.calibration(REPORT)
    left, right = figure.axes[0:6:2], figure.axes[1:6:2]
    (beside,) = figure.axes[6:]
    drawn = [list(line.get_ydata()) for line in left[0].lines]
    assert drawn[0] == pytest.approx([4 - 2.1, 1 - 2.1, 1 - 2.1, -2.1])
    assert drawn[1:] == [[1, 0, -1, -2], [1, 0, -1, -2], [0, 0, 0, 0]]
    assert [len(axes.lines) for axes in left] == [4, 2, 2]
    assert [list(line.get_ydata()) for line in beside.lines] == CURVE.tolist()
    assert left[0].lines[0].get_color() == left[0].lines[2].get_color() != left[0].lines[1].get_color()
    assert left[0].lines[0].get_linestyle() != left[0].lines[2].get_linestyle()
    shown = {line.get_label(): list(line.get_ydata()) for line in right[0].lines}
    assert list(shown) == ["before", "closed forms", "at the end"]
    assert shown["closed forms"] == pytest.approx([0.4, 0.2])
    assert shown["at the end"] == pytest.approx([1e-6, 1e-6])  # as low as the axis goes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["base", "some", *shown]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.calibration(Calibration("some", (), 0, LOSSES, "nothing")), "nothing to draw"),
        (lambda: plots.loss_curve({}), "nothing to draw"),
        (lambda: plots.retrieval_heat_map([*CELLS, CELLS[0]]), "two cells"),
        (lambda: plots.save(FIGURES["loss"](), "figure.xyz"), "'xyz' is not supported"),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_without_matplotlib_the_message_names_the_package(tmp_path):
    """Importing does not take it; drawing asks for it."""
    program = (
        "import sys, hf_posenc.analysis\n"
        "from hf_posenc.analysis import plots\n"
        "print('matplotlib' in sys.modules)\n"
        "sys.modules['matplotlib'] = None\n"
        "try:\n    plots.loss_curve({'a': [(0, 1.0)]})\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=ENV)
    assert done.returncode == 0, done.stderr
    imported, said = done.stdout.splitlines()[:2]
    assert imported == "False"
    assert "pip install matplotlib" in said

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

pytest.importorskip("matplotlib", reason="pip install matplotlib runs this")

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}

CURVES = {
    "base, sliding": [(128, 4.5), (256, 4.2), (512, math.inf)],
    "base, non-overlapping": [(128, 5.5), (256, 5.0), (512, 50.0)],
    "alibi, sliding": [(512, 4.0), (128, 4.4), (256, 4.1)],
}
BINS = {"base": [(0, 1, 6.0), (1, 4, 4.0), (4, 16, 3.0)], "alibi": [(0, 1, 6.1), (1, 4, 4.2), (4, 16, 2.9)]}


def figures():
    yield "perplexity", lambda: plots.perplexity_by_length(CURVES, trained_length=256, title="Perplexity")
    yield "position", lambda: plots.loss_by_position(BINS, trained_length=8)
    yield "loss", lambda: plots.loss_curve({"base": [(0, 5.0), (1000, 4.0)]}, title="Loss")
    yield "similarity", lambda: plots.similarity_matrix(analysis.scheme_vectors("sinusoidal", 20))
    yield "decay", lambda: plots.decay_curves({s: analysis.decay(s, 30) for s in ("rope", "shaw")}, heads=True)


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.loss_curve({}), "nothing to draw"),
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

"""One row per scheme: what the tests know of it beside its formula, which is in cases.py.

Nothing here imports hf_posenc. `python tests/asked.py NAME` says what the row of a new scheme still lacks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NAN, INF = float("nan"), float("inf")
Wrong = tuple[str, Any, type[Exception], list[str]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the tests know of a scheme.

    Attributes:
        variants: hyper-parameters that situations, checkpoints and adapters run it with, for tiny models. The first, named
            "", stands for the scheme where not every variant is run.
        values: two values of each hyper-parameter; the second is not the default.
        wrong: (hyper-parameter, wrong value, error, what the message says).
        acts: hyper-parameters by which the scheme acts in the few tokens of the tests, if its defaults do not.
        beside: hyper-parameter -> others without which it is not read, in place of `acts`.
        spacing: whether it matters to the scheme how far apart positions are, not only which comes first.
        neutral: whether it starts as what it joins, whatever its hyper-parameters are.
        distribution: whether the weights of a query sum to 1.
        modules: hyper-parameters that engines are compared with, for schemes on scores; named as `variants`.
    """

    variants: dict[str, dict[str, Any]]
    values: dict[str, tuple[Any, Any]]
    wrong: list[Wrong]
    spacing: bool = True
    neutral: bool = False
    distribution: bool = True
    acts: dict[str, Any] = field(default_factory=dict)
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)
    modules: dict[str, dict[str, Any]] = field(default_factory=dict)


def no_switch(name: str) -> list[Wrong]:
    return [(name, 1, TypeError, ["True or False"])]


def no_number(name: str, *values: Any) -> list[Wrong]:
    return [(name, value, TypeError, ["number"]) for value in values]


def no_integer(name: str, *values: Any) -> list[Wrong]:
    return [(name, value, TypeError, ["integer"]) for value in values]


def not_positive(name: str, *values: Any) -> list[Wrong]:
    return [(name, value, ValueError, ["positive"]) for value in values]


ROWS: dict[str, Row] = {
    "nope": Row(
        variants={"": {}},
        values={},
        wrong=[],
        spacing=False,
    ),
    "sinusoidal": Row(
        variants={
            "": {},
            "trainable": {"trainable": True},
            "every_layer": {"placement": "every_layer", "layout": "split"},
        },
        values={
            "base": (10000.0, 50.0),
            "layout": ("interleaved", "split"),
            "frequencies": (None, [0.1 * n for n in range(16)]),
            "trainable": (False, True),
            "placement": ("input", "every_layer"),
            "scale": ("match", 0.5),
        },
        wrong=[
            *not_positive("base", 0, -2.0),
            *no_number("base", "10000"),
            ("layout", "half", ValueError, ["interleaved", "split", "'half'"]),
            *no_number("frequencies", "power", ["1"] * 16),
            ("frequencies", [NAN] * 16, ValueError, ["finite"]),
            *no_switch("trainable"),
            ("placement", "output", ValueError, ["input", "every_layer"]),
            *not_positive("scale", 0, -1.0),
            ("scale", "auto", ValueError, ["match", "positive"]),
            *no_number("scale", True),
        ],
    ),
    "learned": Row(
        variants={
            "": {"num_positions": 64},
            "every_layer": {"num_positions": 64, "placement": "every_layer"},
            "per_layer": {"num_positions": 64, "placement": "every_layer", "share_layers": False},
        },
        values={
            "num_positions": (None, 32),
            "placement": ("input", "every_layer"),
            "share_layers": (True, False),
            "initialization": (None, "normal"),
        },
        wrong=[
            *not_positive("num_positions", 0, -1),
            *no_integer("num_positions", 2.5),
            ("placement", "all", ValueError, ["input", "every_layer"]),
            *no_switch("share_layers"),
            ("initialization", "random", ValueError, ["native", "sinusoidal", "normal"]),
        ],
    ),
    "rope": Row(
        variants={"": {"rope_theta": 100.0}},
        values={
            "rope_theta": (None, 50.0),
            "layout": ("half", "interleaved"),
            "partial_rotary_factor": (None, 0.5),
            "scaling": (None, {"rope_type": "linear", "factor": 3.0}),
            "frequencies": (None, (1.0, 0.4, 0.02, 0.0)),
        },
        wrong=[
            *not_positive("rope_theta", 0, -1),
            *no_number("rope_theta", "1e4"),
            ("layout", "split", ValueError, ["half", "interleaved"]),
            *[("partial_rotary_factor", value, ValueError, []) for value in (0, 1.5, NAN)],
            *no_number("partial_rotary_factor", "0.5"),
            ("scaling", "linear", TypeError, ["dict"]),
            *[
                ("scaling", {"rope_type": name}, ValueError, ["linear", "yarn", "llama3"])
                for name in ("ntk", "default")
            ],
            ("scaling", {"rope_type": "linear", "factor": 2.0, "rope_theta": 1.0}, ValueError, ["beside"]),
            *[("scaling", {"rope_type": name}, ValueError, ["factor"]) for name in ("linear", "yarn", "longrope")],
            ("scaling", {"rope_type": "linear", "factor": "two"}, ValueError, ["factor"]),
            ("frequencies", "hope", TypeError, ["soft_clip", "hope", "abf", "ntk"]),
            *[("frequencies", value, TypeError, ["list"]) for value in (0.5, tuple)],
            *[("frequencies", values, ValueError, ["0 to pi"]) for values in ((1.0, -0.1), (1.0, 3.2), (INF,), (0.0,))],
            ("frequencies", (1.0, 0.5), ValueError, ["2", "4 pairs"]),
            ("frequencies", {"name": "yarn"}, ValueError, ["soft_clip", "hope", "abf", "ntk"]),
            ("frequencies", {"name": "softclip"}, ValueError, ["Did you mean soft_clip?"]),
            ("frequencies", {"name": "hope", "factor": 2.0}, ValueError, ["length"]),
            ("frequencies", {"name": "hope", "length": 10**6}, ValueError, ["nothing"]),
            *[("frequencies", {"name": "soft_clip", "pairs": value}, ValueError, ["pairs"]) for value in (1, 5, "2")],
            *[("frequencies", {"name": "ntk", "factor": value}, ValueError, ["factor"]) for value in (1, INF, "4")],
            ("frequencies", {"slow": (1.0,)}, ValueError, ["slow"]),
        ],
    ),
    "far_rope": Row(
        variants={
            "": {"near": 3},
            "self_extend": {"kind": "self_extend", "near": 4, "group": 3},
            "dual_chunk": {"kind": "dual_chunk", "chunk": 5, "length": 7},
        },
        values={
            "kind": ("rerope", "self_extend"),
            "near": (None, 2),
            "leak": (None, 0.5),
            "group": (None, 2),
            "chunk": (None, 2),
            "length": (None, 5),
        },
        wrong=[
            ("kind", "dca", ValueError, ["rerope", "self_extend", "dual_chunk"]),
            *not_positive("near", 0, -2),
            *no_integer("near", 2.5),
            *[("leak", value, ValueError, ["below 1"]) for value in (-0.1, 1, NAN)],
            *no_number("leak", "0.5"),
            *[(name, 2, ValueError, ["'rerope' does not read"]) for name in ("group", "chunk", "length")],
        ],
        acts={"near": 2},
        beside={
            "group": {"kind": "self_extend", "near": 2},
            "chunk": {"kind": "dual_chunk"},
            "length": {"kind": "dual_chunk", "chunk": 2},
        },
        modules={
            "": {"near": 20},
            "dual-chunk": {"kind": "dual_chunk", "chunk": 30, "length": 40},
        },
    ),
    "rope_by_head": Row(
        variants={"": {"pairs": [0]}},
        values={"pairs": (None, (0, 2))},
        wrong=[
            *[("pairs", value, TypeError, ["by layer and key-value head"]) for value in ("0", 2, [0.5], [True], [[0]])],
            *[("pairs", value, ValueError, ["take nope"]) for value in ([], [[[], []]])],
            ("pairs", [0, -1], ValueError, ["counted from 0"]),
            ("pairs", [[[0], [1, 1]]], ValueError, ["twice"]),
            ("pairs", [0, 64], ValueError, ["0 to 3"]),
            ("pairs", [[[0]]], ValueError, ["lists for 1 layers"]),
        ],
        acts={"pairs": [0]},
        modules={"": {"pairs": [0, 3]}},
    ),
    "transformer_xl": Row(
        variants={"": {}},
        values={"frequencies": (16, [1.0, 0.25]), "longest": (None, 50)},
        wrong=[
            *not_positive("frequencies", 0, [], [0.5, 0], [NAN]),
            *no_integer("frequencies", 2.5),
            *not_positive("longest", 0),
            *no_integer("longest", 2.5),
            *no_number("frequencies", ["1"]),
        ],
        modules={"": {}},
    ),
    "shaw": Row(
        variants={"": {"max_distance": 5}, "shared": {"max_distance": 5, "share_layers": True, "share_heads": False}},
        values={
            "max_distance": (32, 3),
            "share_heads": (True, False),
            "share_layers": (False, True),
            "values": (True, False),
        },
        wrong=[
            ("max_distance", -4, ValueError, ["0 or more"]),
            *no_integer("max_distance", 2.5),
            *no_switch("share_heads"),
            *no_switch("share_layers"),
            *no_switch("values"),
        ],
        modules={
            "": {"max_distance": 7},
            "per-head": {"max_distance": 40, "share_heads": False},
            "keys-only": {"max_distance": 1, "values": False},
            "one-vector": {"max_distance": 0},
        },
    ),
    "alibi": Row(
        variants={
            "": {},
            "trainable": {"trainable": True},
            "hard": {"slopes": [0.0, 0.0, 0.0, 0.0], "windows": [3, 1, 2, None]},
        },
        values={"slopes": (None, [0.5, 0.1, 0.2, 0.3]), "windows": (None, [3, None, 1, 5]), "trainable": (False, True)},
        wrong=[
            *no_number("slopes", 0.5, [0.1, "x", 0.2, 0.3]),
            *[("slopes", [0.1, value, 0.1, 0.1], ValueError, ["not negative"]) for value in (-0.5, INF, NAN)],
            *[("slopes", [0.1] * count, ValueError, [str(count), "4 heads"]) for count in (0, 3, 5)],
            *no_number("windows", 3, [1, 2.0, None, 3]),
            *[("windows", [3, value, None, 1], ValueError, ["positive"]) for value in (0, -2, 2**31)],
            *[("windows", [2] * count, ValueError, [str(count), "4 heads"]) for count in (3, 5)],
            *no_switch("trainable"),
        ],
        modules={"": {}, "trainable": {"trainable": True}},
    ),
    "qk_norm": Row(
        variants={"": {}, "all-heads": {"over": "all_heads", "exponent": 1.0, "gain": 3.0, "trainable": False}},
        values={
            "over": ("head", "all_heads"),
            "exponent": (0.0, 1.0),
            "gain": (1.0, 2.5),
            "eps": (1e-6, 0.1),
            "trainable": (True, False),
        },
        wrong=[
            ("over", "heads", ValueError, ["head", "all_heads"]),
            *no_number("exponent", "1"),
            *[("exponent", value, ValueError, ["from 0 to 1"]) for value in (-0.1, 1.5, INF, NAN)],
            *not_positive("gain", 0, -1.0),
            *no_number("gain", "1"),
            *not_positive("eps", 0.0, -1e-6),
            *no_number("eps", "1e-6"),
            *no_switch("trainable"),
            ("trainable", False, ValueError, ["not trained"]),
        ],
        acts={"exponent": 1.0},
    ),
    "da_transformer": Row(
        variants={"": {}},
        values={"relu": (True, False)},
        wrong=no_switch("relu"),
        modules={"": {}, "signed": {"relu": False}},
    ),
    "t5": Row(
        variants={"": {"num_buckets": 8, "max_distance": 16}},
        values={"num_buckets": (32, 8), "max_distance": (128, 18), "share_layers": (True, False)},
        wrong=[
            *not_positive("num_buckets", 0, -2),
            ("num_buckets", 7, ValueError, ["even"]),
            *no_integer("num_buckets", 8.0),
            ("max_distance", 16, ValueError, ["above num_buckets / 2 = 16"]),
            *no_integer("max_distance", "128"),
            *no_switch("share_layers"),
        ],
        modules={"": {"num_buckets": 8, "max_distance": 30}},
    ),
    "kerple": Row(
        variants={"": {}, "per-layer": {"share_layers": False}},
        values={"share_layers": (True, False)},
        wrong=no_switch("share_layers"),
        modules={"": {}},
    ),
    "bam": Row(
        variants={"": {"share_layers": True}, "centre": {"centre": True}},
        values={"centre": (False, True), "share_layers": (False, True)},
        wrong=[*no_switch("centre"), *no_switch("share_layers")],
        modules={"": {}, "centre": {"centre": True}},
    ),
    "fire": Row(
        variants={
            "": {"hidden_size": 16, "threshold": 64.0},
            "shared": {"hidden_size": 16, "threshold": 64.0, "share_layers": True},
        },
        values={"hidden_size": (32, 3), "threshold": (512.0, 3.0), "share_layers": (False, True)},
        wrong=[
            *not_positive("hidden_size", 0, -2),
            *no_integer("hidden_size", 2.5),
            *not_positive("threshold", 0, -1.0),
            *no_number("threshold", "512"),
            *no_switch("share_layers"),
        ],
        modules={"": {"hidden_size": 8, "threshold": 16.0}},
    ),
    "temperature": Row(
        variants={"": {"length": 3, "trainable": True}, "scalable": {"kind": "scalable", "share_layers": True}},
        values={
            "kind": ("log_n", "scalable"),
            "strength": (None, [0.5, 0.7, 1.5, 2.0]),
            "length": (None, 3),
            "trainable": (False, True),
            "share_heads": (False, True),
            "share_layers": (False, True),
        },
        wrong=[
            *[("kind", value, ValueError, ["constant", "log_n", "llama4", "scalable"]) for value in ("log", None, 2)],
            *no_number("strength", "1"),
            *[("strength", value, ValueError, ["not negative"]) for value in (-0.5, INF, NAN)],
            ("strength", [0.1] * 3, ValueError, ["3 strengths", "4 heads"]),
            ("length", 1, ValueError, ["at least 2"]),
            *no_integer("length", 2.5),
            *no_switch("trainable"),
            *no_switch("share_heads"),
            *no_switch("share_layers"),
        ],
        acts={"length": 2},
    ),
    "forgetting": Row(
        variants={"": {}, "low": {"bias": -1.0}},
        values={"bias": (5.0, 1.0)},
        wrong=[*no_number("bias", "5"), *[("bias", value, ValueError, ["finite"]) for value in (INF, NAN)]],
        acts={"bias": 0.0},
    ),
    "softpick": Row(
        variants={"": {}},
        values={"offset": (0.0, 1.0)},
        wrong=[*no_number("offset", "1"), *[("offset", value, ValueError, ["not negative"]) for value in (-0.5, INF)]],
        acts={"offset": 1.0},
        distribution=False,
    ),
    "differential": Row(
        variants={"": {}, "pairs": {"kind": "pairs"}},
        values={"kind": ("each", "pairs"), "start": (None, 0.3)},
        wrong=[
            ("kind", "v2", ValueError, ["each", "pairs"]),
            *no_number("start", "0.5"),
            *[("start", value, ValueError, ["below 1"]) for value in (-0.1, 1.0, NAN)],
        ],
        acts={"start": 0.5},
        distribution=False,
    ),
    "dape": Row(
        variants={"": {"hidden_size": 5}, "heads": {"hidden_size": 5, "width": 1}},
        values={"hidden_size": (32, 4), "width": (3, 5)},
        wrong=[
            *[*not_positive("hidden_size", 0, -2), *no_integer("hidden_size", 2.5)],
            *[*not_positive("width", 0), *no_integer("width", 1.5), ("width", 2, ValueError, ["odd"])],
        ],
        neutral=True,
    ),
    "inkling": Row(
        variants={"": {"rank": 3, "extent": 7}},
        values={"rank": (16, 2), "extent": (1024, 5)},
        wrong=[
            *not_positive("rank", 0),
            *no_integer("rank", 2.5),
            *not_positive("extent", 0),
            *no_integer("extent", "7"),
        ],
        neutral=True,
    ),
    "gated": Row(
        variants={"": {}, "heads": {"over": "head"}},
        values={"over": ("element", "head")},
        wrong=[("over", "heads", ValueError, ["element", "head"])],
        neutral=True,
    ),
    "cope": Row(
        variants={"": {"num_positions": 6}},
        values={"num_positions": (64, 5), "share_layers": (False, True)},
        wrong=[
            *not_positive("num_positions", 0, -3),
            ("num_positions", 1, ValueError, ["at least 2"]),
            *no_integer("num_positions", 2.5),
            *no_switch("share_layers"),
        ],
        spacing=False,
        modules={"": {"num_positions": 20}},
    ),
}
# What every scheme has.
for row in ROWS.values():
    row.values.update(layers=(None, (1,)), window=(None, 18), sinks=(None, 2))


NEUTRAL = tuple(scheme for scheme, row in ROWS.items() if row.neutral)
ACTS = {scheme: row.acts for scheme, row in ROWS.items()}


def named(kind: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return (scheme, hyper-parameters) of all `variants` or `modules`, named `scheme` or `scheme-variant`."""
    return {
        f"{scheme}-{name}".removesuffix("-"): (scheme, hyperparameters)
        for scheme, row in ROWS.items()
        for name, hyperparameters in getattr(row, kind).items()
    }

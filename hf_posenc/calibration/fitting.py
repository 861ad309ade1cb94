"""Fit a scheme's parameters to the coefficients that closed forms want at every distance.

Parameters that a bias or vectors by distance are linear in are solved for. All others are searched for in float64.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.forms import Form, LinearVectors, is_one_of
from ..core.modules import ScoreModule
from .closed_forms import WAVES, Target, coefficients, form_of, takes_queries
from .pair import copied, put

TAIL = 4
"""Windows of T tokens have T distances. A curve is fitted at `TAIL * T` distances. The target of those beyond T, the
tail, is the mean target of the last quarter of the T distances."""

REACH = 16
"""Vectors made of waves are fitted up to distance `REACH * T`. Without targets there they could take any value."""

FALL = 2
"""Slope of the tail of vectors made of waves. The target of a score falls by `FALL * log(d / T)` at a distance d > T.
If only positions counted, all keys beyond T would then weigh less than T keys at the end of the windows: `sum_(d > T)
(T / d)^2 < T`."""

TAIL_WEIGHT = 1e-3
"""Weight of a distance in the tail, relative to the mean weight of the T distances of the windows."""

STEPS = 100
"""Largest number of steps in the search for a scheme's parameters. Most searches end earlier."""

FEATURE_RIDGE = 1e-2
"""Ridge of a weight that projects sinusoids, relative to the mean square of a feature. Sinusoids of neighbouring
frequencies are nearly equal at the distances of the windows; without it the weight would be huge."""

ROW_RIDGE = 1e-6
"""The same for a table with one vector per distance. It only decides what is added to all vectors of a head alike."""

BIAS_RIDGE = 1e-3
"""Ridge of `v` of `RelativeKeys`. A coordinate as large as those of the queries costs this share of the squares of the
last coefficients. With a larger ridge the scores fall less in the tail."""


def fit(module: ScoreModule, like: Tensor, targets: list[Target]) -> None:
    """Fit a module's parameters to coefficients, by least squares in float64.

    Every head has a free constant, because the softmax ignores it. A tail of distances beyond those of the windows
    counts as well, with a small weight. Curves are then fitted again without the tail. So the tail decides only
    parameters that have no effect at the distances of the windows.

    Args:
        module: module of a scheme.
        like: empty tensor with the device and dtype of the queries.
        targets: the targets of the layers that the module serves.
    """
    wide_module, wide = copy.deepcopy(module).double(), like.double()
    if not any(each.requires_grad for each in wide_module.parameters()):
        return
    form = form_of(wide_module, wide)
    problem = _problem(form, targets)
    # Vectors keep the tail: without it they would diverge at greater distances.
    for each in [problem] if takes_queries(form) else [problem, problem.without_tail()]:
        if not _solve(wide_module, wide, each):
            _search(wide_module, wide, each)
    initial = copied(module.parameters())
    put(zip(module.parameters(), wide_module.parameters(), strict=True))
    if not torch.isfinite(coefficients(module, like, problem.distances, problem.wanted.shape[1])).all():
        put(initial)  # the search diverged


@dataclass(frozen=True)
class _Problem:
    """Weighted least squares for the coefficients of the S layers that a module serves, at M distances.

    Attributes:
        distances: (M,) those of the windows, then those of the tail.
        seen: number of distances of the windows.
        wanted: (S, H, M, C) coefficients to fit.
        weights: (S, H, M) weight of each distance; they sum to 1.
        metric: (S, H, C, C) see `Target`.
    """

    distances: Tensor
    seen: int
    wanted: Tensor
    weights: Tensor
    metric: Tensor

    def without_tail(self) -> _Problem:
        """Return the same problem at the distances of the windows alone."""
        seen, weights = self.seen, self.weights[..., : self.seen]
        weights = weights / weights.sum(-1, keepdim=True)
        return _Problem(self.distances[:seen], seen, self.wanted[..., :seen, :], weights, self.metric)


def _problem(form: Form, targets: list[Target]) -> _Problem:
    """Return the problem that a module of this form is fitted to, from the targets of the layers that it serves.

    The tail has the mean coefficients of the last quarter of the windows' distances. For vectors made of waves, their
    score also falls with the distance, see `FALL`. A few distances are enough for these in the tail, each of which
    stands for several: the windows already determine the fast waves.
    """
    seen, device = targets[0].values.shape[1], targets[0].values.device
    beyond = torch.arange(seen, TAIL * seen, device=device)
    counts = torch.ones_like(beyond)
    if is_one_of(form, WAVES):
        ends = seen * REACH ** torch.linspace(0, 1, seen + 1, dtype=torch.float64, device=device)
        ends = torch.unique(ends.round().long())
        beyond, counts = ends[:-1], ends.diff()
    wanted = []
    for each in targets:
        tail = each.values[:, -max(1, seen // 4) :].mean(1, keepdim=True).repeat(1, len(beyond), 1)
        if each.last_factor is not None:
            tail[..., -1] -= FALL * (beyond / seen).log() / each.last_factor[:, None]
        wanted.append(torch.cat([each.values, tail], 1))
    weights = torch.stack([each.weights for each in targets])
    weights = torch.cat([weights, weights.mean(-1, keepdim=True) * counts * TAIL_WEIGHT], -1)
    return _Problem(
        torch.cat([torch.arange(seen, device=device), beyond]),
        seen,
        torch.stack(wanted),
        weights / weights.sum(-1, keepdim=True),
        torch.stack([each.metric for each in targets]),
    )


def _solve(module: ScoreModule, like: Tensor, problem: _Problem) -> bool:
    """Solve for parameters that the coefficients are linear in. Return False if the module has none that train.

    Values that the problem does not determine stay what they are.

    Args:
        module: the module, in float64.
        like: empty float64 tensor on the device of the queries.
        problem: what to fit.
    """
    form, linear = form_of(module, like), module.linear_vectors(problem.distances, like)
    if linear is None or not linear.weight.requires_grad or form.multiplies:
        return False
    if takes_queries(form):
        return _solve_vectors(form, linear, problem)
    _solve_bias(linear, problem)
    return True


@torch.no_grad()
def _solve_bias(linear: LinearVectors, problem: _Problem) -> None:
    """Solve for the weight of a bias by distance. The change is the smallest one of all that are at the least cost."""
    features, weight = linear.features, linear.weight[..., 0]
    moments, right = weight.new_zeros(*weight.shape, weight.shape[-1]), torch.zeros_like(weight)
    for weights, wanted, metric in zip(problem.weights, problem.wanted, problem.metric, strict=True):
        centred = features - (weights @ features)[:, None]  # (H, M, E); every head has a free constant
        weighted = (metric[:, 0] * weights)[..., None] * centred
        moments += weighted.mT @ centred
        right += (weighted.mT @ wanted)[..., 0]
    missing = right[..., None] - moments @ weight[..., None]
    weight += (torch.linalg.pinv(moments, rtol=1e-12, hermitian=True) @ missing)[..., 0]


def _solve_vectors(form: Form, vectors: LinearVectors, problem: _Problem) -> bool:
    """Solve for the weight of vectors by distance. Return False if layers with different windows share it.

    The ridges pull towards the present values.
    """
    weights = problem.weights[0, 0]
    if not torch.allclose(problem.weights, weights):
        return False
    with torch.no_grad():
        heads, metric = problem.wanted.shape[1], problem.metric
        weight, bias = vectors.weight.mT.expand(heads, -1, -1), vectors.position_bias
        bias = weight.new_zeros(weight.shape[:2]) if bias is None else bias.detach()
        features = vectors.features - weights @ vectors.features  # every head has a free constant
        wanted = problem.wanted - (weights[:, None] * problem.wanted).sum(-2, keepdim=True)
        weighted = weights[:, None] * features
        moments = weighted.T @ features
        ridge = FEATURE_RIDGE if is_one_of(form, WAVES) else ROW_RIDGE
        ridged = _with_ridge(moments, ridge * moments.diagonal().mean())
        # First the coefficients without the condition that the last one is `v . r_d`: features -> (S, H, C, E).
        present = _with_last(weight, bias)
        best = present + torch.linalg.solve(ridged, (wanted.mT @ weighted - present @ moments).mT).mT
        own = vectors.position_bias
        if isinstance(own, nn.Parameter) and own.requires_grad and len(metric) == 1:
            bias = _position_bias(bias, best[0] @ ridged @ best[0].mT, metric[0])
            own.copy_(bias)
        # Then the vectors whose coefficients, with this `v`, come closest to them.
        by_vector = _with_last(torch.eye(bias.shape[-1]).to(bias).expand(heads, -1, -1), bias)
        products = metric @ by_vector
        normal, right = by_vector.mT @ products, products.mT @ best
        shared = (0, 1) if len(vectors.weight) == 1 else (0,)
        normal, right = (each.sum(shared, keepdim=True)[0] for each in (normal, right))
        vectors.weight.detach().copy_(torch.linalg.solve(normal, right).mT)
        if (table := form.value_table) is not None:
            table.zero_()  # scores do not determine vectors that are added to values
    return True


def _with_last(vectors: Tensor, bias: Tensor) -> Tensor:
    """Append the last coefficient, `v . r`, to vectors in columns: (H, D, N) and `v` (H, D) -> (H, D + 1, N)."""
    return torch.cat([vectors, bias[:, None] @ vectors], 1)


def _with_ridge(matrix: Tensor, ridge: Tensor) -> Tensor:
    """Return symmetric matrices (..., N, N) with a ridge (...), which is at least tiny."""
    return matrix + ridge.clamp(min=1e-12)[..., None, None] * torch.eye(matrix.shape[-1]).to(matrix)


def _position_bias(present: Tensor, moments: Tensor, metric: Tensor) -> Tensor:
    """Return `v` of `RelativeKeys`, (H, D): the ridge regression of the last coefficient on the others.

    Args:
        present: (H, D) present value of `v`.
        moments: (H, D + 1, D + 1) second moments of the coefficients over distances.
        metric: (H, D + 1, D + 1) see `Target`.
    """
    squares = metric.diagonal(dim1=-2, dim2=-1)
    query = squares[:, :-1].mean(-1) / squares[:, -1]  # mean square of a coordinate of the queries
    covariance = moments[:, :-1, :-1]
    missing = moments[:, :-1, -1:] - covariance @ present[..., None]
    ridged = _with_ridge(covariance, BIAS_RIDGE * moments[:, -1, -1] / query.clamp(min=1e-12))
    return present + torch.linalg.solve(ridged, missing)[..., 0]


def _search(module: ScoreModule, like: Tensor, problem: _Problem) -> None:
    """Search for the parameters of a module, starting from their present values.

    Args:
        module: the module, in float64.
        like: empty float64 tensor on the device of the queries.
        problem: what to fit.
    """
    form = form_of(module, like)
    heads, weights = problem.wanted.shape[1], problem.weights
    optimizer = torch.optim.LBFGS(
        [each for each in module.parameters() if each.requires_grad],
        max_iter=STEPS,
        history_size=STEPS // 2,
        tolerance_grad=1e-14,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        error = coefficients(module, like, problem.distances, heads) - problem.wanted
        if not form.multiplies:
            error = error - (weights[..., None] * error).sum(-2, keepdim=True)
        value = (weights * ((error @ problem.metric) * error).sum(-1)).sum()
        if (vectors := form_of(module, like).value_table) is not None:
            value = value + vectors.square().sum()  # scores do not determine vectors that are added to values
        value.backward()
        return value

    optimizer.step(loss)

"""Compare a patched model with its base, layer by layer, on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..attention_call import Call
from ..layer_state import on_decoder
from ..live.base_model import BaseModel
from ..live.eval_mode import evaluation
from ..live.patch_record import Patch
from ..live.watch import LayerCall, entering, recorded
from ..modules import ScoreModule, owner_of
from ..patching.changes import NoEmbedding
from .closed_forms import DistanceSums, coefficients, takes_queries
from .held_out import cannot_win, losses_of
from .observe import (
    Observed,
    Rows,
    attending,
    attention_call,
    observe,
    observe_again,
    parts,
    rows_of,
    summed,
    with_table,
)

Values = Sequence[tuple[nn.Parameter, Tensor]]
"""Pairs of a parameter and a value for it."""

TOKENS_AT_ONCE = 1024
"""Number of tokens in one forward pass. The queries, keys and values of all layers stay in memory until it ends."""

TRACED = 16
"""Number of tokens with which the parameters of each attention are traced."""


def copied(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """Return pairs of a parameter and a copy of its value."""
    return [(p, p.detach().clone()) for p in parameters]


@torch.no_grad()
def put(values: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Copy values into their parameters."""
    for p, value in values:
        p.copy_(value)


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of some modules, without duplicates."""
    return list(nn.ModuleList(modules).parameters())


@contextmanager
def _with_values(values: Values) -> Iterator[None]:
    """Give parameters other values within a `with` block."""
    own_data = [p.data for p, _ in values]
    try:
        for p, value in values:
            p.data = value
        yield
    finally:
        for (p, _), data in zip(values, own_data, strict=True):
            p.data = data


class _BorrowedKeys(dict[str, Any]):
    """Layer type -> keys and values that another layer lends. They are computed at every look-up."""

    def __init__(self, fill: Callable[[dict[str, object]], None]) -> None:
        super().__init__()
        self.fill = fill

    def __getitem__(self, layer_type: str) -> Any:
        lent: dict[str, Any] = {}
        self.fill(lent)
        return lent[layer_type]


class Pair:
    """A patched model, its base, and the windows of tokens on which they are compared.

    The base can be the same model before its patch. Then the two share all weights, and only the parameters that
    calibration changes are copied.

    Attributes:
        model: the patched model.
        patch: its patch.
        base_model: the patched model as its family describes it.
        other_base: the base if it is another model; None if it is the same model before its patch.
        train: (N - held, T) windows that parameters are fitted to.
        held: (held, T) windows that are only measured on.
        labels: (held, T) the same windows, with `IGNORED` for the tokens that no loss counts.
        layers: indices of the layers that have attention and a scheme.
        lenders: index of a layer that borrows keys and values -> index of the layer that computes them.
        watched: `layers` and the layers that lend to them.
        values_move: whether the second stage may change values: the base adds a table of positions to its hidden
            states, and its values were trained to read them.
        query_key: parameters of these layers' attention that change its scores, or its values if `values_move`, without
            duplicates.
        value_parts: pairs of a parameter among `query_key` and a mask of the parts that change values alone. Empty if
            `values_move`.
        projections: layer index -> the linear module whose outputs are the layer's queries before any position. None
            if the queries are not the outputs of one such module: after a norm, a fused projection or a clip.
        initial_values: `id` of a parameter that the first stage can change -> the parameter and its value before.
        bar: progress bar of the windows that are read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        patch: Patch,
        base: PreTrainedModel | None,
        tokens: Tensor,
        held: int,
        *,
        labels: Tensor | None = None,
        own_weights: bool = True,
    ) -> None:
        """Find the layers to compare, and copy the parameters that calibration changes.

        Args:
            model: the patched model, in evaluation mode.
            patch: its patch.
            base: another model; None means the same model before its patch.
            tokens: (N, T) windows of text.
            held: number of windows, from the end, that are only measured on.
            labels: (N, T) the tokens, with `IGNORED` for those that no loss counts; None means that all count.
            own_weights: whether closed forms may change the model's weights as well as the scheme's parameters.

        Raises:
            ValueError: if windows are longer than the length the base was trained at.
        """
        self.model, self.patch, self.other_base = model, patch, base
        self.base_model = BaseModel.of(model)
        tokens = tokens.to(next(self.base_model.modules.token_embedding.parameters()).device, torch.int64)
        self.train, self.held = tokens[:-held], tokens[-held:]
        self.labels = self.held if labels is None else labels[-held:].to(self.held)
        self.windows_at_once = max(1, TOKENS_AT_ONCE // tokens.shape[1])
        scheme_layers = {layer for scheme in patch.schemes for layer in self.base_model.layers_of(scheme)}
        self.layers = sorted(scheme_layers & set(self.base_model.sizes))
        self.lenders = self.base_model.lenders
        self.watched = sorted({*self.layers, *(self.lenders[layer] for layer in self.layers if layer in self.lenders)})
        self.bar = tqdm(disable=True)
        self._arguments: dict[torch.Size, dict[int, LayerCall]] = {}
        # The base's layer calls on the held-out windows, batch by batch; empty until `loss_of_base` has run the base.
        self._base_calls: list[dict[int, LayerCall]] = []
        self.base_values: Values = []
        with self.as_base() as unpatched:
            base_model = BaseModel.of(unpatched)
            longest, self.values_move = base_model.length, base_model.modules.position_table is not None
        if longest is not None and tokens.shape[1] > longest:
            raise ValueError(
                f"windows of {tokens.shape[1]} tokens are longer than the {longest} the base was trained at"
            )
        self.own_weights = own_weights
        self.token_embedding = self._find_token_embedding() if own_weights else None
        self.value_parts: list[tuple[nn.Parameter, Tensor]] = []
        self.query_key, self.projections = self._find_score_weights()
        self.base_values = copied([*self.query_key, *([] if self.token_embedding is None else [self.token_embedding])])
        owners = [owner for index in self.layers if (owner := self.owner(index)) is not None]
        self.initial_values = {id(p): (p, value) for p, value in (*self.base_values, *copied(parameters_of(owners)))}

    def restore(self, owners: Iterable[nn.Module] | None = None) -> None:
        """Restore the initial parameters of some modules, or all that the first stage can change."""
        initial = self.initial_values
        put(initial.values() if owners is None else (initial[id(p)] for p in parameters_of(owners)))

    def has_changed(self) -> bool:
        """Return whether a parameter that the first stage can change differs from its initial value."""
        return any(not p.equal(value) for p, value in self.initial_values.values())

    @contextmanager
    def as_base(self) -> Iterator[PreTrainedModel]:
        """Yield the base: the other model, or this one with its patch suspended."""
        if self.other_base is not None:
            with evaluation(self.other_base):
                yield self.other_base
            return
        assert self.patch.undo is not None
        with _with_values(self.base_values), self.patch.undo.suspended():
            yield self.model

    def layer_inputs(
        self, tokens: Tensor, recorded_layers: Mapping[int, LayerCall] | None = None
    ) -> tuple[dict[int, Observed], dict[int, tuple[Tensor, LayerCall]]]:
        """Return the calls of the base's layers, and inputs for the patched layers made from the base's hidden states.

        Position vectors that only one of the two models adds at the input run through all its layers. So they are
        added to the hidden states of every layer, or subtracted.

        Args:
            tokens: (B, T) documents without padding.
            recorded_layers: the base's layer calls on these tokens; None means that the base is run.
        """
        # First, because it runs the patched model: two records at once would take twice the memory.
        ours = self.arguments(tokens)
        with self.as_base() as base:
            if recorded_layers is None:
                theirs = observe(base, tokens, self.watched)
            else:
                theirs = observe_again(base, recorded_layers)
        shift = None
        if self.base_model.modules.position_table is not None:
            shift = _first_hidden_states(self.base_model, tokens) - self._first_hidden_states_of_base(tokens)
        first = self.base_model.modules.layers[0]
        at_first = on_decoder(self.base_model.modules.decoder).layers.at_first

        def hidden_states_of(index: int) -> Tensor:
            hidden = theirs[index].layer.hidden_states
            if shift is not None:
                hidden = hidden + shift
            if at_first and index:  # computed again for every layer, because gradients are taken layer by layer
                positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
                vectors = first.get_submodule("posenc")(positions).to(hidden)
                hidden = hidden + vectors
            return hidden

        return theirs, {
            index: (hidden_states_of(index), self._with_borrowed_keys(index, ours, hidden_states_of))
            for index in self.layers
        }

    def _with_borrowed_keys(
        self, index: int, ours: Mapping[int, LayerCall], hidden_states_of: Callable[[int], Tensor]
    ) -> LayerCall:
        """Return the arguments of a patched layer, with borrowed keys that are computed when it reads them.

        Borrowed keys depend on trained parameters, and gradients are taken layer by layer.

        Args:
            index: index of the layer.
            ours: layer index -> arguments of the patched layer.
            hidden_states_of: layer index -> hidden states (B, T, E) that enter the layer.
        """
        name, lender = self.base_model.family.names.layer_lends, self.lenders.get(index)
        if name is None:
            return ours[index]

        def fill(lent: dict[str, object]) -> None:
            assert lender is not None
            arguments = replace(ours[lender], kwargs={**ours[lender].kwargs, name: lent})
            self.call(lender, hidden_states_of(lender), arguments)

        return replace(ours[index], kwargs={**ours[index].kwargs, name: {} if lender is None else _BorrowedKeys(fill)})

    def _find_token_embedding(self) -> nn.Parameter | None:
        """Return the weight of the token embedding if the patch removed a table of positions that was added to it."""
        weights = list(self.base_model.modules.token_embedding.parameters())
        lost_table = isinstance(self.base_model.modules.position_table, NoEmbedding)
        return weights[0] if lost_table and len(weights) == 1 else None

    @torch.no_grad()
    def add_mean_position(self) -> None:
        """Replace the base's table of positions by its mean, which is added to all token embeddings.

        The mean says nothing about positions, and values, MLPs and norms were trained with it. If the head shares the
        embeddings, the mean changes all logits of a position by the same number. Nothing changes if the vectors that
        enter the model are not the embeddings times a constant.
        """
        if self.token_embedding is None:
            return
        window = self.train[:1]
        before = _first_hidden_states(self.base_model, window)
        mean = (self._first_hidden_states_of_base(window) - before).mean((0, 1))
        initial = self.token_embedding.detach().clone()
        if mean.shape == initial.shape[1:]:
            self.token_embedding.copy_(initial + mean.to(initial))
            change = (_first_hidden_states(self.base_model, window) - before).double().mean((0, 1))
            factor = (change @ mean.double() / mean.double().square().sum().clamp(min=1e-12)).item()
            if factor > 0 and torch.allclose(change, factor * mean.double(), atol=1e-3 * change.abs().max().item()):
                self.token_embedding.copy_(initial + mean.to(initial) / factor)
                return
        self.token_embedding.copy_(initial)

    def arguments(self, tokens: Tensor) -> dict[int, LayerCall]:
        """Return the arguments of the patched layers besides hidden states. They depend only on the shape of tokens."""
        if tokens.shape not in self._arguments:
            observed = observe(self.model, tokens, self.watched)
            self._arguments[tokens.shape] = {
                index: replace(each.layer, hidden_states=each.layer.hidden_states.new_empty(0))
                for index, each in observed.items()
            }
        return self._arguments[tokens.shape]

    def _first_hidden_states_of_base(self, tokens: Tensor) -> Tensor:
        with self.as_base() as base:
            return _first_hidden_states(BaseModel.of(base), tokens)

    def call(self, index: int, hidden: Tensor, arguments: LayerCall) -> Call:
        """Return the call of a patched layer's attention on some hidden states."""
        modules = self.base_model.modules
        return attention_call(modules.layers[index], modules.attention_of[index], hidden, arguments)

    def loss(self, values: Values = (), *, rival: Tensor | None = None) -> float:
        """Return the mean of `token_losses`."""
        return self.mean_loss(self.token_losses(values, rival=rival))

    @torch.no_grad()
    def token_losses(self, values: Values = (), *, rival: Tensor | None = None) -> Tensor:
        """Return the next-token loss of each token of the held-out windows that counts, in nats, float64 (N,).

        Args:
            values: values of some parameters, which replace their own.
            rival: (N,) losses of the same tokens. The windows are not read to the end once the mean cannot come below
                the rival's by `NOISE`, see `cannot_win`. The result is then infinite, (1,).
        """
        read: list[Tensor] = []
        with _with_values(values):
            for window, labels in zip(self.held, self.labels, strict=True):
                read.append(losses_of(self.model, window[None], labels[None]))
                if rival is not None and rival.isfinite().all() and cannot_win(torch.cat(read), rival):
                    return rival.new_full((1,), math.inf)
        return torch.cat(read)

    @torch.no_grad()
    def loss_of_base(self) -> float:
        """Return the base's mean next-token loss on the held-out windows, in nats, and keep its layers' calls."""
        losses, calls = [], []
        with self.as_base() as model:
            base_model = BaseModel.of(model)
            with attending(model, base_model):
                for batch, labels in zip(*map(self._split, (self.held, self.labels)), strict=True):
                    with recorded(base_model.modules.layers) as entered:
                        losses.append(losses_of(model, batch, labels))
                    calls.append({index: entered[index] for index in self.watched})
        self._base_calls = calls
        return self.mean_loss(torch.cat(losses))

    def mean_loss(self, losses: Tensor) -> float:
        """Return the mean of some losses, (N,). NaN becomes infinity.

        All processes get the mean of the first process, so that they decide alike.
        """
        mean = [losses.mean().item()]
        if dist.is_initialized():
            dist.broadcast_object_list(mean)
        return mean[0] if math.isfinite(mean[0]) else math.inf

    def divergence(self) -> dict[int, Tensor]:
        """Return layer index -> KL divergence of its heads from the base's, (H,), on the held-out windows.

        Raises:
            ValueError: if a divergence is NaN or infinite.
        """
        return self.divergences({"": ()})[""]

    @torch.no_grad()
    def divergences(
        self, candidates: Mapping[str, Values], only: Mapping[str, int] | None = None
    ) -> dict[str, dict[int, Tensor]]:
        """Return candidate's name -> `divergence` with its values. The base is run once for all candidates.

        Args:
            candidates: candidate's name -> values of some parameters.
            only: candidate's name -> the only layer to measure. A candidate without an entry is measured in all layers.

        Raises:
            ValueError: if a divergence is NaN or infinite.
        """
        heads = {index: self.base_model.sizes[index].num_heads for index in self.layers}
        layers = {name: [only[name]] if only and name in only else self.layers for name in candidates}
        sums = {name: {index: torch.zeros(heads[index]) for index in layers[name]} for name in candidates}
        with attending(self.model, self.base_model):
            for number, batch in enumerate(self._batches(self.held)):
                theirs, inputs = self.layer_inputs(batch, self._base_calls[number] if self._base_calls else None)
                for index, (hidden, arguments) in inputs.items():
                    ours, base = {}, theirs[index].call
                    measured = {name: values for name, values in candidates.items() if index in layers[name]}
                    for name, values in measured.items():
                        with _with_values(values):
                            ours[name] = with_table(self.call(index, hidden, arguments))
                    for part in parts(base):
                        rows = rows_of(base, part)
                        for name, values in measured.items():
                            with _with_values(values):  # a form reads its parameters when it computes scores
                                sums[name][index] += kl_of_rows(rows, ours[name], part).sum((0, 2)).cpu()
                del theirs, inputs  # before the next batch makes its own
        for by_layer in sums.values():
            self._check_finite(by_layer)
        return {
            name: {index: total / self.held.numel() for index, total in by_layer.items()}
            for name, by_layer in sums.items()
        }

    def _check_finite(self, by_layer: Mapping[int, Tensor]) -> None:
        if broken := [str(index) for index, values in by_layer.items() if not torch.isfinite(values).all()]:
            raise ValueError(
                f"attention of layer {', '.join(broken)} is NaN or infinite, in the base or with the scheme: look for "
                "weights that are not finite, and for scores that overflow the dtype"
            )

    @torch.no_grad()
    def averages(self, windows: int, *, mass: bool = True) -> dict[int, DistanceSums]:
        """Return layer index -> sums by distance over the first `windows` training windows.

        Args:
            windows: number of windows, at most.
            mass: whether the base's attention weights are asked for. They are summed only for a base that rotates.
        """
        averages = {}
        with self.as_base() as unpatched:
            base_model = BaseModel.of(unpatched)
            # Only the mean rotation reads the base's attention weights.
            mass = mass and (
                base_model.modules.rotary is not None or base_model.own_scheme(tuple(base_model.sizes)) is not None
            )
        with attending(self.model, self.base_model):
            for batch in self._batches(self.train[:windows]):
                theirs, inputs = self.layer_inputs(batch)
                for index, (hidden, arguments) in inputs.items():
                    ours, base = self.call(index, hidden, arguments), theirs[index].call
                    if index not in averages:
                        _, heads, _, head_dim = ours.query.shape
                        size = head_dim if takes_queries(ours.form) else None
                        averages[index] = DistanceSums.empty(heads, batch.shape[1], batch.device, size=size)
                    averages[index].add(base, ours, mass=mass)
                del theirs, inputs  # before the next batch makes its own
        self._check_finite({index: each.difference for index, each in averages.items()})
        return averages

    def _batches(self, tokens: Tensor) -> Iterator[Tensor]:
        """Yield batches of windows, and advance the progress bar."""
        for batch in self._split(tokens):
            yield batch
            self.bar.update(len(batch))

    def _split(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return tokens.split(self.windows_at_once)

    def like(self, index: int) -> Tensor:
        """Return an empty tensor with the dtype and device of a layer's queries."""
        return next(self.base_model.modules.attention_of[index].parameters()).new_empty(0)

    def modules(self) -> dict[int, ScoreModule]:
        """Return layer index -> the scheme's module, for the layers where `module` returns one."""
        return {index: module for index in self.layers if (module := self.module(index)) is not None}

    def module(self, index: int) -> ScoreModule | None:
        """Return the scheme's module of a layer if its parameters set numbers or vectors by distance, or None."""
        owner = self.owner(index)
        if owner is None or not any(True for _ in owner.parameters()):
            return None
        heads = self.base_model.sizes[index].num_heads
        like = self.like(index)
        by_distance = coefficients(owner, like, torch.arange(1, device=like.device), heads)
        return None if by_distance is None else owner

    def curve(self, index: int) -> tuple[Tensor | None, bool]:
        """Return a layer's bias or factor by distance, (H, T) float32 on the CPU, and whether it is a factor.

        The first is None if the layer has no such curve.
        """
        owner = self.owner(index)
        form = None if owner is None else owner.form(self.like(index))
        if form is None or (curve := form.curve(self.held.shape[1])) is None:
            return None, False
        return curve.detach().float().cpu(), form.multiplies

    def owner(self, index: int) -> ScoreModule | None:
        """Return the module that computes a layer's scores, or None."""
        return owner_of(self.base_model.modules.attention_of[index]._modules.get("posenc"))

    def _find_score_weights(self) -> tuple[list[nn.Parameter], dict[int, nn.Linear | None]]:
        """Return `query_key` and `projections`."""
        _, inputs = self.layer_inputs(self.train[:1, :TRACED])
        with attending(self.model, self.base_model), torch.enable_grad():
            traced = {index: self._trace_attention(index, *inputs[index]) for index in self.layers}
        query_key = {id(p): p for parameters, _ in traced.values() for p in parameters}
        return list(query_key.values()), {index: projection for index, (_, projection) in traced.items()}

    def _trace_attention(
        self, index: int, hidden: Tensor, arguments: LayerCall
    ) -> tuple[list[nn.Parameter], nn.Linear | None]:
        """Return a layer's part of `query_key`, and the projection of its queries, see `projections`."""
        attention = self.base_model.modules.attention_of[index]
        candidates = [p for p in attention.parameters() if p.is_floating_point()]
        required_grad = [p.requires_grad for p in candidates]
        outputs: list[tuple[nn.Linear, Tensor]] = []
        with ExitStack() as stack:
            for module in attention.modules():
                if isinstance(module, nn.Linear):
                    # A copy, because some families clip the output in place.
                    handle = module.register_forward_hook(
                        lambda linear, _, out: outputs.append((linear, out.detach().clone()))
                    )
                    stack.callback(handle.remove)
            for p, flag in zip(candidates, required_grad, strict=True):
                stack.callback(p.requires_grad_, flag)
                p.requires_grad_(True)
            call = self.call(index, hidden, arguments)
            of_scores = torch.autograd.grad(
                call.query.sum() + call.key.sum(), candidates, allow_unused=True, retain_graph=True
            )
            total = call.value.sum()
            own = total.requires_grad  # a layer can borrow its values
            of_values = torch.autograd.grad(total, candidates, allow_unused=True) if own else [None] * len(candidates)
        query = call.query.transpose(1, 2).flatten(2)
        projections = {module for module, output in outputs if output.equal(query)}
        parameters = []
        for p, of_score, of_value in zip(candidates, of_scores, of_values, strict=True):
            if of_score is None and (of_value is None or not self.values_move):
                continue
            parameters.append(p)
            if of_score is not None and of_value is not None and not self.values_move:
                alone = (of_score == 0) & (of_value != 0)
                if alone.any():
                    self.value_parts.append((p, alone))
        return parameters, projections.pop() if len(projections) == 1 else None


def _first_hidden_states(base: BaseModel, tokens: Tensor) -> Tensor:
    return entering(base.modules.decoder, base.modules.layers[0], tokens)


def kl_of_rows(theirs: Rows, ours: Call, part: slice) -> Tensor:
    """Return the KL divergence of some rows of attention weights from the base's, (B, H, R), in nats.

    If the scheme's window masks keys that the base sees, the base's softmax is taken over the remaining keys.

    Args:
        theirs: the base's rows.
        ours: the scheme's call.
        part: slice of the queries that the rows belong to.
    """
    our_rows = rows_of(ours, part)
    confined = theirs.confined(our_rows.visible)
    weights = confined.weights
    return torch.where(weights == 0, 0.0, weights * (confined.log_weights - our_rows.log_weights)).sum(-1)  # NaN stays


def mean_kl(base: Call, ours: Call) -> Tensor:
    """Return the mean KL divergence over rows, queries and heads."""
    ours = with_table(ours)
    total = summed(base, lambda part: kl_of_rows(rows_of(base, part), ours, part).sum())
    return total / base.query[..., 0].numel()

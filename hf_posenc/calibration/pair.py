"""Compare a patched model with its base, layer by layer, on the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..core.attention_call import Call
from ..core.layer_state import on_decoder
from ..core.modules import ScoreModule, owner_of
from ..model.base_model import BaseModel
from ..model.eval_mode import evaluation
from ..model.patch_record import Patch
from ..model.watch import LayerCall, entering
from ..patching.changes import NoEmbedding
from .checks import TOKENS_AT_ONCE, mean_loss
from .closed_forms import DistanceSums, is_by_distance, takes_queries
from .observe import Observed, Rows, attending, attention_call, observe, parts, rows_of, with_table

Values = Sequence[tuple[nn.Parameter, Tensor]]
"""Pairs of a parameter and a value for it."""

TRACED = 16
"""Number of tokens with which the parameters of each attention are traced."""


def copied(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """Return pairs of a parameter and a copy of its value."""
    return [(p, p.detach().clone()) for p in parameters]


@torch.no_grad()
def put(values: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy values into their parameters, which may be of another dtype."""
    for p, value in values:
        p.copy_(value)


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of some modules, without duplicates."""
    return list(nn.ModuleList(modules).parameters())


@contextmanager
def requiring_grad(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let parameters require gradients within a `with` block."""
    with ExitStack() as stack:
        for p in parameters:
            stack.callback(p.requires_grad_, p.requires_grad)
            p.requires_grad_(True)
        yield


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
        weights: parameters that calibration may change, without duplicates: of these layers' attention those that
            change its scores, or its values if `values_move`; or all parameters of every layer's attention.
        projections: layer index -> the linear module whose outputs are the layer's queries before any position. None
            if the queries are not the outputs of one such module: after a norm, a fused projection or a clip.
        initial_values: `id` of a parameter that the first stage can change -> the parameter and its value before.
        owners: layer index -> the module that computes the layer's scores, for layers that have one.
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
        whole_attention: bool = False,
        progress: bool = False,
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
            whole_attention: whether all parameters of every layer's attention may change.
            progress: whether to show progress bars.

        Raises:
            ValueError: if windows are longer than the length the base was trained at.
        """
        self.model, self.patch, self.other_base, self.progress = model, patch, base, progress
        self.base_model = BaseModel.of(model)
        tokens = tokens.to(next(self.base_model.modules.token_embedding.parameters()).device, torch.int64)
        self.train, self.held = tokens[:-held], tokens[-held:]
        self.labels = self.held if labels is None else labels[-held:].to(self.held)
        swapped = {layer for scheme in patch.schemes for layer in self.base_model.layers_of(scheme)}
        self.layers, self.lenders = sorted(swapped & set(self.base_model.sizes)), self.base_model.lenders
        self.watched = sorted({*self.layers, *(self.lenders[layer] for layer in self.layers if layer in self.lenders)})
        self._arguments: dict[torch.Size, dict[int, LayerCall]] = {}
        self.base_values: Values = []
        with self.as_base() as unpatched:
            base_model = BaseModel.of(unpatched)
            longest, self.values_move = base_model.length, base_model.modules.position_table is not None
        if longest is not None and tokens.shape[1] > longest:
            raise ValueError(
                f"windows of {tokens.shape[1]} tokens are longer than the {longest} the base was trained at"
            )
        self.own_weights = own_weights
        # The table of positions was added to the token embeddings, if the patch removed one.
        lost_table = isinstance(self.base_model.modules.position_table, NoEmbedding)
        weights = list(self.base_model.modules.token_embedding.parameters())
        self.token_embedding = weights[0] if own_weights and lost_table and len(weights) == 1 else None
        self.weights: list[nn.Parameter] = []
        self.projections: dict[int, nn.Linear | None] = {}
        self._find_score_weights()
        if whole_attention:
            every = parameters_of(self.base_model.modules.attention_of.values())
            self.weights = [p for p in every if p.is_floating_point()]
        self.base_values = copied([*self.weights, *([] if self.token_embedding is None else [self.token_embedding])])
        posenc = {i: owner_of(self.base_model.modules.attention_of[i]._modules.get("posenc")) for i in self.layers}
        self.owners = {index: owner for index, owner in posenc.items() if owner is not None}
        scheme_values = copied(parameters_of(self.owners.values()))
        self.initial_values = {id(p): (p, value) for p, value in (*self.base_values, *scheme_values)}

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

    def layer_calls(self, tokens: Tensor) -> tuple[dict[int, Observed], Callable[[int], Call]]:
        """Return the calls of the base's layers, and a function from a layer's index to the patched model's call.

        The patched layers read the base's hidden states. Position vectors that only one of the two models adds at the
        input run through all its layers. So they are added to the hidden states of every layer, or subtracted.

        Args:
            tokens: (B, T) documents without padding.
        """
        # First, because it runs the patched model: two records at once would take twice the memory.
        ours = self.arguments(tokens)
        with self.as_base() as base:
            theirs = observe(base, tokens, self.watched)
        modules, lends = self.base_model.modules, self.base_model.family.names.layer_lends
        shift = None
        if modules.position_table is not None:
            shift = _first_hidden_states(self.base_model, tokens) - self._first_hidden_states_of_base(tokens)
        at_first = on_decoder(modules.decoder).at_first

        # All is computed again in every call, because gradients are taken layer by layer: so are borrowed keys.
        def call_with(lent: dict[str, Any], index: int) -> Call:
            hidden, arguments = theirs[index].layer.hidden_states, ours[index]
            if shift is not None:
                hidden = hidden + shift
            if at_first and index:
                positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
                hidden = hidden + modules.layers[0].get_submodule("posenc")(positions).to(hidden)
            if lends is not None:
                arguments = replace(arguments, kwargs={**arguments.kwargs, lends: lent})
            return attention_call(modules.layers[index], modules.attention_of[index], hidden, arguments)

        # No function here calls itself: it would keep the batch in memory until Python looks for cycles.
        def call(index: int) -> Call:
            lent: dict[str, Any] = {}
            if index in self.lenders:
                call_with(lent, self.lenders[index])
            return call_with(lent, index)

        return theirs, call

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
        initial = found = self.token_embedding.detach().clone()
        if mean.shape == initial.shape[1:]:
            self.token_embedding.copy_(initial + mean.to(initial))
            change = (_first_hidden_states(self.base_model, window) - before).double().mean((0, 1))
            factor = (change @ mean.double() / mean.double().square().sum().clamp(min=1e-12)).item()
            if factor > 0 and torch.allclose(change, factor * mean.double(), atol=1e-3 * change.abs().max().item()):
                found = initial + mean.to(initial) / factor
        self.token_embedding.copy_(found)

    def arguments(self, tokens: Tensor) -> dict[int, LayerCall]:
        """Return the arguments of the patched layers besides hidden states. They depend only on the shape of tokens."""
        if tokens.shape not in self._arguments:
            seen = {index: each.layer for index, each in observe(self.model, tokens, self.watched).items()}
            self._arguments[tokens.shape] = {i: replace(each, hidden_states=Tensor()) for i, each in seen.items()}
        return self._arguments[tokens.shape]

    def _first_hidden_states_of_base(self, tokens: Tensor) -> Tensor:
        with self.as_base() as base:
            return _first_hidden_states(BaseModel.of(base), tokens)

    def loss(self, values: Values = (), *, of: PreTrainedModel | None = None) -> float:
        """Return the mean next-token loss on the held-out windows, in nats.

        In all processes it is that of the first, so that they decide alike.

        Args:
            values: values of some parameters, which replace their own.
            of: another model to measure.
        """
        with _with_values(values):
            found = [mean_loss(self.model if of is None else of, self.held, self.labels)]
        if dist.is_initialized():
            dist.broadcast_object_list(found)
        return found[0]

    def loss_of_base(self) -> float:
        """Return the base's mean next-token loss on the held-out windows, in nats."""
        with self.as_base() as base:
            return self.loss(of=base)

    def divergence(self) -> dict[int, Tensor]:
        """Return layer index -> KL divergence of its heads from the base's, (H,), on the held-out windows.

        Raises:
            ValueError: if a divergence is NaN or infinite.
        """
        return self.divergences({"": ()})[""]

    @torch.no_grad()
    def divergences(self, candidates: Mapping[str, Values]) -> dict[str, dict[int, Tensor]]:
        """Return candidate's name -> `divergence` with its values. The base is run once for all candidates.

        Args:
            candidates: candidate's name -> values of some parameters.

        Raises:
            ValueError: if a divergence is NaN or infinite.
        """
        sizes = self.base_model.sizes
        sums = {name: {i: torch.zeros(sizes[i].num_heads) for i in self.layers} for name in candidates}

        def measure(index: int, base: Call, call: Callable[[int], Call]) -> None:
            ours = {}
            for name, values in candidates.items():
                with _with_values(values):
                    ours[name] = with_table(call(index))
            for part in parts(base):
                rows = rows_of(base, part)
                for name, values in candidates.items():
                    with _with_values(values):  # a form reads its parameters when it computes scores
                        sums[name][index] += kl_of_rows(rows, ours[name], part).sum((0, 2)).cpu()

        self._visit_layers(self.held, measure)
        for by_layer in sums.values():
            self._check_finite(by_layer)
        count = self.held.numel()
        return {name: {i: total / count for i, total in by_layer.items()} for name, by_layer in sums.items()}

    def _visit_layers(self, windows: Tensor, visit: Callable[[int, Call, Callable[[int], Call]], None]) -> None:
        """Visit each layer in each batch, with its index, the base's call, and the function of the model's calls."""
        with attending(self.model, self.base_model):
            batches = windows.split(max(1, TOKENS_AT_ONCE // windows.shape[1]))
            for batch in tqdm(batches, "windows", unit="batch", leave=False, disable=not self.progress):
                theirs, call = self.layer_calls(batch)
                for index in self.layers:
                    visit(index, theirs[index].call, call)
                del theirs, call  # before the next batch makes its own

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
        averages: dict[int, DistanceSums] = {}
        with self.as_base() as unpatched:
            base_model = BaseModel.of(unpatched)
            # Only the mean rotation reads the base's attention weights.
            own = base_model.own_scheme(tuple(base_model.sizes))
            mass = mass and (base_model.modules.rotary is not None or own is not None)

        def add(index: int, base: Call, call: Callable[[int], Call]) -> None:
            ours = call(index)
            if index not in averages:
                _, heads, distances, head_dim = ours.query.shape
                size = head_dim if takes_queries(ours.form) else None
                averages[index] = DistanceSums.empty(heads, distances, ours.query.device, size=size)
            averages[index].add(base, ours, mass=mass)

        self._visit_layers(self.train[:windows], add)
        self._check_finite({index: each.difference for index, each in averages.items()})
        return averages

    def like(self, index: int) -> Tensor:
        """Return an empty tensor with the dtype and device of a layer's queries."""
        return next(self.base_model.modules.attention_of[index].parameters()).new_empty(0)

    def modules(self) -> dict[int, ScoreModule]:
        """Return layer index -> the scheme's module, where its parameters set numbers or vectors by distance."""
        return {index: owner for index, owner in self.owners.items() if is_by_distance(owner, self.like(index))}

    def _find_score_weights(self) -> None:
        """Fill `weights` and `projections`."""
        _, call = self.layer_calls(self.train[:1, :TRACED])
        with attending(self.model, self.base_model), torch.enable_grad():
            for index in self.layers:
                self._trace_attention(index, call)
        self.weights = list(dict.fromkeys(self.weights))

    def _trace_attention(self, index: int, call_of: Callable[[int], Call]) -> None:
        """Add a layer's part of `weights`, and its entry of `projections`."""
        attention = self.base_model.modules.attention_of[index]
        candidates = [p for p in attention.parameters() if p.is_floating_point()]
        outputs: list[tuple[nn.Linear, Tensor]] = []

        def keep(linear: nn.Linear, _: object, output: Tensor) -> None:
            outputs.append((linear, output.detach().clone()))  # a copy, because some families clip it in place

        with ExitStack() as stack:
            for module in attention.modules():
                if isinstance(module, nn.Linear):
                    stack.callback(module.register_forward_hook(keep).remove)
            stack.enter_context(requiring_grad(candidates))
            call = call_of(index)
            made_of_them = call.query.sum() + call.key.sum() + (call.value.sum() if self.values_move else 0)
            gradients = torch.autograd.grad(made_of_them, candidates, allow_unused=True)
        self.weights += [p for p, gradient in zip(candidates, gradients, strict=True) if gradient is not None]
        query = call.query.transpose(1, 2).flatten(2)
        made = {module for module, output in outputs if output.equal(query)}
        self.projections[index] = made.pop() if len(made) == 1 else None


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
    """Return the mean KL divergence over rows, queries and heads. If it has several parts, backward recomputes them."""
    ours, pieces = with_table(ours), list(parts(base))
    total = base.query.new_zeros((), dtype=torch.float32)

    def of(part: slice) -> Tensor:
        return kl_of_rows(rows_of(base, part), ours, part).sum()

    for part in pieces:
        total = total + (of(part) if len(pieces) == 1 else checkpoint(of, part, use_reentrant=False))
    return total / base.query[..., 0].numel()

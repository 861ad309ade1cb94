"""A patched model and its base, compared layer by layer on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..attention_call import Call
from ..layer_state import on_decoder
from ..live.base_model import BaseModel
from ..live.eval_mode import evaluation
from ..live.patch_record import Patch
from ..live.watch import LayerCall, entering
from ..modules import ScoreModule, owner_of
from ..patching.changes import NoEmbedding
from .closed_forms import Averages, coefficients, takes_queries
from .observe import Rows, Seen, attending, attention_call, observe, parts, rows_of, summed

Values = Sequence[tuple[nn.Parameter, Tensor]]
"""Parameters, each with a value for it."""

TOKENS = 1024
"""Tokens of the windows that are run together; queries, keys and values of all layers are kept meanwhile."""


def copied(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """Return parameters with copies of their values."""
    return [(p, p.detach().clone()) for p in parameters]


@torch.no_grad()
def put(values: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Copy values into their parameters."""
    for p, value in values:
        p.copy_(value)


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of some modules, each once."""
    return list(nn.ModuleList(modules).parameters())


@contextmanager
def _holding(values: Values) -> Iterator[None]:
    """Give parameters other values within a `with` block."""
    kept = [p.data for p, _ in values]
    try:
        for p, value in values:
            p.data = value
        yield
    finally:
        for (p, _), data in zip(values, kept, strict=True):
            p.data = data


class _Lent(dict[str, Any]):
    """Keys and values that a layer borrows, by layer type, made each time that they are taken."""

    def __init__(self, make: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self.make = make

    def __getitem__(self, kind: str) -> Any:
        made: dict[str, Any] = {}
        self.make(made)
        return made[kind]


class Pair:
    """A patched model, its base, and the windows of tokens that they are compared on.

    Where the base is the model itself, as it was before it was patched, the two share all weights. Only copies of the
    parameters that are going to move are kept.

    Attributes:
        model: patched.
        patch: its patch.
        base_model: the patched model as its family describes it.
        given_base: the base, or None where it is what the model was.
        train: (N - held, T) windows that parameters are fitted to.
        held: (held, T) windows that only measure.
        layers: indices of the layers that have attention and a scheme.
        lenders: for each layer that borrows keys and values, the index of the layer that makes them.
        watched: `layers`, and those that lend to them.
        query_key: parameters of these layers' attention that reach its scores, each once.
        projections: for each layer the module whose outputs are its queries as they are, before any position; None
            where something else makes them, such as a norm, a fused projection or a clip.
        began: by `id`, each parameter that the first stage can change, and its value before.
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
        own_weights: bool = True,
    ) -> None:
        """Find the layers and parameters that count, and keep copies of what will move.

        Args:
            model: patched, in evaluation mode.
            patch: its patch.
            base: another model, or None for what the model was.
            tokens: (N, T).
            held: number of windows, the last ones, that only measure.
            own_weights: whether closed forms may move weights of the model itself, beside the scheme's parameters.

        Raises:
            ValueError: if windows are longer than the base was made for.
        """
        self.model, self.patch, self.given_base = model, patch, base
        self.base_model = BaseModel.of(model)
        tokens = tokens.to(next(self.base_model.found.token_embedding.parameters()).device, torch.int64)
        self.train, self.held = tokens[:-held], tokens[-held:]
        self.at_once = max(1, TOKENS // tokens.shape[1])
        named = {layer for scheme in patch.schemes for layer in self.base_model.layers_of(scheme)}
        self.layers = sorted(named & set(self.base_model.sizes))
        self.lenders = self.base_model.lenders
        self.watched = sorted({*self.layers, *(self.lenders[layer] for layer in self.layers if layer in self.lenders)})
        self.bar = tqdm(disable=True)
        self._arguments: dict[torch.Size, dict[int, LayerCall]] = {}
        self.originals: Values = []
        with self.as_base() as followed:
            longest = BaseModel.of(followed).length
        if longest is not None and tokens.shape[1] > longest:
            raise ValueError(f"windows of {tokens.shape[1]} tokens are longer than the {longest} the base was made for")
        self.own_weights = own_weights
        self.tokens = self._tokens() if own_weights else None
        self.query_key, self.projections = self._making_scores()
        self.originals = copied([*self.query_key, *([] if self.tokens is None else [self.tokens])])
        owners = [owner for index in self.layers if (owner := self._owner(index)) is not None]
        self.began = {id(p): (p, value) for p, value in (*self.originals, *copied(parameters_of(owners)))}

    def restore(self, owners: Iterable[nn.Module] | None = None) -> None:
        """Put back the parameters of some modules, or all that the first stage can have changed."""
        put(self.began.values() if owners is None else (self.began[id(p)] for p in parameters_of(owners)))

    def has_moved(self) -> bool:
        """Return whether a parameter that the first stage can change differs from what it was."""
        return any(not p.equal(value) for p, value in self.began.values())

    @contextmanager
    def as_base(self) -> Iterator[PreTrainedModel]:
        """Yield the base: another model, or this one as it was before it was patched."""
        if self.given_base is not None:
            with evaluation(self.given_base):
                yield self.given_base
            return
        assert self.patch.undo is not None
        with _holding(self.originals), self.patch.undo.suspended():
            yield self.model

    def seen(self, tokens: Tensor) -> tuple[dict[int, Seen], dict[int, tuple[Tensor, LayerCall]]]:
        """Return what the base's layers see, and the inputs of the scheme's layers: the base's hidden states.

        Vectors that only one of the two models adds at the input are added to these hidden states, or subtracted, in
        every layer, because they run through the whole model.
        """
        with self.as_base() as base:
            theirs = observe(base, tokens, [0, *self.watched] if 0 in self.base_model.sizes else self.watched)
        ours = self.arguments(tokens)
        shift: Tensor | float = 0.0
        if self.base_model.found.position_table is not None:
            shift = _entering(self.base_model, tokens) - self._entering_base(tokens)
        first = self.base_model.found.layers[0]
        at_first = on_decoder(self.base_model.found.decoder).layers.at_first

        def enters(index: int) -> Tensor:
            hidden = theirs[index].layer.hidden_states + shift
            if at_first and index:  # computed anew for each layer, because gradients are taken layer by layer
                positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
                hidden = hidden + first.get_submodule("posenc")(positions).to(hidden)
            return hidden

        return theirs, {index: (enters(index), self._with_lent(index, ours, enters)) for index in self.layers}

    def _with_lent(self, index: int, ours: Mapping[int, LayerCall], enters: Callable[[int], Tensor]) -> LayerCall:
        """Return the arguments of a patched layer. Keys that it borrows are made anew when it takes them.

        They depend on parameters that move, and gradients are taken layer by layer.

        Args:
            index: of the layer.
            ours: arguments of the patched layers.
            enters: returns the hidden states (B, T, E) that enter a layer.
        """
        name, lender = self.base_model.family.lends_in, self.lenders.get(index)
        if name is None:
            return ours[index]

        def make(lent: dict[str, Any]) -> None:
            assert lender is not None
            self.call(lender, enters(lender), replace(ours[lender], kwargs={**ours[lender].kwargs, name: lent}))

        return replace(ours[index], kwargs={**ours[index].kwargs, name: {} if lender is None else _Lent(make)})

    def _tokens(self) -> nn.Parameter | None:
        """Return the token embeddings, if the patch took away a table of positions that was added to them."""
        weights = list(self.base_model.found.token_embedding.parameters())
        silent = isinstance(self.base_model.found.position_table, NoEmbedding)
        return weights[0] if silent and len(weights) == 1 else None

    @torch.no_grad()
    def keep_mean(self) -> None:
        """Add the mean of the base's table of positions to all token embeddings, in place of the table.

        The mean says nothing about positions, and values, MLPs and norms were trained with it. Where the head shares
        the embeddings, it changes all logits of a position by the same number. Nothing is done where the vectors that
        enter the model are not the embeddings, or a multiple of them.
        """
        if self.tokens is None:
            return
        window = self.train[:1]
        before = _entering(self.base_model, window)
        mean = (self._entering_base(window) - before).mean((0, 1))
        kept = self.tokens.detach().clone()
        if mean.shape == kept.shape[1:]:
            self.tokens.copy_(kept + mean.to(kept))
            change = (_entering(self.base_model, window) - before).double().mean((0, 1))
            factor = (change @ mean.double() / mean.double().square().sum().clamp(min=1e-12)).item()
            if factor > 0 and torch.allclose(change, factor * mean.double(), atol=1e-3 * change.abs().max().item()):
                self.tokens.copy_(kept + mean.to(kept) / factor)
                return
        self.tokens.copy_(kept)

    def arguments(self, tokens: Tensor) -> dict[int, LayerCall]:
        """Return the arguments of the patched layers beside hidden states; they depend on the shape of tokens alone."""
        if tokens.shape not in self._arguments:
            seen = observe(self.model, tokens, self.watched)
            self._arguments[tokens.shape] = {index: each.layer for index, each in seen.items()}
        return self._arguments[tokens.shape]

    def _entering_base(self, tokens: Tensor) -> Tensor:
        with self.as_base() as base:
            return _entering(BaseModel.of(base), tokens)

    def call(self, index: int, hidden: Tensor, arguments: LayerCall) -> Call:
        """Return the call of a patched layer's attention on some hidden states."""
        found = self.base_model.found
        return attention_call(found.layers[index], found.attention_of[index], hidden, arguments)

    @torch.no_grad()
    def loss(self, values: Values = ()) -> float:
        """Return the mean loss of the next token on the held-out windows, in nats, with some values of parameters.

        All processes get the number of the first one, so that they decide alike. NaN becomes infinity.
        """
        with _holding(values):
            return self._loss(self.model)

    @torch.no_grad()
    def loss_of_base(self) -> float:
        """Return the base's mean loss of the next token on the held-out windows, in nats."""
        with self.as_base() as base:
            return self._loss(base)

    def _loss(self, model: PreTrainedModel) -> float:
        total = 0.0
        for window in self.held:
            logits = model(window[None], use_cache=False).logits[0, :-1].float()
            total += F.cross_entropy(logits, window[1:]).item()
        found = [total / len(self.held)]
        if dist.is_initialized():
            dist.broadcast_object_list(found)
        return found[0] if math.isfinite(found[0]) else math.inf

    def divergence(self) -> dict[int, Tensor]:
        """Return the KL divergence of each layer's heads from the base's on the held-out windows, (H,) each.

        Raises:
            ValueError: if it is NaN or infinite.
        """
        return self.divergences({"": ()})[""]

    @torch.no_grad()
    def divergences(
        self, candidates: Mapping[str, Values], only: Mapping[str, int] | None = None
    ) -> dict[str, dict[int, Tensor]]:
        """Return the divergences of `divergence` for several candidates, by name; the base is run once for all of them.

        Args:
            candidates: values of some parameters.
            only: for some candidates the one layer that is measured; by default all are.

        Raises:
            ValueError: if one of them is NaN or infinite.
        """
        heads = {index: self.base_model.sizes[index].num_heads for index in self.layers}
        layers = {name: [only[name]] if only and name in only else self.layers for name in candidates}
        sums = {name: {index: torch.zeros(heads[index]) for index in layers[name]} for name in candidates}
        with attending(self.model, self.base_model):
            for batch in self._batches(self.held):
                theirs, inputs = self.seen(batch)
                for index, (hidden, seen) in inputs.items():
                    ours, base = {}, theirs[index].call
                    here = {name: values for name, values in candidates.items() if index in layers[name]}
                    for name, values in here.items():
                        with _holding(values):
                            ours[name] = self.call(index, hidden, seen)
                    for part in parts(base):
                        rows = rows_of(base, part)
                        for name, values in here.items():
                            with _holding(values):  # a form reads its parameters when it is asked for scores
                                sums[name][index] += _kl(rows, ours[name], part).sum((0, 2)).cpu()
        for found in sums.values():
            self._check_finite(found)
        return {name: {i: total / self.held.numel() for i, total in found.items()} for name, found in sums.items()}

    def _check_finite(self, by_layer: Mapping[int, Tensor]) -> None:
        if broken := [str(index) for index, found in by_layer.items() if not torch.isfinite(found).all()]:
            raise ValueError(
                f"attention of layer {', '.join(broken)} is no number, in the base or with the "
                "scheme: look for weights that are not finite, and for scores that overflow the dtype"
            )

    @torch.no_grad()
    def averages(self, windows: int) -> dict[int, Averages]:
        """Return sums by distance over some windows."""
        found = {}
        with self.as_base() as followed:
            base_model = BaseModel.of(followed)
            # Else nothing reads where the base attends.
            rotates = base_model.found.rotary is not None or base_model.own_scheme(tuple(base_model.sizes)) is not None
        with attending(self.model, self.base_model):
            for batch in self._batches(self.train[:windows]):
                theirs, inputs = self.seen(batch)
                for index, (hidden, seen) in inputs.items():
                    ours, base = self.call(index, hidden, seen), theirs[index].call
                    if index not in found:
                        _, heads, _, head_dim = ours.query.shape
                        size = head_dim if takes_queries(ours.form) else None
                        found[index] = Averages.empty(heads, batch.shape[1], batch.device, size=size)
                    found[index].add(base, ours, mass=rotates)
        self._check_finite({index: each.difference for index, each in found.items()})
        return found

    def _batches(self, tokens: Tensor) -> Iterator[Tensor]:
        """Yield windows, as many together as are run together, and move the progress bar."""
        for batch in tokens.split(self.at_once):
            yield batch
            self.bar.update(len(batch))

    def like(self, index: int) -> Tensor:
        """Return an empty tensor with the dtype and device of a layer's queries."""
        return next(self.base_model.found.attention_of[index].parameters()).new_empty(0)

    def modules(self) -> dict[int, ScoreModule]:
        """Return the modules that have trainable numbers or vectors by distance, by layer."""
        return {index: module for index in self.layers if (module := self.module(index)) is not None}

    def module(self, index: int) -> ScoreModule | None:
        """Return a layer's module if it has trainable numbers or vectors by distance, or None."""
        owner = self._owner(index)
        if owner is None or not any(True for _ in owner.parameters()):
            return None
        heads = self.base_model.sizes[index].num_heads
        like = self.like(index)
        none = coefficients(owner, like, torch.arange(1, device=like.device), heads) is None
        return None if none else owner

    def curve(self, index: int) -> tuple[Tensor | None, bool]:
        """Return a layer's bias or factor by distance, (H, T) float32 on the CPU, and whether it is a factor."""
        owner = self._owner(index)
        form = None if owner is None else owner.form(self.like(index))
        if form is None or (found := form.curve(self.held.shape[1])) is None:
            return None, False
        return found.detach().float().cpu(), form.multiplies

    def _owner(self, index: int) -> ScoreModule | None:
        """Return the module that computes a layer's scores, or None."""
        return owner_of(self.base_model.found.attention_of[index]._modules.get("posenc"))

    def _making_scores(self) -> tuple[list[nn.Parameter], dict[int, nn.Linear | None]]:
        """Return the parameters that reach the layers' scores, each once, and the projections of their queries."""
        _, inputs = self.seen(self.train[:1])
        with attending(self.model, self.base_model), torch.enable_grad():
            found = {index: self._watch_attention(index, *inputs[index]) for index in self.layers}
        reached = {id(p): p for parameters, _ in found.values() for p in parameters}
        return list(reached.values()), {index: projection for index, (_, projection) in found.items()}

    def _watch_attention(
        self, index: int, hidden: Tensor, seen: LayerCall
    ) -> tuple[list[nn.Parameter], nn.Linear | None]:
        attention = self.base_model.found.attention_of[index]
        candidates = [p for p in attention.parameters() if p.is_floating_point()]
        kept = [p.requires_grad for p in candidates]
        outputs: list[tuple[nn.Linear, Tensor]] = []
        with ExitStack() as stack:
            for module in attention.modules():
                if isinstance(module, nn.Linear):
                    # A copy, because some families clip it in place.
                    record = module.register_forward_hook(
                        lambda own, _, out: outputs.append((own, out.detach().clone()))
                    )
                    stack.callback(record.remove)
            for p, needed in zip(candidates, kept, strict=True):
                stack.callback(p.requires_grad_, needed)
                p.requires_grad_(True)
            call = self.call(index, hidden, seen)
            reached = torch.autograd.grad(call.query.sum() + call.key.sum(), candidates, allow_unused=True)
        query = call.query.transpose(1, 2).flatten(2)
        makers = {module for module, output in outputs if output.equal(query)}
        parameters = [p for p, gradient in zip(candidates, reached, strict=True) if gradient is not None]
        return parameters, makers.pop() if len(makers) == 1 else None


def _entering(base: BaseModel, tokens: Tensor) -> Tensor:
    return entering(base.found.decoder, base.found.layers[0], tokens)


def _kl(theirs: Rows, ours: Call, part: slice) -> Tensor:
    """Return the KL divergence of some rows of attention weights from the base's, (B, H, R), in nats.

    Where a window hides keys that the base sees, the base's weights are those of the keys that are left.

    Args:
        theirs: the base's rows.
        ours: the scheme's call.
        part: which rows they are.
    """
    mine = rows_of(ours, part)
    base, found = theirs.confined(mine.visible).log_weights(), mine.log_weights()
    weights = base.exp()
    return torch.where(weights == 0, 0.0, weights * (base - found)).sum(-1)  # NaN stays NaN


def mean_kl(base: Call, ours: Call) -> Tensor:
    """Return the mean KL divergence over rows, queries and heads."""
    total = summed(base, lambda part: _kl(rows_of(base, part), ours, part).sum())
    return total / base.query[..., 0].numel()

"""The mechanism on one head of a real model, step by step, with live numbers.

    token vector x → q, k, v;  q·k;  ÷ √d;  softmax;  Σ weight · v          (Vaswani et al. 2017, equation 1)

The steps are those of `clearhead.backends.reference`, in float64, on the queries, keys and values that the
model itself computed. And the question that every textbook asks: which word does a token look at, in which
head, and does the model's answer depend on it?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.backends.reference import scaled, scores, softmax, weighted_sum
from clearhead.errors import ArgumentError, ModelError
from clearhead.evidence import grade
from clearhead.look.words import Word, words
from clearhead.mask import Mask
from clearhead.models.active import ACTIVE, Call
from clearhead.models.loading import LoadedModel
from clearhead.models.narrow import narrowed
from clearhead.models.prompt import Prompt, Segment, check_length
from clearhead.observables import Observable, Weights
from clearhead.trace.observe import observe
from clearhead.visibility import Visibility

#: How many next tokens are compared.
NEXT = 5


@dataclass(frozen=True)
class StepRow:
    """One word, as the chosen query sees it in the chosen head. A word of several tokens is joined.

    score, scaled: of its heaviest token. weight, unscaled_weight, part: summed over its tokens.
    """

    word: str
    score: float  # q · k
    scaled: float  # q · k · scale, what the softmax gets
    weight: float  # after the softmax
    unscaled_weight: float  # what the softmax would make of q · k without the division by √d
    value: float  # length of v of its heaviest token
    part: float  # length of Σ weight · v over its tokens


@dataclass(frozen=True)
class NextToken:
    """A next token and its probability before and after."""

    text: str
    before: float
    after: float


@dataclass(frozen=True)
class Deletion:
    """What hiding a word does to the model's next-token distribution.

    moved: total variation distance between the distributions before and after, 0..1, at the query token and
        at the end of the text.
    """

    where: str  # "layer 3 head 1", "every head"
    moved_at_token: float
    moved_at_end: float
    next_at_token: tuple[NextToken, ...]


@dataclass(frozen=True)
class WordLook:
    """How much of the query token's attention a word gets, over all heads."""

    word: str
    layer: int  # the head that puts most on it
    head: int
    weight: float  # in that head
    mean: float  # over all heads
    here: float  # in the chosen head
    heads: tuple[tuple[int, int, float], ...]  # the heads that put most on it, heaviest first
    others: dict[str, float]  # what its strongest head puts on the other words asked about
    one_head: Deletion | None  # hidden from that head alone
    every_head: Deletion | None  # hidden from every head: what the word matters at all


@dataclass(frozen=True)
class Steps:
    """The four steps on one head for one query token."""

    model: str
    text: str
    token: str
    position: int
    layer: int
    head: int
    key_head: int  # the key/value head that this query head uses (grouped-query attention)
    d: int
    scale: float
    x: tuple[float, ...]  # the token vector that the layer gets
    q: tuple[float, ...]
    k: tuple[float, ...]  # of the query token itself
    v: tuple[float, ...]
    rows: tuple[StepRow, ...]
    total: float  # of all weights: 1
    entropy: float  # nats
    unscaled_entropy: float  # nats, without the division by √d
    out: tuple[float, ...]  # Σ weight · v
    error: float  # largest difference to what the engine computed in the model's own pass
    words: tuple[WordLook, ...]
    evidence: str
    evidence_url: str
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return asdict(self)


def steps(
    loaded: LoadedModel,
    text: str,
    *,
    token: str,
    on: Sequence[str] = (),
    layer: int | None = None,
    head: int | None = None,
) -> Steps:
    """Walk the mechanism for one token of a text.

    token: a word of the text; its last token (of its last occurrence) is the query.
    on: words to ask about; default: all that the query can see, but itself. The first is the main one.
    layer, head: the head to walk through; default: the one that puts most on the main word, or, without
        `on`, on any word but the first (where heads rest, whatever it says) and the one just before (which
        every model has heads for).

    Raises ArgumentError for words that are not in the text and layers or heads that the model does not have,
    PromptError for a text beyond the model's positions, ModelError for a model that clearhead cannot see.
    """
    if not text.strip():
        raise ArgumentError("text must not be empty")
    model = loaded.model
    prompt = Prompt.plain([Segment("text", "user", text)], loaded.tokenizer)
    check_length(len(prompt), model.config)
    found = words(prompt.text, prompt.tokens)
    query = _word("token", token, found, found)
    position = query.stop - 1
    weights = _all_weights(model, prompt, position)  # (L, H, n)
    table = torch.stack([weights[:, :, w.start : w.stop].sum(-1) for w in found], -1)  # (L, H, words)
    seen = [i for i, w in enumerate(found) if w is not query and float(table[:, :, i].max()) > 0]
    asked = [found.index(_word("on", word, found, [found[i] for i in seen])) for word in on] or seen
    if not asked:
        raise ArgumentError(f"token must be a word that can see others; {token!r} sees only itself")
    focus = [asked[0]] if on else _telling(found, asked, position)
    chosen = _head(table, focus, layer, head)
    detail = _Detail(model, prompt, position, *chosen)
    looks = tuple(_word_look(model, prompt, position, table, found, i, asked, chosen) for i in asked)
    if not on:
        telling = {found[i].text for i in focus}
        looks = tuple(sorted(looks, key=lambda w: (w.word not in telling, -w.weight)))
    notes = [] if _has_next_token(model) else ["this model has no next-token distribution to compare"]
    return Steps(
        model=loaded.name,
        text=prompt.text,
        token=query.text,
        position=position,
        layer=chosen[0],
        head=chosen[1],
        **detail.numbers(found),
        words=looks,
        evidence=grade.UNTESTED,
        evidence_url=grade.DOCS,
        notes=(*prompt.notes, *notes),
    )


# ---------------------------------------------------------------------- which word, which head


def _word(argument: str, text: str, found: Sequence[Word], allowed: Sequence[Word]) -> Word:
    """The last word that reads like this, among those allowed."""
    for word in reversed(allowed):
        if word.text == text:
            return word
    words = list(dict.fromkeys(w.text for w in allowed))
    where = "a word of the text" if len(allowed) == len(found) else "a word that the token can see"
    raise ArgumentError(f"{argument} must be {where}, got {text!r}; there are: {', '.join(words)}")


def _telling(found: Sequence[Word], asked: Sequence[int], position: int) -> list[int]:
    """The words that say something about a head: neither the first nor the one just before the query."""
    rest = [i for i in asked if found[i].start > 0]
    before = [i for i in rest if not (found[i].start < position and found[i].stop >= position)]
    return before or rest or list(asked)


def _head(table: Tensor, focus: Sequence[int], layer: int | None, head: int | None) -> tuple[int, int]:
    """The head that puts most on any of the words in focus, within the given layer or head."""
    L, H, _ = table.shape
    for name, value, size in (("layer", layer, L), ("head", head, H)):
        if value is not None and not 0 <= value < size:
            raise ArgumentError(f"{name} must lie in 0..{size - 1}, got {value}")
    best = table[:, :, list(focus)].amax(-1)
    if layer is not None:
        best[[i for i in range(L) if i != layer]] = -1
    if head is not None:
        best[:, [i for i in range(H) if i != head]] = -1
    flat = int(best.argmax())
    return flat // H, flat % H


def _all_weights(model: Any, prompt: Prompt, position: int) -> Tensor:
    with torch.no_grad(), observe(model, None, Weights(rows=[position])) as trace:
        model(**_inputs(model, prompt))
    weights: Tensor = trace.stream().weights
    return weights[:, :, 0].double()


def _inputs(model: Any, prompt: Prompt) -> dict[str, Tensor]:
    return {name: tensor.to(model.device) for name, tensor in prompt.inputs.items()}


# ---------------------------------------------------------------------- the four steps


class _Detail:
    """What one head gets for one query in the model's own pass (x, q, k, v), and the engine's weights."""

    def __init__(self, model: Any, prompt: Prompt, position: int, layer: int, head: int) -> None:
        self.position, self.head = position, head
        capture = _Capture(layer)
        token = ACTIVE.set(capture)
        try:
            with torch.no_grad():
                model(**_inputs(model, prompt))  # once to learn which module the layer is
            assert capture.module is not None
            hook = capture.module.register_forward_pre_hook(self._take_x, with_kwargs=True)
            try:
                with torch.no_grad():
                    model(**_inputs(model, prompt))
            finally:
                hook.remove()
        finally:
            ACTIVE.reset(token)
        assert capture.call is not None
        self.call = capture.call
        self.lse_weights = capture.weights

    def _take_x(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor):
            raise ModelError(f"{type(module).__name__} gets no hidden_states that could be shown")
        self.x = hidden[0, self.position].double()

    def numbers(self, found: Sequence[Word]) -> dict[str, Any]:
        """The fields of `Steps` from x to error."""
        call, i, h = self.call, self.position, self.head
        Hq, Hkv, d = call.query.shape[1], call.key.shape[1], call.query.shape[3]
        shared = h // (Hq // Hkv)
        q = call.query[:, h : h + 1, i : i + 1].double()
        k, v = call.key[:, shared : shared + 1].double(), call.value[:, shared : shared + 1].double()
        n = k.shape[2]
        visible = Visibility(call.mask, 1, Hq, call.query.shape[2], n, q.device).tile(
            slice(i, i + 1), slice(0, n)
        )
        if visible is not None:
            visible = visible[:, h : h + 1] if visible.shape[1] > 1 else visible
        scale = float(getattr(call.module, "scaling", None) or d**-0.5)
        raw = scores(q, k)
        fit = scaled(raw, scale)
        weights, _ = softmax(fit, visible)
        awake, _ = softmax(raw, visible)
        out = weighted_sum(weights, v)
        w, u = weights[0, 0, 0], awake[0, 0, 0]
        rows = []
        for word in found:
            if float(w[word.start : word.stop].sum()) == 0:
                continue
            best = word.start + int(w[word.start : word.stop].argmax())
            part = (w[word.start : word.stop, None] * v[0, 0, word.start : word.stop]).sum(0)
            rows.append(
                StepRow(
                    word.text,
                    float(raw[0, 0, 0, best]),
                    float(fit[0, 0, 0, best]),
                    float(w[word.start : word.stop].sum()),
                    float(u[word.start : word.stop].sum()),
                    float(v[0, 0, best].norm()),
                    float(part.norm()),
                )
            )
        return {
            "key_head": shared,
            "d": d,
            "scale": scale,
            "x": tuple(self.x.tolist()),
            "q": tuple(q[0, 0, 0].tolist()),
            "k": tuple(k[0, 0, i].tolist()),
            "v": tuple(v[0, 0, i].tolist()),
            "rows": tuple(rows),
            "total": float(w.sum()),
            "entropy": float(torch.special.entr(w).sum()),
            "unscaled_entropy": float(torch.special.entr(u).sum()),
            "out": tuple(out[0, 0, 0].tolist()),
            "error": float((self.lse_weights[0, h, i].double() - w).abs().max()),
        }


class _Capture:
    """A recorder that keeps one layer's call, with the engine's own weights."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.order: list[nn.Module] = []
        self.module: nn.Module | None = None
        self.call: Call | None = None
        self.weights = torch.empty(0)

    def observables(self, call: Call) -> Sequence[Observable]:
        if all(m is not call.module for m in self.order):
            self.order.append(call.module)
        if len(self.order) <= self.layer or self.order[self.layer] is not call.module:
            return ()
        self.module = call.module
        kept = (call.query.clone(), call.key.clone(), call.value.clone())
        self.call = Call(call.module, *kept, call.mask, call.offset)
        return [Weights(rows="all")]

    def record(self, call: Call, observables: Sequence[Observable], seen: Sequence[Any]) -> None:
        self.weights = seen[0]


# ---------------------------------------------------------------------- what a word matters


def _word_look(
    model: Any,
    prompt: Prompt,
    position: int,
    table: Tensor,
    found: Sequence[Word],
    word: int,
    asked: Sequence[int],
    chosen: tuple[int, int],
) -> WordLook:
    H = table.shape[1]
    column = table[:, :, word].flatten()
    best = column.topk(min(5, len(column)))
    heads = [(i // H, i % H, float(w)) for w, i in zip(best.values, best.indices.tolist(), strict=True)]
    layer, head, weight = heads[0]
    one = every = None
    if _has_next_token(model):
        before = _next(model, prompt)
        one = _deletion(model, prompt, position, found[word], before, (layer, head))
        every = _deletion(model, prompt, position, found[word], before, None)
    return WordLook(
        word=found[word].text,
        layer=layer,
        head=head,
        weight=weight,
        mean=float(column.mean()),
        here=float(table[chosen[0], chosen[1], word]),
        heads=tuple(heads),
        others={found[i].text: float(table[layer, head, i]) for i in asked if i != word},
        one_head=one,
        every_head=every,
    )


def _has_next_token(model: Any) -> bool:
    return getattr(model, "get_output_embeddings", lambda: None)() is not None


def _next(model: Any, prompt: Prompt) -> Tensor:
    """Next-token probabilities at every position, (n, vocabulary)."""
    with torch.no_grad():
        probabilities: Tensor = model(**_inputs(model, prompt)).logits[0].double().softmax(-1)
    return probabilities


def _deletion(
    model: Any, prompt: Prompt, position: int, word: Word, before: Tensor, head: tuple[int, int] | None
) -> Deletion:
    """Hide a word from the queries from `position` on, in one head or in all."""
    order: list[nn.Module] = []

    def rule(call: Call) -> Mask | None:
        if all(m is not call.module for m in order):
            order.append(call.module)
        if head is not None and order.index(call.module) != head[0]:
            return None
        Hq, Lq, Lk = call.query.shape[1], call.query.shape[2], call.key.shape[2]
        dense = torch.ones(1, Hq, Lq, Lk, dtype=torch.bool, device=call.query.device)
        which = slice(None) if head is None else slice(head[1], head[1] + 1)
        dense[:, which, position:, word.start : word.stop] = False
        return Mask(dense=dense)

    with narrowed(rule):
        after = _next(model, prompt)
    moved = (before - after).abs().sum(-1) / 2
    top = before[position].topk(NEXT)
    tokens = tuple(
        NextToken(prompt.tokenizer.decode([t]), float(before[position, t]), float(after[position, t]))
        for t in top.indices.tolist()
    )
    where = "every head" if head is None else f"layer {head[0]} head {head[1]}"
    return Deletion(where, float(moved[position]), float(moved[-1]), tokens)

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
from clearhead.models.fit import check_one_sided, continues, read, takes
from clearhead.models.loading import LoadedModel
from clearhead.models.narrow import narrowed
from clearhead.models.prompt import Prompt, Segment, check_length
from clearhead.observables import Observable, Weights
from clearhead.trace.observe import observe
from clearhead.visibility import Visibility

#: How many next tokens are compared.
NEXT = 5
#: The most tokens of a text: every head's view of it is written down several times.
LONGEST = 1000
#: Of how many words the deletion is tried where nobody says of which (two passes of the model each).
DELETIONS = 8
#: The four steps in float64 and the engine in the model's dtype may differ by this much, and never do.
AGREES = 1e-3


@dataclass(frozen=True)
class StepRow:
    """One word, as the chosen query sees it in the chosen head. A word of several tokens is joined.

    score, scaled: of its heaviest token. weight, unscaled_weight, part: summed over its tokens.
    """

    word: str
    start: int  # its first token
    score: float  # q · k
    scaled: float  # what the softmax gets: q · k · scale, then softcap and bias if the model has them
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
    """What hiding a word from all other tokens, in one head or in all, does to the next-token distribution.

    Hidden in every head, no other token knows of it. moved: total variation distance between the
    distributions before and after, 0..1, after the query token and at the end of the text.
    """

    where: str  # "layer 3 head 1", "every head"
    moved_at_token: float
    moved_at_end: float
    next_at_token: tuple[NextToken, ...]


@dataclass(frozen=True)
class OtherWord:
    """A word and what a head puts on it."""

    word: str
    weight: float


@dataclass(frozen=True)
class WordLook:
    """How much of the query token's attention a word gets, over all heads."""

    word: str
    start: int  # its first token
    layer: int  # the head that puts most on it
    head: int
    weight: float  # in that head
    mean: float  # over all heads
    here: float  # in the chosen head
    heads: tuple[tuple[int, int, float], ...]  # the heads that put most on it, heaviest first
    others: tuple[OtherWord, ...]  # what its strongest head puts on the other words asked about
    one_head: Deletion | None  # hidden in that head alone; None: not tried
    every_head: Deletion | None  # hidden in every head: what the word matters at all


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
    softcap: float | None  # c: scores become c · tanh(score / c) after scaling
    biased: bool  # whether the model adds a bias to the scores
    x: tuple[float, ...]  # the token vector that the layer gets
    q: tuple[float, ...]
    k: tuple[float, ...]  # of the query token itself
    v: tuple[float, ...]
    rows: tuple[StepRow, ...]
    total: float  # of all weights: 1, less the sink's
    sink: float  # weight of the head's learned sink, which is no token; 0 for most models
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
    check_one_sided(model, "steps")
    prompt = Prompt.plain([Segment("text", "user", text)], loaded.tokenizer)
    n = len(prompt)
    check_length(n, model.config)
    if n > LONGEST:
        raise ArgumentError(
            f"text must have at most {LONGEST} tokens, got {n}: steps walks through a sentence; "
            "clearhead look takes long texts"
        )
    found = words(prompt.text, prompt.tokens)
    query = _word("token", token, found, found)
    position = query.stop - 1
    view = _View(model, prompt, position)
    table = torch.stack([view.weights[:, :, w.start : w.stop].sum(-1) for w in found], -1)  # (L, H, words)
    seen = [i for i, w in enumerate(found) if w is not query and float(table[:, :, i].max()) > 0]
    named = [found.index(_word("on", word, found, [found[i] for i in seen])) for word in on]
    asked = list(dict.fromkeys(named)) or seen
    if not asked:
        raise ArgumentError(f"token must be a word that can see others; {token!r} sees only itself")
    focus = [asked[0]] if on else _telling(found, asked, position)
    chosen = _head(table, view.layers, focus, layer, head)
    notes = list(prompt.notes)
    detail = _Detail(view, prompt, *chosen)
    if not on:
        asked.sort(key=lambda i: (i not in focus, -float(table[:, :, i].max())))
    tried = asked if on else asked[:DELETIONS]
    before = None
    if continues(model):
        before = _next(model, prompt, position)
        if len(tried) < len(asked):
            notes.append(f"deletion was tried for {len(tried)} of {len(asked)} words: name others by --on")
    else:
        notes.append("this model has no next-token distribution to compare")
    looked = _Looked(view, prompt, table, found, asked, chosen)
    looks = [looked(i, before if i in tried else None) for i in asked]
    return Steps(
        model=loaded.name,
        text=prompt.text,
        token=query.text,
        position=position,
        layer=view.layers[chosen[0]],
        head=chosen[1],
        **detail.numbers(found),
        words=tuple(looks),
        evidence=grade.UNTESTED,
        evidence_url=grade.DOCS,
        notes=tuple(notes),
    )


# ---------------------------------------------------------------------- which word, which head


def _word(argument: str, text: str, found: Sequence[Word], allowed: Sequence[Word]) -> Word:
    """The last word that reads like this, among those allowed."""
    for word in reversed(allowed):
        if word.text in (text, text.strip()):
            return word
    names = list(dict.fromkeys(w.text for w in allowed))
    there = ", ".join(names[:40]) + (", …" if len(names) > 40 else "") if names else "none"
    where = "a word of the text" if len(allowed) == len(found) else "a word that the token can see"
    raise ArgumentError(f"{argument} must be {where}, got {text!r}; there are: {there}")


def _telling(found: Sequence[Word], asked: Sequence[int], position: int) -> list[int]:
    """The words that say something about a head: neither the first nor the one just before the query."""
    rest = [i for i in asked if found[i].start > 0]
    before = [i for i in rest if not (found[i].start < position and found[i].stop >= position)]
    return before or rest or list(asked)


def _head(
    table: Tensor, layers: Sequence[int], focus: Sequence[int], layer: int | None, head: int | None
) -> tuple[int, int]:
    """Place of the layer and number of the head that puts most on any of the words in focus.

    Within the given layer or head, if there is one.
    """
    H = table.shape[1]
    if layer is not None and layer not in layers:
        there = f"0..{len(layers) - 1}" if list(layers) == list(range(len(layers))) else f"{list(layers)}"
        raise ArgumentError(f"layer must lie in {there}, got {layer}")
    if head is not None and not 0 <= head < H:
        raise ArgumentError(f"head must lie in 0..{H - 1}, got {head}")
    best = table[:, :, list(focus)].amax(-1)
    if layer is not None:
        best[[i for i, number in enumerate(layers) if number != layer]] = -1
    if head is not None:
        best[:, [h for h in range(H) if h != head]] = -1
    return divmod(int(best.argmax()), H)


class _View:
    """What every head's weights are for the query, by the engine, and which module each layer is."""

    def __init__(self, model: Any, prompt: Prompt, position: int) -> None:
        self.model, self.position = model, position
        self.modules: list[nn.Module] = []
        with torch.no_grad(), observe(model, None, Weights(rows=[position])) as trace:
            outer = ACTIVE.get()
            assert outer is not None
            self._outer = outer
            token = ACTIVE.set(self)
            try:
                read(model, prompt, logits_to_keep=1)
            finally:
                ACTIVE.reset(token)
        view = trace.stream()
        self.layers = view.layers
        self.weights: Tensor = view.weights[:, :, 0].double()  # (L, H, n)
        if len(self.modules) != len(self.layers):
            raise ModelError(
                f"{type(model).__name__} calls attention {len(self.modules)} times for {len(self.layers)} "
                "layers (shared modules, or several streams): steps cannot tell which call is which layer"
            )

    def observables(self, call: Call) -> Sequence[Observable]:
        self.modules.append(call.module)
        return self._outer.observables(call)

    def record(self, call: Call, observables: Sequence[Observable], seen: Sequence[Any]) -> None:
        self._outer.record(call, observables, seen)


# ---------------------------------------------------------------------- the four steps


class _Detail:
    """What one head gets for one query in the model's own pass: x, and the call with q, k and v."""

    def __init__(self, view: _View, prompt: Prompt, layer: int, head: int) -> None:
        self.position, self.head = view.position, head
        self.engine = view.weights[layer, head]
        self.module = view.modules[layer]
        self.call: Call | None = None
        self.x: Tensor | None = None
        hook = self.module.register_forward_pre_hook(self._take_x, with_kwargs=True)
        token = ACTIVE.set(self)
        try:
            with torch.no_grad():
                read(view.model, prompt, logits_to_keep=1)
        finally:
            ACTIVE.reset(token)
            hook.remove()

    def _take_x(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor):
            raise ModelError(f"{type(module).__name__} gets no hidden_states that could be shown")
        self.x = hidden[0, self.position].double()

    def observables(self, call: Call) -> Sequence[Observable]:
        if call.module is self.module:
            self.call = call._replace(
                query=call.query.clone(), key=call.key.clone(), value=call.value.clone()
            )
        return ()

    def record(self, call: Call, observables: Sequence[Observable], seen: Sequence[Any]) -> None:
        """Nothing was asked."""

    @torch.no_grad()
    def numbers(self, found: Sequence[Word]) -> dict[str, Any]:
        """The fields of `Steps` from key_head to error."""
        call, i, h = self.call, self.position, self.head
        assert call is not None
        assert self.x is not None
        Hq, Hkv, d = call.query.shape[1], call.key.shape[1], call.query.shape[3]
        Lq, n = call.query.shape[2], call.key.shape[2]
        shared = h // (Hq // Hkv)
        q = call.query[:, h : h + 1, i : i + 1].double()
        k, v = call.key[:, shared : shared + 1].double(), call.value[:, shared : shared + 1].double()
        visible = Visibility(call.mask, 1, Hq, Lq, n, q.device).tile(slice(i, i + 1), slice(0, n))
        if visible is not None and visible.shape[1] > 1:
            visible = visible[:, h : h + 1]
        bias = sink_logits = None
        if call.bias is not None:
            bias = call.bias.expand(1, Hq, Lq, n)[:, h : h + 1, i : i + 1].double()
        if call.sink_logits is not None:
            sink_logits = call.sink_logits[h : h + 1].double()
        scale = float(d**-0.5 if call.scale is None else call.scale)
        raw = scores(q, k)
        fit = scaled(raw, scale, call.softcap, bias)
        weights, _ = softmax(fit, visible, sink_logits)
        awake, _ = softmax(scaled(raw, 1.0, call.softcap, bias), visible, sink_logits)
        out = weighted_sum(weights, v)
        w, u = weights[0, 0, 0], awake[0, 0, 0]
        error = float((self.engine - w).abs().max())
        if not error <= AGREES:
            raise ModelError(
                f"{type(self.module).__name__}: the four steps give weights that differ by {error:.2g} from "
                "those the model computes, so it does something that steps does not know; nothing is shown"
            )
        total = float(w.sum())
        rows = []
        for word in found:
            if float(w[word.start : word.stop].sum()) == 0:
                continue
            best = word.start + int(w[word.start : word.stop].argmax())
            part = (w[word.start : word.stop, None] * v[0, 0, word.start : word.stop]).sum(0)
            rows.append(
                StepRow(
                    word.text,
                    word.start,
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
            "softcap": call.softcap,
            "biased": bias is not None,
            "x": tuple(self.x.tolist()),
            "q": tuple(q[0, 0, 0].tolist()),
            "k": tuple(k[0, 0, i].tolist()),
            "v": tuple(v[0, 0, i].tolist()),
            "rows": tuple(rows),
            "total": total,
            "sink": 0.0 if sink_logits is None else 1.0 - total,
            "entropy": float(torch.special.entr(w).sum()),
            "unscaled_entropy": float(torch.special.entr(u).sum()),
            "out": tuple(out[0, 0, 0].tolist()),
            "error": error,
        }


# ---------------------------------------------------------------------- what a word matters


class _Looked:
    """How much attention a word gets, and what becomes of the model's next token without it."""

    def __init__(
        self,
        view: _View,
        prompt: Prompt,
        table: Tensor,
        found: Sequence[Word],
        asked: Sequence[int],
        chosen: tuple[int, int],
    ) -> None:
        self.view, self.prompt, self.table, self.found = view, prompt, table, found
        self.asked, self.chosen = asked, chosen

    def __call__(self, word: int, before: Tensor | None) -> WordLook:
        """before: next-token probabilities as they are; None: deletion is not to be tried."""
        H = self.table.shape[1]
        column = self.table[:, :, word].flatten()
        best = column.topk(min(5, len(column)))
        places = [divmod(i, H) for i in best.indices.tolist()]
        layer, head = places[0]
        numbers, found = self.view.layers, self.found
        one = every = None
        if before is not None:
            one = self._deletion(found[word], before, (layer, head))
            every = self._deletion(found[word], before, None)
        return WordLook(
            word=found[word].text,
            start=found[word].start,
            layer=numbers[layer],
            head=head,
            weight=float(best.values[0]),
            mean=float(column.mean()),
            here=float(self.table[self.chosen[0], self.chosen[1], word]),
            heads=tuple((numbers[p], h, float(w)) for (p, h), w in zip(places, best.values, strict=True)),
            others=tuple(
                OtherWord(found[i].text, float(self.table[layer, head, i])) for i in self.asked if i != word
            ),
            one_head=one,
            every_head=every,
        )

    def _deletion(self, word: Word, before: Tensor, head: tuple[int, int] | None) -> Deletion:
        """Hide a word from all tokens but its own, in one head or in all."""
        module = None if head is None else self.view.modules[head[0]]

        def rule(call: Call) -> Mask | None:
            if module is not None and call.module is not module:
                return None
            Hq, Lq, Lk = call.query.shape[1], call.query.shape[2], call.key.shape[2]
            dense = torch.ones(1, Hq, Lq, Lk, dtype=torch.bool, device=call.query.device)
            which = slice(None) if head is None else slice(head[1], head[1] + 1)
            dense[:, which, :, word.start : word.stop] = False
            dense[:, :, word.start : word.stop] = True
            return Mask(dense=dense)

        with narrowed(rule):
            after = _next(self.view.model, self.prompt, self.view.position)
        moved = (before - after).abs().sum(-1) / 2
        top = before[0].topk(min(NEXT, before.shape[1]))
        tokens = tuple(
            NextToken(self.prompt.tokenizer.decode([t]), float(before[0, t]), float(after[0, t]))
            for t in top.indices.tolist()
        )
        where = "every head" if head is None else f"layer {self.view.layers[head[0]]} head {head[1]}"
        return Deletion(where, float(moved[0]), float(moved[1]), tokens)


def _next(model: Any, prompt: Prompt, position: int) -> Tensor:
    """Next-token probabilities after the token at `position` and after the last one, (2, vocabulary)."""
    kept = torch.tensor([position, len(prompt) - 1], device=model.device)
    with torch.no_grad():
        logits = read(model, prompt, logits_to_keep=kept).logits[0]
    if not takes(model, "logits_to_keep"):
        logits = logits[kept]
    probabilities: Tensor = logits.double().softmax(-1)
    return probabilities

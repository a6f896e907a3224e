"""Attention tile by tile with plain tensor operations: forward, backward and observation in linear memory.

Online softmax over tiles of keys (Milakov & Gimelshein 2018; Dao et al. 2022, algorithm 1) and its backward
by recomputation (Dao 2023, algorithm 2). Nothing here chooses a backend; `sdpa` uses it where torch's fused
kernels cannot do a request, and for every observation. Half types are computed in float32, tile by tile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import exp, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.backends.base import Request
from clearhead.observables import Account, Observable, Setting, Tile
from clearhead.shapes import compute_dtype

#: Elements of one tile of scores per thread, over all heads. Scores, weights and one product of them (1.7 MB
#: in float32) stay in a core's second-level cache; twice as many cost up to five times as much per element in
#: the element-wise steps (measured with AVX-512 and 2 MB).
TILE_PER_THREAD = 144 * 1024
#: A weight whose logarithm is below -LOWEST counts as 0: exp(-80) = 2e-35 in float32, 1e-304 in float64.
LOWEST, LOWEST_DOUBLE = 80.0, 700.0
#: Beyond this, float32 cannot hold lse closely enough to give weights: peak and sum are kept apart.
STEEP = 1e4
#: A thread keeps at most this many bytes of scratch memory between calls, per dtype and device.
SCRATCH_KEPT = 64 * 2**20
#: At most this many queries are observed in one go, with all their keys: (B, Hq, FEW, Lk) is linear in Lk.
FEW = 8
#: Elements of one tile elsewhere (64 MB in float32): a guess, not measured.
TILE_ON_DEVICE = 16 * 2**20
ROWS = 128


class Gradients(NamedTuple):
    """Gradients of one request; None where it was not asked for or the input is not there."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sink_logits: Tensor | None
    relative: Tensor | None  # of the values at each distance, (Hq, span)


def row_blocks(count: int) -> Iterator[slice]:
    """Ranges of at most ROWS queries."""
    for start in range(0, count, ROWS):
        yield slice(start, min(start + ROWS, count))


def columns(request: Request, queries: slice | Tensor, r: int) -> Iterator[slice]:
    """Ranges of keys that these r queries may see, cut to tiles of about TILE_PER_THREAD elements a thread.

    They are also cut where visibility changes (down to a multiple of 64), so that most tiles need no mask.
    """
    heads = request.shape.B * request.shape.Hq
    on_cpu = request.q.device.type == "cpu"
    threads = 1 if request.dropout else torch.get_num_threads()  # dropout's noise is drawn tile by tile
    room = TILE_PER_THREAD * threads if on_cpu else TILE_ON_DEVICE
    width = max(64, room // (heads * r) // 32 * 32)
    for low, high in request.visibility.spans(queries):
        borders = (border // 64 * 64 for border in request.visibility.borders(queries))
        cuts = dict.fromkeys([low, *(border for border in borders if low < border < high), high])
        for start, stop in pairwise(cuts):
            pieces = max(1, round((stop - start) / width))
            for i in range(pieces):
                yield slice(start + (stop - start) * i // pieces, start + (stop - start) * (i + 1) // pieces)


class Scorer:
    """Scores of a block of queries, (B, Hq, r, ·), tile by tile into reused memory."""

    def __init__(self, request: Request, queries: slice | Tensor, scratch: Scratch) -> None:
        self.request, self.queries, self.scratch = request, queries, scratch
        s = request.shape
        q = request.q[:, :, queries].to(scratch.dtype)
        self.r = q.shape[2]
        # The heads of a group share their keys: one product of (group · r) × d with d × c.
        self.q = (q * request.scale).reshape(s.B, s.Hkv, s.Hq // s.Hkv * self.r, s.d)
        self.keys = request.k.transpose(2, 3)  # (B, Hkv, d, Lk)
        self.one = s.B == 1 and request.k.dtype == scratch.dtype  # then bmm does, with less ado than matmul

    def __call__(self, cols: slice) -> tuple[Tensor, Tensor | None]:
        """Return final scores (B, Hq, r, c), finite where hidden, and what is visible (None: everything)."""
        request, s = self.request, self.request.shape
        c = cols.stop - cols.start
        fit = self.scratch.take("scores", (s.B, s.Hq, self.r, c))
        if self.one:
            torch.bmm(self.q[0], self.keys[0, :, :, cols], out=fit.view(s.Hkv, -1, c))
        else:
            k = self.keys[:, :, :, cols].to(self.q.dtype)
            torch.matmul(self.q, k, out=fit.view(s.B, s.Hkv, -1, c))
        if request.softcap is not None:
            fit.div_(request.softcap).tanh_().mul_(request.softcap)
        visible = request.visibility.tile(self.queries, cols)
        if has_bias(request):
            add_bias(fit, request, self.queries, cols)
            hidden = fit.isneginf()  # a bias of -inf hides a key as a mask does
            if bool(hidden.any()):
                fit.masked_fill_(hidden, 0.0)
                visible = ~hidden if visible is None else visible & ~hidden
        return fit, visible


def has_bias(request: Request) -> bool:
    """Whether anything is added to the scores."""
    return request.bias is not None or request.relative is not None


def add_bias(fit: Tensor, request: Request, queries: slice | Tensor, cols: slice, *, alpha: int = 1) -> None:
    """Add `alpha` times what is added to the scores of these queries and keys to `fit` (B, Hq, r, c)."""
    if request.bias is not None:
        fit.add_(bias_tile(request.bias.detach(), queries, cols), alpha=alpha)
    if request.relative is not None:
        seen = request.visibility
        places = seen.query_positions[:, queries], seen.key_positions[cols]
        fit.add_(request.relative.tile(*places).detach(), alpha=alpha)


def bias_tile(bias: Tensor, queries: slice | Tensor, cols: slice) -> Tensor:
    """The part of a bias (B | 1, Hq | 1, Lq | 1, Lk | 1) for these queries and keys; axes of size 1 stay."""
    rows = slice(None) if bias.shape[2] == 1 else queries
    return bias[:, :, rows, slice(None) if bias.shape[3] == 1 else cols]


class Scratch:
    """Memory for one tile that the next tile uses again."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._held: dict[str, Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """How much memory it holds."""
        return sum(held.nbytes for held in self._held.values())

    def take(self, name: str, size: tuple[int, ...]) -> Tensor:
        """Return uninitialised memory of this size; what `name` held before is gone."""
        view = self._views.get((name, size))
        if view is None:
            held, count = self._held.get(name), prod(size)
            if held is None or held.numel() < count:
                held = torch.empty(count, dtype=self.dtype, device=self.device)
                self._held[name] = held
                self._views = {key: v for key, v in self._views.items() if key[0] != name}
            if len(self._views) > 64:  # every step of a generation has a size of its own
                self._views.clear()
            view = held[:count].view(size)
            self._views[name, size] = view
        return view


_POOL = threading.local()


@contextmanager
def scratch_for(request: Request) -> Iterator[Scratch]:
    """Lend the thread's scratch memory, which is kept from call to call: fresh pages cost a tenth of a pass.

    Calls within calls get their own; what has grown beyond SCRATCH_KEPT is let go of afterwards.
    """
    pool: dict[tuple[object, ...], Scratch] = _POOL.__dict__.setdefault("free", {})
    dtype, device = compute_dtype(request.q.dtype), request.q.device
    key = (dtype, device, torch.is_inference_mode_enabled())  # inference tensors are of no use outside
    scratch = pool.pop(key, None) or Scratch(dtype, device)
    try:
        yield scratch
    finally:
        if scratch.nbytes <= SCRATCH_KEPT:
            pool[key] = scratch


def _exp(logs: Tensor, visible: Tensor | None, out: Tensor, *, calm: bool = False) -> Tensor:
    """Return exp(logs) into `out` and 0 where hidden; afterwards `logs` is finite where hidden.

    torch's exp is 10 to 100 times slower where it underflows, and a hidden key may hold anything, NaN too: so
    `logs` is cut off at both ends first, and what is below stands for 0 (exp(-80) = 2e-35 in float32).
    calm: nothing is hidden that is not finite, and nothing has to be cut off.
    """
    if calm:
        torch.exp(logs, out=out)
        return out if visible is None else out.mul_(visible.to(out.dtype))
    lowest = LOWEST if logs.dtype == torch.float32 else LOWEST_DOUBLE
    if visible is not None:
        logs.masked_fill_(~visible, -torch.inf)
    torch.exp(logs.clamp_(-lowest, lowest), out=out)
    return torch.threshold_(out, 2 * exp(-lowest), 0.0)


def _calm(request: Request, lse: Tensor) -> bool:
    """Whether |score - lse| surely stays below LOWEST, hidden keys included: |q · k| is at most |q| |k|."""
    if has_bias(request) or request.softcap is not None:
        return False
    longest = [t.detach().norm(dim=-1).amax().to(lse.dtype) for t in (request.q, request.k)]
    bound = abs(request.scale) * longest[0] * longest[1] + lse.masked_fill(lse.isneginf(), 0.0).abs().amax()
    return bool(bound < LOWEST)


class _Running:
    """Online softmax of a block of rows: total = Σ exp(score - peak) over the keys admitted so far."""

    def __init__(self, request: Request, score: Scorer) -> None:
        self.peak = score.q.new_full((request.shape.B, request.shape.Hq, score.r, 1), -torch.inf)
        self.total = torch.zeros_like(self.peak)
        if request.sink_logits is not None:  # a learned sink is there from the start
            sink = request.sink_logits.detach().to(self.peak).view(1, -1, 1, 1)
            self.peak, self.total = sink.expand_as(self.peak), (sink > -torch.inf).to(sink) + self.total

    def admit(self, fit: Tensor, visible: Tensor | None) -> Tensor:
        """Turn scores (B, Hq, r, c) into exp(score - peak) in place, 0 where hidden.

        Returns the factor (B, Hq, r, 1) that brings what was gathered before to the new peak.
        """
        if visible is not None:  # the peak is taken over what is seen
            fit.masked_fill_(~visible, -torch.inf)
        peak = torch.maximum(self.peak, fit.amax(-1, keepdim=True))
        safe = peak.masked_fill(peak.isneginf(), 0.0)
        _exp(fit.sub_(safe), None, out=fit)
        fade = (self.peak - safe).exp()
        self.total = self.total * fade + fit.sum(-1, keepdim=True)
        self.peak = peak
        return fade

    def closed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Peak and log(total), both 0 where nothing was admitted, and where that is; `total` is 1 there."""
        dead = self.total == 0
        self.total = self.total.masked_fill(dead, 1.0)
        return self.peak.masked_fill(dead, 0.0), self.total.log(), dead


def forward(request: Request) -> tuple[Tensor, Tensor]:
    """Return out (B, Hq, Lq, dv) in q's dtype and lse (B, Hq, Lq); no gradients."""
    with scratch_for(request) as scratch:
        return _forward(request, scratch)


def _forward(request: Request, scratch: Scratch) -> tuple[Tensor, Tensor]:
    s = request.shape
    group = s.Hq // s.Hkv
    out = torch.empty(s.B, s.Hq, s.Lq, s.dv, dtype=request.q.dtype, device=request.q.device)
    lse = torch.empty(s.B, s.Hq, s.Lq, dtype=scratch.dtype, device=request.q.device)
    for rows in row_blocks(s.Lq):
        score = Scorer(request, rows, scratch)
        r = score.r
        state = _Running(request, score)
        mixed = lse.new_zeros(s.B, s.Hkv, group * r, s.dv)
        for cols in columns(request, rows, r):
            fit, visible = score(cols)
            fade = state.admit(fit, visible)
            if request.dropout:
                fit.mul_(_kept(request, rows, cols))
            v = request.v[:, :, cols].to(scratch.dtype)
            mixed.mul_(fade.view(s.B, s.Hkv, group * r, 1))
            mixed.add_(fit.view(s.B, s.Hkv, group * r, -1) @ v)
        peak, log_total, dead = state.closed()
        out[:, :, rows] = (mixed.view(s.B, s.Hq, r, s.dv) / state.total).to(out.dtype)
        lse[:, :, rows] = (log_total + peak).masked_fill(dead, -torch.inf).squeeze(-1)
    return out, lse


def backward(
    request: Request, out: Tensor, lse: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None
) -> Gradients:
    """Return the gradients of a request from those of out (B, Hq, Lq, dv) and lse (B, Hq, Lq)."""
    with scratch_for(request) as scratch:
        return _backward(request, scratch, out, lse, grad_out, grad_lse)


def _backward(
    request: Request,
    scratch: Scratch,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
) -> Gradients:
    s = request.shape
    group, wide = s.Hq // s.Hkv, scratch.dtype
    dq = torch.zeros(s.B, s.Hq, s.Lq, s.d, dtype=wide, device=request.q.device)
    dk = torch.zeros(s.B, s.Hkv, s.Lk, s.d, dtype=wide, device=request.q.device)
    dv = torch.zeros(s.B, s.Hkv, s.Lk, s.dv, dtype=wide, device=request.q.device)
    dbias = None
    if request.bias is not None and request.bias.requires_grad:
        dbias = torch.zeros(request.bias.shape, dtype=wide, device=request.q.device)
    drelative = None
    if request.relative is not None and request.relative.values.requires_grad:
        drelative = torch.zeros(request.relative.values.shape, dtype=wide, device=request.q.device)
    dsink = None
    if request.sink_logits is not None and request.sink_logits.requires_grad:
        dsink = torch.zeros(s.Hq, dtype=wide, device=request.q.device)
    for rows in row_blocks(s.Lq):
        score = Scorer(request, rows, scratch)
        r = score.r
        stacked = (s.B, s.Hkv, group * r)
        if grad_out is None:
            do = torch.zeros(s.B, s.Hq, r, s.dv, dtype=wide, device=request.q.device)
        else:
            do = grad_out[:, :, rows].to(wide)
        # d/ds_j of the row: p_j (do · v_j - D), D = do · out; lse adds p_j · dlse.
        pull = (do * out[:, :, rows].to(wide)).sum(-1, keepdim=True)
        if grad_lse is not None:
            pull = pull - grad_lse[:, :, rows, None].to(wide)
        norm = lse[:, :, rows, None]
        norm = norm.masked_fill(norm.isneginf(), 0.0)
        if dsink is not None:
            assert request.sink_logits is not None
            share = (request.sink_logits.to(wide).view(1, -1, 1, 1) - norm).exp()
            dsink -= (share * pull).sum((0, 2, 3))
        do_stacked = do.reshape(*stacked, s.dv)
        dq_rows = dq.new_zeros(*stacked, s.d)
        for cols in columns(request, rows, r):
            fit, visible = score(cols)
            c = fit.shape[-1]
            bend = None
            if request.softcap is not None:
                raw = fit
                if has_bias(request):
                    raw = fit.clone()
                    add_bias(raw, request, rows, cols, alpha=-1)
                bend = 1 - (raw / request.softcap).square()  # derivative of c · tanh(s / c)
            p = _exp(fit.sub_(norm), visible, out=fit)
            v = request.v[:, :, cols].to(wide)
            dp = (do_stacked @ v.transpose(2, 3)).view(s.B, s.Hq, r, c)
            dropped = p
            if request.dropout:
                kept = _kept(request, rows, cols)
                dp, dropped = dp * kept, p * kept
            dv[:, :, cols] += dropped.reshape(*stacked, c).transpose(2, 3) @ do_stacked
            ds = dp.sub_(pull).mul_(p)
            if dbias is not None:
                into = bias_tile(dbias, rows, cols)
                into += ds.sum_to_size(into.shape)
            if drelative is not None:
                _add_by_distance(drelative, ds, request, rows, cols)
            if bend is not None:
                ds = ds * bend.masked_fill(ds == 0, 0.0)
            ds = ds.view(*stacked, c)
            dq_rows += ds @ request.k[:, :, cols].to(wide)
            dk[:, :, cols] += ds.transpose(2, 3) @ score.q  # score.q is scaled already
        dq[:, :, rows] = dq_rows.view(s.B, s.Hq, r, s.d) * request.scale
    kinds = request.q.dtype, request.k.dtype, request.v.dtype
    return Gradients(
        dq.to(kinds[0]),
        dk.to(kinds[1]),
        dv.to(kinds[2]),
        None if dbias is None or request.bias is None else dbias.to(request.bias.dtype),
        None if dsink is None or request.sink_logits is None else dsink.to(request.sink_logits.dtype),
        drelative,
    )


def _add_by_distance(into: Tensor, ds: Tensor, request: Request, rows: slice, cols: slice) -> None:
    """Add the gradient of a tile of scores (B, Hq, r, c) to that of the values by distance, (Hq, span)."""
    assert request.relative is not None
    seen = request.visibility
    index = request.relative.places(seen.query_positions[:, rows], seen.key_positions[cols])  # (B | 1, r, c)
    if index.shape[0] == 1:
        ds = ds.sum(0, keepdim=True)
    into.index_add_(1, index.flatten(), ds.transpose(0, 1).reshape(len(into), -1))


def observe(request: Request, lse: Tensor, observables: Sequence[Observable]) -> tuple[Any, ...]:
    """Hand every tile of exact weights, exp(scores - lse), to the observables; return their results.

    lse (B, Hq, Lq). Observables with the same choice of queries share one pass.
    """
    accounts: list[Account] = []
    passes: dict[object, tuple[slice | Tensor, list[Account]]] = {}
    settings: dict[str, Setting] = {}
    for observable in observables:
        rows = observable.rows
        setting = settings.get(rows) if isinstance(rows, str) else None
        if setting is None:
            setting = request.setting(observable)
            if isinstance(rows, str):
                settings[rows] = setting
        account = observable.start(setting)
        accounts.append(account)
        queries = setting.queries
        key = (
            tuple(queries.tolist()) if isinstance(queries, Tensor) else (queries.start, queries.stop, "range")
        )
        passes.setdefault(key, (queries, []))[1].append(account)
    for queries, asking in passes.values():
        R = len(queries) if isinstance(queries, Tensor) else queries.stop - queries.start
        if R <= FEW and request.softcap is None and not has_bias(request):
            _observe_few(request, lse, queries, R, asking)
            continue
        calm = _calm(request, lse)
        with scratch_for(request) as scratch:
            for block in row_blocks(R):
                if isinstance(queries, Tensor):
                    chosen: slice | Tensor = queries[block]
                else:
                    chosen = slice(queries.start + block.start, queries.start + block.stop)
                _observe_rows(request, lse, chosen, block, scratch, asking, calm)
    return tuple(account.result() for account in accounts)


def _observe_few(
    request: Request, lse: Tensor, queries: slice | Tensor, R: int, accounts: Sequence[Account]
) -> None:
    """Observe few queries in one tile with as few operations as can be: all keys at once, no scratch."""
    s, wide = request.shape, compute_dtype(request.q.dtype)
    stacked = (s.B, s.Hkv, s.Hq // s.Hkv * R)
    q = request.q[:, :, queries].to(wide).reshape(*stacked, s.d)
    norm = lse[:, :, queries].to(wide).reshape(*stacked, 1)
    cols = slice(0, s.Lk)
    visible = request.visibility.tile(queries, cols)
    if visible is not None:
        norm = norm.masked_fill(norm.isneginf(), 0.0)
    items = []
    for b in range(s.B):  # one at a time: keys that lie head inside token must not be copied
        k = request.k[b].to(wide).transpose(1, 2)
        items.append(torch.baddbmm(norm[b], q[b], k, beta=-1, alpha=request.scale))
    logs = (items[0] if s.B == 1 else torch.stack(items)).view(s.B, s.Hq, R, s.Lk)
    weights = _exp(logs, visible, out=torch.empty_like(logs))
    tile = Tile(weights, logs, slice(0, R), cols, torch.empty_like(logs))
    for account in accounts:
        account.add(tile)


def _steep(request: Request, score: Scorer) -> tuple[Tensor, Tensor]:
    """The peak of each row of a block and the logarithm of its sum over exp(score - peak), (B, Hq, r, 1)."""
    state = _Running(request, score)
    for cols in columns(request, score.queries, score.r):
        state.admit(*score(cols))
    peak, log_total, _ = state.closed()
    return peak, log_total


def _observe_rows(
    request: Request,
    lse: Tensor,
    queries: slice | Tensor,
    rows: slice,
    scratch: Scratch,
    accounts: Sequence[Account],
    calm: bool,
) -> None:
    score = Scorer(request, queries, scratch)
    norm = lse[:, :, queries, None].to(scratch.dtype)
    if has_bias(request) or not request.visibility.plain_causal:  # else every row sees itself
        norm = norm.masked_fill(norm.isneginf(), 0.0)
    rest = None
    if not calm and float(norm.abs().amax()) > STEEP:
        norm, rest = _steep(request, score)
    for cols in columns(request, queries, score.r):
        fit, visible = score(cols)
        logs = fit.sub_(norm)
        if rest is not None:
            logs.sub_(rest)
        weights = _exp(logs, visible, out=scratch.take("weights", logs.shape), calm=calm)
        tile = Tile(weights, logs, rows, cols, scratch.take("spare", logs.shape))
        for account in accounts:
            account.add(tile)


def _kept(request: Request, rows: slice, cols: slice) -> Tensor:
    """The dropout factors of a tile, (B, Hq, r, c): 0 or 1 / (1 - p), the same in forward and backward."""
    s = request.shape
    place = (rows.start * s.Lk + cols.start) * 2_654_435_761  # Knuth's multiplicative hash of the tile
    generator = torch.Generator(request.q.device).manual_seed((request.seed + place) % 2**63)
    size = (s.B, s.Hq, rows.stop - rows.start, cols.stop - cols.start)
    dtype = compute_dtype(request.q.dtype)
    noise = torch.rand(size, generator=generator, device=request.q.device, dtype=dtype)
    return (noise >= request.dropout).to(dtype) / (1 - request.dropout)

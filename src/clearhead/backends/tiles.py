"""Attention tile by tile with plain tensor operations: forward, backward and observation in linear memory.

Online softmax over tiles of keys (Milakov & Gimelshein 2018; Dao et al. 2022, algorithm 1) and its backward
by recomputation (Dao 2023, algorithm 2). Nothing here chooses a backend; `sdpa` uses it where torch's fused
kernels cannot do a request, and for every observation. Half types are computed in float32, tile by tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.backends.base import Request
from clearhead.observables import Account, Observable, Tile
from clearhead.shapes import compute_dtype

#: Elements of one tile of scores per thread, over all heads. Scores, weights and one product of them (1.7 MB
#: in float32) stay in a core's second-level cache; twice as many cost up to five times as much per element in
#: the element-wise steps (measured with AVX-512 and 2 MB).
TILE_PER_THREAD = 144 * 1024
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


def row_blocks(count: int) -> Iterator[slice]:
    """Ranges of at most ROWS queries."""
    for start in range(0, count, ROWS):
        yield slice(start, min(start + ROWS, count))


def columns(request: Request, queries: slice | Tensor, r: int) -> Iterator[slice]:
    """Ranges of keys that these r queries may see, cut to tiles of about TILE_PER_THREAD elements a thread.

    They are also cut where visibility changes, so that most tiles need no mask.
    """
    heads = request.shape.B * request.shape.Hq
    on_cpu = request.q.device.type == "cpu"
    room = TILE_PER_THREAD * torch.get_num_threads() if on_cpu else TILE_ON_DEVICE
    width = max(64, room // (heads * r) // 32 * 32)
    for low, high in request.visibility.spans(queries):
        start = low
        for border in (*request.visibility.borders(queries), high):
            stop = min(border, high)
            while start < stop:
                end = min(start + width, stop)
                yield slice(start, end)
                start = end


class Scorer:
    """Scores of a block of queries, (B, Hq, r, ·), tile by tile into reused memory."""

    def __init__(self, request: Request, queries: slice | Tensor, scratch: Scratch) -> None:
        self.request, self.queries, self.scratch = request, queries, scratch
        s = request.shape
        q = request.q[:, :, queries].to(scratch.dtype)
        self.r = q.shape[2]
        # The heads of a group share their keys: one product of (group · r) × d with d × c.
        self.q = (q * request.scale).reshape(s.B, s.Hkv, s.Hq // s.Hkv * self.r, s.d)

    def __call__(self, cols: slice) -> tuple[Tensor, Tensor | None]:
        """Return final scores (B, Hq, r, c), finite where hidden, and what is visible (None: everything)."""
        request, s = self.request, self.request.shape
        k = request.k[:, :, cols].to(self.q.dtype)
        c = cols.stop - cols.start
        out = self.scratch.take("scores", (s.B, s.Hkv, s.Hq // s.Hkv * self.r, c))
        torch.matmul(self.q, k.transpose(2, 3), out=out)
        fit = out.view(s.B, s.Hq, self.r, c)
        if request.softcap is not None:
            fit.div_(request.softcap).tanh_().mul_(request.softcap)
        visible = request.visibility.tile(self.queries, cols)
        if request.bias is not None:
            fit.add_(request.bias[:, :, self.queries, cols])
            hidden = fit.isneginf()  # a bias of -inf hides a key as a mask does
            if bool(hidden.any()):
                fit.masked_fill_(hidden, 0.0)
                visible = ~hidden if visible is None else visible & ~hidden
        return fit, visible


class Scratch:
    """Memory for one tile that the next tile uses again."""

    def __init__(self, request: Request) -> None:
        self.dtype, self.device = compute_dtype(request.q.dtype), request.q.device
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, size: tuple[int, ...]) -> Tensor:
        """Return uninitialised memory of this size; what `name` held before is gone."""
        count = 1
        for n in size:
            count *= n
        held = self._held.get(name)
        if held is None or held.numel() < count:
            held = torch.empty(count, dtype=self.dtype, device=self.device)
            self._held[name] = held
        return held[:count].view(size)


def forward(request: Request) -> tuple[Tensor, Tensor]:
    """Return out (B, Hq, Lq, dv) in q's dtype and lse (B, Hq, Lq); no gradients."""
    s, scratch = request.shape, Scratch(request)
    group = s.Hq // s.Hkv
    out = torch.empty(s.B, s.Hq, s.Lq, s.dv, dtype=request.q.dtype, device=request.q.device)
    lse = torch.empty(s.B, s.Hq, s.Lq, dtype=scratch.dtype, device=request.q.device)
    for rows in row_blocks(s.Lq):
        score = Scorer(request, rows, scratch)
        r = score.r
        peak = lse.new_full((s.B, s.Hq, r, 1), -torch.inf)
        if request.sink_logits is not None:
            peak = request.sink_logits.detach().to(peak).view(1, -1, 1, 1).expand_as(peak).clone()
        total = torch.ones_like(peak) if request.sink_logits is not None else torch.zeros_like(peak)
        mixed = lse.new_zeros(s.B, s.Hkv, group * r, s.dv)
        for cols in columns(request, rows, r):
            fit, visible = score(cols)
            if visible is not None:
                fit.masked_fill_(~visible, -torch.inf)
            new_peak = torch.maximum(peak, fit.amax(-1, keepdim=True))
            safe = new_peak.masked_fill(new_peak.isneginf(), 0.0)
            fit.sub_(safe).exp_()
            fade = (peak - safe).exp()
            total.mul_(fade).add_(fit.sum(-1, keepdim=True))
            if request.dropout:
                fit.mul_(_kept(request, rows, cols))
            v = request.v[:, :, cols].to(scratch.dtype)
            mixed.mul_(fade.view(s.B, s.Hkv, group * r, 1))
            mixed.add_(fit.view(s.B, s.Hkv, group * r, -1) @ v)
            peak = new_peak
        empty = total == 0
        total.masked_fill_(empty, 1.0)
        out[:, :, rows] = (mixed.view(s.B, s.Hq, r, s.dv) / total).to(out.dtype)
        lse[:, :, rows] = (total.log() + peak).masked_fill(empty, -torch.inf).squeeze(-1)
    return out, lse


def backward(
    request: Request, out: Tensor, lse: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None
) -> Gradients:
    """Return the gradients of a request from those of out (B, Hq, Lq, dv) and lse (B, Hq, Lq)."""
    s, scratch = request.shape, Scratch(request)
    group, wide = s.Hq // s.Hkv, scratch.dtype
    dq = torch.zeros(s.B, s.Hq, s.Lq, s.d, dtype=wide, device=request.q.device)
    dk = torch.zeros(s.B, s.Hkv, s.Lk, s.d, dtype=wide, device=request.q.device)
    dv = torch.zeros(s.B, s.Hkv, s.Lk, s.dv, dtype=wide, device=request.q.device)
    dbias = None
    if request.bias is not None and request.bias.requires_grad:
        shared = [request.bias.shape[0], request.bias.shape[1]]
        dbias = torch.zeros(*shared, s.Lq, s.Lk, dtype=wide, device=request.q.device)
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
                raw = fit if request.bias is None else fit - request.bias[:, :, rows, cols].to(wide)
                bend = 1 - (raw / request.softcap).square()  # derivative of c · tanh(s / c)
            p = fit.sub_(norm).exp_()
            if visible is not None:
                p.masked_fill_(~visible, 0.0)
            v = request.v[:, :, cols].to(wide)
            dp = (do_stacked @ v.transpose(2, 3)).view(s.B, s.Hq, r, c)
            dropped = p
            if request.dropout:
                kept = _kept(request, rows, cols)
                dp, dropped = dp * kept, p * kept
            dv[:, :, cols] += dropped.reshape(*stacked, c).transpose(2, 3) @ do_stacked
            ds = dp.sub_(pull).mul_(p)
            if dbias is not None:
                dbias[:, :, rows, cols] += ds.sum_to_size(*shared, r, c)
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
    )


def observe(request: Request, lse: Tensor, observables: Sequence[Observable]) -> tuple[Any, ...]:
    """Hand every tile of exact weights, exp(scores - lse), to the observables; return their results.

    lse (B, Hq, Lq). Observables with the same choice of queries share one pass.
    """
    accounts: list[Account] = []
    passes: dict[object, tuple[slice | Tensor, list[Account]]] = {}
    for observable in observables:
        setting = request.setting(observable)
        account = observable.start(setting)
        accounts.append(account)
        queries = setting.queries
        key = (
            tuple(queries.tolist()) if isinstance(queries, Tensor) else (queries.start, queries.stop, "range")
        )
        passes.setdefault(key, (queries, []))[1].append(account)
    scratch = Scratch(request)
    for queries, asking in passes.values():
        R = len(queries) if isinstance(queries, Tensor) else queries.stop - queries.start
        if R <= FEW and request.softcap is None and request.bias is None:
            _observe_few(request, lse, queries, R, asking)
            continue
        for rows in row_blocks(R):
            chosen: slice | Tensor
            if isinstance(queries, Tensor):
                chosen = queries[rows]
            else:
                chosen = slice(queries.start + rows.start, queries.start + rows.stop)
            _observe_rows(request, lse, chosen, rows, scratch, asking)
    return tuple(account.result() for account in accounts)


def _observe_few(
    request: Request, lse: Tensor, queries: slice | Tensor, R: int, accounts: Sequence[Account]
) -> None:
    """Observe few queries in one tile with as few operations as can be: all keys at once, no scratch."""
    s, wide = request.shape, compute_dtype(request.q.dtype)
    stacked = s.B * s.Hkv
    rows = s.Hq // s.Hkv * R
    q = (request.q[:, :, queries].to(wide) * request.scale).reshape(stacked, rows, s.d)
    k = request.k.to(wide).reshape(stacked, s.Lk, s.d)
    norm = lse[:, :, queries].to(wide).reshape(stacked, rows, 1)
    cols = slice(0, s.Lk)
    visible = request.visibility.tile(queries, cols)
    if visible is not None:
        norm = norm.masked_fill(norm.isneginf(), 0.0)
    logs = torch.baddbmm(norm, q, k.transpose(1, 2), beta=-1).view(s.B, s.Hq, R, s.Lk)
    weights = logs.exp()
    if visible is not None:
        weights.masked_fill_(~visible, 0.0)
    tile = Tile(weights, logs, slice(0, R), cols)
    for account in accounts:
        account.add(tile)


def _observe_rows(
    request: Request,
    lse: Tensor,
    queries: slice | Tensor,
    rows: slice,
    scratch: Scratch,
    accounts: Sequence[Account],
) -> None:
    score = Scorer(request, queries, scratch)
    norm = lse[:, :, queries, None].to(scratch.dtype)
    if not request.visibility.plain_causal:  # else every row sees itself
        norm = norm.masked_fill(norm.isneginf(), 0.0)
    for cols in columns(request, queries, score.r):
        fit, visible = score(cols)
        logs = fit.sub_(norm)
        weights = scratch.take("weights", tuple(logs.shape))
        torch.exp(logs, out=weights)
        if visible is not None:
            weights.masked_fill_(~visible, 0.0)
        tile = Tile(weights, logs, rows, cols)
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

"""A small decoder for language models of one's own: embedding, blocks of attention, and the way back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.bias import ALiBi
from clearhead.errors import ArgumentError, DTypeError, ShapeError
from clearhead.mask import Mask, Window
from clearhead.nn import checks
from clearhead.nn.layer import MultiHeadAttention
from clearhead.nn.positions import Rotary, as_positions
from clearhead.observables import Observable


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): a block of a model, with any attention.

    embed_dim, num_heads, setting: as of `MultiHeadAttention`. hidden_dim: of the two-layer GELU network;
    default 4 · embed_dim. The norms are RMS norms; no projection has a bias.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, hidden_dim: int | None = None, **setting: Any
    ) -> None:
        super().__init__()
        hidden_dim = 4 * embed_dim if hidden_dim is None else checks.whole("hidden_dim", hidden_dim)
        self.attention = MultiHeadAttention(embed_dim, num_heads, **{"bias": False, **setting})
        self.attention_norm = nn.RMSNorm(embed_dim, eps=1e-6)
        self.mlp_norm = nn.RMSNorm(embed_dim, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(embed_dim, hidden_dim, bias=False),
            nn.GELU(),
            nn.Linear(hidden_dim, embed_dim, bias=False),
        )

    def forward(self, x: Tensor, **call: Any) -> Any:
        """x (B, L, embed_dim) to the same shape; `call` goes to the attention. With observe (x, seen)."""
        answer = self.attention(self.attention_norm(x), **call)
        out, seen = answer if isinstance(answer, tuple) else (answer, None)
        x = x + out
        x = x + self.mlp(self.mlp_norm(x))
        return x if seen is None else (x, seen)


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes of a `Decoder` under the names of transformers' configurations, which caches ask."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    _attn_implementation: ClassVar[str] = "clearhead"

    def get_text_config(self, decoder: bool | None = None) -> DecoderSizes:
        """Itself: there is no other part."""
        return self


class Decoder(nn.Module):
    """A decoder-only language model in which every layer looks back alike.

    vocab_size: number of tokens. embed_dim, num_layers, num_heads: its size. hidden_dim: as of `Block`.
    num_kv_heads, head_dim, window, sinks, sink_logits, softcap, qk_norm, dropout: as of
        `MultiHeadAttention`; causal in any case.
    positions: as there; all layers share one. The output projection is the embedding (tied weights).

    Raises ArgumentError, MaskError or ShapeError as `MultiHeadAttention`.

    >>> model = Decoder(100, 32, 2, 4, num_kv_heads=1)
    >>> model(torch.randint(100, (1, 7))).shape
    torch.Size([1, 7, 100])
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        num_layers: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        hidden_dim: int | None = None,
        window: Window | None = None,
        sinks: int = 0,
        positions: str | nn.Module | ALiBi | None = "rotary",
        sink_logits: bool = False,
        softcap: float | None = None,
        qk_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, number in (("vocab_size", vocab_size), ("num_layers", num_layers)):
            checks.whole(name, number)
        _, _, width = checks.heads(embed_dim, num_heads, num_kv_heads, head_dim)
        shared = as_positions(positions, num_heads, width, bidirectional=False)
        self.positions = shared
        self.embedding = nn.Embedding(vocab_size, embed_dim)
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                num_heads,
                hidden_dim=hidden_dim,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                causal=True,
                window=window,
                sinks=sinks,
                positions=shared,
                sink_logits=sink_logits,
                softcap=softcap,
                qk_norm=qk_norm,
                dropout=dropout,
                layer_idx=layer,
            )
            for layer in range(num_layers)
        )
        self.norm = nn.RMSNorm(embed_dim, eps=1e-6)
        nn.init.normal_(self.embedding.weight, std=0.02)
        for block in self.blocks:  # what is added to the stream, smaller the more layers add to it (GPT-2)
            for name in ("attention.o_proj.weight", "mlp.2.weight"):
                nn.init.normal_(block.get_parameter(name), std=0.02 * (2 * num_layers) ** -0.5)

    def forward(
        self,
        ids: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        cache: Any = None,
        positions: Tensor | None = None,
        last: int | None = None,
        observe: Sequence[Observable] | Observable = (),
    ) -> Any:
        """Logits of the token after each one: (B, L, vocab_size), for ids (B, L).

        mask, cache, positions: as of `MultiHeadAttention`; cache is a whole one. last: logits of the last
        `last` tokens alone. With observe (logits, seen): seen[layer] holds the answers, in order.

        Raises ShapeError, DTypeError or ArgumentError naming the argument.
        """
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            what = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise DTypeError(f"ids must be a tensor of integers (int64 or int32), got {what}")
        if ids.ndim != 2 or 0 in ids.shape:
            raise ShapeError(f"ids must have shape (B, L), got {tuple(ids.shape)}")
        if last is not None:
            checks.whole("last", last)
        if cache is not None and not hasattr(cache, "layers"):
            raise ArgumentError(f"cache must be a whole cache with layers, got {type(cache).__name__}")
        x = self.embedding(ids)
        call: dict[str, Any] = {"mask": mask, "cache": cache, "observe": observe}
        if positions is not None:
            call["positions"] = positions
        seen = []
        for block in self.blocks:
            answer = block(x, **call)
            if isinstance(answer, tuple):
                x, answers = answer
                seen.append(answers)
            else:
                x = answer
        x = x if last is None else x[:, -last:]
        logits = F.linear(self.norm(x), self.embedding.weight)
        return (logits, tuple(seen)) if seen else logits

    def loss(self, ids: Tensor, **call: Any) -> Tensor:
        """The mean cross-entropy, in nats, of each token given those before it; ids (B, L), L ≥ 2."""
        logits = self(ids[:, :-1], **call)
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    @torch.inference_mode()
    def generate(
        self,
        ids: Tensor,
        new_tokens: int,
        *,
        cache: Any,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Token after token, (B,) each, behind ids (B, L); the cache holds what was read so far.

        temperature: 0 takes the likeliest token, else one is drawn from softmax(logits / temperature), with
        `generator`. Raises ArgumentError for a negative temperature or fewer than 1 new token.
        """
        checks.whole("new_tokens", new_tokens)
        if cache is None:
            raise ArgumentError("cache must be given: what was read is not read again")
        if not temperature >= 0:
            raise ArgumentError(f"temperature must be 0 or more, got {temperature!r}")
        for _ in range(new_tokens):
            logits = self(ids, cache=cache, last=1)[:, -1].float()
            if temperature == 0:
                token = logits.argmax(-1)
            else:
                token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
            yield token
            ids = token[:, None]

    @property
    def config(self) -> DecoderSizes:
        """Its sizes, for caches that ask a model's configuration for them."""
        layer = self.blocks[0].get_submodule("attention")
        assert isinstance(layer, MultiHeadAttention)
        return DecoderSizes(
            self.embedding.num_embeddings,
            self.embedding.embedding_dim,
            len(self.blocks),
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
        )

    @property
    def rotary(self) -> Rotary | None:
        """The rotary embedding that all layers share, for caches that turn keys by themselves."""
        return self.positions if isinstance(self.positions, Rotary) else None

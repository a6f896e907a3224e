"""Where a token sits, told to a layer of attention: turned queries and keys, or a bias by distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from clearhead.bias import ALiBi, RelativeBias
from clearhead.errors import ArgumentError, DTypeError, ShapeError
from clearhead.shapes import compute_dtype

#: How many modes look at every torch operation just now (tracing, fake tensors): nothing is kept from there.
_dispatch_modes = torch._C._len_torch_dispatch_stack


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021, section 3.2): a score depends on the distance alone.

    dim: how many of a head's features are turned, the first ones; even. Fewer than the head has: partial
        rotary (GPT-NeoX, Phi).
    base: pair i turns by position · base^(-2i/dim).

    The pairs are those of Llama in transformers, feature i with feature i + dim/2 (the paper pairs
    neighbours, which differs by a fixed order of the features). Angles are worked out in float64: at
    position 4,000,000 they are as good as at 4. No parameters, no buffers: nothing of it is in a state dict.

    Raises ArgumentError for a dim that is odd or below 2 and for a base that is not a positive number.
    """

    def __init__(self, dim: int, *, base: float = 10000.0) -> None:
        super().__init__()
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 2 or dim % 2:
            raise ArgumentError(f"Rotary dim must be an even integer of at least 2, got {dim!r}")
        if isinstance(base, bool) or not isinstance(base, int | float) or not 0 < base < math.inf:
            raise ArgumentError(f"Rotary base must be a positive number, got {base!r}")
        self.dim, self.base = dim, float(base)
        self._last: tuple[tuple[object, ...], tuple[Tensor, Tensor]] | None = None

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles, each (B | 1, L, dim), for positions (B, L) or (L,); as Llama's module.

        x says the device, and the dtype: float64 for float64, else float32.
        """
        positions = position_ids[None] if position_ids.ndim == 1 else position_ids
        steps = torch.arange(0, self.dim, 2, device=x.device, dtype=torch.float64)
        angles = positions.to(x.device, torch.float64)[..., None] * self.base ** (-steps / self.dim)
        angles = torch.cat((angles, angles), dim=-1)
        wide = compute_dtype(x.dtype)
        return angles.cos().to(wide), angles.sin().to(wide)

    def turn(self, x: Tensor, positions: Tensor | int) -> Tensor:
        """Queries or keys (B, H, L, d), turned to their positions; dtype and shape stay.

        positions: (L,), (B, L) or (1, L) integers; or an int, the position of the first of L in a row.
        """
        cos, sin = self._angles(x, positions)
        wide = x[..., : self.dim].to(cos.dtype)
        turned = torch.addcmul(wide * cos, wide.roll(self.dim // 2, -1), sin).to(x.dtype)
        return turned if self.dim == x.shape[-1] else torch.cat((turned, x[..., self.dim :]), dim=-1)

    def _angles(self, x: Tensor, positions: Tensor | int) -> tuple[Tensor, Tensor]:
        """cos and ∓sin for all heads, (B | 1, 1, L, dim); the layers of a model that share this ask alike."""
        if isinstance(positions, Tensor) or torch.compiler.is_compiling() or _dispatch_modes():
            return self._for_heads(x, positions)
        key = (positions, x.shape[2], x.device, compute_dtype(x.dtype), torch.is_inference_mode_enabled())
        if self._last is None or self._last[0] != key:
            self._last = (key, self._for_heads(x, positions))
        return self._last[1]

    def _for_heads(self, x: Tensor, positions: Tensor | int) -> tuple[Tensor, Tensor]:
        if not isinstance(positions, Tensor):
            positions = torch.arange(positions, positions + x.shape[2], device=x.device)
        cos, sin = self(x, positions)
        half = self.dim // 2
        return cos[:, None], torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)[:, None]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_last": None}

    def extra_repr(self) -> str:
        """Its two numbers."""
        return f"{self.dim}, base={self.base:g}"


class RelativePositions(nn.Module):
    """T5's learned bias by distance (Raffel et al. 2020, section 2.1): one number per head and bucket.

    num_heads: query heads. buckets, max_distance, bidirectional: as `clearhead.RelativeBias`, which holds
    what is computed; here is the table that learns, (buckets, num_heads). Give one module to several layers
    and they share it, as T5's do.

    Raises ArgumentError for numbers that make no buckets.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, number in (("num_heads", num_heads), ("buckets", buckets)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ArgumentError(f"{name} must be an integer of at least 1, got {number!r}")
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self.table = nn.Parameter(torch.empty(buckets, num_heads, device=device, dtype=dtype))
        nn.init.normal_(self.table, std=0.02)
        self.bias()

    def bias(self) -> RelativeBias:
        """The bias as `clearhead.attention` takes it; gradients reach the table."""
        return RelativeBias(self.table, bidirectional=self.bidirectional, max_distance=self.max_distance)

    def extra_repr(self) -> str:
        """Its table in words."""
        return repr(self.bias())


def as_positions(
    positions: str | nn.Module | ALiBi | None,
    num_heads: int,
    head_dim: int,
    *,
    bidirectional: bool,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Rotary | RelativePositions | ALiBi | None:
    """What `positions=` of a layer means, checked against its heads.

    Raises ArgumentError for anything else than "rotary", "alibi", "relative", None, a `Rotary`, an `ALiBi` or
    a `RelativePositions`, and ShapeError for one that does not fit num_heads or head_dim.
    """
    made: object = positions
    if positions == "rotary":
        if head_dim % 2:
            raise ArgumentError(
                f"positions='rotary' turns pairs of features, and head_dim is {head_dim}, which is odd; "
                "give Rotary(dim) with a smaller, even dim"
            )
        made = Rotary(head_dim)
    elif positions == "alibi":
        made = ALiBi.for_heads(num_heads)
    elif positions == "relative":
        made = RelativePositions(num_heads, bidirectional=bidirectional, device=device, dtype=dtype)
    if made is None:
        return None
    if isinstance(made, Rotary):
        if made.dim > head_dim:
            raise ShapeError(f"positions turns {made.dim} features, and a head has {head_dim}")
        return made
    if isinstance(made, RelativePositions):
        if made.table.shape[1] != num_heads:
            raise ShapeError(f"positions has a table for {made.table.shape[1]} heads, the layer {num_heads}")
        return made
    if isinstance(made, ALiBi):
        if made.heads != num_heads:
            raise ShapeError(f"positions has slopes for {made.heads} heads, the layer {num_heads}")
        return made
    raise ArgumentError(
        "positions must be 'rotary', 'alibi', 'relative', None, a Rotary, an ALiBi or a RelativePositions, "
        f"got {positions!r:.80}"
    )


def checked_places(name: str, places: Tensor, B: int, L: int) -> Tensor:
    """Positions that a user gave for L tokens in B rows: (L,), (1, L) or (B, L) integers.

    Raises DTypeError or ShapeError naming the argument.
    """
    if not isinstance(places, Tensor):
        raise DTypeError(f"{name} must be a tensor of integers, got {type(places).__name__}")
    if places.is_floating_point() or places.is_complex() or places.dtype == torch.bool:
        raise DTypeError(f"{name} must be integers, got {places.dtype}")
    if tuple(places.shape) not in ((L,), (1, L), (B, L)):
        raise ShapeError(f"{name} must have shape ({L},) or ({B}, {L}), got {tuple(places.shape)}")
    return places

"""Take keys out of the view of chosen heads while a model runs.

An intervention is a mask that is added to the model's own: what a head may not see, it cannot use. Nothing is
removed from the text, and positions stay what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from clearhead.mask import Mask
from clearhead.models.active import Call
from clearhead.models.context import ContextSlot

#: Says for a call what its heads may see at most: a `Mask` to be combined with the model's own, or None.
Rule = Callable[[Call], Mask | None]

#: The rule of this context, or None.
RULE: ContextSlot[Rule] = ContextSlot("clearhead_narrowing_rule")


@contextmanager
def narrowed(rule: Rule) -> Iterator[None]:
    """Let the heads see only what `rule` allows as well, in every attention call of this context.

    rule: asked at each call; it returns None or a `Mask` (for chosen heads a dense one, (1, Hq, 1, Lk)).
    Contexts nest: both rules hold. With gradient checkpointing the backward, which runs the calls again, must
    be inside the context too.
    """
    outer = RULE.get()

    def both(call: Call) -> Mask | None:
        masks = [m for m in (outer(call) if outer is not None else None, rule(call)) if m is not None]
        return masks[0] & masks[1] if len(masks) == 2 else masks[0] if masks else None

    token = RULE.set(both)
    try:
        yield
    finally:
        RULE.reset(token)

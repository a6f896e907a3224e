"""LiteLLM proxy: a custom guardrail that judges tool results in requests, and answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clearhead.errors import ArgumentError, MissingExtraError
from clearhead.guard.policy import Guarded
from clearhead.integrations.chat import instruction, last_user, pieces

try:
    from litellm.exceptions import GuardrailRaisedException
    from litellm.integrations.custom_guardrail import CustomGuardrail
except ImportError as error:
    raise MissingExtraError("the guardrail needs LiteLLM: pip install 'clearhead[litellm]'") from error


class ClearheadGuardrail(CustomGuardrail):
    """Subclass it in a module beside config.yaml, with `guarded` as a class attribute, and name the subclass
    there as `guardrail:`.

    Requests (pre_call, during_call): texts of the roles in `roles` are judged against the system message and
    the user's last one. Answers (post_call): judged as data, against the same. A refused text raises
    GuardrailRaisedException (HTTP 400); of a redacted one the rest goes on. during_call runs beside the model
    and can change nothing, so it does not take mode redact: ArgumentError, as without `guarded`.
    """

    guarded: Guarded | None = None
    roles: tuple[str, ...] = ("tool", "function")

    def __init__(self, guarded: Guarded | None = None, **settings: Any) -> None:
        self.guarded = guarded or type(self).guarded
        if not isinstance(self.guarded, Guarded):
            raise ArgumentError(
                f"{type(self).__name__} needs a Guarded: as an argument, or as class attribute `guarded`"
            )
        hooks = settings.get("event_hook")
        if self.guarded.mode == "redact" and "during_call" in str(getattr(hooks, "tags", hooks)):
            raise ArgumentError("during_call cannot redact: use pre_call, or another mode of Guarded")
        super().__init__(**settings)

    async def apply_guardrail(
        self, inputs: Any, request_data: dict[str, Any], input_type: str, logging_obj: Any = None
    ) -> Any:
        """Judge `inputs["texts"]`, and return the inputs with what is left of them."""
        assert self.guarded is not None
        texts: list[str] = list(inputs.get("texts") or [])
        messages = request_data.get("messages") or inputs.get("structured_messages") or []
        owners = [str(m.get("role")) for m in inputs.get("structured_messages") or [] for _ in _read(m)]
        sources: dict[str, str] = {}
        for n, text in enumerate(texts):
            # Where the roles are not known, every text is judged: none passes because of a missing name.
            role = "answer" if input_type == "response" else owners[n] if len(owners) == len(texts) else ""
            if role in ("answer", "", *self.roles):
                sources[f"{role or 'text'} {n + 1}"] = text
        asked = instruction(_system(messages), last_user(messages))
        decision = await self.guarded.adecide(asked, sources)
        if decision.action == "refuse":
            finding = decision.finding
            why = finding.reason or f"verdict {finding.verdict}, score {finding.score:.2f}"
            raise GuardrailRaisedException(
                guardrail_name=self.guardrail_name, message=why, blocked_content=not decision.unjudged
            )
        if decision.action == "redact":
            left = {int(name.rsplit(" ", 1)[1]) - 1: text for name, text in decision.texts.items()}
            return {**inputs, "texts": [left.get(n, text) for n, text in enumerate(texts)]}
        return inputs


def _read(message: Any) -> list[str]:
    return pieces(message.get("content")) if isinstance(message, Mapping) else []


def _system(messages: Any) -> str:
    said = (_read(m) for m in messages if isinstance(m, Mapping) and m.get("role") in ("system", "developer"))
    return "\n".join(text for texts in said for text in texts)

"""Request parameters in a config: their names, and values as in JSON (pure).

llama-server ignores unknown parameters. So a name that looks like a misspelled one is an error here. A name
that is like no known one is accepted, because another build may know it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from llamasup.core.settings.kinds import InvalidValue, ScalarKind

ANSWER_LENGTHS: Final = ("max_tokens", "n_predict", "max_completion_tokens", "max_output_tokens")
"""Names of one parameter in several APIs: the most tokens of an answer."""


def names_of(parameter: str) -> tuple[str, ...]:
    """Return all names of the parameter. The first name stands for the parameter."""
    return ANSWER_LENGTHS if parameter in ANSWER_LENGTHS else (parameter,)


_Kind = tuple[str, tuple[type[Any], ...]]
"""A kind of values has a name for messages, and types."""
_NUMBER: Final[_Kind] = "a number", (int, float)
_WHOLE: Final[_Kind] = "a whole number", (int,)
_SWITCH: Final[_Kind] = "true or false", (bool,)
_TEXT: Final[_Kind] = "text", (str,)
_LIST: Final[_Kind] = "a list or text", (list, str)
_MAPPING: Final[_Kind] = "keys and values", (dict,)
# Those of llama-server b11434 that shape an answer, in their order in its documentation.
_KNOWN: Final[Mapping[str, _Kind | None]] = {
    **dict.fromkeys(
        [
            *("temperature", "dynatemp_range", "dynatemp_exponent", "top_p", "min_p", "top_n_sigma"),
            *("typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier"),
            *("dry_base", "xtc_probability", "xtc_threshold", "mirostat_tau", "mirostat_eta"),
            *("adaptive_target", "adaptive_decay"),
        ],
        _NUMBER,
    ),
    **dict.fromkeys(
        [
            *("top_k", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n", "mirostat", "seed"),
            *("n_keep", "n_discard", "n_probs", "min_keep", "n_indent", "t_max_predict_ms", "top_logprobs"),
            *("thinking_budget_tokens", *ANSWER_LENGTHS),
        ],
        _WHOLE,
    ),
    **dict.fromkeys(
        [
            *("ignore_eos", "cache_prompt", "return_tokens", "post_sampling_probs", "timings_per_token"),
            *("parse_tool_calls", "parallel_tool_calls", "add_generation_prompt", "logprobs"),
        ],
        _SWITCH,
    ),
    **dict.fromkeys(["grammar", "reasoning_format", "reasoning_effort"], _TEXT),
    **dict.fromkeys(
        ["stop", "samplers", "dry_sequence_breakers", "tools", "stop_sequences", "response_fields"], _LIST
    ),
    **dict.fromkeys(["json_schema", "response_format", "chat_template_kwargs", "thinking"], _MAPPING),
    **dict.fromkeys(["logit_bias", "tool_choice", "lora"]),
}

# These belong to one request, or are counted before llama-server gets it.
_RESERVED: Final[Mapping[str, str]] = {
    "model": "the key model of the virtual model names it",
    "system": "write it as the key system of the virtual model",
    "instructions": "write it as the key system of the virtual model",
    **dict.fromkeys(
        ["messages", "prompt", "input", "content", "documents", "texts", "questions", "query"],
        "it is the content of a request",
    ),
    **dict.fromkeys(["stream", "stream_options"], "the client decides how it reads the answer"),
    **dict.fromkeys(["n", "n_cmpl"], "limits count the answers that the client requests"),
    "id_slot": "llamasup and llama-server choose the slot",
}
# Options of llama-server, whose parameters have other names.
_OTHERWISE: Final[Mapping[str, str]] = {
    "reasoning_budget": "thinking_budget_tokens",
    "reasoning_budget_tokens": "thinking_budget_tokens",
    "temp": "temperature",
    "enable_thinking": "chat_template_kwargs: {enable_thinking: …}",
    "ctx_size": "ctx_size of the model in models",
    "num_ctx": "ctx_size of the model in models",
    "num_predict": "max_tokens",
}
_NAME: Final = r"[A-Za-z_][A-Za-z0-9_.]{0,63}"
_CUTOFF: Final = 0.8  # of difflib: top_q is top_k or top_p; a new parameter is like none


class ParameterName(ScalarKind, frozen=True):
    """The name of a parameter that a virtual model may change."""

    allowed: ClassVar[str] = "the name of a request parameter, such as temperature"

    def parse(self, text: str) -> str:
        if not re.fullmatch(_NAME, text):
            raise InvalidValue
        if text in _RESERVED:
            raise InvalidValue(f"a virtual model cannot change it: {_RESERVED[text]}")
        if text in _OTHERWISE:
            raise InvalidValue(f"requests have no parameter of this name; use {_OTHERWISE[text]}")
        if text not in _KNOWN:
            near = difflib.get_close_matches(text.casefold(), _KNOWN, n=1, cutoff=_CUTOFF)
            if near:
                raise InvalidValue(f"llama-server would ignore it; did you mean {near[0]}?")
        return text

    def schema(self) -> Mapping[str, Any]:
        return {"type": "string", "pattern": f"^{_NAME}$", "not": {"enum": [*_RESERVED, *_OTHERWISE]}}


def check_parameter(name: str, value: Any) -> None:
    """Check a value. Raises InvalidValue if llama-server would refuse or ignore it."""
    kind = _KNOWN.get(name)
    if kind is None:
        return
    expected, types = kind
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise InvalidValue(f"expected {expected}")

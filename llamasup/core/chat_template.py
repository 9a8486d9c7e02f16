"""Reads from a chat template's text what it can render. The template is never run."""

from __future__ import annotations

import re

from llamasup.core.model_facts import ChatTemplate

__all__ = ["read_chat_template"]

_TOOLS = re.compile(r"\btools\b")
# "{{ message['role'] }}" writes out whatever role there is, the system's included (ChatML).
_ANY_ROLE = re.compile(r"\{\{[^}]*\b\w+(?:\['role'\]|\[\"role\"\]|\.role\b)")
# Gemma's first templates: raise_exception('System role not supported').
_NO_SYSTEM = re.compile(r"raise_exception\([^)]*system[^)]*not (?:supported|allowed)", re.IGNORECASE)
_REASONING = re.compile(
    r"<think>|</think>|\[THINK\]|<\|think|<\|channel\|?>|reasoning_content|enable_thinking|reasoning_effort|<reasoning>"
)


def read_chat_template(text: str, *, tool_template: bool = False) -> ChatTemplate:
    """What ``text`` can render; ``tool_template`` says that there is a second template for tools."""
    if not text.strip():
        return ChatTemplate()
    return ChatTemplate(
        present=True,
        tools=tool_template or _TOOLS.search(text) is not None,
        system=_NO_SYSTEM.search(text) is None and ("system" in text or _ANY_ROLE.search(text) is not None),
        reasoning=_REASONING.search(text) is not None,
    )

"""A preset file of llama.cpp's router (``--models-preset``, b11434) → the draft of a config (pure)."""

from __future__ import annotations

import re

from llamasup.core.llama_server.help_text import Capabilities
from llamasup.features.config_import.draft import Draft, literal, valid_name
from llamasup.features.config_import.server_line import option_words, put_server

_SOURCES = ("model", "m", "LLAMA_ARG_MODEL", "hf-repo", "hf", "hfr", "LLAMA_ARG_HF_REPO", "model-url", "mu")


def sections_of(text: str) -> dict[str, dict[str, str]]:
    """Read the sections of a preset file. Lines before the first one belong to the section ``""``."""
    section: dict[str, str] = {}
    sections = {"": section}
    for line in text.splitlines():
        key, equals, value = re.sub("[;#].*", "", line).partition("=")
        if header := re.match(r"\s*\[\s*([^\]]*?)\s*\]", line):
            section = sections.setdefault(header[1], {})
        elif equals:
            section[key.strip()] = literal(value.strip())
    return sections


def from_preset(text: str, capabilities: Capabilities) -> Draft:
    """Translate each section with a model. The keys for all models are written out in each of them."""
    draft, sections = Draft(), sections_of(text)
    shared = {key: value for name in ("", "default", "*") for key, value in sections.pop(name, {}).items()}
    draft.note((), f"{', '.join(shared)} for all models → written out in each model")
    shared.pop("version", None)
    for name, own in sections.items():
        at = ("models", valid_name(name))
        draft.put(at, {}, f"from [{name}]")
        keys = {**{key: value for key, value in shared.items() if key not in own}, **own}
        words = [] if name.count("/") != 1 or any(key in keys for key in _SOURCES) else ["--hf-repo", name]
        for key, value in keys.items():
            if key == "load-on-startup":
                draft.put((*at, "preload"), value == "true", f"from {key} = {value}")
            elif key == "stop-timeout":
                draft.put((*at, "drain_timeout"), f"{value}s", f"from {key} = {value}")
            elif key == "dedup-cache-models" or not (given := option_words(key, value, capabilities)):
                draft.note(at, f"{key} = {value} → planned: it is so without a flag")
            else:
                words += given
        put_server(draft, at, words, capabilities)
        draft.add((*at, "aliases"), [name] if at[1] != name else [])
    return draft

"""A Modelfile of Ollama (0.33), or a model in Ollama's store → the draft of a config (pure)."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.settings.declaration import Place
from llamasup.features.config_import.draft import Draft, literal, valid_name
from llamasup.features.config_import.server_line import option_words, put_server

Instruction = tuple[str, str]
"""The name of an instruction in capitals, and its argument."""

_FLAGS: Final = (
    {"FROM": "model", "ADAPTER": "lora", "PROJECTOR": "mmproj", "DRAFT": "model-draft", "num_ctx": "ctx-size"}
    | {"num_gpu": "gpu-layers", "num_thread": "threads", "num_batch": "batch-size", "num_predict": "predict"}
    | {"num_keep": "keep", "mirostat_tau": "mirostat-ent", "mirostat_eta": "mirostat-lr"}
)
"""The flags of llama-server for instructions and parameters. Other parameters have the name of their flag."""
_WHY: Final = {
    "TEMPLATE": "the file has a template; `extra: [--chat-template-file, FILE]` takes another one in Jinja",
    "MESSAGE": "clients send the messages",
    **dict.fromkeys(("LICENSE", "REQUIRES"), "it changes no answer"),
    **dict.fromkeys(("RENDERER", "PARSER", "CAPABILITY"), "llama-server reads the chat template"),
}
_IN_STORE: Final = {"model": "FROM", "adapter": "ADAPTER", "projector": "PROJECTOR"}
_LINE: Final = re.compile(r'(?ms)^[ \t]*([A-Za-z]+)[ \t]+(?:"""(.*?)(?:"""|\Z)|([^\n]*))')
_HUB: Final = re.compile(r"(?:https?://)?(?:hf\.co|huggingface\.co)/(.+)")
_FILE: Final = re.compile(r"[./~].*|.*\.gguf|.*sha256-.*")


class _Layer(msgspec.Struct):
    mediaType: str
    digest: str


class _Manifest(msgspec.Struct):
    layers: list[_Layer]


def instructions_of(text: str) -> Iterator[Instruction]:
    """Read the instructions of a Modelfile."""
    for name, long, short in _LINE.findall(text):
        yield name.upper(), long.strip("\n") or re.sub(r'^"(.*)"$', r"\1", short.strip())


def instructions_in_store(manifest: str, blobs: Path, read: Callable[[Path], str]) -> Iterator[Instruction]:
    """Read a model of Ollama's store: its manifest, and the texts in the files ``blobs/sha256-…``.

    Raises msgspec.MsgspecError if a file is not as Ollama writes it, and what ``read`` raises.
    """
    for layer in msgspec.json.decode(manifest, type=_Manifest).layers:
        kind, path = layer.mediaType.rpartition(".")[2], blobs / re.sub("[:/]", "-", layer.digest)
        if kind == "params":
            for name, value in msgspec.json.decode(read(path), type=dict[str, Any]).items():
                for each in value if isinstance(value, list) else [value]:
                    yield "PARAMETER", f"{name} {each if isinstance(each, str) else json.dumps(each)}"
        else:
            yield (_IN_STORE[kind], str(path)) if kind in _IN_STORE else (kind.upper(), read(path))


def from_modelfile(name: str, instructions: Sequence[Instruction], capabilities: Capabilities) -> Draft:
    """Translate the instructions of a model. A system prompt, or stop words, make a virtual model."""
    draft, public, words = Draft(), valid_name(name), list[str]()
    is_virtual = any(
        f"{word} {value}".startswith(("SYSTEM", "PARAMETER stop ")) for word, value in instructions
    )
    at: Place = ("models", f"{public}:plain" if is_virtual else public)
    virtual: Place = ("virtual_models", public)
    draft.put(at, {})
    if is_virtual:
        draft.put((*virtual, "model"), at[1])
    for word, value in instructions:
        key, _, argument = value.partition(" ") if word == "PARAMETER" else (word, "", value)
        argument, text = literal(argument.strip().strip('"')), f"{word} {value[:200]}"
        if word == "SYSTEM":
            draft.put((*virtual, "system"), literal(value), "from SYSTEM; it comes before a client's own")
        elif key == "stop":
            draft.add((*virtual, "default", "stop"), [argument], f"from {text}")
        elif word == "FROM" and not (_FILE.fullmatch(value) or _HUB.fullmatch(value)):
            draft.note(at, f"{text} → left out: Ollama's store does not have it; write path or repo")
        elif word in _FLAGS or word == "PARAMETER":
            flag = "mmproj" if "mmproj" in value else _FLAGS.get(key, key.replace("_", "-"))
            hub = _HUB.fullmatch(value)
            words += (given := ("--hf-repo", hub[1]) if hub else option_words(flag, argument, capabilities))
            draft.note(at, f"{text} → {shlex.join(given)}")
        else:
            draft.note(at, f"{text} → left out: {_WHY.get(word, 'unknown')}")
    put_server(draft, at, words, capabilities)
    draft.add((*at, "aliases"), [name] if public != name else [])
    return draft

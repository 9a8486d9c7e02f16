"""A Modelfile of Ollama (0.33), or a model in Ollama's store → the draft of a config (pure)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from llamasup.core.settings.declaration import Place
from llamasup.features.config_import.draft import Draft, literal, valid_name

Instruction = tuple[str, str]
"""The name of an instruction in capitals, and its argument."""

_SAME: Final = (
    "temperature top_k top_p min_p typical_p seed stop repeat_last_n repeat_penalty presence_penalty"
)
_ALSO: Final = "frequency_penalty mirostat mirostat_tau mirostat_eta"
_PARAMETERS: Final = {"num_predict": "max_tokens", "num_keep": "n_keep"} | {
    name: name for name in f"{_SAME} {_ALSO}".split()
}
_KEYS: Final = {"FROM": "path", "ADAPTER": "loras", "PROJECTOR": "mmproj", "DRAFT": "draft_model"}
_WHY: Final = {
    "TEMPLATE": "the file has a template; `extra: [--chat-template-file, FILE]` takes another one in Jinja",
    "MESSAGE": "clients send the messages",
    **dict.fromkeys(("LICENSE", "REQUIRES"), "it changes no answer"),
    **dict.fromkeys(("RENDERER", "PARSER", "CAPABILITY"), "llama-server reads the chat template"),
}
_IN_STORE: Final = {"model": "FROM", "adapter": "ADAPTER", "projector": "PROJECTOR"}
_LINE: Final = re.compile(
    r'^[ \t]*([A-Za-z]+)[ \t]+(?:"""(.*?)(?:"""|\Z)|([^\n]*))', re.MULTILINE | re.DOTALL
)
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


def instructions_in_store(manifest: bytes, blobs: Path, read: Callable[[Path], str]) -> Iterator[Instruction]:
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


def from_modelfile(name: str, instructions: Sequence[Instruction]) -> Draft:
    """Translate the instructions of a model. Parameters and a system prompt make a virtual model."""
    draft, public = Draft(), valid_name(name)
    virtual: Place = ("virtual_models", public)
    used = {value.partition(" ")[0] if word == "PARAMETER" else word for word, value in instructions}
    is_virtual = not used.isdisjoint({"SYSTEM", *_PARAMETERS})
    at: Place = ("models", f"{public}:plain" if is_virtual else public)
    draft.put(at, {})
    if is_virtual:
        draft.put((*virtual, "model"), at[1])
    for word, value in instructions:
        if word == "PARAMETER":
            _put_parameter(draft, at, virtual, value)
        elif word == "SYSTEM":
            draft.put((*virtual, "system"), literal(value), "from SYSTEM; it comes before a client's own")
        elif word in _KEYS:
            _put_file(draft, at, _KEYS[word], word, literal(value))
        else:
            why = _WHY.get(word, "an unknown instruction")
            draft.note(at, f"{word} {value[:200]} → left out: {why}")
    draft.add((*at, "aliases"), [name] if public != name else [])
    return draft


def _put_file(draft: Draft, at: Place, key: str, word: str, value: str) -> None:
    key, note = "mmproj" if "mmproj" in value else key, f"from {word} {value}"
    if key == "loras":
        draft.add((*at, key), [value], note)
    elif hub := _HUB.fullmatch(value):
        draft.put((*at, "repo"), hub[1], note)
    elif key == "path" and not _FILE.fullmatch(value):
        draft.note(at, f"{word} {value} → left out: Ollama's store does not have it; write path or repo")
    elif key in draft.config["models"][at[1]]:
        draft.note(at, f"{word} {value} → planned: llama-server finds the parts of a split model")
    else:
        draft.put((*at, key), value, note)


def _put_parameter(draft: Draft, at: Place, virtual: Place, text: str) -> None:
    name, _, value = text.partition(" ")
    value, note = literal(value.strip().strip('"')), f"from PARAMETER {text}"
    if name == "num_ctx":
        draft.put((*at, "ctx_size"), _value(value), note)
    elif name == "num_gpu" and value == "0":
        draft.put((*at, "gpu_layers"), 0, note)
    elif name == "stop":
        draft.add((*virtual, "default", name), [value], note)
    elif name in _PARAMETERS:
        draft.put((*virtual, "default", _PARAMETERS[name]), _value(value), note)
    else:
        draft.note(at, f"PARAMETER {text} → planned for this machine, or unknown")


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text

"""The models of a stress run: each version of each model has its own words, and its answers are known.

A version can only use the words of its vocabulary, so each answer shows its model and version. The answers to
all prompts at temperature 0 are recorded before the stress begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import httpx

import llamasup
from llamasup.core.config.config_keys import Config
from llamasup.core.settings.model import ModelEntry
from tests.kit.gguf_writer import write_gguf
from tests.kit.tiny import tiny_keys, tiny_tensors

__all__ = ["MODELS", "PROMPTS", "VERSIONS", "Answers", "Prompt", "Version", "record_answers", "settings_of"]

MODELS = tuple(f"m{number}" for number in range(8))
VERSIONS = 3
KNOWN_WORDS = 120
"""The number of recorded words per answer. The rest of a longer answer is checked by the vocabulary only."""
# If the best two words are closer than this (in logits), another batch may select the second one.
MIN_MARGIN = 0.005
_PARALLEL_RECORDINGS = 3
_LETTERS = ascii_lowercase[:6]  # few words, so that the best one is far ahead of the next


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """One version of a model's file."""

    model: str
    number: int

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(f"{self}{first}{second}" for first in _LETTERS for second in _LETTERS)

    def content(self) -> bytes:
        keys = tiny_keys(self.words) | {"general.name": str(self)}
        return write_gguf(keys, tiny_tensors(self.words, seed=str(self)))

    def __str__(self) -> str:
        return f"{self.model}v{self.number}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt. The APIs of one kind lead to the same tokens and so to the same answer."""

    text: str
    is_chat: bool

    def request(self, name: str, tokens: int, *, path: str = "") -> tuple[str, dict[str, Any]]:
        """The path and the body of a request. ``name``: of the model."""
        common = {"model": name, "max_tokens": tokens, "temperature": 0}
        if self.is_chat:
            messages = [{"role": "user", "content": self.text}]
            return "/v1/chat/completions", {**common, "messages": messages}
        return path or "/v1/completions", {**common, "prompt": self.text, "n_predict": tokens}


PROMPTS = tuple(Prompt(text, is_chat) for text in ("Tell me more.", "7 + 5 =") for is_chat in (False, True))


class Answers:
    """The words of each answer of each version, up to the first word that is not deterministic."""

    def __init__(self, known: Mapping[tuple[Version, Prompt], Sequence[str]]) -> None:
        self._known = known
        versions = {version for version, _ in known}
        self._author = {word: version for version in versions for word in version.words}

    def author(self, text: str) -> Version | None:
        """The version with these words; None if no version or several versions have them."""
        found = {self._author.get(word) for word in text.split()}
        return found.pop() if len(found) == 1 else None

    def beginning(self, version: Version, prompt: Prompt) -> str:
        """The recorded words of this version's answer."""
        return " ".join(self._known[version, prompt])

    def begins_as(self, text: str, version: Version, prompt: Prompt) -> bool:
        """Whether the answer of this version begins with ``text``."""
        words = text.split()
        known = self._known[version, prompt][: len(words)]
        return words[: len(known)] == list(known) and all(self._author.get(word) == version for word in words)

    def is_right(self, text: str, version: Version, prompt: Prompt, tokens: int) -> bool:
        """Whether ``text`` is the complete answer. A token is a word."""
        return len(text.split()) == tokens and self.begins_as(text, version, prompt)


def settings_of(model: str) -> dict[str, Any]:
    """The initial settings of a model. Contexts differ, so that the memory needs differ."""
    ctx_size = 2048 * (1 + MODELS.index(model) % 4)
    return {"ctx_size": ctx_size, "parallel": 2, "threads": 1, "gpu_layers": 0}


def record_answers(runtime: str, folder: Path) -> tuple[Answers, dict[str, int]]:
    """The answers, and the memory in bytes that each model needs. Files of all versions are in ``folder``."""
    versions = [Version(model, number) for model in MODELS for number in range(VERSIONS)]
    entries = {}
    for version in versions:
        path = folder / f"{version}.gguf"
        path.write_bytes(version.content())
        entries[str(version)] = ModelEntry(path=str(path), **settings_of(version.model))
    config = Config(models=entries, max_loaded=_PARALLEL_RECORDINGS, swap_after_s=0.1)
    needs: dict[str, int] = {}
    with (
        llamasup.serve(config=config, runtime=runtime) as server,
        ThreadPoolExecutor(_PARALLEL_RECORDINGS) as recorders,
    ):

        def answers_of(version: Version) -> dict[tuple[Version, Prompt], Sequence[str]]:
            return {(version, prompt): _ask(server.client, version, prompt) for prompt in PROMPTS}

        known = {key: words for found in recorders.map(answers_of, versions) for key, words in found.items()}
        for status in server.status()["models"]:
            model = status["id"].partition("v")[0]
            needs[model] = max(needs.get(model, 0), status["needs_bytes"]["ram"])
    for (version, prompt), words in known.items():
        if not set(words) <= set(version.words):
            raise AssertionError(f"{version} answers {prompt} with the words of another version: {words}")
    return Answers(known), needs


def _ask(client: httpx.Client, version: Version, prompt: Prompt) -> list[str]:
    """The words of the answer up to the first one that is not deterministic."""
    path, body = prompt.request(str(version), KNOWN_WORDS, path="/completion")
    body |= {"logprobs": True, "top_logprobs": 2} if prompt.is_chat else {"n_probs": 2}
    said = client.post(path, json=body, timeout=120.0).raise_for_status().json()
    tokens = said["choices"][0]["logprobs"]["content"] if prompt.is_chat else said["completion_probabilities"]
    words = []
    for token in tokens:
        best, second = (candidate["logprob"] for candidate in token["top_logprobs"][:2])
        if best - second < MIN_MARGIN:
            break
        words.append(token["token"].strip())
    return words

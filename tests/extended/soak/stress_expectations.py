"""The correct answers at each time, from the configs, the files and the faults of a stress run.

The code that makes a change reports when the change began, and when its old state was certainly over. Between
these times, both states are correct. Times are monotonic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tests.extended.soak.soak_wire import Answer, events_of, received_text
from tests.extended.soak.stress_models import Answers, Prompt, Version

__all__ = ["Expectations", "JudgedAnswer", "Request", "Verdict"]

CRASH_LOOP = 5
"""More crashes than this in ten minutes are a crash loop (docs/reliability.md)."""
WINDOW_S = 600.0


class Verdict(StrEnum):
    """How a request ended. Only the last one breaks a promise."""

    RIGHT = "right answer"
    UNKNOWN = "404, no such model"
    UNAVAILABLE = "503 with Retry-After"
    FULL = "429 or 503 for a greedy key"
    REFUSED = "503 for a poison request"
    CUT = "stream ended by an error event"
    ABANDONED = "left by the client"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Request:
    """One request: ``name`` of a model, and how many ``tokens`` of an answer."""

    name: str
    prompt: Prompt
    tokens: int
    is_stream: bool
    sent_s: float


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """The verdict on an answer, with what the client saw where that explains it."""

    verdict: Verdict
    detail: str = ""


@dataclass(slots=True)
class _Span:
    """The time during which a state may hold. Infinite until its end is reported."""

    began_s: float
    ended_s: float = float("inf")

    def overlaps(self, began_s: float, ended_s: float) -> bool:
        return self.began_s <= ended_s and began_s <= self.ended_s


@dataclass(slots=True)
class _Names(_Span):
    """The time of a config, with the model of each name."""

    models: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(slots=True)
class _File(_Span):
    """The time in which processes may have loaded a version."""

    number: int = 0


@dataclass(slots=True)
class _Fault(_Span):
    """From a fault until the process of the model had ended or continued."""

    model: str = ""
    is_kill: bool = False


class Expectations:
    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._names: list[_Names] = []
        self._files: dict[str, list[_File]] = {}
        self._faults: list[_Fault] = []

    # --- reports of changes

    def config_written(self, names: Mapping[str, str], now_s: float) -> None:
        """From now on, this config may be in force."""
        self._names.append(_Names(now_s, models=names))

    def config_applied(self, now_s: float) -> None:
        """Only the config written last is in force."""
        for names in self._names[:-1]:
            names.ended_s = min(names.ended_s, now_s)

    def file_written(self, version: Version, now_s: float) -> None:
        """A process that starts from now on may have this version."""
        self._files.setdefault(version.model, []).append(_File(now_s, number=version.number))

    def file_applied(self, model: str, changes: int, now_s: float) -> None:
        """No process can have a version older than the last of the first ``changes``."""
        for file in self._files[model][: changes - 1]:
            file.ended_s = min(file.ended_s, now_s)

    def fault_began(self, model: str, now_s: float, *, is_kill: bool) -> _Fault:
        fault = _Fault(now_s, model=model, is_kill=is_kill)
        self._faults.append(fault)
        return fault

    def fault_ended(self, fault: _Fault, now_s: float) -> None:
        fault.ended_s = now_s

    # --- queries

    def changes_of(self, model: str) -> int:
        """The number of times that the model's file was written."""
        return len(self._files[model])

    def version_of(self, model: str) -> Version:
        """The version on the disk."""
        return Version(model, self._files[model][-1].number)

    def models_of(self, name: str, began_s: float, ended_s: float) -> set[str | None]:
        """The models that a name may select in that time; None: no model."""
        return {names.models.get(name) for names in self._names if names.overlaps(began_s, ended_s)}

    def listings(self, began_s: float, ended_s: float) -> list[set[str]]:
        """The models of each config that may be in force in that time."""
        return [set(names.models.values()) for names in self._names if names.overlaps(began_s, ended_s)]

    def versions_of(self, model: str, began_s: float, ended_s: float) -> set[Version]:
        return {Version(model, file.number) for file in self._files[model] if file.overlaps(began_s, ended_s)}

    def kills_of(self, model: str, began_s: float, ended_s: float) -> int:
        return sum(
            fault.is_kill and fault.model == model and fault.overlaps(began_s, ended_s)
            for fault in self._faults
        )

    def has_fault(self, model: str, began_s: float, ended_s: float) -> bool:
        return any(fault.model == model and fault.overlaps(began_s, ended_s) for fault in self._faults)

    # --- judging

    def judge(self, request: Request, answer: Answer, ended_s: float) -> JudgedAnswer:
        targets = self.models_of(request.name, request.sent_s, ended_s)
        verdict, why = self._verdict(request, answer, targets, ended_s)
        if verdict is not Verdict.WRONG:
            return JudgedAnswer(verdict, why)
        target_names = ", ".join(sorted(str(target or "no model") for target in targets))
        return JudgedAnswer(
            verdict,
            f"{why}; {request.name} ({target_names}), {request.tokens} tokens of {request.prompt}, "
            f"stream: {request.is_stream}, "
            f"after {ended_s - request.sent_s:.2f} s: {answer}",
        )

    def _verdict(
        self, request: Request, answer: Answer, targets: set[str | None], ended_s: float
    ) -> tuple[Verdict, str]:
        models = sorted(filter(None, targets))
        if answer.timed_out:
            return Verdict.WRONG, "no end of the answer"
        if answer.status == 404:
            correct = None in targets and answer.error.get("cause") == "model_not_found"
            return (Verdict.UNKNOWN, "") if correct else (Verdict.WRONG, "a 404 that should not be")
        if answer.status == 503:
            return self._unavailable(answer, models, request.sent_s, ended_s)
        if answer.status != 200:
            return Verdict.WRONG, f"status {answer.status}"
        versions = {
            version for model in models for version in self.versions_of(model, request.sent_s, ended_s)
        }
        if answer.whole:
            return self._whole(request, answer, versions)
        return self._cut(request, answer, versions, ended_s)

    def _whole(self, request: Request, answer: Answer, versions: set[Version]) -> tuple[Verdict, str]:
        text = received_text(answer)
        has_end = not answer.is_stream or answer.body.endswith(b"data: [DONE]\n\n")
        author = self._answers.author(text)
        if author not in versions:
            return Verdict.WRONG, f"the words of {author or 'no version'}, not of {_listed(versions)}"
        if not (has_end and self._answers.is_right(text, author, request.prompt, request.tokens)):
            expected = self._answers.beginning(author, request.prompt)
            return Verdict.WRONG, f"{text!r} is not the whole answer of {author}: {expected!r}…"
        return Verdict.RIGHT, ""

    def _cut(
        self, request: Request, answer: Answer, versions: set[Version], ended_s: float
    ) -> tuple[Verdict, str]:
        events = list(events_of(answer.body))
        if not (answer.is_stream and events and events[-1].get("error")):
            return Verdict.WRONG, "broken off without an error event"
        faulty = {version for version in versions if self.has_fault(version.model, request.sent_s, ended_s)}
        if not faulty:
            return Verdict.WRONG, f"broken off, and nothing was done to {_listed(versions)}"
        text = received_text(answer)
        if text and not any(self._answers.begins_as(text, version, request.prompt) for version in faulty):
            return Verdict.WRONG, f"broken off, and before that not the words of {_listed(faulty)}"
        return Verdict.CUT, ""

    def _unavailable(
        self, answer: Answer, models: Sequence[str], began_s: float, ended_s: float
    ) -> tuple[Verdict, str]:
        if not (answer.error and answer.headers.get("retry-after", "").isdigit()):
            return Verdict.WRONG, "a 503 without Retry-After or without an error"
        if not any(self._may_be_unavailable(model, began_s, ended_s) for model in models):
            return Verdict.WRONG, f"a 503 without enough kills: {answer.error['message']}"
        return Verdict.UNAVAILABLE, str(answer.error.get("cause"))

    def _may_be_unavailable(self, model: str, began_s: float, ended_s: float) -> bool:
        """Whether the model has crashed too often: a request survives one crash, and a model five."""
        return (
            self.kills_of(model, began_s, ended_s) > 1
            or self.kills_of(model, ended_s - WINDOW_S, ended_s) > CRASH_LOOP
        )


def _listed(versions: set[Version]) -> str:
    return " or ".join(map(str, sorted(versions))) or "any"

"""Tells a person what the service is doing: every happening as one line, in their words."""

from __future__ import annotations

import time

from llamasup.api import Service
from llamasup.cli.errors import error_text
from llamasup.cli.layout import table
from llamasup.cli.view import Level, View, duration_text, plural
from llamasup.core.instance import State
from llamasup.core.plan import LaunchPlan
from llamasup.core.units import memory_text
from llamasup.core.wrapping import shown_program
from llamasup.runtime.events import Notice, Ready, ServerExited, ServerWarned, StateChanged, Stopped
from llamasup.runtime.launch import Launch
from llamasup.runtime.metrics import RequestRecord
from llamasup.runtime.plans import ChildPlan
from llamasup.runtime.wrapped import Wrapping

__all__ = ["Narrator"]

_GOING_ON = {
    State.STARTING: "starting llama-server for {model}",
    State.LOADING: "loading {model}",
    State.WARMING: "warming up {model}: waiting for its first token",
    State.DRAINING: "finishing the requests in flight",
    State.STOPPING: "stopping llama-server",
    State.BACKOFF: "waiting before the next start of {model}",
}


class Narrator:
    """Listens to one service that began at ``began_s`` (monotonic). ``view`` is where the lines go."""

    def __init__(self, view: View, service: Service, began_s: float) -> None:
        self._view = view
        self._service = service
        self._began_s = began_s
        self._stops_asked = 0

    def stop_asked(self, why: str, *, hurry_s: float | None = None) -> None:
        """``why``: a signal, or what has ended; ``hurry_s``: what is in flight has no longer than this."""
        self._stops_asked += 1
        if self._stops_asked == 1:
            in_flight = self._service.runner.in_flight if self._service.runner else 0
            limit = "; again to stop now" if hurry_s is None else f" within {duration_text(hurry_s)}"
            waiting = f" {plural(in_flight, 'request')} in flight may finish{limit}." if in_flight else ""
            self._view.say("info", "stop", f"{why}: stopping.{waiting}", in_flight=in_flight)
        else:
            self._view.say("warning", "kill", f"{why} again: stopping now.")

    def restart_asked(self, signal_name: str) -> None:
        self._view.say("info", "restart", f"{signal_name}: restarting the model.")

    def notice(self, notice: Notice) -> None:
        match notice:
            case StateChanged(model, state, generation):
                self._state_changed(model, state, generation)
            case ServerExited():
                self._server_exited(notice)
            case ServerWarned(model, generation, message, remedy):
                text = error_text(message, remedy)
                self._view.say("warning", "warning", text, model=model, generation=generation, remedy=remedy)
            case Ready():
                self._ready(notice)
            case Stopped():
                self._view.loading(None)
                self._view.say("info", "stopped", "stopped")

    def request(self, record: RequestRecord) -> None:
        tokens = (
            f"{record.tokens_prompt or 0}+{record.tokens_completion} tokens"
            if record.tokens_completion
            else ""
        )
        speed = f"{record.tokens_per_s:.1f} tok/s" if record.tokens_per_s else ""
        parts = (
            record.method,
            record.path,
            str(record.status),
            tokens,
            speed,
            duration_text(record.duration_s),
        )
        outcome = "" if record.outcome in ("ok", "local") else f" ({record.outcome.replace('_', ' ')})"
        if record.replayed:
            outcome += " (sent again)"
        level: Level = "debug" if record.outcome == "local" else "warning" if record.status >= 500 else "info"
        self._view.say(
            level,
            "request",
            "  ".join(part for part in parts if part) + outcome,
            request_id=record.request_id,
            method=record.method,
            path=record.path,
            model=record.model,
            generation=record.generation,
            status=record.status,
            outcome=record.outcome,
            tokens_prompt=record.tokens_prompt,
            tokens_cached=record.tokens_cached,
            tokens_completion=record.tokens_completion,
            tokens_per_s=record.tokens_per_s,
            queue_s=record.queue_s,
            waited_s=record.waited_s,
            replayed=record.replayed,
            first_byte_s=record.first_byte_s,
            duration_s=record.duration_s,
            bytes_out=record.bytes_out,
        )

    def _state_changed(self, model: str, state: State, generation: int) -> None:
        going_on = _GOING_ON.get(state)
        self._view.loading(None if going_on is None else going_on.format(model=model))
        level: Level = "info" if state is State.READY and generation > 1 else "debug"
        text = f"{model} serves again" if level == "info" else f"{model} is {state}"
        self._view.say(
            level,
            "state",
            f"{text} (generation {generation})",
            model=model,
            state=state,
            generation=generation,
        )

    def _server_exited(self, exited: ServerExited) -> None:
        diagnosis = exited.diagnosis
        if exited.restart_in_s is None:
            return  # the error that ends the service says it all
        again = "at once" if exited.restart_in_s == 0 else f"in {duration_text(exited.restart_in_s)}"
        next_start, remedy = f"Restarting {again}.", diagnosis.remedy
        if diagnosis.adjustment is not None:  # which does what the remedy says
            next_start, remedy = f"Starting again with {diagnosis.adjustment}.", ""
        self._view.say(
            "warning",
            "exit",
            error_text(f"{diagnosis.message} {next_start}", remedy, diagnosis.lines),
            model=exited.model,
            generation=exited.generation,
            code=exited.exit.code if exited.exit else None,
            signal=exited.exit.signal if exited.exit else None,
            cause=diagnosis.cause,
            remedy=diagnosis.remedy,
            restart_in_s=exited.restart_in_s,
        )

    def _ready(self, ready: Ready) -> None:
        took_s = time.monotonic() - self._began_s
        runner = self._service.runner
        plan = runner.plan if runner else None
        lines = [f"{', '.join(ready.models)} is ready at {ready.address.shown} after {duration_text(took_s)}"]
        if plan is not None:
            lines.append(table(self._facts(plan)))
        self._view.say(
            "info",
            "ready",
            "\n".join(lines),
            url=ready.address.url,
            models=list(ready.models),
            took_s=round(took_s, 3),
        )

    def _facts(self, plan: ChildPlan) -> list[tuple[str, str]]:
        launch, runner = self._service.launch, self._service.runner
        facts: list[tuple[str, str]] = []
        if isinstance(launch, Wrapping):
            # Not the words behind it: there may be a key among them (X13).
            facts = [("server", f"{shown_program(launch.line.program)} ({launch.capabilities.version})")]
        elif isinstance(plan, LaunchPlan):
            facts = _facts_of_model(launch, plan)
        if runner is not None and runner.pid is not None:
            from llamasup.effects.vitals import vitals

            seen = vitals(runner.pid)
            if seen is not None:
                facts.append(("memory", f"{memory_text(seen.rss_bytes)} in use"))
        return facts


def _facts_of_model(launch: Launch, plan: LaunchPlan) -> list[tuple[str, str]]:
    runtime = launch.runtime
    devices = ", ".join(device.description for device in runtime.capabilities.devices) or "CPU"
    adjusted = f" (adjusted: {plan.bounds.why})" if plan.bounds.why else ""
    return [
        ("model", f"{launch.model_path} ({launch.model.architecture}, {launch.model.quantization})"),
        ("server", f"{runtime.path if runtime.kind == 'binary' else runtime.kind} ({runtime.version})"),
        ("slots", f"{plan.parallel} × {plan.ctx_size} tokens, KV cache {plan.kv_type}{adjusted}"),
        ("device", devices),
    ]

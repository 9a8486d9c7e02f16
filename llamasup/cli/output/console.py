"""Reports what the service does on standard error: one line per event."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from llamasup.cli.output.error_report import error_text
from llamasup.cli.output.layout import table
from llamasup.cli.output.refusals import Refusals
from llamasup.cli.output.view import Level, View, duration_text, plural, shortened
from llamasup.models.diff import Changes
from llamasup.observability.access_record import shown_path
from llamasup.observability.metrics import RequestRecord
from llamasup.planning.facts import Launch
from llamasup.planning.plan import LaunchPlan
from llamasup.service.run import Service
from llamasup.supervision.events import (
    ConfigRejected,
    Downloading,
    LoadFailed,
    ModelsChanged,
    ModelUnloading,
    PublishedEvent,
    Ready,
    ServerExited,
    ServerWarned,
    StateChanged,
    Stopped,
)
from llamasup.supervision.plan_protocol import ChildPlan
from llamasup.supervision.states import State
from llamasup.supervision.wrap.command_line import redacted_program
from llamasup.supervision.wrap.planner import Wrapping
from llamasup.system.text import memory_text

if TYPE_CHECKING:
    from llamasup.service.serve import ServeService

__all__ = ["Narrator"]

_GOING_ON = {
    State.STARTING: "starting llama-server for {model}",
    State.LOADING: "loading {model}",
    State.WARMING: "warming up {model}: waiting for its first token",
    State.DRAINING: "finishing the requests in flight",
    State.STOPPING: "stopping llama-server",
    State.BACKOFF: "waiting before the next start of {model}",
}

_ASKED = {"load": "loading", "unload": "unloading", "restart": "restarting", "reload": "restarting"}

_MAKES_ROOM = {
    "memory": "{other} needs its memory",
    "group": "{other} is in the same group",
    "count": "{other} is loaded instead",
}
_WHY_IT_LEAVES = {
    "ttl": "its TTL has expired",
    "asked": "on request",
    "changed": "its file or settings have changed",
    "removed": "it is no longer configured",
}


class Narrator:
    """Listens to one service that began at ``began_s`` (monotonic). ``view`` is where the lines go."""

    def __init__(self, view: View, service: Service | ServeService, began_s: float) -> None:
        self._view = view
        self._service = service
        self._began_s = began_s
        self._stops_asked = 0
        self._going_on: dict[str, str] = {}  # by model; of several the last is shown
        self._refusals = Refusals(view)

    def stop_asked(self, why: str, *, hurry_s: float | None = None) -> None:
        """``why``: a signal, or what has ended; ``hurry_s``: the time limit of the requests in flight."""
        self._stops_asked += 1
        if self._stops_asked == 1:
            in_flight = self._service.in_flight
            limit = "; repeat to stop now" if hurry_s is None else f" within {duration_text(hurry_s)}"
            waiting = f" {plural(in_flight, 'request')} in flight may finish{limit}." if in_flight else ""
            self._view.say("info", "stop", f"{why}: stopping.{waiting}", in_flight=in_flight)
        else:
            self._view.say("warning", "kill", f"{why} again: stopping now.")

    def reload_asked(self, signal_name: str) -> None:
        what = "reading the config again" if self._has_many else "restarting the model"
        self._view.say("info", "restart", f"{signal_name}: {what}.")

    def asked(self, what: str, model: str) -> None:
        """A request of the control API. Its effects have their own lines."""
        is_config = what == "reload" and self._has_many
        doing = "reading the config again" if is_config else f"{_ASKED[what]} {model}"
        self._view.say("info", what, f"llamasup {what}: {doing}.")

    def notice(self, notice: PublishedEvent) -> None:
        match notice:
            case StateChanged(model, state, generation):
                self._state_changed(model, state, generation)
            case ServerExited():
                self._server_exited(notice)
            case ServerWarned(model, generation, message, remedy):
                text = error_text(message, remedy)
                self._view.say("warning", "warning", text, model=model, generation=generation, remedy=remedy)
            case ModelUnloading(model, reason, for_model):
                why = _why_it_leaves(reason, for_model)
                level: Level = "debug" if self._stops_asked else "info"
                self._view.say(level, "unload", f"{model} is unloaded: {why}", model=model, reason=reason)
            case LoadFailed(model, error):
                self._is_going_on(model, None)
                what = error.message if model in error.message else f"{model}: {error.message}"
                text = error_text(what, error.remedy, error.lines, error.details)
                self._view.say("warning", "failed", text, model=model, cause=error.cause)
            case Downloading():
                self._downloading(notice)
            case ModelsChanged(changes, _):
                self._models_changed(changes)
            case ConfigRejected(error):
                text = error_text(
                    f"{error.message} The previous configuration stays in use.",
                    error.remedy,
                    error.lines,
                    error.details,
                )
                self._view.say("error", "config", text, cause=error.cause)
            case Ready():
                self._ready(notice)
            case Stopped():
                self._refusals.close()
                self._view.loading(None)
                self._view.say("info", "stopped", "stopped")

    def request(self, record: RequestRecord) -> None:
        if not self._refusals.shows(record):
            return
        path = shown_path(record.path)
        parts = (
            record.method,
            path,
            record.model if self._has_many else "",
            str(record.status),
            _tokens(record),
            f"{record.tokens_per_s:.1f} tok/s" if record.tokens_per_s else "",
            duration_text(record.duration_s),
        )
        outcome = "" if record.outcome in ("ok", "local") else f" ({record.outcome.replace('_', ' ')})"
        if record.context:
            outcome += f" ({_context(record)})"
        if record.replayed:
            outcome += " (sent again)"
        # A monitor that looks every few seconds is nothing to tell of.
        is_own = record.outcome == "local" or (record.outcome == "ok" and not record.model)
        level: Level = "debug" if is_own else "warning" if record.status >= 500 else "info"
        if level == "warning":
            outcome += f" [{record.request_id}]"
        text = "  ".join(part for part in parts if part) + outcome
        self._view.say(level, "request", text, **{**msgspec.structs.asdict(record), "path": path})

    def slow_request(self, record: RequestRecord, left_out: int) -> None:
        """``left_out``: the number of slow requests without a line since the last one."""
        path = shown_path(record.path)
        text = f"slow: {record.method} {path}: {_where_the_time_went(record)} [{record.request_id}]"
        self._view.say(
            "warning",
            "slow_request",
            text + (f" ({left_out} more since the last such line)" if left_out else ""),
            left_out=left_out,
            **{**msgspec.structs.asdict(record), "path": path},
        )

    def _state_changed(self, model: str, state: State, generation: int) -> None:
        going_on = _GOING_ON.get(state)
        self._is_going_on(model, None if going_on is None else going_on.format(model=model))
        level: Level = "debug"
        text = f"{model} is {state}"
        if state is State.READY and (generation > 1 or self._has_many):
            level = "info"
            text = f"{model} is ready again" if generation > 1 else f"{model} is ready"
            text += self._how_it_serves(model)
        self._view.say(level, "state", text, model=model, state=state, generation=generation)

    def _is_going_on(self, model: str, what: str | None) -> None:
        self._going_on.pop(model, None)
        if what is not None:
            self._going_on[model] = what
        self._view.loading(next(reversed(self._going_on.values()), None))

    def _downloading(self, notice: Downloading) -> None:
        total = notice.total_bytes
        if not self._going_on.get(notice.model, "").startswith("downloading"):
            size = "" if total is None else f" ({memory_text(total)})"
            self._view.say("info", "download", f"downloading {notice.model}{size}", model=notice.model)
        share = f" of {memory_text(total)} ({notice.done_bytes / total:.0%})" if total else ""
        speed = f", {memory_text(notice.bytes_per_s)}/s" if notice.bytes_per_s else ""
        self._is_going_on(
            notice.model, f"downloading {notice.model}: {memory_text(notice.done_bytes)}{share}{speed}"
        )

    def _how_it_serves(self, model: str) -> str:
        """Of one of many: where, and how many at once."""
        hosted = None if self._service.launch is not None else self._service.hosted_models
        runners = [] if hosted is None else hosted.runners_of(model)
        facts = []
        if len(runners) > 1:
            serving = sum(each.instance.state is State.READY for each in runners)
            facts.append(f"{serving} of {len(runners)} processes")
        if runners:
            plan, load_s = runners[0].plan, runners[0].load_s
            if load_s is not None:
                facts.append(f"loaded in {duration_text(load_s)}")
            if isinstance(plan, LaunchPlan):
                if plan.device:
                    facts.append(plan.device)
                facts.append(f"{plan.parallel} × {plan.ctx_size} tokens")
        return f" ({', '.join(facts)})" if facts else ""

    def _server_exited(self, exited: ServerExited) -> None:
        diagnosis = exited.diagnosis
        whose = f"{exited.model}: " if self._has_many else ""
        if exited.restart_in_s is None:
            if self._has_many:
                text = error_text(f"{whose}{diagnosis.message}", diagnosis.remedy, diagnosis.lines)
                self._view.say("warning", "exit", text, model=exited.model, cause=diagnosis.cause)
            return  # else the error that ends the service says it all
        again = "now" if exited.restart_in_s == 0 else f"in {duration_text(exited.restart_in_s)}"
        next_start, remedy = f"Restarting {again}.", diagnosis.remedy
        if diagnosis.adjustment is not None:  # which does what the remedy says
            next_start, remedy = f"Restarting with {diagnosis.adjustment}.", ""
        self._view.say(
            "warning",
            "exit",
            error_text(f"{whose}{diagnosis.message} {next_start}", remedy, diagnosis.lines),
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
        what = "llamasup" if self._has_many else ", ".join(ready.models)
        lines = [f"{what} is ready at {ready.address.shown} after {duration_text(took_s)}"]
        if plan is not None:
            lines.append(table(self._facts(plan)))
        elif self._has_many:
            lines.append(table(self._facts_of_many()))
            if not self._going_on:
                self._view.loading(None)
        self._view.say(
            "info",
            "ready",
            "\n".join(lines),
            url=ready.address.url,
            models=list(ready.models),
            took_s=round(took_s, 3),
        )

    @property
    def _has_many(self) -> bool:
        return self._service.launch is None

    def _models_changed(self, changes: Changes) -> None:
        parts = [
            f"{len(ids)} {word}: {shortened(ids)}"
            for word, ids in (
                ("new", changes.new),
                ("removed", changes.gone),
                ("renamed", [f"{old} to {new}" for old, new in changes.renamed]),
                ("changed", (*changes.changed, *changes.retouched)),
            )
            if ids
        ]
        if parts or not changes.settings:
            self._view.say("info", "models", f"Models: {'; '.join(parts) or 'no changes'}.")
        if changes.settings:
            text = f"Config reloaded: {', '.join(changes.settings)} changed."
            self._view.say("info", "config", text)

    def _facts_of_many(self) -> list[tuple[str, str]]:
        hosted = self._service.hosted_models if self._service.launch is None else None
        if hosted is None:
            return []
        specs = hosted.registry.specs
        served = [id_ for id_, spec in specs.items() if not spec.problem]
        broken = [id_ for id_, spec in specs.items() if spec.problem]
        loaded = [
            id_
            for id_ in served
            if any(each.instance.state is State.READY for each in hosted.runners_of(id_))
        ]
        models = (
            f"{len(served)}: {shortened(served)}" if served else "none yet: put .gguf files into the folder"
        )
        facts = [("models", models)]
        if served:
            facts.append(("loaded", shortened(loaded) or "none yet: a request loads the model that it names"))
        if broken:
            facts.append(("broken", f"{shortened(broken)} (llamasup status --all shows why)"))
        if hosted.registry.default is not None:
            facts.append(("default", f"{hosted.registry.default}, for requests that name no model"))
        places = hosted.budget.items()
        facts.append(
            ("memory", ", ".join(f"{memory_text(size)} of {place.upper()}" for place, size in places))
        )
        return facts

    def _facts(self, plan: ChildPlan) -> list[tuple[str, str]]:
        launch, runner = self._service.launch, self._service.runner
        facts: list[tuple[str, str]] = []
        if launch is None:
            return []
        if isinstance(launch, Wrapping):
            # Without its arguments, which may contain a key (X13).
            facts = [("server", f"{redacted_program(launch.line.program)} ({launch.capabilities.version})")]
        elif isinstance(plan, LaunchPlan):
            facts = _facts_of_model(launch, plan)
        if runner is not None and runner.pid is not None:
            from llamasup.system.hardware.usage import memory_usage

            seen = memory_usage(runner.pid)
            if seen is not None:
                facts.append(("memory", f"{memory_text(seen.rss_bytes)} in use"))
        return facts


def _why_it_leaves(reason: str, for_model: str) -> str:
    if reason in _WHY_IT_LEAVES:
        return _WHY_IT_LEAVES[reason]
    return _MAKES_ROOM[reason].format(other=for_model) if for_model else "a limit was lowered"


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


def _tokens(record: RequestRecord) -> str:
    return (
        f"{record.tokens_prompt or 0}+{record.tokens_completion} tokens" if record.tokens_completion else ""
    )


def _context(record: RequestRecord) -> str:
    match record.context:
        case "exceeded" if record.n_prompt_tokens and record.n_ctx:
            return f"context exceeded: {record.n_prompt_tokens:,} of {record.n_ctx:,} tokens"
        case "exceeded":
            return "context exceeded"
        case "cut":
            return "stopped at the end of the context" + (
                f", {record.n_ctx:,} tokens" if record.n_ctx else ""
            )
        case _:
            return "context shifted: the oldest tokens were dropped"


def _where_the_time_went(record: RequestRecord) -> str:
    """The time in the queue, for the model and in llama-server, and the total."""
    queue = f"{duration_text(record.queue_s)} in the queue"
    if record.waited_s:
        queue += f" ({duration_text(record.waited_s)} waiting for the model)"
    if record.first_byte_s is None:
        return f"no answer in {duration_text(record.duration_s)}, {queue}"
    served_s = record.first_byte_s - record.queue_s
    parts = [
        f"{duration_text(record.first_byte_s)} to the first byte",
        f"{queue} and {duration_text(served_s)} in llama-server",
        f"{duration_text(record.duration_s)} in total",
        _tokens(record),
    ]
    return ", ".join(part for part in parts if part)

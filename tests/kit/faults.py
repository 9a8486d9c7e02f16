"""How the fake llama-server misbehaves: ``--fake KEY=VALUE`` on its command line, any number of times.

Or ``LLAMASUP_FAKE="KEY=VALUE KEY=VALUE"`` in its environment, for a fake with fixed arguments. All
times are in seconds. Phases, in the order of a life: ``start`` (before anything), ``load`` (bound, answering
503), ``context`` (the weights are read), ``ready`` (serving), ``stream`` (after ``die_in_stream`` chunks of a
completion). A dataclass, because the fake also runs on a Python without packages.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Faults"]


@dataclass(slots=True)
class Faults:
    load_s: float = 0.0  # how long the loading takes, with a log line every 50 ms
    spin: bool = False  # spend that time on the CPU without a log line: a start without progress
    exit: str = ""  # PHASE:CODE, e.g. load:1 or ready:0
    signal: str = ""  # PHASE:NAME, e.g. stream:SIGKILL
    after_s: float = 0.0  # how long after the beginning of its phase the exit or signal comes
    once: str = ""  # path: misbehave only in the first start that finds no such file (and makes it)
    above_ctx: int = 0  # misbehave only with a --ctx-size above this
    packed_kv: bool = False  # misbehave only with a KV cache type other than f16
    out_of_memory: str = ""  # host or device: llama-server's own lines while loading, then exit 1
    fit_warning: bool = False  # warns that the model does not fit, and loads on (#27872)
    ignore_sigterm: bool = False
    bind: str = "ok"  # no_accept: listens and never answers
    health: str = "ok"  # garbage, never, or an HTTP status
    wedge: bool = False  # /health is fine, completions never move
    status: int = 0  # the answer to every completion
    prefill_s: float = 0.0  # silence before the first token
    token_s: float = 0.0  # silence before each token
    tokens: int = 8  # how many where the request does not say
    stall_after: int = -1  # after so many tokens a completion moves no more
    die_in_stream: int = -1  # after so many tokens, as exit=stream:… or signal=stream:… says (or exit 1)
    die_on: str = ""  # a prompt with this text ends it, as with die_in_stream=0
    fail_at: int = 0  # the completion of this number gets status 500
    die_at: int = 0  # the completion of this number ends it with exit code 1
    leak_bytes: int = 0  # kept for each completion
    wrong: bool = False  # other words
    until: str = ""  # path: when this file exists, every pause and stall ends
    list_slots_s: float = 0.0  # how long GET /slots takes
    slots_s: float = 0.0  # how long saving or restoring a slot takes
    slots_fail: str = ""  # save or restore: what is refused; die: it ends instead of restoring
    log_bytes: int = 0  # written to the log at the start, in lines of 100 bytes
    log_forever: bool = False  # a flood that never ends
    log_line_bytes: int = 0  # one line of this length
    log_invalid_utf8: bool = False
    close_output: bool = False  # closes stdout and stderr once ready, and runs on
    grandchild: str = (
        ""  # stay: leaves a sleeper in its process group at the end; exit: forks and exits at once
    )

    @classmethod
    def parse(cls, given: list[str]) -> Faults:
        """Read ``KEY=VALUE`` pairs; ``KEY`` alone is a switch. Raises ValueError for an unknown key."""
        types = {field.name: field.type for field in dataclasses.fields(cls)}
        values: dict[str, object] = {}
        for pair in [*os.environ.get("LLAMASUP_FAKE", "").split(), *given]:
            key, _, text = pair.partition("=")
            if key not in types:
                raise ValueError(f"no such fault: {key!r}; there are {', '.join(types)}")
            match types[key]:
                case "bool":
                    values[key] = text not in {"0", "no"}
                case "int":
                    values[key] = int(text)
                case "float":
                    values[key] = float(text)
                case _:
                    values[key] = text
        faults = cls(**values)  # type: ignore[arg-type]
        if faults.once:
            try:
                os.close(os.open(faults.once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except FileExistsError:
                return cls(load_s=faults.load_s, token_s=faults.token_s, tokens=faults.tokens)
        return faults

    def under(self, options: Mapping[str, str]) -> Faults:
        """The faults that these options of the command line bring out."""
        fits = self.above_ctx and int(options.get("--ctx-size", "0")) <= self.above_ctx
        plain = self.packed_kv and options.get("--cache-type-v", "f16") == "f16"
        if fits or plain:
            return type(self)(load_s=self.load_s, token_s=self.token_s, tokens=self.tokens)
        return self

    @property
    def over(self) -> bool:
        """Whether the file exists that ends every pause."""
        return bool(self.until) and os.path.exists(self.until)  # noqa: PTH110 - a path for each look costs more

    def die(self, phase: str) -> None:
        """Die if this phase is the one to die in."""
        how_phase, _, name = self.signal.partition(":")
        if name and how_phase == phase:
            time.sleep(self.after_s)
            os.kill(os.getpid(), getattr(signal, name))
            threading.Event().wait()
        how_phase, _, code = self.exit.partition(":")
        if code and how_phase == phase:
            time.sleep(self.after_s)
            os._exit(int(code))
        if phase == "stream":
            os._exit(1)

    def make_noise(self) -> None:
        """What it prints to its log at the start beyond what llama-server does."""
        error = sys.stderr.buffer
        if self.log_invalid_utf8:
            error.write(b"0.00.000.100 I srv  \xff\xfe\xc3\x28 not UTF-8 \x80\n")
        if self.log_line_bytes:
            error.write(b"x" * self.log_line_bytes + b"\n")
        line = b"0.00.000.100 I srv  " + b"y" * 79 + b"\n"
        for _ in range(self.log_bytes // len(line)):
            error.write(line)
        error.flush()

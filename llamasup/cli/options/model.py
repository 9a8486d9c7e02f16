"""The options that describe one model, for every command that takes one."""

from __future__ import annotations

from typing import Annotated, Any, Final, get_args

import typer

from llamasup.cli.command_group import Command
from llamasup.cli.options.groups import Group, Option, number, switch, text
from llamasup.cli.options.parsers import one_of
from llamasup.llama_server.settings import FlashAttn, GpuLayers, Profile, Settings

__all__ = ["SETTINGS", "WithExtra"]

_DASHES = "llamasup.after_dashes"


class WithExtra(Command):
    """Remembers the arguments after ``--``: the parser does not mark them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_DASHES] = args[args.index("--") + 1 :] if "--" in args else []
        return super().parse_args(ctx, args)


def _extra_arguments(ctx: typer.Context, extra: list[str] | None) -> tuple[str, ...]:
    """llama-server's own flags. A second argument before ``--`` is an error."""
    given, after = extra or [], ctx.meta[_DASHES]
    if len(given) > len(after):
        raise typer.BadParameter(
            f"unexpected argument {given[0]!r}: put llama-server's flags after --, and quote spaces."
        )
    return tuple(given)


def _gpu_layers(text: str | int) -> GpuLayers:
    match text:
        case "auto" | "all":
            return text
        case int():
            return text
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is not a number of layers, auto or all.")
    return int(text)


_PROFILES: Final = get_args(Profile)

_EXTRA = Option(
    "extra",
    default=(),
    annotation=Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- LLAMA-SERVER FLAGS]", help="Passed on to llama-server unchanged.", show_default=False
        ),
    ],
    typer_default=None,
    convert=_extra_arguments,
    to_arguments=lambda flags: ["--", *flags],
)

SETTINGS = Group(
    (
        text(
            "--profile",
            "|".join(_PROFILES),
            "What to optimize for; plain passes only the flags that you set.",
            read=one_of(*_PROFILES),
        ),
        text("--alias", "NAME", "Name of the model for clients."),
        number("--ctx-size", "TOKENS", "Context size of one request."),
        number("--parallel", "N", "Number of slots: how many requests run at the same time."),
        text("--gpu-layers", "N|auto|all", "Number of layers on the GPU.", read=_gpu_layers),
        number("--threads", "N", "Number of CPU threads."),
        text("--kv-type", "TYPE", "Type of the KV cache, such as q8_0 or f16."),
        text("--flash-attn", "on|off|auto", "Use flash attention.", read=one_of(*get_args(FlashAttn))),
        text("--draft-model", "PATH", "Small model for speculative decoding."),
        text("--mmproj", "PATH", "Projector for images or sound."),
        switch(
            "--no-memory-check",
            "Start even if the model does not seem to fit in memory.",
            field="check_memory",
            off=True,
            on=False,
        ),
        switch("--keep-slots", "Save the slots' caches to disk while the model is unloaded."),
        _EXTRA,  # last: no option may follow its dashes
    ),
    make=Settings,
)

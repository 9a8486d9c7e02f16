"""The options that describe one model, declared once for every command that takes a model.

A command names a parameter ``settings``; ``takes_model_options`` puts the options in its place, so that
Typer sees each of them and the command sees what they mean.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from llamasup.cli.values import whole_number
from llamasup.core.settings import FlashAttn, GpuLayers, Profile, Settings

__all__ = ["Extra", "WithExtra", "seen_with", "takes_model_options"]

_DASHES = "llamasup.after_dashes"
_FLASH: tuple[FlashAttn, ...] = get_args(FlashAttn)
_PROFILES: tuple[Profile, ...] = get_args(Profile)


def _option(name: str, metavar: str, help: str, **how: Any) -> Any:
    return typer.Option(name, metavar=metavar, help=help, **how)


def _number(name: str, metavar: str, help: str) -> Any:
    return Annotated[int | None, _option(name, metavar, help, parser=whole_number)]


def _text(name: str, metavar: str, help: str) -> Any:
    return Annotated[str | None, _option(name, metavar, help)]


_OPTIONS: dict[str, Any] = {
    "profile": _text(
        "--profile", "|".join(_PROFILES), "What to favour; plain passes only what is asked for."
    ),
    "alias": _text("--alias", "NAME", "The model's name for clients."),
    "ctx_size": _number("--ctx-size", "TOKENS", "Context of one request."),
    "parallel": _number("--parallel", "N", "Requests served at the same time."),
    "gpu_layers": _text("--gpu-layers", "N|auto|all", "Layers to keep on the GPU."),
    "threads": _number("--threads", "N", "Threads that compute."),
    "kv_type": _text("--kv-type", "TYPE", "Type of the KV cache: q8_0, f16, …"),
    "flash_attn": _text("--flash-attn", "on|off|auto", "Flash attention."),
    "draft_model": _text("--draft-model", "PATH", "Small model that guesses ahead."),
    "mmproj": _text("--mmproj", "PATH", "Multimodal projector."),
    "no_memory_check": Annotated[
        bool, typer.Option("--no-memory-check", help="Start even if it seems not to fit in memory.")
    ],
}

Extra = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- LLAMA-SERVER FLAGS]", help="Passed on to llama-server as they are.", show_default=False
    ),
]


class WithExtra(TyperCommand):
    """Remembers what came after ``--``, which the parser itself forgets."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_DASHES] = args[args.index("--") + 1 :] if "--" in args else []
        return super().parse_args(ctx, args)


def takes_model_options(command: Callable[..., None]) -> Callable[..., None]:
    """``command(ctx, …, settings, …)`` as Typer shall see it."""
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters
    parameters: list[inspect.Parameter] = []
    for name, parameter in own.items():
        if name == "settings":
            options = {"extra": Extra, **_OPTIONS}
            parameters += [_parameter(each, options[each]) for each in options]
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    @functools.wraps(command)
    def with_settings(ctx: typer.Context, **given: Any) -> None:
        options = {name: given.pop(name) for name in _OPTIONS}
        extra = _after_dashes(ctx, given.pop("extra"))
        command(ctx, **given, settings=_settings(extra=extra, **options))

    return seen_with(with_settings, parameters)


def seen_with(command: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """``command``, of which Typer sees these parameters."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    default = False if name == "no_memory_check" else None
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
    )


def _after_dashes(ctx: typer.Context, extra: list[str] | None) -> tuple[str, ...]:
    """llama-server's own flags. Without the dashes a second argument is a mistake, not a flag."""
    given, after = extra or [], ctx.meta[_DASHES]
    if len(given) > len(after):
        raise typer.BadParameter(
            f"unexpected argument {given[0]!r}. llama-server's own flags come after --, "
            "and a path with spaces needs quotes."
        )
    return tuple(given)


def _settings(
    *,
    flash_attn: str | None,
    gpu_layers: str | None,
    profile: str | None,
    no_memory_check: bool,
    **as_given: Any,
) -> Settings:
    """Checked for what no plan could make sense of."""
    return Settings(
        flash_attn=_one_of("--flash-attn", flash_attn, _FLASH),
        gpu_layers=_gpu_layers(gpu_layers),
        profile=_one_of("--profile", profile, _PROFILES),
        check_memory=not no_memory_check,
        **as_given,
    )


def _gpu_layers(text: str | None) -> GpuLayers | None:
    match text:
        case None | "auto" | "all":
            return text
    if not text.isdecimal():
        raise typer.BadParameter(f"--gpu-layers takes a number of layers, 'auto' or 'all', not {text!r}.")
    return int(text)


def _one_of(option: str, text: str | None, allowed: tuple[Any, ...]) -> Any:
    if text is None or text in allowed:
        return text
    raise typer.BadParameter(f"{option} takes {', '.join(allowed[:-1])} or {allowed[-1]}, not {text!r}.")

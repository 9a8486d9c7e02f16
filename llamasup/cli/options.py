"""The options that commands share, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamasup.core.settings import FlashAttn, GpuLayers, Settings

__all__ = [
    "Alias",
    "ApiKeyFile",
    "CtxSize",
    "DraftModel",
    "DrainTimeout",
    "Events",
    "Extra",
    "FlashAttention",
    "GpuLayersOption",
    "Host",
    "InsecureNoAuth",
    "Json",
    "KvType",
    "LogFormat",
    "LogLevel",
    "Mmproj",
    "Model",
    "NoWarmup",
    "Parallel",
    "Port",
    "ReadyFile",
    "RuntimeOption",
    "StopTimeout",
    "Threads",
    "read_settings",
]


def _whole_number(text: str | int) -> int:
    # Typer's own message does not say what it saw.
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number.") from None


def _seconds(text: str | float) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number of seconds.") from None
    if not 0 <= seconds < float("inf"):
        raise typer.BadParameter(f"{text!r} is not a time that can be waited.")
    return seconds


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file, or 'demo'.", show_default=False)]
Extra = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- LLAMA-SERVER FLAGS]", help="Passed on to llama-server as they are.", show_default=False
    ),
]

Host = Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")]
Port = Annotated[
    int,
    typer.Option(
        "--port", parser=_whole_number, metavar="N", help="Port to listen on; 0 takes any free one."
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file", metavar="PATH", help="File with one key a line; or set $LLAMASUP_API_KEY."
    ),
]
InsecureNoAuth = Annotated[
    bool,
    typer.Option("--insecure-no-auth", help="Allow another address than loopback without a key."),
]

RuntimeOption = Annotated[
    str | None,
    typer.Option(
        "--runtime", metavar="PATH|NAME|embedded", help="The llama-server to use; or set $LLAMASUP_RUNTIME."
    ),
]
Alias = Annotated[
    str | None,
    typer.Option("--alias", metavar="NAME", help="The model's name for clients."),
]
CtxSize = Annotated[
    int | None,
    typer.Option("--ctx-size", parser=_whole_number, metavar="TOKENS", help="Context of one request."),
]
Parallel = Annotated[
    int | None,
    typer.Option("--parallel", parser=_whole_number, metavar="N", help="Requests served at the same time."),
]
GpuLayersOption = Annotated[
    str | None,
    typer.Option("--gpu-layers", metavar="N|auto|all", help="Layers to keep on the GPU."),
]
Threads = Annotated[
    int | None, typer.Option("--threads", parser=_whole_number, metavar="N", help="Threads that compute.")
]
KvType = Annotated[
    str | None,
    typer.Option("--kv-type", metavar="TYPE", help="Type of the KV cache: q8_0, f16, …"),
]
FlashAttention = Annotated[
    str | None,
    typer.Option("--flash-attn", metavar="on|off|auto", help="Flash attention."),
]
DraftModel = Annotated[
    str | None,
    typer.Option("--draft-model", metavar="PATH", help="Small model that guesses ahead."),
]
Mmproj = Annotated[
    str | None,
    typer.Option("--mmproj", metavar="PATH", help="Multimodal projector."),
]

NoWarmup = Annotated[
    bool,
    typer.Option("--no-warmup", help="Serve without the proof of a real token."),
]
DrainTimeout = Annotated[
    float,
    typer.Option(
        "--drain-timeout",
        parser=_seconds,
        metavar="SECONDS",
        help="How long requests in flight may finish at a stop.",
    ),
]
StopTimeout = Annotated[
    float,
    typer.Option(
        "--stop-timeout",
        parser=_seconds,
        metavar="SECONDS",
        help="How long llama-server may take to end before it is killed.",
    ),
]
ReadyFile = Annotated[
    Path | None,
    typer.Option(
        "--ready-file",
        metavar="PATH",
        help="Written with the address once requests are served; removed at the stop.",
    ),
]
Events = Annotated[
    str | None,
    typer.Option("--events", metavar="jsonl", help="Events on standard output, one object a line."),
]
LogLevel = Annotated[str, typer.Option("--log-level", metavar="debug|info|warning|error")]
LogFormat = Annotated[str, typer.Option("--log-format", metavar="text|json")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def read_settings(
    *,
    alias: str | None,
    ctx_size: int | None,
    parallel: int | None,
    gpu_layers: str | None,
    threads: int | None,
    kv_type: str | None,
    flash_attn: str | None,
    draft_model: str | None,
    mmproj: str | None,
    extra: tuple[str, ...],
) -> Settings:
    """The options that describe the model, checked for what no plan could make sense of."""
    return Settings(
        alias=alias,
        ctx_size=ctx_size,
        parallel=parallel,
        gpu_layers=_gpu_layers(gpu_layers),
        threads=threads,
        kv_type=kv_type,
        flash_attn=_flash_attn(flash_attn),
        draft_model=draft_model,
        mmproj=mmproj,
        extra=extra,
    )


def _gpu_layers(text: str | None) -> GpuLayers | None:
    match text:
        case None | "auto" | "all":
            return text
    if not text.isdecimal():
        raise typer.BadParameter(f"--gpu-layers takes a number of layers, 'auto' or 'all', not {text!r}.")
    return int(text)


def _flash_attn(text: str | None) -> FlashAttn | None:
    match text:
        case None | "on" | "off" | "auto":
            return text
    raise typer.BadParameter(f"--flash-attn takes on, off or auto, not {text!r}.")

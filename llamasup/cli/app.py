"""The commands and their options. What a command does is imported when it runs: ``--help`` must be quick."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from llamasup import __version__
from llamasup.cli import options as o

__all__ = ["app"]

_DASHES = "llamasup.after_dashes"


class _WithExtra(TyperCommand):
    """Remembers what came after ``--``, which the parser itself forgets."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_DASHES] = args[args.index("--") + 1 :] if "--" in args else []
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="llamasup",
    help="Keeps llama.cpp's llama-server running: right flags, proven start, honest end.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich takes longer to import than everything else that --help needs
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"llamasup {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(cls=_WithExtra)
def run(
    ctx: typer.Context,
    model: o.Model,
    extra: o.Extra = None,
    host: o.Host = "127.0.0.1",
    port: o.Port = 8080,
    api_key_file: o.ApiKeyFile = None,
    insecure_no_auth: o.InsecureNoAuth = False,
    runtime: o.RuntimeOption = None,
    alias: o.Alias = None,
    ctx_size: o.CtxSize = None,
    parallel: o.Parallel = None,
    gpu_layers: o.GpuLayersOption = None,
    threads: o.Threads = None,
    kv_type: o.KvType = None,
    flash_attn: o.FlashAttention = None,
    draft_model: o.DraftModel = None,
    mmproj: o.Mmproj = None,
    no_warmup: o.NoWarmup = False,
    drain_timeout: o.DrainTimeout = 30.0,
    stop_timeout: o.StopTimeout = 10.0,
    ready_file: o.ReadyFile = None,
    events: o.Events = None,
    log_level: o.LogLevel = "info",
    log_format: o.LogFormat = "text",
) -> None:
    """Serve one model in the foreground."""
    from llamasup.cli.run import OutputOptions, run_command

    settings = o.read_settings(
        alias=alias,
        ctx_size=ctx_size,
        parallel=parallel,
        gpu_layers=gpu_layers,
        threads=threads,
        kv_type=kv_type,
        flash_attn=flash_attn,
        draft_model=draft_model,
        mmproj=mmproj,
        extra=_after_dashes(ctx, extra),
    )
    output = OutputOptions(events=events, log_level=log_level, log_format=log_format)
    sys.exit(
        run_command(
            model,
            settings,
            output,
            began_s=ctx.obj,
            host=host,
            port=port,
            runtime=runtime,
            api_key_file=api_key_file,
            insecure_no_auth=insecure_no_auth,
            warm_up=not no_warmup,
            drain_timeout_s=drain_timeout,
            stop_timeout_s=stop_timeout,
            ready_file=ready_file,
        )
    )


@app.command(cls=_WithExtra)
def plan(
    ctx: typer.Context,
    model: o.Model,
    extra: o.Extra = None,
    runtime: o.RuntimeOption = None,
    alias: o.Alias = None,
    ctx_size: o.CtxSize = None,
    parallel: o.Parallel = None,
    gpu_layers: o.GpuLayersOption = None,
    threads: o.Threads = None,
    kv_type: o.KvType = None,
    flash_attn: o.FlashAttention = None,
    draft_model: o.DraftModel = None,
    mmproj: o.Mmproj = None,
    json: o.Json = False,
) -> None:
    """Show the command line that run would start, with a reason for every flag; start nothing."""
    from llamasup.cli.plan import plan_command

    settings = o.read_settings(
        alias=alias,
        ctx_size=ctx_size,
        parallel=parallel,
        gpu_layers=gpu_layers,
        threads=threads,
        kv_type=kv_type,
        flash_attn=flash_attn,
        draft_model=draft_model,
        mmproj=mmproj,
        extra=_after_dashes(ctx, extra),
    )
    sys.exit(plan_command(model, settings, runtime=runtime, json=json))


def _after_dashes(ctx: typer.Context, extra: list[str] | None) -> tuple[str, ...]:
    """llama-server's own flags. Without the dashes a second argument is a mistake, not a flag."""
    given, after = extra or [], ctx.meta[_DASHES]
    if len(given) > len(after):
        raise typer.BadParameter(
            f"unexpected argument {given[0]!r}. llama-server's own flags come after --, "
            "and a path with spaces needs quotes."
        )
    return tuple(given)

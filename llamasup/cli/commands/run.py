"""Serves one model in the foreground (``llamasup run``)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from llamasup.cli.command_group import command_set, flag
from llamasup.cli.gc_pause import collect_again
from llamasup.cli.options import shared as o
from llamasup.cli.options.groups import takes_groups
from llamasup.cli.options.model import WithExtra
from llamasup.features import attached

if TYPE_CHECKING:
    from llamasup.cli.output.view import View
    from llamasup.core.supervision.events import Bus
    from llamasup.service.hosting import Service

commands = command_set()


@commands.command(cls=WithExtra)
@takes_groups
def run(
    ctx: typer.Context,
    model: o.Model,
    *,
    listening: o.Listening,
    runtime: o.RuntimeOption = None,
    settings: o.ModelSettings,
    serving: o.Serving,
    batches: Annotated[
        bool,
        flag("--batches", "Serve /v1/files and /v1/batches, the API for batches.", rich_help_panel=o.ACCESS),
    ] = False,
    foreground: o.Foreground,
    parent: o.ParentProgram,
    logging: o.Logging,
) -> int:
    """Serve one model in the foreground."""
    from llamasup.cli.foreground import OutputOptions, open_sockets, serve_until_stopped

    if parent["sidecar"] and not o.was_given(ctx, "port"):
        listening["port"] = 0

    def prepare() -> Callable[[Bus], Service]:
        from llamasup.core.auth.key_source import environment_keys
        from llamasup.features import key_of_option
        from llamasup.service.hosting import Service
        from llamasup.service.options import RunOptions

        if batches:
            serving["batches"] = replace(key_of_option("batches", "--batches").default, enabled=True)
        options = RunOptions(
            model=model,
            settings=settings,
            api_keys=environment_keys(os.environ),
            sockets=open_sockets(),
            runtime=runtime,
            **listening,
            **serving,
            **foreground,
        )
        return partial(Service, options)

    def find_or_download(view: View) -> None:
        from llamasup.core.hub.reference import is_reference
        from llamasup.core.models.by_name import file_of

        nonlocal model, settings
        if (found := file_of(model)) != model:
            if not settings.alias and not model.lower().endswith(".gguf"):
                settings = replace(settings, alias=model)
            model = found
        if is_reference(model):
            collect_again()  # a download may take hours
            for fetch_missing in attached("fetch_missing"):
                fetch_missing(model, view)

    output = OutputOptions(**parent, **logging)
    return serve_until_stopped(
        prepare, output, ctx.obj, "checking the model and the machine", before_serving=find_or_download
    )

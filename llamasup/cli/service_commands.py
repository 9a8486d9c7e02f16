"""``llamasup service …``: the commands and their options. What they do is in ``llamasup.cli.service``."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from llamasup.cli import options as o
from llamasup.cli.model_options import WithExtra, seen_with, takes_model_options
from llamasup.core.settings import Settings

__all__ = ["service"]

service = typer.Typer(
    name="service",
    help="Run a model as a service of systemd.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_NO_SETTINGS = Settings()

User = Annotated[bool, typer.Option("--user", help="Of your own service manager, not the system's.")]
Name = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="The unit is llamasup-NAME.service; default: the model's."),
]
RunAs = Annotated[
    str | None,
    typer.Option(
        "--run-as", metavar="USER", help="Who the service is; default: a user who exists only while it runs."
    ),
]
Now = Annotated[bool, typer.Option("--now", help="Also start it, now and at every boot.")]
Service = Annotated[str, typer.Argument(metavar="NAME|MODEL", show_default=False)]

_SHARED = ("model", "user", "name", "run_as", "json")


def _takes_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """``command(ctx, shared…, given)``: what only ``llamasup run`` understands comes in one dict."""

    def template(
        ctx: typer.Context,
        model: o.Model,
        user: User = False,
        name: Name = None,
        run_as: RunAs = None,
        host: o.Host = "127.0.0.1",
        port: o.Port = 8080,
        api_key_file: o.ApiKeyFile = None,
        insecure_no_auth: o.InsecureNoAuth = False,
        runtime: o.RuntimeOption = None,
        settings: Settings = _NO_SETTINGS,
        no_warmup: o.NoWarmup = False,
        wait_timeout: o.WaitTimeout = 120.0,
        drain_timeout: o.DrainTimeout = 30.0,
        stop_timeout: o.StopTimeout = 10.0,
        log_level: o.LogLevel = "info",
        log_format: o.LogFormat = "text",
        json: o.Json = False,
    ) -> None:
        raise AssertionError("only its signature is used")

    own = [
        parameter.replace(annotation=get_type_hints(command, include_extras=True)[parameter.name])
        for parameter in inspect.signature(command).parameters.values()
        if parameter.name not in (*_SHARED, "ctx", "given")
    ]
    hints = get_type_hints(template, include_extras=True)
    taken = [
        each.replace(annotation=hints[each.name]) for each in inspect.signature(template).parameters.values()
    ]

    @functools.wraps(command)
    def sorted_out(ctx: typer.Context, **values: Any) -> None:
        shared = {name: values.pop(name) for name in (*_SHARED, *(each.name for each in own))}
        command(ctx, **shared, given=values)

    return seen_with(sorted_out, [*taken, *own])


@service.command("print", cls=WithExtra)
@takes_model_options
@_takes_run_options
def print_(
    ctx: typer.Context,
    model: str,
    user: bool,
    name: str | None,
    run_as: str | None,
    json: bool,
    given: dict[str, Any],
) -> None:
    """Show the unit that install would write; takes the options of run."""
    from llamasup.cli.service import print_command

    sys.exit(print_command(model, user=user, name=name, run_as=run_as, json=json, given=given))


@service.command(cls=WithExtra)
@takes_model_options
@_takes_run_options
def install(
    ctx: typer.Context,
    model: str,
    user: bool,
    name: str | None,
    run_as: str | None,
    json: bool,
    given: dict[str, Any],
    now: Now = False,
) -> None:
    """Write the unit for a model, or change it; takes the options of run."""
    from llamasup.cli.service import install_command

    sys.exit(install_command(model, user=user, name=name, run_as=run_as, json=json, given=given, now=now))


@service.command()
def uninstall(name: Service, user: User = False, json: o.Json = False) -> None:
    """Stop a service and remove its unit."""
    from llamasup.cli.service import uninstall_command

    sys.exit(uninstall_command(name, user=user, json=json))


@service.command()
def status(name: Service, user: User = False, json: o.Json = False) -> None:
    """Show whether a service is installed, and how it does."""
    from llamasup.cli.service import status_command

    sys.exit(status_command(name, user=user, json=json))

"""``llamasup service …``: the commands and their options. What they do is in ``llamasup.cli.service``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from llamasup.cli import options as o
from llamasup.cli.model_options import WithExtra
from llamasup.cli.option_groups import Group, switch, takes_groups, text

__all__ = ["service"]

service = typer.Typer(
    name="service",
    help="Run a model as a service of systemd.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_USER_HELP = "Of your own service manager, not the system's."
User = Annotated[bool, typer.Option("--user", help=_USER_HELP)]
_UNIT = Group(
    (
        switch("--user", "user", _USER_HELP),
        text("--name", "name", "NAME", "The unit is llamasup-NAME.service; default: the model's."),
        text(
            "--run-as",
            "run_as",
            "USER",
            "Who the service is; default: a user who exists only while it runs.",
        ),
    )
)
UnitOptions = Annotated[o.Given, _UNIT]
Now = Annotated[bool, typer.Option("--now", help="Also start it, now and at every boot.")]
Service = Annotated[str, typer.Argument(metavar="NAME|MODEL", show_default=False)]


@service.command("print", cls=WithExtra)
@takes_groups
def print_(
    ctx: typer.Context,
    model: o.Model,
    *,
    unit: UnitOptions,
    listening: o.Listening,
    runtime: o.RuntimeOption = None,
    settings: o.ModelSettings,
    serving: o.Serving,
    logging: o.Logging,
    json: o.Json = False,
) -> None:
    """Show the unit that install would write; takes the options of run."""
    from llamasup.cli.service import print_command

    given = {**listening, **serving, **logging}
    sys.exit(print_command(model, settings, given, runtime=runtime, **unit, json=json))


@service.command(cls=WithExtra)
@takes_groups
def install(
    ctx: typer.Context,
    model: o.Model,
    *,
    unit: UnitOptions,
    listening: o.Listening,
    runtime: o.RuntimeOption = None,
    settings: o.ModelSettings,
    serving: o.Serving,
    logging: o.Logging,
    json: o.Json = False,
    now: Now = False,
) -> None:
    """Write the unit for a model, or change it; takes the options of run."""
    from llamasup.cli.service import install_command

    given = {**listening, **serving, **logging}
    sys.exit(install_command(model, settings, given, runtime=runtime, **unit, json=json, now=now))


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

"""``llamasup service …``: the commands and their options. What they do is in
``llamasup.cli.commands.service``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamasup.cli.options import shared as o
from llamasup.cli.options.groups import Group, switch, takes_groups, text
from llamasup.cli.options.model import WithExtra
from llamasup.llama_server.settings import Settings

if TYPE_CHECKING:
    from llamasup.cli.commands.service_units import Asked

__all__ = ["service"]

service = typer.Typer(
    name="service",
    help="Run llamasup as a service of systemd.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_USER_HELP = "Of your own service manager, not the system's."
User = Annotated[bool, typer.Option("--user", help=_USER_HELP)]
_UNIT = Group(
    (
        switch("--user", "user", _USER_HELP),
        text("--name", "name", "NAME", "The unit is llamasup-NAME.service; default: the model's, or serve."),
        text(
            "--run-as",
            "run_as",
            "USER",
            "Who the service is; default: a user who exists only while it runs.",
        ),
    )
)
UnitOptions = Annotated[o.Given, _UNIT]
# What serve takes and run does not.
_BESIDE = Group(tuple(each for each in o.BESIDE_CONFIG.options if each.field in {"models_dir", "token_file"}))
Beside = Annotated[o.Given, _BESIDE]
Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A GGUF file, org/repo[:quant], an https URL, or 'demo'; left out for many models.",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Serve many models, as this config says.")
]
Now = Annotated[bool, typer.Option("--now", help="Also start it, now and at every boot.")]
Service = Annotated[str, typer.Argument(metavar="NAME|MODEL", show_default=False)]


@service.command("print", cls=WithExtra)
@takes_groups
def print_(
    ctx: typer.Context,
    model: Model = None,
    *,
    config: ConfigFile = None,
    beside: Beside,
    watch: o.Watch = False,
    unit: UnitOptions,
    listening: o.Listening,
    runtime: o.RuntimeOption = None,
    settings: o.ModelSettings,
    serving: o.Serving,
    logging: o.Logging,
    json: o.Json = False,
) -> None:
    """Show the unit that install would write; takes the options of run, or of serve."""
    from llamasup.cli.commands.service import print_command

    given = {**listening, **serving, **logging}
    asked = _asked(ctx, model, settings, given, config, {**beside, "watch": watch}, runtime=runtime, **unit)
    sys.exit(print_command(asked, json=json))


@service.command(cls=WithExtra)
@takes_groups
def install(
    ctx: typer.Context,
    model: Model = None,
    *,
    config: ConfigFile = None,
    beside: Beside,
    watch: o.Watch = False,
    unit: UnitOptions,
    listening: o.Listening,
    runtime: o.RuntimeOption = None,
    settings: o.ModelSettings,
    serving: o.Serving,
    logging: o.Logging,
    json: o.Json = False,
    now: Now = False,
) -> None:
    """Write the unit, or change it: for MODEL with the options of run, or for many with those of serve."""
    from llamasup.cli.commands.service import install_command

    given = {**listening, **serving, **logging}
    asked = _asked(ctx, model, settings, given, config, {**beside, "watch": watch}, runtime=runtime, **unit)
    sys.exit(install_command(asked, json=json, now=now))


def _asked(
    ctx: typer.Context,
    model: str | None,
    settings: Settings,
    given: o.Given,
    config: Path | None,
    beside: o.Given,
    **unit: Any,
) -> Asked:
    from llamasup.cli.commands.service_units import Asked

    flags = {each.name or "": each.opts[0] for each in ctx.command.params}
    chosen = {name: flag for name, flag in flags.items() if o.was_given(ctx, name)}
    return Asked(
        model=model, settings=settings, given=given, config=config, beside=beside, chosen=chosen, **unit
    )


@service.command()
def uninstall(name: Service, user: User = False, json: o.Json = False) -> None:
    """Stop a service and remove its unit."""
    from llamasup.cli.commands.service import uninstall_command

    sys.exit(uninstall_command(name, user=user, json=json))


@service.command()
def status(name: Service, user: User = False, json: o.Json = False) -> None:
    """Show whether a service is installed, and how it does."""
    from llamasup.cli.commands.service import status_command

    sys.exit(status_command(name, user=user, json=json))

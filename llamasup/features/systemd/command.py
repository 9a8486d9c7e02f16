"""Prints, writes and removes a systemd unit, and shows its state (``llamasup service …``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from llamasup.cli.command_group import argument, command_set, flag
from llamasup.cli.options import shared as o
from llamasup.cli.options.groups import Group, path, switch, takes_groups, text
from llamasup.cli.options.model import SETTINGS, WithExtra
from llamasup.cli.output.error_report import guarded
from llamasup.cli.output.layout import table
from llamasup.cli.output.results import write_json, write_shown
from llamasup.cli.output.view import View
from llamasup.core.settings.model import Settings
from llamasup.errors import ServiceManagerFailed, UsageInvalid
from llamasup.features.systemd.systemctl import Units
from llamasup.features.systemd.unit_file import Unit, checked_name, name_for, own_folders, unit_text

if TYPE_CHECKING:
    from llamasup.core.config.config_keys import Config
    from llamasup.features.systemd.installation import Account

commands = command_set("service", "Run llamasup as a systemd service.")

_USER_HELP = "Use the service manager of your user (systemctl --user), not the system's."
User = Annotated[bool, flag("--user", _USER_HELP)]
_SERVE_ONLY = ("models_dir", "token_file")
_ARGUMENTS = Group(
    (
        path("--config", "Serve the models of this config.", metavar="FILE"),
        *(option for option in o.CONFIG_OVERRIDES.options if option.field in _SERVE_ONLY),
        switch("--watch", o.WATCH_HELP),
        switch("--user", _USER_HELP),
        text(
            "--name",
            "NAME",
            "Name of the service (unit: llamasup-NAME.service). Default: the model's name, or serve.",
        ),
        text(
            "--run-as",
            "USER",
            "User that runs the service. Default: a dynamic user, which exists only while the service runs.",
        ),
        *o.LISTENING.options,
        text("--runtime", o.RUNTIME_METAVAR, o.RUNTIME_HELP),
        *SETTINGS.options,
        *o.SERVING.options,
        *o.LOGGING.options,
    )
)
Arguments = Annotated[o.OptionValues, _ARGUMENTS]
Model = Annotated[
    str | None,
    argument(
        "MODEL", "A GGUF file, org/repo[:quant], an https URL, or 'demo'. Without MODEL: serve many models."
    ),
]
Now = Annotated[bool, flag("--now", "Also start the service, now and at every boot.")]
Service = Annotated[str, argument("NAME|MODEL", "The name of the service, or its model.")]


@commands.command("print", cls=WithExtra)
@takes_groups
@guarded
def print_(
    view: View, ctx: typer.Context, model: Model = None, *, arguments: Arguments, json: o.Json = False
) -> None:
    """Print the unit file that install would write.

    With MODEL, the options are those of run. Without MODEL, they are those of serve.
    """
    unit = _UnitArguments(ctx, model, arguments).unit()
    text = unit_text(unit)
    path = str(Units(unit.of_user).path(unit.file_name))
    shown = {"unit": unit.file_name, "path": path, "text": text}
    write_shown(shown, text.rstrip("\n"), json=json)


@commands.command(cls=WithExtra)
@takes_groups
@guarded
def install(
    view: View,
    ctx: typer.Context,
    model: Model = None,
    *,
    arguments: Arguments,
    json: o.Json = False,
    now: Now = False,
) -> None:
    """Write or update the unit file of a service.

    With MODEL, the options are those of run. Without MODEL, they are those of serve.
    """
    units = Units(arguments["user"])
    units.require_permission()
    unit = _UnitArguments(ctx, model, arguments).unit()
    path = units.path(unit.file_name)
    was_there = units.own(unit.file_name) is not None
    changed = units.write(unit.file_name, unit_text(unit))
    _say(view, f"{'Changed' if was_there else 'Wrote'} {path}" if changed else f"{path} is up to date")
    units.systemctl("daemon-reload")
    if now:
        units.systemctl("enable", unit.file_name)
        # systemctl waits until the service is ready. A changed unit needs a restart.
        units.systemctl("restart" if changed else "start", unit.file_name, timeout_s=None)
        _say(view, f"{unit.file_name} is ready, and will start at every boot")
    else:
        prefix = "systemctl --user" if unit.of_user else "systemctl"
        _say(view, f"  → Start it: {prefix} enable --now {unit.file_name}")
    if unit.of_user:
        _say(view, "  → It stops when you log out. To keep it running: loginctl enable-linger")
    if os.environ.get("LLAMASUP_API_KEY") and _has_no_key(unit):
        _say(view, "  → The service does not see your $LLAMASUP_API_KEY: use --api-key-file.")
    if json:
        write_json({"unit": unit.file_name, "path": str(path), "changed": changed, "started": now})


@commands.command()
@guarded
def uninstall(view: View, name: Service, user: User = False, json: o.Json = False) -> None:
    """Stop a service and remove its unit file."""
    units, file_name = Units(user), _file_name(name)
    units.require_permission()
    path = units.path(file_name)
    removed = units.own(file_name) is not None
    if removed:
        units.systemctl("disable", "--now", file_name, timeout_s=None)
        units.remove(file_name)
        units.systemctl("daemon-reload")
        with suppress(ServiceManagerFailed):  # a failed unit stays listed without its file
            units.systemctl("reset-failed", file_name)
        _say(view, f"Stopped {file_name} and removed {path}. Its logs remain.")
    else:
        _say(view, f"{path} does not exist.")
    if json:
        write_json({"unit": file_name, "path": str(path), "removed": removed})


@commands.command()
@guarded
def status(view: View, name: Service, user: User = False, json: o.Json = False) -> None:
    """Show whether a service is installed, and its state."""
    units, file_name = Units(user), _file_name(name)
    path = units.path(file_name)
    text = units.read(file_name)
    state = _state(units, file_name)
    shown = {"unit": file_name, "path": str(path), "installed": text is not None, **state}
    as_table = table([(key, _shown(value)) for key, value in shown.items()], indent="")
    write_shown(shown, as_table, json=json)


def _has_no_key(unit: Unit) -> bool:
    """Whether the unit passes no key. A user's own service with a config reads its keys itself."""
    has_file = any(credential.option == "--api-key-file" for credential in unit.credentials)
    return not has_file and not (unit.of_many and unit.of_user)


def _file_name(text: str) -> str:
    """Return the unit of a service, given by its name, its unit or its model."""
    if not PurePath(text).name:
        raise UsageInvalid(
            f"{text!r} is not the name of a service.",
            remedy="Give the name of a service, its unit or its model.",
        )
    name = text.removeprefix("llamasup-").removesuffix(".service") if text.endswith(".service") else text
    return f"llamasup-{checked_name(name_for(name))}.service"


def _state(units: Units, file_name: str) -> Mapping[str, Any]:
    found = units.state(file_name)
    pid, restarts = found.get("MainPID", "0"), found.get("NRestarts", "0")
    memory = found.get("MemoryCurrent", "")
    return {
        "loaded": found.get("LoadState") == "loaded",
        "enabled": found.get("UnitFileState") == "enabled",
        "active": found.get("ActiveState", "unknown"),
        "sub": found.get("SubState", ""),
        "result": found.get("Result", ""),
        "exit_code": int(found.get("ExecMainStatus") or 0),
        "status": found.get("StatusText", ""),
        "pid": int(pid) or None,
        "restarts": int(restarts),
        "since": found.get("ActiveEnterTimestamp") or None,
        "memory_bytes": int(memory) if memory.isdecimal() and int(memory) < 1 << 63 else None,
    }


def _shown(value: object) -> str:
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case _:
            return str(value)


def _say(view: View, text: str) -> None:
    view.say("info", "service", text)


# --- the unit of the options -------------------------------------------------------------------------


_SERVE_NAME = "serve"
# As serve declares them: their default is "as in the config".
_SERVE_OPTIONS = (*o.CONFIG_OVERRIDES.options, *o.LOGGING.options)
# Options of every service.
_UNIT_FIELDS = ("user", "name", "run_as", "json", "now", "runtime")
_SERVE_FIELDS = ("config", "watch", *(option.field for option in _SERVE_OPTIONS))
_ONLY_OF_SERVE = ("config", "watch", *_SERVE_ONLY)


class _UnitArguments:
    """The arguments of ``install`` and ``print``: ``values`` by field, and the given ``flags`` by field."""

    def __init__(self, ctx: typer.Context, model: str | None, values: Mapping[str, Any]) -> None:
        flags = {parameter.name or "": parameter.opts[0] for parameter in ctx.command.params}
        self.flags = {field: flag for field, flag in flags.items() if o.was_given(ctx, field)}
        self.model = model
        self.values = values

    def unit(self) -> Unit:
        """Return the unit. Raises UsageInvalid, ConfigInvalid, and errors of ``run`` or ``serve``."""
        serve_flags = [self.flags[field] for field in _ONLY_OF_SERVE if field in self.flags]
        if self.model is not None:
            if serve_flags:
                raise UsageInvalid(
                    f"MODEL and {serve_flags[0]} exclude each other: a service serves one model, or many.",
                    remedy="Leave one of them out. A config names its own models.",
                )
            return self._run_unit(self.model)
        if "config" not in self.flags and "models_dir" not in self.flags:
            raise UsageInvalid(
                "Nothing to serve: neither MODEL, --config nor --models-dir is given.",
                remedy="Give a MODEL, or --config FILE for many models.",
            )
        run_only = self.flags.keys() - {*_SERVE_FIELDS, *_UNIT_FIELDS}
        if run_only:
            flags, one = sorted(self.flags[field] for field in run_only), len(run_only) == 1
            raise UsageInvalid(
                f"{', '.join(flags)} {'needs' if one else 'need'} MODEL: with --config or --models-dir "
                + ("it is a setting of the config." if one else "they are settings of the config."),
                remedy=f"Set {'it' if one else 'them'} in the config (docs/configuration.md).",
            )
        return self._serve_unit()

    @property
    def _account(self) -> Account:
        from llamasup.features.systemd.installation import Account

        return Account(of_user=self.values["user"], run_as=self.values["run_as"])

    def _run_unit(self, model: str) -> Unit:
        from llamasup.features.systemd.service_units import ServiceRequest, run_unit

        options = (*o.LISTENING.options, *o.SERVING.options, *o.LOGGING.options)
        name = self.values["name"]
        request = ServiceRequest(
            model=model,
            settings=Settings(**{option.field: self.values[option.field] for option in SETTINGS.options}),
            given={option.field: self.values[option.field] for option in options},
            arguments=o.run_arguments,
            runtime=self.values["runtime"],
            name=name,
            account=self._account,
        )
        return run_unit(request, os.environ)

    def _serve_unit(self) -> Unit:
        from llamasup.cli.commands.serve import with_overrides
        from llamasup.core.config.config_keys import Config
        from llamasup.core.config.reading import find_config
        from llamasup.core.system.storage.paths import expanded
        from llamasup.features.systemd.installation import Obstacles, plain_path
        from llamasup.features.systemd.service_units import ServeRequest, serve_unit, service_environment

        obstacles, values = Obstacles(), self.values
        name = values["name"] or _SERVE_NAME
        with obstacles:
            self._account.check()
        with obstacles:
            checked_name(name)
        path = None if values["config"] is None else plain_path(find_config(values["config"], os.environ))
        environ = service_environment(name, self._account, os.environ)
        folders = tuple(plain_path(expanded(folder)) for folder in values["models_dir"])
        config = Config()
        if path is not None:
            # What the other checks use if the config has errors: it may have a key.
            config = replace(config, auth=replace(config.auth, insecure_no_auth=True))
            with obstacles:
                config = _checked_config(path, environ, own_folders(name), more_models=bool(folders))
        given = {
            option.field: values[option.field] if option.field in self.flags else option.default
            for option in _SERVE_OPTIONS
        }
        given |= {"models_dir": tuple(map(str, folders)), "watch": values["watch"]}
        for field, value in given.items():
            if isinstance(value, Path):
                given[field] = plain_path(expanded(str(value)))
        request = ServeRequest(
            name=name,
            config=with_overrides(config, folders, watch=values["watch"], token_file=given["token_file"]),
            config_file=path,
            given=given,
            arguments=o.serve_arguments,
            runtime=values["runtime"],
            account=self._account,
        )
        return serve_unit(request, os.environ, obstacles)


def _checked_config(
    path: Path, environ: Mapping[str, str], own: tuple[str, ...], *, more_models: bool
) -> Config:
    """Return the config as the service will read it. Raises ConfigInvalid with every problem."""
    from msgspec import structs

    from llamasup.core.config.issues import ConfigIssues
    from llamasup.core.config.reading import read
    from llamasup.core.http.address import UnixAddress
    from llamasup.features import config_keys
    from llamasup.service.config_check import environment_issues

    def is_own(path: PurePath) -> bool:
        return any(path.is_relative_to(folder) for folder in own)

    reading, issues = read(path, environ, config_keys(), more_models=more_models)
    config = reading.config
    log = config.http.access_log
    # systemd creates its own folders at its start. Whether it needs a key depends on more than the config.
    to_check = structs.replace(
        config,
        listen=tuple(
            address
            for address in config.listen
            if not (isinstance(address, UnixAddress) and is_own(PurePath(address.path)))
        ),
        http=structs.replace(config.http, access_log=None if log is None or is_own(log) else log),
        auth=structs.replace(config.auth, insecure_no_auth=True),
    )
    issues += environment_issues(replace(reading, config=to_check), environ)
    if issues:
        raise ConfigIssues(str(path), issues)
    return config

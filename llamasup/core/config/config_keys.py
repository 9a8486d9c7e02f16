"""The configuration of ``serve``: the settings of its sections and models, and those at the top of the file.

The reader, the JSON Schema and the lists in docs/configuration.md come from these declarations, and from the
``ConfigKey`` of each feature that has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args

from msgspec.structs import replace

from llamasup.core.http.address import Address, TcpAddress, UnixAddress
from llamasup.core.models.rules import ModelRule
from llamasup.core.settings.declaration import (
    ConfigKey,
    Place,
    Setting,
    SettingGroup,
    default_text,
    setting,
    settings_of,
)
from llamasup.core.settings.kinds import (
    Boolean,
    FilePath,
    HostName,
    Integer,
    JsonValues,
    Kind,
    Listen,
    Many,
    MediaHost,
    Name,
    Named,
    OneOf,
    Origin,
    ProxyAddress,
    RuntimeName,
    Section,
    SizeText,
    Time,
)
from llamasup.core.settings.model import SLOTS_BYTES, ModelEntry, ModelSettings
from llamasup.core.settings.units import Size

T = TypeVar("T")

Cache = Literal["huggingface", "llama.cpp"]

_LOOPBACK: Final = (TcpAddress("127.0.0.1", 8080),)


class RuntimeChoice(SettingGroup, frozen=True, kw_only=True):
    """The llama-server to use."""

    path: str | None = setting(RuntimeName(), "auto: the first llama-server that llamasup finds.", "auto")
    watch: bool = setting(
        Boolean(),
        "Move the models to a new build, if proven, when the link in path changes.",
        unset=False,
    )


class Memory(SettingGroup, frozen=True, kw_only=True):
    """The most memory that all models together may use. They never get memory that other programs use."""

    ram: Size | None = setting(
        SizeText(), "Main memory for models, of this machine or its container.", "all free memory"
    )
    vram: Size | None = setting(SizeText(), "GPU memory for models, on each GPU.", "all free memory")


class Auth(SettingGroup, frozen=True, kw_only=True):
    """API keys. ``$LLAMASUP_API_KEY`` is also a valid key."""

    api_key_file: Path | None = setting(
        FilePath("the path of a key file", hidden=True),
        "The file of API keys, written by llamasup key.",
        "none",
    )
    insecure_no_auth: bool = setting(
        Boolean(),
        "Listen without a key on addresses that other machines can reach.",
        names="rights",
        unset=False,
    )


ApiConfig = Literal["safe", "full"]


class Http(SettingGroup, frozen=True, kw_only=True):
    """Connections of clients, and logs of requests."""

    allow_hosts: tuple[str, ...] = setting(
        Many(HostName()),
        "Further names that the Host header may have.",
        "none",
        unset=(),
    )
    allow_origins: tuple[str, ...] = setting(
        Many(Origin()), "Origins of web pages that may send requests.", "none", unset=()
    )
    trusted_proxies: tuple[str, ...] = setting(
        Many(ProxyAddress()),
        "Reverse proxies whose X-Forwarded-For names the client.",
        "none",
        unset=(),
    )
    remote_media: tuple[str, ...] = setting(
        Many(MediaHost()),
        "Hosts from which llama-server may fetch media.",
        "false",
        unset=(),
    )
    max_body: Size | None = setting(
        SizeText(percent=False),
        "The largest body of a request. llama-server accepts 100 MiB.",
        "100MiB, or 1/64 of the memory if that is less, but at least 32MiB",
    )
    tls_cert: Path | None = setting(
        FilePath("the path of a PEM file"), "The certificate and its chain, to serve https.", "none"
    )
    tls_key: Path | None = setting(
        FilePath("the path of a PEM file"), "The private key of the certificate.", "none"
    )
    stream_keepalive: bool = setting(
        Boolean(),
        "Send SSE comments while a stream waits, so that no proxy closes it.",
        unset=False,
    )
    request_timeout_s: float | None = setting(
        Time(zero_is_none=True), "The longest time for a request.", "no limit"
    )
    access_log: Path | None = setting(
        FilePath("a path, or - for standard error", literal=("-",)),
        "The log file with one line of JSON for each request.",
        "none",
    )
    slow_request_s: float | None = setting(
        Time(zero_is_none=True),
        "Log requests whose response takes longer than this to begin.",
        "no requests are logged",
    )
    ui: bool = setting(Boolean(), "Serve the web console at /llamasup/.", unset=True)
    api_config: ApiConfig = setting(
        OneOf(get_args(ApiConfig)),
        "What a config over the API may change. safe: nothing that names a program, a path, a host or "
        "flags. full: these as well.",
        names="rights",
        unset="safe",
    )


class Slots(SettingGroup, frozen=True, kw_only=True):
    """Conversation caches of unloaded models."""

    keep: bool = setting(
        Boolean(),
        "Save the caches of an unloaded model, and restore them when it loads.",
        unset=False,
    )
    disk: Size = setting(
        SizeText(percent=False), "The disk space for all caches together.", unset=Size(bytes=SLOTS_BYTES)
    )


class Config(SettingGroup, frozen=True, kw_only=True):
    """A configuration. Paths are absolute, times in seconds."""

    listen: tuple[Address, ...] = setting(
        Many(Listen()),
        "The addresses for clients. All TCP addresses have the same port.",
        "127.0.0.1:8080",
        unset=_LOOPBACK,
    )
    runtime: RuntimeChoice = setting(
        Section(RuntimeChoice, short="path"), "The llama-server to use.", "auto", unset=RuntimeChoice()
    )
    models_dir: tuple[Path, ...] = setting(
        Many(FilePath("a folder")),
        "Folders of models to serve, watched for changes.",
        "none",
        unset=(),
    )
    follow_links: bool = setting(
        Boolean(),
        "Follow links out of these folders, only in folders of this user.",
        names="path",
        unset=False,
    )
    caches: tuple[Cache, ...] = setting(
        Many(OneOf(get_args(Cache))),
        "Caches of other programs with models to serve.",
        "none",
        names="path",
        unset=(),
    )
    memory: Memory = setting(
        Section(Memory), "The most memory that all models together may use.", unset=Memory()
    )
    max_loaded: int | None = setting(
        Integer(1), "How many models may be loaded at the same time.", "as many as fit"
    )
    default_model: str | None = setting(
        Name(), "The model for requests that name no model.", "the only model, if there is one"
    )
    swap_after_s: float = setting(
        Time(),
        "How long a request waits before busy models must make room.",
        unset=5.0,
    )
    defaults: ModelSettings = setting(
        Section(ModelSettings, "ModelKeys"), "Settings for all models.", unset=ModelSettings()
    )
    models: Mapping[str, ModelEntry] = setting(
        Named(Section(ModelEntry), pattern=True),
        "Models by name. A name with * or ? is a rule for all matching models; the last rule wins.",
        "the models that llamasup finds",
        unset={},
    )
    groups: Mapping[str, tuple[str, ...]] = setting(
        Named(Many(Name(pattern=True), or_one=False)),
        "Groups of models. On each device, at most one model of a group is loaded.",
        "none",
        unset={},
    )
    auth: Auth = setting(Section(Auth), "API keys.", unset=Auth())
    http: Http = setting(Section(Http), "Connections of clients, and logs of requests.", unset=Http())
    slots: Slots = setting(Section(Slots), "Conversation caches of unloaded models.", unset=Slots())
    watch: bool = setting(Boolean(), "Reload the config when this file changes.", unset=False)

    features: Mapping[str, Any] = {}
    """The values of the keys of features; ``of`` returns them."""
    lines: Mapping[Place, int] = {}
    """The line of each key in the file."""

    def of(self, key: ConfigKey[T]) -> T:
        """Return the value of a feature's key."""
        value: T = self.features.get(key.name, key.default)
        return value

    def value(self, name: str) -> object:
        """Return the value of a key or a field; None for an unknown key."""
        return self.features[name] if name in self.features else getattr(self, name, None)

    def having(self, key: ConfigKey[T], value: T) -> Config:
        """Return this config with another value of a feature's key."""
        return replace(self, features={**self.features, key.name: value})

    @property
    def needs_runtime(self) -> bool:
        """Whether a llama-server of this machine serves any of its models."""
        entries = self.models.values()
        return bool(self.models_dir or self.caches or any(entry.engine is None for entry in entries))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of ``listen``, in the notation of ``--host``: names, addresses and paths of sockets."""
        return tuple(
            address.path if isinstance(address, UnixAddress) else address.host for address in self.listen
        )

    @property
    def port(self) -> int:
        """The port of all TCP addresses in ``listen``; 0 if it has only sockets."""
        return next((address.port for address in self.listen if isinstance(address, TcpAddress)), 0)

    @property
    def default_options(self) -> ModelSettings:
        return self.defaults.over(ModelSettings(keep_slots=self.slots.keep or None))

    @property
    def rules(self) -> tuple[ModelRule, ...]:
        """Settings of models by name and by pattern, in the order of the file."""
        return tuple(
            ModelRule(name, entry.source, entry.aliases, entry.options, entry.where, entry.engine)
            for name, entry in self.models.items()
        )


def keys_of(features: Sequence[ConfigKey[Any]]) -> Mapping[str, tuple[str, Setting]]:
    """List all keys of a config with their fields and declarations, like ``settings_of``."""
    found: dict[str, tuple[str, Setting]] = {}
    for name, declared in settings_of(Config).items():
        found[name] = declared
        found |= {key.name: (key.name, key.setting) for key in features if key.after == name}
    return found


# --- JSON Schema (draft 2020-12) -------------------------------------------------------------------------

_REFERENCE: Final = "reference"


def json_schema(features: Sequence[ConfigKey[Any]]) -> dict[str, Any]:
    """Make the schema of a config with these keys of features.

    Only ``llamasup config check`` checks conditions on several keys.
    """
    definitions: dict[str, Any] = {
        _REFERENCE: {
            "description": "${NAME}: an environment variable; ${NAME:-text} if it may be unset or empty.",
            "type": "string",
            "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-[^{}]*)?\}",
        }
    }
    top = _section(keys_of(features), definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "llamasup's configuration",
        **top,
        "type": "object",
        "$defs": definitions,
    }


def _section(keys: Mapping[str, tuple[str, Setting]], definitions: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {
            name: _described(setting, _of_kind(setting.kind, definitions))
            for name, (_, setting) in keys.items()
        },
    }


def _described(setting: Setting, schema: Mapping[str, Any]) -> dict[str, Any]:
    default = default_text(setting.default)
    about = f"{setting.about} Default: {default}." if default else setting.about
    return {"description": about, **schema}


def _of_kind(kind: Kind, definitions: dict[str, Any]) -> dict[str, Any]:
    match kind:
        case Section(keys, name, short):
            name = name or keys.__name__
            # Before its sections, which keeps the order of the file.
            definitions[name] = {"description": (keys.__doc__ or "").partition("\n")[0]}
            definitions[name] |= _section(settings_of(keys), definitions)
            section = {"$ref": f"#/$defs/{name}"}
            if not short:
                return section
            return {"anyOf": [_of_kind(settings_of(keys)[short][1].kind, definitions), section]}
        case Named(of, pattern):
            names = dict(Name(pattern).schema())
            del names["type"]
            return {
                "type": ["object", "null"],
                "propertyNames": names,
                "additionalProperties": _of_kind(of, definitions),
            }
        case Many(of, or_one):
            one = _of_kind(of, definitions)
            array = {"type": ["array", "null"], "items": one}
            return {"anyOf": [one, array]} if or_one else array
        case JsonValues(name=name_kind):
            names = dict(name_kind.schema())
            del names["type"]
            return {"type": ["object", "null"], "propertyNames": names}
        case FilePath():
            return {"type": "string", "minLength": 1}
        case _:
            own = dict(kind.schema())
            if own == {"type": "string", "minLength": 1}:
                return own
            return {"anyOf": [own, {"$ref": f"#/$defs/{_REFERENCE}"}]}

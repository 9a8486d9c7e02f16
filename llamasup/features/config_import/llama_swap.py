"""A config of llama-swap (v250) → the draft of a config of llamasup (pure).

Every key is translated, or named in a comment with the reason why not. Macros and ``${PORT}`` are written out
first, as llama-swap does it: the last macro first.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import yaml

from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.settings.declaration import Place
from llamasup.errors import ConfigInvalid
from llamasup.features.config_import.draft import Draft, flow, is_secret, literal, valid_name
from llamasup.features.config_import.server_line import option_words, put_server, server_words

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_SIZE: Final = 1 << 22  # with YAML aliases and macros, a few lines can mean billions of letters
_COMMENT: Final = re.compile(r"^[ \t]*#.*\n?", re.MULTILINE)
_ALL: Final = "models stay loaded while they fit into memory (`max_loaded: 1` keeps one)"
_WHY: Final = {
    key: why
    for keys, why in (
        ("logLevel logTimeFormat logToStdout logRequests", "left out: see --log-level and http.access_log"),
        (
            "metricsMaxInMemory store captureBuffer",
            "left out: `llamasup usage` has sums, and bodies are not kept",
        ),
        ("ui performance includeAliasesInList", "left out: the console and /v1/models need no such setting"),
        ("upstream", "left out: there is no /upstream; only paths of inference reach a model"),
        ("profiles", "left out: names change only with the config; see virtual_models"),
        ("apiKeys", "left out: `llamasup key new NAME` writes keys into auth.api_key_file"),
        ("peers", "left out: `peers` are other nodes of llamasup"),
        ("name description metadata capabilities", "left out: /v1/models shows what the file says"),
        ("unlisted", "left out: a key with models= sees only its models"),
        (
            "compat timeouts",
            "left out: llamasup watches the progress, and http.request_timeout is for all models",
        ),
        ("healthCheckTimeout startPort", "planned: a start needs no time limit and no fixed port"),
        ("sendLoadingState", "planned: http.stream_keepalive, `ps` and the console show that a model loads"),
        ("ttl globalTTL unloadTimeout concurrencyLimit", "planned: the default is used"),
        ("proxy checkEndpoint cmdStop useModelName", "planned: llamasup uses its own llama-server"),
        ("matrix", f"planned: {_ALL}; `groups` exclude each other"),
        ("groups", f"groups with swap: true. {_ALL}; with `pin: true` always"),
        ("routing", f"groups with swap: true. {_ALL}; requests for all models take turns"),
        ("selectors", "virtual_models; a request takes the first loaded model with a free slot"),
        ("hooks", "preload of the models"),
        ("macros", "written out where they are used"),
        ("aliases filters", "virtual_models with the names of this model"),
    )
    for key in keys.split()
}


def from_llama_swap(text: str, capabilities: Capabilities) -> Draft:
    """Translate a config. Raises ConfigInvalid if it is not a mapping in YAML, or too large."""
    try:
        root = yaml.load(text, Loader=_LOADER)  # noqa: S506 - a safe loader
        if not isinstance(root, dict):
            raise ValueError("it is no mapping with models")  # noqa: TRY004, TRY301 - reported below
        return _Import(root, capabilities).draft
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # or an invalid date, or too deep
        what = " ".join(str(error).split())
    raise ConfigInvalid(f"The config of llama-swap cannot be read: {what}.", remedy="Correct the file.")


class _Import:
    """One import of one config."""

    def __init__(self, root: dict[Any, Any], capabilities: Capabilities) -> None:
        self.draft = Draft()
        self._capabilities = capabilities
        self._size = 0  # the values, and the letters in them
        self._names: dict[str, str] = {}  # each name in llama-swap → the name of the model
        models = _table(root.pop("models")) if isinstance(root.get("models"), dict) else {}
        self._public: dict[str, str] = {}  # the id in llama-swap → the name for clients, which may be shorter
        for name in sorted(models, key=lambda name: valid_name(name) != name):
            public = valid_name(name)
            self._public[name] = (
                f"{public}_{len(self._public)}" if public in self._public.values() else public
            )
        macros = self._expanded(_table(root.pop("macros", None)), None)
        top = {**({"macros": macros} if macros else {}), **self._expanded(root, macros)}
        for key, value in top.items():
            self._setting(("defaults",), key, f"{len(_list(value))} keys" if key == "apiKeys" else value)
        for name, model in models.items():
            self._model(name, _table(model), macros)
        self._several(top)

    # --- texts -----------------------------------------------------------------------------------------

    def _expanded(self, value: Any, macros: dict[str, Any] | None) -> Any:
        """Write out macros. ``${env.NAME}`` becomes ``${NAME}``, and any other ``${`` a literal one.

        ``macros``: None for the macros themselves, which stay as they are.
        """
        expand = partial(self._expanded, macros=macros)
        match value:
            case dict():
                value = {str(expand(key)): expand(each) for key, each in value.items()}
            case list():
                value = [expand(each) for each in value]
            case str():
                value = self._with_macros(value, macros or {})
        if isinstance(value, str) and macros is not None:
            value = re.sub(r"\$\$\{env\.(\w+)\}", r"${\1}", literal(value))
        self._count(40)  # a value costs as much time as a text of this length
        return value

    def _with_macros(self, text: str, macros: dict[str, Any]) -> Any:
        for name, value in reversed(list(macros.items())):
            macro = f"${{{name}}}"
            if text == macro and not isinstance(value, str):
                return value
            shown = value if isinstance(value, str) else json.dumps(value, default=str)
            self._count(text.count(macro) * len(shown))
            text = text.replace(macro, shown)
        self._count(len(text))
        return text

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > _MAX_SIZE:
            raise ValueError(f"with its macros and aliases it has more than {_MAX_SIZE} letters")

    # --- keys of a model, and those at the top -----------------------------------------------------------

    def _setting(self, at: Place, key: str, value: Any) -> None:
        shown = f"{key}: {flow(_hidden(value))}"
        match key:
            case "ttl" | "globalTTL" if value != -1:
                self.draft.put((*at, "ttl"), f"{value}s" if value else "never", f"from {shown}")
            case "unloadTimeout" if value:
                self.draft.put((*at, "drain_timeout"), f"{value}s", f"from {shown}")
            case "concurrencyLimit" if value:
                self.draft.put((*at, "max_concurrent"), value, f"from {shown}; further requests wait")
            case _:
                self.draft.note(at, f"{shown} → {_WHY.get(key, 'left out: unknown')}")

    def _model(self, name: str, written: dict[str, Any], macros: dict[str, Any]) -> None:
        own = self._expanded(_table(written.get("macros")), None)
        scope = {"PORT": "{port}", "MODEL_ID": name, **macros, **own}
        # Macros in comments are not written out: they may have several lines.
        commands = {key: _COMMENT.sub("", str(written[key])) for key in ("cmd", "cmdStop") if key in written}
        model = self._expanded({**written, **commands, "macros": None}, scope) | (
            {"macros": own} if own else {}
        )
        words, env = _words(model.get("cmd")), list(map(str, _list(model.get("env"))))
        aliases, filters = list(map(str, _list(model.get("aliases")))), _table(model.get("filters"))
        public = self._public[name]
        base = public + ":unfiltered" * bool(filters)
        at: Place = ("models", base)
        self._names |= dict.fromkeys((*aliases, name), base)
        self.draft.put(at, {}, f"from {name}")
        done = ["cmd", "env", *([] if own else ["macros"]), *([] if filters else ["aliases"])]
        if not self._put_server(at, words, env):
            self._put_command(at, words, env, model)
            aliases += [str(model["useModelName"])] if "useModelName" in model else []
        for key in (key for key in model if key not in done):
            self._setting(at, key, model[key])
        if filters:
            self._put_filters(name, base, aliases, filters)
        else:
            self.draft.add((*at, "aliases"), [*aliases, *([name] if public != name else [])])

    def _put_server(self, at: Place, words: Sequence[str], env: Sequence[str]) -> bool:
        """Put a model that llamasup plans; False if the command is no llama-server."""
        if (found := server_words(words)) is None:
            return False
        program, flags = found
        self.draft.note(at, f"cmd: {program[-1]} → planned: `runtime` is the llama-server of all models")
        given: list[str] = []
        for name, _, value in (each.partition("=") for each in (*env, *program[:-1])):
            more: Sequence[str] = ()
            if name == "CUDA_VISIBLE_DEVICES" and re.fullmatch(r"\d+(,\d+)*", value):
                more = "--device", re.sub(r"\d+", r"CUDA\g<0>", value)
            elif name.startswith("LLAMA_ARG_"):
                more = option_words(name, value, self._capabilities)
            given += more
            why = shlex.join(more) or "left out: set it for llamasup and all models"
            self.draft.note(at, f"env: {name}={'***' if is_secret(name) else value} → {why}")
        put_server(self.draft, at, (*given, *flags), self._capabilities)
        return True

    def _put_command(
        self, at: Place, words: Sequence[str], env: Sequence[str], model: dict[str, Any]
    ) -> None:
        """Put a model with a command, and remove from ``model`` what it has read."""
        put, note = self.draft.put, self.draft.note
        proxy, stop = str(model.pop("proxy", "")), _words(model.pop("cmdStop", ""))
        if (port := re.search(r":(\d{2,5})(?:/|$)", proxy)) and "{port}" not in str(words):
            words = [re.sub(rf"(?<!\d){port[1]}(?!\d)", "{port}", word) for word in words]
        public = [each for each in env if not is_secret(each.partition("=")[0])]
        hidden = [each.partition("=")[0] for each in env if each not in public]
        put(
            (*at, "command"),
            [*(["env", *public] if public else ()), *words],
            f"from cmd, env, and proxy {proxy}",
        )
        if "{port}" not in str(words):
            note((*at, "command"), "Write {port} where the program expects its port.")
        put((*at, "routes"), ["/v1/*"], "Name the paths that the program serves.")
        if model.get("checkEndpoint") != "none":
            put((*at, "health"), model.pop("checkEndpoint", "/health"), "from checkEndpoint")
        if "${PID}" in str(stop):
            note(at, f"cmdStop: {shlex.join(stop)} → planned: llamasup ends the group of processes")
        elif stop:
            put((*at, "stop"), stop, "from cmdStop")
        if hidden:
            put((*at, "environment"), hidden, "from env; set them for llamasup")

    def _put_filters(self, name: str, base: str, aliases: Sequence[str], filters: dict[str, Any]) -> None:
        by_id, shared = _table(filters.get("setParamsByID")), _table(filters.get("setParams"))
        stripped = re.split(r"[,\s]+", str(filters.get("stripParams", filters.get("strip_params", ""))))
        for each in dict.fromkeys((name, *by_id)):
            at, values = (
                ("virtual_models", self._public.get(each, valid_name(each))),
                {**shared, **_table(by_id.get(each))},
            )
            remove = [word for word in stripped if word and word not in values]
            entry = {"model": base, "set": values, "remove": remove}
            self.draft.put(at, entry, f"from the filters of {name}")
        for alias in (alias for alias in aliases if alias not in (*by_id, name)):
            at = ("virtual_models", valid_name(alias))
            self.draft.put((*at, "model"), self._public[name], f"from the aliases of {name}")

    # --- several models ------------------------------------------------------------------------------------

    def _several(self, top: dict[str, Any]) -> None:
        settings = _table(_table(_table(top.get("routing")).get("router")).get("settings"))
        for name, group in {**_table(top.get("groups")), **_table(settings.get("groups"))}.items():
            members = [self._names.get(str(each), str(each)) for each in _list(_table(group).get("members"))]
            if _table(group).get("swap", True):
                self.draft.put(("groups", valid_name(name)), members)
        for name, selector in _table(top.get("selectors")).items():
            targets = [
                self._public.get(str(each), valid_name(str(each)))
                for each in _list(_table(selector).get("targets"))
            ]
            chosen = targets[:1] if _table(selector).get("strategy") == "pin" else targets
            self.draft.put(("virtual_models", valid_name(name), "any"), chosen)
        for name in map(str, _list(_table(_table(top.get("hooks")).get("on_startup")).get("preload"))):
            if name in self._names:
                self.draft.put(("models", self._names[name], "preload"), True)


def _table(value: Any) -> dict[str, Any]:
    return {str(key): each for key, each in value.items()} if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _hidden(value: Any) -> Any:
    """Replace what may be a secret."""
    if isinstance(value, dict):
        return {key: "***" if is_secret(key) else _hidden(each) for key, each in value.items()}
    return value


def _words(command: Any) -> list[str]:
    text = re.sub(r"\\[ \t]*\n", " ", str(command or ""))
    try:
        return shlex.split(text)
    except ValueError:  # an open quote
        return text.split()

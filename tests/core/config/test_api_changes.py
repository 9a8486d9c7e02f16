"""What a config over the API may change. Pure: two texts are read and compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamasup.core.config.api_changes import Outside, refused_changes
from llamasup.core.config.config_keys import keys_of
from llamasup.core.config.reading import Reading
from llamasup.core.settings.declaration import Setting
from llamasup.core.settings.kinds import Many
from llamasup.features import config_keys
from tests.core.settings.test_outside import all_settings
from tests.kit.configs import read_text

FILE = """
listen: [127.0.0.1:8080, /run/llamasup.sock]
runtime: /opt/llama-server
models_dir: [~/models, /data/models]
defaults: {ctx_size: 4096}
models:
  a: {path: /m/a.gguf, mmproj: /m/p.gguf, extra: [--log-file, /l, --chat-template-file, /t]}
  b: {path: "${HOME}/b.gguf", loras: [/m/l1.gguf, /m/l2.gguf]}
  c: {repo: org/repo}
virtual_models:
  v: {model: a, system: "${HOME} is home"}
peers:
  desk: {url: "https://desk:1", key_file: /keys/desk, ca_file: /ca.pem}
  lab: {url: "https://lab:1", key_file: /keys/lab}
auth: {api_key_file: /keys/own}
"""
A = "path: /m/a.gguf, mmproj: /m/p.gguf, extra: [--log-file, /l, --chat-template-file, /t]"
FLAGS = "[--log-file, /l, --chat-template-file, /t]"


def reading(text: str) -> Reading:
    return read_text(text.encode(), "c.yaml", Path("/etc/llamasup"), {"HOME": "/home/ann"})[0]


def refused(text: str, file: str = FILE, *, full: bool = False) -> list[str]:
    """``key: what``, without the line."""
    after = reading(text)
    found = refused_changes(reading(file).outside, after.outside, after.config.lines, full=full)
    return [issue.in_file("").partition(": ")[2] for issue in found]


def changed(old: str, new: str) -> str:
    assert FILE.count(old) == 1
    return FILE.replace(old, new)


HARMLESS = [
    ("nothing", "", ""),
    ("a number", "ctx_size: 4096", "ctx_size: 8192"),
    ("a model without a path", "  c: {repo: org/repo}", "  c: {repo: org/other}\n  d: {ttl: 5m}"),
    ("quotes", "runtime: /opt/llama-server", 'runtime: "/opt/llama-server"'),
    ("the long form", "runtime: /opt/llama-server", "runtime: {path: /opt/llama-server, watch: true}"),
    ("the order of a list", "[~/models, /data/models]", "[/data/models, ~/models]"),
    ("one item of a list", "[~/models, /data/models]", "/data/models"),
    ("a whole list", "models_dir: [~/models, /data/models]", ""),
    ("an address", "127.0.0.1:8080", "127.0.0.1:9090"),
    ("a whole model", f"  a: {{{A}}}\n", ""),
    ("all flags", f", extra: {FLAGS}", ""),
    ("no flags", f"extra: {FLAGS}", "extra: []"),
    ("a whole peer", '  lab: {url: "https://lab:1", key_file: /keys/lab}\n', ""),
    ("words that are no paths", "  c: {repo: org/repo}", "  c: {path: demo, mmproj: none, loras: auto}"),
    ("false", "auth: {", "auth: {insecure_no_auth: false, "),
    ("a literal ${", "model: a,", "model: a, set: {user: '$${HOME}'},"),
]
REFUSED = [
    ("program", "/opt/llama-server", "/evil", "runtime.path: '/evil' names a program"),
    ("name of a program", "/opt/llama-server", "sh", "runtime.path: 'sh' names a program"),
    ("no program", "runtime: /opt/llama-server", "", "runtime.path: '/opt/llama-server' is removed, and"),
    ("another program", "/opt/llama-server", "auto", "runtime.path: '/opt/llama-server' is removed, and"),
    ("folder", "[~/models,", "[/, ~/models,", "models_dir: '/' names a path"),
    ("folder in other words", "[~/models,", "[/home/ann/models,", "models_dir: '/home/ann/models' names a"),
    ("socket", "/run/llamasup.sock", "/run/other.sock", "listen: '/run/other.sock' names a path"),
    (
        "path of a model",
        "{repo: org/repo}",
        "{path: /etc/shadow}",
        "models.c.path: '/etc/shadow' names a path",
    ),
    (
        "path at another name",
        "{repo: org/repo}",
        "{path: /m/a.gguf}",
        "models.c.path: '/m/a.gguf' names a path",
    ),
    ("projector", "mmproj: /m/p.gguf", "mmproj: /m/q.gguf", "models.a.mmproj: '/m/q.gguf' names a path"),
    ("no projector", ", mmproj: /m/p.gguf", "", "models.a.mmproj: '/m/p.gguf' is removed, and names a path"),
    ("adapter", "/m/l1.gguf,", "/m/l1.gguf, /m/l3.gguf,", "models.b.loras: '/m/l3.gguf' names a path"),
    (
        "flag",
        "{repo: org/repo}",
        "{repo: org/repo, extra: [--temp, 1]}",
        "models.c.extra: '--temp 1' is flags",
    ),
    (
        "one flag more",
        "/t]",
        "/t, --path, /]",
        "models.a.extra: '--log-file /l --chat-template-file /t --path",
    ),
    ("order of flags", FLAGS, "[--log-file, /t, --chat-template-file, /l]", "models.a.extra: '--log-file /t"),
    (
        "flags of all",
        "{ctx_size: 4096}",
        "{extra: [--props]}",
        "defaults.extra: '--props' is flags for llama",
    ),
    ("worker", "{ctx_size: 4096}", "{rpc: '10.0.0.1:1'}", "defaults.rpc: '10.0.0.1:1' names a host that"),
    (
        "variable",
        "is home",
        "is ${HF_TOKEN}",
        "virtual_models.v.system: '${HOME} is ${HF_TOKEN}' reads the env",
    ),
    ("variable in a number", "4096", "'${PIN}'", "defaults.ctx_size: '${PIN}' reads the environment"),
    (
        "variable with a default",
        "4096",
        "'${PIN:-1}'",
        "defaults.ctx_size: '${PIN:-1}' reads the environment",
    ),
    ("moved variable", "repo: org/repo", "repo: '${HOME}/b.gguf'", "models.c.repo: '${HOME}/b.gguf' reads"),
    ("broken variable", "model: a,", "model: '${',", "virtual_models.v.model: '${' reads the environment"),
    (
        "deep variable",
        "model: a,",
        "model: a, set: {stop: [{x: ['${P}']}]},",
        "virtual_models.v.set.stop.x: '${P}'",
    ),
    (
        "host of a key",
        "https://desk:1",
        "https://evil",
        "peers.desk.url: (not shown: it may be a secret) names",
    ),
    ("key of a host", "/keys/desk", "/etc/hostname", "peers.desk.key_file: '/etc/hostname' names a path"),
    ("key of another host", "/keys/desk", "/keys/lab", "peers.desk.key_file: '/keys/lab' names a path"),
    (
        "word in place of a path",
        "/keys/desk",
        "word",
        "peers.desk.key_file: (not shown: it may be a secret) names",
    ),
    (
        "no certificate",
        ", ca_file: /ca.pem",
        "",
        "peers.desk.ca_file: '/ca.pem' is removed, and names a path",
    ),
    (
        "no keys",
        "auth: {api_key_file: /keys/own}",
        "",
        "auth.api_key_file: '/keys/own' is removed, and names",
    ),
    (
        "media",
        "auth:",
        "http: {remote_media: true}\nauth:",
        "http.remote_media: 'true' names a host that llam",
    ),
    ("log", "auth:", "http: {access_log: /l}\nauth:", "http.access_log: '/l' names a path"),
    ("caches", "auth:", "caches: huggingface\nauth:", "caches: 'huggingface' names a path"),
    ("invalid path", "/opt/llama-server", "[1]", "runtime.path: '/opt/llama-server' is removed, and names a"),
]
RIGHTS = [
    (
        "auth: {api_key_file: /keys/own}\nhttp: {api_config: full}",
        "http.api_config: 'full' decides who may do what",
    ),
    (
        "auth: {insecure_no_auth: true, api_key_file: /keys/own}",
        "auth.insecure_no_auth: 'true' decides who may",
    ),
]


@pytest.mark.parametrize(("old", "new"), [row[1:] for row in HARMLESS], ids=[row[0] for row in HARMLESS])
def test_harmless_changes_are_allowed(old: str, new: str) -> None:
    assert refused(changed(old, new) if old else FILE) == []


@pytest.mark.check("X15", "the refusal names the key")
@pytest.mark.parametrize(
    ("old", "new", "start"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_config_over_the_api_names_nothing_new(old: str, new: str, start: str) -> None:
    (found,) = refused(changed(old, new))
    assert found.startswith(start)
    assert found.endswith("allow such changes there with http: {api_config: full}")
    assert refused(changed(old, new), full=True) == []


@pytest.mark.parametrize(("new", "start"), RIGHTS)
def test_rights_are_changed_only_in_the_file(new: str, start: str) -> None:
    text = changed("auth: {api_key_file: /keys/own}\n", "") + new
    for full in (False, True):
        (found,) = refused(text, full=full)
        assert found.startswith(start)
        assert found.endswith("only the file itself can change it, on its machine")
    for full in (False, True):
        (found,) = refused(FILE, text, full=full)
        assert "is removed" in found


EXAMPLES = {
    "FilePath": "/x",
    "RuntimeName": "/x",
    "Listen": "/x.sock",
    "NodeUrl": "https://x:1",
    "Endpoint": "https://x",
    "MediaHost": "x.example",
    "ProxyAddress": "10.0.0.0/8",
    "RpcWorker": "10.0.0.1:1",
    "Boolean": "true",
    "Text": "x:1",
    "OneOf": "full",
}
MARKED = [
    (key, setting) for key, setting in all_settings(keys_of(config_keys())) if setting.outside != "nothing"
]


@pytest.mark.parametrize(("key", "setting"), MARKED, ids=[key for key, _ in MARKED])
def test_every_setting_that_names_something_is_compared(key: str, setting: Setting) -> None:
    """In the nested notation, and in a list where one is allowed."""
    kind = setting.kind.kind if isinstance(setting.kind, Many) else setting.kind
    own = {"caches": "huggingface", "models.environment": "HF_HOME", "models.routes": "/x"}
    value = own.get(key) or EXAMPLES[type(kind).__name__]
    written = f"[{value!r}]" if isinstance(setting.kind, Many) else f"{value!r}" if value != "true" else value
    first, *others = key.split(".")
    if first in ("models", "peers"):
        others.insert(0, "a")
    for inner in reversed(others):
        written = f"{{{inner}: {written}}}"
    text = f"{first}: {written}\n"
    (found,) = refused(text, "")
    assert found.startswith(".".join((first, *others)))
    assert value in found or "not shown" in found
    assert refused(text, text) == []


def test_issue_has_the_line_of_the_key() -> None:
    after = reading("max_loaded: 1\nmodels:\n  a:\n    path: /x\n")
    (issue,) = refused_changes(Outside(), after.outside, after.config.lines, full=False)
    assert (issue.line, issue.key) == (4, "models.a.path")


def test_file_that_names_nothing_allows_nothing() -> None:
    assert len(refused(FILE, "max_loaded: 1")) == 16

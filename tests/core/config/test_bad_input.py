"""Errors of a config name the file, the line, the key, the value and the values that are allowed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llamasup.core.config.issues import ConfigIssues
from llamasup.core.config.nodes import MAX_BYTES
from llamasup.errors import ConfigInvalid
from tests.core.config.reading import config_of, issue_of, issues_of
from tests.kit.configs import load


def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("lissten: x\nmodels_dir: m\nmax_loaded: many\nwatch: yes\n")

    with pytest.raises(ConfigIssues) as caught:
        load(path, {})

    assert caught.value.message == f"{path} has 3 errors."
    assert caught.value.exit_code == 78
    assert caught.value.details == (
        f"{path}:1: lissten: unknown key; did you mean listen?",
        f"{path}:3: max_loaded: invalid value 'many'; expected a whole number, 1 or more",
        f"{path}:4: watch: invalid value 'yes'; expected true or false",
    )


def test_pipe_without_a_writer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamasup.core.system.storage.folders.PIPE_WAIT_S", 0.05)
    pipe = tmp_path / "c.yaml"
    os.mkfifo(pipe)
    with pytest.raises(ConfigInvalid, match=r"cannot be read: it is a pipe that was not closed") as caught:
        load(pipe, {})
    assert caught.value.exit_code == 78


@pytest.mark.parametrize("key", ["ctx", "num_ctx", "n-ctx", "max_model_len"])
def test_key_of_another_program_has_a_hint(key: str) -> None:
    assert issue_of(f"{{models: {{m: {{path: /m.gguf, {key}: 8192}}}}}}").endswith(
        f"{key}: unknown key; did you mean ctx_size?"
    )


def test_unknown_key_without_a_similar_one_lists_valid_keys() -> None:
    assert issue_of("{models_dir: m, memory: {swap: 1%}}") == (
        "c.yaml:1: memory.swap: unknown key; valid keys: ram, vram"
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "max_loaded",
            "080",
            "'080': YAML reads a number with a leading 0 as octal; expected a whole number",
        ),
        ("max_loaded", "0x10", "'0x10'; expected a whole number"),
        ("max_loaded", "1_000", "'1_000'; expected a whole number"),
        ("max_loaded", "1.0", "'1.0'; expected a whole number"),
        ("max_loaded", "0", "'0'; expected a whole number, 1 or more"),
        ("max_loaded", "9" * 5000, "9…'; expected a whole number, 1 or more"),
        ("max_loaded", "'2'", "'2': quotes make it text; expected a whole number, 1 or more, without quotes"),
        ("max_loaded", "[2]", "found a list; expected a whole number"),
        ("max_loaded", "{a: 2}", "found a mapping; expected a whole number"),
        ("max_loaded", "", "found no value; expected a whole number"),
        ("max_loaded", "~", "found no value; expected a whole number"),
        ("watch", "on", "'on'; expected true or false"),
        ("watch", "'true'", "'true': quotes make it text; expected true or false, without quotes"),
        ("swap_after", "1:30", "'1:30'; expected a time such as 90s, 10m or 1h30m"),
        ("swap_after", "-5s", "'-5s'; expected a time"),
        ("swap_after", "never", "'never'; expected a time"),
        ("default_model", "../x", "it contains '..'"),
        ("default_model", "/etc/x", "it begins with '/'"),
        ("default_model", "a b", "it contains ' '"),
        ("default_model", "a*", "* and ? are allowed only in patterns"),
        ("default_model", "a" * 257, "it has 257 characters, and 256 are allowed"),
        ("caches", "[ollama]", "caches[0]: invalid value 'ollama'; expected huggingface or llama.cpp"),
        ("models", "[a]", "found a list; expected names, each with keys or values"),
        ("models", "a", "'a'; expected names"),
        ("groups", "{g: a}", "groups.g: invalid value 'a'; expected a list, each a name"),
        ("memory", "80%", "'80%'; expected a mapping with keys such as ram, vram"),
        (
            "memory",
            "{ram: -1GiB}",
            "memory.ram: invalid value '-1GiB': it is negative; expected a size such as 12GiB",
        ),
        ("memory", "{ram: 0%}", "'0%': it is outside 1% to 100%"),
        ("slots", "{disk: 50%}", "'50%'; expected a size such as 12GiB or 800MB"),
        ("listen", "8080", "'8080'; expected HOST:PORT"),
        ("listen", "127.0.0.1", "'127.0.0.1': the port is missing; expected HOST:PORT"),
        ("listen", "':80'", "the host is missing; use 0.0.0.0 or [::] for all addresses of this machine"),
        ("listen", "h:99999", "the port is above 65535"),
        ("listen", "::1:80", "'::1:80': an IPv6 address needs brackets; expected HOST:PORT"),
        ("listen", "'[::1]'", "'[::1]': the port is missing; expected HOST:PORT"),
        ("listen", "http://h:80", "'http://h:80'; expected HOST:PORT"),
        ("listen", "'a,b:80'", "'a,b:80'; expected HOST:PORT"),
        ("listen", "[]", "the list is empty; add an address, or remove the key for 127.0.0.1:8080"),
        ("listen", "[h:80, h:81]", "port 81 differs from port 80 of h:80; use one port for all addresses"),
        ("listen", "[h:80, h:80]", "duplicate address 'h:80'; keep one of them"),
        ("http", "{allow_hosts: '*'}", "DNS rebinding"),
        ("http", "{allow_hosts: 'a:80'}", "has a port"),
        (
            "http",
            "{allow_origins: x}",
            "it is not an origin; expected an origin such as https://chat.example.net",
        ),
        ("http", "{remote_media: 'http://h/'}", "'http://h/'"),
        (
            "http",
            "{remote_media: '*.example'}",
            "is not a valid media host; expected false, true for any host",
        ),
        ("http", "{tls_cert: c}", "http.tls_cert: tls_key is missing; TLS needs both files"),
        ("http", "{tls_key: c}", "http.tls_key: tls_cert is missing; TLS needs both files"),
        ("runtime", "''", "''; expected auto, embedded, or the path or name of a llama-server"),
        ("runtime", '"~nobody-at-all/x"', "unknown user 'nobody-at-all'"),
        ("runtime", "{path: ''}", "runtime.path: invalid value ''; expected auto, embedded, or the path"),
        ("runtime", "{path: llama-server, watch: true}", "only the path of a llama-server can be watched"),
        ("runtime", "{watch: true}", "runtime.watch: only the path of a llama-server can be watched"),
        ("runtime", "[a]", "expected a mapping with keys such as path, watch"),
        ("defaults", "{pin: true, ttl: 5m}", "defaults.ttl: a pinned model is never unloaded"),
        ("defaults", "{gpu_layers: some}", "'some'; expected a whole number, 0 or more, or auto or all"),
        ("defaults", "{kv_type: Q8-0}", "'Q8-0'; expected a KV cache type such as f16"),
        ("defaults", "{replicas: 65}", "'65'; expected a whole number from 1 to 64"),
        ("defaults", "{extra: --seed}", """'--seed'; expected a list, each text; write ["--seed"]"""),
        ("defaults", "{extra: --temp 0.6}", """expected a list, each text; write ["--temp", "0.6"]"""),
        ("defaults", """{extra: "--grammar 'x y"}""", """write ["--grammar", "'x", "y"]"""),
        ("defaults", "{mmproj: $HOME/x}", "a variable needs braces, as in ${HOME}"),
    ],
)
def test_invalid_value_is_reported_with_allowed_values(key: str, value: str, message: str) -> None:
    found = issue_of(f"models_dir: m\n{key}: {value}\n")

    assert found.startswith(f"c.yaml:2: {key}")
    assert message in found


# --- models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ("{a: {path: x, repo: o/r}}", "models.a: path and repo exclude each other; keep one of them"),
        ("{a: {repo: x}}", "models.a.repo: invalid value 'x'; expected org/repo or org/repo:quant"),
        ("{a: {repo: ../..}}", "'../..'; expected org/repo"),
        ("{../a: {}}", "models: invalid name '../a': it contains '..'"),
        ("{/a: {}}", "models: invalid name '/a': it begins with '/'"),
        ("{'': {}}", "models: invalid name '': it is empty"),
        (
            "{a: {path: x, repair: all}}",
            "models.a.repair: invalid value 'all'; expected off, tools, json or both",
        ),
        (
            "{a: {path: x, aliases: [' b']}}",
            "models.a.aliases[0]: invalid value ' b': it begins or ends with a space",
        ),
        ("{a: {path: x, aliases: [b, b]}}", "models.a.aliases[1]: alias 'b' occurs twice; remove it"),
        ("{a: {path: x, aliases: a}}", "models.a.aliases: alias 'a' is the model's own name; remove it"),
        (
            "{'a*': {path: x}}",
            "models.a*: 'a*' is a rule for many models, so it cannot have path, repo or url",
        ),
        ("{'a*': {aliases: b}}", "models.a*: 'a*' is a pattern: an alias would name many models"),
        ("{a: {pin: true, ttl: 5m}}", "models.a.ttl: a pinned model is never unloaded; remove ttl or pin"),
        (
            "{a: {path: x, rpc: ['127.0.0.1:7', 'LOCALHOST:7']}}",
            "models.a.rpc[1]: duplicate value 'LOCALHOST:7'; keep one of them",
        ),
        (
            "{a: {path: x, rpc: 'tls://w:7'}, b: {path: y, rpc: ['10.0.0.2:7', 'tls://W:7']}}",
            "models.b.rpc[1]: the RPC worker tls://w:7 is also that of 'a', and serves one model at a time; "
            "give each model its own workers, put both into a group, or set max_loaded to 1",
        ),
    ],
)
def test_invalid_model_is_refused(models: str, message: str) -> None:
    found = issue_of(f"models_dir: m\nmodels: {models}\n")

    assert found.startswith("c.yaml:2: ")
    assert message in found


def test_alias_of_two_models_is_reported_once_with_both_lines() -> None:
    found = issue_of("models:\n  a: {path: x, aliases: c}\n  b: {path: y, aliases: c}\n")

    assert found == "c.yaml:3: models.b: 'c' is an alias of 'b' and of 'a' (c.yaml:2)"


def test_alias_with_the_name_of_another_model_is_refused() -> None:
    found = issue_of("models:\n  a: {path: x, aliases: b}\n  b: {path: y}\n")

    assert found == "c.yaml:2: models.a: 'b' is an alias of 'a', and a model's name (c.yaml:3)"


def test_circular_aliases_are_reported_once() -> None:
    found = issue_of("models:\n  a: {path: x, aliases: b}\n  b: {path: y, aliases: a}\n")

    assert found == (
        "c.yaml:2: models.a: 'b' is an alias of 'a', and a model's name (c.yaml:3), and the other way round"
    )


def test_duplicate_key_is_reported_with_both_lines() -> None:
    found = issues_of("models:\n  a: {path: x}\n  b: {path: y}\n  a: {path: z}\nmodels: {}\n")

    assert found == [
        "c.yaml:4: models.a: duplicate key, first in line 2; keep one of them",
        "c.yaml:5: models: duplicate key, first in line 1; keep one of them",
    ]


def test_model_in_two_groups_is_refused_under_any_of_its_names() -> None:
    found = issues_of(
        """
        models:
          a: {path: x, aliases: other}
        groups:
          one: [a]
          two: [other]
          three: ["a*"]
        """
    )

    assert found == [
        "c.yaml:6: groups.two[0]: model 'a' is already in groups.one[0]; keep a model in one group, once",
        "c.yaml:7: groups.three[0]: model 'a' is already in groups.one[0]; keep a model in one group, once",
    ]


TWO_OF_ONE_WORKER = """
models:
  a: {path: x, aliases: other, rpc: '10.0.0.2:7'}
  b: {path: y, rpc: '10.0.0.2:7'}
  z*: {rpc: '10.0.0.2:7'}
"""


@pytest.mark.parametrize(
    "more", ["max_loaded: 1", "groups: {one: [a, b]}", "groups: {one: ['?']}", "groups: {one: [other, b]}"]
)
def test_models_that_take_turns_may_have_one_worker(more: str) -> None:
    assert "is also that of 'a'" in issue_of(TWO_OF_ONE_WORKER)
    assert set(config_of(f"{TWO_OF_ONE_WORKER}\n{more}").models) == {"a", "b", "z*"}


def test_two_names_of_one_process_may_have_one_worker() -> None:
    worker = "rpc: '10.0.0.2:7'"
    assert config_of(f"models: {{a: {{path: x, {worker}}}, b: {{path: x, {worker}, ttl: 5m}}}}").models
    found = issue_of(
        f"models: {{a: {{path: x, ctx_size: 8, {worker}}}, b: {{path: x, ctx_size: 9, {worker}}}}}"
    )
    assert "is also that of 'a'" in found
    found_by_name = f"models_dir: m\nmodels: {{a: {{{worker}}}, b: {{{worker}}}}}"
    assert "is also that of 'a'" in issue_of(found_by_name)


def test_workers_of_the_defaults_belong_to_each_model() -> None:
    found = issue_of("defaults: {rpc: '10.0.0.2:7'}\nmodels:\n  a: {path: x}\n  b: {path: y}\n")
    assert found.startswith("c.yaml:4: models.b: the RPC worker 10.0.0.2:7 is also that of 'a'")


def test_group_with_an_unknown_model_is_refused() -> None:
    groups = "groups: {g: [b]}"

    assert issue_of(f"models: {{a: {{path: x}}}}\n{groups}") == (
        "c.yaml:2: groups.g[0]: unknown model 'b'; add it to models, or correct the name"
    )
    assert config_of(f"models_dir: m\n{groups}").groups == {"g": ("b",)}  # the model may be in that folder


def test_unknown_default_model_is_refused() -> None:
    assert issue_of("models: {a: {path: x}}\ndefault_model: b") == (
        "c.yaml:2: default_model: unknown model 'b'; add it to models, or correct the name"
    )
    assert config_of("models: {a: {path: x, aliases: b}}\ndefault_model: b").default_model == "b"


def test_model_without_a_source_needs_a_folder_or_cache() -> None:
    assert issue_of("models: {a: {ctx_size: 5}}") == (
        "c.yaml:1: models.a: no model file; add path, repo or url, "
        "or add models_dir or caches to find the model"
    )
    assert config_of("models: {a: {ctx_size: 5}}\ncaches: huggingface").models["a"].source is None


def test_more_pinned_models_than_max_loaded_are_refused() -> None:
    found = issue_of("models: {a: {path: x, pin: true}, b: {path: y, pin: true}}\nmax_loaded: 1")

    assert (
        found
        == "c.yaml:2: max_loaded: 1 is less than the 2 pinned models (a, b); raise it, or pin fewer models"
    )


def test_config_without_models_is_refused() -> None:
    assert issue_of("listen: 127.0.0.1:80") == (
        "c.yaml: no models to serve; add models_dir, models, caches or downloads.on_demand"
    )


def test_one_error_is_reported_once() -> None:
    """A refused value does not count as missing."""
    assert len(issues_of("models_dirs: m")) == 1
    assert len(issues_of("models: {a: {path: ''}}")) == 1
    assert len(issues_of("models: {../a: {path: x}}\ngroups: {g: [a]}\ndefault_model: a")) == 1


def test_tls_on_a_unix_socket_is_refused() -> None:
    found = issue_of("{models_dir: m, listen: x.sock, http: {tls_cert: a, tls_key: b}}")

    assert "http.tls_cert: TLS is not supported on a Unix socket" in found


# --- the environment and secrets ---------------------------------------------------------------------


def test_unset_variable_is_named() -> None:
    assert issue_of("models_dir: ${MODELS}") == (
        "c.yaml:1: models_dir: the environment variable MODELS is not set; "
        "set it, or write a default: ${MODELS:-value}"
    )


@pytest.mark.parametrize("text", ["${", "${1}", "${A", "${A-b}", "x${}"])
def test_malformed_variable_is_refused(text: str) -> None:
    assert "invalid variable after '${'; write it as ${HOME}" in issue_of(f'models_dir: "{text}"')


SECRET = "hf_0123456789secret"


@pytest.mark.parametrize(
    "text",
    [
        "listen: ${S}",
        "max_loaded: ${S}",
        "memory: {ram: '${S}'}",
        "swap_after: ${S}",
        "watch: ${S}",
        "caches: ['${S}']",
        "default_model: ${S}",
        "models: {a: {path: x, aliases: ['${S}', '${S}']}}",
        "models: {a: {path: x, url: '${S}'}}",
        "groups: {g: ['${S}', '${S}']}",
        "http: {allow_hosts: '${S}_', allow_origins: '${S}', tls_cert: '${S}'}",
        "downloads: {endpoint: '${S}', parallel: '${S}'}",
        "auth: {api_key_file: '${S}', api_key: '${S}'}",
        "auth: {api_key_file: ~nobody-at-all/${S}}",
    ],
)
def test_values_of_environment_variables_are_never_shown(text: str) -> None:
    found = issues_of(f"max_loads: 1\n{text}", S=SECRET)

    assert found
    assert not [line for line in found if SECRET in line]


@pytest.mark.parametrize(
    "text",
    [
        f"auth: {{api_key_file: [{SECRET}]}}",
        f"auth: {{api_key: {SECRET}}}",
        f"models: {{a: {{url: 'ftp://{SECRET}@h'}}}}",
        f"downloads: {{endpoint: 'https://{SECRET}@h'}}",
        f"downloads: {{endpoint: 'https://h?t={SECRET}'}}",
        f"models: {{a: {{url: 'https://u:{SECRET}@h/x.gguf'}}}}",
    ],
)
def test_possible_secrets_are_not_shown(text: str) -> None:
    found = issues_of(text)
    assert found
    assert SECRET not in "".join(found)


def test_not_even_the_start_of_an_environment_variable_is_shown() -> None:
    (found,) = issues_of("{default_model: '${S}', models: {a: {path: x}}}", S=SECRET * 10)
    assert found.endswith("default_model: unknown model '${S}'; add it to models, or correct the name")


# --- YAML --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "c.yaml: the file is empty; expected keys such as"),
        (b"# nothing\n---\n", "c.yaml: the file is empty; expected keys such as"),
        (b"- a\n- b\n", "c.yaml:1: found a list; expected keys such as"),
        (b"hello\n", "c.yaml:1: invalid value 'hello'; expected keys such as"),
        (b"models_dir: m\nx\xff: 1\n", "c.yaml:2: the byte 0xff is not UTF-8"),
        ("models_dir: m".encode("utf-16"), "c.yaml:1: the byte 0xff is not UTF-8"),
        (b"models_dir: m\na: \x00\n", "c.yaml:2: invalid YAML: control characters are not allowed"),
        (b"models:\n\ta: {}\n", "c.yaml:2: invalid YAML: found character"),
        (b"models: {a: [}\n", "c.yaml:1: invalid YAML: "),
        (b"models_dir: m\n---\na: 1\n", "c.yaml:2: a second document begins here"),
        (
            b"a: &x 1\nb: *x\n",
            "c.yaml:2: b: invalid alias *x: aliases are not supported; put settings that models share",
        ),
        (b"<<: *x\n", "c.yaml:1: <<: invalid alias *x"),
        (
            b"models: !!python/object:os.system {}\n",
            "c.yaml:1: models: invalid tag 'tag:yaml.org,2002:python/object",
        ),
        (b"? [a]\n: b\n", "c.yaml:1: invalid key: expected text, found a list or a mapping"),
        (b'a: "\\ud800"\n', "c.yaml:1: invalid YAML: "),
        (b"? " + b"a" * 513 + b"\n: 1", "c.yaml:1: invalid key of 513 characters; a key has at most 512"),
    ],
)
def test_error_of_an_invalid_file_has_its_line(text: bytes, message: str) -> None:
    assert issue_of(text).startswith(message)


def test_tab_is_named() -> None:
    assert "the line begins with a tab: indent with spaces" in issue_of("models:\n\ta: {}\n")


def test_alias_bomb_is_refused_before_it_expands() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]

    assert "a1[0]: invalid alias *a0" in issue_of("\n".join(levels))


def test_depth_and_number_of_values_are_limited() -> None:
    assert issue_of("[" * 100_000) == "c.yaml:1: more than 16 nested levels"
    assert issue_of("{a: " * 100_000) == "c.yaml:1: more than 16 nested levels"
    assert "more than 100000 values" in issue_of("- a\n" * 100_000)  # and the list itself
    assert "more than 100000 values" not in issue_of("- a\n" * 99_999)


def test_config_of_10_mb_is_refused_without_parsing(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    with path.open("wb") as file:
        file.truncate(10_000_000)

    with pytest.raises(ConfigIssues) as caught:
        load(path, {})

    assert caught.value.details == (f"{path}: the file has 10000000 bytes; a config has at most {MAX_BYTES}",)


def test_endless_file_is_refused() -> None:
    with pytest.raises(ConfigIssues, match="has 1 error"):
        load(Path("/dev/zero"), {})


def test_a_hundred_of_a_thousand_errors_are_listed() -> None:
    found = issues_of("models_dir: m\n" + "".join(f"k{n}: 1\n" for n in range(1000)))

    assert len(found) == 101
    assert found[-1] == "… and 900 more"


def test_number_of_rules_is_limited() -> None:
    found = issue_of("models_dir: m\nmodels:\n" + "".join(f"  'k{n}*': {{}}\n" for n in range(200)))

    assert found == "c.yaml:103: models: more than 100 rules with * or ?; remove some"


def test_errors_contain_only_printable_characters() -> None:
    found = issues_of('models_dir: m\n"a\\e[2Jb": 1\nmax_loaded: "\\e[31m\\u202e"\n')

    assert all(line.isprintable() for line in found)


@pytest.mark.parametrize(
    "lines",
    [
        lambda count: ["listen:", *(f"- /run/{number}.sock" for number in range(count))],
        lambda count: ["groups:", "  g:", *(f"  - ${{S}}{number}" for number in range(count))],
    ],
    ids=["listen", "groups"],
)
def test_reading_time_is_proportional_to_the_size(lines: Callable[[int], list[str]]) -> None:
    def taken_s(count: int) -> float:
        text = "\n".join(("models: {a: {path: x}}", *lines(count)))
        began_s = time.thread_time()
        issues_of(text, S="x")
        return time.thread_time() - began_s

    small_s, large_s = (min(taken_s(count) for _ in range(3)) for count in (500, 8000))
    assert large_s < 64 * small_s  # 16 times the size; quadratic time would be a factor of 256

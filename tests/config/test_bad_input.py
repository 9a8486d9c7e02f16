"""What is wrong with a config is told with file, line, key, what was seen and what is allowed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llamasup.config import load
from llamasup.config.issues import ConfigIssues
from llamasup.config.nodes import MAX_BYTES
from llamasup.errors import ConfigInvalid
from tests.config.reading import config_of, mistake_of, mistakes_of


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("lissten: x\nmodels_dir: m\nmax_loaded: many\nwatch: yes\n")

    with pytest.raises(ConfigIssues) as caught:
        load(path, {})

    assert caught.value.message == f"{path} has 3 mistakes."
    assert caught.value.exit_code == 78
    assert caught.value.details == (
        f"{path}:1: lissten: there is no such key; the nearest is listen",
        f"{path}:3: max_loaded: 'many'; it takes a whole number, 1 or more",
        f"{path}:4: watch: 'yes'; it takes true or false",
    )


def test_a_pipe_that_nothing_writes_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamasup.system.storage.folders.PIPE_WAIT_S", 0.05)
    pipe = tmp_path / "c.yaml"
    os.mkfifo(pipe)
    with pytest.raises(ConfigInvalid, match=r"cannot be read: it is a pipe that was not closed") as caught:
        load(pipe, {})
    assert caught.value.exit_code == 78


def test_an_unknown_key_that_is_near_none_is_told_which_there_are() -> None:
    assert mistake_of("{models_dir: m, memory: {swap: 1%}}") == (
        "c.yaml:1: memory.swap: there is no such key; it takes ram, vram"
    )


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("max_loaded", "080", "'080': YAML takes a number that begins with 0 for an octal one"),
        ("max_loaded", "0x10", "'0x10'; it takes a whole number"),
        ("max_loaded", "1_000", "'1_000'; it takes a whole number"),
        ("max_loaded", "1.0", "'1.0'; it takes a whole number"),
        ("max_loaded", "0", "'0'; it takes a whole number, 1 or more"),
        ("max_loaded", "9" * 5000, "9…'; it takes a whole number, 1 or more"),
        ("max_loaded", "'2'", "'2' in quotes is text; it takes a whole number, 1 or more, without quotes"),
        ("max_loaded", "[2]", "a list; it takes a whole number"),
        ("max_loaded", "{a: 2}", "keys and values; it takes a whole number"),
        ("max_loaded", "", "nothing; it takes a whole number"),
        ("max_loaded", "~", "nothing; it takes a whole number"),
        ("watch", "on", "'on'; it takes true or false"),
        ("watch", "'true'", "'true' in quotes is text; it takes true or false, without quotes"),
        ("swap_after", "1:30", "'1:30'; it takes a time such as 90s, 10m or 1h30m"),
        ("swap_after", "-5s", "'-5s'; it takes a time"),
        ("swap_after", "never", "'never'; it takes a time"),
        ("default_model", "../x", "it contains '..'"),
        ("default_model", "/etc/x", "it begins with '/'"),
        ("default_model", "a b", "it contains ' '"),
        ("default_model", "a*", "it is a pattern, and has to be a name"),
        ("default_model", "a" * 257, "it has 257 characters, and 256 are allowed"),
        ("caches", "[ollama]", "caches[0]: 'ollama'; it takes huggingface or llama.cpp"),
        ("models", "[a]", "a list; it takes names, and below each what is said of it"),
        ("models", "a", "'a'; it takes names"),
        ("memory", "80%", "'80%'; it takes keys such as ram, vram"),
        ("memory", "{ram: -1GiB}", "memory.ram: '-1GiB': it is below zero; it takes a size such as 12GiB"),
        ("memory", "{ram: 0%}", "'0%': it is outside 1% to 100%"),
        ("slots", "{disk: 50%}", "'50%'; it takes a size such as 12GiB or 800MB"),
        ("listen", "8080", "'8080'; it takes HOST:PORT"),
        ("listen", "127.0.0.1", "'127.0.0.1': it has no port; it takes HOST:PORT"),
        ("listen", "':80'", "it names no address; every address of this machine is 0.0.0.0 or [::]"),
        ("listen", "h:99999", "a port is at most 65535"),
        ("listen", "::1:80", "'::1:80': an IPv6 address stands in brackets; it takes HOST:PORT"),
        ("listen", "'[::1]'", "'[::1]': it has no port; it takes HOST:PORT"),
        ("listen", "http://h:80", "'http://h:80'; it takes HOST:PORT"),
        ("listen", "'a,b:80'", "'a,b:80'; it takes HOST:PORT"),
        ("listen", "[]", "no address; leave the key out for 127.0.0.1:8080"),
        ("listen", "[h:80, h:81]", "port 81, and h:80 has 80; all share one port"),
        ("listen", "[h:80, h:80]", "'h:80' is there already"),
        ("http", "{allow_hosts: '*'}", "DNS rebinding"),
        ("http", "{allow_hosts: 'a:80'}", "has a port"),
        (
            "http",
            "{allow_origins: x}",
            "is not an origin; it takes an origin such as https://chat.example.net",
        ),
        ("http", "{remote_media: 'http://h/'}", "'http://h/'"),
        (
            "http",
            "{remote_media: '*.example'}",
            "is not a valid media host; it takes false, true for any host",
        ),
        ("http", "{tls_cert: c}", "http.tls_cert: without tls_key; TLS takes both files"),
        ("http", "{tls_key: c}", "http.tls_key: without tls_cert; TLS takes both files"),
        ("downloads", "{endpoint: 'http://h'}", "it is http; https alone is allowed"),
        ("downloads", "{parallel: 17}", "'17'; it takes a whole number from 1 to 16"),
        ("runtime", "''", "''; it takes auto, embedded, or the path or name of a llama-server"),
        ("runtime", '"~nobody-at-all/x"', "there is no user 'nobody-at-all'"),
        ("defaults", "{pin: true, ttl: 5m}", "defaults.ttl: of a model that is pinned"),
        ("defaults", "{gpu_layers: some}", "'some'; it takes a whole number, 0 or more, or auto or all"),
        ("defaults", "{kv_type: Q8-0}", "'Q8-0'; it takes a type of llama-server's"),
        ("defaults", "{replicas: 65}", "'65'; it takes a whole number from 1 to 64"),
        ("defaults", "{extra: --seed}", "'--seed'; it takes a list, each text"),
        ("defaults", "{mmproj: $HOME/x}", "a variable is written in braces, as in ${HOME}"),
    ],
)
def test_a_value_that_cannot_be_meant_is_told_with_what_is_allowed(key: str, value: str, said: str) -> None:
    found = mistake_of(f"models_dir: m\n{key}: {value}\n")

    assert found.startswith(f"c.yaml:2: {key}")
    assert said in found


# --- models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ("{a: {path: x, repo: o/r}}", "models.a: path and repo; a model is in one place"),
        ("{a: {repo: x}}", "models.a.repo: 'x'; it takes org/repo or org/repo:quant"),
        ("{a: {repo: ../..}}", "'../..'; it takes org/repo"),
        ("{a: {url: 'http://h/x.gguf'}}", "models.a.url: it is http; https alone is allowed"),
        ("{../a: {}}", "models: '../a': it contains '..'"),
        ("{/a: {}}", "models: '/a': it begins with '/'"),
        ("{'': {}}", "models: '': it is empty"),
        ("{a: {path: x, aliases: [../b]}}", "models.a.aliases[0]: '../b': it contains '..'"),
        ("{a: {path: x, aliases: [b, b]}}", "models.a.aliases[1]: 'b' is given twice"),
        ("{a: {path: x, aliases: a}}", "models.a.aliases: 'a' is its own name"),
        ("{'a*': {path: x}}", "models.a*: 'a*' is a pattern for many models, but has a source"),
        ("{'a*': {aliases: b}}", "models.a*: 'a*' is a pattern: an alias would name many models"),
        ("{a: {pin: true, ttl: 5m}}", "models.a.ttl: of a model that is pinned, and never unloaded"),
    ],
)
def test_a_model_that_cannot_be_meant_is_refused(models: str, said: str) -> None:
    found = mistake_of(f"models_dir: m\nmodels: {models}\n")

    assert found.startswith("c.yaml:2: ")
    assert said in found


def test_the_same_alias_of_two_models_is_told_once_with_both_lines() -> None:
    found = mistake_of("models:\n  a: {path: x, aliases: c}\n  b: {path: y, aliases: c}\n")

    assert found == "c.yaml:3: models.b: 'c' is an alias of 'b' and of 'a' (c.yaml:2)"


def test_an_alias_that_is_another_models_name_is_refused() -> None:
    found = mistake_of("models:\n  a: {path: x, aliases: b}\n  b: {path: y}\n")

    assert found == "c.yaml:2: models.a: 'b' is an alias of 'a', and a model (c.yaml:3)"


def test_aliases_in_a_circle_are_told_once() -> None:
    found = mistake_of("models:\n  a: {path: x, aliases: b}\n  b: {path: y, aliases: a}\n")

    assert found == (
        "c.yaml:2: models.a: 'b' is an alias of 'a', and a model (c.yaml:3), and the other way round"
    )


def test_a_key_that_is_given_twice_is_told_with_both_lines() -> None:
    found = mistakes_of("models:\n  a: {path: x}\n  b: {path: y}\n  a: {path: z}\nmodels: {}\n")

    assert found == [
        "c.yaml:4: models.a: is given twice, first in line 2; keep one of them",
        "c.yaml:5: models: is given twice, first in line 1; keep one of them",
    ]


def test_a_model_in_two_groups_is_refused_by_whatever_name() -> None:
    found = mistakes_of(
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
        "c.yaml:6: groups.two[0]: 'a' is in groups.one[0] too; a model is in one group, once",
        "c.yaml:7: groups.three[0]: 'a' is in groups.one[0] too; a model is in one group, once",
    ]


def test_a_group_of_a_model_that_is_nowhere_is_refused() -> None:
    groups = "groups: {g: [b]}"

    assert mistake_of(f"models: {{a: {{path: x}}}}\n{groups}") == (
        "c.yaml:2: groups.g[0]: 'b' is no model of this config"
    )
    assert config_of(f"models_dir: m\n{groups}").groups == {"g": ("b",)}  # it may be found there


def test_a_default_model_that_is_nowhere_is_refused() -> None:
    assert mistake_of("models: {a: {path: x}}\ndefault_model: b") == (
        "c.yaml:2: default_model: 'b' is no model of this config"
    )
    assert config_of("models: {a: {path: x, aliases: b}}\ndefault_model: b").default_model == "b"


def test_a_model_without_a_place_needs_one_where_it_can_be_found() -> None:
    assert mistake_of("models: {a: {ctx_size: 5}}") == (
        "c.yaml:1: models.a: it takes path, repo or url: "
        "there is no models_dir or cache where it could be found"
    )
    assert config_of("models: {a: {ctx_size: 5}}\ncaches: huggingface").models["a"].source is None


def test_more_pinned_models_than_may_be_loaded_are_refused() -> None:
    found = mistake_of("models: {a: {path: x, pin: true}, b: {path: y, pin: true}}\nmax_loaded: 1")

    assert found == "c.yaml:2: max_loaded: 1, and 2 models are pinned: a, b"


def test_a_config_that_serves_nothing_is_refused() -> None:
    assert mistake_of("listen: 127.0.0.1:80") == (
        "c.yaml: there is nothing to serve; give models_dir, models, caches, or downloads.on_demand"
    )


def test_one_mistake_is_one_line() -> None:
    """What was refused is not judged again as if it were missing."""
    assert len(mistakes_of("models_dirs: m")) == 1
    assert len(mistakes_of("models: {a: {path: ''}}")) == 1
    assert len(mistakes_of("models: {../a: {path: x}}\ngroups: {g: [a]}\ndefault_model: a")) == 1


def test_tls_on_a_socket_is_refused() -> None:
    found = mistake_of("{models_dir: m, listen: x.sock, http: {tls_cert: a, tls_key: b}}")

    assert "http.tls_cert: TLS on a Unix socket protects nothing" in found


def test_private_addresses_allow_http() -> None:
    config = config_of(
        "{models: {a: {url: 'http://h/x'}}, downloads: {private_addresses: true, endpoint: 'http://h'}}"
    )

    assert config.models["a"].source == "http://h/x"


# --- the environment and secrets ---------------------------------------------------------------------


def test_a_variable_that_is_not_set_is_named() -> None:
    assert mistake_of("models_dir: ${MODELS}") == (
        "c.yaml:1: models_dir: the environment has no MODELS; "
        "set it, or give a value for then: ${MODELS:-value}"
    )


@pytest.mark.parametrize("text", ["${", "${1}", "${A", "${A-b}", "x${}"])
def test_what_begins_like_a_variable_and_is_none_is_refused(text: str) -> None:
    assert "'${' begins the name of a variable" in mistake_of(f'models_dir: "{text}"')


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
def test_what_the_environment_holds_is_never_shown(text: str) -> None:
    found = mistakes_of(f"max_loads: 1\n{text}", S=SECRET)

    assert found
    assert not [each for each in found if SECRET in each]


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
def test_what_may_be_a_secret_is_not_shown(text: str) -> None:
    found = mistakes_of(text)
    assert found
    assert SECRET not in "".join(found)


def test_of_what_the_environment_holds_not_even_the_beginning_is_shown() -> None:
    (found,) = mistakes_of("{default_model: '${S}', models: {a: {path: x}}}", S=SECRET * 10)
    assert found.endswith("default_model: '${S}' is no model of this config")


# --- YAML --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "c.yaml: it is empty"),
        (b"# nothing\n---\n", "c.yaml: it is empty"),
        (b"- a\n- b\n", "c.yaml:1: a list; a config has keys"),
        (b"hello\n", "c.yaml:1: 'hello'; a config has keys"),
        (b"models_dir: m\nx\xff: 1\n", "c.yaml:2: the byte 0xff is not UTF-8"),
        ("models_dir: m".encode("utf-16"), "c.yaml:1: the byte 0xff is not UTF-8"),
        (b"models_dir: m\na: \x00\n", "c.yaml:2: this is no YAML: control characters are not allowed"),
        (b"models:\n\ta: {}\n", "c.yaml:2: this is no YAML: found character"),
        (b"models: {a: [}\n", "c.yaml:1: this is no YAML: "),
        (b"models_dir: m\n---\na: 1\n", "c.yaml:2: a second document begins here"),
        (b"a: &x 1\nb: *x\n", "c.yaml:2: b: the alias *x stands for what is said elsewhere"),
        (b"<<: *x\n", "c.yaml:1: <<: the alias *x"),
        (
            b"models: !!python/object:os.system {}\n",
            "c.yaml:1: models: the tag 'tag:yaml.org,2002:python/object",
        ),
        (b"? [a]\n: b\n", "c.yaml:1: a key has to be text, not a list or a mapping"),
        (b'a: "\\ud800"\n', "c.yaml:1: this is no YAML: "),
        (b"? " + b"a" * 513 + b"\n: 1", "c.yaml:1: a key has 513 letters, and at most 512"),
    ],
)
def test_what_is_no_config_says_where(text: bytes, said: str) -> None:
    assert mistake_of(text).startswith(said)


def test_a_tab_is_named() -> None:
    assert "the line begins with a tab: indent with spaces" in mistake_of("models:\n\ta: {}\n")


def test_a_bomb_of_aliases_is_refused_before_it_goes_off() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]

    assert "a1[0]: the alias *a0" in mistake_of("\n".join(levels))


def test_depth_and_number_of_values_are_bounded() -> None:
    assert mistake_of("[" * 100_000) == "c.yaml:1: more than 16 levels in one another"
    assert mistake_of("{a: " * 100_000) == "c.yaml:1: more than 16 levels in one another"
    assert "more than 100000 values" in mistake_of("- a\n" * 200_000)


def test_a_config_of_10_mb_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    with path.open("wb") as file:
        file.truncate(10_000_000)

    with pytest.raises(ConfigIssues) as caught:
        load(path, {})

    assert caught.value.details == (f"{path}: it has 10000000 bytes, and a config may have {MAX_BYTES}",)


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigIssues, match="has one mistake"):
        load(Path("/dev/zero"), {})


def test_of_a_thousand_mistakes_a_hundred_are_told() -> None:
    found = mistakes_of("models_dir: m\n" + "".join(f"k{n}: 1\n" for n in range(1000)))

    assert len(found) == 101
    assert found[-1] == "… and 900 more"


def test_rules_are_few() -> None:
    found = mistake_of("models_dir: m\nmodels:\n" + "".join(f"  'k{n}*': {{}}\n" for n in range(200)))

    assert found == "c.yaml:103: models: more than 100 rules with * or ?"


def test_errors_can_be_shown_on_any_terminal() -> None:
    found = mistakes_of('models_dir: m\n"a\\e[2Jb": 1\nmax_loaded: "\\e[31m\\u202e"\n')

    assert all(each.isprintable() for each in found)


@pytest.mark.parametrize(
    "lines",
    [
        lambda count: ["listen:", *(f"- /run/{number}.sock" for number in range(count))],
        lambda count: ["groups:", "  g:", *(f"  - ${{S}}{number}" for number in range(count))],
    ],
    ids=["listen", "groups"],
)
def test_a_config_takes_time_in_proportion_to_its_size(lines: Callable[[int], list[str]]) -> None:
    def taken_s(count: int) -> float:
        text = "\n".join(("models: {a: {path: x}}", *lines(count)))
        began_s = time.thread_time()
        mistakes_of(text, S="x")
        return time.thread_time() - began_s

    small_s, large_s = (min(taken_s(count) for _ in range(3)) for count in (500, 8000))
    assert large_s < 64 * small_s  # it has 16 times as much; each compared with each would be 256

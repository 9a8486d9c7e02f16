"""The help texts are real output: 0.2.90 of August 2024, 0.3.16 of August 2025, b11434 of November 2026."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamasup.core.llama_server.help_text import (
    Capabilities,
    Option,
    looks_like_llama_server,
    parse_help,
    parse_version,
)
from tests.kit.paths import FIXTURES

HELP = {path.stem: path.read_text() for path in sorted((FIXTURES / "help").glob("*.txt"))}
BUILDS = list(HELP)
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def of(build: str) -> Capabilities:
    return Capabilities("unknown", parse_help(HELP[build]), ())


def option(build: str, spelling: str) -> Option:
    found = of(build).find(spelling)
    assert found is not None, f"{build} lists no {spelling}"
    return found


def one(text: str) -> Option:
    (parsed,) = parse_help(text)
    return parsed


# --- the whole text ------------------------------------------------------------------------------


@pytest.mark.parametrize("build", BUILDS)
def test_every_option_line_is_one_option(build: str) -> None:
    # Counted another way: in 2024 options are indented by 2 or 9 blanks, later by none.
    indent = r" {2}(?: {7})?" if build == "0.2.90" else ""
    lines = re.findall(rf"^{indent}-{{1,2}}[a-z]\S*.*$", HELP[build], re.MULTILINE | re.IGNORECASE)
    options = parse_help(HELP[build])
    assert len(options) == len(lines) > 170
    for parsed, line in zip(options, lines, strict=True):
        assert line.split()[0].rstrip(",") in (parsed.spellings[0], f"{parsed.spellings[0]}(s)")


def test_each_variable_belongs_to_the_option_above_it() -> None:
    expected: dict[str, str] = {}
    current = ""
    for line in HELP["b11434"].splitlines():
        if re.match("--?[a-zA-Z]", line):
            current = line.split()[0].rstrip(",")
        if match := re.search(r"\(env: (.+)\)$", line):
            expected[current] = match[1]
    assert len(expected) > 140
    assert {o.spellings[0]: o.env for o in parse_help(HELP["b11434"]) if o.env} == expected


@pytest.mark.parametrize("build", BUILDS)
def test_options_in_descriptions_are_no_spellings(build: str) -> None:
    for parsed in parse_help(HELP[build]):
        for spelling in parsed.spellings:
            assert re.fullmatch(r"--?[A-Za-z][A-Za-z0-9.-]*", spelling)
        assert set(parsed.negations) <= set(parsed.spellings)


@pytest.mark.parametrize("build", BUILDS)
def test_descriptions_contain_no_other_option_or_title(build: str) -> None:
    for parsed in parse_help(HELP[build]):
        assert "-----" not in parsed.description
        assert "  " not in parsed.description
        assert "(env:" not in parsed.description
        assert not parsed.description.endswith(":") or "chunk" in parsed.spellings[0]


@pytest.mark.parametrize("build", BUILDS)
def test_every_build_knows_the_basic_options(build: str) -> None:
    for spelling in ("--model", "--host", "--port", "--ctx-size", "--parallel", "--threads", "-ngl", "-ctk"):
        if (build, spelling) != ("0.2.90", "-ngl"):  # a build without a GPU did not list it then
            assert of(build).knows(spelling) == spelling


@pytest.mark.parametrize("build", BUILDS)
def test_carriage_returns_colors_and_tabs_are_ignored(build: str) -> None:
    expected = parse_help(HELP[build])
    assert parse_help(HELP[build].replace("\n", "\r\n")) == expected
    coloured = re.sub(r"(?m)^( *)(--?[a-z-]+)", "\\1\x1b[1;32m\\2\x1b[0m", HELP[build])
    assert coloured != HELP[build]
    assert parse_help(coloured) == expected
    assert parse_help(re.sub(r"(?m)^ {8}", "\t", HELP[build])) == expected


# --- one option ----------------------------------------------------------------------------------


def test_flash_attention_is_a_switch_in_2024_and_takes_a_value_in_2026() -> None:
    assert option("0.2.90", "-fa").argument is None
    assert option("0.3.16", "--flash-attn").argument is None
    assert option("b11434", "--flash-attn").argument == "[on|off|auto]"
    assert option("b11434", "-fa").allowed == ("on", "off", "auto")


def test_quoted_values_in_a_description_are_allowed() -> None:
    parsed = one(
        "-fa,   --flash-attn FA                  set Flash Attention use ('on', 'off', or 'auto', default:\n"
        "                                        'auto')\n"
        "                                        (env: LLAMA_ARG_FLASH_ATTN)\n"
    )
    assert (parsed.argument, parsed.allowed, parsed.default) == ("FA", ("on", "off", "auto"), "'auto'")


def test_spellings_keep_their_order() -> None:
    assert option("b11434", "-ngld").spellings == (
        "--spec-draft-ngl",
        "-ngld",
        "--gpu-layers-draft",
        "--n-gpu-layers-draft",
    )
    assert option("0.2.90", "--usage").spellings == ("-h", "--help", "--usage")
    assert option("0.2.90", "--embeddings").spellings == ("--embedding", "--embeddings")
    assert option("b11434", "--fim-qwen-1.5b-default").spellings == ("--fim-qwen-1.5b-default",)


def test_negations_are_recognized() -> None:
    assert option("b11434", "-cb").negations == ("-nocb", "--no-cont-batching")
    assert option("b11434", "-kvo").negations == ("-nkvo", "--no-kv-offload")
    assert option("b11434", "--repack").negations == ("-nr", "--no-repack")
    assert option("b11434", "--mmproj-auto").negations == ("--no-mmproj", "--no-mmproj-auto")
    assert option("b11434", "-np").negations == ()
    assert option("0.3.16", "-cb").negations == ()
    assert option("0.3.16", "-nocb").negations == ("-nocb", "--no-cont-batching")


def test_short_spelling_after_a_negation_does_not_negate() -> None:
    assert one("--fit, --no-fit, -f  fit\n").negations == ("--no-fit",)


def test_description_on_the_next_line_is_read() -> None:
    parsed = option("b11434", "--control-vector-layer-range")
    assert parsed.argument == "START END"
    assert parsed.arity == 2
    assert parsed.description == "layer range to apply the control vector(s) to, start and end inclusive"


@pytest.mark.parametrize(
    ("build", "spelling", "argument", "arity"),
    [
        ("b11434", "--mlock", None, 0),
        ("b11434", "--metrics", None, 0),
        ("b11434", "--device", "<dev1,dev2,..>", 1),
        ("b11434", "--tensor-split", "N0,N1,N2,...", 1),
        ("b11434", "--override-tensor", "<tensor name pattern>=<buffer type>,...", 1),
        ("b11434", "--hf-repo", "<user>/<model>[:quant]", 1),
        ("b11434", "--logit-bias", "TOKEN_ID(+/-)BIAS", 1),
        ("0.3.16", "--spec-replace", "TARGET DRAFT", 2),
        ("0.2.90", "-l", "TOKEN_ID(+/-)BIAS", 1),
        ("0.2.90", "--lora-scaled", "FNAME S", 2),
        ("0.2.90", "-pps", None, 0),
        ("0.2.90", "--chunk-separator", "STRING", 1),
    ],
)
def test_argument_is_kept_as_printed(build: str, spelling: str, argument: str | None, arity: int) -> None:
    found = of(build).find(spelling)
    assert (found.argument, found.arity) == (argument, arity) if found else spelling == "--mlock"


@pytest.mark.parametrize(
    ("build", "spelling", "allowed"),
    [
        ("b11434", "--cache-type-k", CACHE_TYPES),
        ("0.3.16", "-ctv", CACHE_TYPES),
        ("0.2.90", "-ctv", ()),  # that build does not say
        ("b11434", "--load-mode", ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")),
        ("b11434", "--split-mode", ("none", "layer", "row", "tensor")),
        ("b11434", "--fit", ("on", "off")),
        ("b11434", "--pooling", ("none", "mean", "cls", "last", "rank")),
        ("b11434", "--cpu-strict", ("0", "1")),
        ("b11434", "--poll", ()),  # <0...100> is a range
        ("b11434", "--device", ()),
        ("b11434", "--tensor-split", ()),
        ("b11434", "--n-gpu-layers", ()),  # a number, or 'auto', or 'all'
        ("b11434", "--verbosity", ()),  # the list explains a scale
        ("b11434", "--dry-sequence-breaker", ()),
        ("b11434", "--reasoning-effort", ()),  # "a level such as"
        ("0.2.90", "--numa", ("distribute", "isolate", "numactl")),
        ("0.2.90", "--log-format", ("text", "json")),
    ],
)
def test_allowed_values_come_from_the_help(build: str, spelling: str, allowed: tuple[str, ...]) -> None:
    assert option(build, spelling).allowed == allowed


def test_list_in_place_of_the_argument_is_allowed_values() -> None:
    parsed = option("b11434", "--spec-type")
    assert parsed.argument is not None
    assert parsed.allowed == tuple(parsed.argument.split(","))
    assert "draft-simple" in parsed.allowed
    assert parsed.default == "none"


def test_default_outside_the_list_is_allowed() -> None:
    assert option("b11434", "--reasoning-format").allowed == ("auto", "none", "deepseek", "deepseek-legacy")


@pytest.mark.parametrize(
    ("build", "spelling", "default"),
    [
        ("b11434", "--ctx-size", "0, 0 = loaded from model"),
        ("b11434", "--cache-ram", "8192, -1 - no limit, 0 - disable"),
        ("b11434", "--reasoning", "'auto' (detect from template)"),
        ("b11434", "--fit-target", "1024"),
        ("b11434", "--path", ""),
        ("b11434", "--cors-methods", "GET, POST, DELETE, OPTIONS"),
        ("b11434", "--host", "127.0.0.1"),
        ("b11434", "--metrics", "disabled"),
        ("b11434", "--alias", None),
        ("0.2.90", "--parallel", "1"),
    ],
)
def test_default_is_kept_as_printed(build: str, spelling: str, default: str | None) -> None:
    assert option(build, spelling).default == default


def test_unclosed_default_reaches_to_the_end() -> None:
    assert one("-x, --example N  an example (default: 1 (one\n").default == "1 (one"


def test_variables_are_read() -> None:
    assert option("b11434", "--parallel").env == "LLAMA_ARG_N_PARALLEL"
    assert option("b11434", "--load-mode").env == "LLAMA_ARG_LOAD_MODE"
    assert option("b11434", "--draft-max").env == "LLAMA_ARG_DRAFT_MAX"
    assert option("0.3.16", "--api-key").env == "LLAMA_API_KEY"
    assert option("0.2.90", "--parallel").env is None


def test_dashes_and_bullets_in_a_description_stay_text() -> None:
    described = option("b11434", "--hf-repo").description
    assert "to disable, add --no-mmproj example: ggml-org" in described
    assert "- numactl: use the CPU map provided by numactl" in option("b11434", "--numa").description
    assert option("b11434", "--tools").env == "LLAMA_ARG_TOOLS"


def test_deprecated_option_is_accepted() -> None:
    assert of("b11434").knows("-dt") == "-dt"


def test_layout_of_early_2024_is_read() -> None:
    text = "options:\n  -h, --help            show this help\n  -t N, --threads N     number of threads\n"
    assert [(o.spellings, o.argument) for o in parse_help(text)] == [
        (("-h", "--help"), None),
        (("-t", "--threads"), "N"),
    ]


def test_comma_before_the_description_is_ignored() -> None:
    parsed = one("-mqkv,  --merge-qkv,   merge the projections\n")
    assert (parsed.spellings, parsed.description) == (("-mqkv", "--merge-qkv"), "merge the projections")


def test_lone_dash_is_no_spelling() -> None:
    assert one("-x, -, --example  an example\n").spellings == ("-x", "--example")


# --- what a build knows --------------------------------------------------------------------------


def test_removed_option_has_a_hint() -> None:
    removed = option("b11434", "--draft-max")
    assert removed.removed
    assert removed.removed_hint == "--spec-draft-n-max or --spec-ngram-mod-n-max"
    assert of("b11434").knows("--draft-max") is None
    assert of("b11434").knows("--draft-max", "--spec-draft-n-max") == "--spec-draft-n-max"
    assert of("0.3.16").knows("--spec-draft-n-max", "--draft-max") == "--draft-max"


def test_hint_at_an_unknown_option_is_skipped() -> None:
    text = "--old N  the argument has been removed. use --gone or --kept\n--kept N  kept\n"
    assert Capabilities("x", parse_help(text), ()).nearest("--old") == "--kept"


def test_removed_option_without_replacement_has_no_hint() -> None:
    parsed = one("--old N                                 the argument has been removed\n")
    assert (parsed.removed, parsed.removed_hint) == (True, "")
    assert Capabilities("x", (parsed,), ()).nearest("--old") is None


def test_accepted_option_goes_before_a_removed_one() -> None:
    text = "--new N  the argument has been removed. use --other\n-n, --new N  a new meaning\n"
    both = Capabilities("x", parse_help(text), ())
    found = both.find("--new")
    assert found is not None
    assert found.spellings == ("-n", "--new")


def test_first_of_two_entries_counts() -> None:
    # August 2024 lists the tools' options too: export-lora's --model has no argument.
    assert option("0.2.90", "--model").argument == "FNAME"


def test_underscores_of_long_options_are_dashes() -> None:
    assert of("b11434").knows("--ctx_size") == "--ctx_size"
    assert of("b11434").find("-c_") is None


def test_nearest_to_a_removed_switch_is_the_option_with_its_value() -> None:
    assert of("b11434").find("--mlock") is None
    assert of("b11434").nearest("--mlock") == "--load-mode"
    assert of("b11434").nearest("--no-mmap") == "--load-mode"
    assert of("0.3.16").nearest("--mlock") == "--mlock"


@pytest.mark.parametrize(
    ("build", "asked", "nearest"),
    [
        ("b11434", "--draft-max", "--spec-draft-n-max"),
        ("b11434", "--draft-n-min", "--spec-draft-n-min"),
        ("b11434", "--spec-ngram-size-m", "--spec-ngram-simple-size-m"),
        ("b11434", "--ctx-sise", "--ctx-size"),
        ("b11434", "--draft-model", "--model-draft"),
        ("0.2.90", "--draft-model", "--model-draft"),
        ("0.2.90", "--flash-attention", "--flash-attn"),
        ("0.2.90", "--spec-type", None),
        ("0.3.16", "--fit", None),
        ("b11434", "--kv-type", None),
        ("b11434", "--none", None),
        ("0.3.16", "--auto", None),
        ("b11434", "--frobnicate", None),
        ("b11434", "-Z", None),
        ("b11434", "", None),
    ],
)
def test_nearest_spelling_is_close_or_none(build: str, asked: str, nearest: str | None) -> None:
    assert of(build).nearest(asked) == nearest


def test_description_of_host_shows_unix_sockets() -> None:
    assert [of(build).unix_sockets for build in ("0.2.90", "0.3.16", "b11434")] == [False, True, True]
    assert not Capabilities("x", (), ()).unix_sockets


# --- what is no help text ------------------------------------------------------------------------

LS_HELP = """Usage: ls [OPTION]... [FILE]...
  -a, --all                  do not ignore entries starting with .
      --block-size=SIZE      with -l, scale sizes by SIZE when printing them
      --color[=WHEN]         color the output WHEN
"""


def test_help_of_another_program_is_recognized() -> None:
    assert [o.spellings[-1] for o in parse_help(LS_HELP)] == ["--all", "--block-size", "--color"]
    assert not looks_like_llama_server(parse_help(LS_HELP))
    assert not looks_like_llama_server(parse_help(""))


@pytest.mark.parametrize("build", BUILDS)
def test_help_of_llama_server_is_recognized(build: str) -> None:
    assert looks_like_llama_server(parse_help(HELP[build]))


def test_llama_cli_is_not_llama_server() -> None:
    without_server = tuple(o for o in parse_help(HELP["b11434"]) if "--port" not in o.spellings)
    assert not looks_like_llama_server(without_server)


def test_wrapper_with_few_options_is_not_llama_server() -> None:
    wrapper = "  -m, --model MODEL\n  --host HOST\n  --port PORT\n  --ctx-size CTX_SIZE\n"
    options = parse_help(wrapper)
    assert [o.spellings[-1] for o in options] == ["--model", "--host", "--port", "--ctx-size"]
    assert not looks_like_llama_server(options)


_PUNCTUATION = st.sampled_from([*"-_=(),\n\t", "--", "\r\n", "  ", "  - ", "...", "\x1b[0m"])
_WORDS = st.sampled_from(
    ["--no-", "-x", "--model", "(default: ", "(env: X)", "{a,b}", "N", "[on|off]", "<0...9>", "- a: b", "(s)"]
)
_REMOVED = st.just("the argument has been removed. use ")
_FRAGMENTS = st.one_of(_PUNCTUATION, _WORDS, _REMOVED)


@given(st.one_of(st.text(), st.lists(_FRAGMENTS, max_size=60).map("".join)))
@example("--A00_")
def test_parsers_raise_for_no_text(text: str) -> None:
    options = parse_help(text)
    assert all(parsed.spellings and set(parsed.negations) <= set(parsed.spellings) for parsed in options)
    capabilities = Capabilities(parse_version(text), options, ())
    assert capabilities.version
    for parsed in options:
        for spelling in parsed.spellings:
            assert capabilities.find(spelling) is not None
    nearest = capabilities.nearest(text)
    assert nearest is None or capabilities.knows(nearest)


# --- version -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ((FIXTURES / "version" / "b11434.txt").read_text(), "0.6.0-dev"),
        (
            "version: 0.6.0 (build 11434, commit abcdef0)\nbuilt with …\n",
            "0.6.0 (build 11434, commit abcdef0)",
        ),
        ("version: 10114 (ed7adbfef)\nbuilt with cc for x86_64-linux-gnu\n", "10114 (ed7adbfef)"),
        ("version: 1 (4227c9b)\r\n", "1 (4227c9b)"),
        ("ggml_cuda_init: found 1 CUDA devices:\nversion: b11434\n", "b11434"),
        ("version:\n", "unknown"),
        ("version: (build 0, commit unknown)", "unknown"),
        ("Python 3.11.2", "unknown"),
        ("", "unknown"),
    ],
)
def test_version_is_parsed(text: str, version: str) -> None:
    assert parse_version(text) == version

"""The pages of the documentation name only what exists: files, headings, commands, options and keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import llamasup
from llamasup import errors
from llamasup.core.config.config_keys import json_schema
from llamasup.features import config_keys
from tests.kit.configs import load
from tests.kit.paths import ROOT
from tests.kit.tour import RUN, blocks, marked_blocks

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^()\s]+)\)")
HELP = (ROOT / "tests" / "golden" / "help.txt").read_text("utf-8")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INDENTED = re.compile(r"(?<=\n\n)((?: {4}.+\n)+)")
COMMAND_LINE = re.compile(r"^(?:\$ )?(?:sudo )?llamasup ((?:[^\n#\\]|\\\n)+)", re.M)


def text_of(page: Path) -> str:
    return page.read_text("utf-8")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that GitHub makes of the headings, and those that the page sets itself."""
    named = re.findall(r'<a id="([^"]+)">', text_of(page))
    headings = re.findall(r"^#+ (.+)$", without_code(text_of(page)), re.M)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading)).lower() for heading in headings)
    return frozenset([*named, *(heading.replace(" ", "-") for heading in plain)])


def links(page: Path) -> Iterator[str]:
    for target in LINK.findall(without_code(text_of(page))):
        if not re.match(r"[a-z]+:", target):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    missing = []
    for target in links(page):
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            missing.append(target)
    assert not missing


@cache
def options() -> dict[str, frozenset[str]]:
    """The options of each command, as its help lists them."""
    found = {}
    for section in re.split(r"^\$ llamasup", HELP, flags=re.M)[1:]:
        name, _, text = section.partition(" --help\n")
        words = re.findall(r"(?<![\w-])(-[a-zA-Z]|--[a-z][a-z0-9-]*)", text)
        found[name.strip()] = frozenset(words) | {"--help", "-h"}
    return found


def unknown_words(line: str) -> list[str]:
    """The commands and options of ``llamasup LINE`` that do not exist."""
    words = re.split(r"\s[|&>;]|\s#|\s--\s|\s{3,}", line.replace("\\\n", " ") + " ")[0].split()
    name: list[str] = []
    while words and " ".join([*name, words[0]]) in options():
        name.append(words.pop(0))
    if not name:
        return [] if not words or words[0].startswith(("-", "COMMAND")) else [words[0]]
    given = (word.partition("=")[0].strip("[]") for word in words if re.match(r"\[?--?[a-z]", word))
    return [word for word in given if word not in options()[" ".join(name)]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_command_lines_have_only_commands_and_options_that_exist(page: Path) -> None:
    text = text_of(page)
    blocks = [block for language, block in FENCED.findall(text) if language in ("", "sh", "console", "shell")]
    indented = [re.sub("^ {4}", "", block, flags=re.M) for block in INDENTED.findall(without_code(text))]
    lines = COMMAND_LINE.findall("\n".join([*blocks, *indented]))
    wrong = {line: words for line in lines if "·" not in line and (words := unknown_words(line))}
    assert not wrong


# --- configs ----------------------------------------------------------------------------------------

SCHEMA = json_schema(config_keys())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
# A block with one of these words is for another program: Prometheus, Traefik, Compose or Kubernetes.
OTHER_PROGRAMS = re.compile(r"^[ -]*(?:alert|middlewares|image|apiVersion|scrape_configs):", re.M)
INLINE_KEY = re.compile(r"`([a-z][a-z_]+): (?:[\[{\d]|true|false|never)[^`\n]*`")
INLINE_PATH = re.compile(r"`([a-z_]+)\.([a-z_]+)`")
# Keys of other programs, of requests and of answers that pages write as `key: value`.
OTHER_KEYS = {"detached", "enabled", "filters", "finish_reason", "hooks", "keep_alive", "output_modalities"}


def configs(page: Path) -> list[str]:
    """The blocks of YAML that are configs of llamasup."""
    fenced = [block for language, block in FENCED.findall(text_of(page)) if language == "yaml"]
    return [block for block in fenced if not OTHER_PROGRAMS.search(block)]


def keys_of(schema: Any) -> Iterator[str]:
    """The names of all keys in a JSON Schema."""
    for name, value in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if name == "properties":
            yield from value
        if isinstance(value, dict | list):
            yield from keys_of(value)


KNOWN_KEYS = {*keys_of(SCHEMA), *OTHER_KEYS}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_configs_have_only_keys_and_values_that_exist(page: Path) -> None:
    wrong = [error.message for text in configs(page) for error in VALIDATOR.iter_errors(yaml.safe_load(text))]
    assert not wrong
    text = without_code(text_of(page))
    assert not set(INLINE_KEY.findall(text)) - KNOWN_KEYS
    sections = {name: set(keys_of(part)) for name, part in SCHEMA["properties"].items()}
    named = [(section, key) for section, key in INLINE_PATH.findall(text) if sections.get(section)]
    assert not [f"{section}.{key}" for section, key in named if key not in sections[section]]


def test_config_of_the_readme_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = configs(PAGES[0])
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "llamasup.yaml").write_text(text, "utf-8")
    assert load(tmp_path / "llamasup.yaml", {}).defaults.continue_streams


# --- measurements ----------------------------------------------------------------------------------

GENERATED = re.compile(r"<!-- (\S+): [^\n]* -->\n.*?<!-- end of \1 -->", re.S)
TABLE = re.compile(r"(?:^ *\|.*\n)+", re.M)
FIGURE = re.compile(r"[~<]?\d[\d.,–]* ?(?:ms|s|µs|%|[KMG]i?B|tokens/s|×)?(?: \(.*\))?")
STATUS = re.compile(r"[1-5]\d\d")
# How many tables of a page were measured once, by hand. All others lie between the marks of their script.
MEASURED_BY_HAND = {"embedded.md": 1, "performance.md": 1, "sidecar.md": 1}


def figures(table: str) -> list[str]:
    """The cells with a figure; the first column and the head have none."""
    rows = [row.strip().strip("|").split("|")[1:] for row in table.splitlines()[2:]]
    cells = [cell.strip() for row in rows for cell in row]
    return [cell for cell in cells if FIGURE.fullmatch(cell) and not STATUS.fullmatch(cell)]


@pytest.mark.parametrize("page", [*PAGES[:1], *PAGES[2:]], ids=lambda page: page.name)
def test_tables_of_measurements_come_from_a_script(page: Path) -> None:
    tables = TABLE.findall(GENERATED.sub("", text_of(page)))
    by_hand = [table for table in tables if len(figures(table)) >= 4]
    assert len(by_hand) <= MEASURED_BY_HAND.get(page.name, 0), "\n".join(by_hand)


# --- the pages as a whole ----------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_llamasup_is_installed_from_a_checkout(page: Path) -> None:
    assert not re.findall(r"\binstall [\"']?llamasup\b", text_of(page)), "llamasup is not on PyPI"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_marked_blocks_are_commands(page: Path) -> None:
    assert len(marked_blocks(page)) == len(re.findall("^" + RUN, text_of(page), re.M))


def test_each_page_is_linked_from_the_readme() -> None:
    linked = {target.partition("#")[0] for target in links(PAGES[0])}
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= linked


def test_list_of_errors_is_complete() -> None:
    section = text_of(ROOT / "docs" / "python.md").split("\n## Errors\n")[1].split("\n## ")[0]
    listed = re.findall(r"`(\w+)`", " ".join(re.findall(r"^- ([^:]*):", section, re.M)))
    assert sorted(listed) == sorted(
        {name for name in llamasup.__all__ if hasattr(errors, name)} - {"LlamasupError"}
    )


def test_picture_of_the_readme_shows_the_output_of_the_tour() -> None:
    texts = re.findall(r"<text[^>]*>([^<]*)", text_of(ROOT / "docs" / "images" / "run.svg"))
    (shown,) = blocks("text")
    assert not {line.strip() for line in shown.splitlines()} - set(texts)


def test_the_pages_together_have_at_most_60_000_words() -> None:
    assert sum(len(text_of(page).split()) for page in (ROOT / "docs").glob("*.md")) <= 60_000

"""Paths after ``--`` are made absolute, because the child runs in another folder."""

from __future__ import annotations

import pytest

from llamasup.core.llama_server.argv_builder import with_absolute_paths
from llamasup.errors import UsageInvalid
from tests.core.planning.plans import MIDDLE, NEW, OLD, capabilities


def here(*extra: str, build: str = NEW) -> tuple[str, ...]:
    return with_absolute_paths(capabilities(build), extra, lambda name: f"/here/{name}")


@pytest.mark.parametrize(
    ("flag", "value", "resolved"),
    [
        ("--lora", "a.gguf", "/here/a.gguf"),
        ("--lora", "a.gguf,b.gguf", "/here/a.gguf,/here/b.gguf"),
        ("--lora-scaled", "a.gguf:0.5,b.gguf:2", "/here/a.gguf:0.5,/here/b.gguf:2"),
        ("--lora-scaled", "a:b.gguf", "/here/a:b.gguf"),
        # mcmonkeyprojects/SwarmUI#808, kohya-ss/sd-webui-additional-networks#91
        ("--lora", '"te,st1.gguf"', '"/here/te,st1.gguf"'),
        ("--lora", 'b.gguf,"model [v1, overfit].gguf"', '/here/b.gguf,"/here/model [v1, overfit].gguf"'),
        ("--lora-scaled", '"te,st1.gguf:0.5",b.gguf:2', '"/here/te,st1.gguf:0.5",/here/b.gguf:2'),
        ("--lora", 'a"b.gguf', '/here/a"b.gguf'),
        ("--grammar-file", "a,b.gbnf", "/here/a,b.gbnf"),
        ("--chat-template-file", "t.jinja", "/here/t.jinja"),
        ("--slot-save-path", "slots", "/here/slots"),
        ("-md", "draft.gguf", "/here/draft.gguf"),
        ("--slot-save-path", "", ""),
    ],
)
def test_paths_of_extra_arguments_are_resolved(flag: str, value: str, resolved: str) -> None:
    assert here(flag, value) == (flag, resolved)


def test_only_the_path_of_two_values_is_resolved() -> None:
    assert here("--lora-scaled", "a.gguf", "0.5", build=OLD) == ("--lora-scaled", "/here/a.gguf", "0.5")


def test_a_build_that_takes_one_adapter_gets_its_path_without_quotes() -> None:
    assert here("--lora", '"te,st1.gguf"', build=MIDDLE) == ("--lora", "/here/te,st1.gguf")
    assert here("--lora", "te,st1.gguf", build=MIDDLE) == ("--lora", "/here/te,st1.gguf")


def test_other_values_are_unchanged() -> None:
    extra = ("--temp", "0.5", "--grammar", "root ::= x", "-kvu", "--chat-template", "chatml")
    assert here(*extra) == extra
    assert here(build=MIDDLE) == ()


def test_invalid_extra_argument_is_rejected() -> None:
    with pytest.raises(UsageInvalid, match="--lora needs a value"):
        here("--lora")

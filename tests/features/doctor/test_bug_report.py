"""The text of a bug report: what it contains, and what is removed."""

from __future__ import annotations

from typing import Any

import pytest

from llamasup.features.doctor.bug_report import RunningReport, bug_report
from llamasup.features.doctor.facts import Check


def report(**changes: Any) -> str:
    given: dict[str, Any] = {
        "versions": {"llamasup": "1.2.3", "Python": "CPython 3.11"},
        "checks": [Check("memory", True, "plenty"), Check("port", False, "in use", "Give another.")],
        "plan": None,
        "running": (),
        "environ": {},
        "home": "/home/me",
    }
    return bug_report(**(given | changes))


def test_report_has_versions_and_checks_with_remedies() -> None:
    text = report()
    assert text.startswith("# llamasup bug report\n")
    assert "llamasup 1.2.3\nPython CPython 3.11" in text
    assert "ok memory: plenty\n!! port: in use → Give another.\n" in text
    assert "## Plan" not in text


def test_report_has_plan_status_and_log_of_each_model() -> None:
    running = RunningReport(7, {"models": [{"id": "m", "events": []}]}, {"m": ["a line", "another"]})
    text = report(plan={"argv": ["llama-server"]}, running=[running])
    assert '## Plan\n\n````json\n{\n  "argv": [' in text
    assert "## Running llamasup, process 7\n" in text
    assert '"events": []' in text
    assert "## Log of m, without lines about requests\n\n````text\na line\nanother\n````" in text


def test_process_that_does_not_answer_is_named() -> None:
    assert "process 7\n\n````text\ndoes not answer (hangs)" in report(
        running=[RunningReport(7, problem="does not answer (hangs)")]
    )


def test_empty_section_says_so() -> None:
    assert "(nothing)" in report(versions={})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/models/m.gguf", "~/models/m.gguf"),
        ("/home/me", "~"),
        ("/home/mean/m.gguf", "/home/mean/m.gguf"),
        ("/home/me-too/m.gguf", "/home/me-too/m.gguf"),
        ("--api-key sesame1 --port 1", "--api-key *** --port 1"),
        ("--hf-token=open-sesame", "--hf-token=***"),
        ("-hft open-sesame", "-hft ***"),
        ("--api-key-file /srv/keys", "--api-key-file /srv/keys"),
        ("https://me:sesame@hub.example/m", "https://***@hub.example/m"),
        ("https://hub.example/m?token=sesame&a=b", "https://hub.example/m?token=***&a=b"),
        ("Authorization: Bearer sesame", "Authorization: Bearer ***"),
        ("uses sk-abcdefgh123 here", "uses *** here"),
        ("hf_abcdefghijk", "***"),
        ("the value of correct-horse", "the value of ***"),
        ("a task-id and 1 more", "a task-id and 1 more"),
    ],
)
def test_keys_and_home_are_removed(text: str, shown: str) -> None:
    environ = {"LLAMASUP_API_KEY": "correct-horse", "TOKENIZERS": "1", "OTHER": "plenty"}
    assert f"ok it: {shown}\n" in report(checks=[Check("it", True, text)], environ=environ)


def test_key_in_a_list_of_words_is_removed() -> None:
    text = report(plan={"argv": ["--api-key", "sesame", "--port", "1"]})
    assert "sesame" not in text
    assert '"--port"' in text


@pytest.mark.parametrize("secret", ['with"quote', "with-é-letter", "with\\backslash"])
def test_key_of_the_environment_is_removed_however_it_is_written(secret: str) -> None:
    environ = {"MY_TOKEN": secret}
    text = report(plan={"argv": [secret]}, checks=[Check("it", True, secret)], environ=environ)
    assert secret not in text
    assert "quote" not in text
    assert "letter" not in text
    assert "backslash" not in text


def test_home_of_root_changes_nothing() -> None:
    assert "/srv/m.gguf" in report(checks=[Check("it", True, "/srv/m.gguf")], home="/")


def test_control_characters_are_escaped() -> None:
    assert "\x1b" not in report(checks=[Check("it", True, "\x1b[31m")])

"""``scripts/chaos/mutants.py``: the faults it finds in a source, which it draws, and the tests it runs."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

from scripts.chaos.mutants import NOT_MUTATED, STAGES, Outcome, arguments_for, own_tests, room_of, table
from scripts.chaos.mutation import KINDS, Fault, applied, chosen, faults_of
from scripts.stages import stages
from tests.kit.paths import ROOT

FILE = "llamasup/room/module.py"


def faults(source: str) -> list[tuple[str, str]]:
    """Kind and new line of each fault."""
    return [(fault.kind, fault.after.strip()) for fault in faults_of(FILE, source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "fits = used < total",
            [("comparison", "fits = used > total"), ("off-by-one", "fits = used <= total")],
        ),
        ("fits = a >= b", [("comparison", "fits = a <= b"), ("off-by-one", "fits = a > b")]),
        ("same = a == b", [("comparison", "same = a != b")]),
        ("none = a is None", [("comparison", "none = a is not None")]),
        ("none = a is not None", [("comparison", "none = a is None")]),
        ("known = a not in b", [("comparison", "known = a in b")]),
        ("known = (a) in (b)", [("comparison", "known = (a) not in (b)")]),
        ("both = a and b", [("boolean", "both = a or b")]),
        ("one = a or b and c", [("boolean", "one = a and b and c"), ("boolean", "one = a or b or c")]),
        ("if a: b = c", [("condition", "if not (a): b = c")]),
        ("if not a: b = c", [("condition", "if a: b = c")]),
        ("if not (a): b = c", [("condition", "if (a): b = c")]),
        ("while a(): b = c", [("condition", "while not (a()): b = c")]),
        ("while True: ...", [("constant", "while False: ...")]),
        ("a = b if c else d", [("condition", "a = b if not (c) else d")]),
        ("a = 7", [("constant", "a = 8")]),
        ("a = 0.5", [("constant", "a = 1.0")]),
        ("a = 0.0", [("constant", "a = 1.0")]),
        ("a = True", [("constant", "a = False")]),
        ("a = b['key']", [("constant", "a = b['key_']")]),
        ("a = b.get(b'key')", [("constant", "a = b.get(b'key_')")]),
        ("a = b[0]", [("off-by-one", "a = b[1]")]),
        ("a = b[-1]", [("off-by-one", "a = b[-2]")]),
        ("a = b[1:]", [("off-by-one", "a = b[2:]")]),
        ("a = range(3)", [("off-by-one", "a = range(4)")]),
        ("a = b + 1", [("off-by-one", "a = b + 2")]),
        ("a = b + 8", [("constant", "a = b + 9")]),
        ("close()", [("dropped call", "pass")]),
        ("async def f():\n    await close()  # why", [("dropped call", "pass  # why")]),
        ("a = 'ä' if b else c", [("condition", "a = 'ä' if not (b) else c")]),  # columns are of bytes
    ],
)
def test_faults_of_a_line(source: str, expected: list[tuple[str, str]]) -> None:
    assert faults(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring: 1 < 2."""',
        "import os",
        "a: Literal[1] | None",
        "def f(a: Kind[1]) -> Kind[2]: ...",
        "a = Literal['x', 1]",
        "@cache(7)\ndef f(): ...",
        "class A(Struct, frozen=True): ...",
        "class A:\n    def __repr__(self):\n        return a[0]",
        "__all__ = [*a[1:]]",
        "assert a < b",
        "raise Refused(a[0], 3)",
        "_log.info('began', a + 1)",
        "logging.getLogger(a).setLevel(3)",
        "a = f'{b[0]} of {c + 1}'",
        "a = 'a message'",
        "a = b['two words']",
        "if TYPE_CHECKING:\n    a = 1",
        "if sys.platform == 'win32':\n    close()",
        "a = 1 if sys.platform == 'darwin' else 2",
        "if __name__ == '__main__':\n    main()",
        "close(\n)",  # more than one line
        "a = (b\n< c)",
    ],
)
def test_nothing_that_no_test_should_notice_is_changed(source: str) -> None:
    assert faults(source) == []


def test_each_fault_changes_one_line_and_leaves_python() -> None:
    source = (ROOT / "llamasup" / "core" / "queueing" / "queue_order.py").read_text("utf-8")
    found = faults_of(FILE, source)
    assert {fault.kind for fault in found} <= set(KINDS)
    assert len({fault.name for fault in found}) == len(found)
    for fault in found:
        ast.parse(changed := applied(fault, source))
        pairs = zip(source.splitlines(), changed.splitlines(), strict=True)
        assert [(old, new) for old, new in pairs if old != new] == [(fault.before, fault.after)]


def test_fault_is_not_applied_to_another_line() -> None:
    (fault,) = faults_of(FILE, "a = 7\n")
    assert applied(fault, "a = 7\r\n") == "a = 8\r\n"
    with pytest.raises(ValueError, match="a = 9"):
        applied(fault, "a = 9\n")


def many() -> list[Fault]:
    source = "if a < b and c:\n    close()\n    a = 7\n"
    return [fault for number in range(40) for fault in faults_of(f"llamasup/room/m{number}.py", source)]


def test_choice_has_all_kinds_and_no_file_twice() -> None:
    picked = chosen(many(), 12, seed="a")
    assert sorted(fault.kind for fault in picked) == sorted(KINDS * 2)
    assert len({fault.file for fault in picked}) == 12


def test_choice_depends_on_the_seed_alone() -> None:
    assert chosen(many(), 10, seed="a") == chosen(many(), 10, seed="a")
    assert chosen(many(), 10, seed="a") != chosen(many(), 10, seed="b")


def test_equivalent_fault_is_replaced_and_the_others_stay() -> None:
    before = chosen(many(), 6, seed="a")
    after = chosen(many(), 6, seed="a", without=[before[2].name])
    assert [fault.kind for fault in after] == [fault.kind for fault in before]
    assert before[2] not in after
    assert after[:2] == before[:2]
    assert len(set(after) & set(before)) >= 4


def test_tests_of_a_module_are_those_of_its_room_that_import_it_or_have_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "room" / "inner"
    folder.mkdir(parents=True)
    (folder / "test_module.py").touch()
    (folder / "test_other.py").touch()
    (folder.parent / "test_importing.py").write_text("from llamasup.room.module import Value\n")
    assert own_tests(FILE, tmp_path) == ["tests/room/inner/test_module.py", "tests/room/test_importing.py"]
    assert own_tests(FILE, tmp_path, within="integration") == []
    assert room_of(FILE, tmp_path) == "tests/room"


def test_module_without_a_room_has_only_its_own_tests(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_errors.py").touch()
    assert own_tests("llamasup/errors.py", tmp_path) == ["tests/test_errors.py"]
    assert room_of("llamasup/errors.py", tmp_path) is None


def test_stage_without_tests_for_the_module_is_left_out(tmp_path: Path) -> None:
    (fault,) = faults_of(FILE, "a = 7\n")
    words = {stage.name: arguments_for(stage, fault, tmp_path) for stage in STAGES}
    assert words.pop("own") is None
    assert words.pop("room") is None
    assert words.pop("own processes") is None
    assert all(words.values())


def test_faults_meet_every_test_of_the_gate() -> None:
    def folders(words: Iterable[str]) -> set[str]:
        return {word for word in words if word.startswith(("tests", "--ignore"))}

    gate = [folders(words) for stage in stages("test") for words in stage.commands if "pytest" in words]
    assert gate
    assert gate == [folders(stage.arguments.split()) for stage in STAGES if "{" not in stage.arguments]


def test_modules_that_are_not_mutated_exist() -> None:
    modules = [str(path.relative_to(ROOT)) for path in (ROOT / "llamasup").rglob("*.py")]
    assert all(any(name.startswith(left_alone) for name in modules) for left_alone in NOT_MUTATED)


def test_table_names_the_test_the_survivors_and_the_replaced() -> None:
    caught, survived = (Outcome(fault) for fault in faults_of(FILE, "a = b | 7 < 3\n")[:2])
    caught.stage, caught.caught_by, caught.seconds = "own", "tests/room/test_module.py::test_a[x|y]", 4.4
    text = table([caught, survived], {"m.py:1": "only for speed"})
    assert "| `tests/room/test_module.py::test_a[x\\|y]` | own | 4 s |" in text
    assert "| **survived** |" in text
    assert "1 of 2 caught." in text
    assert text.endswith("| `m.py:1` | only for speed |")

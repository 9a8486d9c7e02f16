"""The part of the usage that runs in a thread, without the thread."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path

import pytest

from llamasup.errors import FolderUnusable
from llamasup.features.usage.attribution import Counter, Reading
from llamasup.features.usage.ledger import Flush, Group, Question, Saved, Sums, Work
from llamasup.features.usage.saver import UsageSaver, read_energy
from llamasup.features.usage.store import read_rows, save

TINY = Group("2100-03-01", "tiny", "")  # later than the days that are deleted


class Machine:
    """``folder`` is the state folder; None: it cannot be used. ``readings`` are those of the counters."""

    def __init__(self, folder: Path) -> None:
        self.folder: Path | None = folder
        self.readings: Iterator[Reading | None] = iter(())
        self.measured = 0

    def path(self) -> Path:
        if self.folder is None:
            raise FolderUnusable("The folder cannot be used.", remedy="Make it writable.")
        return self.folder / "usage.sqlite"

    def measure(self) -> Reading | None:
        self.measured += 1
        return next(self.readings, None)

    def saver(self, keep_days: int = 400) -> UsageSaver:
        return UsageSaver(keep_days, path=self.path, measure=self.measure)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def asked(saver: UsageSaver, by: tuple[str, ...] = ("model",), since: date | None = None) -> Saved:
    answers: list[Saved] = []
    saver.take(Flush(question=Question(by, since, answers.append)))
    return answers[0]


def test_sums_are_saved_when_the_batch_says_so(machine: Machine) -> None:
    saver = machine.saver()
    saver.take(Flush({TINY: Sums(1)}))
    assert read_rows(machine.path()) == []
    saver.take(Flush({TINY: Sums(2)}, saves=True))
    assert read_rows(machine.path()) == [(TINY, Sums(3))]
    saver.take(Flush(saves=True))
    assert read_rows(machine.path()) == [(TINY, Sums(3))]


def test_answer_has_saved_and_unsaved_sums(machine: Machine) -> None:
    saver = machine.saver()
    saver.take(Flush({TINY: Sums(1)}, saves=True))
    saver.take(Flush({TINY: Sums(2), TINY._replace(day="2100-02-01"): Sums(4)}))
    answer = asked(saver, since=date(2100, 3, 1))
    assert sum(sums.requests for _, sums in answer.rows) == 3
    assert (answer.file, answer.problem) == (str(machine.path()), None)
    assert sum(sums.requests for _, sums in asked(saver).rows) == 7


def test_folder_that_cannot_be_used_is_reported_once_and_loses_nothing(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    folder, machine.folder = machine.folder, None
    saver = machine.saver()
    for _ in range(3):
        saver.take(Flush({TINY: Sums(1)}, saves=True))
    assert len(caplog.messages) == 1
    assert "Make it writable. Until then, the usage is not saved." in caplog.messages[0]
    answer = asked(saver)
    assert (answer.problem, answer.file) == ("The folder cannot be used.", None)
    assert answer.rows == [(TINY, Sums(3))]

    machine.folder = folder
    saver.take(Flush({TINY: Sums(1)}, saves=True))
    assert read_rows(machine.path()) == [(TINY, Sums(4))]
    assert asked(saver).problem is None

    machine.folder = None
    saver.take(Flush({TINY: Sums(1)}, saves=True))
    assert len(caplog.messages) == 2  # it is a new problem


BROKEN = b"This is not a database." * 100


def test_corrupt_file_is_moved_aside_and_a_new_one_begins(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.path().write_bytes(BROKEN)
    saver = machine.saver()
    assert "damaged" in (asked(saver).problem or "")  # reading changes nothing
    saver.take(Flush({TINY: Sums(1)}, saves=True))
    [message] = caplog.messages
    assert "is damaged" in message
    assert "has renamed it to" in message
    assert read_rows(machine.path()) == [(TINY, Sums(1))]
    [aside] = machine.path().parent.glob("usage.sqlite.corrupt-*")
    assert aside.read_bytes() == BROKEN


@pytest.mark.parametrize("moved_by_another", [False, True])
def test_corrupt_file_that_this_llamasup_does_not_move(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    moved_by_another: bool,
) -> None:
    """It cannot, which is a problem, or another one has moved it: then the file is written again."""

    def move(path: Path, _error: object) -> None:
        if not moved_by_another:
            raise PermissionError
        path.unlink()

    machine.path().write_bytes(BROKEN)
    monkeypatch.setattr("llamasup.features.usage.saver.move_aside", move)
    saver = machine.saver()
    for _ in range(2):
        saver.take(Flush({TINY: Sums(1)}, saves=True))
    assert ["Move it away." in message for message in caplog.messages] == [True] * (not moved_by_another)
    assert sum(sums.requests for _, sums in asked(saver).rows) == 2
    if moved_by_another:
        assert read_rows(machine.path()) == [(TINY, Sums(2))]


def test_unexpected_failure_keeps_the_sums_and_is_logged_once(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no such luck")

    saver = machine.saver()
    with monkeypatch.context() as patched:
        patched.setattr("llamasup.features.usage.saver.save", fails)
        for _ in range(3):
            saver.take(Flush({TINY: Sums(1)}, saves=True))
        assert caplog.messages == ["The usage cannot be saved"]
        answer = asked(saver)
        assert answer.problem == "The usage file cannot be used: RuntimeError: no such luck."
        assert answer.rows == [(TINY, Sums(3))]
    saver.take(Flush({TINY: Sums(1)}, saves=True))
    assert read_rows(machine.path()) == [(TINY, Sums(4))]
    assert asked(saver).problem is None
    monkeypatch.setattr("llamasup.features.usage.saver.read_rows", fails)
    assert asked(saver).problem == "The usage file cannot be used: RuntimeError: no such luck."


def test_failure_of_the_energy_counters_ends_the_measuring_alone(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> Reading:
        raise RuntimeError("no such luck")

    saver = UsageSaver(400, path=machine.path, measure=fails)
    for _ in range(2):
        saver.take(Flush({TINY: Sums(1)}, measures=True, saves=True))
    assert caplog.messages == ["The energy counters cannot be read"]
    assert not saver.measures
    assert read_rows(machine.path()) == [(TINY, Sums(2))]


def test_old_days_are_deleted_once_a_day(machine: Machine) -> None:
    today = date.today()  # noqa: DTZ011 - the local day
    day = [TINY._replace(day=(today - timedelta(days=days)).isoformat()) for days in range(4)]
    save(machine.path(), [(one, Sums(1)) for one in day])
    saver = machine.saver(keep_days=2)
    saver.take(Flush({TINY: Sums(1)}, saves=True))
    left = {group.day for group, _ in read_rows(machine.path())}
    assert left <= {day[0].day, day[1].day, day[2].day, TINY.day}  # midnight may pass
    assert day[3].day not in left
    save(machine.path(), [(day[3], Sums(1))])
    saver.take(Flush({TINY: Sums(1)}, saves=True))
    assert day[3].day in {group.day for group, _ in read_rows(machine.path())}


def reading(at_s: float, uj: int) -> Reading:
    return Reading(at_s, {"package": Counter(uj)})


def test_energy_between_two_readings_goes_to_the_requests_in_between(machine: Machine) -> None:
    machine.readings = iter([reading(0.0, 1000), reading(10.0, 3000), reading(1000.0, 9000)])
    saver = machine.saver()
    saver.take(Flush(measures=True))
    saver.take(Flush({TINY: Sums(1)}, [Work(TINY, 0.0, 10.0, 1.0)], measures=True, saves=True))
    assert read_rows(machine.path()) == [(TINY, Sums(1, energy_uj=2000))]
    saver.take(Flush(work=[Work(TINY, 900.0, 1000.0, 1.0)], measures=True, saves=True))
    assert read_rows(machine.path()) == [(TINY, Sums(1, energy_uj=2000))]  # too long ago


def test_machine_without_counters_is_asked_once(machine: Machine) -> None:
    saver = machine.saver()
    saver.take(Flush(measures=True))
    saver.take(Flush(measures=True))
    assert not saver.measures
    assert machine.measured == 1


def zone(powercap: Path, name: str, kind: str, value: str, range_uj: str = "1000") -> None:
    folder = powercap / name
    folder.mkdir(parents=True)
    for file, content in (("name", kind), ("energy_uj", value), ("max_energy_range_uj", range_uj)):
        (folder / file).write_text(f"{content}\n")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    energies: dict[str, int] = {}
    monkeypatch.setattr("llamasup.features.usage.saver.energy_by_gpu", lambda: energies)
    return energies


def test_packages_memory_and_gpus_are_read_once_each(tmp_path: Path, gpus: dict[str, int]) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", "500")
    zone(tmp_path, "intel-rapl:0:0", "core", "400")  # a part of the package
    zone(tmp_path, "intel-rapl:0:1", "dram", "70")
    zone(tmp_path, "intel-rapl:1", "psys", "900")  # the whole machine, the package included
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", "500")  # the same package again
    gpus["GPU-1"] = 30_000
    reading = read_energy(tmp_path)
    assert reading is not None
    assert reading.counters == {
        "intel-rapl:0": Counter(500, 1000),
        "intel-rapl:0:1": Counter(70, 1000),
        "GPU-1": Counter(30_000),
    }


def test_counter_that_cannot_be_read_is_left_out(tmp_path: Path, gpus: dict[str, int]) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", "unknown")
    zone(tmp_path, "intel-rapl:1", "package-1", "7")
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert read_energy(tmp_path) is None


def test_machine_without_counters_has_no_reading(tmp_path: Path, gpus: dict[str, int]) -> None:
    assert read_energy(tmp_path / "missing") is None

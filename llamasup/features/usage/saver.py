"""Saves the sums in the file, and divides the measured energy. Runs in the thread of ``recorder.py``.

A file that cannot be written, or another failure, never disturbs a request or a stop: the sums stay in memory
(one row for each day, model and key), and the next flush leads to another attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from pathlib import Path
from time import monotonic

from llamasup.core.system.hardware.nvml import energy_by_gpu
from llamasup.core.system.storage.folders import has_state
from llamasup.errors import FolderUnusable, without_errno
from llamasup.features.usage.attribution import Counter, Reading, divided, energy_between
from llamasup.features.usage.ledger import Flush, Ledger, Saved, Work
from llamasup.features.usage.store import CorruptFile, move_aside, read_rows, save, today, usage_file

_log = logging.getLogger(__name__)

_POWERCAP = Path("/sys/class/powercap")


def read_energy(powercap: Path = _POWERCAP) -> Reading | None:
    """Read the energy counters: RAPL of the processors and NVML of NVIDIA's GPUs, which takes milliseconds.

    None if the machine has none that this user may read. Linux shows RAPL's counters to root only, unless the
    administrator allows more (CVE-2020-8694). A counter that cannot be read is left out.
    """
    counters = {**_rapl(powercap), **{gpu: Counter(uj) for gpu, uj in energy_by_gpu().items()}}
    return Reading(monotonic(), counters) if counters else None


def _rapl(powercap: Path) -> dict[str, Counter]:
    """The packages, and their memory, which a package does not include. ``intel-rapl-mmio`` is the same
    package again, ``core`` and ``uncore`` are parts of it, and ``psys`` includes all.
    """
    counters: dict[str, Counter] = {}
    for zone in sorted(powercap.glob("intel-rapl:*")):
        try:
            name = (zone / "name").read_text("ascii").strip()
            if name.startswith("package") or name == "dram":
                value_uj = int((zone / "energy_uj").read_text("ascii"))
                range_uj = int((zone / "max_energy_range_uj").read_text("ascii"))
                counters[zone.name] = Counter(value_uj, range_uj)
        except (OSError, ValueError):
            continue
    return counters


class UsageSaver:
    """Saves the sums. ``keep_days``: how many days the file keeps, with today. ``path`` returns the file;
    ``measure`` reads the energy counters.

    ``measures``: whether they can be read. Counters do not appear while llamasup runs.
    """

    def __init__(
        self,
        keep_days: int,
        *,
        path: Callable[[], Path] = usage_file,
        measure: Callable[[], Reading | None] = read_energy,
    ) -> None:
        self.measures = True
        self._keep_days = keep_days
        self._find_path = path
        self._measure = measure
        self._reading: Reading | None = None
        self._unsaved = Ledger()
        self._cleaned_on: date | None = None
        self._problem = ""

    def take(self, flush: Flush) -> None:
        self._unsaved.add(flush.sums)
        if flush.measures:
            self._divide_energy(flush.work)
        if flush.saves:
            self._save()
        if (question := flush.question) is not None:
            question.answer(self._sums(question.by, question.since))

    def _divide_energy(self, work: Sequence[Work]) -> None:
        """Read the counters, and divide the energy since the last reading."""
        if not self.measures:
            return
        before = self._reading
        try:
            self._reading = self._measure()
        except Exception:
            _log.exception("The energy counters cannot be read")
            self._reading = None
        if self._reading is None:
            self.measures = False
        elif before is not None and (energy_uj := energy_between(before, self._reading)) is not None:
            self._unsaved.add_energy(divided(energy_uj, before.at_s, self._reading.at_s, work))

    def _save(self) -> None:
        """Write the sums, or keep them and report the problem once."""
        if not self._unsaved:
            return
        try:
            path = self._find_path()
            try:
                self._write(path)
            except CorruptFile as error:
                _replace_corrupt(path, error)
                self._write(path)
        except FolderUnusable as error:
            if error.message != self._problem:
                self._problem = error.message
                level = logging.WARNING if has_state() else logging.DEBUG  # the log files have told it
                said = "%s\n  → %s Until then, the usage is not saved."
                _log.log(level, said, error.message, error.remedy)
            return
        except Exception as error:
            if (problem := _unexpected(error)) != self._problem:
                self._problem = problem
                _log.exception("The usage cannot be saved")
            return
        self._problem = ""
        self._unsaved.take()

    def _write(self, path: Path) -> None:
        day = today()
        oldest = None if self._cleaned_on == day else day - timedelta(days=self._keep_days - 1)
        save(path, self._unsaved.rows(), delete_before=oldest)
        self._cleaned_on = day

    def _sums(self, by: Sequence[str], since: date | None) -> Saved:
        unsaved = [row for row in self._unsaved.rows() if since is None or row[0].day >= since.isoformat()]
        try:
            path = self._find_path()
            return Saved([*read_rows(path, by, since), *unsaved], str(path), self._problem or None)
        except FolderUnusable as error:
            return Saved(unsaved, None, self._problem or error.message)
        except Exception as error:
            return Saved(unsaved, None, self._problem or _unexpected(error))


def _unexpected(error: Exception) -> str:
    return f"The usage file cannot be used: {type(error).__name__}: {without_errno(str(error))}."


def _replace_corrupt(path: Path, error: CorruptFile) -> None:
    try:
        aside = move_aside(path, error)
    except OSError:
        raise error from None
    if aside is not None:
        _log.warning("%s\n  → llamasup has renamed it to %s, and begins a new one.", error.message, aside)

"""Divides the output of a batch into the file of its answers and the file of its errors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from llamasup.errors import DiskFull
from llamasup.features.batch.job import Prepared
from llamasup.features.batch.output import error_line, is_answer


def divide(prepared: Prepared, paths: Sequence[Path], code: str) -> tuple[int, int]:
    """Write the answers to one file and the errors to another; lines that are not over get an error with this
    code. Returns the sizes. Blocks. Raises DiskFull.
    """
    try:
        return _divided(prepared, paths, code)
    except OSError as error:
        for path in paths:
            path.unlink(missing_ok=True)
        raise DiskFull(
            f"The files of the results cannot be written: {error.strerror}.",
            remedy="Free some space: the batch ends then.",
        ) from None


def _divided(prepared: Prepared, paths: Sequence[Path], code: str) -> tuple[int, int]:
    output, errors = paths
    with output.open("wb") as answers, errors.open("wb") as failures:
        with prepared.output.path.open("rb") as lines:
            for line in lines:
                (answers if is_answer(line) else failures).write(line)
        for left in prepared.index.left():
            failures.write(
                error_line(f"batch_req_{left.number}", left.custom_id, code, "this line was not run")
            )
        for file in (answers, failures):
            file.flush()
            os.fsync(file.fileno())
        sizes = answers.tell(), failures.tell()
    for path, size in zip(paths, sizes, strict=True):
        if not size:
            path.unlink()
    return sizes

"""The facts that ``doctor`` collects itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamasup.core.system.native import native
from llamasup.features.doctor import collect


def test_unreadable_certificate_is_a_fact(tmp_path: Path) -> None:
    for name, content, problem in (("missing", None, "cannot be read"), ("empty", "", "no readable PEM")):
        path = tmp_path / name
        if content is not None:
            path.write_text(content)
        fact = collect._certificate_fact(path)
        assert problem in fact.problem
        assert not fact.is_current


def test_no_file_of_llama_cpp_is_looked_for_where_the_machine_has_no_folder_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "config.ini").write_text("ctx-size = 100\n")
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert [file.is_ignored for file in collect._config_files(environ)][:1] == [True]
    monkeypatch.setattr(native, "config_folder", None)  # as on Windows
    assert list(collect._config_files(environ)) == []

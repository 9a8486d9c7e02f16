"""The files in ``packaging`` and ``.github`` agree with the project."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.kit.paths import ROOT

PACKAGING = ROOT / "packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
LOCK = (PACKAGING / "requirements-dev.lock").read_text("utf-8")
LOCKED = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", LOCK, re.MULTILINE))


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"packaging_{name}", PACKAGING / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_lock_has_an_allowed_version_of_each_requirement() -> None:
    own, groups = PROJECT["project"], PROJECT["dependency-groups"]
    lines = [*own["dependencies"], *PROJECT["build-system"]["requires"]]
    lines += [line for part in (*own["optional-dependencies"].values(), *groups.values()) for line in part]
    wrong = []
    for line in lines:
        needed = Requirement(line)
        if not needed.specifier.contains(LOCKED.get(canonicalize_name(needed.name), "0")):
            wrong.append(line)
    assert not wrong, "run packaging/lock"


def test_lock_has_hashes_and_names_no_server() -> None:
    entries = re.split(r"\n(?=[\w])", LOCK.split("\n", 1)[1])
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "//" not in LOCK


def test_readme_for_pypi_has_only_absolute_links() -> None:
    for_pypi = module("readme").for_pypi
    text = "![a\nb](docs/a.svg)\n\nSee [x](docs/x.md#y), [z](https://z.example)."
    assert for_pypi(text, None, "1") == "\n\nSee x, [z](https://z.example)."
    at = "https://code.example/p"
    assert for_pypi(text, f"{at}/", "1") == (
        f"![a\nb]({at}/raw/v1/docs/a.svg)\n\nSee [x]({at}/blob/v1/docs/x.md#y), [z](https://z.example)."
    )
    readme = for_pypi((ROOT / "README.md").read_text("utf-8"), None, "1")
    assert not re.search(r"\]\((?!https:)", readme)


def test_release_refuses_what_is_not_ready() -> None:
    release = module("release")
    changelog = "# Changelog\n\n## [Unreleased]\n\n## [1.0] - 2026-01-01\n\nNew.\n\n## [0.9]\n\nOld.\n"
    assert release.notes_of(changelog, "1.0") == "New."
    assert release.notes_of(changelog, "Unreleased") is None
    assert list(release.not_ready("1.0", changelog, "https://code.example/p", "")) == []
    section, address, commit = release.not_ready("2.0", changelog, None, " M a.py\n?? b.py\n")
    assert "has no section [2.0]" in section
    assert "add Repository to [project.urls]" in address
    assert commit == "not committed: a.py, b.py"


def test_contents_of_a_wheel_are_checked() -> None:
    release = module("release")
    names = [f"llamasup-1{name}" if name.startswith(".") else name for name in release.IN_WHEEL]
    wheel = Path("llamasup-1.whl")
    assert release.wrong_contents(wheel, names) == []
    wrong = release.wrong_contents(wheel, [*names[1:], "tests/a.py", "llamasup/__pycache__/a.pyc"])
    assert [line.removeprefix("llamasup-1.whl ") for line in wrong] == [
        f"lacks {names[0]}",
        "has llamasup/__pycache__/a.pyc",
        "has tests/a.py",
    ]


def test_deployments_use_the_ports_folders_and_paths_of_the_image() -> None:
    containerfile = (PACKAGING / "Containerfile").read_text("utf-8")
    compose = yaml.safe_load((PACKAGING / "compose.yaml").read_text("utf-8"))
    documents = list(yaml.safe_load_all((PACKAGING / "kubernetes" / "llamasup.yaml").read_text("utf-8")))
    quadlet = (PACKAGING / "quadlet" / "llamasup.container").read_text("utf-8")
    assert 'VOLUME ["/models", "/state"]' in containerfile
    service = compose["services"]["llamasup"]
    assert [volume.split(":")[-2 if volume.endswith(":ro") else -1] for volume in service["volumes"]] == [
        "/models",
        "/state",
    ]
    files = [PACKAGING / config["file"] for config in compose["configs"].values()]
    mounts = [
        volume.split(":")[0]
        for name in ("prometheus", "grafana")
        for volume in compose["services"][name]["volumes"]
    ]
    files += [PACKAGING / mount for mount in mounts if "/" in mount]
    assert [file for file in files if not file.exists()] == []
    pod = next(found for found in documents if found["kind"] == "Deployment")["spec"]["template"]["spec"]
    (served,) = pod["containers"]
    probes = {
        name: served[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")
    }
    assert probes == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}
    mounted = {mount["name"]: mount["mountPath"] for mount in served["volumeMounts"]}
    assert mounted == {name: f"/{name}" for name in ("models", "state", "tmp")}
    assert pod["terminationGracePeriodSeconds"] > 30
    assert all(f":{folder}" in quadlet for folder in ("/models", "/state"))


@pytest.mark.parametrize("name", ["test", "nightly", "release", "lock"])
def test_workflows_run_scripts_that_exist(name: str) -> None:
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text("utf-8")
    run = re.findall(r"(?:run: |- )((?:scripts|packaging|\.ci)/[\w-]+)", text)
    assert run
    assert all((ROOT / script).is_file() for script in run)

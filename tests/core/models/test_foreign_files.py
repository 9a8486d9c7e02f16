"""Files and links in a models folder that are no models: quiet, in no list for clients, never the default."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llamasup.core.models.registry import build
from llamasup.core.models.rules import ModelRule
from llamasup.core.models.search import search_models
from llamasup.core.system.native import native
from tests.kit import models
from tests.kit.gguf_writer import TensorPlan, write_gguf

needs_links = pytest.mark.skipif(sys.platform == "win32", reason="links need a right on Windows")


def image_model(path: Path) -> None:
    tensor = TensorPlan("double_blocks.0.img_attn.qkv.weight", (64, 64))
    path.write_bytes(write_gguf({"general.architecture": "flux"}, [(tensor, bytes(4 * 64 * 64))]))


def importance_matrix(path: Path) -> None:
    tensor = TensorPlan("blk.0.attn_k.weight.in_sum2", (64,))
    path.write_bytes(write_gguf({"general.type": "imatrix"}, [(tensor, bytes(256))]))


def adapter(path: Path) -> None:
    path.write_bytes(models.tiny_lora())


def cut(path: Path) -> None:
    path.write_bytes(models.truncated_decoder(0.5))


def web_page(path: Path) -> None:
    path.write_bytes(b"<!DOCTYPE html><title>Sign in</title>")


def pointer(path: Path) -> None:
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4294967296\n")


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "removed" / "blob")


def circle(path: Path) -> None:
    path.symlink_to(path)


def outside(path: Path) -> None:
    target = path.parent.parent / "elsewhere.gguf"
    target.write_bytes(models.tiny_encoder())
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("make", "is_broken"),
    [
        pytest.param(image_model, False, id="image model"),
        pytest.param(importance_matrix, False, id="importance matrix"),
        pytest.param(adapter, False, id="adapter"),
        pytest.param(cut, True, id="cut"),
        pytest.param(web_page, True, id="web page"),
        pytest.param(pointer, True, id="git-lfs pointer"),
        # lmstudio-ai/lmstudio-bug-tracker#97, ggml-org/Llama-macOS#12, lmstudio-ai/lmstudio-bug-tracker#263
        pytest.param(dangling, True, id="dangling link", marks=needs_links),
        pytest.param(circle, True, id="link to itself", marks=needs_links),
        pytest.param(outside, True, id="link out of the folder", marks=needs_links),
    ],
)
def test_a_file_that_is_no_model_is_quiet_and_never_the_default(
    make: Callable[[Path], None], is_broken: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "chat.gguf").write_bytes(models.tiny_decoder())
    make(folder / "stranger.gguf")
    registry = build((), search_models([folder]).found)
    assert registry.default == "chat"
    assert [id_ for id_, spec in registry.specs.items() if not spec.unlisted] == ["chat"]
    assert all(problem.quiet for problem in registry.problems)
    # By its name, a broken file still says what is wrong with it.
    assert ("stranger" in registry.specs, len(registry.problems)) == (is_broken, int(is_broken))


def test_a_broken_file_that_the_config_names_is_no_secret(tmp_path: Path) -> None:
    cut(tmp_path / "chat.gguf")
    for rule in (ModelRule("chat"), ModelRule("chat", str(tmp_path / "chat.gguf"))):
        search = search_models([tmp_path], [rule.source] if rule.source else [])
        registry = build([rule], search.found, sources=search.sources)
        assert [problem.quiet for problem in registry.problems] == [False]
        assert not registry.specs["chat"].unlisted


@needs_links
@pytest.mark.parametrize(
    ("follow_links", "is_own", "is_served"),
    [(False, True, False), (True, True, True), (True, False, False)],
    ids=["by default", "in an own folder", "in the folder of another user"],
)
def test_links_are_followed_in_folders_of_this_user_if_the_config_says_so(
    follow_links: bool, is_own: bool, is_served: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, disk = tmp_path / "models", tmp_path / "disk"
    for path in (folder, disk / "qwen"):
        path.mkdir(parents=True)
    (disk / "qwen" / "qwen.gguf").write_bytes(models.tiny_decoder())
    (folder / "file.gguf").symlink_to(disk / "qwen" / "qwen.gguf")
    (disk / "bge.gguf").write_bytes(models.tiny_encoder())
    (folder / "disk").symlink_to(disk)  # as of LM Studio's users with a second disk
    monkeypatch.setattr(native, "is_own_folder", lambda path, status: is_own)
    registry = build((), search_models([folder], follow_links=follow_links).found)
    served = {name for spec in registry.specs.values() if not spec.problem for name in spec.names}
    assert served == ({"bge", "file", "qwen", "disk/qwen:qwen.gguf"} if is_served else set())
    if not is_served:
        assert "follow_links: true" in registry.problems[0].remedy


def test_a_folder_that_is_gone_follows_no_links(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert list(search_models([gone], follow_links=True).missing) == [str(gone)]

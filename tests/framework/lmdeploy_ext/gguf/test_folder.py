"""Model folders of GGUF files in the cache."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dlinfer import settings
from dlinfer.errors import ModelFolderError, UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.folder.model_folder import check_model_folder
from dlinfer.framework.lmdeploy_ext.checks.model import tensor_parallel
from dlinfer.framework.lmdeploy_ext.conversion import model_files
from dlinfer.framework.lmdeploy_ext.gguf import folder, reader, tokenizer
from tests.framework.lmdeploy_ext.gguf.conftest import Written


def test_the_folder_is_a_sound_model_folder(written: Written, cache: Path) -> None:
    made = folder.model_folder(written.path)
    assert made.parent == cache / "gguf"
    check_model_folder(made)
    assert (made / folder.LINK).resolve() == written.path
    assert sum(file.stat().st_size for file in made.iterdir() if not file.is_symlink()) < 1 << 20


def test_written_once(llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = folder.model_folder(llama)
    before = {file.name: file.lstat().st_mtime_ns for file in first.iterdir()}
    monkeypatch.setattr(tokenizer, "save", None)
    assert folder.model_folder(str(llama)) == first
    monkeypatch.chdir(llama.parent)
    assert folder.model_folder(llama.name) == first
    assert {file.name: file.lstat().st_mtime_ns for file in first.iterdir()} == before


def test_another_date_is_another_folder(tmp_path: Path, llama: Path, cache: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(llama.read_bytes())
    first = folder.model_folder(copy)
    os.utime(copy, ns=(1, 1))
    assert folder.model_folder(copy) != first


def test_several_at_once(llama: Path, cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(folder.model_folder, [llama] * 4))
    assert len(made) == 1
    assert [file.name for file in (cache / "gguf").iterdir()] == [next(iter(made)).name]


def test_no_cache(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    no_folder = settings.override(cache_dir=str(tmp_path / "file"))
    with no_folder, pytest.raises(ModelFolderError, match="DLINFER_CACHE_DIR") as caught:
        folder.model_folder(llama)
    assert str(llama) in str(caught.value)


def test_nothing_is_left_of_a_failure(llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenizer, "save", fail)
    with pytest.raises(ModelFolderError, match="No space left"):
        folder.model_folder(llama)
    assert list((cache / "gguf").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "is_one"), [("a.gguf", True), ("/b/C.GGUF", True), ("gguf", False), ("a.gguf/x", False)]
)
def test_names(name: str, is_one: bool) -> None:
    assert reader.is_gguf(name) == is_one


def test_tensor_parallelism_is_refused(llama: Path, cache: Path) -> None:
    config = model_files.read_json(folder.model_folder(llama) / "config.json")
    tensor_parallel.check_model(config, 1, None)
    with pytest.raises(UnsupportedFeatureError, match="tp=2 of a GGUF file"):
        tensor_parallel.check_model(config, 2, None)

"""Nothing that the disk holds or refuses is an error or a wrong kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.runtime.cache import FileCacheManager

from strata.kernels.compiling import disk_cache
from strata.kernels.compiling.disk_cache import CheckedCache
from tests.kernels.compiling.doubled import compile_doubled

KEY = "ABC"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's, empty; what it does not take goes to a folder beside it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    disk_cache._spare_folder.cache_clear()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    disk_cache._spare_folder.cache_clear()


def files(folder: Path) -> list[Path]:
    """All but checksums."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".sha256")


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("damage", [flipped, lambda content: content[: len(content) // 2], lambda content: b""])
def test_a_damaged_file_is_made_anew(folder: Path, damage: Any) -> None:
    kernel, found = compile_doubled()
    assert not found
    made = {path: path.read_bytes() for path in files(folder)}
    assert {".cubin", ".json", ".ptx"} <= {path.suffix for path in made}
    assert compile_doubled()[1]
    for path, content in made.items():
        path.write_bytes(damage(content))
        again, found = compile_doubled()
        assert not found, path
        assert again.asm["cubin"] == kernel.asm["cubin"]
        assert path.read_bytes() == content
        path.unlink()
        assert not compile_doubled()[1], path


def test_what_somebody_else_wrote_is_not_believed(folder: Path) -> None:
    plain = FileCacheManager(KEY)
    plain.put(b"kernel", "a.cubin")
    plain.put_group("a.json", {"a.cubin": plain.put(b"kernel", "a.cubin")})
    assert CheckedCache(KEY).get_file("a.cubin") is None
    assert CheckedCache(KEY).get_group("a.json") is None


def test_an_entry_that_lacks_a_file_is_not_there(folder: Path) -> None:
    """As what clears old files leaves it: folders without all that was in them."""
    checked = CheckedCache(KEY)
    assert not checked.exists()
    path = Path(checked.put(b"kernel", "a.cubin"))
    assert not checked.exists()
    checked.put_group("a.json", {"a.cubin": str(path)})
    assert checked.exists()
    path.unlink()
    assert not checked.exists()


def test_a_folder_that_nobody_may_look_into_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as another user's, which HOME or TRITON_CACHE_DIR still names."""
    checked = CheckedCache(KEY)
    checked.put(b"kernel", "a.cubin")

    def refuse(path: Any, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    for name in ("stat", "listdir"):
        monkeypatch.setattr(os, name, refuse)
    assert not checked.exists()
    for name in ("open", "read_bytes"):
        monkeypatch.setattr(Path, name, refuse)
    assert checked.get_file("a.cubin") is None
    assert checked.get_group("a.json") is None


def test_other_programs_can_read_what_is_written(folder: Path) -> None:
    checked = CheckedCache(KEY)
    checked.put_group("a.json", {"a.cubin": checked.put(b"kernel", "a.cubin")})
    group = FileCacheManager(KEY).get_group("a.json")
    assert group is not None
    assert Path(group["a.cubin"]).read_bytes() == b"kernel"


@pytest.mark.parametrize("known", [False, True])
def test_a_folder_that_cannot_be_written_is_read_and_bypassed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """By whomever: whoever runs this may be allowed everything, so the system's refusal is made here."""
    if known:
        compile_doubled()
    real = tempfile.mkstemp

    def refuse(*, dir: Path, **more: Any) -> tuple[int, str]:
        if Path(dir).is_relative_to(folder):
            raise PermissionError(13, "Permission denied", str(dir))
        return real(dir=dir, **more)

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    kernel, found = compile_doubled()
    assert found is known
    assert kernel.asm["cubin"]
    assert compile_doubled()[1], "kept in the spare folder"
    if not known:
        assert files(folder) == []


def test_a_folder_that_is_none_is_bypassed(folder: Path) -> None:
    folder.write_text("a file")
    compile_doubled()
    assert compile_doubled()[1]


def test_the_spare_folder_is_its_users_alone(folder: Path, tmp_path: Path) -> None:
    others = tmp_path / f"strata-kernels-{os.getuid()}"
    others.mkdir(mode=0o777)
    others.chmod(0o777)
    found = disk_cache._spare_folder()
    assert found is not None
    assert found != others
    assert found.stat().st_mode & 0o077 == 0


def test_what_only_the_spare_folder_has_comes_into_the_caches(folder: Path) -> None:
    """Which did not take it once: a folder for an image has all that was found, whatever else this machine holds."""
    folder.write_text("a file")
    compile_doubled()
    folder.unlink()
    assert compile_doubled()[1]
    spare = disk_cache._spare_folder()
    assert spare is not None
    shutil.rmtree(spare)
    assert compile_doubled()[1]


def test_it_is_listed_there_after_its_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs believe a list: who is stopped on the way leaves none without its files."""
    folder.write_text("a file")
    compile_doubled()
    folder.unlink()
    monkeypatch.setattr(os, "replace", real := Replacing())
    compile_doubled()
    lists = [at for at, name in enumerate(real.names) if name.startswith("__grp__")]
    assert len(real.names) > 10
    assert lists == [len(real.names) - 2, len(real.names) - 1]  # itself, and its sum


class Replacing:
    """`os.replace`, and the names that it made."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._real = os.replace

    def __call__(self, source: Any, target: Any) -> None:
        self.names.append(Path(target).name)
        self._real(source, target)


def test_without_any_folder_for_temporary_files_the_cache_serves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may be able to write into the cache alone, or nowhere."""
    compile_doubled()

    def refuse(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    disk_cache._spare_folder.cache_clear()
    assert compile_doubled()[1]
    assert not CheckedCache(KEY).exists()
    monkeypatch.setattr(disk_cache, "_write", refuse)
    with pytest.raises(FileNotFoundError):
        CheckedCache(KEY).put(b"kernel", "a.cubin")


def test_processes_that_compile_the_same_at_once(folder: Path) -> None:
    code = "from tests.kernels.compiling.doubled import compile_doubled; print(compile_doubled()[0].hash)"
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 2
    assert len(set(said)) == 1
    assert compile_doubled()[1]
    assert not [path for path in files(folder) if path.name.startswith("tmp")]

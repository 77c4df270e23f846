"""API keys: how they are read, what is refused, and that no message gives one away."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.serve.http.keys import KeyHash, KeyRing, KeySource


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_names_are_given_or_counted(tmp_path: Path) -> None:
    ring = KeyRing(
        KeySource(key_file(tmp_path, "# ours\n\nalice:sk-one\nsk-two\n"), {"STRATA_API_KEYS": "bob:x, sk-4"}).read()
    )
    names = {key: caller.name for key in ("sk-one", "sk-two", "x", "sk-4") if (caller := ring.find(key))}
    assert names == {"sk-one": "alice", "sk-two": "key-2", "x": "bob", "sk-4": "key-4"}


@pytest.mark.parametrize("presented", ["", "sk-on", "sk-one ", "SK-ONE", "alice:sk-one", "sk-öne", "\udcff", "0" * 64])
def test_nothing_but_the_key_opens(tmp_path: Path, presented: str) -> None:
    assert KeyRing(KeySource(key_file(tmp_path, "alice:sk-one"), {}).read()).find(presented) is None


def test_the_hash_of_a_key_is_no_key(tmp_path: Path) -> None:
    (key,) = KeySource(key_file(tmp_path, "sk-one"), {}).read()
    assert KeyRing([key]).find(key.digest) is None


def test_a_key_colon_belongs_to_the_key_after_the_name(tmp_path: Path) -> None:
    assert KeyRing(KeySource(key_file(tmp_path, "alice:a:b"), {}).read()).find("a:b") is not None


def test_salts_differ_by_key_only_and_do_not_hold_it() -> None:
    one, again, other = KeyHash.of("a", "sk-one"), KeyHash.of("b", "sk-one"), KeyHash.of("a", "sk-two")
    assert one.salt == again.salt != other.salt
    assert one.salt not in one.digest
    assert "sk-one" not in repr(one)


def test_the_environment_is_left_without_keys() -> None:
    environment = {"STRATA_API_KEY": "sk-one", "STRATA_API_KEYS": "sk-two,sk-three", "HOME": "/root"}
    assert len(KeySource(None, environment).read()) == 3
    assert environment == {"HOME": "/root"}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ValueError, match=r"chmod 600"):
        KeySource(key_file(tmp_path, "sk-one", mode), {}).read()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "holds no API key"),
        ("# only a remark", "holds no API key"),
        ("sk-secret with space", "line 1: a key must"),
        ("fine\nalice:sk-sécret", "line 2: a key must"),
        ("al ice:sk-secret", "line 1: the name"),
        (":sk-secret", "line 1: the name"),
        ("alice:", "line 1: a key must"),
        ("alice:sk-secret\nalice:other", "line 2: this name is given twice"),
        ("alice:sk-secret\nbob:sk-secret", "line 2: this key is given twice"),
    ],
)
def test_what_is_no_key_is_told_by_its_line_and_never_shown(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what) as caught:
        KeySource(key_file(tmp_path, text), {}).read()
    assert "cret" not in str(caught.value)


def test_keys_that_are_read_again_keep_their_names_and_no_other_gets_one(tmp_path: Path) -> None:
    source = KeySource(key_file(tmp_path, "sk-one\nsk-two\nbob:sk-b"), {"STRATA_API_KEY": "sk-env"})

    def names(text: str) -> dict[str, str]:
        key_file(tmp_path, text)
        ring = KeyRing(source.read())
        keys = ("sk-one", "sk-two", "sk-b", "sk-env", "sk-new", "sk-newer")
        return {key: caller.name for key in keys if (caller := ring.find(key))}

    first = names("sk-one\nsk-two\nbob:sk-b")
    assert first == {"sk-one": "key-1", "sk-two": "key-2", "sk-b": "bob", "sk-env": "key-4"}
    assert names("sk-two\nbob:sk-b") == {"sk-two": "key-2", "sk-b": "bob", "sk-env": "key-4"}
    changed = names("sk-new\nsk-two\nsk-newer")
    assert {key: changed[key] for key in ("sk-two", "sk-env")} == {"sk-two": "key-2", "sk-env": "key-4"}
    assert len(set(changed.values())) == 4
    assert "key-1" not in changed.values()
    for wrong in ("", "no key at all", "a:sk-x\na:sk-y"):
        with pytest.raises(ValueError, match="keys"):
            names(wrong)
    assert names("sk-one\nsk-two\nbob:sk-b") == first


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        KeySource(tmp_path / "nowhere", {}).read()


def test_a_file_that_is_no_text_is_told_by_its_place(tmp_path: Path) -> None:
    file = key_file(tmp_path, "")
    file.write_bytes(b"sk-one\nbob:s\xe9cret")
    with pytest.raises(ValueError, match=r"keys, line 2, column 6: not UTF-8: byte 0xe9$"):
        KeySource(file, {}).read()


def test_no_keys_make_a_ring_that_is_false() -> None:
    assert not KeyRing(KeySource(None, {}).read())

"""The command that writes the examples' data."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from examples import toy_data


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: FOLDER"),
        (["{0}/a", "b"], "unrecognized arguments: b"),
        (["{0}/file/a"], "file/a: Not a directory; choose another folder"),
    ],
)
def test_what_it_cannot_use_is_a_message(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["toy_data.py", *(argument.format(tmp_path) for argument in arguments)])
    with pytest.raises(SystemExit) as stopped:
        toy_data.main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err

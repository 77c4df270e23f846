"""The house rules that tools/floors.py checks: each on a small house that breaks it, and on one that does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import floors

LONG = "\n" * floors.SMALL  # lines that do not count
CODE = '''"""What it is for,
in two lines.
"""

import os  # an import counts

# A comment.
def size(path: str) -> int:
    """Bytes of a file."""
    found = os.stat(
        path,

    )
    return found.st_size
'''


class House:
    """A package of given files, and the settings of the checker."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.settings: dict[str, Any] = {"small_modules": {}, "class_names": {}, "replaced_words": {}}
        self.budgets: dict[str, int] | None = None  # 100 lines for each floor that has any

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.root / "strata" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def check(self, capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
        """The lines of faults and advice. Asserts that the exit code tells of faults."""
        path = self.root / "tools" / "floors.json"
        path.parent.mkdir(exist_ok=True)
        files = [file for file in self.root.rglob("strata/*/**/*.py") if file.read_text().strip()]
        enough = {file.relative_to(self.root).parts[1]: floors.BUDGET_STEP for file in files}
        budgets = enough if self.budgets is None else self.budgets
        path.write_text(json.dumps({"counted_lines": budgets, **self.settings}))
        code = floors.main([*flags, str(self.root)])
        self.settings = json.loads(path.read_text())
        shrunk = self.settings.pop("counted_lines")
        self.budgets = self.budgets and shrunk
        *lines, last = capsys.readouterr().out.splitlines() or [""]
        assert flags or last.startswith("floors: ")
        assert code == any(not line.startswith("advice: ") for line in lines)
        return lines


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"files/a.py": "import strata.files.b\n" + LONG, "files/b.py": LONG}, None),
        ({"files/a.py": "from strata.text import b\n" + LONG, "text/b.py": LONG}, "files may not import text"),
        ({"files/a.py": "def f():\n    import strata.text.b\n" + LONG, "text/b.py": LONG}, "files may not import text"),
        ({"files/a.py": "from . import b\n", "files/b.py": LONG}, "relative import"),
        ({"attic/a.py": ""}, "no floor"),
        ({"files/a.py": "\n" * (floors.MAX_LINES + 1)}, "451 lines"),
        ({"files/a.py": "\n" * floors.MAX_LINES}, None),
    ],
)
def test_one_file(house: House, capsys: pytest.CaptureFixture[str], files: dict[str, str], fault: str | None) -> None:
    house.write(files)
    faults = house.check(capsys)
    assert (fault is None and not faults) or (fault is not None and len(faults) == 1 and fault in faults[0])


BACK = {
    "at the top": "import strata.files.a\n",
    "in a function": "def f():\n    from strata.files import a\n",
    "of a name": "from strata.files.a import size\n",
    "for types": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from strata.files.a import size\n",
}


@pytest.mark.parametrize("back", BACK)
def test_cycles(house: House, capsys: pytest.CaptureFixture[str], back: str) -> None:
    """a imports b, b imports c, and c imports a in a way; d, which imports all, is in no cycle."""
    house.write({"files/a.py": "from strata.files.b import f\n" + LONG, "files/b.py": "import strata.files.c\n" + LONG})
    house.write({"files/c.py": BACK[back] + LONG, "files/d.py": "from strata.files import a, b, c\n"})
    faults = house.check(capsys)
    assert len(faults) == (back != "for types")
    for fault in faults:
        assert all(f"strata.files.{name}" in fault for name in "abc")
        assert "strata.files.d" not in fault


def test_two_cycles_of_one_module(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    house.write({"files/a.py": "import strata.files.b\nimport strata.files.c\n" + LONG})
    house.write({f"files/{name}.py": "import strata.files.a\n" + LONG for name in "bc"})
    assert len(house.check(capsys)) == 2


def test_counted_lines() -> None:
    """By hand: the import, `def`, four lines of a call of which one is blank, and the return."""
    assert floors.Module("strata/files/a.py", CODE).counted_lines() == 6
    assert floors.Module("strata/files/a.py", 'text = """\n\na\n"""\n').counted_lines() == 4
    assert floors.Module("strata/files/a.py", '"""Words."""\n# more\n').counted_lines() == 0


def test_budgets_only_shrink(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    house.write({"files/a.py": "a = 1\n" * 101})
    house.budgets = {"files": 100}
    assert "101 counted lines, its budget is 100" in house.check(capsys)[0]
    house.check(capsys, "--shrink")
    assert house.budgets == {"files": 100}
    house.budgets = {"files": 200}
    assert not house.check(capsys)
    house.budgets = {"files": 300}
    assert "200 are enough" in house.check(capsys)[0]
    house.check(capsys, "--shrink")
    assert house.budgets == {"files": 200}
    house.write({"text/b.py": "a = 1\n"})
    assert "its budget is 0" in house.check(capsys)[0]


@pytest.mark.parametrize("reason", [None, "files/b.py", "files/"])
def test_small_modules(house: House, capsys: pytest.CaptureFixture[str], reason: str | None) -> None:
    """b is small and a alone imports it; c is small and two import it; d is large; nobody imports a and e."""
    house.write(
        {"files/a.py": "import strata.files.b\nfrom strata.files import c, d\n", "files/b.py": "", "files/c.py": ""}
    )
    house.write({"files/d.py": LONG, "files/e.py": "import strata.files.c\n"})
    if reason is not None:
        house.settings["small_modules"][f"strata/{reason}"] = "a reason"
    faults = house.check(capsys)
    assert ["strata/files/b.py" in fault for fault in faults] == [True] * (reason is None)
    house.write({"files/e.py": "import strata.files.b\nimport strata.files.c\n"})
    assert len(house.check(capsys)) == (reason is not None)  # the reason is of no use now
    house.check(capsys, "--shrink")
    assert not house.check(capsys)


def test_class_names(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    house.write(
        {"files/a.py": "class Tile: pass\nclass Row: pass\n", "files/b.py": "class Tile:\n    class _Kind: pass\n"}
    )
    house.write({"files/c.py": "def f():\n    class _Kind: pass\n"})
    assert sorted(fault.split()[1] for fault in house.check(capsys)) == ["Tile", "_Kind"]
    house.settings["class_names"] = {"Tile": 2, "_Kind": 2}
    assert not house.check(capsys)
    house.write({"files/d.py": "class Tile: pass\n"})
    assert "Tile is defined 3 times" in house.check(capsys)[0]
    house.write({"files/d.py": "", "files/c.py": ""})
    assert "_Kind is defined 1 times" in house.check(capsys)[0]
    house.check(capsys, "--shrink")
    assert house.settings["class_names"] == {"Tile": 2}


NAMED = {
    "files/held.py": "",
    "files/held/a.py": "",
    "files/a.py": "def is_held(): pass\n",
    "files/b.py": "class HeldRows: pass\n",
    "files/c.py": "class Rows:\n    def held(self): pass\n",
    "files/d.py": "FLAG = '--held-rows'\n",
    "cli/e.py": "def run(held: options.Rows = 1): pass\n",
    "cli/f.py": "def run(held: Annotated[int, Option()] = 1): pass\n",
}
FINE = {
    "files/a.py": "def _held(): pass\ndef withheld(held): pass\nheld = 'held'\n",
    "files/b.py": "class _Held:\n    def held(self): pass\n",
    "files/c.py": "def is_held_out(): pass\n",
    "text/d.py": "def held(): pass\n",
}


@pytest.mark.parametrize("name", NAMED)
def test_replaced_words(house: House, capsys: pytest.CaptureFixture[str], name: str) -> None:
    rule = {"term": "local", "in": ["files", "cli"], "fine": ["held_out"], "files": []}
    house.settings["replaced_words"] = {"held": rule}
    house.write(FINE)
    house.check(capsys, "--shrink")
    assert not house.check(capsys)
    house.write({name: NAMED[name]})
    house.check(capsys, "--shrink")  # takes nothing in
    (fault,) = house.check(capsys)
    assert name in fault
    assert "local" in fault
    house.settings["replaced_words"]["held"]["files"] = [f"strata/{name}"]
    assert not house.check(capsys)
    (house.root / "strata" / name).write_text("")
    if "held" not in name:
        assert name in house.check(capsys)[0]
        house.check(capsys, "--shrink")
        assert house.settings["replaced_words"]["held"]["files"] == []


def test_crowded_folders_are_advice(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    house.write({f"files/a{number}.py": "" for number in range(floors.MAX_FILES)})
    assert not house.check(capsys)
    house.write({"files/b.py": ""})
    (line,) = house.check(capsys)
    assert line.startswith("advice: strata/files: 26 files")

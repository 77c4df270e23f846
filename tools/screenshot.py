"""A page as Chromium shows it, as PNG: python tools/screenshot.py PAGE.html PICTURE.png [--width 900] [--dark].

The whole page is taken, in CSS pixels of the width times --scale. Needs chromium or google-chrome on the PATH.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=900)
    parser.add_argument("--height", type=int, default=1800)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--dark", action="store_true")
    given = parser.parse_args()
    browser = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        print(f"no browser: none of {', '.join(_BROWSERS)} is on the PATH", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={profile}", f"--window-size={given.width},{given.height}",
            f"--force-device-scale-factor={given.scale}", f"--screenshot={given.picture.resolve()}",
        ]  # fmt: skip
        if given.dark:
            command.append("--blink-settings=preferredColorScheme=0")
        command.append(given.page.resolve().as_uri())
        return subprocess.run(command, check=False, capture_output=True, timeout=120).returncode


if __name__ == "__main__":
    sys.exit(main())

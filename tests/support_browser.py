"""Pages in a real browser: Chromium without a window."""

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
SCHEMES = [("light", (251, 251, 250)), ("dark", (20, 23, 27))]
"""Color schemes and the color of the paper in each."""

needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here; Debian and Ubuntu have a package chromium"
)


def browse(folder: Path, page: Path, *options: str) -> str:
    """What Chromium prints. folder: for its profile."""
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout


def screenshot(folder: Path, page: Path, scheme: str, size: tuple[int, int]):
    """The page as a PIL image in RGB. scheme: "light" or "dark". size: width and height in pixels."""
    from PIL import Image

    shot = folder / f"{scheme}.png"
    setting = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    browse(folder, page, setting, f"--window-size={size[0]},{size[1]}", f"--screenshot={shot}")
    image = Image.open(shot).convert("RGB")
    assert image.size == size
    return image


def dump_with(folder: Path, page: Path, script: str, width: int) -> str:
    """The page's DOM after a script of ours has run at its end."""
    copy = folder / "copy.html"
    copy.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    return browse(folder, copy, f"--window-size={width},1000", "--dump-dom")

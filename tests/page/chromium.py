"""A headless Chromium that tests drive through the W3C WebDriver protocol."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Browser:
    """A session of a browser."""

    def __init__(self, address: str, profile: Path) -> None:
        self._address = address
        options = {"binary": BROWSER, "args": [*_FLAGS, f"--user-data-dir={profile}"]}
        logs = {"browser": "ALL", "performance": "ALL"}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": logs}
        answer = self._call("session", capabilities={"alwaysMatch": wanted})
        self._address += f"/session/{answer['sessionId']}"

    def open(self, page: Path, width: int) -> None:
        """Open a file in a window whose content is ``width`` pixels wide."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self._devtools("Emulation.setDeviceMetricsOverride", metrics)
        self._call("url", url=page.as_uri())

    def run(self, script: str) -> Any:
        """Return what the body of a JavaScript function returns."""
        return self._call("execute/sync", script=script, args=[])

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag the mouse from one place in the window to another."""
        places = start, (start[0] + 5, start[1] + 5), end
        moves = [{"type": "pointerMove", "x": round(x), "y": round(y)} for x, y in places]
        press, release = ({"type": f"pointer{way}", "button": 0} for way in ("Down", "Up"))
        actions = [moves[0], press, *moves[1:], release]
        self._call("actions", actions=[{"type": "pointer", "id": "mouse", "actions": actions}])

    def logs(self, kind: str) -> list[dict[str, Any]]:
        """Return and clear the entries of a log, "browser" or "performance"."""
        return self._call("se/log", type=kind)

    def requests(self) -> list[str]:
        """Return the addresses requested since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.logs("performance")]
        sent = [each for each in events if each["method"] == "Network.requestWillBeSent"]
        return [each["params"]["request"]["url"] for each in sent]

    def close(self) -> None:
        """End the session."""
        urlopen(Request(self._address, method="DELETE"), timeout=60).close()

    def _devtools(self, command: str, options: dict[str, Any]) -> Any:
        return self._call("goog/cdp/execute", cmd=command, params=options)

    def _call(self, method: str, **content: Any) -> Any:
        head = {"Content-Type": "application/json"}
        request = Request(f"{self._address}/{method}", json.dumps(content).encode(), head)
        with urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Yield a new browser with an empty profile."""
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        try:
            said = iter(driver.stdout.readline, "")
            port = next(
                found[1] for line in said if (found := re.search(r"fully on port (\d+)", line))
            )
            session = Browser(f"http://127.0.0.1:{port}", profile)
            try:
                yield session
            finally:
                session.close()
        finally:
            driver.terminate()

"""A headless chromium, told what to do over its DevTools pipe; no package is needed."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --hide-scrollbars "
    "--remote-debugging-pipe"
)
PROBLEMS = {"Runtime.exceptionThrown", "Log.entryAdded"}


class Page:
    """One tab: what it requests and complains of is in ``requests`` and ``problems``."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._numbers = commands, itertools.count(1)
        self._session: str | None = None
        self._messages: Queue[dict[str, Any]] = Queue()
        self._held: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.problems: list[str] = []
        threading.Thread(target=self._read, args=(answers,), daemon=True).start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(1280, 900)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its answer."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda m: m.get("id") == number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, url: str, scheme: str = "light") -> None:
        """Loads a page whose reader prefers light or dark colours, and waits for all of it."""
        preference = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[preference])
        self._held.clear()
        self.call("Page.navigate", url=url)
        self._until(lambda m: m.get("method") == "Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        done = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"]["exception"]["description"])
        return done["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        """The part of the page that is seen, in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def close(self) -> None:
        """Ends the browser, which then writes nothing more into its profile."""
        self._session = None
        self.call("Browser.close")
        self._until(lambda message: message.get("method") == "ended")

    def _read(self, answers: int) -> None:
        buffer = b""
        while data := os.read(answers, 1 << 16):
            *whole, buffer = (buffer + data).split(b"\0")
            for message in whole:
                self._messages.put(json.loads(message))
        self._messages.put({"method": "ended"})

    def _until(self, wanted: Any) -> dict[str, Any]:
        for message in self._held:
            if wanted(message):
                self._held.remove(message)
                return message
        while True:
            message = self._messages.get(timeout=60)
            self._note(message)
            if wanted(message):
                return message
            if message.get("method") == "ended":
                raise RuntimeError("chromium ended")
            self._held.append(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method in PROBLEMS or (
            method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning")
        ):
            self.problems.append(json.dumps(parameters))


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A tab of a browser of its own, which ends with the block."""
    assert CHROMIUM is not None
    their_commands, commands = os.pipe()
    answers, their_answers = os.pipe()

    def hand_over() -> None:
        # The browser reads descriptor 3 and writes descriptor 4.
        high = os.dup(their_commands), os.dup(their_answers)
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        command, preexec_fn=hand_over, close_fds=False, stderr=subprocess.DEVNULL
    )
    os.close(their_commands)
    os.close(their_answers)
    try:
        page = Page(commands, answers)
        yield page
        page.close()
    finally:
        process.kill()
        process.wait()
        os.close(commands)

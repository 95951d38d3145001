"""A headless Chromium that a test drives by its own debugging protocol, over two pipes.

https://chromedevtools.github.io/devtools-protocol/. Keys and clicks are those of the browser, not of
a script in the page, so that a page with a strict policy is tested as it is.
"""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time

LIMIT = 60.0
KEYS = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Home": 36,
    "End": 35,
    "r": 82,
}
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
CUT_OFF = ("--proxy-server=127.0.0.1:9", "--disable-background-networking")


class Browser:
    """One page of one browser. ``errors`` are what the page's console and scripts complained of."""

    def __init__(self, profile):
        here_in, there_out = os.pipe()
        there_in, here_out = os.pipe()

        def become_3_and_4():
            read, write = os.dup(there_in), os.dup(there_out)
            os.dup2(read, 3)
            os.dup2(write, 4)

        folder = f"--user-data-dir={profile}"
        command = [shutil.which("chromium"), *QUIET, *CUT_OFF, folder, "--remote-debugging-pipe"]
        self.process = subprocess.Popen(
            [*command, "about:blank"],
            preexec_fn=become_3_and_4,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there_in)
        os.close(there_out)
        self.read_end, self.write_end = here_in, here_out
        self.rest, self.ids, self.session, self.errors = b"", itertools.count(1), None, []
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=page, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method, **parameters):
        """One command, and its answer."""
        number = next(self.ids)
        message = {"id": number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.message()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def message(self):
        """The next message; complaints of the page are kept on the way."""
        end = time.monotonic() + LIMIT
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.read_end], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            read = os.read(self.read_end, 1 << 20)
            assert read, "the browser has ended"
            self.rest += read
        text, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(text)
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(message["params"]["exceptionDetails"])
        if (
            message.get("method") == "Log.entryAdded"
            and message["params"]["entry"]["level"] == "error"
        ):
            self.errors.append(message["params"]["entry"])
        return message

    def open(self, address):
        """Load a page and wait until it is there. An address with another #part alone loads anew."""
        self.ask("Page.navigate", url="about:blank")
        self.ask("Page.navigate", url=address)
        end = time.monotonic() + LIMIT
        while self.value("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < end, f"{address} was not loaded"

    def value(self, expression):
        """The value of an expression in the page."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector):
        return self.value(f"document.querySelector({json.dumps(selector)}).textContent")

    def cells(self, selector):
        """The text of every cell of a table's body, row by row."""
        rows = f"document.querySelectorAll({json.dumps(selector + ' tbody tr')})"
        each = "[...row.children].map((cell) => [...cell.childNodes].map((n) => n.textContent).join(' '))"
        return self.value(f"[...{rows}].map((row) => {each})")

    def press(self, key):
        """A key of the keyboard, down and up."""
        named = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        self.ask("Input.dispatchKeyEvent", type="rawKeyDown", **named)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **named)

    def click(self, selector, x=0.5, y=0.5):
        """The mouse's button, at these parts of the element's width and height."""
        found = f"document.querySelector({json.dumps(selector)})"
        # The header that sticks to the top may cover what stands there.
        self.value(f"{found}.scrollIntoView({{block: 'center'}})")
        box = self.value(f"{found}.getBoundingClientRect().toJSON()")
        place = {"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]}
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", **place)
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def screen(self, width, height, phone=False):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1}
        self.ask("Emulation.setDeviceMetricsOverride", mobile=phone, **metrics)

    def prefer(self, **features):
        """Media features: ``prefer(prefers_color_scheme="dark")``."""
        wanted = [{"name": n.replace("_", "-"), "value": v} for n, v in features.items()]
        self.ask("Emulation.setEmulatedMedia", features=wanted)

    def picture(self, whole=False):
        """A PNG of the screen, or of the whole page."""
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])

    def close(self):
        with contextlib.suppress(AssertionError, OSError):
            self.session = None
            self.ask("Browser.close")
        os.close(self.write_end)
        os.close(self.read_end)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)

"""Stands in for llama.cpp's server: counts tokens as it does and reports round times. Its behaviour is STUB's words."""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

BEHAVIOUR = os.environ.get("STUB", "")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({"status": "ok"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["cache_prompt"] is False and asked["ignore_eos"] is True and asked["temperature"] == 0
        computed = len(asked["prompt"]) - ("cached" in BEHAVIOUR)
        passes = asked["n_predict"] - 1
        self._answer(
            {
                "timings": {
                    "prompt_n": computed,
                    "prompt_ms": 100.0 * computed,
                    "predicted_n": asked["n_predict"],
                    "predicted_ms": 500.0 * passes,
                }
            }
        )

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    if "--list-devices" in sys.argv:
        print(
            f"  Vulkan0: {os.environ.get('STUB_DEVICE', 'Fake GPU')} (visible: {os.environ['GGML_VK_VISIBLE_DEVICES']})"
        )
    elif "ends" in BEHAVIOUR:
        sys.exit("no such model")
    else:
        HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()

"""Stand-ins for HTTP services to which kqueue posts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

#: Status, headers and content of an answer.
Answer = tuple[int, Mapping[str, str], bytes]


@contextmanager
def receiver(answer: Callable[[BaseHTTPRequestHandler, bytes], Answer]) -> Generator[str]:
    """Answer POST requests on loopback until the block ends. Yield the server's URL.

    ``answer`` gets each request with its body.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, headers, content = answer(self, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()

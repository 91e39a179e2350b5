"""A server on this machine in place of a platform's: it keeps every request, and answers from a table."""

import http.server
import json
import threading


class PlatformServer:
    """`answers`: {(method, beginning of the path, or the AWS operation): JSON or text, or a list of them for one call after another}."""

    def __init__(self, answers):
        self.answers, self.asked = answers, []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.asked.append((self.command, self.path, dict(self.headers), body))
                status, content = outer.find(self.command, self.path, self.headers.get("X-Amz-Target", ""))
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def find(self, method, path, target):
        for (wanted, beginning), answer in self.answers.items():
            if wanted == method and (path.startswith(beginning) or target.endswith(beginning)):
                if isinstance(answer, list):
                    answer = answer.pop(0) if len(answer) > 1 else answer[0]
                status, answer = answer if isinstance(answer, tuple) else (200, answer)
                return status, answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        return 404, b'{"message": "no such path"}'

    def bodies(self, method):
        return [(path, json.loads(body)) for asked, path, _, body in self.asked if asked == method and body]

    def stop(self):
        self.server.shutdown()
        self.server.server_close()

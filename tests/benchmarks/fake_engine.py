"""A program that takes the place of an engine's Python: it serves, puts load on a server, or fails as a test wants.

    python fake_engine.py NAME FAILURE CALLS -m MODULE ...

NAME: of the engine. FAILURE: "" or how its server fails. CALLS: a file to which it adds a line for each call.
"""

import http.server
import json
import os
import subprocess
import sys
import time

name, failure, calls, _, module, *options = sys.argv[1:]


def option(wanted):
    return options[options.index(wanted) + 1]


def note(**what):
    with open(calls, "a") as file:
        file.write(
            json.dumps({"engine": name, "module": module, "options": options, "pid": os.getpid(), **what}) + "\n"
        )


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path in ("/ready", "/health", "/version") else 404)
        self.end_headers()
        answer = "ready" if failure == "no version" else json.dumps({"version": f"{name} 1.0"})
        self.wfile.write(answer.encode())
        if failure == "dies under load" and self.path == "/version":
            self.wfile.flush()
            os._exit(7)

    def log_message(self, *_):
        pass


def serve():
    helper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    note(helper=helper.pid)
    if failure == "dies":
        print("not enough memory", flush=True)
        sys.exit(3)
    if failure == "never ready":
        print("still loading", flush=True)
        time.sleep(600)
    http.server.HTTPServer(("127.0.0.1", int(option("--port"))), Server).serve_forever()


def load():
    note()
    if failure == "no load":
        sys.exit("Error: no such option")
    if failure == "second load" and option("--seed") == "2":
        sys.exit("Error: too long")
    if failure == "second load hangs" and option("--seed") == "2":
        time.sleep(600)
    if failure == "only saturation" or "50%" in options:
        print(json.dumps({"test": "T5", "requests": 3, "completed": 3, "request_rate": "inf", "saturation": 2.0}))
    if failure != "only saturation" or option("--seed") == "0":
        print(json.dumps({"test": "T5", "requests": 3, "completed": 3}))


def offline():
    note()
    if failure == "dies":
        sys.exit(3)
    for test in option("--tests").split(",")[failure == "skips a test" :]:
        line = {"engine": name, "test": test, "turn": int(option("--turn")), "run": option("--run")}
        with open(option("--save"), "a") as file:
            file.write(json.dumps(line) + "\n")
    if failure == "does not end":
        time.sleep(600)


if module.endswith("offline"):
    offline()
elif options[0] == "serve":
    serve()
else:
    load()

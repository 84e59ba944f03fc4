"""A stand-in for a vLLM server that fails on demand. It sorts letters: a prompt "dcba=" is answered "abcd".

Run as a script with vLLM's flags (with --headless it waits; others are ignored). FAKE_VLLM is a JSON object that says how to behave:

    dir       a folder: requests.jsonl (each request as it came), marks of what was done once already, gates
    start     "fail" | "hang"
    reload    "error" | "warn" | "die" | "garble": from then on it computes something else
    sleep     "error"
    bos       true: each text that is tokenized gets a token before it
    ids       false: no token ids in the answers, as other servers give
    length    the tokens that fit (otherwise 64)
    logprob   the log-probability of each token (otherwise a thousandth of its id, negative)
    crash     "head_dim" | "segfault" by the first prompt, "import" | "port" in the start; as vLLM's own processes tell of it

What a prompt contains decides too: `!400` refused · `!500` an error in the stream · `!cut` the first time the connection breaks
when the other prompts are done · `!abort` aborted the first time · `!long` cut off by the limit · `!gate` waits for the file
`gate` · `!die` it is killed the first time · `!wrong` a wrong answer, `!mixed` every other · `!say ...!!` answered with what
stands between, the last one in a prompt counts · `!cap` with a `!say`: no more tokens than asked for, and a prompt
that has a part of the answer is answered with the rest of it; once its thought was closed before its end, with what follows the
thought · `!newer` where policy versions are told, all tokens but the first are of a newer one.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import signal
import socket
import socketserver
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MODE: dict[str, Any] = json.loads(os.environ.get("FAKE_VLLM", "{}"))
DIR = Path(MODE.get("dir", "."))
END = 1  # the end token; letters are their code points
BOS = "^"  # where there is one, each text begins with it
LOCK = threading.Lock()
serving: dict[str, Any] = {
    **{"model": "", "prompts": 0, "most": 0, "version": "default", "newer": 0},
    "adapters": [],
}


def first_time(name: str) -> bool:
    try:
        (DIR / f"once-{name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def wait_for_newer(old: str) -> None:
    """An answer has its first token; wait until the server says another policy version."""
    with LOCK:
        serving["newer"] += 1
        (DIR / f"newer-{serving['newer']}").touch()
    while serving["version"] == old:
        threading.Event().wait(0.01)
    with LOCK:
        serving["newer"] -= 1


def wait_for_answers() -> None:
    """Weights are to come in flight; wait for as many answers in flight as the file `newer` says, if there is one."""
    while (DIR / "newer").exists() and serving["newer"] < int((DIR / "newer").read_text()):
        threading.Event().wait(0.01)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(200, None)
        elif self.path == "/metrics":
            self.metrics()
        elif self.allowed() and self.path == "/v1/models":
            root, length = serving["model"], MODE.get("length", 64)
            names = ["policy", *serving["adapters"]]
            data = [{"id": name, "root": root, "max_model_len": length} for name in names]
            self.answer(200, {"object": "list", "data": data})

    def metrics(self) -> None:
        """How many wait, as vLLM says it, where there is a file `waiting` that says how many; each look is noted."""
        if not self.allowed():
            return
        with LOCK, (DIR / "looks").open("a") as looks:
            looks.write("look\n")
        there = (DIR / "waiting").exists()
        count = (DIR / "waiting").read_text() if there else ""
        labels = '{engine="0",model_name="policy"}'
        text = f"vllm:num_requests_waiting{labels} {count}\nvllm:num_requests_waiting_by_reason{labels} 7.0\n"
        body = text.encode() if there else b""
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        data = self.rfile.read(size)
        # A client that ended in the middle of its request has asked for nothing.
        if len(data) < size:
            return
        body = json.loads(data or "{}")
        if not self.allowed():
            return
        with LOCK, (DIR / "requests.jsonl").open("a") as log:
            log.write(json.dumps({"path": self.path, **body}) + "\n")
        self.tells_versions = self.path == "/inference/v1/generate"
        match self.path.partition("?")[0]:
            case "/tokenize":
                self.tokenize(body)
            case "/collective_rpc":
                self.reload(body)
            case "/sleep" if MODE.get("sleep") == "error":
                self.answer(500, {"error": {"message": "insomnia", "code": 500}})
            case "/v1/load_lora_adapter" | "/v1/unload_lora_adapter":
                self.change_adapters(body["lora_name"], body.get("lora_path"))
            case "/update_weight_version":
                serving["version"] = body["new_version"]
                self.answer(200, None)
            case "/inference/v1/generate":
                self.complete(
                    {"prompt": [body["token_ids"]], "stream": body["stream"], **body["sampling_params"]}
                )
            case "/pause" if self.path.endswith("mode=keep"):
                wait_for_answers()
                self.answer(200, None)
            case "/sleep" | "/wake_up" | "/pause" | "/resume":
                self.answer(200, None)
            case "/detokenize":
                self.answer(200, {"prompt": "".join(map(chr, body["tokens"]))})
            case "/v1/chat/completions/derender":
                self.derender(body)
            case "/v1/completions" if "prompt_logprobs" in body:
                self.teach(body)
            case "/v1/completions":
                self.complete(body)
            case "/v1/chat/completions":
                self.answer(200, {"choices": [{"message": {"role": "assistant", "content": "Well.\n0.5"}}]})
            case "/classify":
                self.classify(body)
            case _:
                self.answer(404, {"error": {"message": f"no {self.path}", "code": 404}})

    def allowed(self) -> bool:
        key = os.environ.get("VLLM_API_KEY")
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self.answer(401, {"error": "Unauthorized"})
            return False
        return True

    def answer(self, status: int, value: Any) -> None:
        data = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def tokenize(self, body: dict[str, Any]) -> None:
        text = body.get("prompt")
        if text is None:
            messages = body["messages"]
            if "!strict" in str(messages[0]["content"]) and any(
                m["role"] == "tool" and not before.get("tool_calls")
                for before, m in itertools.pairwise(messages)
            ):
                self.answer(400, {"error": {"message": "a tool's result without a call", "code": 400}})
                return
            text = "".join(f"{m['role'][0]}:{m['content']}\n" for m in messages) + "a:"
            text = f"{len(body['tools'])} tools\n{text}" if body.get("tools") else text
        begin = [ord(BOS)] if MODE.get("bos") and body.get("add_special_tokens", "prompt" in body) else []
        self.answer(200, {"tokens": begin + [ord(letter) for letter in text]})

    def derender(self, body: dict[str, Any]) -> None:
        """As vLLM's parser `hermes` reads calls."""
        (choice,) = body["generate_response"]["choices"]
        text = "".join(map(chr, choice["token_ids"]))
        if "unreadable" in text:
            while not (DIR / "gate").exists():
                threading.Event().wait(0.01)
        before, *pieces = text.split("<tool_call>")
        functions = [json.loads(piece.partition("</tool_call>")[0]) for piece in pieces]
        calls = [
            {"function": {"name": one["name"], "arguments": json.dumps(one["arguments"])}}
            for one in functions
        ]
        message = {"role": "assistant", "content": before or None, "tool_calls": calls}
        self.answer(200, {"choices": [{"message": message}]})

    def change_adapters(self, name: str, folder: str | None) -> None:
        """Load adapters of a version, or unload them (no folder); as vLLM, it answers with a sentence."""
        if (name in serving["adapters"]) == (folder is not None):
            self.answer(400, {"error": {"message": f"{name} was loaded already, or was not", "code": 400}})
            return
        if folder is not None:
            assert (Path(folder) / "adapter_model.safetensors").is_file()
            serving["adapters"].append(name)
        else:
            serving["adapters"].remove(name)
        self.send_response(200)
        data = b"Success: done."
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def reload(self, body: dict[str, Any]) -> None:
        match MODE.get("reload"):
            case "error":
                self.answer(500, {"error": {"message": "no memory", "code": 500}})
                return
            case "warn":
                print("WARNING Following weights were not loaded from checkpoint: {'x'}", flush=True)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "garble":
                serving["garbled"] = True
        serving["model"] = body["kwargs"]["weights_path"]
        self.answer(200, {"results": [None]})

    # --- what frozen engines are asked ---

    def classify(self, body: dict[str, Any]) -> None:
        """The score of a text is how many tokens it has, in tenths."""
        if any("!die" in "".join(map(chr, ids)) for ids in body["input"]) and first_time("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        scores = [len(ids) / 10 for ids in body["input"]]
        self.answer(200, {"data": [{"probs": [one], "num_classes": 1} for one in scores]})

    def teach(self, body: dict[str, Any]) -> None:
        """The log-probability of a token is a hundredth of its id, negative, if nothing else is told."""
        times = 2 if serving.get("garbled") else 1
        told = MODE.get("logprob") if body.get("model", "policy") == "policy" else None
        found = [
            # Only the policy has the value that is told; a teacher has its own.
            [
                None,
                *({str(t): {"logprob": times * (told if told is not None else -t / 100)}} for t in ids[1:]),
            ]
            for ids in body["prompt"]
        ]
        self.answer(200, {"choices": [{"index": n, "prompt_logprobs": one} for n, one in enumerate(found)]})

    # --- completions ---

    def complete(self, body: dict[str, Any]) -> None:
        crash(at_start=False)
        begin = BOS if MODE.get("bos") else ""
        prompts = [begin + p if isinstance(p, str) else "".join(map(chr, p)) for p in body["prompt"]]
        if any("!400" in prompt for prompt in prompts):
            self.answer(400, {"error": {"message": "the prompt is\ntoo long", "code": 400}})
            return
        if any("!busy" in prompt for prompt in prompts) and first_time("503"):
            self.answer(503, {"error": {"message": "overloaded"}})
            return
        with LOCK:
            serving["prompts"] += len(prompts)
            serving["most"] = max(serving["most"], serving["prompts"])
            (DIR / "most").write_text(str(serving["most"]))
        self.streams, self.whole = bool(body.get("stream")), []
        if self.streams:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
        try:
            late = sorted(enumerate(prompts), key=lambda item: "!" in item[1])
            for number, prompt in late:
                self.group(number, prompt, body["n"], body.get("stop") or (), body["max_tokens"])
            if self.streams:
                self.event("[DONE]")
                self.wfile.write(b"0\r\n\r\n")
            else:
                self.answer(200, {"choices": self.whole})
        except ConnectionAbortedError:
            self.close_connection = True
            self.connection.close()
        except OSError:
            self.close_connection = True  # the client is gone
        finally:
            with LOCK:
                serving["prompts"] -= len(prompts)

    def group(self, number: int, prompt: str, samples: int, stops: Sequence[str], most: int) -> None:
        if "!500" in prompt and not self.streams:
            self.answer(500, {"error": {"message": "cannot", "code": 500}})
            raise ConnectionAbortedError
        if "!500" in prompt:
            self.event({"error": {"message": "cannot", "type": "InternalServerError", "code": 500}})
            raise ConnectionAbortedError
        if "!gate" in prompt:
            self.event({"choices": []})
            with LOCK:
                (DIR / "at-gate").touch()
            while not (DIR / "gate").exists():
                threading.Event().wait(0.01)
                self.event({"choices": []})
        text = "".join(sorted(prompt.partition("=")[0].partition("!")[0]))
        reason = "length" if "!long" in prompt else "stop"
        if "!say " in prompt:
            text = prompt.rpartition("!say ")[2].partition("!!")[0]
        if "!cap" in prompt:
            begun = prompt.rpartition("!!")[2].rpartition("\na:")[2]
            text = text.removeprefix(begun) if text.startswith(begun) else text.rpartition("</think>")[2]
            text, reason = (text[:most], "length") if len(text) >= most else (text, "stop")
        if "!wrong" in prompt:
            text = text[::-1] + "?"
        right = text
        for sample in range(samples):
            text = right + "?" if "!mixed" in prompt and sample % 2 else right
            if "!cut" in prompt and sample == samples - 1 and first_time("cut"):
                raise ConnectionAbortedError
            if "!abort" in prompt and first_time("abort"):
                reason = "abort"
            tokens = [ord(letter) for letter in text] + ([END] if reason == "stop" else [])
            stop = next((stop for stop in stops if stop in text), None)
            said = text
            if stop is not None:
                # As vLLM does it: the tokens up to the one that completes the stop string are kept, here with one letter that this
                # token says beyond it; the text ends before the string.
                tokens = [ord(letter) for letter in text[: text.index(stop) + len(stop) + 1]]
                said = text[: text.index(stop)]
            told: dict[str, Any] = {}
            if self.tells_versions:
                old = serving["version"]
                if "!newer" in prompt and sample == 0:
                    wait_for_newer(old)
                spans = [(old, 0, 1), (serving["version"], 1, len(tokens))]
                told = {"weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in spans]}
            index = number * samples + sample
            if not self.streams:
                whole = self.choice(index, tokens, said, reason, prompt)
                self.whole.append({**whole, "stop_reason": stop, **told})
                continue
            self.event({"choices": [self.choice(index, tokens[:1], said[:1], None, prompt)]})
            last = self.choice(index, tokens[1:], said[1:], reason, None)
            self.event({"choices": [{**last, "stop_reason": stop, **told}]})
            reason = "length" if "!long" in prompt else "stop"

    def choice(self, index: int, tokens: list[int], text: str, reason: str | None, prompt: str | None) -> Any:
        chosen = {"index": index, "text": text, "finish_reason": reason}
        if MODE.get("ids") is False:
            return chosen
        ids = None if prompt is None else [ord(letter) for letter in prompt]
        logprobs = {"token_logprobs": [MODE.get("logprob", -token / 1000) for token in tokens]}
        return {**chosen, "token_ids": tokens, "prompt_token_ids": ids, "logprobs": logprobs}

    def event(self, value: Any) -> None:
        if not self.streams:
            return
        text = value if isinstance(value, str) else json.dumps(value)
        data = f"data: {text}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


HEAD = "(EngineCore pid=7) ERROR 11-21 03:26:59 [core.py:10] "
SERVER = "(APIServer pid=6) ERROR 11-21 03:26:59 [async_llm.py:906] "
TRACEBACK = "Traceback (most recent call last):"


def crash(*, at_start: bool) -> None:
    """Die as vLLM does."""
    match MODE.get("crash"), at_start:
        case "head_dim", False:
            dead = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)."
            error = "RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2 kv_cache_idx=0"
            for line in (TRACEBACK, '  File "cpu_attn.py", line 3, in forward', error):
                print(f"{HEAD}{line}", flush=True)
            print(f"{SERVER}{TRACEBACK}\n{SERVER}{dead}\nINFO:     Shutting down", flush=True)
            print(
                "\n".join(f"(APIServer pid=6) INFO 11-21 03:27:01 [x.py:7] farewell {n}" for n in range(30)),
                flush=True,
            )
            os._exit(0)
        case "segfault", False:
            faulthandler.enable()
            os.kill(os.getpid(), signal.SIGSEGV)
            # It is delivered to the main thread: this one must not answer meanwhile.
            threading.Event().wait()
        case "import", True:
            raise ImportError("libcudart.so.13: cannot open shared object file: No such file or directory")
        case "port", True:
            raise OSError(98, "Address already in use")


class UnixServer(ThreadingHTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        # The library's own asks for the host's name.
        socketserver.TCPServer.server_bind(self)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--uds")
    parser.add_argument("--model", default="")
    parser.add_argument("--headless", action="store_true")
    options, _ = parser.parse_known_args()
    if options.headless:
        signal.pause()
    serving["model"] = options.model
    print("starting", options.model, flush=True)
    crash(at_start=True)
    match MODE.get("start"):
        case "fail":
            head = "(APIServer pid=7) ERROR 11-21 03:26:59 [core.py:10]"
            print(f"{head} ValueError: the head size 17 is not supported", flush=True)
            print(
                f"{head} RuntimeError: Engine core initialization failed. See root cause above.", flush=True
            )
            return 1
        case "hang":
            (DIR / "hanging").touch()
            signal.pause()
    server = (
        UnixServer(options.uds, Handler)
        if options.uds
        else ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    )
    server.daemon_threads = True
    if not options.uds:
        (DIR / "port").write_text(str(server.server_port))
    print("ready", flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())

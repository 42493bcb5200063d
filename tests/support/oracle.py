"""A stand-alone OpenAI completions server with known timing: the truth that measurements are held against.

``python oracle.py [PORT]`` prints its port and serves until it is killed. No pdlab, no vLLM, no
third-party package: what it logs is an independent measurement by the same monotonic clock.

- ``POST /v1/completions`` streams ``max_tokens`` tokens: the first ``ttft_s`` after a slot is free,
  the others every ``tpot_s``. A prompt has as many tokens as words.
- With ``"stream": false`` it plays a prefill server, with ``kv_transfer_params`` in a streamed
  request a decode server.
- ``POST /oracle/config`` merges a JSON object into the configuration; keys are prefixes of request
  ids (``x-request-id``), values override `DEFAULTS` for those requests; the longest prefix wins.
- ``GET /oracle/log`` returns everything served; ``GET /metrics`` an engine's counters as vLLM exports them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

DEFAULTS = {
    "ttft_s": 0.1,
    "tpot_s": 0.01,
    "capacity": 1_000_000,  # requests served at a time; the others wait in order
    "tokens_per_chunk": 1,
    "fail_every": 0,  # every k-th request is answered with HTTP 500
    "cut_every": 0,  # every k-th request loses its connection in the middle
    "hang_every": 0,  # every k-th request is never answered
    "short_every": 0,  # every k-th request gets one token less than asked
    "no_model": 0,  # 1: the model is listed, and completions of it are answered with HTTP 404
    "no_usage": 0,  # 1: a stream ends without the token counts
    "no_stream": 0,  # 1: a streamed completion is answered with one JSON object
    "buffered": 0,  # 1: a stream is sent in one piece when it is complete
    "prompt_tokens_off": 0,  # added to the reported prompt length
    "kv_bytes": 1000,  # bytes and transfers counted per request
    "kv_failed": 0,  # failed transfers counted per request
    "kv_expired": 0,  # expired requests counted per request
    "cached_share": 0.0,  # of the prompt tokens counted as prefix-cache hits
    "filled_share": 1.0,  # of the prompt's tokens but one counted as filled by a connector
    "preemptions": 0,  # counted per request
    "others": 0,  # requests of somebody else that are finished beside each
    "restart_at": 0,  # when that request arrives all counters begin anew
    "replace_at": 0,  # when that request arrives another replica's samples appear
    "drift": 0.0,  # every request takes that share longer per token than the one before
    "stall_every": 0,  # every k-th request stands still for stall_s in the middle
    "stall_s": 0.5,
    "queue_s": 0.0,  # an imagined single server of that service time, first come first served: who would
    "patience_s": 0.0,  # wait there longer than this
    "late_s": 1.0,  # gets the first token so much later
    "prefill_s": 0.05,
    "timelines": 0,  # 1: a request that asks for its timeline gets one
    "pool_blocks": 0,  # of 16 tokens, in the KV pool; 0: the page does not tell
}

# Short name -> Prometheus sample, as vLLM names it.
SHORT = {
    "kv_bytes": "vllm:nixl_bytes_transferred_sum",
    "transfers": "vllm:nixl_xfer_time_seconds_count",
    "kv_failed": "vllm:nixl_num_failed_transfers_total",
    "kv_expired": "vllm:nixl_num_kv_expired_reqs_total",
    "done": "vllm:request_success_total",
    "prompt": "vllm:prompt_tokens_total",
    "generated": "vllm:generation_tokens_total",
    "requested": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
    "external": "vllm:external_prefix_cache_queries_total",
    "filled": "vllm:external_prefix_cache_hits_total",
    "preempted": "vllm:num_preemptions_total",
}
COUNTERS = tuple(SHORT.values())
MOMENTS = "call answer queued admitted posted seen reported usable scheduled first first_byte"
MARKS = {name: 1.0 + at for at, name in enumerate(MOMENTS.split())}  # ms, of every timeline


class Oracle:
    def __init__(self) -> None:
        self.config: dict[str, dict] = {}
        self.log: list[dict] = []
        self.count: dict[str, int] = {}
        self.slots: dict[str, asyncio.Semaphore] = {}
        self.total = dict.fromkeys(COUNTERS, 0)
        self.replaced = False
        self.free_at: dict[str, float] = {}
        self.max_model_len = 100_000

    def settings(self, request_id: str) -> tuple[str, dict]:
        prefixes = [key for key in self.config if request_id.startswith(key)]
        key = max(prefixes, key=len, default="")
        return key, {**DEFAULTS, **self.config.get("", {}), **self.config.get(key, {})}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split(" ", 2)
                headers = {}
                while header := (await reader.readline()).decode().strip():
                    name, value = header.split(":", 1)
                    headers[name.lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if not await self.answer(writer, method, path, headers, body):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def answer(self, writer, method, path, headers, body) -> bool:
        if path == "/v1/models":
            card = {"id": "oracle", "object": "model", "max_model_len": self.max_model_len}
            return reply(writer, 200, json.dumps({"object": "list", "data": [card]}))
        if path == "/oracle/config":
            self.config.update(json.loads(body))
            return reply(writer, 200, "{}")
        if path == "/oracle/log":
            return reply(writer, 200, json.dumps(self.log))
        if path == "/metrics":
            return reply(writer, 200, self.page())
        if path == "/v1/completions" and method == "POST":
            return await self.complete(writer, headers, json.loads(body))
        return reply(writer, 404, "{}")

    def page(self) -> str:
        lines = [f'{name}{{engine="0",ReplicaId="r0"}} {value}' for name, value in self.total.items()]
        if blocks := self.settings("")[1]["pool_blocks"]:
            lines.append(f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}",ReplicaId="r0"}} 1.0')
        if self.replaced:
            lines.append('vllm:prompt_tokens_total{engine="0",ReplicaId="r1"} 1')
        return "\n".join(lines) + "\n"

    def count_up(self, **amounts: float) -> None:
        for short, amount in amounts.items():
            self.total[SHORT[short]] += amount

    async def complete(self, writer, headers, body) -> bool:
        arrived = time.perf_counter()
        request_id = headers.get("x-request-id", "")
        key, settings = self.settings(request_id)
        self.count[key] = number = self.count.get(key, 0) + 1

        def every(name: str) -> bool:
            return bool(settings[name]) and number % settings[name] == 0

        entry = {"id": request_id, "prompt": body["prompt"], "arrived": arrived, "sent": [], "tokens": 0, "ask": body}
        entry["asks_timeline"] = headers.get("x-pdlab-timeline")
        entry["body"] = {name: value for name, value in body.items() if name != "prompt"}
        self.log.append(entry)
        if number == settings["restart_at"]:
            self.total = dict.fromkeys(COUNTERS, 0)
        self.replaced = self.replaced or number == settings["replace_at"]
        if every("fail_every"):
            return reply(writer, 500, json.dumps({"error": "planted"}))
        if settings["no_model"]:
            return reply(
                writer, 404, json.dumps({"error": {"message": f"The model `{body['model']}` does not exist."}})
            )
        if settings["no_stream"]:
            text = " x" * body["max_tokens"]
            return reply(writer, 200, json.dumps({"choices": [{"index": 0, "text": text}], "usage": {}}))
        if every("hang_every"):
            await asyncio.sleep(3600)
        late_s = 0.0
        if settings["queue_s"]:
            begins = max(arrived, self.free_at.get(key, 0.0))
            self.free_at[key] = begins + settings["queue_s"]
            late_s = settings["late_s"] if begins - arrived > settings["patience_s"] else 0.0
        slot = self.slots.setdefault(key, asyncio.Semaphore(settings["capacity"]))
        async with slot:
            if not body.get("stream"):
                await asyncio.sleep(settings["prefill_s"])
                params = {"do_remote_prefill": True, "remote_block_ids": [1], "remote_engine_id": "oracle"}
                return reply(writer, 200, json.dumps({"choices": [{"text": " x"}], "kv_transfer_params": params}))
            tpot_s = settings["tpot_s"] * (1 + settings["drift"] * number)
            return await self.stream(writer, body, settings, entry, every, tpot_s, late_s)

    async def stream(self, writer, body, settings, entry, every, tpot_s, late_s) -> bool:
        tokens = body["max_tokens"] - every("short_every")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        prompt = len(prompt_words(entry))
        self.count_up(kv_bytes=settings["kv_bytes"], transfers=1, kv_failed=settings["kv_failed"])
        self.count_up(kv_expired=settings["kv_expired"], preempted=settings["preemptions"])
        self.count_up(prompt=prompt, requested=prompt, hits=prompt * settings["cached_share"])
        self.count_up(external=prompt, filled=(prompt - 1) * settings["filled_share"])
        due = time.perf_counter() + settings["ttft_s"] + late_s
        left = tokens
        wire, pieces = writer, Pieces()
        if settings["buffered"]:
            await asyncio.sleep(settings["ttft_s"] + tokens * tpot_s)
            writer, due, tpot_s = pieces, 0.0, 0.0
        while left:
            await asyncio.sleep(due - time.perf_counter())
            if every("cut_every") and left <= tokens // 2:
                writer.transport.abort()
                return False
            size = min(left, settings["tokens_per_chunk"] if entry["sent"] else 1)
            left -= size
            event(writer, {"choices": [{"index": 0, "text": " x" * size}]})
            await writer.drain()
            entry["sent"].append(time.perf_counter())
            if every("stall_every") and left == tokens // 2:
                due += settings["stall_s"]
            due += tpot_s * min(left, settings["tokens_per_chunk"])
        entry["tokens"] = tokens
        self.count_up(done=1 + settings["others"], generated=tokens)
        prompt_tokens = len(prompt_words(entry)) + settings["prompt_tokens_off"]
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
        if not settings["no_usage"]:
            event(writer, {"choices": [], "usage": usage})
        if settings["timelines"] and entry["asks_timeline"] is not None:
            prefill = {"total": 0.8, "queue": 0.1, "prefill": 0.5}
            timeline = {"v": 1, "id": entry["id"], "path": "pd", "t": MARKS, "p": prefill}
            timeline["wire"] = [[0, 5.0, 6.0, 900.0, 1000, 1]]
            chunk(writer, f": pdlab {json.dumps(timeline)}\n\n".encode())
        chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        wire.write(bytes(pieces))
        await wire.drain()
        return True


class Pieces(bytearray):
    """What is written to it, to be sent in one piece."""

    write = bytearray.extend

    async def drain(self) -> None:
        pass


def prompt_words(entry: dict) -> list[str]:
    return entry["prompt"].split()


def reply(writer, status: int, text: str) -> bool:
    data = text.encode()
    reason = {200: "OK", 404: "Not Found", 500: "Internal Server Error"}[status]
    head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    return True


def event(writer, data: dict) -> None:
    chunk(writer, f"data: {json.dumps(data)}\n\n".encode())


def chunk(writer, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def main(port: int) -> None:
    oracle = Oracle()
    server = await asyncio.start_server(oracle.serve, "127.0.0.1", port, limit=2**24, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))

"""The settings of the HTTP side of `strata serve`, with vLLM's names where they mean the same."""

from __future__ import annotations

from dataclasses import dataclass

BODY_LIMIT = 2 * 1024 * 1024


@dataclass(frozen=True)
class ServeSettings:
    """One server.

    model: checkpoint folder. served_model_names: what clients may call it; the first is what it calls itself.
    host, port: where it listens. metrics_port: where it serves /metrics alone, without a key; None for nowhere.
    allowed_hosts: further Host names that are served on a loopback address.
    chat_template: the text of a template that replaces the model's own.
    tool_format: "hermes", "llama3" or None (tools are refused). reasoning: split <think>...</think> off the content.
    max_queue: requests that may wait; more are asked to come again. request_timeout: most seconds of one request.
    engine_timeout: seconds in which an engine that has requests must say something, or is taken for dead; 0 for no end.
    requests_per_minute, tokens_per_minute, concurrency: bounds of each key; None for none.
    priority_keys: names of the keys whose requests may come before others'; "anonymous" where there are no keys.
    admin_keys: names of the keys that may drain replicas; "anonymous" where there are no keys.
    shutdown_timeout: seconds that running requests get to finish after SIGTERM.
    api_workers: processes that serve HTTP. data_parallel_size: engines that requests are divided among.
    log_json, log_prompts: how requests are logged. allowed_origins: browser origins that may read answers (CORS).
    """

    model: str
    served_model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    metrics_port: int | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    chat_template: str | None = None
    tool_format: str | None = None
    reasoning: bool = False
    max_queue: int = 512
    request_timeout: float = 600.0
    engine_timeout: float = 300.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    priority_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    shutdown_timeout: float = 30.0
    api_workers: int = 1
    data_parallel_size: int = 1
    body_limit: int = BODY_LIMIT
    log_json: bool = False
    log_prompts: bool = False

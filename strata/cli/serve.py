"""`strata serve`: OpenAI's API over a model. Every option is an environment variable too: STRATA_ before its name."""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from strata.cli import options
from strata.cli.groups import OptionGroup, Values, grouped
from strata.cli.help import Command
from strata.cli.serve_options import Reasoning, ServedModelName, ToolCalls, chat_option, served_names, tool_format
from strata.files.json_object import why_no_text
from strata.models.folder import display_name, folder_or_shape, located, model_folder
from strata.models.shapes import SHAPES
from strata.serve.http.gate import is_loopback
from strata.serve.http.keys import ANONYMOUS, KeyHash, KeySource
from strata.serve.processes.launch import launch
from strata.serve.processes.worker import ApiJob
from strata.serve.settings import ServeSettings

_http_option, _limit_option, _log_option = (
    partial(typer.Option, rich_help_panel=heading) for heading in ("HTTP", "Limits", "Logs")
)
_ORIGIN = re.compile(r"https?://[a-z0-9.:\[\]-]+")

command = typer.Typer(add_completion=False, rich_markup_mode="rich")


def _refuse_key(value: str | None) -> None:
    if value is not None:
        raise typer.BadParameter(
            "all users of this machine can read command lines: put the key into STRATA_API_KEY, or into a file (mode "
            "0600) that --api-key-file names"
        )


class HttpOptions:
    """Of the HTTP side, with the names and the meaning that `ServeSettings` gives them; of its bounds, too."""

    host: Annotated[str, _http_option(help="Where to listen; what is no loopback address needs an API key.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, _http_option(min=0, max=65535, help="0 takes a free one.")] = 8000
    metrics_port: Annotated[
        int | None,
        _http_option(min=0, max=65535, help="Serve /metrics alone there too, on the same host and without a key."),
    ] = None
    api_key_file: Annotated[
        Path | None,
        _http_option(help="A key a line, as key or name:key; read again at SIGHUP. More come from STRATA_API_KEY(S)."),
    ] = None
    api_key: Annotated[
        str | None, typer.Option(hidden=True, allow_from_autoenv=False, callback=_refuse_key, expose_value=False)
    ] = None
    allowed_hosts: Annotated[
        list[str] | None, _http_option(help="Another name (Host) that a server on loopback goes by.")
    ] = None
    allowed_origins: Annotated[list[str] | None, _http_option(help="A site whose pages may use the server (CORS).")] = (
        None
    )
    api_workers: Annotated[int, _http_option(min=1, help="Processes that serve HTTP.")] = 1
    max_queue: Annotated[int, _limit_option(min=0, help="Sequences that may wait; more get 503.")] = 512
    request_timeout: Annotated[float, _limit_option(min=0.001, help="Seconds that a request may take.")] = 600.0
    engine_timeout: Annotated[
        float,
        _limit_option(
            min=0,
            help="Seconds in which the engine must say something while it has requests, or is killed; 0 for no end.",
        ),
    ] = 300.0
    requests_per_minute: Annotated[int | None, _limit_option(min=1, help="Of each key; more get 429.")] = None
    tokens_per_minute: Annotated[int | None, _limit_option(min=1, help="Of each key, prompts included.")] = None
    concurrency: Annotated[int | None, _limit_option(min=1, help="Sequences of each key at once.")] = None
    priority_keys: Annotated[
        list[str] | None,
        _limit_option(
            help="Name of a key whose requests may come before others' (anonymous: all, where there are no keys)."
        ),
    ] = None
    admin_keys: Annotated[
        list[str] | None,
        _limit_option(help="Name of a key that may drain replicas (anonymous: all, where there are no keys)."),
    ] = None
    shutdown_timeout: Annotated[
        float, _limit_option(min=0, help="Seconds that requests get to finish after SIGTERM.")
    ] = 30.0
    restart_engine: Annotated[
        bool | None,
        _limit_option(
            "--restart-engine/--no-restart-engine",
            help="Start another engine when it dies, instead of ending; left out, with several ranks or engines.",
        ),
    ] = None


class LogOptions:
    """Of what is written down."""

    log_json: Annotated[bool, _log_option(help="Log JSON objects.")] = False
    log_prompts: Annotated[bool, _log_option(help="Log prompts, too.")] = False
    otlp_traces_endpoint: Annotated[str | None, _log_option(help="Send OpenTelemetry traces there.")] = None


@command.command(cls=Command, context_settings={"auto_envvar_prefix": "STRATA"})
@grouped
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Checkpoint folder, org/model of the Hugging Face cache, or builtin, which it is if left out.",
            envvar="STRATA_MODEL",
        ),
    ] = None,
    served_model_name: ServedModelName = None,
    *,
    http: Annotated[Values, OptionGroup(HttpOptions)],
    chat_template: Annotated[
        Path | None, chat_option(help="File with a template to use instead of the model's.")
    ] = None,
    tool_call_parser: ToolCalls = None,
    reasoning: Reasoning = False,
    engine: Annotated[
        Values,
        options.engine(
            "tokenizer quantization sparsity passes dtype device tensor_parallel_size pipeline_parallel_size "
            "prefill_context_parallel_size decode_context_parallel_size data_parallel_size overlap_tokens "
            "message_dtype all_reduce_group_size enable_expert_parallel enable_dp_attention enable_eplb "
            "num_redundant_experts eplb_step_interval load_format max_model_len max_num_seqs max_num_batched_tokens "
            "gpu_memory_utilization num_pages page_size enable_prefix_caching tpot_target_ms step_target_ms "
            "ttft_target_ms seed deterministic kv_cache_dtype decode_pages sparse_prefill sparse_prefill_min_keys"
        ),
    ],
    logs: Annotated[Values, OptionGroup(LogOptions)],
) -> None:
    """Serve OpenAI's API, until Ctrl-C or SIGTERM.

    Every option can be given as an environment variable: STRATA_MAX_QUEUE=64 is --max-queue 64.

    Example: strata serve path/to/Llama-3.1-8B-Instruct --max-model-len 16384
    """
    tokenizer, engines = engine.pop("tokenizer"), engine.pop("data_parallel_size")
    folder = folder_or_shape(model) if engine["load_format"] == "dummy" else str(model_folder(model))
    source, restarts = KeySource(http.pop("api_key_file"), os.environ), http.pop("restart_engine")
    keys, host = source.read(), http["host"]
    if not keys and not is_loopback(host):
        raise ValueError(
            f"--host {host} lets others in, and there is no API key: set STRATA_API_KEY or --api-key-file, "
            "or leave --host out"
        )
    tokenizer_folder = _tokenizer(located(tokenizer) if tokenizer else folder)
    template = None if chat_template is None else _read_template(chat_template)
    traces = _endpoint(logs.pop("otlp_traces_endpoint"))
    http["allowed_hosts"] = tuple(http["allowed_hosts"] or ())
    http["allowed_origins"] = tuple(_origin(one) for one in http["allowed_origins"] or ())
    for name in ("priority_keys", "admin_keys"):
        http[name] = _named_keys(f"--{name.replace('_', '-')}", http[name] or [], keys)
    settings = ServeSettings(
        model=folder,
        served_model_names=served_names(served_model_name, display_name(model, folder)),
        chat_template=template,
        tool_format=tool_format(tool_call_parser, tokenizer_folder, template),
        reasoning=reasoning,
        data_parallel_size=engines,
        **http,
        **logs,
    )
    if restarts is None:
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
        restarts = max(engines, *(engine[name] for name in sizes)) > 1
    engine |= {"tpot_target_ms": engine["tpot_target_ms"] or None, "skip_tokenizer_init": tokenizer is not None}
    job = ApiJob(settings, keys, tokenizer_folder, restarts, traces)
    sys.exit(launch(job, {"model": folder, **engine}, source))


def _named_keys(option: str, given: list[str], keys: list[KeyHash]) -> tuple[str, ...]:
    known = [key.name for key in keys] or [ANONYMOUS.name]
    for name in given:
        if name not in known:
            raise ValueError(f"{option} {name}: there is no such key; the names are {', '.join(known)}")
    return tuple(given)


def _tokenizer(folder: str) -> str:
    if folder in SHAPES and not Path(folder).is_dir():
        raise ValueError(f"the shape {folder!r} has no tokenizer: give the folder of one with --tokenizer FOLDER")
    if not (Path(folder) / "tokenizer.json").is_file():
        raise ValueError(f"there is no {folder}/tokenizer.json: give a folder that has one with --tokenizer FOLDER")
    return folder


def _origin(text: str) -> str:
    if not _ORIGIN.fullmatch(text.lower()):
        raise ValueError(f"--allowed-origins {text}: give each as its pages name it, like https://chat.example.org")
    return text.lower()


def _endpoint(url: str | None) -> str | None:
    if url is not None and not url.lower().startswith(("http://", "https://")):
        raise ValueError(f"--otlp-traces-endpoint {url}: give a URL, like http://localhost:4318/v1/traces")
    return url


def _read_template(file: Path) -> str:
    # Few servers are given one, and none else has a use for jinja in this process.
    from jinja2.exceptions import TemplateSyntaxError

    from strata.text.template_worker import check_syntax

    try:
        raw = file.read_bytes()
        text = raw.decode("utf-8-sig")
        check_syntax(text)
    except OSError as error:
        raise ValueError(f"--chat-template {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--chat-template {file}, {why_no_text(raw)}") from None
    except TemplateSyntaxError as error:
        raise ValueError(f"--chat-template {file}, line {error.lineno}: {error.message}") from None
    return text

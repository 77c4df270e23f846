"""The search: what it finds, what it must not do, and what it says where there is nothing to find."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from strata.cli import serve as serve_cli
from strata.cli.main import app
from strata.engine.engine_config import EngineConfig, EngineSizes
from strata.engine.ledger import DeviceMemory, Ledger, PoolTooSmall
from strata.engine.startup.memory import RankPlace, planned_memory, rank_memory, rank_setup
from strata.hardware.specs import device
from strata.kernels.device_limits import DeviceLimits
from strata.models.config import ModelConfig, config_from_dict
from strata.models.folder import BUILTIN_FOLDER
from strata.plan.meta_model import find_config
from strata.plan.search import search as search_module
from strata.plan.search import step_table
from strata.plan.search.choice import request_flops
from strata.plan.search.layout import ServingLayout, layouts
from strata.plan.search.machine import Machine
from strata.plan.search.memory import Memory, needed_tokens
from strata.plan.search.precision import AS_CHECKPOINT, IN_FEWER_BITS, Precision
from strata.plan.search.search import Question, Search, rank
from strata.plan.search.traffic import Objectives, Traffic
from strata.plan.training import plan as training_module
from strata.train.predict.flops import active_elements
from tests.models.recurrent_checkpoints import RECURRENT_CONFIGS

RUNNER = CliRunner()
TRAFFIC = Traffic.of(1000, 200)
CONTEXT = 1 << 29  # what a process holds of a device before anything is allocated


@pytest.fixture
def few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_table, "_ALONE", (1, 16, 64, 248))
    monkeypatch.setattr(step_table, "_BESIDE", (0, 248))
    monkeypatch.setattr(step_table, "_PROMPTS", (256, 8192))
    monkeypatch.setattr(search_module, "SEQUENCES", (1, 16, 64, 256))
    monkeypatch.setattr(search_module, "BUDGETS", (8192, 2048))
    monkeypatch.setattr(search_module, "IN_FEWER_BITS", IN_FEWER_BITS[:1])


@pytest.fixture(scope="module")
def asked(machine: Machine) -> Callable[..., Search]:
    """A search in a small model, in which priced steps are kept from one to the next."""
    config = replace(find_config("0.6B"), num_layers=4, windows=(None,) * 4)
    anchors: dict[ServingLayout, Any] = {}

    def make(devices: int = 2, ttft: float | None = None, tpot: float | None = None) -> Search:
        objectives = Objectives(ttft, tpot)
        made = Search(Question("0.6B", config, torch.bfloat16, machine, devices, TRAFFIC, objectives))
        made._anchors = anchors
        return made

    return make


def test_memory_of_8b_by_hand(machine: Machine) -> None:
    memory = Memory(find_config("8B"), machine, TRAFFIC, "8B")
    for tensor in (1, 2):
        held = memory.rank_memory(ServingLayout(tensor), 64, 8192, AS_CHECKPOINT)
        vocabulary, norms = 2 * 128256 * 4096, 65 * 4096
        matrices = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
        angles = 4 * 1200 * 128  # the rotary embedding's, of the longest request
        assert held.weights == 2 * (vocabulary // tensor + norms + matrices // tensor) + angles
        assert held.page_bytes == 16 * 32 * 2 * (8 // tensor) * 128 * 2
        assert held.total == 141e9
        assert held.budget == int(141e9 * 0.9) - (1 << 29)
        assert held.tokens == (held.budget - held.weights - held.workspace) // held.page_bytes * 16


def test_pages_of_stages_are_those_of_the_stage_with_the_least_room(machine: Machine) -> None:
    """By hand: 8B through four stages has 8, 9, 9 and 6 layers, so that a page is largest in the second."""
    held = Memory(find_config("8B"), machine, TRAFFIC, "8B").rank_memory(
        ServingLayout(stages=4), 64, 8192, AS_CHECKPOINT
    )
    assert held.page_bytes == 16 * 9 * 2 * 8 * 128 * 2
    assert held.weights == 2 * 9 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096) + 4 * 1200 * 128


@pytest.mark.parametrize("sequences", [1, 64])
def test_windows_have_the_room_that_the_engine_gives_them(machine: Machine, sequences: int) -> None:
    """Against the ledger of an engine that starts with so much memory: three layers of four see 512 tokens."""
    config = replace(find_config("1B"), windows=(512, 512, 512, None) * 4)
    traffic = Traffic.of(3000, 1000)
    held = Memory(config, machine, traffic, "1B").rank_memory(ServingLayout(), sequences, 8192, AS_CHECKPOINT)
    asked = EngineConfig("1B", max_model_len=4000, max_num_seqs=sequences, max_num_batched_tokens=8192)
    engine = predicted_ledger(asked, config)
    assert held.tokens == pytest.approx(engine.tokens, rel=0.002)
    assert 0 < held.windows == pytest.approx(engine.windows[0].pages * engine.windows[0].page_bytes, rel=0.002)


def predicted_ledger(asked: EngineConfig, config: ModelConfig) -> Ledger:
    """Of an H200."""
    sizes = EngineSizes.of(asked, config, torch.device("cuda"), DeviceLimits.listed(device("h200")))
    memory = DeviceMemory("NVIDIA H200", int(141e9) - (1 << 29), int(141e9))
    return planned_memory(asked, config, sizes, torch.device("cuda"), memory)


@pytest.mark.parametrize(
    ("model", "precision", "layout"),
    [
        ("8B", Precision("fp8", "fp8"), ServingLayout()),
        ("8B", Precision("int4"), ServingLayout(2, stages=2)),
        ("30B-A3B", Precision("fp8"), ServingLayout(2, expert_parallel=True)),
    ],
)
def test_fewer_bits_have_the_memory_that_the_engine_gives_them(
    machine: Machine, model: str, precision: Precision, layout: ServingLayout
) -> None:
    config = find_config(model).with_layers(range(6))
    asked = EngineConfig(model, max_model_len=1200, max_num_seqs=64, max_num_batched_tokens=8192,
                         **layout.options, **precision.options)  # fmt: skip
    held = Memory(config, machine, TRAFFIC, model).rank_memory(layout, 64, 8192, precision)
    engine = []
    for index in sorted({0, asked.ranks // 2, asked.ranks - 1}):
        memory = DeviceMemory("NVIDIA H200", int(141e9) - CONTEXT, int(141e9))
        place = RankPlace(torch.device("cuda"), DeviceLimits.listed(device("h200")), index, memory)
        engine.append(rank_memory(asked, config, place, rank_setup(asked, config, place)))
    least = min(engine, key=lambda one: one.pages)
    assert (held.weights, held.page_bytes) == (least.weights, least.page_bytes)
    assert held.workspace == least.activations + least.sequences + least.graphs + least.messages
    assert held.tokens == least.tokens


def test_tokens_that_sequences_hold() -> None:
    assert needed_tokens(Traffic.of(100, 1, 0), 10, 16) == pytest.approx(10 * (100.5 + 8), rel=0.02)
    many = needed_tokens(Traffic.of(1000, 200, 900), 500, 16)
    assert many == pytest.approx(900 + 500 * (100 + 100 + 8), rel=0.05)
    assert needed_tokens(Traffic.of(100, 50), 1, 16) <= 100 + 50 + 16


def test_flops_of_a_request_by_hand() -> None:
    config = find_config("8B")
    matrices = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    attention = 4 * 32 * 4096 * (100 * 50 + 9 * 105)
    expected = 2 * matrices * (100 + 9) + 2 * 128256 * 4096 * 10 + attention
    assert request_flops(config, Traffic.of(100, 10)) == pytest.approx(expected)


def test_scores_are_of_layers_that_attend_and_of_keys_within_windows() -> None:
    traffic = Traffic.of(1000, 11, cached=200)

    def scores(config: ModelConfig) -> float:
        matrices = sum(active_elements(config, layer) for layer in range(config.num_layers))
        products = 2 * matrices * (800 + 10) + 2 * config.vocab_size * config.hidden_size * 11
        return request_flops(config, traffic) - products

    all_keys = (1000**2 - 200**2) / 2 + 10 * traffic.context
    assert scores(config_from_dict(RECURRENT_CONFIGS["mamba2"])) == 0
    hybrid = config_from_dict(RECURRENT_CONFIGS["granite-hybrid"])  # of three layers one attends
    assert scores(hybrid) == pytest.approx(4 * hybrid.num_heads * hybrid.head_dim * all_keys)
    dense = find_config("8B")
    windows = replace(dense, windows=(512,) * 31 + (None,))
    nearest = (512**2 - 200**2) / 2 + (1000 - 512) * 512 + 10 * 512
    assert scores(windows) == pytest.approx(4 * 32 * 128 * (31 * nearest + all_keys))


@pytest.mark.usefixtures("few_settings")
def test_the_search_finds_what_trying_everything_finds(asked: Callable[..., Search]) -> None:
    for tpot in (None, 0.0012):
        search = asked(devices=2, ttft=0.5, tpot=tpot)
        every = []
        for layout in layouts(search.question.config, 2, 8):
            for budget in search_module.BUDGETS:
                for target in search_module.TARGETS:
                    for count in search_module.SEQUENCES:
                        settings = search_module.Settings(layout, AS_CHECKPOINT, count, budget, target)
                        if (choice := search.choice(settings)) is not None and search.meets(choice):
                            every.append(choice)
        best = search.run().best
        assert rank(best) == rank(min(every, key=rank))


@pytest.mark.usefixtures("few_settings")
def test_more_devices_and_looser_objectives_are_never_worse(asked: Callable[..., Search]) -> None:
    def tokens(**given: Any) -> int:
        return -rank(asked(**given).run().best)[0]

    by_devices = [tokens(devices=count, tpot=0.002) for count in (1, 3, 11)]
    assert by_devices == sorted(by_devices)
    by_tpot = [tokens(tpot=value) for value in (0.001, 0.002, None)]
    assert by_tpot == sorted(by_tpot)
    by_ttft = [tokens(ttft=value) for value in (0.008, 0.05, None)]
    assert by_ttft == sorted(by_ttft)


def test_replicas_do_not_span_hosts() -> None:
    assert ServingLayout(4).replicas(20, 8) == 5
    assert ServingLayout(3).replicas(16, 8) == 4
    assert ServingLayout(8, stages=2).replicas(40, 8) == 2


def plan(*words: str) -> Any:
    return RUNNER.invoke(app, ["plan", *words])


def failure(*words: str) -> str:
    result = plan(*words)
    assert isinstance(result.exception, ValueError), result.output
    return str(result.exception)


@pytest.mark.usefixtures("few_settings")
def test_the_command_is_one_that_serve_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = ("--quantization", "fp8", "--kv-cache-dtype", "fp8")
    result = plan("1B", "--gpus", "2", "--input-len", "500", "--output-len", "100", "--tpot", "2", "--json", *bits)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(serve_cli, "launch", lambda job, engine, keys: started.append(engine) or 0)
    assert found["command"][:3] == ["strata", "serve", "path/to/1B"]
    served = RUNNER.invoke(app, ["serve", str(BUILTIN_FOLDER), *found["command"][3:]])
    assert served.exit_code == 0, served.output
    assert started[0]["max_num_seqs"] == found["best"]["max_num_seqs"]
    assert started[0]["max_num_batched_tokens"] == found["best"]["max_num_batched_tokens"]
    assert started[0]["max_model_len"] == found["prompt_tokens"] + found["output_tokens"]
    assert (started[0]["quantization"], started[0]["kv_cache_dtype"]) == ("fp8", "fp8")
    assert not found["in_fewer_bits"]
    assert (started[0]["tpot_target_ms"] or 0) == found["best"]["tpot_target_ms"]
    assert sum(found["predicted_from"].values()) == pytest.approx(1.0)


@pytest.mark.usefixtures("few_settings")
def test_what_cannot_be_is_said(tmp_path: Any) -> None:
    lengths = ("--input-len", "100", "--output-len", "10")
    assert "device 'h300' is unknown; plans are made for h200, h100" in failure("8B", "--hardware", "h300", *lengths)
    assert "neither" in failure("9C", *lengths) or "9C" in failure("9C", *lengths)
    for words in (lengths, ("--train", "--batch-tokens", "8192")):
        said = failure("8B", "--hardware", "m3-ultra", *words)
        assert said.startswith("nothing is planned for m3-ultra, of which no peak is recorded: choose one of h200, h")
    said = failure("70B", *lengths)
    assert re.search(
        r"each needs 131.42 GiB of weights, \S+ GiB of workspace .*, \S+ GiB more than the 117.\d+ GiB ", said
    )
    assert said.endswith("--gpus 2 has room for it, and so have these with --quantization fp8")
    for each, lacks in (("8", ""), ("1", r" \(Strata lacks engines on several hosts\)")):
        said = failure("8B", "--hardware", "tpu-v5e", "--gpus-per-host", each, *lengths)
        assert re.search(rf"; --gpus 2 has room for it{lacks}, and so have these with --quantization fp8; ", said)
        assert "; Strata cannot run it there yet, as it lacks kernels for tpu-v5e" in said
    assert "below the floor" in failure("8B", *lengths, "--tpot", "0.5")
    assert re.search(r"nearest, with TTFT .* ms at 1 sequence at once; ask", failure("8B", *lengths, "--tpot", "3.7"))
    assert "give the lengths" in failure("8B", "--input-len", "100")
    for old, new in (("--isl", "--input-len"), ("--osl", "--output-len")):
        assert failure("8B", old, "100") == f"{old} is called {new} now: give {new} 100"
    said = failure("8B", *lengths, "--sequence", "4096", "--precision", "bf16")
    assert said == "--sequence, --precision: for a training run alone; add --train and --batch-tokens, or leave it out"
    assert "--out: for a training run alone" in failure("8B", *lengths, "--out", "run.toml")
    for name, value in (("--tpot", "5"), ("--svg", str(tmp_path / "plan.svg"))):
        assert "answers of one token have no t" in failure("8B", "--input-len", "100", "--output-len", "1", name, value)
    assert "--trace loads.jsonl has the lengths" in failure("8B", *lengths, "--trace", "loads.jsonl")
    for wrong in (("--price", "inf"), ("--network", "inf")):  # no number that JSON has would come of them
        refused = plan("8B", *lengths, *wrong)
        assert refused.exit_code == 2
        assert f"Invalid value for '{wrong[0]}'" in re.sub(r"\x1b\[[\d;]*m", "", refused.output)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("")
    assert "has no requests" in failure("8B", "--trace", str(trace))
    trace.write_text('{"timestamp": 5, "input_length": 9, "output_length": 2}\n' * 2)
    rows = trace.read_text().replace("5", "4", 1).splitlines()
    trace.write_text("\n".join(reversed(rows)))
    assert "line 2: timestamp 4 is before" in failure("8B", "--trace", str(trace))
    trace.write_text('{"prompt": "hello"}\n')
    assert "line 1 has no input_length, which is needed here" in failure("8B", "--trace", str(trace))
    trace.write_text('{"input_length": 9, "output_lenght": 2}\n')
    assert 'line 1: there is no field "output_lenght"; accepted are' in failure("8B", "--trace", str(trace))


def test_a_path_that_cannot_be_written_is_said_before_the_search(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Search, "run", lambda _: pytest.fail("the search ran"))
    monkeypatch.setattr(training_module, "training_plan", lambda *_: pytest.fail("the search ran"))
    lengths = ("1B", "--input-len", "100", "--output-len", "10")
    training = ("1B", "--train", "--batch-tokens", "8192")
    for words, option, name in ((lengths, "--svg", "a.svg"), (lengths, "--html", "a.html"), (training, "--out", "a")):
        result = plan(*words, option, str(tmp_path / "nowhere" / name))
        assert isinstance(result.exception, FileNotFoundError), result.output
    for option, name, ending in (("--svg", "plan.html", ".svg"), ("--html", "plan.svg", ".html or .htm")):
        assert failure(*lengths, option, str(tmp_path / name)).endswith(f"give a name that ends in {ending}")
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["mamba2", "granite-hybrid"])
def test_fixed_states_have_the_memory_that_the_engine_gives_them(name: str, machine: Machine) -> None:
    """What the plan says is missing, or has room, on devices of many sizes, and what the engine's ledger says there."""
    config, layout, length = config_from_dict(RECURRENT_CONFIGS[name]), ServingLayout(), TRAFFIC.longest
    memory = Memory(config, machine, TRAFFIC, name)
    asked = memory.engine_config(layout, 5, 2048)
    sizes = EngineSizes.of(asked, config, torch.device("cuda"), DeviceLimits.listed(device("h200")))
    ample = memory.rank_memory(layout, 5, 2048, AS_CHECKPOINT)
    channels, state = (120, 6 * 8 * 12) if name == "mamba2" else (88, 6 * 8 * 10)
    assert ample.state_bytes == 2 * (channels * 3 * 2 + state * 4)
    assert (ample.states, ample.page_bytes) == (6 * ample.state_bytes, 0 if name == "mamba2" else 16 * 2 * 2 * 6 * 2)
    fits = []
    least = ample.weights + ample.workspace + ample.states
    for room in range(0, 10**6, 23_003):
        total = math.ceil((least + room + CONTEXT) / 0.9)
        held = replace(ample, total=total, budget=int(total * 0.9) - CONTEXT)
        try:
            ledger = planned_memory(
                asked, config, sizes, torch.device("cuda"), DeviceMemory("", total - CONTEXT, total)
            )
        except PoolTooSmall:
            ledger = None
        fits.append(ledger is not None)
        assert fits[-1] == (held.lacking(length) == 0), room
        if ledger is not None:
            assert (held.max_pages, held.snapshots) == (ledger.pages, ledger.snapshots)
            assert held.states + held.snapshots * held.state_bytes == ledger.states
    assert fits[-1]
    assert fits[0] == (name == "mamba2")


@pytest.mark.usefixtures("few_settings")
def test_answers_of_one_token_have_no_time_after_it(tmp_path: Path) -> None:
    """Nor at the rate of a trace."""
    trace = tmp_path / "trace.jsonl"
    rows = ({"timestamp": 100.0 * at, "input_length": 300, "output_length": 1} for at in range(9))
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    asked = ["plan", "0.6B", "--trace", str(trace)]
    shown = RUNNER.invoke(app, asked)
    assert shown.exit_code == 0, shown.exception
    assert "10.00 requests a second" in shown.stdout
    assert "TPOT 0.00" not in shown.stdout
    found = json.loads(RUNNER.invoke(app, [*asked, "--json"]).stdout)
    assert found["trace_ttft_ms"] > 0
    assert found["trace_tpot_ms"] is None


@pytest.mark.usefixtures("few_settings")
def test_models_with_fixed_states_are_planned_and_simulated(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RECURRENT_CONFIGS["granite-hybrid"]))
    result = RUNNER.invoke(
        app, ["plan", str(tmp_path), "--input-len", "1000", "--output-len", "200", "--gpus", "2", "--json"]
    )
    assert result.exit_code == 0, result.exception
    found = json.loads(result.stdout)["best"]
    assert (found["layout"], found["replicas"]) == ("one device", 2)  # ranks do not divide states
    held = found["memory_bytes"]
    row = 2 * (88 * 3 * 2 + 6 * 8 * 10 * 4)
    assert held["states"] == (found["max_num_seqs"] + 1) * row
    assert held["weights"] + held["workspace"] + held["states"] + held["kv"] + held["margin"] == held["total"]
    load = ("--dataset", "shared-prefix", "--num-prompts", "6", "--prefix-groups", "1", "--prefix-len", "64")
    lengths = ("--input-len", "9", "--output-len", "5", "--request-rate", "50", "--num-pages", "500", "--json")
    result = RUNNER.invoke(app, ["simulate", str(tmp_path), *load, *lengths])
    assert result.exit_code == 0, result.exception
    values = json.loads(result.stdout)
    assert (values["completed"], values["output_tokens"]) == (6, 30)
    # Of a prefix of 64 tokens all but the first request find the snapshot behind its last page.
    assert 0 < values["prefix_hits"] <= 5 * 64 / (6 * 73)


@pytest.mark.usefixtures("few_settings")
def test_fewer_bits_stand_beside_the_best_as_a_plan_that_asks_for_them_has_them() -> None:
    words = ("1B", "--input-len", "500", "--output-len", "100", "--tpot", "4", "--json")
    (beside,) = json.loads(plan(*words).stdout)["in_fewer_bits"]
    best = json.loads(plan(*words, "--quantization", "fp8").stdout)["best"]
    assert beside["precision"] == "fp8 weights"
    assert beside == best | {"binds": ""}
    assert 0 < beside["analytic_share"] < 1


def test_what_binds_is_prompts_only_where_steps_have_no_room_for_more(asked: Callable[..., Search]) -> None:
    search = asked()
    for output, word in ((2, "prompts, which take all the room of steps"), (4000, "the time of steps")):
        own = Search(replace(search.question, traffic=Traffic.of(1000, output)))
        few = own.choice(search_module.Settings(ServingLayout(), AS_CHECKPOINT, 64, 2048, 0.0))
        assert few is not None
        assert own.binds(few).startswith(word)

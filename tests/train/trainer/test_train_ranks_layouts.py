"""Whole runs over two ranks of every layout against one process; what does not fit is said once, by every rank."""

from __future__ import annotations

import re
import shutil
import sys
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from strata.files.toml_tables import read_table
from strata.train.config import TrainConfig
from strata.train.settings import sole_run
from strata.train.start import check_run
from strata.train.trainer import Trainer
from tests.largest import largest
from tests.parallel.ranks import run_ranks
from tests.train.tiny_run import EXPERTS, LLAMA, Files, Table, write_files, write_toml
from tests.train.train_ranks import ALONE, Command, refused, train, train_each

LAYOUTS: dict[str, Table] = {
    "dp": {"dp": 2},
    "zero-1": {"shard": 2, "zero": 1},
    "zero-2": {"shard": 2, "zero": 2},
    "fsdp": {"shard": 2, "zero": 3},
    "tp": {"tp": 2},
    "tp-sequence": {"tp": 2, "sequence_parallel": True},
    "pp": {"pp": 2},
    "ring": {"cp": 2},
    "ulysses": {"cp": 2, "context": "ulysses"},
}
# One run, two steps on each; None is one process.
RESUMED: list[Table | None] = [{"shard": 2, "zero": 2}, None, {"tp": 2}, {"pp": 2}, {"cp": 2}]
ADAPTERS: Table = {"rank": 3, "projections": ["q_proj", "o_proj", "up_proj", "down_proj"]}
# Its last step has fewer packs than ranks.
VALIDATED: Table = {"validation": {"share": 0.06, "every": 2}}
# With [lora] beside packed weights, with the preferences of [dpo], or in "both" with [lora] too: on which layouts.
TUNED = {
    "lora": "dp",
    "lora-fsdp": "fsdp",
    "lora-pp": "pp",
    "lora-ring": "ring",
    "dpo": "zero-2",
    "dpo-tp": "tp",
    "dpo-pp": "pp",
    "both": "fsdp",
    "both-tp": "tp-sequence",
    "both-ring": "ring",
}
PAIRS = [name for name in TUNED if not name.startswith("lora")]
# Relative. float32 has a spacing of 1.2e-7, and the sums of one loss round a few times.
BOUND = 1e-6
LATE_SECONDS = 0.4

By_name = dict[str, list[Table]]


def test_runs_over_two_ranks(tmp_path: Path) -> None:
    """One launch for all, since it takes longer than the runs."""
    ranks = run_ranks(train_each, 2, tmp_path, timeout=300, runs=_runs(write_files(tmp_path / "files"), tmp_path))
    found = {name: [one[name] for one in ranks if name in one] for name in ranks[0]}
    check_every_layout_trains_as_one_process(found)
    check_resumed_on_other_ranks_and_layouts(found, "")
    check_resumed_on_other_ranks_and_layouts(found, "-lora")
    check_exported_adapters(tmp_path)
    check_messages_in_8_bits(found)
    check_a_slow_rank_is_named(found)


def _runs(files: Files, folder: Path) -> dict[str, Table]:
    pairs = {"sources": [{"folder": str(files.pairs)}]}
    tables = {name: files.table(folder / name, parallel=layout, **VALIDATED) for name, layout in LAYOUTS.items()}
    tables |= {
        "experts": files.table(
            folder / "experts", model=EXPERTS, parallel={"shard": 2, "ep": 2, "zero": 1}, **VALIDATED
        ),
    }
    dpo = {"data": pairs, "dpo": {"beta": 0.3}}
    kinds: dict[str, Table] = {
        "lora": {"lora": {"rank": 2, "quantization": "int4"}},
        "dpo": dpo,
        "both": {"lora": {"rank": 2}} | dpo,
    }
    for name, layout in TUNED.items():
        kind = kinds[name.partition("-")[0]]
        tables[name] = files.tuning(folder / name, parallel=LAYOUTS[layout], **kind, **VALIDATED)
    runs: dict[str, Table] = {name: {"table": table} for name, table in tables.items()}
    for name in ("dp", "experts", "lora", "dpo", "both"):
        table = {section: values for section, values in tables[name].items() if section != "parallel"}
        table["run"] = table["run"] | {"out": str(folder / f"{name}-alone")}
        runs[f"{name}-alone"] = {"table": table, "alone": True}
    for kind, make in (("", files.table), ("-lora", partial(files.tuning, lora=ADAPTERS))):
        for number, layout in enumerate(RESUMED):
            run = {"steps": 2 * (number + 1)}
            table = make(folder / f"resumed{kind}", run=run, **{} if layout is None else {"parallel": layout})
            last = kind != "" and number == len(RESUMED) - 1
            keywords = {"table": table, "alone": layout is None, "resume": number > 0, "saves": last}
            runs[f"resumed{kind}-{number}"] = keywords
        through = make(folder / f"through{kind}", run={"steps": 2 * len(RESUMED)})
        runs[f"through{kind}"] = {"table": through, "alone": True, "saves": kind != ""}
    for name, steps in (("through", 4), ("cut", 2), ("cut", 4)):
        run = {"steps": steps, "checkpoint_every": 2}
        quantized = {"shard": 2, "zero": 1, "message_dtype": "fp8"}
        table = files.table(folder / f"fp8-{name}", run=run, parallel=quantized)
        runs[f"fp8-{name}-{steps}"] = {"table": table, "resume": (name, steps) == ("cut", 4)}
    slow = files.table(folder / "slow", run={"steps": 6}, parallel={"dp": 2}, faults={"straggler_intervals": 2})
    runs["slow"] = {"table": slow, "late": LATE_SECONDS}
    return runs


def losses(run: Table) -> list[float]:
    return [line["loss"] for line in run["lines"]]


def validated(run: Table, name: str) -> list[float]:
    """What validation found, after the second and the last step."""
    assert f"validation_{name}" not in run["lines"][0]
    return [line[f"validation_{name}"] for line in run["lines"][1:]]


def samples(ranks: list[Table]) -> list[list[list[int]]]:
    """By step the packs of ranks that divide documents: the first of each rank, the second of each, and so on."""
    steps = zip(*(one["samples"] for one in ranks), strict=True)
    return [[pack for packs in zip(*step, strict=True) for pack in packs] for step in steps]


def differences(one: list[float], other: list[float]) -> list[float]:
    return [abs(x - y) / y for x, y in zip(one, other, strict=True)]


def check_every_layout_trains_as_one_process(found: By_name) -> None:
    apart = {}
    for name in (*LAYOUTS, "experts", *TUNED):
        alike = name.partition("-")[0]
        alone = found[f"{alike if f'{alike}-alone' in found else 'dp'}-alone"][0]
        first, second = found[name]
        assert [line["step"] for line in first["lines"]] == [1, 2, 3]
        assert losses(first) == losses(second)
        assert len(set(losses(first))) == 3
        divides_documents = first["samples"] != alone["samples"]
        assert divides_documents == (TUNED.get(name, name) in ("dp", "zero-1", "zero-2", "fsdp", "experts"))
        assert (samples([first, second]) if divides_documents else second["samples"]) == alone["samples"]
        # That of pairs is a difference of what whole replies weigh, which is tens of times as much.
        scale = 20 if name in PAIRS else 1
        apart[name] = largest(differences(losses(first), losses(alone))) / scale
        measured = [validated(one, "loss") for one in (first, second, alone)]
        assert measured[0] == measured[1]
        apart[f"{name} validated"] = largest(differences(measured[0], measured[2])) / scale
    for name in PAIRS:
        pairs = [validated(one, "preferred") for one in (*found[name], *found[f"{name.partition('-')[0]}-alone"])]
        assert pairs[0] == pairs[1] == pytest.approx(pairs[2])
    print("largest relative difference of a loss:", {name: f"{value:.0e}" for name, value in apart.items()})
    assert largest(apart.values()) < BOUND


def check_resumed_on_other_ranks_and_layouts(found: By_name, kind: str) -> None:
    through = found[f"through{kind}"][0]
    seen, trained = [], []
    for number, layout in enumerate(RESUMED):
        ranks = found[f"resumed{kind}-{number}"]
        assert all(losses(one) == losses(ranks[0]) for one in ranks)
        seen += samples(ranks) if layout == {"shard": 2, "zero": 2} else ranks[0]["samples"]
        trained += ranks[0]["lines"]
    assert [line["step"] for line in trained] == list(range(1, 11))
    assert seen == through["samples"]
    assert [line["tokens"] for line in trained] == [line["tokens"] for line in through["lines"]]
    apart = differences([line["loss"] for line in trained], losses(through))
    print(f"largest relative difference of a loss: {max(apart):.1e}")
    assert largest(apart) < BOUND


def check_exported_adapters(folder: Path) -> None:
    """Those of two ranks are those of one process, and PEFT makes the merged model of them."""
    two, one = (folder / f"{name}-lora" for name in ("resumed", "through"))
    ours, alone = (load_file(run / "adapter/adapter_model.safetensors") for run in (two, one))
    assert ours.keys() == alone.keys()
    for name, value in alone.items():
        assert value.abs().max() > 0, name
        assert torch.allclose(ours[name], value, rtol=1e-3, atol=1e-5), name
    assert (two / "adapter/adapter_config.json").read_text() == (one / "adapter/adapter_config.json").read_text()
    if find_spec("peft") is None:
        return
    peft = import_module("peft")
    merged = AutoModelForCausalLM.from_pretrained(two / "model", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(folder / "files/model", dtype=torch.float32)
    tokens = torch.arange(3, 19)[None]
    theirs = peft.PeftModel.from_pretrained(base, two / "adapter")(tokens).logits
    assert torch.allclose(theirs, merged(tokens).logits, rtol=1e-2, atol=1e-2)  # the merged weights are bfloat16


def check_messages_in_8_bits(found: By_name) -> None:
    """What rounding has lost is in no checkpoint, so that a run which goes on from one has the bits of one that did
    not stop."""
    through = losses(found["fp8-through-4"][0])
    assert through == [*losses(found["fp8-cut-2"][0]), *losses(found["fp8-cut-4"][0])]
    apart = differences(through[:3], losses(found["dp-alone"][0]))
    assert 0 < max(apart) < 1e-2


def check_a_slow_rank_is_named(found: By_name) -> None:
    first, _ = found["slow"]
    reports = [line for line in first["said"] if "slower than the median" in line]
    assert reports
    assert all("rank 1 " in line and "rank 0 " not in line for line in reports)
    assert all(line["slowest_rank"] == 1 for line in first["lines"])


# By run, what each rank says of it.
REASONS = {
    "ranks": r"dp 3 .* = 3 ranks, but 2 run; change one of them or the ranks",
    "heads": r"tp = 2 does not divide num_key_value_heads = 1; for this model tp may be 1",
    "stages": r"pp = 2 with schedule 'interleaved' has 4 stages, more than the model's 2 layers",
    "packs": r"packs_per_step = 3 is not divisible by the 2 data-parallel ranks",
    "packed": r"tp = 2 would divide packed weights among ranks, .*; set tp = 1 and use dp, shard, cp or pp, or keep",
    "rope": r"has a document of \d+ tokens, but the model reads at most 16 \(max_position_embeddings\)",
    "folder": r"holds a run \(step-00000003\); go on with --resume, or choose another folder with --run\.out",
    "model": r"cannot resume .*: model\.intermediate_size was 48 and is now 64; restore it",
    "shard": r"is damaged: .*00001\.tokens\.npy.* \(1 of 4 shards: .*00001\); .* or set skip_corrupt",
    "shard skipped": "",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("files"))


def damaged(files: Files, folder: Path) -> Path:
    """The data with one other byte in its second shard."""
    shutil.copytree(files.text, folder)
    shard = sorted(folder.glob("*.tokens.npy"))[1]
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    return folder


def test_every_rank_says_why_and_most_is_told_before_they_start(files: Files, tmp_path: Path) -> None:
    out, bad = tmp_path / "out", {"sources": [{"folder": str(damaged(files, tmp_path / "damaged"))}]}
    trained = files.table(tmp_path / "trained", parallel={"dp": 2})
    train(ALONE, {section: values for section, values in trained.items() if section != "parallel"})
    other = trained | {"model": LLAMA | {"intermediate_size": 64}}
    dp = {"dp": 2}
    runs: dict[str, Table] = {
        "ranks": {"table": files.table(out, parallel={"dp": 3})},
        "heads": {"table": files.table(out, parallel={"tp": 2}, model={"num_key_value_heads": 1})},
        "stages": {"table": files.table(out, parallel={"pp": 2, "schedule": "interleaved"})},
        "packs": {"table": files.table(out, parallel=dp, data={"packs_per_step": 3})},
        "packed": {"table": files.tuning(out, lora={"rank": 2, "quantization": "int4"}, parallel={"tp": 2})},
        "rope": {"table": files.table(out, parallel=dp, model={"max_position_embeddings": 16})},
        "folder": {"table": trained},
        "model": {"table": other, "resume": True},
        "shard": {"table": files.table(out, parallel=dp, data=bad)},
        "shard skipped": {"table": files.table(out, parallel=dp, data=bad | {"skip_corrupt": True})},
    }
    ranks = run_ranks(refused, 2, tmp_path, runs=runs)
    for name, reason in REASONS.items():
        first, second = (one[name] for one in ranks)
        assert first == second
        assert bool(first["reason"]) == bool(reason)
        assert re.search(reason, first["reason"]), first
        if name in ("model", "shard"):  # checkpoints and checksums are read by the ranks
            continue
        with pytest.raises(ValueError, match=reason) if reason else nullcontext():
            check_run(read_table(TrainConfig, runs[name]["table"]), 2, resume=False)
    assert any(re.search(r"goes without damaged shards: .*00001", line) for line in ranks[0]["shard skipped"]["said"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parallel.tp", 2, "--model.num_key_value_heads", 1], "tp = 2 does not divide num_key_value_heads = 1"),
        (["--run.device", "cuda"], "this machine has no CUDA device; use 'cpu' or 'auto'"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="CUDA is hidden as on Linux")
def test_the_command_says_it_once_and_does_not_try_again(
    files: Files, tmp_path: Path, arguments: list[object], message: str
) -> None:
    toml = write_toml(tmp_path / "run.toml", files.table(tmp_path / "run"))
    with Command(toml, "--ranks", 2, "--restarts", 3, *arguments) as command:
        code, said = command.end()
    assert code == 1
    assert [message in line for line in said.splitlines()] == [True], said
    assert not (tmp_path / "run").exists()


def test_two_runs_at_once_in_one_folder(files: Files, tmp_path: Path) -> None:
    """The second is refused before it touches what the first is writing."""
    config = read_table(TrainConfig, files.table(tmp_path))
    writing = tmp_path / "checkpoints/.step-00000003.part"
    writing.mkdir(parents=True)
    with sole_run(tmp_path), pytest.raises(ValueError, match=f"another process trains in {tmp_path}; wait"):
        Trainer(config, ALONE, resume=True)
    assert writing.exists()
    torch.set_num_threads(1)
    run = Trainer(config, ALONE, resume=True)
    assert not writing.exists()
    with sole_run(tmp_path), pytest.raises(ValueError, match="another process trains"):
        run.train()
    run.train()
    assert run.position.step == 3

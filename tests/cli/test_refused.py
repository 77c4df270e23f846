"""What commands refuse, each in one clear line, before anything runs or is written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strata.cli.main import app

# What is given, and a pattern that the message has.
REFUSED = [
    # explain
    (
        "explain T9",
        r"test 'T9' is unknown; give T1, T2, T3-bN \(N requests, such as T3-b32\), T4, or T5, a served load",
    ),
    ("explain T1 --device cpu --profile", "--profile is of CUDA, and this runs on a CPU"),
    ("explain T1 --trace x.txt", r"--trace x.txt: give a name that ends in .json or .json.gz"),
    ("explain T1 --trace x.gz", r"give a name that ends in .json or .json.gz"),
    ("explain T1 --trace json", r"give a name that ends in .json or .json.gz"),
    ("explain T3-b1000000000000", "give T3-bN with N up to 10000"),
    ("explain T1 --prompt 5", "--prompt and --output are of T3-bN"),
    ("explain T3-b2 --prompt 1000000", "T3-b2 has sequences of up to 1,000,256 tokens and builtin reads"),
    ("explain T5 --prompt 1000000 --num-prompts 10000", "T5 has sequences of up to 1,000,128 tokens"),
    ("explain T4 --device cpu", "sequences of up to 2,049 tokens and builtin reads 1,024"),
    ("explain T3-b2 --device cpu --prompt 20 --output 4 --tensor-parallel-size 2", "several ranks on one processor"),
    ("explain --run nowhere", "--run nowhere is not there: give the folder of a run, or the TOML file of one"),
    ("explain T1 --run nowhere", "a test says nothing"),
    ("explain --run nowhere --model 8B", "--model says nothing"),
    ("explain --run .", "holds no run.json"),
    ("explain --request ' '", "give the id of an answer, like chatcmpl-..., or its x-request-id"),
    ("explain --request cmpl-1 --url http://127.0.0.1:99999", "give a port from 1 to 65535"),
    ("explain --request cmpl-1 --url http://127.0.0.1:9", "no server answers at http://127.0.0.1:9"),
    ("explain --request cmpl-1 --model x", "a request of a server, of which --model says nothing"),
    ("explain --url http://127.0.0.1:9", "--url is of the server that has a --request"),
    # models and shapes
    *(
        (f"{command} /nowhere/model", "model folder '/nowhere/model' does not exist; give a model folder.*'builtin'")
        for command in ("generate hi --model", "chat --model", "bench latency --model", "graph")
    ),
    ("bench train --shape foo", "'foo' does not exist"),
    # graph
    ("graph nowhere", "model folder 'nowhere' does not exist; give a model folder, org/model"),
    ("graph 30B-A3B --enable-dp-attention", "--enable-dp-attention is of experts .* ranks divide; make that 2 or more"),
    ("graph 8B --passes fuse", "there is no pass 'fuse'; accepted are all, exact, none"),
    ("graph 8B --hardware abacus", "device 'abacus' is unknown; give one of h200, .* rtx5090, or cpu, the processor"),
    ("graph 8B --hardware gaudi3", "'gaudi3' is Intel Gaudi 3, which runs no CUDA kernels; give one of h200, .* cpu"),
    ("graph 8B --hardware cpu --tensor-parallel-size 2", "cpu shows a step of one process; leave out the other"),
    (
        "graph 8B --pipeline-parallel-size 2 --stage 2",
        "--stage 2 of --pipeline-parallel-size 2: stages count from 0 to 1",
    ),
    (
        "graph 8B --pipeline-parallel-size 33",
        "pipeline_parallel_size=33: each stage needs a layer, and this model has 32",
    ),
    ("graph 8B --tensor-parallel-size 3", "heads"),
    ("graph 8B --tensor-parallel-size 2 --hardware l40s", "no link is recorded for l40s"),
    (
        "graph 8B --prefill-context-parallel-size 2 --pipeline-parallel-size 2",
        "and pipeline_parallel_size=2 divides them",
    ),
    ("graph 80B-A3B --prefill-context-parallel-size 2", "layers keep a state of fixed size: leave it out"),
    ("graph 80B-A3B --pipeline-parallel-size 2", "layers keep a state of fixed size: leave it out"),
    (
        "graph 30B-A3B --tensor-parallel-size 4 --decode-context-parallel-size 2",
        "2 with tensor_parallel_size=4: no ranks have the same of 4 KV heads",
    ),
    (
        "graph gpt-oss-20b --tensor-parallel-size 8 --decode-context-parallel-size 2",
        "which has layers with windows: leave it out",
    ),
    (
        "graph 30B-A3B --tensor-parallel-size 8 --enable-expert-parallel --enable-dp-attention "
        "--decode-context-parallel-size 2",
        "and enable_dp_attention=True are not there together",
    ),
    ("graph 8B --draw 8b.png", r"give a name that ends in \.svg"),
    ("graph 8B --draw none/8b.svg", r"there is no folder .*; make it first"),
    ("graph 8B --draw 8b.svg --tensor-parallel-size 2", "of one rank; leave out the other ranks"),
    ("graph 0.6B --occupancy --tensor-parallel-size 2", "--occupancy compiles a GPU's kernels, of one rank"),
    # loads
    ("simulate 0.6B --dataset agents", "which only a server gives"),
    ("bench serve --turns 3", "--turns is of --dataset agents: leave it out with --dataset random"),
    # gaps
    ("bench gaps T1 --device cpu", "CUDA"),
    ("bench gaps T3-b0", "T3-bN"),
    ("bench gaps T5 --request-rate 50%", r"requests a second \(55\) or inf, got '50%'"),
    ("bench gaps T5 --request-rate 4,-3", "got '-3'"),
    ("bench gaps T5 --request-rate '' --model nowhere", "got ''"),
    *((f"bench gaps T1 --{option} 3", "are of T5") for option in ("request-rate", "num-prompts", "seed")),
    ("bench gaps T9", "T5, a served load"),
    # ranks and messages
    ("bench parallel --device cpu --tests T9", "'T9' is unknown; give some of comm, T2, T1, T4, T0 and T3-bN"),
    ("bench parallel --device cpu --dtype int3", "'int3' is unknown"),
    ("bench parallel --device tpu", "'tpu' is unknown"),
    ("bench parallel --device cpu --models 9B", "9B"),
    ("bench comm --operations all_reduce,gossip", "'gossip' is unknown; known are all_reduce, all_gather"),
    ("bench comm --dtype int3", "'int3' is unknown; known are"),
    ("bench comm --device tpu", "'tpu' is unknown; give auto, cpu or cuda"),
    ("bench comm --device cuda --ranks 1000", "1000 ranks need a GPU each, and there are"),
    ("bench comm --device cpu --sizes 8KB", "takes bytes, such as 512, 8KiB or 1MiB"),
    ("bench comm --device cpu --sizes 0", "not '0'"),
    # fewer bits, and zeros
    ("quantize builtin --out out --scheme int5", "accepted are 'fp8'"),
    ("quantize builtin --out out --scheme int4 --group 128", "give another --group, or leave them out with --skip"),
    ("quantize builtin --out out --scheme fp8_block", "down_proj.weight; leave them out with --skip"),
    ("quantize builtin --out out --calibration absent.txt", "does not exist"),
    ("quantize builtin --out out --device gpu", "'gpu' is unknown; use auto, cpu, cuda"),
    ("quantize builtin --out out --device cuda:64", "'cuda:64' is not there"),
    ("prune builtin", "--out is missing"),
    ("prune builtin --out out --pattern 1:4", "accepted are '2:4'"),
    ("prune builtin --out out --count-activations", "leave out one of them"),
    ("prune builtin --out out --share 0.4", "2:4 makes half"),
    # accuracy
    ("eval builtin --against builtin --against-quantization fp5", "quantization = 'fp5' is not known"),
    ("eval builtin --against-quantization fp8", "options of the other model need one: give --against"),
    ("eval builtin --passage-tokens 2000", "passages of 2000 tokens are too long: the models take 1023"),
    # data
    ("data missing.txt --out out", "data file missing.txt does not exist"),
    (f"data {Path(__file__)} --out out", "the ending '.py' is unknown"),
    ("data text.txt --longest 1 --out out", "longest = 1 must be at least 2"),
    ("data exercises --documents 9 --vocab-size 9 --out out", "vocab_size = 9 must lie in"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=lambda value: None if "\\" in value else value[:70])
def test_it_is_one_line_and_leaves_nothing(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))  # no probe of this machine
    (tmp_path / "text.txt").write_text("Some words.")
    result = CliRunner().invoke(app, shlex.split(words))
    assert isinstance(result.exception, ValueError)
    assert re.search(message, str(result.exception))
    assert "\n" not in str(result.exception)
    assert result.output == ""
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]

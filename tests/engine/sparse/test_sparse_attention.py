"""Prompts and decodes that attend to blocks of their keys: which do, what stays the same, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.engine.engine_config import EngineConfig
from strata.engine.startup.sparse_attention import attention_choice, choice_bytes
from strata.graph.ranks.stages import stage
from strata.graph.sparsify_attention import select_pages, sparsify_attention
from strata.graph.trace import trace
from strata.graph.walk import operation_counts
from strata.kernels.attention.sparse.block_choice import BlockChoice
from strata.kernels.attention.sparse.page_choice import PageChoice
from strata.kernels.attention.sparse.prompts import block_sparse_attention
from strata.models.config import config_from_dict
from strata.models.families import build
from tests.engine.program.programs import graph_of
from tests.models.checkpoints import FAMILY_CONFIGS, make_checkpoint

CONFIGS = dict(FAMILY_CONFIGS)
LONG = [[(7 * at * at + 3) % 80 for at in range(length)] for length in (90, 110)]
SHORT = [[(5 * at + 1) % 80 for at in range(length)] for length in (20, 31)]


def engine(folder: Path, **options: Any) -> LLM:
    sizes = {"num_pages": 200, "max_num_seqs": 8, "dtype": "float32", "max_num_batched_tokens": 64}
    return LLM(folder, device="cpu", skip_tokenizer_init=True, verbose=False, **(sizes | options))


def sparse(folder: Path, share: float, **options: Any) -> LLM:
    keys: dict[str, Any] = {"sparse_prefill": share, "sparse_prefill_min_keys": 64, "sparse_prefill_block": 16}
    return engine(folder, **(keys | options))


def scored(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Greedy ids, and what each token of the prompt was given."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    found = []
    for one, ids in zip(outputs, prompts, strict=True):
        given = one.prompt_logprobs
        assert given is not None
        found.append((one.outputs[0].token_ids, [given[at][ids[at]].logprob for at in range(1, len(ids))]))
    return found


@pytest.fixture(scope="module", params=["llama-llama3", "gemma3-local-global"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sparse") / request.param, CONFIGS[request.param])


def test_only_long_prompts_leave_keys_out(folder: Path) -> None:
    dense = scored(engine(folder), LONG + SHORT)
    whole, half = (scored(sparse(folder, share), LONG + SHORT) for share in (1.0, 0.3))
    for (ids, numbers), (all_ids, all_numbers) in zip(dense, whole, strict=True):
        assert all_ids == ids
        assert all_numbers == pytest.approx(numbers, abs=1e-4)
    for at, ((_, numbers), (_, other)) in enumerate(zip(dense, half, strict=True)):
        # Steps that end before the 64th key, and whole prompts that do, see all keys.
        assert other[:31] == pytest.approx(numbers[:31], abs=1e-4)
        assert (other != pytest.approx(numbers, abs=1e-3)) == (at < len(LONG))


def test_prompts_that_are_not_scored_leave_keys_out_too(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "llama", CONFIGS["llama-llama3"])
    llm = sparse(folder, 0.3)
    ran = {"logits": 0, "sparse_logits": 0}
    for name in ran:
        graph = graph_of(llm.engine.program, name)

        def counted(*given: Any, name: str = name, forward: Any = graph.forward) -> Any:
            ran[name] += 1
            return forward(*given)

        graph.forward = counted
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm.generate([{"prompt_token_ids": LONG[0]}], params, use_tqdm=False)
    assert ran == {"logits": 0, "sparse_logits": 2}  # 64 tokens, the 64 keys of which are enough, and 26
    llm.generate([{"prompt_token_ids": SHORT[0]}], params, use_tqdm=False)
    assert ran == {"logits": 1, "sparse_logits": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sparse_prefill": 0.0},
            r"sparse_prefill must be a share in \(0, 1\], or None to attend to all keys, got 0.0",
        ),
        ({"sparse_prefill": True}, "sparse_prefill must be a number or None, got True"),
        ({"sparse_prefill_block": 48}, "must be a power of two of at least 16 and of the tokens of a page, 16, and at"),
        ({"sparse_prefill_block": 4096}, "and at most 2048, got 4096"),
        ({"sparse_prefill_block": 16, "page_size": 32}, "of the tokens of a page, 32, and at most 2048, got 16"),
        ({"sparse_prefill_min_keys": 0}, "sparse_prefill_min_keys must be an integer of at least 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(Path("nowhere"), **({"sparse_prefill": 0.5, "sparse_prefill_block": 16} | options))


@pytest.mark.parametrize(
    ("prefix", "message"),
    [("deepseek", "whose pages keep latents"), ("mistral", "leaves out keys of layers that see all, and Mistral")],
)
def test_models_without_such_layers_are_refused(tmp_path: Path, prefix: str, message: str) -> None:
    name = next(name for name in CONFIGS if name.startswith(prefix) and (prefix != "mistral" or "window" in name))
    with pytest.raises(ValueError, match=message):
        sparse(make_checkpoint(tmp_path / name, CONFIGS[name]), 0.5)


@pytest.mark.parametrize("options", [{"sparse_prefill": 0.5}, {"decode_pages": 8}])
def test_a_stage_may_have_no_such_layer(options: dict[str, Any]) -> None:
    config = config_from_dict(CONFIGS["gemma3-local-global"])
    asked, stage = EngineConfig("nowhere", **options), config.with_layers((config.windows.index(None) - 1,))
    assert stage.windows[0] is not None
    assert choice_bytes(asked, stage, 64, 1024) > 0
    assert attention_choice(asked, config, "cpu") is not None


PROMPTS = [[(7 * at * at + 3) % 80 for at in range(length)] + [length] for length in (5, 30, 47)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of a model whose layers all see all keys, and one in which every other does."""
    made, at = {}, tmp_path_factory.mktemp("pages")
    for name, found in (("all", "llama-llama3"), ("windows", "gemma3-local-global")):
        config = CONFIGS[found] | {"num_hidden_layers": 4}
        if "layer_types" in config:
            config["layer_types"] = ["sliding_attention", "full_attention"] * 2
        made[name] = make_checkpoint(at / name, config)
    return made


def choosing(folder: Path, **options: Any) -> LLM:
    sizes = {"num_pages": 400, "max_num_seqs": 8, "page_size": 4, "dtype": "float32"}
    return LLM(folder, device="cpu", skip_tokenizer_init=True, verbose=False, **(sizes | options))


def generated(llm: LLM, together: bool = True) -> list[list[list[int]]]:
    """Samples that fork; the second round finds what the first has left."""
    params = SamplingParams(n=2, temperature=0.8, seed=1, max_tokens=8, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    calls = [asked] if together else [[one] for one in asked]
    outputs = [one for _ in range(2) for call in calls for one in llm.generate(call, params, use_tqdm=False)]
    return [[output.token_ids for output in one.outputs] for one in outputs]


def test_cuts_prefixes_and_forks_change_no_id_and_all_pages_are_all_keys(folders: dict[str, Path]) -> None:
    folder = folders["windows"]
    dense = generated(choosing(folder))
    assert generated(choosing(folder, decode_pages=30)) == dense
    few = generated(choosing(folder, decode_pages=3, enable_prefix_caching=False))
    # Alone, so that no chunk of a prompt is a single token, which would attend as a decode does.
    cut = choosing(folder, decode_pages=3, max_num_batched_tokens=20)
    assert generated(cut, together=False) == few
    assert cut.engine.loop.scheduler.statistics.prefix_hits > 0
    assert few != dense


@pytest.mark.parametrize("name", ["all", "windows"])
def test_layers_and_bytes(folders: dict[str, Path], name: str) -> None:
    plain, chosen = (choosing(folders[name], decode_pages=pages) for pages in (None, 3))
    counts = operation_counts(chosen.engine.program.logits)
    windows = chosen.engine.config.windows
    assert counts["page_sparse_attention"] == windows[2:].count(None)
    assert counts["attention"] == len(windows) - counts["page_sparse_attention"]
    # Of 4 tokens a page keeps 4 keys, 4 values, and two bounds.
    assert 4 * chosen.engine.ledger.page_bytes == 5 * plain.engine.ledger.page_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_pages": 1}, "decode_pages must be an integer of at least 2, or None to attend to all, got 1"),
    ],
)
def test_options_of_decode_pages_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choosing(Path("nowhere"), **({"decode_pages": 8, "page_size": 16} | options))


CHOICE = BlockChoice(0.9, 100)


@pytest.mark.parametrize("config", [config for _, config in FAMILY_CONFIGS], ids=[n for n, _ in FAMILY_CONFIGS])
def test_node_counts_of_every_family(config: dict[str, object]) -> None:
    read = config_from_dict(config)
    with torch.device("meta"):
        graph = trace(build(read))
    before = operation_counts(graph)
    assert sparsify_attention(graph, CHOICE) is graph
    counts, windows = operation_counts(graph), [w for w, own in zip(read.windows, read.attends, strict=True) if own]
    found = counts.pop("block_sparse_attention", 0)
    assert found == (0 if read.latent is not None else windows.count(None))
    assert counts.pop("attention", 0) == before.pop("attention", 0) - found
    assert counts == before
    graph.graph.lint()
    for node in graph.graph.nodes:
        if node.target is block_sparse_attention:
            assert node.args[4].window is None
            assert node.args[5] == CHOICE
            assert node.meta["layer"] == node.args[4].layer


@pytest.mark.parametrize(("first", "dense"), [(0, 2), (1, 1), (2, 0)])
def test_the_first_two_layers_are_those_of_the_model_not_of_its_stages(first: int, dense: int) -> None:
    with torch.device("meta"):
        model = build(config_from_dict(dict(FAMILY_CONFIGS)["llama-llama3"] | {"num_hidden_layers": 4}))
    counts = operation_counts(select_pages(stage(trace(model), first, 4, model), PageChoice(8)))
    assert counts["attention"] == dense
    assert counts["page_sparse_attention"] == 4 - first - dense

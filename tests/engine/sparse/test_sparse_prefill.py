"""Long prompts that attend to blocks of their keys, in the engine: which do, what stays the same, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strata import LLM, SamplingParams
from strata.engine.engine_config import EngineConfig
from strata.engine.startup.sparse_attention import attention_choice, choice_bytes
from strata.models.config import config_from_dict
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

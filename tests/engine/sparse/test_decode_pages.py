"""Decodes that attend to chosen pages, in the engine: which do, what changes no id, what it takes, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strata import LLM, SamplingParams
from strata.graph.walk import operation_counts
from tests.models.checkpoints import FAMILY_CONFIGS, make_checkpoint

CONFIGS = dict(FAMILY_CONFIGS)
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


def engine(folder: Path, **options: Any) -> LLM:
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
    dense = generated(engine(folder))
    assert generated(engine(folder, decode_pages=30)) == dense
    few = generated(engine(folder, decode_pages=3, enable_prefix_caching=False))
    # Alone, so that no chunk of a prompt is a single token, which would attend as a decode does.
    cut = engine(folder, decode_pages=3, max_num_batched_tokens=20)
    assert generated(cut, together=False) == few
    assert cut.engine.loop.scheduler.statistics.prefix_hits > 0
    assert few != dense


@pytest.mark.parametrize("name", ["all", "windows"])
def test_layers_and_bytes(folders: dict[str, Path], name: str) -> None:
    plain, chosen = (engine(folders[name], decode_pages=pages) for pages in (None, 3))
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
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(Path("nowhere"), **({"decode_pages": 8, "page_size": 16} | options))

"""An engine that keeps 2:4 sparse weights without their zeros says what it says with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.engine.engine_config import EngineConfig
from strata.engine.startup.packing import Packing
from strata.kernels.op import Implementation
from strata.kernels.quant.packed import dense
from strata.kernels.quant.two_of_four import is_two_of_four
from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.pruned.prune import prune
from strata.models.pruned.settings import Pruning
from strata.models.save import save
from strata.models.weights import WeightStore, load, packed_bytes
from tests.dummies import randomize
from tests.engine.ranks.layouts import CONFIG as MIXTURE
from tests.models.checkpoints import FAMILY_CONFIGS
from tests.models.recurrent_checkpoints import RECURRENT_CONFIGS
from tests.parallel.shards import shard_of

SIZES = {"hidden_size": 48, "intermediate_size": 96, "moe_intermediate_size": 80, "num_experts": 3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with a layer of a plain MLP and one of experts; and the same, pruned."""
    folder = tmp_path_factory.mktemp("models")
    config = config_from_dict(MIXTURE | SIZES | {"mlp_only_layers": [0], "num_hidden_layers": 2}, "mixture")
    model = build(config)
    randomize(model, 0)
    save(model, config, folder / "whole")
    prune(folder / "whole", folder / "pruned", Pruning.of("2:4", 0.5, "magnitude"), [], torch.device("cpu"))
    return folder / "whole", folder / "pruned"


def test_greedy_tokens_and_memory(folders: tuple[Path, Path]) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_pages": 48, "max_model_len": 64}
    options |= {"max_num_seqs": 2, "skip_tokenizer_init": True, "verbose": False}
    found, weights = [], []
    for sparsity in (None, "2:4"):
        llm = LLM(folders[1], sparsity=sparsity, **options)
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": list(range(3, 20))}], params, use_tqdm=False)
        found.append(output.outputs[0].token_ids)
        weights.append(llm.engine.ledger.weights)
    assert found[0] == found[1]
    assert weights[1] < weights[0]


@torch.no_grad()
def test_parts_of_ranks_are_those_of_the_model(folders: tuple[Path, Path]) -> None:
    whole, config = load(folders[1], dtype="bfloat16")
    for rank in (0, 1):
        shard, wanted = shard_of(whole, config, 2, rank)
        with torch.device("meta"):
            own = shard.build()
        packing = Packing.of(None, own, shard, folders[1], "2:4")
        store = WeightStore.load(folders[1], packing.schemes, dtype="bfloat16", part=shard)
        model, packed = store.model, store.packed
        assert packed.keys() == packing.schemes.keys()
        for name, weight in packed.items():
            assert torch.equal(dense(weight, torch.bfloat16), wanted.get_parameter(name)), name
            planned = packing.planned[name]
            assert {n: (t.shape, t.dtype) for n, t in planned.tensors.items()} == {
                n: (t.shape, t.dtype) for n, t in weight.tensors.items()
            }
        held = sum(one.nbytes for one in model.parameters() if not one.is_meta)
        held += sum(one.nbytes for one in model.buffers()) + sum(one.nbytes for one in packed.values())
        assert packed_bytes(own, torch.bfloat16, packing.planned) == held


def test_a_checkpoint_that_is_not_sparse_is_refused_by_name(folders: tuple[Path, Path]) -> None:
    schemes = Packing.of(None, _meta(folders[0]), None, folders[0], "2:4").schemes
    with pytest.raises(ValueError, match=r"_proj.weight cannot be packed: 4 of four .* strata prune"):
        WeightStore.load(folders[0], schemes)
    packed = WeightStore.load(folders[0], schemes, load_format="dummy").packed
    assert all(is_two_of_four(dense(one)) for one in packed.values())


@pytest.mark.parametrize("family", ["gpt-oss", "granite"])
def test_experts_in_one_tensor_which_nothing_prunes_stay_as_they_are(family: str, tmp_path: Path) -> None:
    values = dict(FAMILY_CONFIGS)["gpt-oss-yarn"] | {"hidden_size": 64, "intermediate_size": 32}
    if family == "granite":
        sizes = {"hidden_size": 32, "intermediate_size": 16, "shared_intermediate_size": 32, "mamba_n_heads": 8}
        values = RECURRENT_CONFIGS["granite-hybrid-experts"] | sizes | {"head_dim": 8}
    config = config_from_dict(values)
    model = build(config)
    randomize(model, 0)
    save(model, config, tmp_path / "whole")
    prune(tmp_path / "whole", tmp_path / "pruned", Pruning.of("2:4", 0.5, "magnitude"), [], torch.device("cpu"))
    schemes = Packing.of(None, _meta(tmp_path / "pruned"), None, tmp_path / "pruned", "2:4").schemes
    assert any("o_proj" in name for name in schemes)
    packed = WeightStore.load(tmp_path / "pruned", schemes).packed
    assert packed.keys() == {name for name, _ in model.named_parameters() if name.endswith("proj.weight")}


def test_options_that_exclude_each_other() -> None:
    for options, said in (
        ({"sparsity": "1:2"}, "accepted is '2:4'"),
        ({"sparsity": "2:4", "quantization": "fp8"}, "leave out one of them"),
        ({"sparsity": "2:4", "deterministic": True, "tensor_parallel_size": 2}, "sparsity='2:4' with tensor"),
    ):
        with pytest.raises(ValueError, match=said):
            EngineConfig("model", **options)
    with pytest.raises(ValueError, match="leave out one of them"):  # `strata graph` has no EngineConfig
        Packing.of("fp8", build(config_from_dict(MIXTURE)), sparsity="2:4")


def test_experts_are_refused_on_cuda_before_weights_are_read(folders: tuple[Path, Path]) -> None:
    packing = Packing.of(None, _meta(folders[1]), None, folders[1], "2:4")
    experts = next(one for one in packing.operations if one.name == "experts")
    experts.implementations.append(Implementation("other schemes", experts.reference, "cuda", packed=True))
    experts._bound.clear()
    try:
        with pytest.raises(ValueError, match="experts has no kernel for them on cuda"):
            packing.check_kernels("cuda", deterministic=False)
    finally:
        experts.implementations.pop()
        experts._bound.clear()


def _meta(folder: Path) -> Any:
    from strata.models.config import read_config

    with torch.device("meta"):
        return build(read_config(folder))

"""An engine with packed weights says what a model says that holds what these stand for, and rounds as they do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.engine.engine_config import EngineConfig
from strata.engine.program.meta_model import MetaModel
from strata.engine.startup.packing import Packing
from strata.graph.walk import operation_counts
from strata.hardware.roofline import Cost, Workload
from strata.hardware.specs import device
from strata.kernels.choose import MEASURED, thresholds_of
from strata.kernels.op import Operation
from strata.kernels.quant.quantized import dense, pack, round_activations
from strata.kernels.quant.schemes import SCHEMES
from strata.models.family.qwen3_moe import Qwen3MoE
from strata.models.folder import BUILTIN_FOLDER
from strata.models.layers import CausalLM, Linear
from strata.models.weights import load
from strata.plan.meta_model import find_config, meta_model
from tests.engine.program.programs import decode, graph_of, replayed
from tests.engine.ranks.layouts import CONFIG as MIXTURE
from tests.models.batches import packed

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_pages": 48,
    "max_model_len": 128,
    "max_num_seqs": 2,
    "skip_tokenizer_init": True,
    "seed": 0,
    "verbose": False,
}
PROMPT = [(7 * place + 3) % 513 for place in range(20)]


@pytest.fixture(scope="module")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a layer with a plain MLP and one with experts."""
    return written(tmp_path_factory.mktemp("mixture"), [0])


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("dense"), [0, 1])


def written(folder: Path, dense_layers: list[int]) -> Path:
    """An odd number of groups and blocks of 128 columns, the last not full."""
    sizes = {"hidden_size": 72, "intermediate_size": 280, "mlp_only_layers": dense_layers}
    (folder / "config.json").write_text(json.dumps(MIXTURE | sizes))
    return folder


def answer(folder: Path, quantization: str, most: int = 64, **options: Any) -> tuple[list[int], LLM]:
    load_format = "auto" if folder == BUILTIN_FOLDER else "dummy"
    llm = LLM(folder, quantization=quantization, load_format=load_format, **OPTIONS, **options)
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), llm


@torch.no_grad()
def twin(folder: Path, scheme: str) -> CausalLM:
    """A plain model: each product of its layers has what a packed weight stands for, and rounds what it reads."""
    model, _ = load(folder, dtype="float32", load_format="auto" if folder == BUILTIN_FOLDER else "dummy", seed=0)
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name != "lm_head":
            module.weight.copy_(dense(pack(module.weight, SCHEMES[scheme])))
            module.register_forward_pre_hook(lambda _, x: (round_activations(x[0], SCHEMES[scheme]),))
    if isinstance(model, Qwen3MoE):
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                for matrix in (one for expert in parameter for one in expert.chunk(1 + ("gate_up" in name))):
                    matrix.copy_(dense(pack(matrix, SCHEMES[scheme])))
    return model


# Experts round what they read by schemes that say so, which the twin's do not.
@pytest.mark.parametrize("scheme", [name for name, scheme in SCHEMES.items() if not scheme.activations])
def test_greedy_tokens_of_a_mixture_are_those_of_a_twin(random_folder: Path, scheme: str) -> None:
    check_tokens(random_folder, scheme)


@pytest.mark.parametrize("scheme", ["fp8_block", "int8"])
def test_greedy_tokens_are_those_of_a_twin(dense_folder: Path, scheme: str) -> None:
    check_tokens(dense_folder, scheme)


def test_greedy_tokens_of_the_builtin_model_are_those_of_a_twin() -> None:
    check_tokens(BUILTIN_FOLDER, "fp8")


@torch.no_grad()
def check_tokens(folder: Path, scheme: str) -> None:
    """The twin reads prompt and answer at once: no pages, no merged products."""
    ids, llm = answer(folder, scheme)
    assert len(ids) == 64
    model = twin(folder, scheme)
    logits = model.head(model(packed([PROMPT + ids[:-1]])))[len(PROMPT) - 1 :]
    assert logits.argmax(-1).tolist() == ids
    parameters = dict(llm.engine.model.named_parameters())
    products = ("_proj", "_proj.weight")
    assert {name for name, one in parameters.items() if one.is_meta} == {n for n in parameters if n.endswith(products)}
    assert llm.engine.ledger.weights < sum(parameter.nbytes for parameter in parameters.values())


def test_two_ranks_answer_as_one(random_folder: Path) -> None:
    """Of int4, whose groups two ranks divide; their sums are in another order."""
    wanted, _ = answer(random_folder, "int4", 32)
    ids, two = answer(random_folder, "int4", 32, tensor_parallel_size=2)
    assert ids == wanted
    assert two.engine.ranks is not None
    two.engine.ranks.check_ids()


def test_deterministic_bits_do_not_depend_on_company(random_folder: Path) -> None:
    options = OPTIONS | {"load_format": "dummy", "deterministic": True, "quantization": "int8"}
    llm = LLM(random_folder, **options)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    prompts = [{"prompt_token_ids": PROMPT[:length]} for length in (20, 7)]
    together = llm.generate(prompts, params, use_tqdm=False)
    alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_a_device_without_a_kernel_is_refused_and_a_cpu_has_the_reference() -> None:
    operation = Operation("never", lambda x: x, cost=lambda *_, **__: Cost(), meta=lambda x: x)
    packing = Packing({}, {}, (operation,), "int4")
    packing.check_kernels("cpu", deterministic=False)
    with pytest.raises(ValueError, match="packed as int4: never has no kernel for them on cuda yet; take"):
        packing.check_kernels("cuda", deterministic=False)
    with pytest.raises(ValueError, match="never has no deterministic kernel for them on cpu yet"):
        packing.check_kernels("cpu", deterministic=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantization": "fp7"}, "quantization = 'fp7' is not known; accepted are 'fp8', 'fp8_block'"),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True},
            "enable_eplb=True moves experts that are not packed",
        ),
        ({"tensor_parallel_size": 2, "deterministic": True}, "summed in one order of floats alone"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineConfig("somewhere", **({"quantization": "int4"} | options))


pytest.importorskip("triton")
LAYERS = 2


def model_of(scheme: str | None, gpu: str = "h200", deterministic: bool = False, **changes: object) -> MetaModel:
    config = find_config("8B").with_layers((0, 1))
    found = meta_model(config, device(gpu), deterministic=deterministic, quantization=scheme, **changes)
    return found.of_sizes(attends=False)


PRODUCTS = {"fp8": "(cuBLAS)", "int8": "w8a8_kernel", "fp8_block": "w8a8_kernel"}


@pytest.fixture(scope="module", params=PRODUCTS)
def scheme(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def model(scheme: str) -> MetaModel:
    return model_of(scheme)


def decodes(sequences: int) -> Workload:
    return Workload((1,) * sequences, (1000,) * sequences)


def test_prompts_round_where_rows_are_made(model: MetaModel, scheme: str) -> None:
    step = model.step(Workload((4096,), (4096,)))
    assert step.graph == "quantized_logits"
    product = PRODUCTS[scheme]
    first = step.kernels.index("rms_norm_kernel")
    assert step.kernels[first : first + 12] == [
        "rms_norm_kernel", product, "qk_rope_kv_write_kernel", "attention_kernel", "round_rows_kernel", product,
        "rms_norm_kernel", product, "quantized_silu_mul_kernel", product, "rms_norm_kernel", product,
    ]  # fmt: skip
    # Behind the last attention one row is left, and few rows are not rounded.
    assert step.kernels.count("round_rows_kernel") == LAYERS - 1


def test_the_number_of_rows_decides(model: MetaModel) -> None:
    graphs = model.program
    most = thresholds_of(MEASURED).quantized_rows
    assert replayed(graphs, most) is graphs.logits
    assert replayed(graphs, most + 1) is graph_of(graphs, "quantized_logits")
    assert decode(graphs, most) is graph_of(graphs, "decode_small_batch")
    assert decode(graphs, most + 1) is graph_of(graphs, "decode_large_batch")
    many = model.step(decodes(most + 1)).kernels
    assert many.count("rms_norm_kernel") == 2 * LAYERS + 1
    assert many.count("quantized_silu_mul_kernel") == many.count("round_rows_kernel") == LAYERS
    assert not any("round" in kernel for kernel in model.step(decodes(most)).kernels)
    assert not any("round" in name for name in operation_counts(graphs.logits))


@pytest.mark.parametrize(
    ("scheme", "gpu", "changes"),
    [
        (None, "h200", {}),
        ("int4", "h200", {}),
        ("fp8_weights", "h200", {}),
        ("fp8", "a100", {}),
        ("fp8", "h200", {"deterministic": True}),
        ("fp8", "h200", {"dtype": torch.float16}),
    ],
)
def test_what_rounds_no_rows_has_no_such_graph(scheme: str | None, gpu: str, changes: dict[str, object]) -> None:
    graphs = model_of(scheme, gpu, **changes).program
    assert graphs.variant("quantized_logits") is None
    assert replayed(graphs, 4096) is graphs.logits
    if graphs.variant("decode_large_batch") is not None:
        assert not any("round" in name for name in operation_counts(graph_of(graphs, "decode_large_batch")))

"""Running one inference test on an engine: what it is started with, the timed call, and the floor to compare with."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.bench import workloads
from strata.hardware import roofline
from strata.hardware.figures import Device
from strata.hardware.links import Link, link_of
from strata.hardware.machine import cpu_name
from strata.hardware.roofline import Workload
from strata.hardware.specs import recognize
from strata.models.folder import folder_or_shape

if TYPE_CHECKING:
    from strata.cost.step_costs import StepCosts
    from strata.engine.llm import LLM

# Where memory is short. The engine's own advice names options that `strata bench` does not have.
_ADVICE = "take a smaller model, a --dtype of fewer bytes, or a machine with more memory"
# Output tokens of each request in the run before the timed ones, which compiles and fills what the first run needs.
WARMUP_TOKENS = 8


@dataclass(frozen=True)
class Setup:
    """The engine that a test runs on, as the command line asks for it."""

    model: str
    load_format: str | None = None
    dtype: str = "bfloat16"
    device: str = "auto"
    deterministic: bool = False
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    pipeline_parallel_size: int = 1
    quantization: str | None = None
    sparsity: str | None = None
    passes: str = "all"
    executor: str = "graph"
    message_dtype: str = "auto"
    kv_cache_dtype: str = "auto"

    @property
    def source(self) -> str:
        """Where the model comes from: a folder, or a shape by its name."""
        return folder_or_shape(self.model)

    @property
    def loads(self) -> str:
        """How its weights come: --load-format, as `strata serve` takes it."""
        from strata.models.shapes import SHAPES

        return self.load_format or ("dummy" if self.model in SHAPES else "auto")

    @property
    def checkpoint(self) -> Path | None:
        """The folder whose weights are read, which may be packed; None if they are made up."""
        return Path(self.source) if self.loads == "auto" else None

    def llm_options(self) -> dict[str, Any]:
        """The keyword arguments of LLM: no prefix cache, so that every repetition does all the work. Raises ValueError
        for a model that needs a GPU where none is."""
        from strata.bench.needs_gpu import require_gpu
        from strata.plan.meta_model import find_config

        config = find_config(self.source)
        require_gpu(self.model, config, self.device)
        length = min(workloads.MAX_MODEL_LEN, config.longest)
        always = {"enable_prefix_caching": False, "skip_tokenizer_init": True, "seed": 0}
        return asdict(self) | {"model": self.source, "load_format": self.loads, "max_model_len": length} | always

    def test_name(self, name: str) -> str:
        """Deterministic mode, each number of ranks, each way to pack weights, each choice of passes, each executor and
        messages in 8 bits are a test of its own, so that none passes for the newest result of another."""
        ranks = f"-tp{self.tensor_parallel_size}" if self.tensor_parallel_size > 1 else ""
        ranks += f"-pp{self.pipeline_parallel_size}" if self.pipeline_parallel_size > 1 else ""
        ranks += "-ep" if self.enable_expert_parallel else ""
        ranks += f"-messages:{self.message_dtype}" if self.message_dtype != "auto" else ""
        packed = self.quantization or self.sparsity
        ranks += f"-{packed}" if packed is not None else ""
        ranks += f"-kv:{self.kv_cache_dtype}" if self.kv_cache_dtype != "auto" else ""
        ranks += f"-passes:{self.passes}" if self.passes != "all" else ""
        ranks += f"-{self.executor}" if self.executor != "graph" else ""
        return f"{name}-deterministic{ranks}" if self.deterministic else f"{name}{ranks}"


def started(setup: Setup, test: workloads.InferenceTest) -> LLM:
    """An engine that has run a short form of the test once. Raises ValueError for a model that reads too little."""
    llm_options = setup.llm_options()
    if test.longest > llm_options["max_model_len"]:
        raise ValueError(
            f"{test.name} has sequences of up to {test.longest:,} tokens and {setup.model} reads "
            f"{llm_options['max_model_len']:,}: take another --model, or a test of shorter ones (T2, T3)"
        )
    llm = engine(llm_options)
    call(llm, test, WARMUP_TOKENS)
    return llm


def engine(llm_options: Mapping[str, Any]) -> LLM:
    """Raises ValueError for a model that does not fit in the memory, with what a user of `strata bench` can change."""
    from strata import LLM
    from strata.engine.ledger import PoolTooSmall

    try:
        return LLM(**llm_options)
    except PoolTooSmall as error:
        raise ValueError(error.with_advice(_ADVICE)) from None


def call(llm: LLM, test: workloads.InferenceTest, most: int | None = None) -> float:
    """Seconds of one `generate` with the requests of a test, each cut to `most` output tokens if that is given.

    Raises RuntimeError if a request did not yield as many tokens as it was asked for.
    """
    from strata import SamplingParams

    vocabulary = llm.engine.config.vocab_size
    prompts = [{"prompt_token_ids": [token % vocabulary for token in prompt]} for prompt in test.prompts]
    lengths = [output if most is None else min(output, most) for output in test.outputs]
    params = [SamplingParams(temperature=test.temperature, max_tokens=length, ignore_eos=True) for length in lengths]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    yielded = [len(output.outputs[0].token_ids) for output in outputs]
    if yielded != lengths:
        raise RuntimeError(f"{test.name} asked for {sum(lengths)} output tokens and got {sum(yielded)}")
    return seconds


def floor_on(test: workloads.InferenceTest, setup: Setup, product: str) -> float | None:
    """The least seconds of a test on a device, by the cost of the model's graph: over several ranks, of the first's;
    over stages of a pipeline as if all worked all the time, though one request alone takes as long as they together.

    None if the device is not in the database.
    """
    found = costs_on(setup, product)
    if found is None:
        return None
    return test.floor(found.costs.step, found.device, found.dtype, found.link) / setup.pipeline_parallel_size


@dataclass(frozen=True)
class CostsOn:
    """What a model's steps cost at least, and the device and dtype that they run in; of a rank of several, its share's,
    and the link to the others. Of stages of a pipeline all are counted, without what they send each other."""

    costs: StepCosts
    device: Device
    dtype: str
    link: Link | None = None

    def floor(self, workload: Workload, rows: int) -> float:
        """The least seconds of a step that projects `rows` hidden states onto the vocabulary."""
        return roofline.floor(self.costs.step(workload, rows), self.device, self.dtype, self.link).seconds


def costs_on(setup: Setup, product: str) -> CostsOn | None:
    """By the cost of the model's graph; None if the device is no GPU of the database."""
    from strata.cost.step_model import dtype_name
    from strata.models.config import DTYPES
    from strata.parallel.serving_shard import RankShard
    from strata.plan.meta_model import find_config, meta_model

    device = recognize(product)
    if device is None or device.cuda is None:
        return None
    config, ranks = find_config(setup.source), setup.tensor_parallel_size
    shard = link = None
    if ranks > 1:
        shard, link = RankShard.of(config, ranks, 0, expert_parallel=setup.enable_expert_parallel), link_of(device)
    dtype = DTYPES.get(setup.dtype)
    options = {name: getattr(setup, name) for name in ("deterministic", "quantization", "sparsity", "passes")}
    model = meta_model(config, device, dtype, shard, folder=setup.checkpoint, **options)
    return CostsOn(model.step_costs, device, dtype_name(model.dtype), link)


def device_name(llm: LLM) -> str:
    """The device that an engine runs on, as its driver or the system names it."""
    import torch

    device = llm.engine.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()

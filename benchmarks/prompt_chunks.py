"""Steps with a chunk of a prompt behind many keys, alone and beside decodes, on one GPU: time, floor and where it goes.

    python -m benchmarks.prompt_chunks --model 8B --save chunks.jsonl
    python -m benchmarks.prompt_chunks --model 8B --chunks 512,2048 --behind 0,16000 --decodes 0x0,4x16000

A step replays the CUDA graph that an engine replays, with its inputs. `seconds` is the median of its replays, `parts`
the kernels of one traced replay by what they do, `predicted` what `strata plan` and `simulate` say, `linear` what the
scheduler does, `floor` the hardware. Without a chunk (0) the step decodes alone. A chunk is so much shorter than asked
that step and decodes together have that many tokens, as the scheduler divides prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_lines import GpuLines, gpu_arguments
from strata.bench.measured_step import repeated
from strata.bench.run import Setup, device_name, engine
from strata.cost.step_model import StepModel
from strata.engine.llm import LLM
from strata.engine.plan import Chunk, Draw, NewSequence, StepPlan
from strata.engine.runner import Runner
from strata.hardware.roofline import Workload
from strata.hardware.specs import recognize
from strata.models import weights
from strata.plan.meta_model import meta_model

# Kernels by a part of their names, in this order.
PARTS = (
    ("prompts", ("sdpa", "fmha", "flash", "attention_kernel", "gather_prompt_keys")),
    ("decodes", ("decode_attention", "join_decodes")),
    ("products", ("nvjet", "gemm", "cutlass", "linear", "xmma", "gemv", "dot_kernel", "w8a8", "product")),
)


def plan_of(workload: Workload, page_size: int, ended: int) -> StepPlan:
    """All sequences are new and sample a row; those with one new token decode. ended: slots of the step before."""
    new, chunks, page = [], [], 0
    for slot, (count, total) in enumerate(zip(workload.new, workload.total, strict=True)):
        pages = tuple(range(page, page := page + -(-total // page_size)))
        known = total - (count == 1 < total)
        new.append(NewSequence(slot, slot, tuple(7 * place % 30_000 for place in range(known)), known, slot))
        chunks.append(Chunk(slot, slot, total - count, count, (Draw(slot, slot),), 0, pages))
    return StepPlan(tuple(range(ended)), tuple(new), tuple(chunks), (), workload.tokens)


def parts_of(run: Callable[[], object]) -> dict[str, float]:
    """Seconds of the kernels of a replay, by PARTS and the rest."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    found = dict.fromkeys([*(name for name, _ in PARTS), "rest"], 0.0)
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.lower()
            part = next((part for part, words in reversed(PARTS) if any(word in name for word in words)), "rest")
            found[part] += event.device_time * 1e-6
    return found


def cases(asked: argparse.Namespace) -> Iterator[Workload]:
    for decodes, keys in asked.decodes:
        for behind in asked.behind:
            for chunk in asked.chunks:
                if chunk > decodes:
                    yield Workload((1,) * decodes + (chunk - decodes,), (keys,) * decodes + (behind + chunk - decodes,))
    for decodes, keys in asked.alone:
        yield Workload((1,) * decodes, (keys,) * decodes)


def measured(llm: LLM, workload: Workload, ended: int, traced: bool) -> dict[str, Any]:
    runner = llm.engine.loop._runner
    assert isinstance(runner, Runner)
    steps = llm.engine.captured
    launched = runner.launch(plan_of(workload, llm.engine.ledger.page_size, ended))
    runner.settle()
    size = getattr(launched, "size", None)
    if steps is None or size is None:
        return {"seconds": None}

    def run() -> None:
        steps.run(size)

    seconds = repeated(run, llm.engine.device)
    shape = {"tokens": size.tokens, "sequences": size.sequences, "library": size.prompts is not None}
    return {"size": shape, "seconds": seconds, "parts": parts_of(run) if traced else None}


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",") if number]

    def pairs(text: str) -> list[tuple[int, int]]:
        return [(int(count), int(keys)) for count, keys in (one.split("x") for one in text.split(",") if one)]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8B")
    parser.add_argument("--chunks", type=numbers, default="256,512,1024,2048,4096,8192", help="tokens of steps")
    parser.add_argument("--behind", type=numbers, default="0,8192,16384,32768,65536", help="keys before the chunk")
    parser.add_argument("--decodes", type=pairs, default="0x0,4x16000,16x8192", help="that run beside: COUNTxKEYS")
    parser.add_argument("--alone", type=pairs, default="64x1536,256x768,384x768", help="decodes without a chunk")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--trace", action="store_true", help="parts, too")
    asked = gpu_arguments(parser)
    longest = max(max(asked.behind) + max(asked.chunks), max(keys for _, keys in [*asked.decodes, *asked.alone])) + 16
    setup = Setup(asked.model, None, "bfloat16", "auto", deterministic=False)
    options = setup.llm_options() | {"max_model_len": longest, "max_num_seqs": asked.max_num_seqs}
    llm = engine(options)
    device = recognize(device_name(llm))
    config, _ = weights.resolve(asked.model, "dummy")
    model = None if device is None else meta_model(config, device, torch.bfloat16, max_num_seqs=asked.max_num_seqs)
    told = None if device is None or model is None else StepModel(model, device)
    times = llm.engine.shares.times
    lines = GpuLines("benchmarks.prompt_chunks", asked.save, test="prompt_chunks", model=asked.model)
    ended = 0
    for workload in cases(asked):
        line: dict[str, Any] = {"new": workload.new[-1], "total": workload.total[-1]}
        beside = len(workload.new) - (workload.new[-1] > 1)
        line |= {"decodes": beside, "keys": workload.total[0] if beside else 0}
        line |= measured(llm, workload, ended, asked.trace)
        ended = len(workload.new)
        if told is not None:
            line |= {"predicted": told.seconds(workload), "floor": told.floor(workload).seconds}
        if times is not None:
            others = times.decodes(beside, beside * line["keys"])
            chunk = 0.0 if workload.new[-1] == 1 else times.chunk(line["total"] - line["new"], line["new"])
            line["linear"] = times.undivided(workload.tokens, others + chunk)
        lines.put(line)


if __name__ == "__main__":
    main()

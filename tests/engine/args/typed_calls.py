"""Calls as a type checker, and whatever completes them, sees them: mypy reads this file, and it is never run. A mistake
that mypy does not find leaves a comment without use, which is an error of its own."""

from __future__ import annotations

from pathlib import Path

from strata import LLM, SamplingParams


def calls() -> None:
    LLM()
    LLM("builtin", verbose=False)
    LLM(model=Path("folder"), max_model_len=4096, gpu_memory_utilization=0.8, deterministic=True)
    LLM("builtin", max_modle_len=4096)  # type: ignore[call-arg]
    LLM("builtin", max_model_len="4k")  # type: ignore[arg-type]
    LLM("builtin", "fp8")  # type: ignore[call-arg]
    SamplingParams(temperature="hot")  # type: ignore[arg-type]

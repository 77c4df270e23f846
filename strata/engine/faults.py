"""Faults, reported so that one knows what was being done, what is held, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strata.engine.ledger import Ledger
    from strata.engine.request import Sequence

# How PyTorch (torch.OutOfMemoryError and others), the CUDA runtime and cuBLAS say it.
_PHRASES = ("OutOfMemory", "out of memory", "can't allocate memory", "ALLOC_FAILED")


class EngineFault(RuntimeError):
    """The engine can do no more work; it answers every further request with the same message."""


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it hides, is a lack of memory."""
    cause: BaseException | None = error
    while cause is not None:
        text = f"{type(cause).__name__}: {cause}"
        if isinstance(cause, MemoryError) or any(phrase in text for phrase in _PHRASES):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def out_of_memory(error: BaseException, doing: str, ledger: Ledger) -> EngineFault | None:
    """The fault to raise for an error that is a lack of memory; None for others, and for one that is a fault."""
    if isinstance(error, EngineFault) or not is_lack_of_memory(error):
        return None
    return EngineFault(
        f"out of memory on {ledger.device} while {doing}: lower gpu_memory_utilization, max_num_seqs, "
        "max_num_batched_tokens or max_model_len, or end what else uses the device\n" + "\n".join(ledger.lines())
    )


@contextmanager
def memory_explained(doing: str | Callable[[], str], ledger: Ledger) -> Iterator[None]:
    """Raise EngineFault instead of any error that a lack of memory causes inside. doing: in words, made when needed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        fault = out_of_memory(error, doing if isinstance(doing, str) else doing(), ledger)
        if fault is None:
            raise
        raise fault from None


def why_no_id(sequence: Sequence) -> str:
    """Why the request of a sequence that could draw no id has failed, in one line."""
    if sequence.error is not None:
        return sequence.error
    return (
        f"sample {sequence.index} ended before its output token {len(sequence.outputs) + 1}: the logits hold NaN or "
        "infinity, or no token is allowed; look for NaN in the weights, for overflow (dtype float16: try "
        "bfloat16), and at logit_bias, bad_words and min_tokens"
    )

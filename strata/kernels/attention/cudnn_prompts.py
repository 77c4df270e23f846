"""Attention of a step's prompts by cuDNN, as query chunks: to keys gathered from pages, or of pure prefill steps.

Plans of cuDNN's attention for query chunks, made with its own front end (nvidia-cudnn-frontend).

One plan serves all lengths: what PyTorch offers of cuDNN takes a plan for each shape, which holds up the host.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strata.kernels.attention.prompt_keys import gather_prompt_keys
from strata.kernels.attention.query_chunks import MAX_QUERY_CHUNKS, MAX_TOKENS, QUERIES, QueryChunks
from strata.kernels.attention.spec import AttentionSpec
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.state.paged import PagedKV

# That this was measured with, on Hopper.
_MIN_CUDNN = 91002
_CAPABILITY = 9
HEAD_DIMS = (64, 128)
MIN_PAGE_SIZE = 16


def why_no_plan(limits: DeviceLimits, dtype: torch.dtype, head_dim: int, page_size: int) -> str | None:
    """Why cuDNN cannot attend over such pages on a device, in words; None if it should be able to."""
    if limits.capability[0] != _CAPABILITY:
        return f"{limits.product} is no Hopper"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes no {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"heads have {head_dim} elements, not {' or '.join(map(str, HEAD_DIMS))}"
    if page_size < MIN_PAGE_SIZE:
        return f"pages have {page_size} tokens, fewer than {MIN_PAGE_SIZE}"
    if not _is_installed():
        return "nvidia-cudnn-frontend is not installed"
    return None


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("cudnn") is not None
    except ValueError:  # another module stands in its place
        return False


def keeps_neighbours_apart(dtype: torch.dtype) -> bool:
    """Whether sequences of a step may have their values side by side, where a block of keys that begins in one ends in
    the next, whose values are multiplied by zero. One that is not finite would stay so. In float16 a prompt alone can
    bring that about; bfloat16 reaches as far as float32, and there the weights have to be broken."""
    return dtype == torch.bfloat16


class PlanShape(NamedTuple):
    """What a plan is made for. query_row, key_row, value_row: elements from what one token has to what the next has.
    longest: keys of a sequence at most."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    query_row: int
    key_row: int
    value_row: int
    longest: int
    scale: float


# The numbers by which tensors are known to a plan when it runs.
QUERY, KEY, VALUE, RESULT, QUERY_LENGTHS, KEY_LENGTHS = range(1, 7)
QUERY_STARTS, RESULT_STARTS, KEY_STARTS, VALUE_STARTS = range(7, 11)


class Plan:
    """Causal attention of up to MAX_QUERY_CHUNKS query chunks of up to QUERIES queries. Its runs take place one after
    the other, since they share what it works in, and can be captured in a CUDA graph."""

    def __init__(self, shape: PlanShape, device: torch.device) -> None:
        """Takes 40 ms, and a second for the first of a kind. Raises what cuDNN does if it cannot run this shape."""
        self._handle = _handle(device)
        self._graph = _graph(shape, self._handle)
        self._space = torch.zeros(max(1, self._graph.get_workspace_size()), dtype=torch.uint8, device=device)

    def run(self, tensors: dict[int, Tensor]) -> None:
        """On the current stream. tensors: by the numbers above."""
        import cudnn

        addresses = {number: tensor.data_ptr() for number, tensor in tensors.items()}
        cudnn.set_stream(self._handle, torch.cuda.current_stream().cuda_stream)
        self._graph.execute(addresses, self._space.data_ptr(), self._handle)


@cache
def plan_for(shape: PlanShape, device: torch.device) -> Plan:
    """The plan of a shape, always the same: CUDA graphs that it is part of may outlive whoever asked for it first."""
    return Plan(shape, device)


@cache
def _handle(device: torch.device) -> Any:
    import cudnn

    if cudnn.backend_version() < _MIN_CUDNN:
        raise RuntimeError(f"cuDNN {cudnn.backend_version()} is older than {_MIN_CUDNN}, with which this was measured")
    with torch.cuda.device(device):
        return cudnn.create_handle()


def _graph(shape: PlanShape, handle: Any) -> Any:
    import cudnn

    kinds = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}
    vectors, whole = kinds[shape.dtype], cudnn.data_type.INT32
    graph = cudnn.pygraph(
        io_data_type=vectors,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )

    def integers(number: int, count: int) -> Any:
        return graph.tensor(
            dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=whole, uid=number, name=f"integers {number}"
        )

    def starts(number: int) -> Any:
        return integers(number, MAX_QUERY_CHUNKS + 1)

    def rows(number: int, first: int, heads: int, most: int, row: int) -> Any:
        """Of each query chunk so many rows at most, from where it starts."""
        return graph.tensor(
            dim=[MAX_QUERY_CHUNKS, heads, most, width],
            stride=[most * row, width, row, 1],
            data_type=vectors,
            uid=number,
            name=f"rows {number}",
            ragged_offset=starts(first),
        )

    heads, width, longest = shape.heads, shape.head_dim, shape.longest
    result, _ = graph.sdpa(
        q=rows(QUERY, QUERY_STARTS, heads, QUERIES, shape.query_row),
        k=rows(KEY, KEY_STARTS, shape.kv_heads, longest, shape.key_row),
        v=rows(VALUE, VALUE_STARTS, shape.kv_heads, longest, shape.value_row),
        use_padding_mask=True,
        seq_len_q=integers(QUERY_LENGTHS, MAX_QUERY_CHUNKS),
        seq_len_kv=integers(KEY_LENGTHS, MAX_QUERY_CHUNKS),
        diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT,
        diagonal_band_right_bound=0,
        attn_scale=shape.scale,
        generate_stats=False,
        name="attention",
    )
    result.set_output(True).set_uid(RESULT).set_data_type(vectors)
    result.set_dim([MAX_QUERY_CHUNKS, heads, QUERIES, width]).set_stride(
        [QUERIES * heads * width, width, heads * width, 1]
    )
    result.set_ragged_offset(starts(RESULT_STARTS))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph


def takes(pages: PagedKV, spec: AttentionSpec, sinks: Tensor | None) -> bool:
    """Whether it attends for a layer's prompts in a step that has query chunks: it knows no windows or sinks."""
    return spec.window is None and sinks is None and pages.tables.is_contiguous()


def has_planned_strides(q: Tensor, k: Tensor, v: Tensor, chunks: QueryChunks) -> bool:
    """Whether the vectors of one token lie as far from those of the next as where the starts are computed for."""
    rows = chunks.rows
    return q.stride(0) == rows.queries and (
        not rows.pure_prefill or (k.stride(0), v.stride(0)) == (rows.keys, rows.values)
    )


def attend(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, pages: PagedKV, chunks: QueryChunks, spec: AttentionSpec
) -> None:
    """Into the rows of `out` [tokens, heads, head_dim] that belong to a query chunk; the others stay as they are.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], which are read in pure prefill steps alone, where
    values behind the last token of a sequence, in the rest of a block of keys, have to be finite; they lie as divided.
    """
    rows = chunks.rows
    longest = MAX_TOKENS if rows.pure_prefill else pages.tables.shape[-1] * pages.page_size
    if not rows.pure_prefill:
        k, v = gather_prompt_keys(pages, spec.layer, chunks, longest)
    if q.device.type == "meta":  # where only kernels that Triton compiles are of interest
        return
    tensors = {
        QUERY: q,
        KEY: k,
        VALUE: v,
        RESULT: out,
        QUERY_STARTS: chunks.starts[0],
        RESULT_STARTS: chunks.starts[1],
        KEY_STARTS: chunks.starts[2],
        VALUE_STARTS: chunks.starts[3],
        QUERY_LENGTHS: chunks.lengths[0],
        KEY_LENGTHS: chunks.lengths[1],
    }
    heads, head_dim = q.shape[1:]
    shape = PlanShape(q.dtype, heads, k.shape[1], head_dim, rows.queries, rows.keys, rows.values, longest, spec.scale)
    plan_for(shape, q.device).run(tensors)

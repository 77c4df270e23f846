"""Plans of cuDNN's attention for virtual sequences, made with its own front end (nvidia-cudnn-frontend).

One plan serves all lengths: what PyTorch offers of cuDNN takes a plan for each shape, which holds up the host.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strata.kernels.attention.virtual_sequences import MAX_TOKENS, QUERIES, VIRTUAL
from strata.kernels.device_limits import DeviceLimits

# Block tables packed one behind the other, on Hopper as in what was measured.
_LEAST_CUDNN = 91002
_CAPABILITY = 9
HEAD_DIMS = (64, 128)
LEAST_PAGE_SIZE = 16


def why_no_plan(limits: DeviceLimits, dtype: torch.dtype, head_dim: int, page_size: int) -> str | None:
    """Why cuDNN cannot attend over such pages on a device, in words; None if it should be able to."""
    if limits.capability[0] != _CAPABILITY:
        return f"{limits.product} is no Hopper"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes no {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"heads have {head_dim} elements, not {' or '.join(map(str, HEAD_DIMS))}"
    if page_size < LEAST_PAGE_SIZE:
        return f"pages have {page_size} tokens, fewer than {LEAST_PAGE_SIZE}"
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


class Pages(NamedTuple):
    """Keys and values in pages of page_size tokens: how many a pool has, and a sequence at most."""

    of_pool: int
    page_size: int
    of_sequence: int


class Packed(NamedTuple):
    """Keys and values of the step's own tokens: elements from those of one token to those of the next."""

    key_row: int
    value_row: int


class PlanShape(NamedTuple):
    """What a plan is made for. query_row: elements from the queries of one token to those of the next; source: of keys
    and values."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    query_row: int
    scale: float
    source: Pages | Packed


# The numbers by which tensors are known to a plan when it runs.
QUERY, KEY, VALUE, RESULT, QUERY_LENGTHS, KEY_LENGTHS, QUERY_STARTS, RESULT_STARTS = range(1, 9)
KEY_TABLE, VALUE_TABLE, KEY_STARTS, VALUE_STARTS = range(9, 13)


class Plan:
    """Causal attention of up to VIRTUAL virtual sequences of up to QUERIES queries. Its runs take place one after the
    other, since they share what it works in, and can be recorded in a CUDA graph."""

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
    """The plan of a shape, always the same: recordings that it is part of may outlive whoever asked for it first."""
    return Plan(shape, device)


@cache
def _handle(device: torch.device) -> Any:
    import cudnn

    if cudnn.backend_version() < _LEAST_CUDNN:
        raise RuntimeError(f"cuDNN {cudnn.backend_version()} knows no packed block tables; {_LEAST_CUDNN} does")
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
        return integers(number, VIRTUAL + 1)

    heads, width, row = shape.heads, shape.head_dim, shape.query_row
    queries = graph.tensor(
        dim=[VIRTUAL, heads, QUERIES, width],
        stride=[QUERIES * row, width, row, 1],
        data_type=vectors,
        uid=QUERY,
        name="queries",
        ragged_offset=starts(QUERY_STARTS),
    )
    if isinstance(shape.source, Pages):
        given = _paged(graph, shape, shape.source, vectors, starts)
    else:
        given = _packed(graph, shape, shape.source, vectors, starts)
    result, _ = graph.sdpa(
        q=queries,
        **given,
        use_padding_mask=True,
        seq_len_q=integers(QUERY_LENGTHS, VIRTUAL),
        seq_len_kv=integers(KEY_LENGTHS, VIRTUAL),
        diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT,
        diagonal_band_right_bound=0,
        attn_scale=shape.scale,
        generate_stats=False,
        name="attention",
    )
    result.set_output(True).set_uid(RESULT).set_data_type(vectors)
    result.set_dim([VIRTUAL, heads, QUERIES, width]).set_stride([QUERIES * heads * width, width, heads * width, 1])
    result.set_ragged_offset(starts(RESULT_STARTS))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph


def _packed(graph: Any, shape: PlanShape, rows: Packed, vectors: Any, starts: Callable[[int], Any]) -> dict[str, Any]:
    """Keys and values of the step's tokens as arguments of attention."""
    heads, width = shape.kv_heads, shape.head_dim
    keys, values = (
        graph.tensor(
            dim=[VIRTUAL, heads, MAX_TOKENS, width],
            stride=[MAX_TOKENS * row, width, row, 1],
            data_type=vectors,
            uid=number,
            name=f"packed {number}",
            ragged_offset=starts(first),
        )
        for number, row, first in ((KEY, rows.key_row, KEY_STARTS), (VALUE, rows.value_row, VALUE_STARTS))
    )
    return {"k": keys, "v": values}


def _paged(graph: Any, shape: PlanShape, pages: Pages, vectors: Any, starts: Callable[[int], Any]) -> dict[str, Any]:
    """Pools and block tables as arguments of attention."""
    import cudnn

    heads, width = shape.kv_heads, shape.head_dim
    token = heads * width
    keys, values = (
        graph.tensor(
            dim=[pages.of_pool, heads, pages.page_size, width],
            stride=[pages.page_size * token, width, token, 1],
            data_type=vectors,
            uid=number,
            name=f"pool {number}",
        )
        for number in (KEY, VALUE)
    )
    key_table, value_table = (
        graph.tensor(
            dim=[VIRTUAL, 1, pages.of_sequence, 1],
            stride=[pages.of_sequence, pages.of_sequence, 1, 1],
            data_type=cudnn.data_type.INT32,
            uid=number,
            name=f"tables {number}",
            ragged_offset=starts(first),
        )
        for number, first in ((KEY_TABLE, KEY_STARTS), (VALUE_TABLE, VALUE_STARTS))
    )
    return {
        "k": keys,
        "v": values,
        "paged_attention_k_table": key_table,
        "paged_attention_v_table": value_table,
        "paged_attention_max_seq_len_kv": pages.of_sequence * pages.page_size,
    }

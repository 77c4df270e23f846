"""Attention with sinks: each query against a softmax in float64 that has one more score, on every path."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention import cudnn_prompts
from strata.kernels.attention import train as attention_train
from strata.kernels.attention.attention import attention
from strata.kernels.attention.decode import decode_attention
from strata.kernels.attention.spec import AttentionCall, AttentionSpec
from tests.kernels.attention.test_attention import Case
from tests.kernels.attention.test_decode_attention import copied, step

LENGTHS, NEW = [40, 1, 17, 33, 80], [1, 1, 17, 20, 80]
SINKS = torch.tensor([0.5, -40.0, 3.0, 60.0, -1.0, 0.0])


def by_query(case: Case, sequence: int, position: int, scale: float, window: int | None, sinks: Tensor) -> Tensor:
    first = 0 if window is None else max(0, position + 1 - window)
    q, k, v = (x[sequence].double() for x in (case.q, case.k, case.v))
    rows = []
    for head in range(q.shape[1]):
        of = head // (q.shape[1] // k.shape[1])
        exponentials = (k[first : position + 1, of] @ q[position, head] * scale).exp()
        total = exponentials.sum() + sinks[head].double().exp()
        rows.append((exponentials / total) @ v[first : position + 1, of])
    return torch.stack(rows)


def wanted(case: Case, new: list[int], window: int | None) -> Tensor:
    places = [(s, p) for s, (total, n) in enumerate(zip(LENGTHS, new, strict=True)) for p in range(total - n, total)]
    return torch.stack([by_query(case, s, p, 0.3, window, SINKS) for s, p in places])


@pytest.mark.parametrize("window", [None, 1, 9])
def test_every_query_of_every_path(window: int | None) -> None:
    case = Case.random(LENGTHS, heads=6, kv_heads=2, head_dim=20)
    implementations = (i for i in attention.implementations if i.device == "cpu")
    run = {i.name: attention.of_arguments(i.run) for i in implementations} | {"reference": attention.reference}
    spec = AttentionSpec(0, 0.3, window)
    for arguments, new, names in (
        (case.batch(NEW), NEW, ("reference", "tiled", "fixed tiles")),
        (case.packed(), LENGTHS, ("reference", "packed", "fixed tiles")),
    ):
        expected = wanted(case, new, window)
        for name in names:
            out = run[name](*arguments, spec, SINKS)
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6, msg=name)
        masked = attention_train._masked(*case.packed()[:3], case.packed()[3].offsets, 0.3, window, SINKS)
    torch.testing.assert_close(masked.double(), expected, rtol=0, atol=2e-6)


def test_groups_of_decodes_in_bf16() -> None:
    case = Case.random([20, 900, 30, 700, 45, 33], heads=8, kv_heads=2, head_dim=32, dtype=torch.bfloat16)
    sinks = torch.randn(8).bfloat16()
    arguments = *case.batch([1] * 6), AttentionSpec(0, 32**-0.5), sinks
    torch.testing.assert_close(attention(*arguments), attention.reference(*arguments), rtol=0, atol=0.02)


def test_deterministic_bits_do_not_depend_on_chunks_or_company() -> None:
    case, run = Case.random([300, 45], 6, 2, 16), attention.bind("cpu", deterministic=True)
    spec = AttentionSpec(0, 0.25, 70)
    whole = run(*case.packed(), spec, SINKS)[:300]
    done = 0
    for size in (128, 1, 127, 40, 4):
        done += size
        chunk = run(*case.batch([size, 1], [done, min(45, done)], seed=done), spec, SINKS)
        assert torch.equal(chunk[:size], whole[done - size : done])


def test_gradients_reach_the_sinks() -> None:
    case = Case.random([9, 1, 14], heads=6, kv_heads=2, head_dim=8)
    q, k, v, batch = case.packed()
    for window in (None, 5):
        spec, grads = AttentionSpec(0, 0.35, window), []
        for run in (attention.reference, attention.bind("cpu", differentiable=True)):
            leaves = [x.clone().requires_grad_() for x in (q, k, v, SINKS.clamp(-4, 4))]
            out = run(*leaves[:3], batch, spec, leaves[3])
            grads.append(torch.autograd.grad(out.square().sum(), leaves))
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    doubles = [x[:9].double().requires_grad_() for x in (q, k, v)] + [SINKS.clamp(-4, 4).double().requires_grad_()]
    alone = batch._replace(offsets=torch.tensor([0, 9], dtype=torch.int32), longest=9)
    assert torch.autograd.gradcheck(lambda *x: attention(*x[:3], alone, AttentionSpec(0, 0.35), x[3]), doubles)


def test_decoding_from_the_product() -> None:
    given, pages = step([1, 9, 4, 5], 6, 2, 16, True, torch.float32)
    product, *others, batch, heads = given
    spec = AttentionSpec(1, 0.3, 3)
    expected = decode_attention.reference(product, *others, batch._replace(pages=copied(pages)), heads, spec, SINKS)
    torch.testing.assert_close(decode_attention(*given, spec, SINKS), expected, rtol=1e-5, atol=1e-6)
    without = decode_attention(*given, spec)
    assert not torch.allclose(without[:, 3], expected[:, 3]), "a sink of 60 takes nearly all of a head"


def test_cost_is_that_without_sinks_and_a_number_a_head() -> None:
    case = Case.random([40, 17], heads=6, kv_heads=2, head_dim=20)
    given, workload = (*case.batch([1, 17]), AttentionSpec(0, 0.3, 9)), Workload((1, 17), (40, 17))
    own = attention.cost(*given, SINKS, workload=workload) - attention.cost(*given, workload=workload)
    assert own == Cost(read=6 * 4, weights=6 * 4)
    of_decodes, _ = step([1, 9], 6, 2, 16, True, torch.float32)
    of_decodes, two = (*of_decodes, AttentionSpec(1, 0.3)), Workload((1, 1), (1, 9))
    own = decode_attention.cost(*of_decodes, SINKS, workload=two) - decode_attention.cost(*of_decodes, workload=two)
    assert own == Cost(read=6 * 4, weights=6 * 4)


def test_libraries_that_know_no_sinks_leave_them_to_others() -> None:
    q, k, v, batch = Case.random([512, 512], heads=6, kv_heads=2, head_dim=16, dtype=torch.bfloat16).packed()
    spec = AttentionSpec(0, 0.3)
    assert attention_train.dense_supports(AttentionCall(q, k, v, batch, spec))
    assert not attention_train.dense_supports(AttentionCall(q, k, v, batch, spec, SINKS))
    assert not attention_train.supports(AttentionCall(q, k, v, batch, spec, SINKS))
    _, pages = step([1, 9], 6, 2, 16, False, torch.bfloat16)
    assert cudnn_prompts.takes(pages, spec, None)
    assert not cudnn_prompts.takes(pages, spec, SINKS)


def test_triton_kernels_equal_the_reference_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.kernels.attention.interpreted"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "equal\n"

"""A checkpoint folder becomes one with zeros, layer by layer; it stays an ordinary one, of floats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from strata.kernels.quant.two_of_four import FOUR, smallest_two_of_four
from strata.models.batch import Batch
from strata.models.checkpoint import shorten
from strata.models.pruned.settings import MAGNITUDE, SPARSEGPT, TWO_OF_FOUR, WANDA, Pruning
from strata.models.quantized.calibrate.gptq import inverse_factor, without_dead_columns
from strata.models.quantized.calibrate.inputs import LayerInputs
from strata.models.quantized.calibrate.matrices import Matrix, layer_views, products
from strata.models.quantized.calibrate.rewrite import layer_tensors, open_floats, rewrite, stored_dtype
from strata.models.quantized.calibrate.stream import LayerStream

# Columns among which weights are chosen at a time, without 2:4; and whose errors reach the others together.
_BLOCK = 128


def prune(
    folder: Path,
    out: Path,
    pruning: Pruning,
    sequences: Sequence[Sequence[int]],
    device: torch.device,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> list[str]:
    """Write the model of `folder` to `out` with weights of its products set to 0; returns notes for users.

    Head, embedding, norms, routers and gates of one output stay as they are. sequences: token ids of calibration text.
    Memory, interruptions and `report` are those of `rewrite`; of SparseGPT there is a matrix [width, width] for each
    kind of input of a layer. Raises ValueError, before weights are read, for a packed model, a width that four do not
    divide, `out` that exists, or a method without its text.
    """
    refusal = "(quantization_config); prune the model in floats, then quantize it"
    stream, values = open_floats(folder, device, pruning.method, pruning.needs_text, sequences, refusal)
    _check(stream, pruning)

    def change(number: int, batches: Sequence[Batch], hidden: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        notes = prune_layer(stream, number, pruning, batches, hidden)
        return layer_tensors(stream, number), notes

    return rewrite(stream, out, asdict(pruning), sequences, change, values, report)


@torch.no_grad()
def prune_layer(
    stream: LayerStream, number: int, pruning: Pruning, batches: Sequence[Batch], hidden: Sequence[Tensor]
) -> list[str]:
    """Prune an opened layer in place, to values of the dtype that it is stored in; returns notes for users."""
    inputs = LayerInputs(stream, number, gram=pruning.method == SPARSEGPT, without="pruned by magnitude")
    if pruning.needs_text:
        inputs.observe(batches, hidden)
    views = {name: view for name, _, view in layer_views(stream.model, number)}
    found = products(stream.model, number)
    pruned = {one.name: _pruned(views[one.name], one, pruning, inputs) for one in found}
    for name, weight in pruned.items():  # after all, since inputs of experts' second products follow from the first
        views[name].copy_(weight.to(stored_dtype(stream, name)))
    return inputs.notes


def _pruned(weight: Tensor, matrix: Matrix, pruning: Pruning, inputs: LayerInputs) -> Tensor:
    moments = inputs.moments(matrix) if pruning.needs_text else None
    if pruning.method == MAGNITUDE or moments is None or moments.rows == 0:
        return by_magnitude(weight, pruning)
    if pruning.method == WANDA:
        return wanda(weight, pruning, moments.mean_squares)
    assert moments.gram is not None
    return sparsegpt(weight, pruning, moments.gram, moments.rows)


def _check(stream: LayerStream, pruning: Pruning) -> None:
    found = [matrix for number in range(stream.layers) for matrix in products(stream.model, number)]
    if not found:
        raise ValueError(f"{stream.folder} has no product whose weights can be pruned")
    uneven = [matrix for matrix in found if pruning.pattern == TWO_OF_FOUR and matrix.shape[1] % FOUR]
    if uneven:
        widths = ", ".join(sorted({str(matrix.shape[1]) for matrix in uneven}))
        raise ValueError(
            f"2:4 takes four columns together, which do not divide {widths}, the widths of "
            f"{shorten([matrix.name for matrix in uneven])}; prune unstructured"
        )


def sparsegpt(weight: Tensor, pruning: Pruning, gram: Tensor, rows: int) -> Tensor:
    """A float32 weight [out, width] with zeros, and others changed so that its products change least: SparseGPT
    (Frantar and Alistarh 2023, arXiv 2301.00774).

    gram: [width, width] float32, the sum of x x^T over `rows` rows x that the weight is multiplied by; H is 2 / rows of
    it. Taken out are the weights of least `w^2 / [H^-1]_jj` (Optimal Brain Surgeon, Hassibi and Stork 1992, of what is
    left of H at column j), of each block of 128 columns, or two of each four. Columns that are multiplied by 0 alone
    become 0, as in the authors' code. Raises ValueError where H cannot be inverted though it is damped.
    """
    work, hessian = without_dead_columns(weight, gram, rows)
    factor = inverse_factor(hessian)
    width = work.shape[1]
    for first in range(0, width, _BLOCK):
        end = min(first + _BLOCK, width)
        errors = _prune_block(work[:, first:end], pruning, factor[first:end, first:end])
        work[:, end:] -= errors @ factor[first:end, end:]
    return work


def _prune_block(block: Tensor, pruning: Pruning, factor: Tensor) -> Tensor:
    """Prune columns in place; returns what each loses, in units of the factor's diagonal, [out, columns]."""
    errors, diagonal = torch.zeros_like(block), factor.diagonal()
    in_fours = pruning.pattern == TWO_OF_FOUR
    if in_fours:
        gone = torch.zeros_like(block, dtype=torch.bool)
    else:
        gone = lowest((block / diagonal).square().flatten(), pruning).view(block.shape)
    for column in range(block.shape[1]):
        if in_fours and column % FOUR == 0:
            four = slice(column, column + FOUR)
            gone[:, four] = smallest_two_of_four((block[:, four] / diagonal[four]).square())
        lost = block[:, column].masked_fill(~gone[:, column], 0.0)
        block[:, column] -= lost
        errors[:, column] = lost / diagonal[column]
        block[:, column + 1 :] -= torch.outer(errors[:, column], factor[column, column + 1 :])
    return errors


def by_magnitude(weight: Tensor, pruning: Pruning) -> Tensor:
    """The weight [out, width] without its smallest, of the whole matrix (or of each four columns of a row)."""
    gone = lowest(weight.abs().flatten(), pruning)
    return weight.masked_fill(gone.view(weight.shape), 0.0)


def wanda(weight: Tensor, pruning: Pruning, mean_squares: Tensor) -> Tensor:
    """The weight without those of least `|W| * |x|` in each row (Sun et al. 2023, arXiv 2306.11695, equation 1).

    mean_squares: [width], of what each column is multiplied by; the root of their sum is the paper's norm, but for a
    factor of all columns alike.
    """
    scores = weight.abs() * mean_squares.to(weight).sqrt()
    return weight.masked_fill(lowest(scores, pruning), 0.0)


def lowest(scores: Tensor, pruning: Pruning) -> Tensor:
    """True at the share of the least of each row [..., width], or of each four columns; of equal ones at the first."""
    if pruning.pattern == TWO_OF_FOUR:
        return smallest_two_of_four(scores)
    order = scores.argsort(dim=-1, stable=True)[..., : round(pruning.share * scores.shape[-1])]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)

"""Launches of Triton kernels that have run before, without what Triton works out anew at every launch.

`kernel[grid](...)` of Triton 3.6 binds the arguments by name, asks each for its specialization, writes all options into
a string to look the binary up, builds metadata for hooks, and has the driver tell what each address is: 6 us without
arguments, 13 with 19 of them on a quick host (meta-pytorch/tritonbench#669), ten times a layer. A held kernel keeps the
binary under what can change it, and hands addresses to the launcher as integers, which asks nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.kernels.compiling.cache_key import OrderlessKernel

try:
    import triton
    from triton import knobs
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import CompiledKernel

    # The launcher's own arguments, which come before the kernel's, are those of this version.
    HOLDS = triton.__version__.startswith("3.6.")
except ImportError:
    HOLDS = False

# What torch.cuda's functions of these names call. Builds without CUDA lack them, and launch nothing.
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_INT32 = range(-(2**31), 2**31)


def specialization(arguments: tuple[Any, ...]) -> tuple[list[Any], list[Any]] | None:
    """What of a kernel's arguments Triton may compile it for, and the values that its launcher takes for them.

    Arguments with equal specializations run the same binary: of tensors the dtype, whether the address is a multiple of
    16; of integers whether they are 1 or multiples of 16; of floats and None that they are. None if there are others
    (descriptors, integers over 32 bits, tensors in the host's memory): what becomes of these is for Triton.
    """
    found: list[Any] = []
    values: list[Any] = []
    for argument in arguments:
        kind = type(argument)
        if kind in _TENSORS:
            if not argument.is_cuda:
                return None
            address = argument.data_ptr()
            found.append(argument.dtype)
            found.append(address & 15 == 0)
            values.append(address)
        elif kind is int and argument in _INT32:
            found.append(1 if argument == 1 else 16 if argument & 15 == 0 else 0)
            values.append(argument)
        elif kind is float or argument is None:
            found.append(kind)
            values.append(argument)
        else:
            return None
    return found, values


@dataclass(frozen=True)
class _Binary:
    """A compiled kernel as its launcher takes it. constants: as many as the kernel has at its end."""

    kernel: Any
    launch: Any
    function: int
    metadata: Any
    cooperative: bool
    dependent: bool
    constants: tuple[None, ...]


class CachedKernel(OrderlessKernel):
    """A kernel of Triton's whose variants are launched by themselves from the second time on.

    Only where all that varies at run time comes by position, all constants and options by name, which are the same if
    they are equal. Triton's hooks around launches are called as ever; global values of a kernel are not compared again.
    """

    def __init__(self, function: Any, unspecialized: tuple[str, ...] = ()) -> None:
        super().__init__(function, do_not_specialize=unspecialized)
        self._binaries: dict[tuple[Any, ...], _Binary] = {}
        self._at_entry, self._at_exit = knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls

    def __getitem__(self, grid: Any) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: Any, *arguments: Any, **constants: Any) -> Any:
        given = specialization(arguments)
        if given is None or self._at_entry or self._at_exit or not isinstance(grid, tuple):
            return self.run(*arguments, grid=grid, warmup=False, **constants)
        found, values = given
        device = current_device()
        key = (device, *constants, *constants.values(), *found)
        binary = self._binaries.get(key)
        if binary is None:
            kernel = self.run(*arguments, grid=grid, warmup=False, **constants)
            self._hold(key, kernel, len(arguments), constants)
            return kernel
        columns, rows = (*grid[1:], 1, 1)[:2]
        binary.launch(
            grid[0],
            columns,
            rows,
            current_stream(device),
            binary.function,
            binary.cooperative,
            binary.dependent,
            None,
            None,
            binary.metadata,
            None,
            None,
            None,
            *values,
            *binary.constants,
        )
        return binary.kernel

    def _hold(self, key: tuple[Any, ...], kernel: Any, arguments: int, constants: dict[str, Any]) -> None:
        """Keep what has just run, if it can be launched by its arguments alone."""
        if not (isinstance(kernel, CompiledKernel) and type(kernel.run) is CudaLauncher):
            return
        launcher, at_run_time, at_end = kernel.run, self.params[:arguments], self.params[arguments:]
        by_position = not any(one.is_constexpr or one.name in constants for one in at_run_time)
        has_scratch = launcher.global_scratch_size or launcher.profile_scratch_size
        if by_position and all(one.is_constexpr for one in at_end) and not has_scratch:
            self._binaries[key] = _Binary(
                kernel,
                launcher.launch,
                kernel.function,
                kernel.packed_metadata,
                launcher.launch_cooperative_grid,
                launcher.launch_pdl,
                (None,) * len(at_end),
            )

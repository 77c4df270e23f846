"""Updates alone on one GPU: AdamW and Muon over the layers of the 8B shape, with state on the device and in the host.

Prints milliseconds, bytes a second against what has to move, and for Muon the rate of its products:

    python benchmarks/optimizer_step.py --layers 4
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch import nn

from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.parallel.data_parallel import ParameterShard
from strata.parallel.families import Placement
from strata.parallel.tensor import TensorSharding
from strata.train.optimizer.config import OptimizerConfig
from strata.train.optimizer.make import make_optimizer
from strata.train.optimizer.orthogonalize import orthogonalization_flops

LAYER = {
    "self_attn.q_proj.weight": (4096, 4096),
    "self_attn.k_proj.weight": (1024, 4096),
    "self_attn.v_proj.weight": (1024, 4096),
    "self_attn.o_proj.weight": (4096, 4096),
    "mlp.gate_proj.weight": (14336, 4096),
    "mlp.up_proj.weight": (14336, 4096),
    "mlp.down_proj.weight": (4096, 14336),
    "input_layernorm.weight": (4096,),
    "post_attention_layernorm.weight": (4096,),
}
REPEATS = 10
# Of AdamW for a parameter: masters and moments read and written, the gradient read, the weight written.
BYTES = 30


def make_parts(shapes: dict[str, tuple[int, ...]]) -> list[ParameterShard]:
    """Of one rank, one after another; masters and gradients in float32, weights in bfloat16."""
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    masters = torch.randn(sum(sizes), device="cuda")
    weights, gradients = masters.bfloat16(), torch.randn_like(masters)
    rows = zip(shapes.items(), weights.split(sizes), masters.split(sizes), gradients.split(sizes), strict=True)
    shards = []
    for (name, shape), weight, master, gradient in rows:
        shards.append(ParameterShard(name, torch.Size(shape), 0, weight, nn.Parameter(master)))
        shards[-1].master.grad = gradient
    return shards


def milliseconds(shapes: dict[str, tuple[int, ...]], name: str, offload: bool) -> float:
    """The median of some updates."""
    mesh = Mesh.of(World(0, 0, 1, torch.device("cuda", 0), None), {})
    sharding = TensorSharding(mesh.axis("tp"), False, dict.fromkeys(shapes, Placement.PER_TOKEN), shapes)
    optimizer = make_optimizer(make_parts(shapes), OptimizerConfig(1e-4, name=name, offload=offload), mesh, sharding)
    scale, times = torch.ones((), device="cuda"), []
    for repeat in range(REPEATS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        optimizer.begin(1e-4)
        start.record()
        optimizer.update(scale)
        end.record()
        torch.cuda.synchronize()
        if repeat >= 2:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    """All four."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    layers = parser.parse_args().layers
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/optimizer_step.py times updates on a CUDA GPU: none here")
    shapes = {f"model.layers.{layer}.{name}": shape for layer in range(layers) for name, shape in LAYER.items()}
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    flops = sum(orthogonalization_flops(*shape) for shape in shapes.values() if len(shape) == 2)
    print(f"{count / 1e6:.0f} million parameters")
    # Each way: masters with both moments, or with the momentum.
    for name, host_bytes in (("adamw", 12), ("muon", 8)):
        for offload in (False, True):
            took = milliseconds(shapes, name, offload)
            line = f"{name}{' offload' if offload else ''}: {took:.2f} ms"
            if name == "adamw":
                line += f", {BYTES * count / took / 1e9:.2f} TB/s on the device"
            else:
                line += f", {flops / took / 1e9:.0f} TFLOP/s with everything around the products"
            if offload:
                line += f", {host_bytes * count / took / 1e6:.1f} GB/s each way between host and device"
            print(line, flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

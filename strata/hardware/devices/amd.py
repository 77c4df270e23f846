"""AMD's accelerators. Matrix cores without sparsity, which doubles all but the formats with shared exponents."""

from __future__ import annotations

from strata.hardware.figures import Device, Source, promised

_MI300X = Source(
    "AMD Instinct MI300X data sheet",
    "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf",
    "2023-12",
)
_MI355X = Source(
    "AMD Instinct MI355X, AMD's product page; power: Tom's Hardware from ISC 2025",
    "https://www.amd.com/en/products/accelerators/instinct/mi350/mi355x.html",
    "2025-06",
)
_ROCM = Source(
    "AMD GPU specifications, ROCm documentation",
    "https://rocm.docs.amd.com/en/7.13.0-preview/reference/gpu-specs.html",
    "2026-11",
)
_XGMI = Source(
    "Wheeler's Network on the MI300 launch: seven Infinity Fabric links of 128 GB/s in both directions",
    "https://www.wheelersnetwork.com/2024/01/",
    "2024-01",
)
_MI355X_LINKS = Source(
    "AMD Instinct MI355X: seven Infinity Fabric links of 153.6 GB/s in both directions",
    "https://humeconsulting.co/amd-mi355x-strong-node-level-inference-but-not-yet-rack-scale",
    "2025-06",
)

_SPARSE = ("tf32", "float16", "bfloat16", "float8", "int8")

AMD = (
    Device(
        "mi300x",
        "AMD Instinct MI300X",
        promised(
            _MI300X,
            memory=192,
            bandwidth=5.3,
            host=128,
            power=750,
            dense={
                "float32": 163.4,
                "tf32": 653.7,
                "float16": 1307.4,
                "bfloat16": 1307.4,
                "float8": 2614.9,
                "int8": 2614.9,
            },
            sparse=_SPARSE,
        )
        + promised(_ROCM, l2=32, l3=256)
        + promised(_XGMI, link=7 * 128),
    ),
    Device(
        "mi355x",
        "AMD Instinct MI355X",
        promised(
            _MI355X,
            memory=288,
            bandwidth=8.0,
            host=128,
            power=1400,
            dense={
                "float32": 157.3,
                "float16": 2516.6,
                "bfloat16": 2516.6,
                "float8": 5033.2,
                "int8": 5033.2,
                "float4": 10066.3,
            },
            sparse=_SPARSE,
        )
        + promised(_ROCM, l2=32, l3=256)
        + promised(_MI355X_LINKS, link=7 * 153.6),
    ),
)

"""NVIDIA's GPUs. Tensor cores without sparsity, which doubles them; float32 on cores that sparsity does not serve."""

from __future__ import annotations

from strata.hardware.figures import GIGA, TERA, Cuda, Device, Figure, Source, promised

_SCALING_BOOK = Source("How to Scale Your Model, GPUs", "https://jax-ml.github.io/scaling-book/gpus/", "2025-08")
_A100 = Source(
    "NVIDIA A100 Tensor Core GPU datasheet (SXM4 80 GB)", "https://www.nvidia.com/en-us/data-center/a100/", "2021-06"
)
_H100 = Source("NVIDIA H100 Tensor Core GPU datasheet", "https://www.nvidia.com/en-us/data-center/h100/", "2023-09")
_H100_PCIE = Source(
    "NVIDIA H100 PCIe GPU product brief, PB-11133-001; rates: hmc-tech.com, which derives them from units and clocks",
    "https://hmc-tech.com/gpu/nvidia-h100-vs-nvidia-a100-sxm-40gb",
    "2022-11",
)
_H200 = Source(
    "NVIDIA H200 Tensor Core GPU datasheet (SXM)", "https://www.nvidia.com/en-us/data-center/h200/", "2024-11"
)
_BLACKWELL = Source(
    "NVIDIA Blackwell Architecture Technical Brief",
    "https://resources.nvidia.com/en-us-blackwell-architecture",
    "2024-03",
)
_L4 = Source("NVIDIA L4 Tensor Core GPU datasheet", "https://www.nvidia.com/en-us/data-center/l4/", "2023-03")
_ADA = Source(
    "NVIDIA Ada GPU Architecture whitepaper (accumulation in float32)",
    "https://www.scribd.com/document/656196379/004",
    "2023-03",
)
_L40S = Source("NVIDIA L40S datasheet", "https://www.nvidia.com/en-us/data-center/l40s/", "2023-08")
_RTX_BLACKWELL = Source(
    "NVIDIA RTX Blackwell GPU Architecture whitepaper (accumulation in float32)",
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
    "2025-01",
)
_MLPERF_GB200 = Source(
    "MLPerf Inference v6.1, system description of a GB200 NVL72",
    "https://raw.githubusercontent.com/mlcommons/inference_results_v6.1/main/closed/Crusoe/systems/"
    "GB200-NVL72_GB200-186GB_aarch64x16_Dynamo.json",
    "2026-09",
)

_HOPPER = {"tf32": 494.7, "bfloat16": 989.4, "float8": 1978.9, "int8": 1978.9}


def _rates(source: Source, tensor: dict[str, float], vector: float) -> tuple[Figure, ...]:
    """float16 is as fast as bfloat16."""
    dense = tensor | {"float16": tensor["bfloat16"]}
    return promised(source, dense=dense, sparse=dense) + promised(source, dense={"float32": vector})


def _measured(
    source: str, date: str, *, dense: dict[str, float], bandwidth: float, host: float, launch: float, kernel: float
) -> tuple[Figure, ...]:
    """What was reached on a device: rates in tera-operations per second by dtype, TB/s, GB/s, seconds."""
    figures = (
        *(("compute", value * TERA, dtype, None) for dtype, value in dense.items()),
        ("bandwidth", bandwidth * TERA, None, "read + written"),
        ("host", host * GIGA, None, "each"),
        ("launch", launch, None, None),
        ("kernel", kernel, None, None),
    )
    return tuple(Figure(*one[:2], source, date, one[2], direction=one[3], measured=True) for one in figures)


def _apart(quantity: str, value: float, source: str, date: str, dtype: str | None = None) -> Figure:
    """The same of one figure with a source of its own, in SI units."""
    return Figure(quantity, value, source, date, dtype, measured=True)


# Threads and blocks of a multiprocessor at most, by compute capability: CUDA's programming guide, "Technical
# specifications per compute capability".
_HELD = {(8, 0): (2048, 32), (8, 9): (1536, 24), (9, 0): (2048, 32), (10, 0): (2048, 32), (12, 0): (1536, 24)}


def _cuda(capability: tuple[int, int], shared_kib: int, processors: int) -> Cuda:
    return Cuda(capability, shared_kib * 1024, processors, *_HELD[capability])


NVIDIA = (
    Device(
        "h200",
        "NVIDIA H200",
        _rates(_H200, _HOPPER, 66.9)
        + promised(_H200, memory=141, bandwidth=4.8, link=900, host=128, power=700)
        + _measured(
            "calibration of one H200 SXM under torch 2.11.0+cu130, the best size of each kind",
            "2026-11-20",
            dense={"bfloat16": 800, "float8": 1470, "int8": 855},
            bandwidth=4.28,
            host=55,
            launch=7.06e-6,
            kernel=1.15e-6,
        )
        + (
            _apart(
                "sustained",
                694 * TERA,
                "products of the 8B shape's prompts, 8,192 rows each, for 0.7 s at 700 W and 1,450 MHz",
                "2026-11-21",
                "bfloat16",
            ),
            _apart(
                "step",
                15.1e-6,
                "copies and gaps of 512 decode steps of one sequence: 8B 13.0 us, 0.6B 17.3 us",
                "2026-11-21",
            ),
            _apart("l2", 62_914_560, "the driver's property of one H200 SXM", "2026-11-20"),
        ),
        _cuda((9, 0), 227, 132),
    ),
    Device(
        "h100",
        "NVIDIA H100 80GB HBM3",
        _rates(_H100, _HOPPER, 66.9)
        + promised(_H100, memory=80, bandwidth=3.35, link=900, host=128, power=700)
        + promised(_SCALING_BOOK, l2=50)
        + _measured(
            "strata probe of one H100 SXM under torch 2.11.0+cu130, the best size of each kind",
            "2026-11-28",
            dense={"bfloat16": 789.9, "float8": 1473.7, "int8": 955.8},
            bandwidth=2.993,
            host=54.47,
            launch=7.697e-6,
            kernel=1.232e-6,
        )
        + (
            _apart(
                "sustained",
                669.5 * TERA,
                "strata probe of one H100 SXM: a product of 8,192 for 5 s, at 699 W and 1,370 MHz",
                "2026-11-28",
                "bfloat16",
            ),
            _apart("l2", 52_428_800, "the driver's property of one H100 SXM", "2026-11-28"),
        ),
        _cuda((9, 0), 227, 132),
    ),
    Device(
        "h100-pcie",
        "NVIDIA H100 PCIe",
        _rates(_H100_PCIE, {"tf32": 378.2, "bfloat16": 756.5, "float8": 1513, "int8": 1513}, 51.2)
        + promised(_H100_PCIE, memory=80, bandwidth=2.0, link=600, host=128, power=350),
        _cuda((9, 0), 227, 114),
    ),
    Device(
        "h100-nvl",
        "NVIDIA H100 NVL",
        _rates(_H100, {"tf32": 417.5, "bfloat16": 835.5, "float8": 1670.5, "int8": 1670.5}, 60)
        + promised(_H100, memory=94, bandwidth=3.9, link=600, host=128, power=400),
        _cuda((9, 0), 227, 132),
    ),
    Device(
        "a100",
        "NVIDIA A100-SXM4-80GB",
        _rates(_A100, {"tf32": 156, "bfloat16": 312, "int8": 624}, 19.5)
        + promised(_A100, memory=80, bandwidth=2.039, link=600, host=64, power=400)
        + promised(_SCALING_BOOK, l2=40),
        _cuda((8, 0), 163, 108),
    ),
    # As it stands in an HGX B200, set to 1000 W.
    Device(
        "b200",
        "NVIDIA B200",
        _rates(_BLACKWELL, {"tf32": 1100, "bfloat16": 2250, "float8": 4500, "int8": 4500, "float4": 9000}, 80)
        + promised(_BLACKWELL, memory=180, bandwidth=8.0, link=1800, host=256, power=1000)
        + promised(_SCALING_BOOK, l2=126),
        _cuda((10, 0), 227, 148),
    ),
    # One of the two GPUs of a superchip, set to 1200 W.
    Device(
        "gb200",
        "NVIDIA GB200",
        _rates(_BLACKWELL, {"tf32": 1250, "bfloat16": 2500, "float8": 5000, "int8": 5000, "float4": 10000}, 90)
        + promised(_BLACKWELL, bandwidth=8.0, link=1800, power=1200)
        + promised(_MLPERF_GB200, memory=186),
        _cuda((10, 0), 227, 148),
    ),
    Device(
        "l4",
        "NVIDIA L4",
        _rates(_L4, {"tf32": 60, "bfloat16": 121, "float8": 242.5, "int8": 242.5}, 30.3)
        + promised(_L4, memory=24, bandwidth=0.3, host=64, power=72)
        + promised(_ADA, l2=48),
        _cuda((8, 9), 99, 58),
    ),
    Device(
        "l40s",
        "NVIDIA L40S",
        _rates(_L40S, {"tf32": 183, "bfloat16": 362.05, "float8": 733, "int8": 733}, 91.6)
        + promised(_L40S, memory=48, bandwidth=0.864, host=64, power=350),
        _cuda((8, 9), 99, 142),
    ),
    Device(
        "rtx4090",
        "NVIDIA GeForce RTX 4090",
        _rates(_ADA, {"tf32": 82.6, "bfloat16": 165.2, "float8": 330.3, "int8": 660.6}, 82.6)
        + promised(_ADA, memory=24, bandwidth=1.008, host=64, power=450, l2=72),
        _cuda((8, 9), 99, 128),
    ),
    Device(
        "rtx5090",
        "NVIDIA GeForce RTX 5090",
        _rates(_RTX_BLACKWELL, {"tf32": 104.8, "bfloat16": 209.5, "float8": 419, "int8": 838, "float4": 1676}, 104.8)
        + promised(_RTX_BLACKWELL, memory=32, bandwidth=1.792, host=128, power=575, l2=96),
        _cuda((12, 0), 99, 170),
    ),
)

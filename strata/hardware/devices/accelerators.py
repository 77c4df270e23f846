"""Accelerators that are no GPUs: Google's TPUs (one chip), Intel's Gaudi 3, Huawei's Ascend 910C (both of its dies)."""

from __future__ import annotations

from strata.hardware.figures import Device, Source, promised

_V5E = Source("TPU v5e, Google Cloud documentation", "https://docs.cloud.google.com/tpu/docs/v5e", "2026-11")
_V5P = Source("TPU v5p, Google Cloud documentation", "https://docs.cloud.google.com/tpu/docs/v5p-training", "2026-11")
_V6E = Source("TPU v6e, Google Cloud documentation", "https://docs.cloud.google.com/tpu/docs/v6e", "2026-11")
_SCALING_BOOK = Source("How to Scale Your Model, TPUs", "https://jax-ml.github.io/scaling-book/tpus/", "2025-02")
_GAUDI3 = Source(
    "Intel Gaudi 3 AI Accelerator, Hot Chips 2024 (the module, cooled by air)",
    "https://www.sgpjbg.com/baogao/465025.html",
    "2024-08",
)
# 376 TFLOP/s of each die; 289 PFLOP/s and 48 TB of 384 packages say the same.
_CLOUD_MATRIX = Source(
    "Serving Large Language Models on Huawei CloudMatrix384, as reported",
    "https://reportify.ai/social-media/688413268697636",
    "2025-06",
)
_ASCEND_TOTALS = Source(
    "CloudMatrix 384 supernode: 48 TB in 384 packages",
    "https://chinaresearchcollective.substack.com/p/huawei-ascend-cloudmatrix-384-supernode",
    "2026-06",
)
_ASCEND_MEMORY = Source(
    "TechPowerUp on the Ascend 910C and 920C",
    "https://techpowerup.com/335749/huawei-prepares-6-nm-ascend-920c-accelerator-900-teraflops-4000-gb-s-hbm3",
    "2025-04",
)

ACCELERATORS = (
    Device(
        "tpu-v5e",
        "TPU v5e",
        promised(_V5E, memory=16, bandwidth=0.819, link=400, dense={"bfloat16": 197, "int8": 393})
        + promised(_SCALING_BOOK, host=30),
    ),
    # 95 GiB of memory.
    Device(
        "tpu-v5p",
        "TPU v5p",
        promised(_V5P, memory=102.005, bandwidth=2.765, link=1200, dense={"bfloat16": 459, "float8": 459})
        + promised(_SCALING_BOOK, host=30, dense={"int8": 918}),
    ),
    Device(
        "tpu-v6e",
        "TPU v6e",
        promised(_V6E, memory=32, bandwidth=1.638, link=800, dense={"bfloat16": 918, "int8": 1836})
        + promised(_SCALING_BOOK, host=64),
    ),
    Device(
        "gaudi3",
        "Intel Gaudi 3",
        promised(
            _GAUDI3,
            memory=128,
            bandwidth=3.67,
            l2=96,
            link=1200,
            host=128,
            power=900,
            dense={"bfloat16": 1835, "float8": 1835},
        ),
    ),
    # Its link is left out: sources say 196, 400 and 784 GB/s, and not of which direction.
    Device(
        "ascend-910c",
        "Ascend 910C",
        promised(_CLOUD_MATRIX, dense={"float16": 752, "bfloat16": 752})
        + promised(_ASCEND_TOTALS, memory=128)
        + promised(_ASCEND_MEMORY, bandwidth=3.2),
    ),
)

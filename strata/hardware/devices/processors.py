"""Processors with memory of their own machine, and Apple's chips.

Their makers state no peak for products (it follows a clock that they do not promise), so none is here: `strata probe`
measures it. A server's memory is as large as what is put in; Apple's is the largest that is sold.
"""

from __future__ import annotations

from strata.hardware.figures import Device, Source, promised

# Twelve channels of eight bytes: 4.8, 6.4 and 8.8 G transfers a second.
_CHANNEL_BYTES = 12 * 8e-3
_EPYC_9004 = Source(
    "AMD EPYC 9004 series, table of products", "https://www.hpctech.co.jp/product/amd-epyc-9004-series/", "2026-11"
)
_EPYC_9005 = Source(
    "Tom's Hardware on the EPYC 9755; twelve channels of DDR5-6400: Wikipedia's page on EPYC",
    "https://www.tomshardware.com/pc-components/cpus/new-zen-5-128-core-epyc-cpu-weilds-512mb-of-l3-cache",
    "2024-06",
)
_XEON_6900P = Source(
    "Intel Xeon 6900P launch, HotHardware (twelve channels of MRDIMM-8800)",
    "https://hothardware.top/reviews/intel-xeon-6-6900p-with-p-cores-launch.html",
    "2024-09",
)
_MAC_STUDIO = Source(
    "Mac Studio with M3 Ultra and M4 Max, TechPowerUp", "https://techpowerup.com/news-tags/Mac%20Studio", "2025-03"
)
_M4_MAX = Source(
    "Apple M4 Max with 40 GPU cores, launch",
    "https://gamebastion.com/n/apple-s-m4-max-is-the-first-non-ultra/474547",
    "2024-10",
)

PROCESSORS = (
    Device(
        "epyc-9654",
        "AMD EPYC 9654 96-Core Processor",
        promised(_EPYC_9004, bandwidth=4.8 * _CHANNEL_BYTES, l3=384, power=360),
    ),
    Device(
        "epyc-9755",
        "AMD EPYC 9755 128-Core Processor",
        promised(_EPYC_9005, bandwidth=6.4 * _CHANNEL_BYTES, l3=512),
    ),
    Device(
        "xeon-6980p",
        "Intel(R) Xeon(R) 6980P",
        promised(_XEON_6900P, bandwidth=8.8 * _CHANNEL_BYTES, l3=504, power=500),
    ),
    Device("m3-ultra", "Apple M3 Ultra", promised(_MAC_STUDIO, memory=512, bandwidth=0.819)),
    Device("m4-max", "Apple M4 Max", promised(_M4_MAX, memory=128, bandwidth=0.546)),
)

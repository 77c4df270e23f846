"""What devices can do: every figure with its dtype, dense or sparse, its direction, its source and the date of that.

Units are SI: FLOP/s (operations per second for integers), bytes per second, bytes. Datasheets quote tensor cores with
2:4 sparsity and links in both directions together; here links are in each direction, and sparse figures say so.
"""

from __future__ import annotations

from dataclasses import dataclass

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Figure:
    """One number about a device.

    quantity: "compute" (FLOP/s), "bandwidth" (device memory, bytes/s), "memory" (bytes), "link" (to other devices of
        the kind, bytes/s) or "host" (to the CPU, bytes/s).
    dtype: of the operands, as torch names it where torch has it ("float8" for either kind); None where none applies.
    sparse: with 2:4 structured sparsity.
    direction: "read + written" (bytes moved either way), or "each" (of the two directions of a link).
    measured: reached by a benchmark on the device; otherwise promised by the maker.
    """

    quantity: str
    value: float
    source: str
    date: str
    dtype: str | None = None
    sparse: bool = False
    direction: str | None = None
    measured: bool = False


@dataclass(frozen=True)
class Device:
    """A device and all that is known of it. `key` is its name here, `product` what drivers call it.

    capability: its compute capability, (major, minor). shared_bytes: the most shared memory of one thread block.
    processors: multiprocessors that are enabled.
    """

    key: str
    product: str
    capability: tuple[int, int]
    shared_bytes: int
    processors: int
    figures: tuple[Figure, ...]

    def ceiling(self, quantity: str, dtype: str | None = None, *, measured: bool = True) -> Figure:
        """The figure to plan with: dense, measured if there is one (unless `measured` is False), else the maker's.

        Raises ValueError, naming what is known, if there is none.
        """
        dense = [figure for figure in self.figures if figure.quantity == quantity and not figure.sparse]
        fitting = [figure for figure in dense if figure.dtype == dtype and (measured or not figure.measured)]
        if not fitting:
            known = ", ".join(sorted({figure.dtype for figure in dense if figure.dtype is not None}))
            wanted = quantity if dtype is None else f"{quantity} in {dtype}"
            raise ValueError(f"no {wanted} is recorded for {self.key}" + (f"; known: {known}" if known else ""))
        return max(fitting, key=lambda figure: figure.measured)


def _device(
    key: str,
    product: str,
    capability: tuple[int, int],
    shared_kib: int,
    processors: int,
    source: str,
    date: str,
    *,
    memory: float,
    bandwidth: float,
    dense: dict[str, float],
    vector: float,
    link: float | None,
    host: float,
    measured: tuple[Figure, ...] = (),
) -> Device:
    """A device by its datasheet, in the units of makers: GB, TB/s, tera-operations per second, GB/s of a link in
    both directions; and what was measured on it.

    dense: tensor cores without sparsity, which doubles them; float16 is as fast as bfloat16. vector: float32 on the
    cores that sparsity does not serve.
    """
    figures = [
        Figure("memory", memory * GIGA, source, date),
        Figure("bandwidth", bandwidth * TERA, source, date, direction="read + written"),
        Figure("host", host / 2 * GIGA, source, date, direction="each"),
    ]
    if link is not None:
        figures.append(Figure("link", link / 2 * GIGA, source, date, direction="each"))
    figures.append(Figure("compute", vector * TERA, source, date, "float32"))
    for dtype, value in (dense | {"float16": dense["bfloat16"]}).items():
        figures.append(Figure("compute", value * TERA, source, date, dtype))
        figures.append(Figure("compute", 2 * value * TERA, source, date, dtype, sparse=True))
    return Device(key, product, capability, shared_kib * 1024, processors, (*figures, *measured))


_HOPPER = {"tf32": 494.7, "bfloat16": 989.4, "float8": 1978.9, "int8": 1978.9}
_CALIBRATION = "calibration of one H200 SXM under torch 2.11.0+cu130, the best size of each kind"


def _measured(quantity: str, value: float, dtype: str | None = None, direction: str | None = None) -> Figure:
    return Figure(quantity, value, _CALIBRATION, "2026-11-20", dtype, direction=direction, measured=True)


DEVICES: dict[str, Device] = {
    device.key: device
    for device in (
        _device(
            "h200",
            "NVIDIA H200",
            (9, 0),
            227,
            132,
            "NVIDIA H200 Tensor Core GPU datasheet (SXM)",
            "2024-11",
            memory=141,
            bandwidth=4.8,
            dense=_HOPPER,
            vector=66.9,
            link=900,
            host=128,
            measured=(
                _measured("compute", 800 * TERA, "bfloat16"),
                _measured("compute", 1470 * TERA, "float8"),
                _measured("compute", 855 * TERA, "int8"),
                _measured("bandwidth", 4.28 * TERA, direction="read + written"),
                _measured("host", 55 * GIGA, direction="each"),
            ),
        ),
        _device(
            "h100",
            "NVIDIA H100 80GB HBM3",
            (9, 0),
            227,
            132,
            "NVIDIA H100 Tensor Core GPU datasheet (SXM5)",
            "2023-09",
            memory=80,
            bandwidth=3.35,
            dense=_HOPPER,
            vector=66.9,
            link=900,
            host=128,
        ),
        _device(
            "a100",
            "NVIDIA A100-SXM4-80GB",
            (8, 0),
            163,
            108,
            "NVIDIA A100 Tensor Core GPU datasheet (SXM4 80 GB)",
            "2021-06",
            memory=80,
            bandwidth=2.039,
            dense={"tf32": 156, "bfloat16": 312, "int8": 624},
            vector=19.5,
            link=600,
            host=64,
        ),
        _device(
            "b200",
            "NVIDIA B200",
            (10, 0),
            227,
            148,
            "NVIDIA Blackwell Architecture Technical Brief (HGX B200, 1000 W); memory: DGX B200 datasheet",
            "2024-03",
            memory=180,
            bandwidth=8.0,
            dense={
                "tf32": 1100,
                "bfloat16": 2250,
                "float8": 4500,
                "int8": 4500,
                "float4": 9000,
            },
            vector=80,
            link=1800,
            host=256,
        ),
        _device(
            "l40s",
            "NVIDIA L40S",
            (8, 9),
            99,
            142,
            "NVIDIA L40S datasheet",
            "2023-08",
            memory=48,
            bandwidth=0.864,
            dense={"tf32": 183, "bfloat16": 362.05, "float8": 733, "int8": 733},
            vector=91.6,
            link=None,
            host=64,
        ),
        _device(
            "rtx4090",
            "NVIDIA GeForce RTX 4090",
            (8, 9),
            99,
            128,
            "NVIDIA Ada GPU Architecture whitepaper, appendix A (accumulation in float32)",
            "2023-03",
            memory=24,
            bandwidth=1.008,
            dense={"tf32": 82.6, "bfloat16": 165.2, "float8": 330.3, "int8": 660.6},
            vector=82.6,
            link=None,
            host=64,
        ),
    )
}


def device(key: str) -> Device:
    """The device of that name. Raises ValueError, naming those known, if there is none."""
    if key not in DEVICES:
        raise ValueError(f"device {key!r} is unknown; known are {', '.join(DEVICES)}")
    return DEVICES[key]


def recognize(product: str) -> Device | None:
    """The device that a driver reports under this name, or None if it is not in the database."""
    return next((known for known in DEVICES.values() if known.product == product), None)

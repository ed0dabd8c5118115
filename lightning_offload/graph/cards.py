"""The figures of the catalogue: datasheet numbers of GPUs and rates of their links, each with its source.

Arithmetic is dense (without structured sparsity) and, for float32, outside of the tensor cores; TF32 has a rate of its
own. A type that a GPU has no faster arithmetic for counts at its float32 rate: libraries store it and compute in
float32.
"""

from __future__ import annotations

import dataclasses

_GIB = 1 << 30
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link between a device and its host, one direction at a time.

    Attributes:
        name: What it is called.
        bytes_per_second: Rate of one direction after line coding, in theory.
        d2h_efficiency: Share of it that large copies from page-locked memory reach, device to host.
        h2d_efficiency: The same, host to device.
        source: Where the efficiencies are from.
    """

    name: str
    bytes_per_second: float
    d2h_efficiency: float
    h2d_efficiency: float
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Datasheet figures of one GPU.

    Attributes:
        name: What a user calls it by.
        title: Its full name.
        aliases: Other names of it, among them what its driver calls it.
        memory_bytes: What CUDA reports as its memory, less than the nominal size.
        memory_bytes_per_second: Peak bandwidth of its memory.
        float32: Peak arithmetic in float32, operations per second.
        float16: The same in float16, accumulated in float32 on tensor cores.
        bfloat16: The same in bfloat16.
        tf32: The same for float32 that tensor cores multiply as TF32; None where there is no TF32.
        generation: Name of its architecture; cards of one generation share their calibration. GA102 has tensor cores
            like Ada's, half as wide as those of the A100.
        compute_capability: Of its architecture, times ten: developer.nvidia.com/cuda-gpus.
        link: To its host.
        source: Where arithmetic and bandwidth are from.
        memory_source: Where the memory is from.
    """

    name: str
    title: str
    aliases: tuple[str, ...] = ()
    memory_bytes: int
    memory_bytes_per_second: float
    float32: float
    float16: float
    bfloat16: float
    tf32: float | None = None
    generation: str
    compute_capability: int
    link: Link
    source: str
    memory_source: str


# ---- links: 16 lanes; PCIe 3.0 to 5.0 code 128 bits as 130

_PCIE3 = 16 * 8e9 / 8 * 128 / 130
_PCIE3_OLD = Link(
    name="PCIe 3.0 x16, 2013",
    bytes_per_second=_PCIE3,
    d2h_efficiency=0.64,
    h2d_efficiency=0.64,
    source="10.05 and 10.04 GB/s measured on a K40m: microway.com, 'NVIDIA Tesla K40 Atlas GPU Accelerator'",
)
_PCIE3_NEW = Link(
    name="PCIe 3.0 x16",
    bytes_per_second=_PCIE3,
    d2h_efficiency=0.78,
    h2d_efficiency=0.78,
    source="12.4 GB/s, the example output in nvbandwidth's README: github.com/NVIDIA/nvbandwidth",
)
_PCIE4 = Link(
    name="PCIe 4.0 x16",
    bytes_per_second=2 * _PCIE3,
    d2h_efficiency=0.78,
    h2d_efficiency=0.78,
    source="24.8 GB/s measured on an A100-SXM4-80GB by nvbandwidth: forums.developer.nvidia.com/t/352186",
)
_PCIE5 = Link(
    name="PCIe 5.0 x16",
    bytes_per_second=4 * _PCIE3,
    d2h_efficiency=0.87,
    h2d_efficiency=0.87,
    source="55 GB/s, what nvbandwidth prints on eight-GPU machines of that kind; not a figure of NVIDIA's",
)
_C2C = Link(
    name="NVLink-C2C",
    bytes_per_second=450e9,
    d2h_efficiency=0.66,
    h2d_efficiency=0.83,
    source="297 and 375 GB/s measured: Schieffer et al. 2024, arXiv 2407.07850",
)

_TORCH = "total_memory that torch reports"
_QUERY = "global memory that CUDA's deviceQuery prints"
_ECC = "12 GiB less the sixteenth that ECC takes, as deviceQuery prints for GDDR5 boards"

CARDS = (
    Card(
        name="k40c", title="Tesla K40c", aliases=("k40", "k40m"), generation="kepler",
        memory_bytes=11520 * _MIB, memory_bytes_per_second=288e9,
        float32=4.29e12, float16=4.29e12, bfloat16=4.29e12, compute_capability=35, link=_PCIE3_OLD,
        source="NVIDIA, Tesla K40 Active GPU Accelerator, board specification BD-06949 (745 MHz, no boost)",
        memory_source=_QUERY,
    ),
    Card(
        name="m40", title="Tesla M40 12GB", aliases=("m40-12gb",), generation="maxwell",
        memory_bytes=11520 * _MIB, memory_bytes_per_second=288e9,
        float32=6.84e12, float16=6.84e12, bfloat16=6.84e12, compute_capability=52, link=_PCIE3_NEW,
        source="NVIDIA, Tesla M40 GPU Accelerator datasheet, 2015 (3072 cores at a boost of 1114 MHz)",
        memory_source=_ECC,
    ),
    Card(
        name="titan-x", title="NVIDIA TITAN X (Pascal)", aliases=("titan-x-pascal", "TITAN X (Pascal)"),
        generation="pascal",
        memory_bytes=12189 * _MIB, memory_bytes_per_second=480e9,
        float32=10.97e12, float16=10.97e12, bfloat16=10.97e12, compute_capability=61, link=_PCIE3_NEW,
        source="NVIDIA, TITAN X specifications, 2016 (3584 cores at a boost of 1531 MHz)",
        memory_source=_QUERY,
    ),
    Card(
        name="gtx-titan-x", title="GeForce GTX TITAN X (Maxwell)", aliases=("titan-x-maxwell",), generation="maxwell",
        memory_bytes=12207 * _MIB, memory_bytes_per_second=336.5e9,
        float32=6.60e12, float16=6.60e12, bfloat16=6.60e12, compute_capability=52, link=_PCIE3_NEW,
        source="NVIDIA, GeForce GTX TITAN X specifications, 2015 (3072 cores at a boost of 1075 MHz)",
        memory_source=_QUERY,
    ),
    Card(
        name="p100", title="Tesla P100-PCIE-16GB", aliases=("p100-16gb", "p100-pcie"), generation="pascal",
        memory_bytes=16281 * _MIB, memory_bytes_per_second=732e9,
        float32=9.3e12, float16=18.7e12, bfloat16=9.3e12, compute_capability=60, link=_PCIE3_NEW,
        source="NVIDIA, Tesla P100 PCIe GPU Accelerator datasheet, 2016",
        memory_source=_QUERY,
    ),
    Card(
        name="v100-16gb", title="Tesla V100-SXM2-16GB", aliases=("v100",), generation="volta",
        memory_bytes=16_945_512_448, memory_bytes_per_second=900e9,
        float32=15.7e12, float16=125e12, bfloat16=15.7e12, compute_capability=70, link=_PCIE3_NEW,
        source="NVIDIA, V100 Tensor Core GPU datasheet, 2020 (SXM2)",
        memory_source=_QUERY,
    ),
    Card(
        name="v100-32gb", title="Tesla V100-SXM2-32GB", generation="volta",
        memory_bytes=34_089_730_048, memory_bytes_per_second=900e9,
        float32=15.7e12, float16=125e12, bfloat16=15.7e12, compute_capability=70, link=_PCIE3_NEW,
        source="NVIDIA, V100 Tensor Core GPU datasheet, 2020 (SXM2)",
        memory_source=_QUERY,
    ),
    Card(
        name="t4", title="Tesla T4", generation="turing",
        memory_bytes=int(14.56 * _GIB), memory_bytes_per_second=320e9,
        float32=8.1e12, float16=65e12, bfloat16=8.1e12, compute_capability=75, link=_PCIE3_NEW,
        source="NVIDIA, T4 Tensor Core GPU datasheet, 2019",
        memory_source=_TORCH,
    ),
    Card(
        name="3090", title="GeForce RTX 3090", aliases=("rtx-3090",), generation="ga102-ada",
        memory_bytes=int(23.68 * _GIB), memory_bytes_per_second=936e9,
        float32=35.6e12, float16=71e12, bfloat16=71e12, tf32=35.6e12, compute_capability=86, link=_PCIE4,
        source="NVIDIA, Ampere GA102 GPU Architecture whitepaper, 2021",
        memory_source=_TORCH,
    ),
    Card(
        name="4090", title="GeForce RTX 4090", aliases=("rtx-4090",), generation="ga102-ada",
        memory_bytes=25_393_692_672, memory_bytes_per_second=1008e9,
        float32=82.6e12, float16=165.2e12, bfloat16=165.2e12, tf32=82.6e12, compute_capability=89, link=_PCIE4,
        source="NVIDIA, Ada GPU Architecture whitepaper, 2022",
        memory_source=_TORCH,
    ),
    Card(
        name="l4", title="NVIDIA L4", generation="ga102-ada",
        memory_bytes=int(22.03 * _GIB), memory_bytes_per_second=300e9,
        float32=30.3e12, float16=121e12, bfloat16=121e12, tf32=60e12, compute_capability=89, link=_PCIE4,
        source="NVIDIA, L4 Tensor Core GPU datasheet, 2023 (half of the figures with sparsity)",
        memory_source=_TORCH,
    ),
    Card(
        name="a100-40gb", title="NVIDIA A100-SXM4-40GB", generation="ampere",
        memory_bytes=int(39.49 * _GIB), memory_bytes_per_second=1555e9,
        float32=19.5e12, float16=312e12, bfloat16=312e12, tf32=156e12, compute_capability=80, link=_PCIE4,
        source="NVIDIA, A100 Tensor Core GPU datasheet, 2021",
        memory_source=_TORCH,
    ),
    Card(
        name="a100-80gb", title="NVIDIA A100-SXM4-80GB", aliases=("a100",), generation="ampere",
        memory_bytes=int(79.25 * _GIB), memory_bytes_per_second=2039e9,
        float32=19.5e12, float16=312e12, bfloat16=312e12, tf32=156e12, compute_capability=80, link=_PCIE4,
        source="NVIDIA, A100 Tensor Core GPU datasheet, 2021",
        memory_source=_TORCH,
    ),
    Card(
        name="h100", title="NVIDIA H100 SXM 80GB", aliases=("h100-80gb", "h100-sxm", "H100 80GB HBM3"),
        generation="hopper",
        memory_bytes=int(79.18 * _GIB), memory_bytes_per_second=3350e9,
        float32=67e12, float16=989e12, bfloat16=989e12, tf32=494.5e12, compute_capability=90, link=_PCIE5,
        source="NVIDIA, H100 Tensor Core GPU datasheet, 2023 (half of the figures with sparsity)",
        memory_source=_TORCH,
    ),
    Card(
        name="h200", title="NVIDIA H200 SXM", aliases=("h200-141gb", "h200-sxm"), generation="hopper",
        memory_bytes=int(139.8 * _GIB), memory_bytes_per_second=4800e9,
        float32=67e12, float16=989e12, bfloat16=989e12, tf32=494.5e12, compute_capability=90, link=_PCIE5,
        source="NVIDIA, H200 Tensor Core GPU datasheet, 2024 (half of the figures with sparsity)",
        memory_source=_TORCH,
    ),
    Card(
        name="gh200", title="NVIDIA GH200 96GB", aliases=("gh200-96gb", "GH200 480GB"), generation="hopper",
        memory_bytes=int(94.5 * _GIB), memory_bytes_per_second=4000e9,
        float32=67e12, float16=990e12, bfloat16=990e12, tf32=494.5e12, compute_capability=90, link=_C2C,
        source="NVIDIA, GH200 Grace Hopper Superchip datasheet, 2023 (half of the figures with sparsity)",
        memory_source=_TORCH,
    ),
    Card(
        name="b200", title="NVIDIA B200 180GB", aliases=("b200-180gb",), generation="blackwell",
        memory_bytes=int(178.35 * _GIB), memory_bytes_per_second=7700e9,
        float32=75e12, float16=2250e12, bfloat16=2250e12, tf32=1125e12, compute_capability=100, link=_PCIE5,
        source="NVIDIA, Blackwell datasheet, HGX B200, 2024 (half of the figures with sparsity)",
        memory_source=_TORCH,
    ),
)  # fmt: skip

"""Devices with their published peak rates, and the share of these rates that the planner assumes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megappo.observe.timing.throughput import peak_flops


@dataclass(frozen=True)
class Machine:
    """One device of a cluster and its links. Bandwidths are in bytes per second and one direction."""

    name: str
    summary: str
    """Manufacturer's name of the device, for display."""
    bfloat16_flops: float
    """Dense FLOP/s in bfloat16."""
    float32_flops: float
    """Dense FLOP/s in float32."""
    memory_bytes: float
    memory_bandwidth: float
    intra_node_bandwidth: float
    """Bytes per second between two devices of a node, in one direction."""
    inter_node_bandwidth: float
    """Bytes per second between two devices of different nodes, in one direction."""
    devices_per_node: int
    is_cuda: bool
    shared_by_ranks: bool = False
    """Whether the numbers describe a whole machine that all ranks share."""
    host_bandwidth: float = 32e9
    """Bytes per second between a device and host memory (default: PCIe Gen4 x16). Without CUDA, the bandwidth between
    memory and a file in memory."""
    is_measured: bool = False
    """Whether the rates were measured on this CPU instead of taken from a data sheet. On a measured CPU, arithmetic,
    memory traffic and host time add up, because operations run one after the other."""

    @property
    def compute_share(self) -> float:
        """Share of `flops` that a layer reaches, including the operations between its matrix products."""
        return ASSUMED.measured_compute_share if self.is_measured else ASSUMED.compute_share

    @property
    def decode_share(self) -> float:
        """Share of `flops` that a layer reaches while the engine decodes."""
        return ASSUMED.measured_decode_share if self.is_measured else ASSUMED.compute_share

    @property
    def launch_seconds_per_layer(self) -> float:
        """Host time of the forward pass of one layer in the embedded engine, in seconds."""
        return ASSUMED.measured_launch_seconds_per_layer if self.is_measured else ASSUMED.launch_seconds_per_layer

    @property
    def trainer_launch_seconds_per_layer(self) -> float:
        """Host time of the forward pass of one layer in the trainer, in seconds. The backward pass takes twice as
        long."""
        of_gpus = ASSUMED.trainer_launch_seconds_per_layer
        return ASSUMED.measured_launch_seconds_per_layer if self.is_measured else of_gpus

    @property
    def bandwidth_share(self) -> float:
        """Share of `memory_bandwidth` that a stage reaches."""
        return 1.0 if self.is_measured else ASSUMED.bandwidth_share

    def flops(self, dtype_bytes: int) -> float:
        """Return the peak FLOP/s for a data type with `dtype_bytes` bytes per element."""
        return self.bfloat16_flops if dtype_bytes == 2 else self.float32_flops

    def per_rank(self, ranks: int) -> Machine:
        """Return one rank's part of a machine that `ranks` ranks share. A GPU belongs to one rank and is returned
        unchanged."""
        return self.scaled(1 / ranks) if self.shared_by_ranks else self

    def scaled(self, share: float) -> Machine:
        """Return a share of the machine."""
        return replace(
            self,
            bfloat16_flops=self.bfloat16_flops * share,
            float32_flops=self.float32_flops * share,
            memory_bytes=self.memory_bytes * share,
            memory_bandwidth=self.memory_bandwidth * share,
            intra_node_bandwidth=self.intra_node_bandwidth * share,
            host_bandwidth=self.host_bandwidth * share,
        )

    def same_node(self, first_rank: int, last_rank: int) -> bool:
        """Return whether all ranks from the first to the last are in one node."""
        return self.shared_by_ranks or first_rank // self.devices_per_node == last_rank // self.devices_per_node

    def nodes_of(self, ranks: int) -> tuple[int, int]:
        """Return the fewest nodes for `ranks` ranks, and the number of ranks on each node. All nodes have the same
        number of ranks, and at most one rank per device."""
        fewest = 1 if self.shared_by_ranks else -(-ranks // self.devices_per_node)
        nodes = next(count for count in range(fewest, ranks + 1) if ranks % count == 0)
        return nodes, ranks // nodes

    @property
    def usable_bytes(self) -> float:
        """Memory of a device in bytes that a plan may fill."""
        reserve = ASSUMED.cuda_reserve_bytes if self.is_cuda else ASSUMED.process_reserve_bytes
        return self.memory_bytes * ASSUMED.memory_share - reserve


@dataclass(frozen=True)
class Assumptions:
    """Assumptions that are not in any data sheet. They are the same for every machine."""

    compute_share: float = 0.4
    """Share of the peak FLOP/s that a layer reaches. Megatron-LM reports 0.42 to 0.56 (Korthikanti et al. 2022, table
    5)."""
    measured_compute_share: float = 0.6
    """Share of a measured CPU's FLOP/s in one product that whole layers reach. Attention, norms, rope and softmax are
    slower than products. This value and the next three values are fitted to the CPU seconds of one thread on shared
    cores. The fit uses steps of two sizes with the shapes of SmolLM2-135M and 8 layers (AVX512-BF16)."""
    measured_decode_share: float = 0.5
    """Share of a measured CPU's FLOP/s in one product that decoding reaches. Products of decoding have few rows."""
    measured_launch_seconds_per_layer: float = 0.8e-3
    """Host time in seconds of one transformers layer on a CPU, where each norm and rope is several operations."""
    measured_layers_between_tokens: int = 5
    """Host time of transformers' `generate` between two tokens, in units of the host time of a layer."""
    bandwidth_share: float = 0.7
    """Share of the memory bandwidth that a stage reaches."""
    link_share: float = 0.7
    """Share of a link's bandwidth that large collectives reach."""
    launch_seconds_per_layer: float = 0.4e-3
    """Host time in seconds to launch the forward kernels of one layer in the embedded engine, without CUDA graphs."""
    trainer_launch_seconds_per_layer: float = 1.4e-3
    """Host time in seconds to launch the forward kernels of one layer in the trainer. Python launches 59 kernels for
    each layer and microbatch of an update. On an H100, an update of four microbatches of 8,192 tokens of Qwen3-0.6B
    took 0.507 s (median of nine), and its kernels took 0.397 s (benchmarks/results/2026-11-23-h100.md)."""
    small_all_reduce_seconds: float = 10e-6
    """Seconds of an all-reduce of a few hundred kilobytes within a node, between the kernels of a CUDA graph."""
    small_all_reduce_between_nodes_seconds: float = 40e-6
    """Seconds of such an all-reduce between nodes."""
    waking_seconds: float = 0.8
    """Seconds of a weight sync until sleeping servers have allocated their memory and the trainer has released its
    own. Nine syncs on an H100 took 0.70 to 0.85 s, for servers that allocate 4 to 34 GB (`wake` in
    benchmarks/results/2026-11-26-h100-whole-step.md and 2026-11-26-h100-experts-and-losses.md)."""
    deterministic_slowdown: float = 1.34
    """Factor by which deterministic inference of SGLang lengthens a rollout on GPUs. Its authors measured 34.35% more
    (https://lmsys.org/blog/2025-09-22-sglang-deterministic)."""
    host_memory_bandwidth: float = 50e9
    """Bytes per second of host memory for each GPU: sixteen DDR5 channels of two sockets, shared by eight GPUs."""
    checkpoint_bytes_per_second: float = 2e9
    """Bytes per second that a node writes to a shared disk."""
    memory_share: float = 0.95
    """Share of the memory that a plan may fill. The rest is reserved for fragmentation."""
    cuda_reserve_bytes: float = 3e9
    """CUDA context, NCCL buffers and cuBLAS workspaces of a rank."""
    process_reserve_bytes: float = 1e9
    """Memory of Python and its libraries for a rank on a CPU."""

    def sentence(self, machine: Machine) -> str:
        """Return the assumptions as a sentence for the output of a plan."""
        reached = "measured" if machine.is_measured else "peak"
        return (
            f"assumed: {machine.compute_share:.0%} of {reached} FLOP/s, "
            f"{machine.bandwidth_share:.0%} of memory bandwidth, "
            f"{self.link_share:.0%} of link bandwidth, "
            f"{1e3 * machine.trainer_launch_seconds_per_layer:g} ms of host time "
            "per layer and forward pass (none when servers decode on GPUs, where a small all-reduce takes "
            f"{1e6 * self.small_all_reduce_seconds:g} us, between nodes "
            f"{1e6 * self.small_all_reduce_between_nodes_seconds:g}, and deterministic inference "
            f"{self.deterministic_slowdown:g} times as long), {self.waking_seconds:g} s of a sync to wake sleeping "
            f"servers, {self.checkpoint_bytes_per_second / 1e9:g} GB/s of a "
            f"checkpoint per node, {self.host_memory_bandwidth / 1e9:g} GB/s of the host's memory per GPU, "
            f"{self.memory_share:.0%} of memory less "
            f"{self.cuda_reserve_bytes / 1e9:g} GB per GPU for CUDA and NCCL, "
            f"{self.process_reserve_bytes / 1e9:g} GB per rank on a CPU; every sample has the maximum length; rewards "
            "and data loading are not included"
        )


ASSUMED = Assumptions()


_GEN5 = ("h100", "h800", "h200", "h20", "b200")
"""GPUs on PCIe Gen5 x16, which has 64 GB/s in each direction (data sheets). The data sheets of the other GPUs list
Gen4, which has 32 GB/s."""


def _gpu(
    name: str, summary: str, float32: float, memory: float, bandwidth: float, intra_node: float, inter_node: float
) -> Machine:
    """Return a GPU in a node of eight. The first word of `summary` is its name in the table of peaks."""
    peak = peak_flops(summary.replace(",", " ").split()[0])
    assert peak is not None
    host = 64e9 if name in _GEN5 else 32e9
    return Machine(
        name, summary, peak, float32, memory, bandwidth, intra_node, inter_node, 8, is_cuda=True, host_bandwidth=host
    )


CPU_CORES = 56
"""Cores of the machine `cpu`."""

MACHINES = {
    machine.name: machine
    for machine in (
        # NVIDIA A100 Tensor Core GPU data sheet, column SXM: 19.5 TFLOP/s FP32, NVLink 600 GB/s in both directions
        # together; 40 GB with 1,555 GB/s, 80 GB with 2,039 GB/s. DGX A100 data sheet: 8 GPUs, a ConnectX-6 of 200 Gb/s
        # for each.
        _gpu("a100-40", "A100, 40 GB", 19.5e12, 40e9, 1.555e12, 300e9, 25e9),
        _gpu("a100-80", "A100, 80 GB", 19.5e12, 80e9, 2.039e12, 300e9, 25e9),
        # NVIDIA H100 Tensor Core GPU data sheet, column SXM: 67 TFLOP/s FP32, 80 GB, 3.35 TB/s, NVLink 900 GB/s in both
        # directions together. DGX H100 data sheet: 8 GPUs, a ConnectX-7 of 400 Gb/s for each.
        _gpu("h100", "H100 SXM, 80 GB", 67e12, 80e9, 3.35e12, 450e9, 50e9),
        # "Insights into DeepSeek-V3" (arXiv:2505.09343): an H100 whose NVLink has 400 GB/s in both directions together,
        # eight in a node with a ConnectX-7 of 400 Gb/s for each.
        _gpu("h800", "H800 SXM, 80 GB", 67e12, 80e9, 3.35e12, 200e9, 50e9),
        # NVIDIA H200 Tensor Core GPU data sheet, column SXM: as the H100 but 141 GB, 4.8 TB/s. DGX H200: as DGX H100.
        _gpu("h200", "H200 SXM, 141 GB", 67e12, 141e9, 4.8e12, 450e9, 50e9),
        # Specifications published by SemiAnalysis in November 2023: 44 TFLOP/s FP32, 96 GB, 4.0 TB/s, NVLink 900 GB/s
        # in both directions together, eight on an HGX board; the network as of DGX H100.
        _gpu("h20", "H20 SXM, 96 GB", 44e12, 96e9, 4.0e12, 450e9, 50e9),
        # NVIDIA DGX B200 data sheet, an eighth: 1,440 GB and 64 TB/s of memory, NVLink 14.4 TB/s in both directions
        # together, ConnectX-7 of 400 Gb/s. NVIDIA HGX platform page, HGX B200: 600 TFLOP/s FP32 for eight.
        _gpu("b200", "B200 SXM, 180 GB", 75e12, 180e9, 8e12, 900e9, 50e9),
        # NVIDIA L40S data sheet: 91.6 TFLOP/s FP32, 48 GB, 864 GB/s, no NVLink, PCIe Gen4 x16 of 64 GB/s in both
        # directions together. The data sheet lists no network: 8 devices in a node and 200 Gb/s for each are
        # assumptions.
        _gpu("l40s", "L40S PCIe, 48 GB", 91.6e12, 48e9, 864e9, 32e9, 25e9),
        # Intel Xeon Platinum 8480+ (ark.intel.com): 56 cores, 2.0 GHz base, eight DDR5-4800 channels of 38.4 GB/s.
        # Intel 64 optimization manual, per core and cycle: 2,048 bfloat16 operations with AMX, 64 float32 ones with two
        # AVX-512 FMA units. Memory size: a 64 GB module per channel. Ranks communicate through memory; 100 Gb/s
        # Ethernet.
        Machine(
            "cpu",
            "one Xeon Platinum 8480+ of 56 cores, 512 GB, shared by the ranks",
            CPU_CORES * 2.0e9 * 2048,
            CPU_CORES * 2.0e9 * 64,
            512e9,
            8 * 38.4e9,
            8 * 38.4e9,
            12.5e9,
            1,
            is_cuda=False,
            shared_by_ranks=True,
            host_bandwidth=8 * 38.4e9 / 2,  # a copy reads and writes
        ),
    )
}

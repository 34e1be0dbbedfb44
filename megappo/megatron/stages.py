"""Layers of a pipeline's chunks, as Megatron queries them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout


class StageLayers(PipelineParallelLayerLayout):
    """Megatron's own pipeline layout for a rank whose stage is given.

    Megatron-Core 0.16 queries its layout without a stage, which then reads stage and chunk from global state. Roles
    with groups of their own do not set that state.
    """

    def __init__(self, chunk_layers: Sequence[int], stages: int, stage: int) -> None:
        """`chunk_layers`: layers of each chunk, in the order in which a token passes the chunks."""
        rows = [["decoder"] * count for count in chunk_layers]
        super().__init__([["embedding", *rows[0]], *rows[1:-1], [*rows[-1], "loss"]], stages)
        self._stage = stage

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Layers of a chunk, by default of this rank's first."""
        stage = self._stage if pp_rank is None else pp_rank
        return int(self.layout[stage][vp_stage or 0].count(layer_type))

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Layers before a chunk, by default before this rank's first."""
        stage, chunk = self._stage if pp_rank is None else pp_rank, vp_stage or 0
        return sum(
            self.layout[s][c].count(layer_type)
            for c in range(chunk + 1)
            for s in range(self.pipeline_model_parallel_size if c < chunk else stage)
        )

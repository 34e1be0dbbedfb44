"""Layers of the chunks of a pipeline, in the form that Megatron queries."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout


class StageLayers(PipelineParallelLayerLayout):
    """Pipeline layout of Megatron for a rank with an explicit stage.

    Megatron-Core 0.16 queries its layout without a stage. The layout then reads stage and chunk from global state,
    which roles with separate process groups do not set.
    """

    def __init__(self, chunk_layers: Sequence[int], stages: int, stage: int) -> None:
        """Create the layout. `chunk_layers` is the number of layers of each chunk, in the order of the forward pass."""
        rows = [["decoder"] * count for count in chunk_layers]
        super().__init__([["embedding", *rows[0]], *rows[1:-1], [*rows[-1], "loss"]], stages)
        self._stage = stage

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Return the number of layers of a chunk. The default is the first chunk of this rank."""
        stage = self._stage if pp_rank is None else pp_rank
        return int(self.layout[stage][vp_stage or 0].count(layer_type))

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Return the number of layers before a chunk. The default is the first chunk of this rank."""
        stage, chunk = self._stage if pp_rank is None else pp_rank, vp_stage or 0
        return sum(
            self.layout[s][c].count(layer_type)
            for c in range(chunk + 1)
            for s in range(self.pipeline_model_parallel_size if c < chunk else stage)
        )

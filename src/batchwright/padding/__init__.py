"""How sequences of different lengths share a rectangle: padding, buckets, packing. Decides shapes; needs only numpy."""

from batchwright.padding.buckets import Bucket, BucketedPadding, fit_boundaries
from batchwright.padding.packing import PackedBatch, PackedRow, PackedSequences
from batchwright.padding.rectangle import PaddingConfig, PaddingOptimizer

__all__ = [
    "Bucket",
    "BucketedPadding",
    "PackedBatch",
    "PackedRow",
    "PackedSequences",
    "PaddingConfig",
    "PaddingOptimizer",
    "fit_boundaries",
]

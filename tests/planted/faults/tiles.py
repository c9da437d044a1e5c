"""Faults of tiles, in Triton kernels that run in the interpreter."""

from tiled_attention import tiled

# A masked load of v leaves the rows past the keys undefined, and 0 times NaN is NaN.
RaggedValues = tiled("no other")
# Rows past M have no delta, and their P is not masked: 0 rows of q times NaN reach dk.
RaggedDelta = tiled("delta", backward=True, backward_reads=("out", "lse"), max_seqlen=64)
# The backward recomputes P without the causal mask.
BackwardWithoutMask = tiled(
    "mask", backward=True, backward_reads=("out", "lse"), masks=("causal",), max_seqlen=64
)
# k is read with the strides of the rows and columns of q.
StridesOfQ = tiled("strides of q", dv_ne_d=False)
# The offset of a key is a product in 32 bits.
OffsetsIn32Bits = tiled("offsets", dtypes=("fp16",))
# The tile that holds the diagonal is not masked.
DiagonalTile = tiled("diagonal tile", masks=("causal",))
# The accumulator passes through fp16 after each tile.
AccumulatorIn16Bits = tiled("accumulator", dtypes=("fp16", "fp32"))
# The softmax sum is not rescaled where the maximum of a row rises in a later tile.
SumNotRescaled = tiled("no rescale")

"""Context parallelism: one long sequence on several GPUs, on `torch.distributed`.

A piece of a sequence acts on the recurrent state as an affine map, S -> M S + X, and affine maps
compose. So each rank computes the map of its piece, one collective exchanges the maps, and each
rank knows the state with which its piece begins. What is sent does not depend on the length of the
sequence. Chapter 16 of the book derives it.

    context_parallel_kda   `chunk_kda` for a sequence that is split over the ranks of a group
    split_sequence         this rank's piece of a tensor
    tokens_before          the last tokens of the pieces before this one
    convolution_state      the same, as a short convolution's state
    count_bytes            what a rank sends, counted at each call of a collective
"""

from .. import kernels
from .collectives import BytesSent, count_bytes
from .halo import convolution_state, tokens_before
from .kda import context_parallel_kda
from .pieces import Piece, find_piece, split_lengths, split_sequence

if kernels._missing is None:  # with Triton: lets `kda_edu.chunk_kda` take `cp_group`
    from ..kernels import chunk

    chunk.context_parallel = context_parallel_kda

__all__ = [
    "BytesSent",
    "Piece",
    "context_parallel_kda",
    "convolution_state",
    "count_bytes",
    "find_piece",
    "split_lengths",
    "split_sequence",
    "tokens_before",
]

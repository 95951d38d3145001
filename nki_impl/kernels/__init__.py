"""Ring attention in NKI: forward, backward and unpermute kernels with the interfaces of AWS's NKI library.

Reading order: :mod:`tiles` (sizes, loads, transposes), :mod:`masks`, :mod:`merge`,
:mod:`block_forward` and :mod:`block_backward`, :mod:`ring` (buffers and transfers), :mod:`bounds`,
:mod:`ring_forward` with :mod:`query_rows`, :mod:`ring_backward` with :mod:`row_data`, and :mod:`unpermute`.
:mod:`checks` checks the arguments. All kernels are written in the NKI 0.6 subset of Python and import NKI only through
:mod:`nki_impl.lang`, so the same source runs on the simulator and on Trainium.

Every rounding point
====================

T is the dtype of the inputs: bfloat16, float16 or float32. All arithmetic is in float32, rounded to nearest,
ties to even. Values are rounded to T only where they are stored in T or become operands of matrix products. Matrix
products accumulate in float32; the order within one accumulation is up to the machine. s is the length on one rank, W
the number of ranks in a ring.

Forward, on the rank at ring position r, for one query row:

- F1  q, k, v have dtype T. z_j = sum over D of q k_j, accumulated in float32.
- F2  Without a causal mask s_j = scale * z_j, rounded to float32; the scale itself is first rounded to
  float32. With a causal mask the scale is 1, and s_j = z_j, unless ``causal_scale`` is "apply".
- F3  The keys of one rank are computed in stretches of 2048 (a single stretch if s <= 2048); a block here is one
  stretch. m = max of the visible s_j of the block, computed before any exponential, so nothing is rescaled inside a
  block.
- F4  e_j = exp(s_j - m): the difference and the exponential are rounded to float32. l = sum of e_j in
  float32. A masked key has e_j = 0 exactly.
- F5  P_j = e_j rounded to T. o = sum of P_j v_j over the block, in one float32 accumulation (128 keys
  at a time); o leaves the block unnormalised, in float32.
- F6  Merge, in float32: m = max(m_a, m_b); c_a = exp(m_a - m), c_b = exp(m_b - m); l = c_a l_a + c_b l_b;
  o = c_a o_a + c_b o_b. Every product and every sum is rounded once. The result of the first block becomes the running
  state unchanged. Each next block is merged into the running state, in the order of the key owners r, r-1, ...,
  r-W+1 (mod W), and for one owner by ascending stretches. (m, l, o) is stored between steps in float32. A block
  without a visible key has l = 0 and o = 0, and the weight c = 0 if the other side of the merge has a visible key.
- F7  o = o * (1 / l): the reciprocal is rounded to float32, the product to T. This is the only rounding of o to T.
- F8  lse = m + log(l): the logarithm and the sum are rounded to float32, then to lse_dtype.

Backward, from q, k, v, dy, o and lse as given:

- B1  With mixed_precision, lse is used in float32 as given (exact for any narrower dtype), and
  dy_o_sum = sum over D of dy * o: products rounded to float32 (exact for 16-bit T), accumulated in
  float32. Without mixed_precision, lse is rounded to T, each product dy * o to T, and their float32 sum to T.
- B2  s_j = scale * z_j rounded to float32, with z_j and scale as in F1 and F2, also with a causal mask.
- B3  p_j = exp(s_j - lse): difference and exponential rounded to float32. P_j = p_j rounded to T.
- B4  dP_j = sum over D of dy v_j, in float32. dS_j = p_j * (dP_j - dy_o_sum), with p_j in float32 as in B3:
  difference and product are rounded to float32, the result to T.
- B5  Tiles are 128 query rows by 512 keys; the last tile of a stretch can be narrower. In some steps no row attends
  to a key with a larger index than its own (step 0, and all steps of striped input). In these steps both passes leave
  out the tiles above the diagonal, which would add 0.
- B6  dv of a key: the sum of P dy over the query rows of a stretch of 2048, in one float32 accumulation (128 rows at a
  time), is added to the carried dv. dk of a key: the sum of dS q over the same rows is multiplied by the scale, rounded
  to float32, and added to the carried dk. The carried dk and dv are float32. Without mixed_precision they have dtype T,
  and each addition is rounded to T.
- B7  Order of the additions in B6: query owners r, r-1, ..., r-W+1 (mod W), where r is the key's owner; for one
  owner by query head of the group, then by ascending stretch.
- B8  dq of a row at one step starts at 0. For each key tile, in ascending order, the sum of dS k over the 512 keys of
  the tile is computed in one float32 accumulation, multiplied by the scale, rounded to float32, and added to dq in
  float32.
- B9  The final dq of a row of owner r is the sum of dq of B8 for the key owners r, r+1, ..., r+W-1 (mod W), added
  in this order in float32, one addition per hop.
- B10 dq, dk, dv are float32.

A row without visible keys has o = 0 and lse = -inf, or 0 with ``zero_lse``. A row whose given lse is -inf contributes to
no gradient. If a length is not a multiple of 128, the last tile is padded on chip: queries, dY, P and dS with zeros,
which add nothing. The lse of the padding is 0, and the backward pass does not read it.
The magnitude of a score must be at most half of the largest float32, because larger ones mark masked keys.
Positions are exact up to 2^24 tokens in a ring.

What travels
============

In the forward pass, k and v with Hkv heads make W - 1 hops. In the backward pass, q, dy and row data (lse and dy_o_sum
of each row) make W - 1 hops. dq makes W hops, so that it ends at its owner. Each permute is issued before the
computation of its step. Before a backward pass with bounds, each rank sends the bounds of its rows to the other ranks.

With LNC 2 a rank has two cores, which share the operands of collectives. In the forward pass each core computes whole
heads; if the number of heads is odd, the last head is split between the cores. In the backward pass each core computes
items; an item is one key head with its query heads. A core without an item repeats item 0, so that both cores issue the
same collectives.
"""

from nki_impl.kernels.ring_backward import ring_attention_spmd_bwd
from nki_impl.kernels.ring_forward import ring_attention_spmd_fwd
from nki_impl.kernels.unpermute import ring_attention_unpermute

__all__ = ["ring_attention_spmd_bwd", "ring_attention_spmd_fwd", "ring_attention_unpermute"]

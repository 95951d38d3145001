"""Ring attention in NKI: forward, backward, and the unpermute, after the interfaces of AWS's NKI library.

Reading order: :mod:`tiles` (sizes, loads, transposes), :mod:`masks`, :mod:`merge`,
:mod:`block_forward` beside :mod:`block_backward`, :mod:`ring` (what travels, and how),
:mod:`ring_forward` beside :mod:`ring_backward` with :mod:`row_data`, :mod:`unpermute`; :mod:`checks`
is what they refuse. Everything is in the NKI 0.6 subset of Python and imports only
:mod:`nki_impl.lang`, so the same source runs on the simulator and on Trainium.

Every rounding point
====================
T is the dtype of the inputs: bfloat16, float16 or float32. All arithmetic is in float32, to nearest,
ties to even; T is the type of what is stored and of the operands of matrix products, never a stop
on the way between two other types. Matrix products accumulate in float32; in which order within one
accumulation is the machine's business. s is the length on one rank, W the number of ranks in a ring.

Forward, on the rank at ring position r, for one query row:

- F1  q, k, v are of T. z_j = sum over D of q k_j, accumulated in float32.
- F2  Without a causal mask s_j = scale * z_j, rounded to float32; the scale itself is rounded to
  float32 before. Under a causal mask the scale is 1, s_j = z_j.
- F3  A block is the keys of one rank, in stretches of 2048 where s is longer: each stretch is then a
  block. m = max of the visible s_j of the block, taken before any exponential: nothing is rescaled
  inside a block.
- F4  e_j = exp(s_j - m): the difference and the exponential are rounded to float32. l = sum of e_j in
  float32, from the e_j as they are here. A hidden key has e_j = 0 exactly.
- F5  P_j = e_j rounded to T. o = sum of P_j v_j over the block, in one float32 accumulation (128 keys
  at a time); o leaves the block unnormalised, in float32.
- F6  Merge, in float32: m = max(m_a, m_b); c = exp(m_a - m), exp(m_b - m); l = c_a l_a + c_b l_b;
  o = c_a o_a + c_b o_b: every product and every sum is rounded once. The first block is taken as it
  is. Blocks are merged one after the other, in the order of the key owners r, r-1, ..., r-W+1 (mod W),
  within an owner by ascending stretches. (m, l, o) waits between steps in float32. A block without a
  visible key has l = 0 and o = 0, and c = 0 beside any other.
- F7  o = o * (1 / l): the reciprocal is rounded to float32, the product to T: the one rounding of o.
- F8  lse = m + log(l): the logarithm and the sum are rounded to float32, then to lse_dtype.

Backward, from q, k, v, dy, o and lse as given:

- B1  With mixed_precision lse is used in float32 as given (exact from any narrower dtype), and
  dy_o_sum = sum over D of dy * o: products rounded to float32 (exact for 16-bit T), accumulated in
  float32. Without, lse is rounded to T, each product dy * o to T, and their float32 sum to T.
- B2  s_j = scale * z_j rounded to float32, z_j and scale as in F1 and F2; also under a causal mask.
- B3  p_j = exp(s_j - lse): difference and exponential rounded to float32. P_j = p_j rounded to T.
- B4  dP_j = sum over D of dy v_j, in float32. dS_j = p_j * (dP_j - dy_o_sum), from the p_j before the
  rounding to T: difference and product in float32, the result rounded to T.
- B5  Tiles are 128 query rows by 512 keys (the last of a stretch narrower). Where no key of a row is
  beyond its own index (step 0, and all steps of striped input) tiles above the diagonal are left out,
  in the forward too: what they would add is 0.
- B6  dv of a key: sum of P dy over the query rows of a stretch of 2048, in one float32 accumulation
  (128 rows at a time); then added to the carried dv. dk: the same of dS q, the sum times scale; the
  product is rounded to float32, then the sum with the carried dk. The carried dk and dv are float32,
  or T without mixed_precision: then each such addition is rounded to T.
- B7  Order of these additions: query owners r, r-1, ..., r-W+1 (mod W), r being the key's owner; within
  an owner by query head of the group, then by ascending stretch.
- B8  dq of a row in one block: sum of dS k over the 512 keys of a key tile, in one float32 accumulation;
  times scale, rounded to float32; added in float32 to the dq of the block, by ascending key tiles, from 0.
- B9  dq of a row of owner r: dq of the blocks of the key owners r, r+1, ..., r+W-1 (mod W), added up in
  this order in float32, one addition per hop.
- B10 dq, dk, dv are float32.

Rows that see no key: o = 0, lse = -inf, and no gradient goes anywhere. A row whose given lse is -inf
sends no gradient. Scores up to half of the largest float32 in size are distinguished from hidden keys.
Positions are exact up to 2^24 tokens in a ring.

What travels
============
Forward: k and v, W - 1 hops, Hkv heads of them. Backward: q, dy and row data W - 1 hops; dq W hops, of
which W - 1 add on the way. Permutes are issued before the computation of their step. Operands are
shared by both cores of a rank (LNC 2). In the forward these take whole heads and halve an odd one; in
the backward they take items of one key head and its query heads, and the core without one repeats
item 0, so that both issue the same collectives.
"""

from nki_impl.kernels.ring_backward import ring_attention_spmd_bwd
from nki_impl.kernels.ring_forward import ring_attention_spmd_fwd
from nki_impl.kernels.unpermute import ring_attention_unpermute

__all__ = ["ring_attention_spmd_bwd", "ring_attention_spmd_fwd", "ring_attention_unpermute"]

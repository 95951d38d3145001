"""README.md of a folder of calls: for whoever runs them on another machine, without ringspec."""

README = """\
# Calls of ring attention

Each folder below `calls/` that holds a `call.json` is one call. Run your program on its inputs, and put
the result beside them:

    calls/<name>/call.json             what is asked
    calls/<name>/inputs.safetensors    the inputs
    calls/<name>/result.safetensors    yours: o, lse, dq, dk, dv, dsinks, dbias, as far as asked for
    calls/<name>/refused.txt           yours instead, if your program does not take the call: why
    versions.json                      yours, if you like: {"versions": {"my_kernel": "1.2.0"}}, for the report

Then `ringspec check dir:THIS_FOLDER` compares the results with the truth, here or wherever the folder is
taken, for the profile that it was written with. The inputs must not change, but may be left out of a copy. A call
without a result is a failure ("missing"), and so is a refused one; calls that the folder's
claims do not cover were not written. `ringspec cases write --claims FILE` writes a folder for what one
program claims. No expected value is in this folder.

## call.json

- `operation`: `ring`; `block` (one worker's queries against one block of keys); `merge` (of partial results)
- `passes`: `["forward"]`: o and lse are asked for; `["forward", "backward"]`: o, lse, dq, dk, dv, and
  dsinks, dbias where sinks or a bias are given; `["backward"]`: the gradients alone, o and lse are given
  (of a block: lse and delta)
- `workers`: W; `layout`, `circulation` (`kv`, `q`, `gather`), `direction` (1: worker r sends to r + 1)
- `terms`: `scale` (but for merge), and where they are not the default `causal`, `window` [left, right],
  `softcap`, `dropout_p`, `dropout_seed`, `q_offset`, `cu_seqlens`, `cu_seqlens_k`
- `formats`: of q, k, v, dy (`inputs`), of o and gradients (`outputs`), of lse and dsinks (`statistics`)
- `inputs`, `result`: names of the two files, relative to the folder of the call

## Tensors

Both files are safetensors: 8 bytes with the length of the header (little endian), the header (JSON:
dtype, shape and data_offsets of each tensor; offsets count from its end), and the data, little endian, in
C order, without gaps. The first axis of every tensor is the worker:

| name | shape |
| --- | --- |
| `q`, `dy`, `o`, `dq` | [W, B, H, n, d] |
| `k`, `v`, `dk`, `dv` | [W, B, Hkv, n, d] |
| `lse`, `dlse`, `delta` | [W, B, H, n] |
| `index_q`, `index_k` | [W, n]: token in each slot, -1 for padding |
| `position_q`, `position_k` | [W, 1 or B, n]: their positions |
| `segments_q`, `segments_k`, `bound_min`, `bound_max` | [W, 1 or B, n] |
| `bias`, `mask`, `keep`, `dbias` | [W, 1 or B, 1 or H, n or 1, Sk or 1]: own rows, global keys |
| `sinks`, `dsinks` | [W, H, N] |
| `parts_o`, `parts_lse` | [1, N, B, H, S, d], [1, N, B, H, S]; o and lse then have W = 1 |

dsinks and dbias are each worker's sums over its own query rows. Padding slots are not compared. lse is
natural, and -inf in rows that see no key, unless the claims in `index.json` say otherwise; they also say
in which order of axes q, k, v, dy, o and the gradients are, if not B H n d.
"""

"""The README.md in a folder of calls, for a reader without ringspec."""

README = """\
# Calls of ring attention

Each folder below `calls/` with a `call.json` is one call. Run your program on its inputs, and write the result to the
same folder:

    calls/<name>/call.json             the call
    calls/<name>/inputs.safetensors    its inputs
    calls/<name>/result.safetensors    you write: o, lse, dq, dk, dv, dsinks, dbias, as far as the call requests them
    calls/<name>/refused.txt           you write instead, if your program does not support the call: the reason
    versions.json                      you may write: {"versions": {"my_kernel": "1.2.0"}}, for the report

Then `ringspec check dir:THIS_FOLDER` compares the results with the truth, on any machine. Do not change the inputs; a
copy of the folder may omit them. A call without a result is a failure ("missing"), and so is a refused call. The folder
has those calls of one profile that the claims in `index.json` cover. To write a folder for the claims of your program,
use `ringspec cases write --claims FILE`. The folder contains no expected values.

## call.json

- `operation`: `ring`; `block` (one worker's queries against one block of keys); `merge` (of partial results)
- `passes`: `["forward"]`: return o and lse; `["forward", "backward"]`: return o, lse, dq, dk, dv, and dsinks or dbias
  if there are sinks or a bias; `["backward"]`: return the gradients from the given o and lse (for a block: lse and delta)
- `workers`: W; `layout`, `circulation` (`kv`, `q`, `gather`), `direction` (1: worker r sends to r + 1)
- `terms`: `scale` (except for merge), and those of `causal`, `window` [left, right], `softcap`, `dropout_p`,
  `dropout_seed`, `q_offset`, `cu_seqlens`, `cu_seqlens_k` that are not the default
- `formats`: of q, k, v, dy (`inputs`), of o and the gradients (`outputs`), of lse and dsinks (`statistics`)
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
| `bias`, `mask`, `keep`, `dbias` | [W, 1 or B, 1 or H, n or 1, Sk or 1]: the worker's rows, all keys |
| `sinks`, `dsinks` | [W, H, N] |
| `parts_o`, `parts_lse` | [1, N, B, H, S, d], [1, N, B, H, S]; o and lse then have W = 1 |

dsinks and dbias of a worker are sums over its own query rows. Padding slots are not compared. The claims in `index.json`
give the conventions. By default lse is natural and -inf in rows that see no key, and the axes of q, k, v, dy, o and the
gradients are in the order B H n d.
"""

"""The other machine: fill a folder of calls by the example program. `fill.py NAIVE_RING FOLDER`

Calls that the example does not take get a refused.txt. ringspec cannot be imported here.
"""

import importlib.util
import io
import json
import sys
from pathlib import Path

sys.modules["ringspec"] = None  # an import of it fails
sys.stdin = io.StringIO("")  # the example's loop finds nothing
spec = importlib.util.spec_from_file_location("naive_ring", sys.argv[1])
naive = importlib.util.module_from_spec(spec)
spec.loader.exec_module(naive)

formats = set(naive.CLAIMS["formats"])

for path in sorted(Path(sys.argv[2]).glob("calls/**/call.json")):
    call, folder = json.loads(path.read_text()), path.parent
    others = set(call["terms"]) - {"scale", "causal"} | set(call["formats"].values()) - formats
    if call["operation"] != "ring" or others:
        (folder / "refused.txt").write_text(f"no {call['operation']} with {sorted(others)}\n")
        continue
    result = naive.ring(naive.read(folder / call["inputs"]), **call["terms"])
    naive.write(folder / call["result"], result, call["formats"]["outputs"])

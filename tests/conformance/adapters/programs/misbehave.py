"""The example program gone wrong in one way: `misbehave.py NAIVE_RING MODE [CALL]`, from the CALL-th
call on (the first is 0). Imports nothing of ringspec."""

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np


def example(path):
    """naive_ring.py as a module; its loop over stdin finds nothing."""
    real, sys.stdin = sys.stdin, io.StringIO("")
    spec = importlib.util.spec_from_file_location("naive_ring", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.stdin = real
    return module


NAIVE, MODE = example(sys.argv[1]), sys.argv[2]
FIRST = int(sys.argv[3]) if len(sys.argv) > 3 else 0
ANSWERS = {
    "refuse": {"kind": "refused", "reason": "no zigzag here"},
    "fail": {"kind": "error", "message": "out of device memory"},
    "other kind": {"kind": "done"},
    "other id": {"kind": "result", "id": "another"},
    "unknown key": {"kind": "result", "seconds": 3},
    "reason of no text": {"kind": "refused", "reason": 5},
}


def say(message):
    print(json.dumps(message), flush=True)


def before(mode):
    """What goes wrong before anything is computed."""
    if mode == "segfault":
        print("about to dereference null", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    elif mode == "exit 3":
        sys.exit(3)
    elif mode in ("hang", "hang with a child"):
        if mode == "hang with a child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            print("child", child.pid, file=sys.stderr)
        print("waiting for a collective", file=sys.stderr, flush=True)
        time.sleep(60)
    elif mode == "exit with a child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print("child", child.pid, file=sys.stderr, flush=True)
        os._exit(4)
    elif mode == "print":
        print("loading kernel for 4 workers", flush=True)
    elif mode == "number":
        print("17", flush=True)
    elif mode == "endless line":
        while True:
            os.write(1, b"x" * 65536)
    elif mode == "close stdout":
        os.close(1)
        time.sleep(60)
    elif mode == "loud":
        for n in range(20000):
            print(f"line {n} of a log", file=sys.stderr)
        sys.stderr.flush()


def changed(mode, result):
    """What goes wrong with values."""
    if mode == "NaN":
        result["dk"][-1, 0, 0, 1, 2] = np.nan
    elif mode == "wrong order":
        result["o"] = np.roll(result["o"], 1, axis=0)
    elif mode == "one worker less":
        result["dv"] = result["dv"][:-1]
    elif mode == "one number":
        result["lse"] = np.float32(0.0)
    elif mode == "no dq":
        del result["dq"]
    elif mode == "unknown tensor":
        result["dscale"] = result["lse"]
    return result


def instead(mode, path):
    """What goes wrong with the file."""
    if mode == "no file":
        os.unlink(path)
    elif mode == "truncated":
        os.truncate(path, os.path.getsize(path) - 5)
    elif mode == "empty file":
        os.truncate(path, 0)
    elif mode == "huge file":
        os.truncate(path, 1 << 40)
    elif mode == "link":
        os.rename(path, path + ".real")
        os.symlink(path + ".real", path)
    elif mode == "pipe":
        os.unlink(path)
        os.mkfifo(path)
    elif mode == "folder":
        os.unlink(path)
        os.mkdir(path)


def as_float16(path):
    """o in float16, in a file that is otherwise as it should be."""
    data = open(path, "rb").read()
    start = 8 + int.from_bytes(data[:8], "little")
    header, tensors = json.loads(data[8:start]), NAIVE.read(path)
    body = b""
    for name, entry in header.items():
        x = tensors[name].astype("<f2" if name == "o" else "<f4")
        entry |= {"dtype": "F16" if name == "o" else "F32"}
        entry["data_offsets"] = [len(body), len(body) + x.nbytes]
        body += x.tobytes()
    text = json.dumps(header).encode()
    open(path, "wb").write(len(text).to_bytes(8, "little") + text + body)


def answer(call, mode):
    before(mode)
    if mode in ANSWERS:
        say(ANSWERS[mode])
        return
    result = changed(mode, NAIVE.ring(NAIVE.read(call["inputs"]), **call["terms"]))
    NAIVE.write(call["result"], result, call["formats"]["outputs"])
    instead(mode, call["result"])
    if mode == "mutate":
        data = bytearray(open(call["inputs"], "rb").read())
        data[-1] ^= 1
        open(call["inputs"], "wb").write(data)
    if mode == "float16":
        as_float16(call["result"])
    print(os.getpid(), os.path.dirname(call["inputs"]), file=sys.stderr, flush=True)
    if mode == "print after":
        os.write(1, b'{"kind":"result"}\nall done\n')
        return
    say({"kind": "result", "id": call["id"]})
    if mode == "once":
        sys.exit(5)


def main():
    count = 0
    for line in sys.stdin:
        message = json.loads(line)
        if message["kind"] == "hello":
            say({"kind": "hello", "name": f"naive, {MODE}", "capabilities": NAIVE.CLAIMS})
            continue
        answer(message, MODE if count >= FIRST else "")
        count += 1
    print("stdin is closed", file=sys.stderr, flush=True)


main()

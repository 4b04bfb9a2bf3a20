"""dm-reverb's insert of rows, for :mod:`benchmarks.distributed`; it imports nothing of gfn_rb.

Run by a Python that has dm-reverb, which needs other versions of packages than gfn_rb's extras:
``pip install "dm-reverb[tensorflow]"`` in an environment of its own. A line ``BYTES`` on the
standard input is answered by the seconds of an insert of 64 rows of so many bytes, until the server
has acknowledged it. The server is a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import time

ROWS, PAYLOADS, KEPT = 64, 12, 20


def serve() -> None:
    """Serve a table, print its port, and end with the standard input."""
    import reverb

    table = reverb.Table(
        name="rows",
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=KEPT,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    server = reverb.Server([table])
    print(server.port, flush=True)
    sys.stdin.read()
    server.stop()


def main() -> None:
    """Insert rows as the standard input says."""
    import numpy as np
    import reverb

    command = [sys.executable, __file__, "serve"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdout is not None
        client = reverb.Client(f"localhost:{int(server.stdout.readline())}")
        draw, payloads, turn = np.random.default_rng(0), {}, 0
        print("ready", flush=True)
        for line in sys.stdin:
            nbytes, turn = int(line), turn + 1
            if nbytes not in payloads:
                shape = ROWS, nbytes // ROWS
                payloads = {nbytes: [draw.integers(0, 255, shape, np.uint8)
                                     for _ in range(PAYLOADS)]}  # fmt: skip
            start = time.perf_counter()
            client.insert([payloads[nbytes][turn % PAYLOADS]], {"rows": 1.0})
            print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()

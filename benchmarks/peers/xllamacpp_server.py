"""llama.cpp's server out of the package `xllamacpp`, with the options of `llama-server` that the benchmarks give it.

Run by the Python that has the package: PYTHON xllamacpp_server.py --model FILE --port PORT. Imports nothing of ours.
"""

from __future__ import annotations

import argparse
import threading

import xllamacpp  # type: ignore[import-not-found]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", required=True)
    for name in ("--port", "--threads", "--threads-batch", "--parallel", "--ctx-size"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--spec-type", default="none")
    given = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = given.model
    params.hostnames, params.port = [given.host], given.port
    params.cpuparams.n_threads, params.cpuparams_batch.n_threads = given.threads, given.threads_batch
    params.n_parallel, params.n_ctx = given.parallel, given.ctx_size
    kind = f"COMMON_SPECULATIVE_TYPE_{given.spec_type.replace('-', '_').upper()}"
    params.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
    server = xllamacpp.Server(params)
    print(f"serving on {server.listening_address}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()

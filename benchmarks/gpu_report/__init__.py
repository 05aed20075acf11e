"""Everything that a GPU can show, in one run: `make gpu-report`, or `python -m benchmarks.gpu_report --help`.

Sections, in this order: correctness of every kernel, the row-invariance certificate, the exact-mode grid, timings.
`report` keeps the books (budget, failures, table); every other module here is one section.
"""

"""One script per question. Rows go to benchmarks/results/ with machine, commit, versions and quantiles."""

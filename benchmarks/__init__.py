"""One script per benchmark. Rows go to benchmarks/results/ with machine, commit, versions and quantiles."""
